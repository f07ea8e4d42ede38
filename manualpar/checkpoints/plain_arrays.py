"""A training state as plain arrays under readable names, and back.

A checkpoint has to outlive the program that wrote it. So what is stored is a nested dict of strings
with an array at each leaf, `params/layers/attention/query/kernel`, `opt_state/0/mu/...`, `step`,
`rng`: no optax class, no padding, no typed key. Every array has the shape that it would have on one
device, and a key is stored as its data, with the name of its implementation beside it. Any strategy
on any mesh, and any other program, can read that.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from manualpar.core.program import Program
from manualpar.sharding.layout import unpad_whole
from manualpar.state_arrays import Leaf, leaves_of, list_some, show_array
from manualpar.train_state import TrainState


def state_leaves(program: Program) -> list[Leaf]:
    """What a program's state consists of, in the order of the tree."""
    return leaves_of(program.abstract_state, program.whole_state)


def nest(leaves: list[Leaf], function: Callable[[Leaf], Any]) -> dict[str, Any]:
    """The nested dict with the function's value for each leaf."""
    nested: dict[str, Any] = unflatten_dict({leaf.keys: function(leaf) for leaf in leaves})
    return nested


def to_plain(leaves: list[Leaf], state: TrainState) -> tuple[dict[str, Any], dict[str, str]]:
    """The nested dict of arrays to store, and each key's implementation by the key's name.

    Communication:
      One all-gather for each leaf that is padded, one leaf at a time: an array whose shape does not
      divide can't be sharded, so process 0 writes it from its own memory. Devices hold one such
      leaf whole for a moment, as they do in every training step.
    """
    arrays, implementations = {}, {}
    for leaf, x in zip(leaves, jax.tree.leaves(state), strict=True):
        if leaf.is_key:
            implementations[leaf.name] = str(jax.random.key_impl(x))
            x = jax.random.key_data(x)
        elif any(leaf.padding):
            x = _take_off_padding(leaf, x)
        arrays[leaf.keys] = x
    return unflatten_dict(arrays), implementations


def from_plain(
    program: Program, leaves: list[Leaf], plain: Mapping[str, Any], keys: Mapping[str, str]
) -> TrainState:
    """The state, from the nested dict of arrays as the program holds them, padded and sharded."""
    arrays = flatten_dict(plain)
    values = [
        jax.random.wrap_key_data(arrays[leaf.keys], impl=keys[leaf.name])
        if leaf.is_key
        else arrays[leaf.keys]
        for leaf in leaves
    ]
    return jax.tree.unflatten(jax.tree.structure(program.abstract_state), values)


def find_differences(
    leaves: list[Leaf], stored: Mapping[str, Any], keys: Mapping[str, str]
) -> list[str]:
    """Compares what is stored with what a program needs, before anything large is read.

    `stored` has a shape and a dtype at each leaf, and `keys` each key's implementation. Returns a
    line for each array that is missing, not expected, or of another shape or dtype.
    """
    found = flatten_dict(stored)
    lines = []
    for leaf in leaves:
        expected = show_array(leaf.dtype, leaf.shape)
        if leaf.keys not in found:
            lines.append(f"{leaf.name} is missing, expected {expected}")
            continue
        array = found.pop(leaf.keys)
        got = show_array(array.dtype, array.shape)
        if got != expected:
            lines.append(f"{leaf.name} is {got}, expected {expected}")
        elif leaf.is_key != (leaf.name in keys) or (
            leaf.is_key and _key_dtype(leaf, keys[leaf.name]) != leaf.abstract.dtype
        ):
            implementation = keys.get(leaf.name, "no typed key")
            lines.append(f"{leaf.name} is {implementation}, expected {leaf.abstract.dtype}")
    lines += [
        f"{'/'.join(path)} is {show_array(array.dtype, array.shape)}, expected no such array"
        for path, array in found.items()
    ]
    return list_some(lines)


def _take_off_padding(leaf: Leaf, x: jax.Array) -> np.ndarray:
    """A padded array whole and without its padding, in the memory of process 0."""
    whole = unpad_whole(x, leaf.padding, leaf.abstract.sharding.mesh)
    if jax.process_index() == 0:
        return np.array(whole.addressable_data(0))
    # The others write nothing of it; this has the shape and takes no memory.
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _key_dtype(leaf: Leaf, implementation: str) -> Any:
    """The dtype of the key that the stored data would become; None if it can't become one."""
    data = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    try:
        return jax.eval_shape(
            lambda data: jax.random.wrap_key_data(data, impl=implementation), data
        ).dtype
    except (TypeError, ValueError):
        return None
