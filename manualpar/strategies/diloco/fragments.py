"""Fragments: parts of a model, exchanged at different steps to send fewer bytes at a time.

A fragment is a set of trained parameters. All fragments have about the same number of bytes, and
each has its own state of the outer optimizer. With `F` fragments and `H` steps between two
exchanges of a fragment, fragment `f` is exchanged after step `(f + 1) H // F` and then every `H`
steps. So a device sends `1 / F` of the bytes at a time. In `H` steps a device sends as many bytes
as without fragments (Douillard et al., Streaming DiLoCo, https://arxiv.org/abs/2501.18512).
"""

import functools
import math
from typing import Any

import jax
import optax

from manualpar.core.parameters.trainable import combine


class Fragments:
    """Divides trees that have the structure of the trained parameters.

    Attributes:
      number: The number of fragments.
      index: A tree like the trained parameters, with the number of its fragment at each leaf.
    """

    def __init__(self, params: Any, number: int) -> None:
        """Divides the abstract trained parameters into `number` fragments."""
        leaves, structure = jax.tree.flatten(params)
        if number > len(leaves):
            raise ValueError(
                f"diloco: outer_fragments={number}, expected at most {len(leaves)}, the number of "
                "trained parameters. (The layers of a scan are stacked in the same parameters.)"
            )
        sizes = [math.prod(x.shape) * x.dtype.itemsize for x in leaves]
        totals, chosen = [0] * number, [0] * len(leaves)
        for i in sorted(range(len(leaves)), key=lambda i: -sizes[i]):
            chosen[i] = min(range(number), key=totals.__getitem__)  # The smallest fragment so far.
            totals[chosen[i]] += sizes[i]
        self.number, self.index = number, jax.tree.unflatten(structure, chosen)

    def select(self, fragment: int, tree: Any) -> Any:
        """Returns a tree in which the leaves outside of a fragment are masked."""
        return jax.tree.map(
            lambda i, x: x if i == fragment else optax.MaskedNode(), self.index, tree
        )

    def due_at(self, number: int, every: int) -> int | None:
        """Returns the fragment to exchange at step `number`, counted from 1, or `None`."""
        offset = (number - 1) % every + 1
        offsets = [(fragment + 1) * every // self.number for fragment in range(self.number)]
        return offsets.index(offset) if offset in offsets else None

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Returns `tx` with a separate state for each fragment; `tx` itself for one fragment."""
        if self.number == 1:
            return tx
        fragments = range(self.number)

        def init(params: Any) -> Any:
            return tuple(tx.init(self.select(i, params)) for i in fragments)

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            results = [
                tx.update(self.select(i, updates), state[i], self.select(i, params))
                for i in fragments
            ]
            merged = functools.reduce(lambda x, y: combine((x, y)), [x for x, _ in results])
            return merged, tuple(fragment_state for _, fragment_state in results)

        return optax.GradientTransformation(init, update)
