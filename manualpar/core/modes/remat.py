"""Drops gathered weights after the forward pass and gathers them again for the backward pass.

Autodiff saves all residuals that the backward pass needs. The gathered weights are among them, so
every device would hold the full model. `regather_for_backward` differentiates a loss like autodiff,
but it does not save the gathered weights, or casts, transposes and slices of gathered weights. The
backward pass makes these weights again from the shards.

A residual is dropped because of *its origin*. A walk through the traced forward pass starts at the
results of gathers (operations in the scope `GATHER_SCOPE`) and of quantization in both directions
(`DECODE_SCOPE`). It follows these results through operations that only cast or move elements, and
through elementwise operations with small arrays, such as the quantization of a weight with its
scales. All other residuals are saved as autodiff would save them; the small arrays are saved too,
so nothing reads a whole weight again to find its scale. Code in the user's own `jax.checkpoint`
(`nn.remat`) is recomputed by the user's policy, except that weights are saved if they were gathered
over slow links (axes over which the backward pass does not gather again). The body of a scan and
the branches of a `cond` are treated like the program around them. So a scan over layers also
gathers one layer at a time in its backward pass. A weight that is gathered before a `cond` and read
in a branch is followed through the `cond`. The same walk runs layers as
`manualpar.core.modes.layer_loops` chooses.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun
from jax.tree_util import Partial

from manualpar.core.mesh.axes import axis_tuple
from manualpar.core.modes.layer_loops import (
    REMAT_POLICIES,
    ChosenLayers,
    LayerLoops,
    is_marked,
    unrolled_scan,
)
from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.tracing.jaxprs import (
    CALLS,
    REMAT_PRIMITIVES,
    has_effects,
    inner_jaxprs,
    run_equations,
    scan_sizes,
    without_names,
)
from manualpar.core.tracing.scopes import (
    DECODE_SCOPE,
    GATHER_SCOPE,
    RECOMPUTED_SCOPE,
    REGATHER,
    purpose_of,
    scope_names,
)
from manualpar.core.trees import Params

LOOPS = frozenset({"cond", "scan"})  # Primitives whose bodies get backward passes of their own.
GATHERS = frozenset({"all_gather", "all_gather_invariant", "reshard", "sharding_constraint"})
# The result of these operations on a weight counts as a weight too, because they are cheap to
# repeat.
CASTS = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "name",
        "pvary",
        "reduce_precision",
        "reshape",
        "slice",
        "squeeze",
        "transpose",
    }
)
# Elementwise operations of which quantization consists. Their result counts as a weight if all
# operands are weights or `SMALL`. An operand that is not a weight is never computed again: it is
# saved, so it must be smaller than the residual that it replaces.
ELEMENTWISE = frozenset(
    (
        *("abs", "add", "and", "ceil", "clamp", "div", "eq", "exp2", "floor"),
        *("ge", "gt", "is_finite", "le", "log2", "lt", "max", "min", "mul"),
        *("ne", "neg", "not", "or", "round", "select_n", "sign", "sub"),
    )
)
SMALL = 16  # A small array has at most a 16th of the elements of the weight, which may have 8 bits.


def regather_for_backward(
    function: Callable[..., Any],
    *,
    keep_gathered: bool = False,
    axes: tuple[str, ...] | None = None,
    check: Callable[[Jaxpr], None] = lambda jaxpr: None,
    loops: LayerLoops | None = None,
) -> Callable[..., Any]:
    """Makes the backward pass of a function gather and dequantize parameters again.

    Args:
      function: A differentiable function of pytrees of arrays, such as a loss whose parameters
        gather themselves.
      keep_gathered: Whether to save the gathered arrays, and only dequantize again.
      axes: The mesh axes over which to gather again; `None` for all axes. Arrays gathered over the
        other axes are saved in the format in which they were received.
      check: Called with the traced function, before anything differentiates it.
      loops: Chooses how layers run; by default they run as the function says. The parameters are
        the function's first argument.

    Communication:
      The backward pass has one more all-gather for each parameter whose value it needs. (It does
      not need the value of a bias or of the first layer's kernel.)
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        check(closed.jaxpr)
        layers = ChosenLayers()
        if loops is not None:
            layers = loops.choose(closed.jaxpr, len(jax.tree.leaves(args[0])))
        is_repeated = _IsRepeated(keep_gathered, axes, layers)
        out = _regathering(closed, is_repeated, in_loop=False)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return run


class _IsRepeated(NamedTuple):
    """Selects the equations that gather or dequantize weights, which the backward pass repeats.

    `layers` selects those that run in another way than the program says.
    """

    keep_gathered: bool
    axes: tuple[str, ...] | None
    layers: ChosenLayers = ChosenLayers()

    def __call__(self, eqn: Any) -> bool:
        name_stack = str(eqn.source_info.name_stack)
        is_gather = eqn.primitive.name in GATHERS and not self.keep_gathered
        is_ours = is_gather and purpose_of(name_stack) in (GATHER_SCOPE, REGATHER)
        gathers = is_ours and not self.is_saved(eqn.primitive, **eqn.params)
        return gathers or DECODE_SCOPE in scope_names(name_stack)

    def is_saved(self, primitive: Any, *_: Any, **params: Params) -> bool:
        """Returns whether an equation gathers over an axis not in `axes`; its result is then saved.

        The method also serves as a policy for the user's checkpoints.
        """
        is_gather = self.axes is not None and primitive.name in GATHERS
        return is_gather and not {*axis_tuple(params["axis_name"])} <= {*(self.axes or ())}


def _regathering(
    closed: ClosedJaxpr, is_repeated: _IsRepeated, *, in_loop: bool
) -> Callable[..., list[Any]]:
    """Turns a traced program into a function whose backward pass makes the weights again."""
    is_changed = any(map(is_repeated.layers.changes, closed.jaxpr.eqns))
    if not is_changed and not _makes_weights(closed.jaxpr, is_repeated):
        return jaxpr_as_fun(closed)
    evaluate = functools.partial(_evaluate, closed, functools.partial(_nested, is_repeated))
    is_outside_loops = _makes_weights(closed.jaxpr, is_repeated, but_not_in=LOOPS)
    return _drop_weights(evaluate, is_repeated, in_loop=in_loop) if is_outside_loops else evaluate


def _evaluate(
    closed: ClosedJaxpr, nested: Callable[[Any], Callable[..., Any] | None], *args: Any
) -> list[Any]:
    """Runs a program; if `nested` returns a function for an equation, calls it instead."""
    jaxpr = closed.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for eqn in jaxpr.eqns:
        operands = [read(variable) for variable in eqn.invars]
        if (function := nested(eqn)) is not None:
            with jax.named_scope(str(eqn.source_info.name_stack)):
                out = function(*operands)
        else:
            out = run_equations(jaxpr, [eqn], eqn.invars, eqn.outvars, operands)
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _nested(is_repeated: _IsRepeated, eqn: Any) -> Callable[..., Any] | None:
    """Returns a replacement for a call, or for a loop or checkpoint with weights; else `None`."""
    name = eqn.primitive.name
    if name in CALLS:
        return functools.partial(_run_nested, name, eqn.params, is_repeated)
    if name in LOOPS | REMAT_PRIMITIVES:
        if is_repeated.layers.changes(eqn):
            return functools.partial(_run_layers, eqn, is_repeated)
        if _makes_inside(eqn, is_repeated):
            return functools.partial(_run_nested, name, eqn.params, is_repeated)
    return None


def _run_layers(eqn: Any, is_repeated: _IsRepeated, *args: Any) -> Any:
    """Runs a loop over layers, or a layer with a mark, as `is_repeated.layers` chooses."""
    name, params, layers = eqn.primitive.name, eqn.params, is_repeated.layers
    if is_marked(eqn):
        return _with_policy(ClosedJaxpr(params["jaxpr"], ()), is_repeated, params["prevent_cse"])(
            *args
        )
    if name != "scan":
        return _run_nested(name, params, is_repeated, *args)
    is_unrolled, body = layers.unrolls(eqn), params["jaxpr"]
    if id(eqn) not in layers.loops:
        layer = _regathering(body, is_repeated, in_loop=not is_unrolled)
    else:
        layer = _with_policy(body, is_repeated, is_unrolled)
    return unrolled_scan(layer, params, args) if is_unrolled else _run_scan(layer, params, args)


def _with_policy(
    closed: ClosedJaxpr, is_repeated: _IsRepeated, prevent_cse: bool
) -> Callable[..., Any]:
    """Returns a layer whose backward pass computes again as `is_repeated.layers` chooses."""
    assert is_repeated.layers.choice is not None
    remat = is_repeated.layers.choice.remat
    if remat == "none":
        return _regathering(closed, is_repeated, in_loop=not prevent_cse)
    params = {"jaxpr": closed, "policy": REMAT_POLICIES[remat], "prevent_cse": prevent_cse}
    return functools.partial(_run_nested, "checkpoint", params, is_repeated)


def _run_nested(name: str, params: dict[str, Any], is_repeated: _IsRepeated, *args: Any) -> Any:
    """Runs a call, checkpoint, scan or `cond` so that its backward pass makes the weights again."""
    if name in CALLS:  # Inlines the call, so that the walk finds the casts inside.
        with jax.named_scope(params["name"]):
            return _evaluate(params["jaxpr"], functools.partial(_nested, is_repeated), *args)
    if name in REMAT_PRIMITIVES:
        policy = jax.checkpoint_policies.save_from_both_policies(
            params["policy"] or jax.checkpoint_policies.nothing_saveable, is_repeated.is_saved
        )
        closed = params["jaxpr"]
        closed = closed if isinstance(closed, ClosedJaxpr) else ClosedJaxpr(closed, ())
        function = jaxpr_as_fun(closed)
        return jax.checkpoint(function, policy=policy, prevent_cse=params["prevent_cse"])(*args)
    if name == "cond":
        branches = [_regathering(x, is_repeated, in_loop=True) for x in params["branches"]]
        return jax.lax.switch(args[0], branches, *args[1:])
    return _run_scan(_regathering(params["jaxpr"], is_repeated, in_loop=True), params, args)


def _run_scan(
    body: Callable[..., list[Any]], params: dict[str, Any], args: Sequence[Any]
) -> list[Any]:
    first, size = scan_sizes(params)
    consts, carry, xs = args[:first], [*args[first:][:size]], args[first + size :]

    def iteration(carry: Any, xs: Any) -> Any:
        out = body(*consts, *carry, *xs)
        return out[: len(carry)], out[len(carry) :]

    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    end, ys = jax.lax.scan(iteration, carry, xs, **options)
    return [*end, *ys]


def _drop_weights(
    function: Callable[..., list[Any]], is_repeated: _IsRepeated, *, in_loop: bool
) -> Callable[..., list[Any]]:
    """Wraps a function of arrays so that it saves no weights for its backward pass."""
    run = jax.custom_vjp(function)

    def forward(*args: Any) -> tuple[Any, Any]:
        count, values = len(args), [arg.value for arg in args]
        # Constants get no gradient, as in autodiff: a gradient could even cost a collective.
        wanted = [i for i, arg in enumerate(args) if arg.perturbed]

        def out_and_vjp(*values: Any) -> Any:
            return jax.vjp(
                lambda *primals: function(*_put(primals, wanted, values)),
                *(values[i] for i in wanted),
            )

        closed, shapes = jax.make_jaxpr(out_and_vjp, return_shape=True)(*values)
        inlined = functools.partial(_unused_rule, is_repeated)
        if any(map(inlined, closed.jaxpr.eqns)):
            closed = jax.make_jaxpr(functools.partial(_evaluate, closed, inlined))(*values)
        out, vjp = map(jax.tree.structure, shapes)
        residuals = _Residuals(closed.jaxpr, len(jax.tree.leaves(shapes[0])), is_repeated)
        flat, saved, inputs = residuals.compute(closed.consts, values)

        def backward(saved: Sequence[Any], inputs: Sequence[Any], cotangents: Any) -> Any:
            is_zero = lambda x: isinstance(x, SymbolicZero)  # noqa: E731
            cotangents = jax.tree.map(_instantiate, cotangents, is_leaf=is_zero)
            if not in_loop:  # The barrier keeps XLA from merging the second gather with the first.
                inputs = _hold_until(cotangents, inputs)
            pullback = jax.tree.unflatten(vjp, residuals.restore(saved, inputs))
            return _put(pullback(cotangents), wanted, (None,) * count)

        return jax.tree.unflatten(out, flat), Partial(backward, saved, inputs)

    run.defvjp(forward, lambda pullback, cotangents: pullback(cotangents), symbolic_zeros=True)
    return run


def _put(new: Iterable[Any], indices: Sequence[int], values: Iterable[Any]) -> tuple[Any, ...]:
    """Returns `values` with `new` at `indices`."""
    by_index = dict(zip(indices, new, strict=True))
    return tuple(by_index.get(i, x) for i, x in enumerate(values))


class _Residuals:
    """The residuals of a traced forward pass: saved residuals, and weights that are made again."""

    def __init__(self, jaxpr: Jaxpr, num_outputs: int, is_repeated: _IsRepeated) -> None:
        self._jaxpr = jaxpr
        self._out, residuals = jaxpr.outvars[:num_outputs], jaxpr.outvars[num_outputs:]
        weights, spread, parts = _weights(jaxpr, is_repeated)
        made = weights | spread
        makers = [parts.get(id(x), x) for x in jaxpr.eqns if not made.isdisjoint(x.outvars)]
        self._is_dropped = [isinstance(v, Var) and v in weights for v in residuals]
        pairs = list(zip(residuals, self._is_dropped, strict=True))
        self._dropped = [variable for variable, is_dropped in pairs if is_dropped]
        self._saved = [variable for variable, is_dropped in pairs if not is_dropped]
        self._eqns = _needed(makers, self._dropped)
        operands = (v for eqn in self._eqns for v in _variables(eqn) if v not in made)
        self._inputs = list(dict.fromkeys(operands))

    def compute(self, consts: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Runs the forward pass.

        Returns:
          The results, the saved residuals, and the arrays from which `restore` makes the weights.
        """
        outvars = [*self._out, *self._saved, *self._inputs]
        jaxpr = self._jaxpr.replace(
            eqns=_needed(self._jaxpr.eqns, outvars),
            outvars=outvars,
            debug_info=without_names(self._jaxpr),
        )
        values = jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*args)
        first, last = len(self._out), len(self._out) + len(self._saved)
        return values[:first], values[first:last], values[last:]

    def restore(self, saved: Iterable[Any], inputs: Sequence[Any]) -> list[Any]:
        """Makes the weights again, and returns all residuals."""
        with jax.named_scope(RECOMPUTED_SCOPE):
            weights = iter(
                run_equations(self._jaxpr, self._eqns, self._inputs, self._dropped, inputs)
            )
        others = iter(saved)
        return [next(weights if is_dropped else others) for is_dropped in self._is_dropped]


def _weights(jaxpr: Jaxpr, is_repeated: _IsRepeated) -> tuple[set[Var], set[Var], dict[int, Any]]:
    """Finds the variables that are weights, and small arrays that are spread over many elements.

    A spread array is dropped only if an operation combines it with a weight; then it is in the
    first set too. Also returns each `cond` and each barrier with weights among its results, reduced
    to them, by the identity of the equation.
    """
    weights: set[Var] = set()
    spread: set[Var] = set()
    parts: dict[int, Any] = {}
    for eqn in jaxpr.eqns:
        if is_repeated(eqn):
            weights.update(eqn.outvars)
        elif _is_in(CASTS | ELEMENTWISE, eqn):
            operands = set(_variables(eqn))
            found = operands & weights
            largest = max(map(_size, found or eqn.outvars), default=0)
            if all(_size(v) * SMALL <= largest for v in operands - weights - spread):
                (weights if found else spread).update(eqn.outvars)
                weights.update(operands & spread if found else ())
        elif (part := _weights_of(eqn, weights)) is not None:
            weights.update(part.outvars)
            parts[id(eqn)] = part
    return weights, spread, parts


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape)


def _is_in(names: frozenset[str], eqn: Any) -> bool:
    """Returns whether an equation is one of the operations, or a call of nothing else."""
    if eqn.primitive.name in CALLS:
        return all(_is_in(names, x) for _, inner in inner_jaxprs(eqn) for x in inner.eqns)
    return eqn.primitive.name in names


def _weights_of(eqn: Any, weights: set[Var]) -> Any:
    """Reduces a `cond` or a barrier to its results that are weights; `None` if there are none.

    Each result of a barrier is one of its operands.
    """
    if eqn.primitive.name != "optimization_barrier":
        return _weights_of_cond(eqn, weights)
    pairs = [
        (v, out)
        for v, out in zip(eqn.invars, eqn.outvars, strict=True)
        if isinstance(v, Var) and v in weights
    ]
    if not pairs:
        return None
    operands, results = map(list, zip(*pairs, strict=True))
    return eqn.replace(invars=operands, outvars=results)


def _weights_of_cond(eqn: Any, weights: set[Var]) -> Any:
    """Reduces a `cond` to its results that are weights; returns `None` if there are none.

    Autodiff makes a weight that a branch reads a result of the `cond`. The other branches return
    constants in its place.
    """
    is_weight = [isinstance(v, Var) and v in weights for v in eqn.invars]
    if eqn.primitive.name != "cond" or not any(is_weight):
        return None
    branches = eqn.params["branches"]
    origins = [_origins(branch.jaxpr, is_weight[1:]) for branch in branches]
    by_result = list(zip(*origins, strict=True))
    chosen = [i for i, of in enumerate(by_result) if "weight" in of and None not in of]
    if not chosen:
        return None

    def reduced(branch: ClosedJaxpr) -> ClosedJaxpr:
        jaxpr = branch.jaxpr
        outvars = [jaxpr.outvars[i] for i in chosen]
        jaxpr = jaxpr.replace(
            invars=[v for v, kept in zip(jaxpr.invars, is_weight[1:], strict=True) if kept],
            outvars=outvars,
            eqns=_needed(jaxpr.eqns, outvars),
            debug_info=without_names(jaxpr),
        )
        return ClosedJaxpr(jaxpr, branch.consts)

    condition, *operands = eqn.invars
    return eqn.replace(
        invars=[condition, *(v for v, kept in zip(operands, is_weight[1:], strict=True) if kept)],
        outvars=[eqn.outvars[i] for i in chosen],
        params={**eqn.params, "branches": tuple(map(reduced, branches))},
    )


def _origins(jaxpr: Jaxpr, is_weight: Sequence[bool]) -> list[str | None]:
    """Returns, for each result of a branch, whether it is a weight, a constant or `None` of them.

    `is_weight` says which of the operands are weights.
    """
    found: dict[Any, str] = {
        v: "weight" for v, is_true in zip(jaxpr.invars, is_weight, strict=True) if is_true
    }
    for eqn in jaxpr.eqns:
        origins = {found.get(v) for v in _variables(eqn)}
        if not origins or (eqn.primitive.name in CASTS and None not in origins):
            origin = "weight" if "weight" in origins else "constant"
            found.update(dict.fromkeys(eqn.outvars, origin))
    return ["constant" if isinstance(v, Literal) else found.get(v) for v in jaxpr.outvars]


def _instantiate(cotangent: Any) -> Any:
    """Turns a cotangent, even a symbolic zero, into an array of its type."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    if cotangent.dtype == jax.dtypes.float0:
        return np.zeros(cotangent.shape, cotangent.dtype)
    aval: Any = cotangent.aval
    zero = cast_to_varying(jnp.zeros(aval.shape, aval.dtype), aval.mat.varying)
    # If types have shardings, the array must have the cotangent's sharding.
    is_typed = bool(jax.sharding.get_abstract_mesh().explicit_axes)
    return jax.sharding.reshard(zero, aval.sharding.spec) if is_typed else zero


def _hold_until(values: Any, inputs: Sequence[Any]) -> list[Any]:
    """Returns the inputs through a barrier, so that XLA uses them only after `values` exist."""
    inputs = list(inputs)
    by_type: dict[frozenset[str], list[int]] = {}
    for i, x in enumerate(inputs):  # The operands of a barrier must all vary over the same axes.
        by_type.setdefault(varying_axes(x), []).append(i)
    for axes, indices in by_type.items():
        before = [x for x in jax.tree.leaves(values) if varying_axes(x) <= axes]
        together = [inputs[i] for i in indices], before
        for i, x in zip(indices, jax.lax.optimization_barrier(together)[0], strict=True):
            inputs[i] = x
    return inputs


def _needed(eqns: Sequence[Any], outvars: Iterable[Any]) -> list[Any]:
    """Keeps only the equations that contribute to `outvars` or have effects."""
    needed = {v for v in outvars if isinstance(v, Var)}
    found: list[Any] = []
    for eqn in reversed(eqns):
        if has_effects(eqn) or not needed.isdisjoint(eqn.outvars):
            found.append(eqn)
            needed.update(_variables(eqn))
    return found[::-1]


def _variables(eqn: Any) -> list[Var]:
    return [v for v in eqn.invars if isinstance(v, Var)]


def _unused_rule(is_repeated: _IsRepeated, eqn: Any) -> Callable[..., Any] | None:
    """Returns the body of a gather whose gradient rule is unused; `None` for other equations.

    The rule is unused if the weight is frozen.
    """
    if "custom_vjp" not in eqn.primitive.name or not _makes_inside(eqn, is_repeated):
        return None
    (closed,) = (x for x in eqn.params.values() if isinstance(x, ClosedJaxpr))
    return jaxpr_as_fun(closed)


def _makes_weights(
    jaxpr: Jaxpr, is_repeated: _IsRepeated, *, but_not_in: frozenset[str] = frozenset()
) -> bool:
    """Returns whether a program has equations that `is_repeated` selects, except in checkpoints.

    If weights are gathered again over only some axes, equations in the user's checkpoints count
    too. Primitives in `but_not_in` are not searched.
    """
    return any(
        is_repeated(eqn)
        or (eqn.primitive.name not in but_not_in and _makes_inside(eqn, is_repeated))
        for eqn in jaxpr.eqns
    )


def _makes_inside(eqn: Any, is_repeated: _IsRepeated) -> bool:
    if eqn.primitive.name in REMAT_PRIMITIVES and is_repeated.axes is None:
        return False  # The user's policy decides what is recomputed inside.
    return any(_makes_weights(inner, is_repeated) for _, inner in inner_jaxprs(eqn))
