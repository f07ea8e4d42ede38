"""Adapters added to the kernels beside them, on the devices.

Invariants: sums are computed in float32 and rounded once, to the dtype of the kernel. Each device
holds its own shards of kernels and of results, and never a whole one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from manualpar.core.partitioning import pad_leaf, unpad_leaf
from manualpar.core.program import Program
from manualpar.finetuning.lora import DOWN, UP, AdaptedModel
from manualpar.guards.dispatch import check_state
from manualpar.sharding.mesh_context import no_mesh, on_auto_axes
from manualpar.train_state import TrainState


def merge_lora(program: Program, state: TrainState) -> dict[str, Any]:
    """Adds the adapters of a state to the kernels that they are beside.

    ```python
    params = merge_lora(program, state)
    plain = manualpar.fsdp(model, tx, loss_fn, mesh=mesh, batch=batch).init_from(params)
    ```

    Args:
      program: A program of a model with adapters, see `lora`.
      state: Its state; not donated.

    Returns:
      The parameters of the model without adapters, by their paths in it: global arrays, sharded and
      padded as they are in the state.

    Raises:
      ValueError: The model has no adapters, or the state is not the program's.

    Communication:
      All-gathers of adapters, where a device needs more of them than its own shard.
    """
    flat = flatten_dict(merged_state("merge_lora", program, state).params, sep="/")
    return unflatten_dict({path: x for path, x in flat.items() if not is_adapter(path)}, sep="/")


def merged_state(function: str, program: Program, state: TrainState) -> TrainState:
    """The state with merged kernels; its adapters are there as before.

    Arguments, errors and communication are those of `merge_lora`, in the name of a function.
    """
    alpha = adapted_model(function, program).low_rank.alpha
    check_state(function, program.abstract_state, state)
    shardings = jax.tree.map(lambda x: x.sharding, program.abstract_state.params)
    paddings = {info.path: place.parameter_padding for info, place in program.parameters}
    merge = on_auto_axes(
        functools.partial(_merge, paddings, alpha),
        mesh=program.mesh,
        out_specs=program.layout.params,
    )
    with no_mesh():
        return state.replace(params=jax.jit(merge, out_shardings=shardings)(state.params))


def adapted_model(function: str, program: Program) -> AdaptedModel:
    """The adapter of the program's model; refuses one without adapters of low rank."""
    adapter = program.step.model.adapter
    if not isinstance(adapter, AdaptedModel):
        raise ValueError(
            f"{function}: the program's model is {adapter!r}, which has no adapters, expected one "
            "that lora has made."
        )
    return adapter


def is_adapter(path: str) -> bool:
    """Whether a parameter is a part of an adapter, by its path."""
    return path.rpartition("/")[2] in (DOWN, UP)


def _merge(paddings: dict[str, tuple[int, ...]], alpha: float, params: Any) -> Any:
    flat = flatten_dict(params, sep="/")

    def unpadded(path: str) -> jax.Array:
        return unpad_leaf(flat[path], paddings[path])

    for path in [path for path in flat if path.rpartition("/")[2] == DOWN]:
        kernel_path, up_path = (path.removesuffix(DOWN) + name for name in ("kernel", UP))
        kernel, a, b = map(unpadded, (kernel_path, path, up_path))
        # Each of the three has the dims of loops in front.
        loops = tuple(range(a.ndim + b.ndim - 2 - kernel.ndim))
        product = jax.lax.dot_general(
            a.astype(jnp.float32),
            b.astype(jnp.float32),
            (((a.ndim - 1,), (len(loops),)), (loops, loops)),
            precision=jax.lax.Precision.HIGHEST,
        )
        whole = kernel.astype(jnp.float32) + alpha / a.shape[-1] * product
        flat[kernel_path] = pad_leaf(whole.astype(kernel.dtype), paddings[kernel_path])
    return unflatten_dict(flat, sep="/")
