"""Splits a batch into minibatches, and refuses batches that cannot be split over the mesh."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from manualpar.core.mesh.axes import AxisName, axes_size, axis_tuple, check_axes_bound
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.tracing.scopes import CONTEXT_SCOPE
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


# -------------------------------------------------------------------------------------------------
# The zig-zag order of a sequence over the devices along a context axis.
#
# Under a causal mask the first tokens of a sequence attend to few tokens and the last to many. If
# each of `C` devices had a run of consecutive tokens, the last device would have most of the work.
# So the sequence is cut into `2 C` half blocks, and device `c` gets half blocks `c` and `2 C - 1 -
# c` (zig-zag). A step reorders its batch once, at the beginning, because the batch is small: it is
# mostly integers. The model and the loss get the batch in zig-zag order.


def to_zigzag(batch: Batch, axis: str) -> Any:
    """Sends positions between devices, to turn consecutive runs into zig-zag half blocks.

    Leaves are `[B, S/axis, ...]`. Before the exchange, a leaf contains the device's run of each
    sequence. After the exchange, the leaf contains half block `c` and then half block
    `2 C - 1 - c`. Scalars do not change.

    Communication:
      Two collective permutes of half of each leaf.
    """
    if (size := jax.lax.axis_size(axis)) == 1:
        return batch

    def home(block: int) -> int:
        """Returns the index of the device that gets a half block."""
        return min(block, 2 * size - 1 - block)

    sends = [[(c, home(2 * c + half)) for c in range(size)] for half in (0, 1)]
    # Each device receives a half block with an even number and one with an odd number. On a device
    # with an odd index, the odd half block comes first.
    is_odd = jax.lax.axis_index(axis) % 2 == 1

    def exchange(x: jax.Array) -> jax.Array:
        if not jnp.ndim(x):
            return x
        even, odd = (
            jax.lax.ppermute(half, axis, perm)
            for half, perm in zip(jnp.split(x, 2, axis=1), sends, strict=True)
        )
        low, high = jnp.where(is_odd, odd, even), jnp.where(is_odd, even, odd)
        return jnp.concatenate([low, high], axis=1)

    with jax.named_scope(CONTEXT_SCOPE):
        return jax.tree.map(exchange, batch)


# -------------------------------------------------------------------------------------------------
# Random keys, in particular inside `shard_map`.
#
# Every device of a `shard_map` runs the same program on the same key. Values that must be equal on
# all devices (parameters) use the key as it is. Values that must differ (dropout masks, noise on
# the data) use a key into which the device's index in the mesh is folded.


def fold_rng_over_axis(rng: jax.Array, axis_name: AxisName) -> jax.Array:
    """Derives a key that is different on every device along a mesh axis.

    Args:
      rng: A typed key (`jax.random.key`) or a raw key. The key is the same on all devices along
        `axis_name`.
      axis_name: A mesh axis bound by the enclosing `shard_map`, or a tuple of axes. With a tuple,
        the key differs for every combination of the axes' indices.

    Returns:
      A key of the same kind. Devices with the same index along `axis_name` get the same key.

    Raises:
      ValueError: An axis is not bound.

    Communication:
      None.
    """
    axes = axis_tuple(axis_name)
    check_axes_bound("fold_rng_over_axis", axes)
    return jax.random.fold_in(rng, jax.lax.axis_index(axes))


def typed_key(function: str, rng: Any) -> jax.Array:
    """Converts a typed or raw key to a typed key; raises a `TypeError` for anything else."""
    dtype = getattr(rng, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and rng.shape == ():
        return rng
    if dtype == jnp.uint32 and rng.ndim == 1:
        return jax.random.wrap_key_data(rng)
    raise TypeError(f"{function}: rng is {rng!r}, expected one key such as jax.random.key(0).")
