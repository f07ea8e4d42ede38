"""Walks through traced programs, and runs parts of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.extend.core.primitives import closed_call_p, custom_vjp_call_p
from jax.interpreters.partial_eval import dce_jaxpr

from manualpar.core.tracing.scopes import scope_names

CALLS = frozenset({"jit", "pjit"})
REMAT_PRIMITIVES = frozenset({"checkpoint", "remat", "remat2"})
# The primitives that cast between the types of `check_vma`, with the names before and in jax 0.12.
_TYPE_CAST_WORDS = """
preduced pvary reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p
"""
TYPE_CASTS = frozenset(_TYPE_CAST_WORDS.split())
# Operations of which an entry of a result depends only on the operands' entries at its place.
_ELEMENTWISE_WORDS = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2
expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul name
ne neg nextafter not one_minus_square or population_count pow real reduce_precision rem round rsqrt
select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
stop_gradient sub tan tanh xor
"""
ELEMENTWISE = frozenset(_ELEMENTWISE_WORDS.split())
# A primitive of jax 0.12 that is lowered to other primitives at compile time.
COMPOSITE = "call_hi_primitive"


def all_equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yields every equation of a program, an outer equation before the equations inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for _, inner in inner_jaxprs(eqn):
            yield from all_equations(inner)


def inner_jaxprs(eqn: Any) -> Iterator[tuple[str, Jaxpr]]:
    """Yields the jaxprs among an equation's parameters, each with the name of its parameter.

    For a composite primitive, yields its expansion.
    """
    if eqn.primitive.name == COMPOSITE:
        yield "_prim", expanded(eqn).jaxpr
        return
    for name, value in eqn.params.items():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, ClosedJaxpr):
                yield name, inner.jaxpr
            elif isinstance(inner, Jaxpr):
                yield name, inner


def expanded(eqn: Any) -> ClosedJaxpr:
    """Expands a composite primitive into a program."""
    primitive = eqn.params["_prim"]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), primitive.in_avals)
    try:
        return jax.make_jaxpr(primitive.expand)(*shapes)
    except NameError as error:
        raise ValueError(
            f"{type(primitive).__name__} ({eqn.source_info.name_stack}) contains a collective, "
            "expected a composite primitive of jax without one. In the model, write the operations "
            "of the primitive in its place."
        ) from error


