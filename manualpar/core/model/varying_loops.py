"""Loops and conditionals of JAX that take constants where arrays of data meet them.

Under `check_vma=True` data varies over the devices by its type, and a constant (`jnp.zeros(3)`)
does not. Operators cast a constant that meets data. `jax.lax.scan` and its like refuse it, because
a carry keeps its type from beginning to end, and all branches return the same types. The constant
would have to be made of data, `jnp.zeros_like(x)`, even in a library such as optax. While a model
and a loss are traced, these functions are therefore replaced. Where JAX refuses a type, the new
ones find out how the loop or the branches end, cast what goes in or comes out to that, and try
again.

They also type the result of a condition that differs between devices. JAX types `cond` by its
branches alone, and `while_loop` by its body, so that two constants would be the same on all
devices.

Invariants: numbers do not change. What JAX accepts is traced as JAX traces it, unless a condition
differs between devices. A cast only says that devices may differ, so it hides no missing sum: where
a result has to be the same on all devices, it is refused later. The transpose of a cast sums over
the devices, as that of an operator's cast does.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.tracing.thread_patches import replaced_in_thread

# What JAX says of a type that has other devices in it than it should.
MISMATCH = "manual axis types"
_NAMES = ("scan", "while_loop", "fori_loop", "cond", "switch")

Axes = list[frozenset[str]]


def varying_loops() -> contextlib.AbstractContextManager[None]:
    """Has JAX's loops and conditionals cast constants, in this thread while the context is open.

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

        def keeping(carry: Any, x: Any) -> Any:
            after, y = f(carry, x)
            return _cast(after, _axes(carry)), y

        return _retried(
            lambda: original(f, init, xs, *args, **kwargs),
            lambda: original(keeping, _settled(next_carry, init), xs, *args, **kwargs),
        )

    return scan


def _while_loop(original: Any) -> Callable[..., Any]:
    def while_loop(cond_fun: Any, body_fun: Any, init_val: Any) -> Any:
        def after(carry: Any) -> Any:
            """The next carry, which differs between devices that have ended and others."""
            return cast_to_varying(body_fun(carry), varying_axes(cond_fun(carry)))

        def keeping(carry: Any) -> Any:
            return _cast(body_fun(carry), _axes(carry))

        return _retried(
            lambda: original(cond_fun, body_fun, init_val),
            lambda: original(cond_fun, keeping, _settled(after, init_val)),
            at_once=any(_traced_axes(cond_fun, init_val)),
        )

    return while_loop


def _fori_loop(original: Any) -> Callable[..., Any]:
    def fori_loop(lower: Any, upper: Any, body_fun: Any, init_val: Any, **kwargs: Any) -> Any:
        axes = varying_axes((lower, upper))

        def after(carry: Any) -> Any:
            return cast_to_varying(body_fun(jnp.asarray(lower), carry), axes)

        def keeping(index: Any, carry: Any) -> Any:
            return _cast(body_fun(index, carry), _axes(carry))

        return _retried(
            lambda: original(lower, upper, body_fun, init_val, **kwargs),
            lambda: original(lower, upper, keeping, _settled(after, init_val), **kwargs),
            at_once=bool(axes),
        )

    return fori_loop


def _cond(original: Any) -> Callable[..., Any]:
    def cond(pred: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 or not callable(args[0]) or not callable(args[1]):  # An older signature.
            return original(pred, *args, **kwargs)
        return _chosen(original, pred, args[:2], args[2:], kwargs, as_list=False)

    return cond


def _switch(original: Any) -> Callable[..., Any]:
    def switch(index: Any, branches: Sequence[Any], *operands: Any, **kwargs: Any) -> Any:
        return _chosen(original, index, branches, operands, kwargs, as_list=True)

    return switch


def _chosen(
    original: Any, index: Any, branches: Sequence[Any], operands: Any, kwargs: Any, *, as_list: bool
) -> Any:
    """What one of some branches returns, typed as varying wherever one of them or the index is."""
    if "operand" in kwargs:
        kwargs = dict(kwargs)
        operands = (kwargs.pop("operand"),)
    if own := varying_axes(index):
        # Not in the branches, because the transpose of a cast sends, and only some devices would.
        operands = cast_to_varying(operands, own)

    def choose(branches: Sequence[Any]) -> Any:
        return original(index, *((branches,) if as_list else branches), *operands, **kwargs)

    def cast_and_choose() -> Any:
        axes = [_traced_axes(branch, *operands) for branch in branches]
        if len({len(some) for some in axes}) > 1:
            return choose(branches)  # JAX says what is wrong.
        joined = [own.union(*some) for some in zip(*axes, strict=True)]

        def casting(branch: Any) -> Any:
            return lambda *operands: _cast(branch(*operands), joined)

        return choose([casting(branch) for branch in branches])

    return _retried(lambda: choose(branches), cast_and_choose, at_once=bool(own))


def _retried(plain: Callable[[], Any], cast: Callable[[], Any], *, at_once: bool = False) -> Any:
    """Calls the first function; the second `at_once`, or if JAX refuses the first one's types."""
    if not at_once:
        try:
            return plain()
        except TypeError as error:
            if MISMATCH not in str(error):
                raise
    return cast()


def _settled(after: Callable[[Any], Any], carry: Any) -> Any:
    """The carry, cast until it varies wherever the carry after it does."""
    while True:
        found = _traced_axes(after, carry)
        if len(found) != len(jax.tree.leaves(carry)):
            return carry  # JAX says what is wrong.
        before, carry = _axes(carry), _cast(carry, found)
        if _axes(carry) == before:
            return carry


def _traced_axes(function: Callable[..., Any], *args: Any) -> Axes:
    """The axes that each leaf of a function's result varies over; the function is only traced."""
    found: list[Axes] = []
    jax.eval_shape(lambda *args: found.append(_axes(function(*args))), *args)
    return found[-1]


def _like_one(xs: Any) -> Any:
    """An array of the type of those that are stacked along dim 0, of which there may be none."""
    zeros = jnp.zeros_like(xs, shape=jnp.shape(xs)[1:])
    return cast_to_varying(zeros, varying_axes(xs))  # Zeros like keys are the same everywhere.


def _axes(tree: Any) -> Axes:
    return [varying_axes(x) for x in jax.tree.leaves(tree)]


def _cast(tree: Any, axes: Axes) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    if len(leaves) != len(axes):
        return tree  # JAX says what is wrong.
    cast = [cast_to_varying(x, some) for x, some in zip(leaves, axes, strict=True)]
    return jax.tree.unflatten(structure, cast)
