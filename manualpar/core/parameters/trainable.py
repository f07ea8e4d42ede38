"""Divides trees of parameters into a trained and a frozen part.

A parameter that is not trained is *frozen*. In the tree that a step differentiates, an
`optax.MaskedNode`, which has no leaves, replaces each frozen parameter. The gradients for the
optimizer form the same tree. Every optimizer accepts such trees, because `optax.masked` passes them
to its inner optimizer. The paths of parameters do not change.
"""

import fnmatch
from typing import Any

import jax
import optax

from manualpar.core.parameters.sharded_parameter import is_box
from manualpar.core.trees import Placements


def is_trained(path: str, globs: tuple[str, ...]) -> bool:
    """Returns whether a path fits one of the globs; `*` matches any characters, even `/`."""
    return any(fnmatch.fnmatchcase(path, glob) for glob in globs)


def partition(placements: Placements, tree: Any) -> tuple[Any, Any]:
    """Divides a tree like the parameters, with or without boxes, into a trained and a frozen part.

    Each leaf of `placements` has the field `trainable`: it is a `Route` or a `ParameterInfo`.
    """

    def part(is_trained: bool) -> Any:
        return jax.tree.map(
            lambda place, x: x if place.trainable is is_trained else optax.MaskedNode(),
            placements,
            tree,
        )

    return part(True), part(False)


def empty_part(tree: Any) -> Any:
    """Returns an empty frozen part: every leaf of `tree` is masked."""
    return jax.tree.map(lambda _: optax.MaskedNode(), tree, is_leaf=is_box)


def trained(placements: Placements) -> Any:
    """Returns the placements of the trained parameters."""
    return partition(placements, placements)[0]


def combine(parts: tuple[Any, Any]) -> Any:
    """Combines the parts that `partition` returned into one tree."""
    return jax.tree.map(
        lambda x, y: y if is_masked(x) else x,
        *parts,
        is_leaf=lambda x: is_masked(x) or is_box(x),
    )


def is_masked(x: Any) -> bool:
    """Returns whether a leaf is a placeholder for a parameter of the other part."""
    return isinstance(x, optax.MaskedNode)