def without_gradients(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a program whose functions with gradients of their own are ordinary functions.

    JAX finds no operations without use in a function that defines its gradient, so all of its
    results seem to depend on all of its arguments.
    """

    def ordinary(eqn: Any) -> Any:
        if eqn.primitive is not custom_vjp_call_p:
            return eqn
        inner = eqn.params["call_jaxpr"]
        inner = inner.replace(jaxpr=without_gradients(inner.jaxpr))
        return eqn.replace(primitive=closed_call_p, params={"call_jaxpr": inner})

    return jaxpr.replace(eqns=[ordinary(eqn) for eqn in jaxpr.eqns])


def in_scope(name: str) -> Callable[[Any], bool]:
    """Returns a function that says whether an equation is in the named scope `name`."""
    return lambda eqn: name in scope_names(str(eqn.source_info.name_stack))


# Operations that only move or cast the elements of their first operand.
_MOVES = TYPE_CASTS | {
    *("broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "name", "pcast"),
    *("reduce_precision", "reshape", "slice", "squeeze", "transpose"),
}


def read_only_by(
    jaxpr: Jaxpr,
    is_reader: Callable[[Any], bool],
    is_origin: Callable[[Any], bool] | None = None,
) -> dict[Any, frozenset[Any]]:
    """Finds the values that are read, and only by equations with `is_reader(eqn)`.

    The elements of a value are followed through operations that move or cast them, into calls, and
    into the iterations of loops. A value that a loop carries, or that a program returns, counts as
    read by something else.

    Args:
      is_origin: Which equations' first results are followed. By default the inputs of `jaxpr` are.

    Returns:
      For each value the dtypes in which these equations read it; none if something else reads it
      too. The keys are the numbers of inputs, or the named scopes of equations.
    """
    found, others = dict[Any, set[Any]](), set[Any]()

    def walk(jaxpr: Jaxpr, origins: list[frozenset[Any]]) -> list[frozenset[Any]]:
        of = {v: x for v, x in zip(jaxpr.invars, origins, strict=True) if x}

        def origin(v: Any) -> frozenset[Any]:
            return frozenset() if isinstance(v, Literal) else of.get(v, frozenset())

        for eqn in jaxpr.eqns:
            operands = [origin(v) for v in eqn.invars]
            inner = [x for _, x in inner_jaxprs(eqn)]
            if is_origin and is_origin(eqn):
                key = str(eqn.source_info.name_stack)
                found.setdefault(key, set())
                of[eqn.outvars[0]] = frozenset({key})
                continue
            if not any(operands) and not (is_origin and inner):
                continue
            name, first = eqn.primitive.name, 0
            if is_reader(eqn):
                for v, keys in zip(eqn.invars, operands, strict=True):
                    aval: Any = v.aval
                    for key in keys:
                        found.setdefault(key, set()).add(aval.dtype)
                continue
            if name in _MOVES:
                others.update(*operands[1:])
                of[eqn.outvars[0]] = operands[0]
                continue
            if name == "optimization_barrier":
                of.update(zip(eqn.outvars, operands, strict=True))
                continue
            if name == "cond":
                first = 1
            if name == "scan":
                consts, carried = scan_sizes(eqn.params)
                others.update(*operands[consts : consts + carried])
            if not inner or any(len(x.invars) != len(operands) - first for x in inner):
                others.update(*operands)
                for x in inner:
                    others.update(*walk(x, [frozenset() for _ in x.invars]))
                continue
            results = [walk(x, operands[first:]) for x in inner]
            if name == "scan":
                for result in results:
                    others.update(*result)
            else:
                for i, v in enumerate(eqn.outvars):
                    of[v] = frozenset().union(*(result[i] for result in results))
        return [origin(v) for v in jaxpr.outvars]

    inputs = range(0 if is_origin else len(jaxpr.invars))
    found.update((i, set()) for i in inputs)
    of_inputs = [frozenset({i} & set(inputs)) for i in range(len(jaxpr.invars))]
    others.update(*walk(jaxpr, of_inputs))
    return {key: frozenset(() if key in others else x) for key, x in found.items()}


def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many of a scan's operands are constants, and how many are carried values."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # jax 0.12 has both in this parameter.
    return len(consts), len(carry)


def has_effects(eqn: Any) -> bool:
    """Returns whether an equation has effects other than the axis name of a collective."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def without_names(jaxpr: Jaxpr) -> Any:
    """Returns a program's debug info without the names of arguments and results."""
    return jaxpr.debug_info._replace(arg_names=None, result_paths=None)


def run_needed(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function of pytrees of arrays, without the equations that its results do not need."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    old = closed.jaxpr
    operands = [*closed.consts, *jax.tree.leaves(args)]
    invars = [*old.constvars, *old.invars]
    program = Jaxpr((), invars, old.outvars, old.eqns, old.effects, without_names(old))
    program, is_used = dce_jaxpr(program, [True] * len(old.outvars))
    used = [x for x, is_used in zip(operands, is_used, strict=True) if is_used]
    out = jaxpr_as_fun(ClosedJaxpr(program, ()))(*used)
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


def run_equations(
    jaxpr: Jaxpr, eqns: list[Any], invars: Iterable[Any], outvars: list[Any], args: Iterable[Any]
) -> list[Any]:
    """Runs the equations `eqns` of `jaxpr`, with `args` as `invars`; returns the `outvars`."""
    operands = {v: x for v, x in zip(invars, args, strict=True) if not isinstance(v, Literal)}
    effects = frozenset[Any]().union(*(eqn.effects for eqn in eqns))
    program = Jaxpr((), list(operands), outvars, eqns, effects, without_names(jaxpr))
    return list(jaxpr_as_fun(ClosedJaxpr(program, ()))(*operands.values()))
