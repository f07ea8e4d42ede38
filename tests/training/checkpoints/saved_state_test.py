"""What is stored are plain arrays: every strategy on every mesh reads them, and other programs."""

import ast
import errno
import functools
import gc
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
import tensorstore
from absl import logging as absl_logging
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from manualpar import Batch, abstract_mesh, fsdp, make_mesh, muon_dims, zero
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.training.checkpoints import CheckpointError, Checkpoints
from manualpar.training.checkpoints.saved_state import (
    cannot_write,
    explain_failure,
    find_differences,
    leaves_to_read,
    mute,
    nest,
    state_leaves,
    unpad_whole,
)
from tests.one_device import slow_unless
from tests.paths import ROOT
from tests.training.checkpoints.worker import (
    PROGRAMS,
    Model,
    loss_fn,
    make_batch,
    make_program,
    shared_program,
    train,
)


def no_report(line):
    raise AssertionError(f"nothing to report, but: {line}")


@pytest.fixture(scope="module")
def programs():
    return {name: shared_program(name) for name in PROGRAMS}


@pytest.fixture(scope="module")
def saved(programs, tmp_path_factory):
    """A checkpoint of padded FSDP on eight devices after three steps, and what it held."""
    folder = tmp_path_factory.mktemp("saved")
    program = programs["fsdp_pad"]
    state, _ = train(program, program.init(jax.random.key(1)), range(3))
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(program, state, step=3, extra={"position": [1, {"a": None}]})
        held = whole(program, state)  # Before it is donated.
        _, losses = train(program, state, range(3, 6))
    return folder, held, losses


