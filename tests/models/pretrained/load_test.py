"""Files of a small Llama become the shards that `init_from` makes; bad files are refused."""

import importlib
import json
import os
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from manualpar import Batch, abstract_mesh, fsdp, make_mesh
from manualpar.models import Split
from manualpar.models.pretrained import Rule, load, load_hf
from tests.models.pretrained.llama import CONFIG, llama, program_of, tensors_of, write
from tests.shown_bars import record_bars

# The package exports a function of this name.
load_module = importlib.import_module("manualpar.models.pretrained.load")


@pytest.fixture(scope="module")
def program(made):
    """A program of its model on eight devices."""
    return program_of(llama(made[0]), make_mesh({"data": 8}))


def same_bits(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), path
        np.testing.assert_array_equal(x, y, err_msg=str(path))


def test_the_state_is_that_of_init_from_the_same_parameters(made, monkeypatch):
    directory, params = made
    bars = record_bars(monkeypatch, load_module)
    mesh = make_mesh({"data": 4, "model": 2})
    # 30 tokens in 32 rows; heads are split in two, and features of a head over what divides them.
    model = llama(directory, split=Split("model"), vocab_multiple=8)
    program = program_of(model, mesh, pad=True)
    padded = dict(params)
    padded["embedding"] = np.pad(params["embedding"], ((0, 2), (0, 0)))
    padded["head"] = np.pad(params["head"], ((0, 0), (0, 2)))
    loaded = load(program, directory, jax.random.key(5))
    same_bits(loaded.state, program.init_from(padded, jax.random.key(5)))
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    # What several devices hold is read once.
    assert loaded.bytes_read == total
    ((work, size, shown),) = bars
    assert (work, size, max(shown)) == ("reading", total, total)
    assert sorted(shown) == shown
    assert len(shown) >= loaded.tensors
    assert loaded.tensors == 30


