"""A loss whose layers run in chunks: the functions that a stage calls and differentiates.

Two kinds of activations are sent from chunk to chunk: the carry of the scan over the model's
layers, and a buffer `[L, ...]` for each stacked output of this scan. Every chunk writes the entries
of its layers into the buffers. So the suffix (the operations after the scan, see `cut`) gets the
outputs of all layers. The gradients of the buffers are sent back with the gradients of the carry.

Symbols: `S` stages, `L` layers of the model, `k` layers of a chunk.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.tracing.jaxprs import without_names
from manualpar.core.tracing.scopes import RECOMPUTED_SCOPE
from manualpar.layers.pipeline.cut import Cut, check_divides

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
          axis: The mesh axis of stages, over which all inputs vary.
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
        self._types = [varying(t, axis) for t in (*cut.carry, *cut.ys)]
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


def varying(t: Any, axis: str) -> Any:
    """Adds an axis to the axes over which a type varies."""
    return jax.eval_shape(lambda x: cast_to_varying(x, (axis,)), t)


# -------------------------------------------------------------------------------------------------
# Buffers of slots, in which a pipeline's stages keep arrays, and a `cond` that copies no buffer.
#
# XLA copies a buffer if a branch of a `cond` reads a slot of the buffer. So slots are read outside
# of branches, by every stage in every tick. A branch may write a slot if the other branch returns
# the buffers unchanged.


def zeros(types: Any) -> Any:
    """Makes arrays of zeros with the shapes, dtypes and varying axes of `types`."""
    return jax.tree.map(
        lambda t: cast_to_varying(jnp.zeros(t.shape, t.dtype), varying_axes(t)), types
    )


def slots(types: Any, number: int) -> Any:
    """Makes buffers with `number` slots for arrays of these types."""
    return jax.tree.map(
        lambda t: zeros(jax.eval_shape(lambda x: jnp.stack([x] * number), t)), types
    )


def read(buffers: Any, slot: Any) -> Any:
    """Reads the arrays in a slot of buffers; for slot -1 the caller must not use the result."""
    slot = jnp.maximum(slot, 0)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot, keepdims=False), buffers)


def put(buffers: Any, slot: Any, values: Any) -> Any:
    """Returns the buffers with arrays in a slot; the slot must not be -1."""
    return jax.tree.map(
        lambda buffer, x: jax.lax.dynamic_update_index_in_dim(buffer, x, slot, 0), buffers, values
    )


def write(buffers: Any, slot: Any, values: Any) -> Any:
    """Returns the buffers with arrays in a slot, or unchanged buffers if the slot is -1."""
    chosen = jax.tree.map(lambda old, x: jnp.where(slot >= 0, x, old), read(buffers, slot), values)
    return put(buffers, jnp.maximum(slot, 0), chosen)


def branch(
    condition: Any,
    run: Callable[[], Any],
    types: Any,
    *,
    scope: str,
    otherwise: Callable[[], Any] | None = None,
    anywhere: Any = None,
) -> Any:
    """Calls `run` if a condition holds, otherwise `otherwise`, in a `lax.cond`.

    Without `otherwise` the other branch makes zeros. The results have the types `types`. `scope` is
    the named scope around the `cond`. A permute may not be in a branch that only some devices take.
    So if `run` contains a permute, pass `anywhere`, which is whether the condition holds on any
    device. If it holds on any, all devices call `run`.
    """

    def typed(function: Callable[[], Any]) -> Any:
        return jax.tree.map(lambda t, x: cast_to_varying(x, varying_axes(t)), types, function())

    def rest() -> Any:
        return typed(otherwise or (lambda: zeros(types)))

    def run_together() -> Any:
        return jax.tree.map(functools.partial(jnp.where, condition), typed(run), rest())

    with jax.named_scope(scope):
        if anywhere is not None:
            return jax.lax.cond(anywhere, run_together, rest)
        return jax.lax.cond(condition, lambda: typed(run), rest)


# -------------------------------------------------------------------------------------------------
# Chooses the arrays that a stage keeps between the forward and the backward pass of a chunk.
#
# With `"inputs"` a stage keeps the input of the chunk, and the backward pass computes the chunk
# again. With `"residuals"` a stage keeps the residuals of autodiff, which a remat policy in the
# layers may choose. It does not keep residuals that do not depend on the chunk's input:
# parameters, casts of parameters, masks and random bits. The backward pass computes these again
# from the parameters and the microbatch, so they take no slot.


PipelineSaves = Literal["residuals", "inputs"]
# (parameters, inexact activations, (exact activations, ...)) -> activations.
Chunk = Callable[[Any, list[Any], Any], Activations]


class KeptInputs:
    """Keeps only the input of a chunk between its forward and its backward pass.

    Attributes:
      types: The types of the kept arrays other than the input.
      keeps_input: Whether the backward pass reads the input.
    """

    keeps_input = True

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        self.types: list[Any] = []

    def forward(self, params: Any, inexact: list[Any], fixed: Any) -> tuple[Activations, list[Any]]:
        """Runs the chunk; returns its result and the kept values."""
        return self._chunk(params, inexact, fixed), []

    def backward(
        self, params: Any, inexact: list[Any], fixed: Any, kept: list[Any], gradient: list[Any]
    ) -> tuple[Any, list[Any]]:
        """Computes the gradients of parameters and input from the gradient of the result."""
        del kept
        with jax.named_scope(RECOMPUTED_SCOPE):
            _, pullback, _ = _vjp(self._chunk, params, inexact, fixed)
        grads, dx = pullback(gradient)
        return grads, dx


class KeptResiduals(KeptInputs):
    """Keeps the residuals of autodiff that depend on the chunk's input."""

    def __init__(self, chunk: Chunk, params: Any, inexact: list[Any], fixed: Any) -> None:
        """Traces a chunk for arguments of these types; `fixed[0]` is the exact activations."""
        super().__init__(chunk)

        def differentiated(params: Any, inexact: list[Any], fixed: Any) -> Any:
            out, pullback, exact = _vjp(chunk, params, inexact, fixed)
            return Activations(out, exact), pullback

        args = params, inexact, fixed
        closed, (out, pullback) = jax.make_jaxpr(differentiated, return_shape=True)(*args)
        self._out, self._pullback = map(jax.tree.structure, (out, pullback))
        consts = list(closed.jaxpr.constvars)
        jaxpr = closed.jaxpr.replace(
            constvars=(),
            invars=[*consts, *closed.jaxpr.invars],
            debug_info=without_names(closed.jaxpr),
        )
        self._consts = closed.consts
        is_input = [False] * len(consts)
        for tree, is_activation in ((params, 0), (inexact, 1), (fixed[0], 1), (fixed[1:], 0)):
            is_input += [bool(is_activation)] * len(jax.tree.leaves(tree))
        number = len(jax.tree.leaves(out))
        residuals = jaxpr.outvars[number:]
        inputs = {v: i - len(consts) for i, v in enumerate(jaxpr.invars) if is_input[i]}
        # A residual is an input, is kept, or is computed again.
        self._inputs = [inputs.get(v) if isinstance(v, Var) else None for v in residuals]
        self._is_kept = [
            place is None and _depends(jaxpr, number + i, is_input)
            for i, place in enumerate(self._inputs)
        ]
        kept = [v for v, is_kept in zip(residuals, self._is_kept, strict=True) if is_kept]
        made = [
            v
            for v, is_kept, place in zip(residuals, self._is_kept, self._inputs, strict=True)
            if not is_kept and place is None
        ]
        self._number = number
        self._forward = _reduced(jaxpr, [*jaxpr.outvars[:number], *kept])
        self._again = _reduced(jaxpr, made)
        self.types = [jax.eval_shape(lambda x: x, v.aval) for v in kept]
        self.keeps_input = any(place is not None for place in self._inputs)

    def forward(self, params: Any, inexact: list[Any], fixed: Any) -> tuple[Activations, list[Any]]:
        """Runs the chunk; returns its result and the kept values."""
        results = self._run(self._forward, (params, inexact, fixed))
        out: Activations = jax.tree.unflatten(self._out, results[: self._number])
        return out, results[self._number :]

    def backward(
        self, params: Any, inexact: list[Any], fixed: Any, kept: list[Any], gradient: list[Any]
    ) -> tuple[Any, list[Any]]:
        """Computes the gradients of parameters and input from the gradient of the result."""
        args = params, inexact, fixed
        leaves = jax.tree.leaves(args)
        with jax.named_scope(RECOMPUTED_SCOPE):
            made = iter(self._run(self._again, args))
        stored = iter(kept)
        residuals = [
            leaves[place] if place is not None else next(stored if is_kept else made)
            for place, is_kept in zip(self._inputs, self._is_kept, strict=True)
        ]
        grads, dx = jax.tree.unflatten(self._pullback, residuals)(gradient)
        return grads, dx

    def _run(self, part: tuple[Jaxpr, list[bool]], args: Any) -> list[Any]:
        jaxpr, are_read = part
        values = [*self._consts, *jax.tree.leaves(args)]
        read = [x for x, is_read in zip(values, are_read, strict=True) if is_read]
        return list(jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*read))


def _vjp(chunk: Chunk, params: Any, inexact: list[Any], fixed: Any) -> Any:
    def run(params: Any, inexact: list[Any]) -> tuple[list[Any], list[Any]]:
        out = chunk(params, inexact, fixed)
        return out.inexact, out.exact

    return jax.vjp(run, params, inexact, has_aux=True)


def _depends(jaxpr: Jaxpr, result: int, on: Sequence[bool]) -> bool:
    """Returns whether result number `result` depends on an input that is marked in `on`."""
    wanted = [i == result for i in range(len(jaxpr.outvars))]
    return any(is_read and i for is_read, i in zip(dce_jaxpr(jaxpr, wanted)[1], on, strict=True))


def _reduced(jaxpr: Jaxpr, outvars: list[Any]) -> tuple[Jaxpr, list[bool]]:
    """Keeps the equations that `outvars` need; also returns which inputs these equations read."""
    return dce_jaxpr(jaxpr.replace(outvars=outvars), [True] * len(outvars))