def whole(program, state):
    """The state as one device would hold it, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    shapes = [x.shape for x in jax.tree.leaves(program.unpadded_state)]
    arrays = {}
    for (path, x), shape in zip(leaves, shapes, strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            array = np.array(jax.random.key_data(x))
        else:
            array = np.array(x)
            rest = array.copy()
            rest[tuple(map(slice, shape))] = 0
            assert not rest.any(), "padding is zeros"
            array = array[tuple(map(slice, shape))]
        arrays[jax.tree_util.keystr(path)] = array
    return arrays


def assert_same(program, state, expected):
    arrays = whole(program, state)
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        assert array.dtype == expected[name].dtype, name
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    for x, abstract in zip(
        jax.tree.leaves(state), jax.tree.leaves(program.abstract_state), strict=True
    ):
        assert (x.shape, x.dtype) == (abstract.shape, abstract.dtype)
        assert x.sharding.is_equivalent_to(abstract.sharding, x.ndim)


@pytest.mark.parametrize("name", [slow_unless({("hsdp",)}, name) for name in PROGRAMS])
def test_every_strategy_reads_what_padded_fsdp_wrote(name, programs, saved):
    folder, held, losses = saved
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore(programs[name], report=no_report)
    assert restored.step == 3
    assert restored.extra == {"position": [1, {"a": None}]}
    assert_same(programs[name], restored.state, held)
    _, went_on = train(programs[name], restored.state, range(3, 6))
    np.testing.assert_allclose(went_on, losses, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("fsdp_pad", 2),
        pytest.param("fsdp", 1, marks=pytest.mark.slow),
        pytest.param("dp", 4, marks=pytest.mark.slow),
        pytest.param("hsdp", 4, marks=pytest.mark.slow),
        pytest.param("zero2", 2, marks=pytest.mark.slow),
        pytest.param("zero1_pad", 4, marks=pytest.mark.slow),
    ],
)
def test_other_numbers_of_devices_read_and_write_it(name, count, programs, saved, tmp_path):
    folder, held, losses = saved
    fewer = make_program(name, jax.devices()[:count])
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore(fewer, report=no_report)
    assert_same(fewer, restored.state, held)
    with Checkpoints(tmp_path, asynchronous=False) as checkpoints:
        checkpoints.save(fewer, restored.state, step=3, extra={})
        again = checkpoints.restore(programs["fsdp_pad"], report=no_report)
    assert_same(programs["fsdp_pad"], again.state, held)
    _, went_on = train(fewer, restored.state, range(3, 6))
    np.testing.assert_allclose(went_on, losses, rtol=1e-6)


def explicit_mesh():
    return jax.make_mesh((4,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:4])


def test_padding_comes_off_an_array_on_explicit_axes():
    mesh, x = explicit_mesh(), np.arange(8)
    padded = jax.device_put(x, NamedSharding(mesh, P("data")))
    whole = unpad_whole(padded, (3,), mesh)
    np.testing.assert_array_equal(whole, x[:5])
    assert whole.sharding == NamedSharding(mesh, P())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["manual", "auto", "explicit"])
@pytest.mark.parametrize("builder", [fsdp, zero])
def test_a_padded_state_on_explicit_axes_is_saved_and_read(builder, mode, tmp_path):
    program = builder(
        Model(),
        optax.adam(1e-2),
        loss_fn,
        mesh=explicit_mesh(),
        batch=make_batch(0),
        min_weight_size=1,
        pad=True,
        mode=mode,
    )
    state = program.init(jax.random.key(0))
    assert any(any(leaf.padding) for leaf in state_leaves(program))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(program, state, step=0, extra={})
        restored = checkpoints.restore(program, report=no_report)
    assert_same(program, restored.state, whole(program, state))


def bytes_read():
    """Tensorstore counts what it reads from files."""
    name = "/tensorstore/kvstore/file/bytes_read"
    (metric,) = tensorstore.experimental_collect_matching_metrics(name)
    return metric["values"][0]["value"]


@pytest.mark.slow
def test_a_device_reads_its_own_part(tmp_path):
    # One array of 8 MB, and two like it in the optimizer's state.
    model = Model(hidden_size=2**18)
    one = make_program("fsdp", jax.devices()[:1], model=model)
    eight = make_program("fsdp", jax.devices(), model=model)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(one, one.init(jax.random.key(0)), step=0, extra={})
        checkpoints.wait()
        stored = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
        before = bytes_read()
        restored = checkpoints.restore(eight, report=no_report)
        together = bytes_read() - before
    assert stored / 2 < together < 1.1 * stored, "eight devices read every byte once"
    kernel = restored.state.params["Dense_0"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(8, 2**15)}
    # What one of them reads, by itself.
    array = tensorstore.open(
        {
            "driver": "zarr",
            "kvstore": {
                "driver": "ocdbt",
                "base": f"file://{tmp_path}/0/state",
                "path": "params.Dense_0.kernel/",
            },
        }
    ).result()
    for index in (0, 5):
        before = bytes_read()
        part = array[:, index * 2**15 : (index + 1) * 2**15].read().result()
        assert bytes_read() - before < 2**20 + 2**17, "an eighth of 8 MB, and where it is"
        np.testing.assert_array_equal(part, kernel.addressable_shards[index].data)


class Product(nn.Module):
    """Eight parts of 1,000 columns are no whole tiles, and eight parts of 128 rows are."""

    names: tuple[str | None, ...] = ()

    @nn.compact
    def __call__(self, x, train=False):
        normal = nn.initializers.normal()
        init = nn.with_partitioning(normal, self.names) if self.names else normal
        return x @ self.param("kernel", init, (128, 1000))


@pytest.mark.slow
def test_what_was_sharded_along_the_largest_dim_is_read(tmp_path):
    """So was every parameter before layouts knew of tiles."""
    old, new = (
        fsdp(
            Product(names),
            optax.adam(1e-3),
            loss_fn,
            mesh=make_mesh({"data": 8}),
            batch=Batch(np.ones((8, 128), np.float32), np.zeros(8, np.int32)),
            min_weight_size=0,
        )
        for names in ((None, "data"), ())
    )
    assert old.layout.params["kernel"] == P(None, "data")
    assert new.layout.params["kernel"] == P("data", None)
    state = old.init(jax.random.key(1))
    kernel = jax.random.normal(jax.random.key(2), (128, 1000))
    moments = state.opt_state[0]._replace(mu={"kernel": kernel}, nu={"kernel": -kernel})
    state = state.replace(opt_state=(moments, *state.opt_state[1:]))
    state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, old.abstract_state))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(old, state, step=1, extra={})
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(new, report=no_report)
    assert_same(new, restored.state, whole(old, state))


def test_what_is_missing_is_named(programs):
    leaves = state_leaves(programs["fsdp_pad"])
    stored = nest(leaves, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    keys = {"rng": "threefry2x32"}
    assert find_differences(leaves, stored, keys) == []
    del stored["params"]["Dense_1"]
    assert find_differences(leaves, stored, keys) == [
        "params/Dense_1/bias is missing, expected float32[13]",
        "params/Dense_1/kernel is missing, expected float32[16,13]",
    ]
    for wrong in ({}, {"rng": "unsafe_rbg"}, {"rng": "unknown"}):
        kind = wrong.get("rng", "no typed key")
        assert f"rng is {kind}, expected key<fry>" in find_differences(leaves, stored, wrong)
    many = find_differences(leaves, {}, {})
    assert len(many) == 6
    assert many[-1] == f"and {len(leaves) - 5} more"


@pytest.mark.slow
def test_statistics_and_bfloat16_and_keys_in_the_optimizer(tmp_path):
    program = make_program(
        "fsdp",
        jax.devices(),
        model=Model(norm=True),
        tx=optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(7)), optax.adam(0.1)),
        param_dtype="bfloat16",
    )
    state, _ = train(program, program.init(jax.random.key(3)), range(1))
    held = whole(program, state)
    assert any("batch_stats" in name for name in held)
    assert {array.dtype.name for array in held.values()} >= {"bfloat16", "uint32", "int32"}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(program, state, step=1, extra={})
        restored = checkpoints.restore(program, report=no_report)
    assert_same(program, restored.state, held)
    _, losses = train(program, state, range(1, 3))
    assert train(program, restored.state, range(1, 3))[1] == losses


class WithNothing(nn.Module):
    """A model with a parameter and a variable without elements, such as an adapter of rank 0."""

    @nn.compact
    def __call__(self, x, train):
        seen = self.variable("seen", "none", jnp.zeros, (2, 0))
        none = self.param("none", nn.initializers.ones, (0, 4))
        return Model()(x, train) + none.sum() + seen.value.sum()


def test_arrays_without_elements_are_saved_and_read(tmp_path):
    model = WithNothing()
    program = make_program("fsdp_pad", jax.devices(), model=model)
    state = program.init(jax.random.key(3))
    held = whole(program, state)
    assert sum(not x.size for x in held.values()) == 4  # With the moments of Adam.
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(program, state, step=1, extra={})
        other = make_program("zero1", jax.devices()[:2], model=model)
        restored = checkpoints.restore(other, report=no_report)
        assert_same(other, restored.state, held)


READ_WITH_ORBAX_ALONE = """
import json, sys
import jax, numpy as np, orbax.checkpoint as ocp
folder = sys.argv[1]
with ocp.CheckpointManager(folder, item_handlers={"state": ocp.PyTreeCheckpointHandler(),
        "extra": ocp.JsonCheckpointHandler(), "keys": ocp.JsonCheckpointHandler()}) as manager:
    stored = manager.item_metadata(3)["state"]
    arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), stored.tree)
    tree = manager.restore(3, args=ocp.args.Composite(
        state=ocp.args.PyTreeRestore(restore_args=arrays),
        extra=ocp.args.JsonRestore(), keys=ocp.args.JsonRestore()))
