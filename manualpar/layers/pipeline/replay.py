"""Runs traced programs on arrays that vary over more mesh axes than when they were traced.

For example, in the user's loss a layer's index is the same on all devices. In a pipeline the index
differs between stages, because each stage has different layers. The types in the traced program
would then be wrong. So the equations of the program are traced again, with the types of the arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.tracing.jaxprs import (
    CALLS,
    COMPOSITE,
    REMAT_PRIMITIVES,
    expanded,
    inner_jaxprs,
    run_equations,
    scan_sizes,
)


def run_retyped(jaxpr: Jaxpr, args: Sequence[Any], consts: Sequence[Any] = ()) -> list[Any]:
    """Runs a program on arguments that may vary over more axes than the program's traced inputs.

    Raises:
      ValueError: An argument that varies over more axes than its traced input goes into a loop of
        unknown length, or into a function with a custom gradient.
    """
    if not _are_wider(jaxpr.invars, args):
        return list(jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*args))
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if _are_wider(eqn.invars, operands):
            with jax.named_scope(str(eqn.source_info.name_stack)):
                out = _run_wider(jaxpr, eqn, operands)
        else:
            out = run_equations(jaxpr, [eqn], eqn.invars, eqn.outvars, operands)
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _are_wider(variables: Sequence[Any], values: Sequence[Any]) -> bool:
    """Returns whether an array varies over an axis over which its traced variable does not."""
    return any(
        not isinstance(v, Literal) and varying_axes(x) - v.aval.mat.varying
        for v, x in zip(variables, values, strict=True)
    )


def _run_wider(jaxpr: Jaxpr, eqn: Any, operands: list[Any]) -> list[Any]:
    """Runs an equation on operands that vary over more axes than the traced operands."""
    name, params = eqn.primitive.name, eqn.params
    if name == "pvary":
        return [cast_to_varying(x, params["axes"]) for x in operands]
    if name == COMPOSITE:
        return _function(expanded(eqn))(*operands)
    if name in CALLS:
        return _function(params["jaxpr"])(*operands)
    if name == "cond":
        return _run_branches(list(map(_function, params["branches"])), operands)
    if name == "scan":
        return _run_scan(params, operands)
    if name in REMAT_PRIMITIVES:
        run = jax.checkpoint(
            lambda *args: run_retyped(params["jaxpr"], args),
            policy=params["policy"],
            prevent_cse=params["prevent_cse"],
        )
        return list(run(*operands))
    if any(inner_jaxprs(eqn)):
        raise ValueError(
            "pipeline: a value that differs between layers, and not between examples, goes into a "
            f"{name} ({eqn.source_info.name_stack}), expected no such value, because the code "
            "inside was traced with a type that is equal on all stages. Add an activation times "
            "zero to the value."
        )
    operands = cast_to_varying(operands, varying_axes(operands))
    variables = [Var(jax.typeof(x)) for x in operands]  # A literal becomes a variable too.
    eqn = eqn.replace(invars=variables)
    return run_equations(jaxpr, [eqn], variables, eqn.outvars, operands)


def _function(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    return lambda *args: run_retyped(closed.jaxpr, args, closed.consts)


def _run_branches(branches: list[Callable[..., list[Any]]], operands: list[Any]) -> list[Any]:
    index, *args = operands
    types = [jax.eval_shape(branch, *args) for branch in branches]
    axes = [varying_axes(of_branches) for of_branches in zip(*types, strict=True)]

    def typed(branch: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        return lambda *args: list(map(cast_to_varying, branch(*args), axes))

    return list(jax.lax.switch(index, list(map(typed, branches)), *args))


def _run_scan(params: dict[str, Any], operands: list[Any]) -> list[Any]:
    first, size = scan_sizes(params)
    consts, carry, xs = operands[:first], operands[first:][:size], operands[first + size :]
    number, body = len(carry), _function(params["jaxpr"])

    def iteration(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        out = body(*consts, *carry, *xs)
        axes = map(varying_axes, carry)
        return list(map(cast_to_varying, out[:number], axes)), out[number:]

    slices = [jax.eval_shape(lambda x: x[0], x) for x in xs]
    for _ in carry:  # A carry must keep its type. Each round can only add axes to the type.
        types, _ = jax.eval_shape(iteration, carry, slices)
        carry = [cast_to_varying(x, varying_axes(t)) for x, t in zip(carry, types, strict=True)]
    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    end, ys = jax.lax.scan(iteration, carry, xs, **options)
    return [*end, *ys]
