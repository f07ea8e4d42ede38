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
from benchmarks.random_reference import flatten, unflatten
from manualpar.training.checkpoints import Checkpoints

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
