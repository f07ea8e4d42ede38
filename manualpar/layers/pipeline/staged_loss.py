"""A loss whose layers run in chunks: the functions that a stage calls and differentiates.

Two kinds of activations are sent from chunk to chunk: the carry of the scan over the model's
layers, and a buffer `[L, ...]` for each stacked output of this scan. Every chunk writes the entries
of its layers into the buffers. So the suffix (the operations after the scan, see `cut`) gets the
outputs of all layers. The gradients of the buffers are sent back with the gradients of the carry.

Symbols: `S` stages, `L` layers of the model, `k` layers of a chunk.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.layers.pipeline.cut import Cut, check_divides
from manualpar.layers.pipeline.slots import zeros

# Parameters, or gradients, by index; stacked parameters have the layers of a chunk, `[k, ...]`.
Params = Mapping[int, Any]


class Activations(NamedTuple):
    """The arrays sent between stages: inexact arrays with a gradient, exact arrays without one."""

    inexact: list[Any]
    exact: list[Any]


class StagedLoss:
    """A loss as functions of the arrays of one stage.

    Attributes:
      cut: The traced loss in pieces.
      types: The types of the activations.
      chunk_layers: The number of layers of a chunk, `k`.
      prefix_params: The indices of the parameters that the prefix reads.
      chunk_params: The indices of the parameters that every chunk reads, without the stacked
        parameters.
      suffix_params: The indices of the parameters that the suffix reads.
      returns: The types of the results of the loss, in a tree.
      first_other: The index of the first input that is not a parameter.
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], Any],
        params: Mapping[str, Any],
        others: Sequence[Any],
        *,
        stacked: Sequence[bool],
        num_stages: int,
        chunks: int,
        axis: str,
    ) -> None:
        """Traces and cuts a loss.

        Args:
          loss: `loss(params, others)`, a tree of arrays.
          params: A stage's parameters by path; stacked parameters are `[L/S, ...]`.
          others: The other inputs, such as a microbatch and a key.
          stacked: For each parameter, whether layers are stacked in dim 0.
          num_stages: The number of stages, `S`.
          chunks: The number of chunks of layers on a stage.
          axis: The mesh axis of stages, over which all inputs vary.

        Raises:
          ValueError: The loss cannot be cut, or the scan over layers carries random keys.
        """
        full_types = [
            jax.eval_shape(lambda x: jnp.concatenate([x] * num_stages), x) if is_stacked else x
            for x, is_stacked in zip(params.values(), stacked, strict=True)
        ]
        self._axis = axis
        number = len(params)
        closed, self.returns = jax.make_jaxpr(
            lambda *args: loss(args[:number], args[number:]), return_shape=True
        )(*full_types, *others)
        self.cut = cut = Cut(closed, list(params))
        for i, (path, is_stacked) in enumerate(zip(params, stacked, strict=True)):
            if is_stacked != (i in cut.stacked):
                raise ValueError(
                    f"pipeline: parameter {path!r} has {'a' if is_stacked else 'no'} layer in each "
                    "entry of dim 0, but here the scan over layers "
                    f"{'does not run' if is_stacked else 'runs'} over this dim; expected the same "
                    "scan in training and evaluation."
                )
        check_divides(cut.length, num_stages, chunks)
        self.chunk_layers = cut.length // (num_stages * chunks)
        self.first_other = number
        self._types = [_varying(t, axis) for t in (*cut.carry, *cut.ys)]
        for t in self._types:
            if not jnp.issubdtype(t.dtype, jnp.number) and t.dtype != jnp.bool_:
                raise ValueError(
                    f"pipeline: layers pass on an array of {t.dtype}, expected numbers. Give each "
                    "layer a different key: split_rngs={'dropout': True}."
                )
        self._is_inexact = [jnp.issubdtype(t.dtype, jnp.inexact) for t in self._types]
        self.types = self._sort(self._types)
        self.prefix_params = self._params_of(cut.prefix.reads)
        self.chunk_params = self._params_of(cut.side_params)
        self.suffix_params = self._params_of(cut.suffix.reads)

    def prefix(self, params: Params, others: Sequence[Any]) -> Activations:
        """Computes the input of the first chunk."""
        carry = self.cut.prefix(self._inputs(params, others))
        buffers = zeros(self._types[len(carry) :])
        return self._sort(map(self._typed, [*carry, *buffers], self._types))

    def chunk(
        self, params: Params, inexact: list[Any], fixed: tuple[list[Any], Sequence[Any], Any]
    ) -> Activations:
        """Runs a chunk; `fixed` has the exact activations, other inputs, and the chunk's index."""
        exact, others, index = fixed
        number, first = len(self.cut.carry), index * self.chunk_layers
        values = self._merge(inexact, exact)
        inputs = self._inputs(params, others)
        carry, ys = self.cut.run_layers(inputs, values[:number], first)
        buffers = [
            jax.lax.dynamic_update_slice_in_dim(buffer, self._typed(y, buffer), first, 0)
            for buffer, y in zip(values[number:], ys, strict=True)
        ]
        return self._sort([*carry, *buffers])

    def suffix(
        self, params: Params, inexact: list[Any], fixed: tuple[list[Any], Sequence[Any]]
    ) -> Any:
        """Computes the results of the loss; `fixed` has the exact activations and other inputs."""
        exact, others = fixed
        results = self.cut.suffix(self._inputs(params, others), self._merge(inexact, exact))
        return jax.tree.unflatten(jax.tree.structure(self.returns), results)

    def _typed(self, x: Any, t: Any) -> Any:
        """Casts an array to the varying axes of a type."""
        if self._axis not in varying_axes(x):
            # A value that does not vary is a constant, because all inputs vary. Without
            # `stop_gradient`, the gradient of the cast would be summed over stages.
            x = jax.lax.stop_gradient(x)
        return cast_to_varying(x, varying_axes(t))

    def _inputs(self, params: Params, others: Sequence[Any]) -> dict[int, Any]:
        return {**params, **dict(enumerate(others, self.first_other)), **self.cut.constants}

    def _params_of(self, numbers: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(i for i in numbers if i < self.first_other))

    def _sort(self, values: Iterable[Any]) -> Activations:
        sorted_ = Activations([], [])
        for x, is_inexact in zip(values, self._is_inexact, strict=True):
            (sorted_.inexact if is_inexact else sorted_.exact).append(x)
        return sorted_

    def _merge(self, inexact: Iterable[Any], exact: Iterable[Any]) -> list[Any]:
        first, second = iter(inexact), iter(exact)
        return [next(first) if is_inexact else next(second) for is_inexact in self._is_inexact]


def _varying(t: Any, axis: str) -> Any:
    """Adds an axis to the axes over which a type varies."""
    return jax.eval_shape(lambda x: cast_to_varying(x, (axis,)), t)
