"""Buffers of slots, and branches that do not copy them.

XLA copies a buffer that a branch of a `cond` reads a slot of. So slots are read outside of
branches, by every stage in every tick. A branch may write one: its counterpart hands the buffers
through.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from manualpar.core.parameters.collectives import cast_to_varying, varying_axes


def zeros(types: Any) -> Any:
    """Zeros of some types, varying over the axes that these say."""
    return jax.tree.map(
        lambda t: cast_to_varying(jnp.zeros(t.shape, t.dtype), varying_axes(t)), types
    )


def slots(types: Any, number: int) -> Any:
    """Buffers with a number of slots for arrays of some types."""
    return jax.tree.map(
        lambda t: zeros(jax.eval_shape(lambda x: jnp.stack([x] * number), t)), types
    )


def read(buffers: Any, slot: Any) -> Any:
    """The arrays in a slot of buffers; of slot -1, which nobody uses, any."""
    slot = jnp.maximum(slot, 0)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot, keepdims=False), buffers)


def put(buffers: Any, slot: Any, values: Any) -> Any:
    """Buffers with arrays put into a slot that there is."""
    return jax.tree.map(
        lambda buffer, x: jax.lax.dynamic_update_index_in_dim(buffer, x, slot, 0), buffers, values
    )


def write(buffers: Any, slot: Any, values: Any) -> Any:
    """Buffers with arrays put into a slot; as they are if that is -1."""
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
    """`run()` where a condition holds, and otherwise zeros or `otherwise()`, of some types.

    A permute may stand in no branch that some devices take and others do not. If there is one in
    `run`, `anywhere` says whether the condition holds on any device, and then all of them run it.
    `scope` is the named scope around the `cond`.
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
