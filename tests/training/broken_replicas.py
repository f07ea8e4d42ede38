"""Breaks a copy of a state on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from manualpar.core.trees import path_name


def corrupt(x, device, change):
    """The array `x` with what `device` holds changed by a function from numpy to numpy."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    parts = []
    for shard in x.addressable_shards:
        part = shard.data
        if shard.device == device:
            copy = np.array(jax.random.key_data(part) if is_key else part)
            part = jax.device_put(change(copy), device)
            part = jax.random.wrap_key_data(part) if is_key else part
        parts.append(part)
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def flip_bit(x, bit):
    """Flips one bit of an array, counted from its first byte; sub-byte types have a byte each."""
    flat = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    flat[bit // 8] ^= 1 << bit % 8
    return flat.view(x.dtype).reshape(x.shape)


def flipped(bit):
    return functools.partial(flip_bit, bit=bit)


def replace(state, path, change):
    """The tree `state` with the leaf at `path` changed."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, x: change(x) if path_name(keys) == path else x, state
    )


def break_leaf(state, path, device, bit=0):
    """The tree `state` with a bit flipped in what `device` holds of the leaf at `path`."""
    return replace(state, path, lambda x: corrupt(x, device, flipped(bit)))
