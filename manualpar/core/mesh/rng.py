"""Random keys, in particular inside `shard_map`.

Every device of a `shard_map` runs the same program on the same key. Values that must be equal on
all devices (parameters) use the key as it is. Values that must differ (dropout masks, noise on the
data) use a key into which the device's index in the mesh is folded.
"""

from typing import Any

import jax
import jax.numpy as jnp

from manualpar.core.mesh.axes import AxisName, axis_tuple, check_axes_bound


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
