"""Attention to the keys that arrive in one step of a ring, computed by JAX's kernel for TPUs.

Forward, the kernel returns the attention result for only these keys, and the logarithm of each
query's sum of weights. With these two arrays the keys are added to the sums over the keys of other
steps, see `blockwise_attention.Sums`.

Backward, the kernel has to weigh these keys by the softmax over all keys. The kernel's gradient
reads the result and the logarithm that the forward kernel returns. Both arrays have a checkpoint
name. So this module traces the gradient, and replaces the two arrays with that name by the arrays
for all keys. Then nothing uses the forward kernel any more, and it is left out.

Symbols: `B` examples, `K` key and value heads, `G` query heads that share a key head, `S` queries,
`T` keys, `H` features of a head.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, Var

from manualpar.core.tracing.attention_blocks import blocks_scope
from manualpar.core.tracing.jaxprs import CALLS, all_equations, run_equations
from manualpar.layers.attention.blockwise_attention import (
    ATTENDED,
    Keys,
    Queries,
    Scoring,
    Seen,
    Sums,
)
from manualpar.layers.attention.splash_attention import BLOCKS, LANES, block_sizes, splash_misfit
from manualpar.layers.attention.unchecked import run_unchecked
from manualpar.layers.boundaries import platform_traced_for


def fits_parts(query: jax.Array, key: jax.Array, length: int, scoring: Scoring) -> bool:
    """Returns whether the code is traced for TPUs and the kernel can attend to `length` keys.

    The kernel cannot be used with a window or chunks, because each device would need a different
    mask, and the kernel's mask is a constant.
    """
    is_tpu = platform_traced_for() == "tpu" and splash_misfit(query, key) is None
    return is_tpu and scoring.window is None and scoring.chunk is None and length % LANES == 0


def attend_part(
    sums: Sums, queries: Queries, keys: Keys, scoring: Scoring, *, is_causal: bool
) -> Sums:
    """Adds one block of keys to the sums of one block of queries; the blocks have equal length.

    With `is_causal` a query sees the keys up to the query's place in the block, otherwise all keys
    of the block. In both cases it sees only keys of the query's document.
    """
    run = functools.partial(_forward, is_causal=is_causal, scoring=scoring)
    out, log_weights = run_unchecked(run, *_arrays(queries, keys))
    out, log_weights = out.reshape(sums.values.shape), log_weights.reshape(sums.weights.shape)
    largest = jnp.maximum(sums.largest, log_weights)
    # If a query sees none of the keys, its `log_weights` is far below `sums.largest`, so exactly 0
    # is added to its sums.
    new, fading = jnp.exp(log_weights - largest), jnp.exp(sums.largest - largest)
    values = sums.values * fading[..., None] + out.astype(jnp.float32) * new[..., None]
    return Sums(values, sums.weights * fading + new, largest)


def attend_part_backward(
    queries: Queries, seen: Seen, keys: Keys, scoring: Scoring, *, is_causal: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the terms of one block of keys in the gradients, in float32.

    Returns:
      The gradients of queries, keys and values.
    """
    run = functools.partial(_backward, is_causal=is_causal, scoring=scoring)
    arrays = _arrays(queries, keys)
    shape = arrays[0].shape
    known = seen.out.reshape(shape), seen.log_weights.reshape(shape[:-1])
    of_query, of_key, of_value = (
        x.astype(jnp.float32)
        for x in run_unchecked(run, *known, seen.gradient.reshape(shape), *arrays)
    )
    return of_query.reshape(queries.query.shape), of_key[None], of_value[None]


def _arrays(queries: Queries, keys: Keys) -> tuple[Any, ...]:
    """Returns queries `[B, N, S, H]`, keys, values, and the documents of queries and keys."""
    _, B, K, G, S, H = queries.query.shape
    documents: tuple[jax.Array, ...] = ()
    if queries.document is not None and keys.document is not None:
        documents = queries.document[0], keys.document[0]
    return queries.query.reshape(B, K * G, S, H), keys.key[0], keys.value[0], *documents


def _forward(*arrays: jax.Array, is_causal: bool, scoring: Scoring) -> Any:
    attend = _kernel(arrays, is_causal, scoring, save_residuals=True)
    out, (log_weights,) = attend(*arrays[:3])
    return out, log_weights


def _backward(
    out: jax.Array,
    log_weights: jax.Array,
    g: jax.Array,
    *arrays: jax.Array,
    is_causal: bool,
    scoring: Scoring,
) -> Any:
    attend = _kernel(arrays, is_causal, scoring, residual_checkpoint_name=ATTENDED)
    traced = jax.make_jaxpr(lambda g, *x: jax.vjp(attend, *x)[1](g))(g, *arrays[:3])
    named = [eqn.outvars[0].aval.ndim for eqn in all_equations(traced.jaxpr) if _is_named(eqn)]
    if sorted(named) != [log_weights.ndim, out.ndim]:
        raise ValueError(  # Otherwise the gradient would use the softmax over only these keys.
            f"attention: JAX's kernel for TPUs names {len(named)} values that its gradient uses, "
            "expected its result and the logarithms of its sums, because a ring replaces these two "
            "by the values for all keys. Take attention='blockwise', or another version of JAX."
        )
    return _run_with(traced, (g, *arrays[:3]), (out, log_weights))


def _kernel(
    arrays: Sequence[jax.Array], is_causal: bool, scoring: Scoring, **options: Any
) -> Callable[..., Any]:
    """Builds the kernel for the shapes and the documents of `arrays`, see `_arrays`."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    (_, num_heads, length, size), documents = arrays[0].shape, arrays[3:]
    block = next(block for block in (*BLOCKS, LANES) if length % block == 0)
    mask: Any = masks.CausalMask if is_causal else masks.FullMask
    attend = kernels.make_splash_mha(
        masks.MultiHeadMask([mask((length, length))] * num_heads),
        block_sizes=block_sizes(length, block),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=scoring.soft_cap,
        **options,
    )
    side = length // block
    num_blocks = side * (side + 1) // 2 if is_causal else side * side

    def attend_one(query: jax.Array, key: jax.Array, value: jax.Array, *ids: jax.Array) -> Any:
        return attend(query, key, value, segment_ids=kernels.SegmentIds(*ids) if ids else None)

    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        with jax.named_scope(blocks_scope(num_blocks)):
            return jax.vmap(attend_one)(query * size**-0.5, key, value, *documents)

    return run


def _run_with(
    closed: ClosedJaxpr, args: Sequence[Any], replacements: Sequence[jax.Array]
) -> list[Any]:
    """Runs the needed equations of a traced program; `replacements` replace the named arrays."""
    jaxpr = closed.jaxpr
    needed, eqns = {x for x in jaxpr.outvars if isinstance(x, Var)}, []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            if not _is_named(eqn):
                needed.update(x for x in eqn.invars if isinstance(x, Var))
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for eqn in reversed(eqns):
        if _is_named(eqn):
            out = [next(x for x in replacements if x.shape == eqn.outvars[0].aval.shape)]
        else:
            operands = list(map(read, eqn.invars))
            if eqn.primitive.name in CALLS:
                with jax.named_scope(str(eqn.source_info.name_stack)):
                    out = _run_with(eqn.params["jaxpr"], operands, replacements)
            else:
                out = run_equations(jaxpr, [eqn], eqn.invars, eqn.outvars, operands)
        values.update(zip(eqn.outvars, out, strict=True))
    return list(map(read, jaxpr.outvars))


def _is_named(eqn: Any) -> bool:
    return eqn.primitive.name == "name" and bool(eqn.params["name"] == ATTENDED)
