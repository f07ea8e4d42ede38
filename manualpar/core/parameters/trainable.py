"""Divides trees of parameters into a trained and a frozen part.

In the tree that a step differentiates, an `optax.MaskedNode`, which has no leaves, replaces each
*frozen* parameter. The gradients for the optimizer form such a tree too. `optax.masked` passes
trees like this to an inner optimizer, so every optimizer accepts them. Paths do not change.
"""

import fnmatch
from typing import Any

import jax
import optax

from manualpar.core.parameters.sharded_parameter import is_box
from manualpar.core.trees import Placements


def is_trained(path: str, globs: tuple[str, ...]) -> bool:
    """Returns whether a path fits one of the globs; `*` stands for any characters, `/` too."""
    return any(fnmatch.fnmatchcase(path, glob) for glob in globs)


def partition(placements: Placements, tree: Any) -> tuple[Any, Any]:
    """Divides a tree like the parameters', boxes allowed, into its trained and its frozen part.

    `placements` has a `trainable` at each leaf: a `Route`, or a `ParameterInfo`.
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
    """Undoes `partition`."""
    return jax.tree.map(
        lambda x, y: y if is_masked(x) else x,
        *parts,
        is_leaf=lambda x: is_masked(x) or is_box(x),
    )


def is_masked(x: Any) -> bool:
    """Returns whether a leaf replaces a parameter of the other part."""
    return isinstance(x, optax.MaskedNode)
