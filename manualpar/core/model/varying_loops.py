"""Lets JAX's loops and conditionals combine constants with arrays of data.

Under `check_vma=True` the type of data says that it varies over devices; the type of a constant
(`jnp.zeros(3)`) does not. An operator casts a constant that it combines with data. `jax.lax.scan`
and similar functions refuse the combination, because a carry keeps its type in all iterations, and
all branches return the same types. The model would have to make the constant from data
(`jnp.zeros_like(x)`), even in a library such as optax. Therefore these functions of JAX are
replaced while a model and a loss are traced. Where JAX refuses a type, the replacement finds the
types at the end of the loop or the branches, casts the initial carry or the results to them, and
tries again.

The replacements also type the result if a condition differs between devices. JAX types `cond` only
by its branches and `while_loop` only by its body, so a result that is one of two constants would be
typed as the same on all devices.

Invariants: numbers do not change. A call that JAX accepts is traced as JAX traces it, unless its
condition differs between devices. A cast only says that devices may differ, so it hides no missing
sum: a result that has to be the same on all devices is refused later. The transpose of a cast sums
over the devices, as the transpose of an operator's cast does.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.tracing.thread_patches import replaced_in_thread

# Words of JAX's error about types that vary over different axes.
MISMATCH = "manual axis types"
_NAMES = ("scan", "while_loop", "fori_loop", "cond", "switch")

# For each leaf of a tree, the mesh axes over which the leaf varies.
Axes = list[frozenset[str]]


def varying_loops() -> contextlib.AbstractContextManager[None]:
    """Makes JAX's loops and conditionals cast constants in this thread; a context manager.

    Communication:
      None. The transpose of a cast is a `psum`, see `cast_to_varying`.
    """
    return replaced_in_thread([(jax.lax, name) for name in _NAMES], _replacement)


def _replacement(name: str, original: Any) -> Callable[..., Any]:
    make: Callable[[Any], Callable[..., Any]] = globals()[f"_{name}"]
    return make(original)


def _scan(original: Any) -> Callable[..., Any]:
    def scan(f: Any, init: Any, xs: Any = None, *args: Any, **kwargs: Any) -> Any:
        def next_carry(carry: Any) -> Any:
            return f(carry, jax.tree.map(_like_one, xs))[0]

        def keeping_type(carry: Any, x: Any) -> Any:
            after, y = f(carry, x)
            return _cast(after, _axes(carry)), y

        return _with_retry(
            lambda: original(f, init, xs, *args, **kwargs),
            lambda: original(keeping_type, _fixed_point(next_carry, init), xs, *args, **kwargs),
        )

    return scan


def _while_loop(original: Any) -> Callable[..., Any]:
    def while_loop(cond_fun: Any, body_fun: Any, init_val: Any) -> Any:
        def after(carry: Any) -> Any:
            """Computes the next carry, typed to vary over the axes of the condition too."""
            return cast_to_varying(body_fun(carry), varying_axes(cond_fun(carry)))

        def keeping_type(carry: Any) -> Any:
            return _cast(body_fun(carry), _axes(carry))

        return _with_retry(
            lambda: original(cond_fun, body_fun, init_val),
            lambda: original(cond_fun, keeping_type, _fixed_point(after, init_val)),
            at_once=any(_traced_axes(cond_fun, init_val)),
        )

    return while_loop


def _fori_loop(original: Any) -> Callable[..., Any]:
    def fori_loop(lower: Any, upper: Any, body_fun: Any, init_val: Any, **kwargs: Any) -> Any:
        axes = varying_axes((lower, upper))

        def after(carry: Any) -> Any:
            return cast_to_varying(body_fun(jnp.asarray(lower), carry), axes)

        def keeping_type(index: Any, carry: Any) -> Any:
            return _cast(body_fun(index, carry), _axes(carry))

        return _with_retry(
            lambda: original(lower, upper, body_fun, init_val, **kwargs),
            lambda: original(lower, upper, keeping_type, _fixed_point(after, init_val), **kwargs),
            at_once=bool(axes),
        )

    return fori_loop


def _cond(original: Any) -> Callable[..., Any]:
    def cond(pred: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 or not callable(args[0]) or not callable(args[1]):  # JAX's old signature.
            return original(pred, *args, **kwargs)
        return _call_branch(original, pred, args[:2], args[2:], kwargs, as_list=False)

    return cond


def _switch(original: Any) -> Callable[..., Any]:
    def switch(index: Any, branches: Sequence[Any], *operands: Any, **kwargs: Any) -> Any:
        return _call_branch(original, index, branches, operands, kwargs, as_list=True)

    return switch


def _call_branch(
    original: Any, index: Any, branches: Sequence[Any], operands: Any, kwargs: Any, *, as_list: bool
) -> Any:
    """Calls a conditional; its result varies over the axes of all branches and of the index."""
    if "operand" in kwargs:
        kwargs = dict(kwargs)
        operands = (kwargs.pop("operand"),)
    if index_axes := varying_axes(index):
        # The transpose of a cast is a collective. Inside a branch only some devices would run it.
        operands = cast_to_varying(operands, index_axes)

    def choose(branches: Sequence[Any]) -> Any:
        return original(index, *((branches,) if as_list else branches), *operands, **kwargs)

    def cast_and_choose() -> Any:
        axes = [_traced_axes(branch, *operands) for branch in branches]
        if len({len(leaves) for leaves in axes}) > 1:
            return choose(branches)  # JAX refuses the different structures.
        joined = [index_axes.union(*of_leaf) for of_leaf in zip(*axes, strict=True)]

        def casting(branch: Any) -> Any:
            return lambda *operands: _cast(branch(*operands), joined)

        return choose([casting(branch) for branch in branches])

    return _with_retry(lambda: choose(branches), cast_and_choose, at_once=bool(index_axes))


def _with_retry(plain: Callable[[], Any], cast: Callable[[], Any], *, at_once: bool = False) -> Any:
    """Calls `plain`, and `cast` if JAX refuses its types; with `at_once`, calls only `cast`."""
    if not at_once:
        try:
            return plain()
        except TypeError as error:
            if MISMATCH not in str(error):
                raise
    return cast()


def _fixed_point(after: Callable[[Any], Any], carry: Any) -> Any:
    """Casts the carry until it varies over all axes over which `after(carry)` varies."""
    while True:
        found = _traced_axes(after, carry)
        if len(found) != len(jax.tree.leaves(carry)):
            return carry  # JAX refuses the different structures.
        before, carry = _axes(carry), _cast(carry, found)
        if _axes(carry) == before:
            return carry


def _traced_axes(function: Callable[..., Any], *args: Any) -> Axes:
    """Traces a function, and returns the axes over which each leaf of its result varies."""
    found: list[Axes] = []
    jax.eval_shape(lambda *args: found.append(_axes(function(*args))), *args)
    return found[-1]


def _like_one(xs: Any) -> Any:
    """Makes an array of the type of `xs[0]`; `xs` may have no entries."""
    zeros = jnp.zeros_like(xs, shape=jnp.shape(xs)[1:])
    return cast_to_varying(zeros, varying_axes(xs))  # `zeros_like` of keys does not vary.


def _axes(tree: Any) -> Axes:
    return [varying_axes(x) for x in jax.tree.leaves(tree)]


def _cast(tree: Any, axes: Axes) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    if len(leaves) != len(axes):
        return tree  # JAX refuses the different structures.
    cast = [cast_to_varying(x, of_leaf) for x, of_leaf in zip(leaves, axes, strict=True)]
    return jax.tree.unflatten(structure, cast)
