"""The arrays of a state one by one: their names, and how they get to the host and to the devices.

A program holds arrays sharded and perhaps padded. Under the same names and without padding, any
other program can hold them too, on any mesh.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from manualpar.core.parameters.placement import path_name
from manualpar.core.state.train_state import is_key
from manualpar.errors import printable

SHOWN = 5  # How many differences an error lists.


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of the state, as the program holds it and as one device would.

    Attributes:
      name: Its name, `params/dense/kernel`.
      keys: The keys that lead to it in nested dicts.
      abstract: The array that the program holds, with padding; it may be a typed key.
      shape: The shape without padding.
      held_shape: The shape that the program holds; of a key, that of its data.
      dtype: The dtype; of a key, that of its data.
    """

    name: str
    keys: tuple[str, ...]
    abstract: jax.ShapeDtypeStruct
    shape: tuple[int, ...]
    held_shape: tuple[int, ...]
    dtype: jnp.dtype

    @property
    def is_key(self) -> bool:
        """Whether it is a typed key."""
        return is_key(self.abstract)

    @property
    def padding(self) -> tuple[int, ...]:
        """The zeros that the program holds at the end of each dimension."""
        return tuple(held - own for held, own in zip(self.held_shape, self.shape, strict=True))


def leaves_of(held: Any, whole: Any) -> list[Leaf]:
    """The arrays of a tree such as the `abstract_state` of a program, in its order.

    `whole` is the same without padding, such as the program's `whole_state`.
    """
    leaves = []
    for (path, abstract), unpadded in zip(
        jax.tree_util.tree_leaves_with_path(held), jax.tree.leaves(whole), strict=True
    ):
        data, shape = abstract, unpadded.shape
        if is_key(abstract):
            # A new function each time: jax's cache of the call is freed together with it.
            data = jax.eval_shape(lambda key: jax.random.key_data(key), abstract)
            shape = data.shape
        keys = tuple(path_name((entry,)) for entry in path)
        leaves.append(Leaf(path_name(path), keys, abstract, shape, data.shape, data.dtype))
    return leaves


def show_array(dtype: Any, shape: Any) -> str:
    """An array as people write it: `float32[8,4]`."""
    name = getattr(dtype, "name", None) or jnp.dtype(dtype).name
    return f"{name}[{','.join(map(str, shape))}]"


def show_leaf(x: Any) -> str:
    """The dtype and shape of a leaf, or its type if it is no array, for messages."""
    array = x if hasattr(x, "dtype") and hasattr(x, "shape") else np.asarray(x)
    if array.dtype == object:
        return f"a {type(x).__name__}"
    return show_array(array.dtype, array.shape)


def leaf_types(tree: Any) -> dict[str, str]:
    """What the arrays of a tree are, by their names."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): show_array(x.dtype, x.shape) for path, x in leaves}


def list_some(lines: Iterable[str]) -> list[str]:
    """The first of some lines, which may hold names of other people's, and how many more."""
    lines = list(lines)
    rest = len(lines) - SHOWN
    return [*map(printable, lines[:SHOWN]), *([f"and {rest} more"] if rest > 0 else [])]


def place_leaf(function: str, leaf: Leaf, x: Any) -> jax.Array:
    """Puts an array from anywhere on a program's devices: padded, cast, each device its own part.

    Communication:
      That of `to_host`. A device receives its own part and nothing else.
    """
    value = read_unpadded(function, leaf, x)

    def part(index: Any) -> np.ndarray:
        bounds = [s.indices(size)[:2] for s, size in zip(index, leaf.held_shape, strict=True)]
        out = np.zeros([stop - start for start, stop in bounds], leaf.dtype)
        own = value[index]  # Less than `out` where padding follows.
        out[tuple(map(slice, own.shape))] = own
        return out

    sharding = leaf.abstract.sharding
    parts = [
        jax.device_put(part(index), device)
        for device, index in sharding.addressable_devices_indices_map(leaf.held_shape).items()
    ]
    data = jax.make_array_from_single_device_arrays(leaf.held_shape, sharding, parts)
    if not leaf.is_key:
        return data
    return jax.random.wrap_key_data(data, impl=str(jax.random.key_impl(x)))


def read_unpadded(function: str, leaf: Leaf, x: Any) -> np.ndarray:
    """Reads an array to the host, without zeros at the end of its dims; of a typed key its data.

    Raises:
      ValueError: The padding is not zeros.

    Communication:
      That of `to_host`.
    """
    value = to_host(jax.random.key_data(x) if is_key(x) else x)
    if value.shape == leaf.shape:
        return value
    inside = tuple(map(slice, leaf.shape))
    # Counted so that no copy is made: there are as many non-zeros inside as altogether.
    if np.count_nonzero(value) != np.count_nonzero(value[inside]):
        raise ValueError(
            f"{function}: {leaf.name} is {show_leaf(value)}, expected "
            f"{show_array(leaf.dtype, leaf.shape)}, or zeros after that for padding; "
            "there are other values. Pass arrays of the same model."
        )
    return value[inside]


def to_host(x: Any) -> np.ndarray:
    """The whole of a NumPy array, or of a global array, in the memory of every process.

    Communication:
      None within a process: every shard is copied to the host by itself. Over several, one
      all-gather, for which every device holds this one array whole for a moment.
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