def test_every_dim_can_be_split_wherever_it_is_merged(made, program):
    """Each part of each parameter, whatever its bounds, is that part of the parameter."""
    from manualpar.core.program.state_arrays import variable_leaves
    from manualpar.models.pretrained.slices import ShardReader
    from manualpar.models.pretrained.tensor_sources import find_sources

    directory, params = made
    sources = find_sources(program, directory)
    flat = flatten_dict(params, sep="/")
    for leaf in variable_leaves(program):
        whole = np.asarray(flat[leaf.name.removeprefix("params/")])
        halves = [((0, size // 2), (size // 2, size)) for size in whole.shape]
        for dim, of_dim in enumerate(halves):
            for half in of_dim:
                bounds = tuple(half if i == dim else (0, n) for i, n in enumerate(whole.shape))
                reader = ShardReader(sources.files)
                (part,) = reader._place(leaf, bounds, {bounds: jax.devices()[:1]}, sources)
                np.testing.assert_array_equal(part, whole[tuple(slice(*b) for b in bounds)])
                assert reader.bytes_read == part.nbytes


def test_a_model_of_ones_own_is_named_parameter_by_parameter(tmp_path):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return nn.Dense(16, name="encoder")(x)

    def loss_fn(params, apply_fn, batch, rng):
        loss = apply_fn({"params": params}, batch.inputs) ** 2
        return loss.mean(), {"loss": (loss.sum(), loss.size)}

    rows = np.arange(32, dtype=jnp.bfloat16).reshape(16, 2)
    save_file({"w": rows, "b": np.ones(16, np.float16)}, tmp_path / "model.safetensors")
    batch = Batch(jnp.zeros((8, 2)), jnp.zeros(8))
    options = {"mesh": make_mesh({"data": 8}), "batch": batch, "min_weight_size": 1}
    program = fsdp(Net(), optax.sgd(0.1), loss_fn, **options)
    names = {"encoder/kernel": Rule("w", "i o -> o i"), "encoder/bias": "b"}
    state = load_hf(program, tmp_path, names=names)
    kernel = state.params["encoder"]["kernel"]
    assert kernel.dtype == jnp.float32
    assert not kernel.is_fully_replicated
    np.testing.assert_array_equal(kernel, rows.T.astype(np.float32))
    with pytest.raises(ValueError, match=r"b is float16\[16\], expected no such tensor"):
        load_hf(
            program, tmp_path, names={"encoder/kernel": names["encoder/kernel"]}, missing="init"
        )
    with pytest.raises(ValueError, match="names lacks encoder/bias, expected every"):
        load_hf(program, tmp_path, names={"encoder/kernel": names["encoder/kernel"]})
    with pytest.raises(ValueError, match="names has decoder, expected paths"):
        load_hf(program, tmp_path, names={"decoder": "w"})
    with pytest.raises(ValueError, match=r"dims 'i o -> o', expected 2 names, an arrow"):
        load_hf(program, tmp_path, names={"encoder/kernel": Rule("w", "i o -> o")})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match=r"is no manualpar.models.Transformer.*pass names="):
        load_hf(program, tmp_path)
    narrow = fsdp(Net(), optax.sgd(0.1), loss_fn, **options, param_dtype="bfloat16")
    save_file({"w": rows.astype(np.float32), "b": np.ones(16)}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="b from float64 to bfloat16"):
        load_hf(narrow, tmp_path, names=names)


def test_what_does_not_fit_is_refused_before_anything_is_read(made, program, tmp_path):
    directory, params = made

    def refused(match, config=CONFIG, **changes):
        tensors = {**tensors_of(params), **{k.replace("_", "."): v for k, v in changes.items()}}
        write(tmp_path, {key: x for key, x in tensors.items() if x is not None})
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=match):
            load_hf(program, tmp_path)

    refused(
        r"model\.norm\.weight is missing, of shape \[16\] for final_norm/scale",
        model_norm_weight=None,
    )
    refused(r"surplus is float32\[2\], expected no such", surplus=np.zeros(2, np.float32))
    refused(
        r"model\.norm\.weight is float32\[4\], expected the shape \[16\]",
        model_norm_weight=np.zeros(4, np.float32),
    )
    refused(r"weight is stored as I64, expected float64", model_norm_weight=np.zeros(16, np.int64))
    refused(
        r"model is not that of .*: rope_base is 5000.0, there 6000.0", CONFIG | {"rope_theta": 6e3}
    )
    with pytest.raises(ValueError, match="abstract mesh"):
        load_hf(program_of(llama(directory), abstract_mesh({"data": 8}, 8)), directory)
    with pytest.raises(ValueError, match="is no directory; expected"):
        load_hf(program, tmp_path / "none")


def test_damaged_and_dangerous_files_are_refused(made, program, tmp_path, tmp_path_factory):
    _, params = made
    index = tmp_path / "model.safetensors.index.json"

    def refused(match):
        with pytest.raises(ValueError, match=match):
            load_hf(program, tmp_path)

    refused(r"has no config\.json; expected the directory of a model")
    (tmp_path / "config.json").write_text("[")
    refused(r"config\.json is not JSON .* expected the config of a model")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refused(r"has neither model\.safetensors nor model\.safetensors\.index\.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    refused(r"has pickled weights \(pytorch_model\.bin\).*not unpickled")
    write(tmp_path, tensors_of(params))
    first = tmp_path / "model-1.safetensors"
    good, listed = first.read_bytes(), json.loads(index.read_text())
    first.write_bytes(good[:-1])
    refused(r"model-1\.safetensors is damaged or cut off")
    first.write_bytes(b"\xff" * 8 + good[8:])
    refused(r"model-1\.safetensors is damaged or cut off")
    first.unlink()
    refused(r"model-1\.safetensors is missing, but model\.safetensors\.index\.json names it")
    first.mkdir()
    refused(r"model-1\.safetensors is a folder, expected a file")
    first.rmdir()
    for path in (first, index, tmp_path / "config.json"):
        content = good if path == first else path.read_bytes()
        elsewhere = tmp_path_factory.mktemp("private") / path.name
        elsewhere.write_bytes(content)
        path.unlink(missing_ok=True)
        path.symlink_to(elsewhere)
        refused(rf"{path.name} leads to {elsewhere}, expected a file in the folder of the model")
        path.unlink()
        os.mkfifo(path)
        refused(rf"{path.name} is a FIFO, expected a file")
        path.unlink()
        path.write_bytes(content)
    for name in ("../model-1.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", 3):
        index.write_text(
            json.dumps({"weight_map": listed["weight_map"] | {"lm_head.weight": name}})
        )
        refused(
            rf"'lm_head.weight' in {re.escape(repr(name))}, expected the name of a .safetensors"
        )
    other = listed["weight_map"] | {
        "lm_head.weight": "model-2.safetensors",
        "more": "model-2.safetensors",
    }
    index.write_text(json.dumps({"weight_map": other}))
    refused(
        r"lm_head\.weight is in model-1\.safetensors, but the index says model-2\.safetensors; "
        "more is"
    )
    index.write_text(json.dumps({"weight_map": {}}))
    refused("has no weight_map")
    index.write_text(json.dumps(listed))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_hf(program, tmp_path)


def test_names_out_of_files_are_escaped_and_headers_bounded(made, program, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tensors = tensors_of(made[1])
    shown = re.escape(r"\x1b[2J\n is float32[1], expected no such")

    def refused(match, name="\x1b[2J\n"):
        save_file({**tensors, name: np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=match) as caught:
            load_hf(program, tmp_path)
        assert str(caught.value).isprintable()

    refused(shown)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"\x1b[2J": 1}))
    refused(r"config\.json: \\x1b\[2J is 1, expected no such key")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr("manualpar.models.pretrained.tensor_files.MAX_HEADER_BYTES", 1500)
    refused(r"model\.safetensors has a header of 3,\d+ bytes, expected at most 1,500: store fewer")
    write(tmp_path, tensors)
    (tmp_path / "model.safetensors").unlink()
    lengths = [
        int.from_bytes(path.read_bytes()[:8], "little") for path in tmp_path.glob("model-*s")
    ]
    monkeypatch.setattr(
        "manualpar.models.pretrained.tensor_files.MAX_HEADER_BYTES", max(lengths) + 1
    )
    with pytest.raises(ValueError, match=r"model-2\.safetensors has a header of"):
        load_hf(program, tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "\x1b[2J.bin").touch()
    with pytest.raises(ValueError, match=r"has pickled weights \(\\x1b\[2J.bin\)"):
        load_hf(program, tmp_path)


def test_of_one_file_and_an_index_the_file_is_read_as_by_transformers(made, program, tmp_path):
    directory, params = made
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tensors = tensors_of(params)
    write(tmp_path, {name: x + 1 for name, x in tensors.items()})
    save_file(tensors, tmp_path / "model.safetensors")
    both = r"has both model\.safetensors and model\.safetensors\.index\.json: only model\.safe"
    with pytest.warns(UserWarning, match=both):
        state = load_hf(program, tmp_path)
    same_bits(state.params, load_hf(program, directory).params)
