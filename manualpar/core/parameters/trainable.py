"""Trees of which only a part is trained.

A step differentiates the tree of parameters with an `optax.MaskedNode`, which has no leaves, in the
place of each *frozen* one. It reduces such a tree of gradients, and gives it to the optimizer.
`optax.masked` gives the same to an inner optimizer, so every optimizer takes it. Paths stay as they
are.
"""

import fnmatch
from typing import Any

import jax
import optax

from manualpar.core.parameters.sharded_parameter import is_box


def is_trained(path: str, globs: tuple[str, ...]) -> bool:
    """Whether a parameter's path fits one of the globs; `*` stands for anything, `/` too."""
    return any(fnmatch.fnmatchcase(path, glob) for glob in globs)


def partition(placements: Any, tree: Any) -> tuple[Any, Any]:
    """The trained part and the frozen part of a tree like the parameters', boxes allowed.

    `placements` has a `trainable` at each leaf: a `Placement`, or a `ParameterInfo`.
    """

    def part(is_trained: bool) -> Any:
        return jax.tree.map(
            lambda place, x: x if place.trainable is is_trained else optax.MaskedNode(),
            placements,
            tree,
        )

    return part(True), part(False)


def empty_part(tree: Any) -> Any:
    """The frozen part of a tree that is trained as a whole."""
    return jax.tree.map(lambda _: optax.MaskedNode(), tree, is_leaf=is_box)


def trained(placements: Any) -> Any:
    """The placements of what is trained."""
    return partition(placements, placements)[0]


def combine(parts: tuple[Any, Any]) -> Any:
    """The tree of which `partition` has made two parts."""
    return jax.tree.map(
        lambda x, y: y if is_masked(x) else x,
        *parts,
        is_leaf=lambda x: is_masked(x) or is_box(x),
    )


def is_masked(x: Any) -> bool:
    """Whether something stands in the place of a parameter that the other part has."""
    return isinstance(x, optax.MaskedNode)