import tensorstore as ts
kernel = ts.open({"driver": "zarr", "kvstore": {"driver": "ocdbt",
    "base": "file://" + folder + "/3/state", "path": "params.Dense_1.kernel/"}}).result()
print(json.dumps({
    "names": sorted(tree["state"]), "kernel": np.asarray(kernel.read().result()).tolist(),
    "moment": list(tree["state"]["opt_state"]["1"]["0"]["mu"]["Dense_1"]["kernel"].shape),
    "rng": np.asarray(tree["state"]["rng"]).tolist(), "keys": tree["keys"],
    "extra": tree["extra"],
    "ours": [name for name in sys.modules if name.split(".")[0] == "manualpar"]}))
"""


def test_other_programs_read_it_with_orbax_and_tensorstore_alone(saved, tmp_path):
    folder, held, _ = saved
    done = subprocess.run(
        [sys.executable, "-c", READ_WITH_ORBAX_ALONE, str(folder)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ours"] == []
    assert found["names"] == ["opt_state", "params", "rng", "step"]
    kernel = np.array(found["kernel"], np.float32)
    np.testing.assert_array_equal(kernel, held[".params['Dense_1']['kernel']"])
    assert found["moment"] == [16, 13]
    assert found["rng"] == held[".rng"].tolist()
    assert found["keys"] == {"rng": "threefry2x32"}
    assert found["extra"] == {"position": [1, {"a": None}]}


@pytest.mark.slow
def test_a_workdir_of_another_model_is_named_before_arrays_are_read(saved):
    folder = saved[0]
    wider = make_program("fsdp", jax.devices(), model=Model(hidden_size=24))
    sgd = make_program("fsdp", jax.devices(), tx=optax.sgd(0.1))
    narrow = make_program("fsdp", jax.devices(), param_dtype="bfloat16")
    with Checkpoints(folder) as checkpoints:
        for program, expected in (
            (wider, r"params/Dense_0/kernel is float32\[8,16\], expected float32\[8,24\]"),
            (sgd, r"opt_state/1/0/mu/Dense_0/bias is float32\[16\], expected no such array"),
            (narrow, r"params/Dense_0/bias is float32\[16\], expected bfloat16\[16\]"),
        ):
            with pytest.raises(CheckpointError, match=expected) as caught:
                checkpoints.restore(program, report=no_report)
            assert "is of another model" in str(caught.value)
            assert "Choose another workdir" in str(caught.value)


@pytest.mark.slow
def test_a_muon_with_other_matrices_is_told_how_to_keep_them():
    """Releases before 0.4 took each array of two dims for a matrix, as optax does."""
    mesh = abstract_mesh({"data": 8}, 8)
    batch = Batch(*(np.zeros((8, 4), np.int32) for _ in "xy"))
    sizes = {"vocab_size": 16, "hidden_size": 8, "num_heads": 2, "mlp_size": 8, "num_layers": 1}
    model = Transformer(**sizes, scan_layers=False)

    def program(tx):
        return fsdp(model, tx, language_model_loss, mesh=mesh, batch=batch, min_weight_size=1)

    def with_dims(*globs):
        def tx(parameters):
            dims = muon_dims(parameters, globs)
            return optax.contrib.muon(0.1, muon_weight_dimension_numbers=dims)

        return tx

    old = state_leaves(program(optax.contrib.muon(0.1)))
    stored = nest(old, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    keys = {leaf.name: "threefry2x32" for leaf in old if leaf.is_key}
    check = functools.partial(leaves_to_read, "run/1", report=no_report)
    expected = r"a Muon that trains other matrices.* config.optimizer.matrices=\('embedding', "
    with pytest.raises(CheckpointError, match=expected) as caught:
        check(program(with_dims()), stored, keys)
    globs = ast.literal_eval(re.search(r"matrices=(\(.*?\))", str(caught.value))[1])
    assert "layer_*/mlp/up/kernel" in globs
    assert len(check(program(with_dims(*globs)), stored, keys)) == len(old)


def test_another_kind_of_key_is_refused(saved):
    with jax.default_prng_impl("rbg"):
        program = make_program("fsdp", jax.devices())
    with pytest.raises(CheckpointError, match=r"rng is uint32\[2\], expected uint32\[4\]"):
        Checkpoints(saved[0]).restore(program, report=no_report)


@pytest.mark.slow
def test_describing_a_program_again_and_again_keeps_nothing(programs):
    program = programs["fsdp_pad"]

    def objects_after(times):
        for _ in range(times):
            state_leaves(program)
        gc.collect()
        return len(gc.get_objects())

    before = objects_after(3)
    assert objects_after(40) - before < 40


# -------------------------------------------------------------------------------------------------
# A full disk, a folder that can't be written to: each has its sentence.


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, "the disk is full: make room there"),
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EROFS, "the file system is read-only"),
        (errno.EACCES, "permission denied: choose a workdir"),
        (errno.EFBIG, "a file is larger than allowed"),
    ],
)
def test_system_errors_are_found_however_they_come(number, expected):
    error = OSError(number, os.strerror(number), "file")
    assert explain_failure(error).startswith(expected)
    assert explain_failure(
        ValueError(f"ABORTED: {os.strerror(number)} [os_error_code]")
    ).startswith(expected)
    outer = RuntimeError("saving failed")
    outer.__cause__ = error
    assert explain_failure(outer).startswith(expected)
    error.__context__ = outer  # A circle.
    assert explain_failure(outer).startswith(expected)


def test_what_is_not_known_keeps_its_text():
    error = cannot_write(Path("/run/7"), ValueError("odd.\nand long"))
    assert isinstance(error, CheckpointError)
    assert str(error) == "checkpoint /run/7 was not saved: ValueError: odd."
    assert explain_failure(KeyError()) == "KeyError: "


def test_a_save_that_takes_too_long_is_told_what_governs_it():
    error = RuntimeError("the barrier")
    error.__cause__ = TimeoutError("ChainedFuture completed 3/4 futures")
    assert str(cannot_write(Path("/run/7"), error)).startswith(
        "checkpoint /run/7 was not saved: it was not written in time; check that all processes can "
        "write there, or raise the limit for a slow disk: seconds= of Checkpoints, which"
    )


def run_worker(folder, size, *before):
    """Saves a small, two large and a small state in a process of its own."""
    done = subprocess.run(
        [
            *before,
            sys.executable,
            "-W",
            "error",
            "-m",
            "tests.training.checkpoints.worker",
            folder,
            size,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "nothing of Orbax, tensorstore and asyncio gets to the screen"
    return done.stdout.splitlines()


def assert_large_failed(lines, folder, reason):
    assert lines == [
        "1: returned",
        "2: returned",
        f"2: checkpoint {folder}/2 was not saved: {reason}.",
        "3: returned",
        f"3: checkpoint {folder}/3 was not saved: {reason}.",
        "4: returned",
        "[1, 4]",
    ]


def can_mount():
    if shutil.which("unshare") is None:
        return False
    return not subprocess.run(
        ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        check=False,
    ).returncode


@pytest.mark.slow
def test_a_file_that_gets_too_large(tmp_path):
    """The limit acts where a full disk does: in tensorstore's threads, in the middle of a write."""
    lines = run_worker(str(tmp_path), "60000", "sh", "-c", 'ulimit -f 200; exec "$@"', "sh")
    assert_large_failed(
        lines,
        tmp_path,
        "a file is larger than allowed: raise the limit (`ulimit -f`), or choose another file "
        "system",
    )


