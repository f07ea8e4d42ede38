"""Names for the trees of arrays in signatures, and for the paths of their leaves.

A tree is any pytree: dicts, tuples, dataclasses. Python cannot express its type, so each name is an
alias of `Any` that tells the reader what the tree contains.
"""

from typing import Any, TypeAlias

import jax

Params: TypeAlias = Any  # The model's parameters; inside a step some are in boxes.
Grads: TypeAlias = Any  # Gradients: a tree like the trained parameters.
Collections: TypeAlias = Any  # The model's other variables by collection, such as `batch_stats`.
Batch: TypeAlias = Any  # Scalars, and arrays whose leading dim counts examples.
PerDevice: TypeAlias = Any  # Arrays that differ between devices, see `TrainState.local`.
Variables: TypeAlias = Any  # The parameters and the other collections, by collection.
OptState: TypeAlias = Any  # The state of the optimizer.
Specs: TypeAlias = Any  # A tree of `PartitionSpec`s, or the root of such a tree.
Infos: TypeAlias = Any  # A tree like the parameters, with a `ParameterInfo` at each leaf.
Placements: TypeAlias = Any  # A tree like the parameters, with a `Route` at each leaf.


def path_name(path: Any) -> str:
    """Joins the keys of a tree path by slashes: `encoder/kernel`."""
    return "/".join(path_keys(path))


def path_keys(path: Any) -> tuple[str, ...]:
    """Returns a path's keys as strings; dict keys, attributes and indices look the same."""
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)
