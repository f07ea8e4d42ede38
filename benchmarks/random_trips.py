"""Moves a state of `random_programs` to another program, and compares the two states.

A state moves by `adopt`, a checkpoint, serialized bytes, files of published models, adapter files,
or `init_from`. Parameters and other variables must keep their bits. With the first three ways, the
optimizer's state must keep its bits too. Some states then train a step in the other program, which
is compared like all steps.
"""

import tempfile
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np

import manualpar
from benchmarks.random_comparison import WrongError, check_same_bits
from benchmarks.random_optimizers import recording
from benchmarks.random_reference import flatten, unflatten
from benchmarks.random_tasks import make_loss
from manualpar.data import as_dataset
from manualpar.training.checkpoints import Checkpoints
from manualpar.training.config import named_config
from manualpar.training.division import read_earlier
from manualpar.training.experiment import prepare
from manualpar.training.task import Task

# Options that the other program takes over; its other options are drawn.
SHARED = "param_dtype frozen_dtype gather_dtype rules sync_collections axis_aliases nonfinite"


def travel(check: Any, program: Any, state: Any, optimizer: Any, number: int) -> None:
    """Moves a state to the program that the description draws, and compares the new state."""
    trip = check.row["trip"]
    kind, what = trip["kind"], f"trip by {trip['kind']}"
    options = {k: check.options[k] for k in SHARED.split() if k in check.options}
    if "axis_aliases" in options:
        options["axis_aliases"] = {"batch": ["data"]}
    if "model" not in trip["mesh"] and "rules" in options:
        options["rules"] = [["features", None], ["hidden", None]]
    options |= trip["options"]
    if kind == "bytes":
        other, options = program, check.options
    else:
        other = check.build(trip["strategy"], options, trip["mesh"])
    params, collections = check.whole(program, state)
    opt_state = _opt_state(program, state)
    with tempfile.TemporaryDirectory() as folder:
        moved = _move(check, program, state, other, Path(folder))
    after, variables = check.whole(other, moved)
    if kind == "adapters":  # The file has only the adapters' weights.
        params = {path: x for path, x in params.items() if "lora_" in path}
    if kind == "files" and options.get("frozen_dtype") == "bfloat16":
        # Dequantizing in bfloat16 and quantizing again changes a few codes by one.
        params = {p: x for p, x in params.items() if not p.endswith(("_codes", "_scales"))}
    check_same_bits(what, params, after)
    if kind != "adapters":
        check_same_bits(what, flatten(collections), flatten(variables))
    if kind in ("adopt", "checkpoint", "bytes"):
        arrived = _opt_state(other, moved)
        for path, x in opt_state.items():
            if x.tobytes() != arrived[path].tobytes():
                raise WrongError(f"{what}: the optimizer's {path} is not the same bits")
    else:
        optimizer.restart()
    if "lora" in check.row and not check.row["nan_at"]:
        _check_merged(check, other, moved)
    if trip["step"] and not check.row["nan_at"]:
        own, check.options = check.options, options
        check.step(other, moved, number, optimizer)
        check.options = own


