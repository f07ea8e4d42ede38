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

So each level of a program, the outermost one and the body of each such scan, has a checkpoint of
its own, whose policy knows the sizes of what is gathered at that level; and where there is one,
what it must not govern is put into a function with a rule for its own gradient, which keeps what it
would keep by itself.

JAX rounds what a checkpoint keeps to its dtype, and refuses to round complex numbers. So the policy
keeps none: a complex result that is not a parameter is taken apart, its real and imaginary parts
are kept, and the backward pass puts them together again.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from manualpar.core.collectives import OWN_RESIDUAL, cast_to_varying

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
        if params.get("name") == OWN_RESIDUAL:
            return True
        is_complex = primitive.name == "complex" or any(map(_is_complex, avals))
        return not is_complex and not self.drops(primitive.name, avals, params)

    def drops(self, name: str, avals: Sequence[Any], params: dict[str, Any]) -> bool:
        """Whether an operation gathers a parameter, or casts one that was gathered."""
        if name not in GATHERS | CASTS or params.get("name") == OWN_RESIDUAL:
            return False
        return avals[0].size * params.get("axis_size", 1) in self.sizes


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

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)

        def flat(*leaves: Any) -> Any:
            return function(*jax.tree.unflatten(structure, leaves))

        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        out = _run_level(closed, sizes, leaves, in_loop=False)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return run


def _run_level(closed: ClosedJaxpr, sizes: frozenset[int], args: Any, *, in_loop: bool) -> Any:
    """Runs a level of a program: in a checkpoint, if something is gathered at it."""
    gathered = frozenset(_gathered_at_level(closed.jaxpr, sizes))
    if not gathered:
        return _evaluate(closed.jaxpr, sizes, closed.consts, args, isolate=False)
    call = functools.partial(_evaluate, closed.jaxpr, sizes, isolate=True)
    # Inside of a loop nothing can be merged across iterations.
    level = jax.checkpoint(call, policy=drop_gathered(gathered), prevent_cse=not in_loop)
    return level(closed.consts, tuple(args))


def _evaluate(
    jaxpr: Jaxpr, sizes: frozenset[int], consts: Any, args: Any, *, isolate: bool
) -> list[Any]:
    """Runs a jaxpr; `isolate` keeps what is protected from the policy around it."""

    def needs_care(eqn: Any) -> bool:
        return _is_protected(eqn, sizes) or (isolate and _has_complex(eqn))

    if not _any_inside(jaxpr, needs_care):
        return list(jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*args))
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for eqn in jaxpr.eqns:
        args = [read(variable) for variable in eqn.invars]
        if not _any_inside(eqn, needs_care, itself=True):
            out = _run_equation(eqn, args, jaxpr.debug_info)
        else:
            with jax.named_scope(str(eqn.source_info.name_stack)):
                out = _run_nested(eqn, sizes, args, jaxpr.debug_info, isolate=isolate)
            if isolate and _has_complex(eqn) and not _keeps_itself(eqn, sizes):
                out = [_kept(x) for x in out]
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _run_nested(
    eqn: Any, sizes: frozenset[int], args: list[Any], debug_info: Any, *, isolate: bool
) -> Any:
    """Runs an equation that is protected, or has something inside that is."""
    name = eqn.primitive.name
    if name in REMAT_PRIMITIVES or name == "scan":
        if name == "scan":
            function = functools.partial(_scan, eqn.params, sizes)
        else:
            function = functools.partial(_run_equation, eqn, debug_info=debug_info)
        run = functools.partial(_unpacked, function)
        return _with_own_residuals(run)(*args) if isolate else run(*args)
    if name in ("jit", "pjit"):
        inner = eqn.params["jaxpr"]
        with jax.named_scope(eqn.params["name"]):
            return _evaluate(inner.jaxpr, sizes, inner.consts, args, isolate=isolate)
    if name == "cond":
        branches = [
            lambda *args, b=branch: _evaluate(b.jaxpr, sizes, b.consts, args, isolate=isolate)
            for branch in eqn.params["branches"]
        ]
        return jax.lax.switch(args[0], branches, *args[1:])
    # Whatever else has loops inside (a custom gradient, say) is under the policy as it is.
    return _run_equation(eqn, args, debug_info)


def _unpacked(function: Callable[[list[Any]], Any], *args: Any) -> Any:
    """Calls a function of a list."""
    return function(list(args))


def _run_equation(eqn: Any, args: list[Any], debug_info: Any) -> Any:
    """Runs one equation of a jaxpr as it is."""
    named = zip(eqn.invars, args, strict=True)
    operands = {v: arg for v, arg in named if not isinstance(v, Literal)}
    debug_info = debug_info._replace(arg_names=None, result_paths=None)
    one = Jaxpr((), list(operands), eqn.outvars, [eqn], eqn.effects, debug_info)
    return jaxpr_as_fun(ClosedJaxpr(one, ()))(*operands.values())


def _scan(params: dict[str, Any], sizes: frozenset[int], args: list[Any]) -> Any:
    """A scan whose body is a level of its own."""
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, carry, xs = args[:first], args[first:last], args[last:]

    def iteration(carry: Any, xs: Any) -> Any:
        out = _run_level(params["jaxpr"], sizes, [*consts, *carry, *xs], in_loop=True)
        return tuple(out[: len(carry)]), tuple(out[len(carry) :])

    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    end, ys = jax.lax.scan(iteration, tuple(carry), tuple(xs), **options)
    return [*end, *ys]


