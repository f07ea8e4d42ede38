"""Chooses the arrays that a stage keeps between the forward and the backward pass of a chunk.

With `"inputs"` a stage keeps the input of the chunk, and the backward pass computes the chunk
again. With `"residuals"` a stage keeps the residuals of autodiff, which a remat policy in the
layers may choose. It does not keep residuals that do not depend on the chunk's input: parameters,
casts of parameters, masks and random bits. The backward pass computes these again from the
parameters and the microbatch, so they take no slot.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from manualpar.core.tracing.jaxprs import without_names
from manualpar.core.tracing.scopes import RECOMPUTED_SCOPE
from manualpar.layers.pipeline.staged_loss import Activations

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
