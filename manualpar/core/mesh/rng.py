"""Random keys, in particular inside `shard_map`.

Every device of a `shard_map` runs the same program on the same key. What must be equal on all
devices (parameters) uses the key as it is; what must differ (dropout masks, noise on the data)
folds the device's place in the mesh into it first.
"""

from typing import Any

import jax
import jax.numpy as jnp

from manualpar.core.mesh.axes import AxisName, axis_tuple, check_axes_bound


def fold_rng_over_axis(rng: jax.Array, axis_name: AxisName) -> jax.Array:
    """Makes a key that is different on every device along a mesh axis.

    Args:
      rng: A key, typed (`jax.random.key`) or raw, the same on all devices along `axis_name`.
      axis_name: A mesh axis bound by the surrounding `shard_map`, or a tuple of them: then the key
        differs for every combination of their indices.

    Returns:
      A key of the same kind. Devices that agree on their index along `axis_name` still share it.

    Raises:
      ValueError: An axis is not bound.

    Communication:
      None.
    """
    axes = axis_tuple(axis_name)
    check_axes_bound("fold_rng_over_axis", axes)
    return jax.random.fold_in(rng, jax.lax.axis_index(axes))


def typed_key(function: str, rng: Any) -> jax.Array:
    """A typed or raw key as a typed one; raises in the name of `function` if it is not one key."""
    dtype = getattr(rng, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and rng.shape == ():
        return rng
    if dtype == jnp.uint32 and rng.ndim == 1:
        return jax.random.wrap_key_data(rng)
    raise TypeError(f"{function}: rng is {rng!r}, expected one key such as jax.random.key(0).")
