"""Splits a batch into minibatches, and refuses batches that cannot be split over the mesh."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from manualpar.core.mesh.axes import axes_size
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.trees import Batch


def shapes_of_batch(field: str, batch: Batch) -> Any:
    """Returns the shapes and dtypes of a batch; refuses leaves that are not arrays."""

    def abstract(path: Any, x: Any) -> Any:
        try:
            return jax.eval_shape(lambda x: x, x)
        except TypeError as error:
            raise TypeError(
                f"{field}{jax.tree_util.keystr(path)} is a {type(x).__name__}, expected an array "
                "of numbers. If it has a row for each example, its shape is [B, ...]."
            ) from error

    return jax.tree_util.tree_map_with_path(abstract, batch)


def check_batch(field: str, batch: Batch, mesh: Mesh, roles: AxisRoles) -> None:
    """Refuses a batch that the mesh cannot split evenly; messages call the batch `field`."""
    for dim, axes in roles.batch_dims.items():
        _check_dim(field, batch, dim, axes, axes_size(mesh, axes))
    if roles.context_axis is not None and mesh.shape[roles.context_axis] > 1:
        _check_positions(field, batch, roles.context_axis, mesh.shape[roles.context_axis])


def _check_positions(field: str, batch: Batch, axis: str, devices: int) -> None:
    """Refuses sequence lengths that zig-zag order does not allow, and leaves with only one dim."""
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        name = f"{field}{jax.tree_util.keystr(path)}"
        if jnp.ndim(x) == 1:
            raise ValueError(
                f"{name} has shape {x.shape}, but context_axis={axis!r} splits the positions of "
                "sequences; expected the shape [B, S, ...], or a scalar. Repeat the values for "
                "each position."
            )
        if jnp.ndim(x) and x.shape[1] % (2 * devices):
            raise ValueError(
                f"{name} has {x.shape[1]} positions along dim 1, expected a multiple of "
                f"{2 * devices}, two half blocks for each of the {devices} devices along "
                f"{axis!r}: pad the sequences and mask the padding."
            )


def _check_dim(field: str, batch: Batch, dim: int, axes: tuple[str, ...], devices: int) -> None:
    unit = f"entries along dim {dim}" if dim else "examples"
    sizes = {
        f"{field}{jax.tree_util.keystr(path)}": x.shape[dim]
        for path, x in jax.tree_util.tree_leaves_with_path(batch)
        if jnp.ndim(x) > dim
    }
    if not sizes:
        raise ValueError(f"{field} has no arrays of shape [B, ...], expected some {unit}.")
    for name, size in sizes.items():
        if not size or size % devices:
            raise ValueError(
                f"{name} has {size} {unit}, expected a positive multiple of the {devices} "
                f"devices along {axes}: no example may be dropped. Change the batch size or the "
                "number of devices, or pad the batch and mask the padding."
            )
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"{field} has leaves with different numbers of {unit}, expected one number along "
            f"{f'dim {dim}' if dim else 'their leading dimension'}: "
            f"{', '.join(f'{k} has {v}' for k, v in sizes.items())}."
        )


def check_minibatches(batch: Batch, num_minibatches: int, *, devices: int = 1) -> None:
    """Refuses a number of minibatches that does not divide the examples on each device."""
    if (
        isinstance(num_minibatches, bool)
        or not isinstance(num_minibatches, int)
        or num_minibatches < 1
    ):
        raise ValueError(f"num_minibatches={num_minibatches!r}, expected a positive integer.")
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        examples = x.shape[0] // devices if jnp.ndim(x) else num_minibatches
        if examples % num_minibatches or examples < num_minibatches:
            raise ValueError(
                f"num_minibatches={num_minibatches} does not divide the {examples} examples of "
                f"batch{jax.tree_util.keystr(path)} on each device (shape {x.shape}), and no "
                f"example may be dropped. Choose a divisor of {examples} or another batch size."
            )


def split_minibatches(batch: Batch, num_minibatches: int) -> Any:
    """Reshapes `[B, ...]` leaves to `[M, B/M, ...]` for `M` minibatches; repeats scalars."""
    check_minibatches(batch, num_minibatches)

    def split(x: Any) -> jax.Array:
        if not jnp.ndim(x):
            return jnp.broadcast_to(x, (num_minibatches,))
        return x.reshape(num_minibatches, x.shape[0] // num_minibatches, *x.shape[1:])

    return jax.tree.map(split, batch)