@pytest.mark.slow
def test_a_full_disk(tmp_path):
    if not can_mount():
        pytest.skip("no small file system can be mounted here")
    mount = 'mount -t tmpfs -o size=3m none "$0" && exec "$@"'
    lines = run_worker(
        str(tmp_path / "run"), "60000", "unshare", "-Urm", "sh", "-c", mount, str(tmp_path)
    )
    assert_large_failed(
        lines,
        tmp_path / "run",
        "the disk is full: make room there, or choose another workdir",
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mode", "mount"])
def test_a_folder_that_cannot_be_written_to(tmp_path, kind):
    folder = tmp_path / "run"
    folder.mkdir()
    if kind == "mode":
        if os.getuid() == 0:
            pytest.skip("root may write anywhere")
        folder.chmod(0o555)
        before = []
        reason = "permission denied: choose a workdir that you may write to, or change its mode"
    else:
        if not can_mount():
            pytest.skip("no read-only file system can be mounted here")
        mount = 'mount -t tmpfs -o ro none "$0" && exec "$@"'
        before = ["unshare", "-Urm", "sh", "-c", mount, str(folder)]
        reason = "the file system is read-only: choose a workdir that can be written to"
    lines = run_worker(str(folder), "16", *before)
    path = folder
    assert lines == [
        *(f"{step}: checkpoint {path}/{step} was not saved: {reason}." for step in (1, 2, 3, 4)),
        "[]",
    ]


# -------------------------------------------------------------------------------------------------
# Only Orbax is kept off the screen.


def record(name, path, message):
    return logging.LogRecord(name, logging.ERROR, path, 1, message, None, None)


RECORDS = {
    "orbax": record("absl", "/x/site-packages/orbax/checkpoint/_src/a.py", "Failed"),
    "pending": record("asyncio", "/x/asyncio/base_events.py", "never retrieved: 3.orbax-tmp"),
    "absl": record("absl", "/x/site-packages/grain/a.py", "Failed"),
    "other": record("asyncio", "/x/asyncio/base_events.py", "never retrieved: mine"),
}


@pytest.fixture
def shown(monkeypatch):
    """What gets through the loggers, and through the hook for what can't be raised."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable.exc_value))

    class Handler(logging.Handler):
        def emit(self, record):
            seen.append(record)

    handler = Handler()
    for name in ("absl", "asyncio"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])  # What earlier failures left.
        logging.getLogger(name).addHandler(handler)

    def show():
        seen.clear()
        for item in RECORDS.values():
            logging.getLogger(item.name).handle(item)
        for error in (RuntimeError("Event loop is closed"), RuntimeError("mine")):
            sys.unraisablehook(types.SimpleNamespace(exc_value=error))
        return [
            str(x)
            if isinstance(x, RuntimeError)
            else list(RECORDS)[list(RECORDS.values()).index(x)]
            for x in seen
        ]

    yield show
    for name in ("absl", "asyncio"):
        logging.getLogger(name).removeHandler(handler)


EVERYTHING = [*RECORDS, "Event loop is closed", "mine"]


def test_only_orbax_is_muted_and_only_meanwhile(shown):
    assert shown() == EVERYTHING
    with mute():
        assert shown() == ["absl", "other", "mine"]
        with mute():
            assert shown() == ["absl", "other", "mine"]
        assert shown() == ["absl", "other", "mine"]
    assert shown() == EVERYTHING


def test_contexts_of_two_threads_may_end_in_any_order(shown):
    before, first, second = sys.unraisablehook, mute(), mute()
    first.close()
    assert shown() == ["absl", "other", "mine"]
    second.close()
    assert shown() == EVERYTHING
    assert sys.unraisablehook is before


def test_what_was_read_beside_what_failed_is_muted_too(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable.object))

    def of(path):
        code = types.SimpleNamespace(co_filename=path)
        coroutine = types.SimpleNamespace(cr_code=code)
        return types.SimpleNamespace(exc_value=Exception("no file"), object=coroutine)

    orbax, mine = of("/x/orbax/checkpoint/_src/serialization.py"), of("/x/mine.py")
    with mute():
        sys.unraisablehook(orbax)
        sys.unraisablehook(mine)
    assert seen == [mine.object]


def test_contexts_may_end_in_any_order(shown):
    first, second = mute(), mute()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert shown() == ["absl", "other", "mine"]
    second.__exit__(None, None, None)
    assert shown()[:4] == list(RECORDS)


def test_what_a_failed_save_leaves_behind_is_muted_for_good(shown, tmp_path, monkeypatch):
    def save(folder, step):
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(program, state, step=step, extra={})

    program = shared_program("fsdp")
    state = program.init(jax.random.key(0))
    save(tmp_path, 1)
    assert shown() == EVERYTHING
    failures = [OSError(errno.EFBIG, os.strerror(errno.EFBIG))]

    def fail_once(self):
        if failures:
            raise failures.pop()

    monkeypatch.setattr(orbax.checkpoint.AsyncCheckpointer, "wait_until_finished", fail_once)
    with pytest.raises(CheckpointError, match="2 was not saved: a file is larger"):
        save(tmp_path, 2)
    assert shown() == ["absl", "other", "mine"]


def test_whoever_asks_sees_it(shown):
    before = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.DEBUG)
    try:
        with mute():
            assert shown() == EVERYTHING
    finally:
        absl_logging.set_verbosity(before)
