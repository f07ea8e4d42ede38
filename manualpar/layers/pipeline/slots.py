"""Buffers of slots, in which a pipeline's stages keep arrays, and a `cond` that copies no buffer.

XLA copies a buffer if a branch of a `cond` reads a slot of the buffer. So slots are read outside of
branches, by every stage in every tick. A branch may write a slot if the other branch returns the
buffers unchanged.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from manualpar.core.parameters.collectives import cast_to_varying, varying_axes


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