def come_back(check: Any) -> None:
    """Trains a step on some devices, and a step on others, as a run that comes back.

    The number of minibatches may grow, so that a device computes at most as many examples at once;
    it stays if the loss or a layer combines the examples of a minibatch over the devices.
    """
    row, batch = check.row, check.batches[0]
    optimizer = check.one_device()
    config = named_config("own").unlock()
    config.data.batch_size = row["batch"]
    config.optimizer.num_minibatches = asked = check.options["num_minibatches"]
    strategy = row["strategy"]
    config.parallel.strategy = "dp" if strategy == "data_parallel" else strategy
    config.parallel.mode, config.training.on_nonfinite = row["mode"], "ignore"
    if "min_weight_size" in check.options:
        config.parallel.min_weight_size = check.options["min_weight_size"]
    names = "sync_collections", "axis_aliases"
    options: dict[str, Any] = {k: check.options[k] for k in names if k in check.options}
    if "axis_aliases" in options:
        options["axis_aliases"] = {"batch": "data"}
    if row.get("trainable"):
        config.optimizer.trainable = tuple(row["trainable"])
    task = Task(
        as_dataset({"train": [batch]}),
        check.model,
        make_loss(row),
        optimizer=recording(optimizer.tx),
        options=options,
    )

    def resume(devices: int, earlier: Any) -> Any:
        return prepare(config, devices=jax.devices()[:devices], task=task, earlier=earlier)

    with tempfile.TemporaryDirectory() as folder, Checkpoints(Path(folder)) as checkpoints:
        before = resume(row["mesh"]["data"], None)
        state = check.begin(before.program)
        state = check.step(before.program, state, 0, optimizer)
        params, collections = check.whole(before.program, state)
        extra = {"division": before.division, "config": config.to_dict()}
        checkpoints.save(before.program, state, step=1, extra=extra)
        checkpoints.wait()
        after = resume(row["elastic"], read_earlier(Path(folder)))
        moved = checkpoints.restore(after.program, report=print).state
    arrived, variables = check.whole(after.program, moved)
    check_same_bits("elastic", params, arrived)
    check_same_bits("elastic", flatten(collections), flatten(variables))
    combines = row["loss"] == "coupled" or row["fields"].get("norm") == "synced"
    combines = combines and row["mode"] == "manual"
    found, each = after.program.num_minibatches, row["batch"] // row["elastic"]
    if found != asked if combines else each // found > before.division.at_once:
        raise WrongError(f"elastic: {before.division} became {after.division}")
    if not check.has_diverged:
        check.step(after.program, moved, 1, optimizer)


def _move(check: Any, program: Any, state: Any, other: Any, folder: Path) -> Any:
    kind = check.row["trip"]["kind"]
    if kind == "adopt":
        return other.adopt(state)
    if kind == "checkpoint":
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(program, state, step=2, extra={})
            checkpoints.wait()
            return checkpoints.restore(other, report=print).state
    if kind == "bytes":
        data = flax.serialization.to_bytes(state)
        return flax.serialization.from_bytes(program.init(jax.random.key(0)), data)
    if kind == "files":
        from manualpar.models.pretrained import export_hf, load_hf

        export_hf(program, state, folder / "model")
        return load_hf(other, folder / "model")
    if kind == "adapters":
        manualpar.save_adapters(program, state, folder / "adapters")
        fresh = other.init(jax.random.key(9))
        return manualpar.load_adapters(other, fresh, folder / "adapters")
    return other.init_from(program.whole(state))


def _check_merged(check: Any, program: Any, state: Any) -> None:
    """Compares the kernels of `merge_lora` with kernels that the reference merges."""
    params, _ = check.whole(program, state)
    plain = flatten(check.plain.to_plain(unflatten(params)))
    merged = flatten(jax.device_get(manualpar.merge_lora(program, state)))
    for path, e in plain.items():
        x = np.asarray(merged[path])[tuple(map(slice, e.shape))]
        off = np.abs(np.float64(x) - np.float64(e)).max(initial=0)
        eps = float(jnp.finfo(x.dtype).eps) if x.dtype.kind != "i" else 0
        if not off <= 4 * eps * np.abs(np.float64(e)).max(initial=0):
            raise WrongError(f"merged: {path} is off by {off:.3g}")


def _opt_state(program: Any, state: Any) -> dict[str, Any]:
    """Returns the optimizer's state by path, without padding."""

    def leaves(tree: Any) -> dict[str, Any]:
        found = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): x for path, x in found}

    whole = leaves(program.unpadded_state.opt_state)
    return {
        path: np.asarray(jax.device_get(x))[tuple(map(slice, whole[path].shape))]
        for path, x in leaves(state.opt_state).items()
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    }
