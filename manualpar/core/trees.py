"""Names for the trees of arrays in signatures, and for the paths of their leaves.

A tree is any pytree: dicts, tuples, dataclasses. Python has no type for a pytree of arrays, so each
name is an alias of `Any` that tells the reader which leaves the tree has.
"""

from typing import Any, TypeAlias

import jax

__all__ = [
    "path_keys",
    "path_name",
]

Params: TypeAlias = Any  # The model's parameters; a step puts some in boxes, see `ArrayBox`.
Grads: TypeAlias = Any  # Gradients: a tree like the trained parameters.
Collections: TypeAlias = Any  # The model's other variables by collection, such as `batch_stats`.
Batch: TypeAlias = Any  # Scalars, and arrays whose leading dim counts examples.
PerDevice: TypeAlias = Any  # Arrays that differ between devices, see `TrainState.local`.
Variables: TypeAlias = Any  # The parameters and the other collections, by collection.
OptState: TypeAlias = Any  # The state of the optimizer.
Specs: TypeAlias = Any  # `PartitionSpec`s in a tree that may be a prefix of the arrays' tree.
Infos: TypeAlias = Any  # A tree like the parameters, with a `ParameterInfo` at each leaf.
Placements: TypeAlias = Any  # A tree like the parameters, of `ParameterSharding`s.


def path_name(path: Any) -> str:
    """Joins the keys of a tree path by slashes: `encoder/kernel`."""
    return "/".join(path_keys(path))


def path_keys(path: Any) -> tuple[str, ...]:
    """Returns the keys of a tree path as plain strings, such as `("encoder", "0", "kernel")`."""
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)
