"""Names the arrays of a state, and copies each to the host or to the devices.

In a program the arrays are sharded, and some are padded. Without padding, the arrays fit a program
on any mesh, under the same names.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from manualpar.core.state.train_state import is_key
from manualpar.core.trees import path_name
from manualpar.errors import printable

SHOWN = 5  # The maximum number of differences that an error lists.


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Describes an array of the state, both as the program stores it and without padding.

    Attributes:
      name: The array's name, such as `params/dense/kernel`.
      keys: The array's keys in nested dicts.
      abstract: Shape, dtype and sharding of the array in the program, with padding; it may be a
        typed key.
      shape: The shape without padding.
      padded_shape: The shape that the program stores; for a key, the shape of its data.
      dtype: The dtype; for a key, the dtype of its data.
    """

    name: str
    keys: tuple[str, ...]
    abstract: jax.ShapeDtypeStruct
    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    dtype: jnp.dtype

    @property
    def is_key(self) -> bool:
        """Whether the array is a typed key."""
        return is_key(self.abstract)

    @property
    def padding(self) -> tuple[int, ...]:
        """The number of zeros that the program stores at the end of each dimension."""
        return tuple(x - size for x, size in zip(self.padded_shape, self.shape, strict=True))


def leaves_of(padded: Any, unpadded: Any) -> list[Leaf]:
    """Describes each array of a tree, in the order of its leaves.

    Args:
      padded: A tree of abstract arrays, such as the `abstract_state` of a program.
      unpadded: The same tree without padding, such as the program's `unpadded_state`.
    """
    leaves = []
    for (path, abstract), without_padding in zip(
        jax.tree_util.tree_leaves_with_path(padded), jax.tree.leaves(unpadded), strict=True
    ):
        data, shape = abstract, without_padding.shape
        if is_key(abstract):
            # A new function in each call: jax frees its cache entry together with the function.
            data = jax.eval_shape(lambda key: jax.random.key_data(key), abstract)
            shape = data.shape
        keys = tuple(path_name((entry,)) for entry in path)
        leaves.append(Leaf(path_name(path), keys, abstract, shape, data.shape, data.dtype))
    return leaves


def show_array(dtype: Any, shape: Any) -> str:
    """Writes a dtype and a shape, for messages: `float32[8,4]`."""
    name = getattr(dtype, "name", None) or jnp.dtype(dtype).name
    return f"{name}[{','.join(map(str, shape))}]"


def show_leaf(x: Any) -> str:
    """Writes the dtype and shape of an array, or the type of another leaf, for messages."""
    array = x if hasattr(x, "dtype") and hasattr(x, "shape") else np.asarray(x)
    if array.dtype == object:
        return f"a {type(x).__name__}"
    return show_array(array.dtype, array.shape)


def leaf_types(tree: Any) -> dict[str, str]:
    """Writes the dtype and shape of each array of a tree, by its name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): show_array(x.dtype, x.shape) for path, x in leaves}


def list_some(lines: Iterable[str]) -> list[str]:
    """Returns the first `SHOWN` lines; if there are more, also a line with the number of the rest.

    Lines are escaped, because they may contain names from untrusted files.
    """
    lines = list(lines)
    rest = len(lines) - SHOWN
    return [*map(printable, lines[:SHOWN]), *([f"and {rest} more"] if rest > 0 else [])]


def place_leaf(function: str, leaf: Leaf, x: Any) -> jax.Array:
    """Copies an array to a program's devices, padded, cast and sharded as `leaf` describes.

    Communication:
      The communication of `to_host`. A device receives only its shard.
    """
    value = read_unpadded(function, leaf, x)

    def shard(index: Any) -> np.ndarray:
        bounds = [s.indices(size)[:2] for s, size in zip(index, leaf.padded_shape, strict=True)]
        out = np.zeros([stop - start for start, stop in bounds], leaf.dtype)
        values = value[index]  # `values` is smaller than `out` if the shard is padded.
        out[tuple(map(slice, values.shape))] = values
        return out

    sharding = leaf.abstract.sharding
    shards = [
        jax.device_put(shard(index), device)
        for device, index in sharding.addressable_devices_indices_map(leaf.padded_shape).items()
    ]
    data = jax.make_array_from_single_device_arrays(leaf.padded_shape, sharding, shards)
    if not leaf.is_key:
        return data
    return jax.random.wrap_key_data(data, impl=str(jax.random.key_impl(x)))


def read_unpadded(function: str, leaf: Leaf, x: Any) -> np.ndarray:
    """Copies an array to the host without its padding; copies the data of a typed key.

    Communication:
      The communication of `to_host`.
    """
    value = to_host(jax.random.key_data(x) if is_key(x) else x)
    if value.shape == leaf.shape:
        return value
    inside = tuple(map(slice, leaf.shape))
    # The padding is zeros if all non-zeros are inside. Counting them makes no copy.
    if np.count_nonzero(value) != np.count_nonzero(value[inside]):
        raise ValueError(
            f"{function}: {leaf.name} is {show_leaf(value)}, expected "
            f"{show_array(leaf.dtype, leaf.shape)}, or an array padded from this shape with zeros; "
            "its padding has other values. Pass arrays of the same model."
        )
    return value[inside]


def to_host(x: Any) -> np.ndarray:
    """Copies a NumPy array or a complete `jax.Array` into the memory of every process.

    Communication:
      None in one process: each shard is copied to the host separately. One all-gather if the array
      is sharded over several processes: every device then stores the whole array for a short time.
    """
    if not isinstance(x, jax.Array):
        return np.asarray(x)
    if x.is_fully_replicated:
        return np.array(x.addressable_data(0))  # A copy: the array may be donated.
    if not x.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    out = np.empty(x.shape, x.dtype)
    for shard in x.addressable_shards:
        if shard.replica_id == 0:
            out[shard.index] = np.asarray(shard.data)
    return out
