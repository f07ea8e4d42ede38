"""Merges LoRA adapters into the kernels of their layers, on the devices.

Invariants: sums are computed in float32 and rounded once, to the dtype of the kernel. Each device
stores only its shards of the kernels, before and after.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from manualpar.core.mesh.mesh_context import no_mesh, on_auto_axes
from manualpar.core.parameters.sharded_parameter import pad_leaf, unpad_leaf
from manualpar.core.program.guarded_step import check_state
from manualpar.core.program.load_state import plain_leaves, variable_leaves, variables_of
from manualpar.core.program.program import Program
from manualpar.core.state.state_arrays import Leaf
from manualpar.core.state.train_state import TrainState
from manualpar.models.finetuning.adapted_parameter import DOWN, UP, adapted_path, is_adapter
from manualpar.models.finetuning.lora import LoRAInterface


def merge_lora(program: Program, state: TrainState) -> dict[str, Any]:
    """Merges the adapters of a state into the kernels of their layers.

    ```python
    params = merge_lora(program, state)
    plain = manualpar.fsdp(model, tx, loss_fn, mesh=mesh, batch=batch).init_from(params)
    ```

    Args:
      program: A program of a model with adapters, see `lora`.
      state: The program's state; not donated.

    Returns:
      The parameters of the original model by their paths: global arrays, sharded and padded as in
      the state. Parameters in int8 are dequantized. They differ from the original parameters by
      rounding errors, but the adapters were trained with the dequantized values.

    Raises:
      ValueError: The model has no adapters, or the state does not belong to the program.

    Communication:
      All-gathers of adapters, if a device needs more than its shard; for parameters in int8, the
      communication of `Encoding.decode`.
    """
    lora_interface("merge_lora", program)
    check_state("merge_lora", program.abstract_state, state)
    params = {
        leaf.name.partition("/")[2]: x
        for leaf, x in given_variables(program, state)
        if leaf.keys[0] == "params"
    }
    return unflatten_dict(params, sep="/")


def given_variables(program: Program, state: TrainState) -> list[tuple[Leaf, jax.Array]]:
    """Returns the original model's variables: merged, dequantized, and without adapters.

    Each device stores only its shards of the variables. The communication is the same as in
    `merge_lora`.
    """
    interface, leaves = program.model.interface, variable_leaves(program)
    # A state may have arrays on the host, for example from flax's `from_bytes`.
    by_name: dict[str, Any] = {
        leaf.name: x if isinstance(x, jax.Array) else jax.device_put(x, leaf.abstract.sharding)
        for leaf, x in zip(leaves, jax.tree.leaves(variables_of(state)), strict=True)
    }
    paddings = {leaf.name: leaf.padding for leaf in leaves}
    plain, encodings = plain_leaves(program, leaves)
    for name, each in encodings.items():
        by_name[name] = each.decode(by_name[each.codes.name], by_name[each.scales.name])
        paddings[name] = each.padding
    by_name = {leaf.name: by_name[leaf.name] for leaf in plain}
    if isinstance(interface, LoRAInterface):
        shardings = {name: x.sharding for name, x in by_name.items()}
        merge = on_auto_axes(
            functools.partial(_merge, paddings, interface.low_rank.scale),
            mesh=program.mesh,
            out_specs={name: x.spec for name, x in shardings.items()},
        )
        with no_mesh():
            by_name = jax.jit(merge, out_shardings=shardings)(by_name)
    return [(leaf, by_name[leaf.name]) for leaf in plain if not is_adapter(leaf.name)]


def lora_interface(function: str, program: Program) -> LoRAInterface:
    """Returns the interface of the program's model; refuses a model without LoRA adapters."""
    interface = program.model.interface
    if not isinstance(interface, LoRAInterface):
        raise ValueError(
            f"{function}: the program's model is {interface!r}, which has no adapters, expected "
            "the result of lora."
        )
    return interface


def _merge(
    paddings: dict[str, tuple[int, ...]],
    scale: Callable[[int], float],
    variables: dict[str, jax.Array],
) -> dict[str, jax.Array]:
    merged = dict(variables)

    def unpadded(path: str) -> jax.Array:
        return unpad_leaf(variables[path], paddings[path])

    for path in [path for path in variables if is_adapter(path) and path.endswith(DOWN)]:
        kernel_path, up_path = adapted_path(path), path.removesuffix(DOWN) + UP
        kernel, a, b = map(unpadded, (kernel_path, path, up_path))
        # All three arrays begin with the dims along which loops stack layers.
        loops = tuple(range(a.ndim + b.ndim - 2 - kernel.ndim))
        product = jax.lax.dot_general(
            a.astype(jnp.float32),
            b.astype(jnp.float32),
            (((a.ndim - 1,), (len(loops),)), (loops, loops)),
            precision=jax.lax.Precision.HIGHEST,
        )
        whole = kernel.astype(jnp.float32) + scale(a.shape[-1]) * product
        merged[kernel_path] = pad_leaf(whole.astype(kernel.dtype), paddings[kernel_path])
    return merged
