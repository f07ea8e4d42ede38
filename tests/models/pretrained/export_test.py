"""What is exported is what was loaded, bit for bit; and nothing half-written has the name."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from manualpar import lora, make_mesh
from manualpar.models import Split
from manualpar.models.pretrained import export, export_hf, load_hf
from manualpar.models.pretrained import export as tensor_writer
from tests.models.pretrained.llama import (
    CONFIG,
    assert_same_files,
    during,
    llama,
    program_of,
    read,
    tensors_of,
    write,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A directory in bfloat16, with a tokenizer, and a tensor in float32 among the others."""
    directory = tmp_path_factory.mktemp("bfloat16")
    config = CONFIG | {"torch_dtype": "bfloat16", "eos_token_id": [5, 6]}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    params = jax.jit(llama(directory).init)(jax.random.key(3), jnp.zeros((1, 8), jnp.int32))
    tensors = tensors_of(params["params"])
    tensors = {name: x.astype(jnp.bfloat16) for name, x in tensors.items()}
    tensors["model.norm.weight"] = np.linspace(0, 1, 16, dtype=np.float32)
    write(directory, tensors)
    return directory, tensors


def test_small_files_are_copied_from_the_folder_of_the_model_only(tmp_path, monkeypatch):
    folder, secret = tmp_path / "model", tmp_path / "secret"
    (folder / "additional_chat_templates").mkdir(parents=True)
    secret.write_text("private key")
    for name in ("tokenizer.json", "merges.txt", "additional_chat_templates/rag.jinja"):
        (folder / name).write_text("a" * 50)
    (folder / "other.jinja").write_text("a")
    (folder / "chat_template.jinja").symlink_to("other.jinja")
    found = export.tokenizer_files(folder, "like")
    assert found["chat_template.jinja"] == folder.resolve() / "other.jinja"
    assert len(found) == 4

    def refused(words):
        with pytest.raises(ValueError, match=f"^like: {folder}.*{words}"):
            export.tokenizer_files(folder, "like")

    for name in ("generation_config.json", "additional_chat_templates/x.jinja"):
        (folder / name).symlink_to(secret)
        refused(rf"{name} leads to {secret}, expected a file in the folder of the model")
        (folder / name).unlink()
        os.mkfifo(folder / name)
        refused(rf"{name} is a FIFO, expected a file\.")
        (folder / name).unlink()
    monkeypatch.setattr(export, "MAX_BYTES", 49)
    refused(r"tokenizer\.json has 50 bytes, expected at most 49 of such a file")
    monkeypatch.setattr(export, "MAX_BYTES", 50)
    monkeypatch.setattr(export, "MAX_COPIED_BYTES", 150)
    with pytest.raises(ValueError, match=r"^like: tokenizer\.json, .* have 151 bytes, expected at"):
        export.tokenizer_files(folder, "like")


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_what_was_loaded_is_written_again_bit_for_bit(source, tmp_path, monkeypatch):
    directory, tensors = source
    model = llama(directory, split=Split("model"), vocab_multiple=8)
    program = program_of(model, make_mesh({"data": 4, "model": 2}), pad=True)
    state = load_hf(program, directory)
    target = export_hf(program, state, tmp_path / "out", like=directory, max_shard_bytes=4000)
    assert_same_files(read(target), tensors)
    files = sorted(path.name for path in target.iterdir())
    shards = [name for name in files if name.startswith("model-")]
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert len(shards) == 4
    assert set(index["weight_map"].values()) == set(shards)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    assert {"tokenizer.json", "config.json"} < set(files)
    assert (target / "additional_chat_templates" / "rag.jinja").read_text() == "{{ messages }}"
    original = json.loads((directory / "config.json").read_text())
    assert json.loads((target / "config.json").read_text()) == original
    ends = {"eos_token_id": original["eos_token_id"], "pad_token_id": original["eos_token_id"][0]}
    assert json.loads((target / "generation_config.json").read_text()) == ends
    assert safe_open(target / shards[0], "np").__enter__().metadata() == {"format": "pt"}
    # Whoever may read what this user writes may read the weights.
    modes = {path.stat().st_mode & 0o777 for path in target.iterdir() if path.is_file()}
    assert modes == {0o666 & ~current_umask()}
    # What is written can be loaded again, and a family is found without another directory.
    at_once = during(monkeypatch, lambda: export_hf(program, state, tmp_path / "again"))
    own = {"tokenizer": directory / "tokenizer.json"}
    again = export_hf(program, load_hf(program, target), tmp_path / "again", **own)
    assert "again is being written by another process: process" in str(at_once.pop())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "out"]
    assert_same_files(read(again), {k: x.astype(np.float32) for k, x in tensors.items()})
    assert json.loads((again / "config.json").read_text())["torch_dtype"] == "float32"
    # A tokenizer without a config, whose BOS is no added token.
    own = tmp_path / "own.json"
    own.write_text('{"model": {"vocab": {"<s>": 0}}}')
    half = export_hf(
        program, load_hf(program, again), tmp_path / "half", dtype="bfloat16", tokenizer=own
    )
    assert (half / "tokenizer.json").read_bytes() == own.read_bytes()
    expected = {k: x.astype(jnp.bfloat16) for k, x in tensors.items()}
    assert_same_files(read(half), expected)

    def refused(match, to=tmp_path / "other", **options):
        with pytest.raises((ValueError, OSError), match=match):
            export_hf(program, state, to, **options)
        assert not (tmp_path / "other").exists()

    refused("out is not empty, expected a new directory", to=target)
    refused("dtype is 'int8', expected one of float64", dtype="int8")
    refused("max_shard_bytes is 0, expected at least 1", max_shard_bytes=0)
    refused(r"no model family describes this .*qwen2 has another qkv_bias", family="qwen2")
    refused("cannot be copied", tokenizer=tmp_path / "none.json")


