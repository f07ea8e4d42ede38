"""Gathered weights that are dropped after the forward pass and gathered again for the backward one.

What autodiff keeps of a forward pass would otherwise hold every gathered parameter until its
gradient is computed: the whole model, of which each device wanted to hold a shard. The policy
`drop_gathered` of a `jax.checkpoint` around the loss keeps everything else and drops those, and
with them the casts, transposes and reshapes that layers make of them before they compute.

A policy sees one operation at a time and not where its operands come from, so a weight is known by
its number of elements: an activation that has just as many is at worst cast, transposed or reshaped
once more. And a policy governs all that is inside, which two things must be protected from:

- a `jax.checkpoint` (`nn.remat`) of the user's own, which would cease to recompute,
- a scan over layers, whose weights would all be gathered at once before its backward pass begins.

Both are put into functions with a rule for their own gradient, which keeps what they want to keep:
the former what the user's policy says; the latter what ours says, applied to each iteration.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

REMAT_PRIMITIVES = frozenset({"checkpoint", "remat", "remat2"})
GATHERS = frozenset({"all_gather", "all_gather_invariant", "sharding_constraint", "reshard"})
# What leaves a weight a weight: free or next to it, so that repeating them costs nothing.
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


class DropGathered:
    """The policy `drop_gathered(sizes)`, for the argument `policy` of `jax.checkpoint`.

    Attributes:
      sizes: The numbers of elements that gathered parameters have.
    """

    def __init__(self, sizes: frozenset[int]) -> None:
        self.sizes = sizes

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> bool:
        """Whether the result of an operation may be kept for the backward pass."""
        name = primitive.name
        if name not in GATHERS and name not in CASTS:
            return True
        size = avals[0].size * params.get("axis_size", 1)
        return size not in self.sizes


def drop_gathered(sizes: frozenset[int]) -> DropGathered:
    """Makes the policy that keeps all but gathered parameters.

    Args:
      sizes: The numbers of elements that gathered parameters have, where they are used: a layer's
        slice of a stack that `nn.scan` runs over.

    Returns:
      A policy for `jax.checkpoint`. It drops the results of gathers of such sizes, and of casts,
      transposes, reshapes and slices whose operand has such a size.
    """
    return DropGathered(sizes)


def regather_for_backward(
    function: Callable[..., Any], sizes: frozenset[int]
) -> Callable[..., Any]:
    """Makes the backward pass of a function gather parameters again.

    Args:
      function: A differentiable function of pytrees of arrays, such as a loss whose parameters
        gather themselves.
      sizes: The numbers of elements that gathered parameters have, see `drop_gathered`.

    Returns:
      The function, with the same values and gradients. What of it is in a `jax.checkpoint` of its
      own is recomputed as that says, no more and no less; what is in a scan is dropped and gathered
      again in each iteration.

    Communication:
      In the backward pass one more all-gather for each parameter whose value it needs (a bias's
      gradient does not, nor that of the first layer's kernel), or none if nothing is in `sizes`.
    """
    policy = drop_gathered(sizes)

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)

        def flat(*leaves: Any) -> Any:
            return function(*jax.tree.unflatten(structure, leaves))

        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        call = functools.partial(_evaluate, closed.jaxpr, policy)
        out = jax.checkpoint(call, policy=policy)(closed.consts, leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return run


def _evaluate(jaxpr: Jaxpr, policy: DropGathered, consts: Any, args: Any) -> list[Any]:
    """Runs a jaxpr with what must be protected from the policy around it protected."""
    if not _any_inside(jaxpr, lambda eqn: _is_protected(eqn, policy)):
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*args)
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for eqn in jaxpr.eqns:
        args = [read(variable) for variable in eqn.invars]
        out = _run_equation(eqn, policy, args, jaxpr.debug_info)
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _run_equation(eqn: Any, policy: DropGathered, args: list[Any], debug_info: Any) -> Any:
    """Runs one equation of a jaxpr."""
    if eqn.primitive.name in REMAT_PRIMITIVES:
        inner = jaxpr_as_fun(ClosedJaxpr(eqn.params["jaxpr"], ()))
        prevent_cse = eqn.params["prevent_cse"]
        remat = jax.checkpoint(inner, policy=eqn.params["policy"], prevent_cse=prevent_cse)
        return _with_own_residuals(remat)(*args)
    if _is_protected(eqn, policy):
        return _with_own_residuals(functools.partial(_scan, eqn.params, policy))(*args)
    if _any_inside(eqn, lambda inner: _is_protected(inner, policy)):
        if eqn.primitive.name in ("jit", "pjit"):
            with jax.named_scope(eqn.params["name"]):
                inner = eqn.params["jaxpr"]
                return _evaluate(inner.jaxpr, policy, inner.consts, args)
        if eqn.primitive.name == "cond":
            branches = [
                lambda *args, b=branch: _evaluate(b.jaxpr, policy, b.consts, args)
                for branch in eqn.params["branches"]
            ]
            return jax.lax.switch(args[0], branches, *args[1:])
    # Whatever else has loops inside (a custom gradient, say) is under the policy as it is.
    named = zip(eqn.invars, args, strict=True)
    operands = {v: arg for v, arg in named if not isinstance(v, Literal)}
    debug_info = debug_info._replace(arg_names=None, result_paths=None)
    one = Jaxpr((), list(operands), eqn.outvars, [eqn], eqn.effects, debug_info)
    return jaxpr_as_fun(ClosedJaxpr(one, ()))(*operands.values())


def _scan(params: dict[str, Any], policy: DropGathered, *args: Any) -> Any:
    """A scan in whose iterations the policy holds."""
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, carry, xs = args[:first], args[first:last], args[last:]
    jaxpr = params["jaxpr"]

    def iteration(consts: Any, carry: Any, xs: Any) -> Any:
        out = _evaluate(jaxpr.jaxpr, policy, jaxpr.consts, (*consts, *carry, *xs))
        return tuple(out[: len(carry)]), tuple(out[len(carry) :])

    # Inside of a loop nothing can be merged across iterations.
    iteration = jax.checkpoint(iteration, policy=policy, prevent_cse=False)
    carry, ys = jax.lax.scan(
        functools.partial(iteration, consts),
        tuple(carry),
        tuple(xs),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _with_own_residuals(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function keep for its backward pass what it keeps when differentiated by itself."""
    run = jax.custom_vjp(lambda *args: function(*args))
    run.defvjp(lambda *args: jax.vjp(function, *args), lambda vjp, cotangents: vjp(cotangents))
    return run


def _is_protected(eqn: Any, policy: DropGathered) -> bool:
    """Whether an equation must be kept from the policy that holds around it."""
    name = eqn.primitive.name
    if name in REMAT_PRIMITIVES:
        return True
    if name != "scan":
        return False
    is_dropped = functools.partial(_drops, policy=policy)
    return _any_inside(eqn, lambda inner: is_dropped(inner) or _is_protected(inner, policy))


def _drops(eqn: Any, *, policy: DropGathered) -> bool:
    """Whether the policy drops what an equation results in."""
    if eqn.primitive.name not in GATHERS | CASTS:
        return False
    return not policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)


def _any_inside(x: Any, predicate: Callable[[Any], bool]) -> bool:
    """Whether a predicate holds of an equation anywhere inside a jaxpr or an equation."""
    if isinstance(x, Jaxpr):
        return any(predicate(eqn) or _any_inside(eqn, predicate) for eqn in x.eqns)
    inner = [
        v
        for value in x.params.values()
        for v in (value if isinstance(value, tuple | list) else (value,))
    ]
    jaxprs = [v.jaxpr if isinstance(v, ClosedJaxpr) else v for v in inner]
    return any(_any_inside(v, predicate) for v in jaxprs if isinstance(v, Jaxpr))
