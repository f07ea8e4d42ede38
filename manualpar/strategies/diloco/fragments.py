"""Parts of a model that replicas exchange at different steps, so that each time less is sent.

A fragment is some of the trained parameters, of about as many bytes as every other fragment. Each
has its own outer optimizer's state. With `F` fragments and `H` steps between two exchanges of one,
fragment `f` is exchanged after the steps `(f + 1) H // F`, and `H` steps after each of these. So
what a device sends at once falls by `F`, and what it sends in all is the same (Douillard et al.,
Streaming DiLoCo, https://arxiv.org/abs/2501.18512).
"""

import functools
import math
from typing import Any

import jax
import optax

from manualpar.core.parameters.trainable import combine


class Fragments:
    """Divides trees like the trained parameters.

    Attributes:
      number: How many fragments there are.
      index: The number of its fragment for each trained parameter, in a tree.
    """

    def __init__(self, params: Any, number: int) -> None:
        """Divides the trained parameters, abstract ones, into so many fragments."""
        leaves, structure = jax.tree.flatten(params)
        if number > len(leaves):
            raise ValueError(
                f"diloco: fragments={number}, expected at most {len(leaves)}, the number of "
                "trained parameters: the layers of a scan are one parameter each."
            )
        sizes = [math.prod(x.shape) * x.dtype.itemsize for x in leaves]
        held, chosen = [0] * number, [0] * len(leaves)
        for i in sorted(range(len(leaves)), key=lambda i: -sizes[i]):
            chosen[i] = min(range(number), key=held.__getitem__)  # That with the fewest bytes.
            held[chosen[i]] += sizes[i]
        self.number, self.index = number, jax.tree.unflatten(structure, chosen)

    def part(self, fragment: int, tree: Any) -> Any:
        """The tree with what belongs to a fragment alone."""
        return jax.tree.map(
            lambda i, x: x if i == fragment else optax.MaskedNode(), self.index, tree
        )

    def due_at(self, number: int, every: int) -> int | None:
        """The fragment that is exchanged at step `number`, counted from 1, if one is."""
        within = (number - 1) % every + 1
        offsets = [(fragment + 1) * every // self.number for fragment in range(self.number)]
        return offsets.index(within) if within in offsets else None

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """The outer optimizer with a state for each fragment; of one, the optimizer itself."""
        if self.number == 1:
            return tx
        every = range(self.number)

        def init(params: Any) -> Any:
            return tuple(tx.init(self.part(fragment, params)) for fragment in every)

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            done = [tx.update(self.part(i, updates), state[i], self.part(i, params)) for i in every]
            merged = functools.reduce(lambda x, y: combine((x, y)), [part for part, _ in done])
            return merged, tuple(each for _, each in done)

        return optax.GradientTransformation(init, update)