@pytest.mark.slow
def test_adapters_are_written_as_part_of_the_kernels_beside_them(source, tmp_path, monkeypatch):
    directory, tensors = source[0], dict(source[1])
    model = lora(llama(directory, split=Split("model"), vocab_multiple=8), {"*/up": 2}, alpha=6)
    program = program_of(model, make_mesh({"data": 4, "model": 2}), pad=True)
    state = load_hf(program, directory, missing="init")
    assert_same_files(read(export_hf(program, state, tmp_path / "new", like=directory)), tensors)
    up = state.params["layers"]["mlp"]["up"]
    up["lora_b"] = jax.device_put(up["lora_b"] + 0.5, up["lora_b"].sharding)
    monkeypatch.setattr(tensor_writer, "ON_HOST", "none")  # As from an accelerator.
    found = read(export_hf(program, state, tmp_path / "out"))
    for layer, a in enumerate(np.asarray(up["lora_a"])):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        expected = tensors.pop(name).astype(np.float32) + 3 * 0.5 * a.sum(-1)[None]
        np.testing.assert_allclose(found.pop(name), expected, rtol=1e-5, atol=1e-6)
    assert_same_files(found, {k: x.astype(np.float32) for k, x in tensors.items()})


@pytest.mark.slow
def test_an_export_that_fails_or_is_refused_leaves_nothing_under_its_name(
    source, tmp_path, monkeypatch
):
    directory, tensors = source
    program = program_of(llama(directory), make_mesh({"data": 8}))
    state = load_hf(program, directory)
    for other in (None, [0, 0]):  # Process 1 sees no folder, or another one of that name.
        monkeypatch.setattr(export, "gather", lambda found, other=other: [found, other])
        with pytest.raises(ValueError, match=r"process 1 does not see .*\.out\..*\.partial, which"):
            export_hf(program, state, tmp_path / "out", like=directory)
        assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    written = []

    def fail(file, place, index, value):
        written.append(place)
        if len(written) == 3:
            raise OSError("no space left")

    monkeypatch.setattr(tensor_writer, "write_slice", fail)
    options = {"like": directory, "max_shard_bytes": 2000}
    with pytest.raises(OSError, match=r"export_hf: .*/out cannot be written: no space left"):
        export_hf(program, state, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    (tmp_path / "out").mkdir()
    assert_same_files(read(export_hf(program, state, tmp_path / "out", **options)), tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