def _with_own_residuals(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function keep for its backward pass what it keeps when differentiated by itself."""
    run = jax.custom_vjp(lambda *args: function(*args))

    def forward(*args: Any) -> tuple[Any, Any]:
        values = [arg.value for arg in args]
        # As autodiff would: a constant's gradient could even cost a collective.
        wanted = _Wanted(tuple(arg.perturbed for arg in args))
        out, vjp = jax.vjp(
            lambda *some: function(*wanted.merge(some, values)), *wanted.select(values)
        )
        # The name gives what is kept an equation of its own. That of a scan, it would be copied by
        # a second one, for an equation is either run once or in both passes.
        return jax.tree.map(_kept, (out, (vjp, wanted)))

    def backward(kept: Any, cotangents: Any) -> tuple[Any, ...]:
        vjp, wanted = kept
        is_zero = lambda x: isinstance(x, SymbolicZero)  # noqa: E731
        return wanted.spread(vjp(jax.tree.map(_instantiate, cotangents, is_leaf=is_zero)))

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Of which arguments the gradients are wanted."""

    flags: tuple[bool, ...]

    def select(self, args: Iterable[Any]) -> list[Any]:
        """Those of some arguments."""
        return [arg for arg, flag in zip(args, self.flags, strict=True) if flag]

    def merge(self, some: Iterable[Any], args: Iterable[Any]) -> list[Any]:
        """Arguments with others in their places."""
        others = iter(some)
        return [next(others) if flag else a for a, flag in zip(args, self.flags, strict=True)]

    def spread(self, gradients: Iterable[Any]) -> tuple[Any, ...]:
        """The gradients of all arguments, `None` for those that nobody wants."""
        return tuple(self.merge(gradients, (None,) * len(self.flags)))


def _instantiate(cotangent: Any) -> Any:
    """A cotangent as an array of its type, where it is zero too."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    if cotangent.dtype == jax.dtypes.float0:
        return np.zeros(cotangent.shape, cotangent.dtype)
    aval: Any = cotangent.aval
    zero = cast_to_varying(jnp.zeros(aval.shape, aval.dtype), aval.mat.varying)
    # Where shardings are types, they are a part of it.
    is_typed = bool(jax.sharding.get_abstract_mesh().explicit_axes)
    return jax.sharding.reshard(zero, aval.sharding.spec) if is_typed else zero


def _kept(x: jax.Array) -> jax.Array:
    """A value that the policy keeps, in two parts if it is complex."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.complex(_kept(x.real), _kept(x.imag))
    return checkpoint_name(x, OWN_RESIDUAL)


def _is_complex(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", float), jnp.complexfloating)


def _has_complex(eqn: Any) -> bool:
    """Whether an equation takes complex numbers or results in some."""
    return any(_is_complex(variable.aval) for variable in (*eqn.invars, *eqn.outvars))


def _keeps_itself(eqn: Any, sizes: frozenset[int]) -> bool:
    """Whether what is to be kept of an equation's results has been, or is a parameter's."""
    if eqn.primitive.name in {"jit", "pjit", "scan"} | REMAT_PRIMITIVES:
        return True
    return _any_inside(eqn, lambda eqn: _drops(eqn, sizes), itself=True)


def _is_protected(eqn: Any, sizes: frozenset[int]) -> bool:
    """Whether an equation must be kept from the policy that holds around it."""
    name = eqn.primitive.name
    if name in REMAT_PRIMITIVES:
        return True
    if name != "scan":
        return False
    return _any_inside(
        eqn,
        lambda eqn: _drops(eqn, sizes) or _is_protected(eqn, sizes) or _has_complex(eqn),
    )


def _drops(eqn: Any, sizes: frozenset[int]) -> bool:
    """Whether the policy drops what an equation results in."""
    avals = [variable.aval for variable in eqn.invars]
    return drop_gathered(sizes).drops(eqn.primitive.name, avals, eqn.params)


def _gathered_at_level(x: Any, sizes: frozenset[int]) -> Iterator[int]:
    """The sizes of what is gathered in a jaxpr, padded and not, outside of what is protected."""
    for eqn in x.eqns:
        is_unpadding = eqn.primitive.name == "slice"
        if (eqn.primitive.name in GATHERS or is_unpadding) and _drops(eqn, sizes):
            yield eqn.outvars[0].aval.size
        elif not _is_protected(eqn, sizes):
            for inner in _inner_jaxprs(eqn):
                yield from _gathered_at_level(inner, sizes)


def _any_inside(x: Any, predicate: Callable[[Any], bool], *, itself: bool = False) -> bool:
    """Whether a predicate holds of an equation anywhere inside a jaxpr or an equation."""
    if isinstance(x, Jaxpr):
        return any(_any_inside(eqn, predicate, itself=True) for eqn in x.eqns)
    if itself and predicate(x):
        return True
    return any(_any_inside(inner, predicate) for inner in _inner_jaxprs(x))


def _inner_jaxprs(eqn: Any) -> Iterator[Jaxpr]:
    """The jaxprs that an equation runs."""
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            jaxpr = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            if isinstance(jaxpr, Jaxpr):
                yield jaxpr
