"""Attention on TPUs by JAX's kernel, splash attention, which never stores the scores in memory.

It is FlashAttention (Dao et al., https://arxiv.org/abs/2205.14135) over blocks of queries and keys,
and it skips the blocks that a mask hides. The mask is a function of positions and not an array, so
there is no array of the size of the scores.

The kernel runs on one device. In a `shard_map` that checks types,
`manualpar.layers.attention.unchecked` runs the kernel. XLA cannot partition the kernel. So if the
enclosing mesh has automatic axes, this module uses a `shard_map` that gives each device its
examples.

The kernel is imported where it is used, because its import takes a tenth of a second.

Symbols: `B` examples, `S` positions, `N` query heads, `K` key and value heads, `H` features of a
head.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Var
from jax.sharding import AbstractMesh, PartitionSpec

from manualpar.core.mesh.axes import axes_size, axis_tuple
from manualpar.core.tracing.jaxprs import CALLS, all_equations, run_equations
from manualpar.core.tracing.scopes import blocks_scope
from manualpar.layers.attention.blockwise_attention import (
    ATTENDED,
    Keys,
    Queries,
    Scoring,
    Seen,
    Sums,
)
from manualpar.layers.attention.unchecked import run_unchecked
from manualpar.layers.boundaries import has_tpu_kernels

LANES = 128  # Lengths are padded to a multiple of this number.
BLOCK = 512
BLOCKS = (BLOCK, 384, 256)
# The longest sequence for the fused backward kernel. This kernel writes a gradient of all queries
# for each block of keys, so its output grows with the square of the length.
LONGEST_FUSED = 4096


def splash_misfit(
    query: jax.Array | jax.ShapeDtypeStruct, key: jax.Array | jax.ShapeDtypeStruct
) -> str | None:
    """Returns why the kernel cannot run on these arrays on a TPU, or `None`.

    The kernel accepts all lengths and head sizes. It has been compiled for heads of 8 to 256
    features.
    """
    dtypes = sorted({str(query.dtype), str(key.dtype)})
    if dtypes not in (["bfloat16"], ["float32"]):
        return f"the dtype is {' and '.join(dtypes)}, not bfloat16 or float32"
    return None


def splash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None = None,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attends causally within documents.

    Lengths that are no multiple of a block are padded. The padding comes after all queries, so that
    no query sees it.

    Args:
      query: `[B, S, N, H]`, in bfloat16 or float32.
      key: `[B, S, K, H]`, of the dtype of `query`. `K` divides `N`, because groups of query heads
        share a key head.
      value: `[B, S, K, H]`, of the dtype of `query`.
      documents: `int32[B, S]`, the document number of each position, in any order. A query sees
        only keys with the query's number. `None` if each sequence is one document.
      window: How many positions a query sees, including the query's position; `None` for all.
      soft_cap: Bounds scores: a score becomes `soft_cap * tanh(score / soft_cap)`; `None` for no
        bound.
      interpret: Whether to run the kernel step by step in plain JAX, on any device.

    Returns:
      `[B, S, N, H]`, of the dtype of `query`.

    Communication:
      None. If the mesh has automatic axes, XLA may have to reshard the arguments for the nested
      `shard_map`. It splits the batch over the axes that divide the batch, in the order of the
      mesh. It splits heads over the axes that the logical rules name for both `heads` and
      `kv_heads`.

    Gradient:
      The kernel's backward pass computes the scores again. The result and the logarithms of the
      sums of weights have the checkpoint name `ATTENDED`. With a policy that saves the name, the
      forward kernel does not run again.
    """
    if misfit := splash_misfit(query, key):
        raise ValueError(f"splash_attention: {misfit}. Take another kind of attention.")
    attend = functools.partial(_attend, window=window, soft_cap=soft_cap, interpret=interpret)
    return run_on_each_device(attend, query, key, value, documents)


def run_on_each_device(
    attend: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Runs a kernel of one device, which XLA cannot partition, on each device's examples and heads.

    Args:
      attend: Called with those of the arrays that are not `None`, in the same order.

    Communication:
      None in manual programs. If the mesh has automatic axes, XLA may have to reshard the arguments
      for the nested `shard_map`, see `splash_attention`.
    """
    given = ((query, 2), (key, 2), (value, 2), (documents, 1), (sinks, 0))
    arrays: list[jax.Array] = [x for x, _ in given if x is not None]
    mesh = jax.sharding.get_abstract_mesh()
    if not {*mesh.auto_axes, *mesh.explicit_axes}:
        return run_unchecked(attend, *arrays)
    batch, heads = batch_and_head_axes(mesh, query, key)
    kinds = (PartitionSpec(heads), PartitionSpec(batch), PartitionSpec(batch, None, heads))
    specs = [kinds[kind] for x, kind in given if x is not None]
    if mesh.explicit_axes:
        arrays = list(map(jax.sharding.reshard, arrays, specs))
    split = jax.shard_map(
        functools.partial(run_unchecked, attend),
        in_specs=tuple(specs),
        out_specs=specs[0],
        axis_names={*mesh.auto_axes, *mesh.explicit_axes},
        check_vma=True,
    )
    return split(*arrays)


def batch_and_head_axes(mesh: AbstractMesh, query: jax.Array, key: jax.Array) -> tuple[Any, Any]:
    """Returns the axes that split the batch, and the axes that split heads."""
    if mesh.explicit_axes:  # Explicit types say how arrays are sharded.
        of_batch, _, of_heads, _ = jax.typeof(query).sharding.spec
        return of_batch, of_heads if of_heads == jax.typeof(key).sharding.spec[2] else None
    rules = nn.get_logical_axis_rules()
    named = [
        next((axis_tuple(axes) for name, axes in rules if name == dim), ())
        for dim in ("heads", "kv_heads")
    ]
    heads = named[0] if named[0] == named[1] else ()
    if key.shape[2] % axes_size(mesh, heads):
        heads = ()
    batch: tuple[str, ...] = ()
    for axis in mesh.auto_axes:
        if axis not in heads and query.shape[0] % axes_size(mesh, (*batch, axis)) == 0:
            batch = (*batch, axis)
    return batch or None, heads or None


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None = None,
    *,
    window: int | None,
    soft_cap: float | None,
    interpret: bool,
) -> jax.Array:
    """Runs the kernel on one device."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    _, length, num_heads, size = query.shape
    padded, block = _padded_length(length)

    def prepare(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, padded - length), *((0, 0),) * (x.ndim - 2)))
        return x.swapaxes(1, 2) if x.ndim == 4 else x

    mask: Any = masks.CausalMask((padded, padded))
    if window is not None:
        mask = masks.LocalMask((padded, padded), (window - 1, 0), offset=0)
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * num_heads),
        block_sizes=block_sizes(padded, block),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=soft_cap,
        residual_checkpoint_name=ATTENDED,
        interpret=interpret,
    )

    def attend_one(
        query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array | None
    ) -> jax.Array:
        ids = None if documents is None else kernels.SegmentIds(documents, documents)
        out: jax.Array = kernel(query, key, value, segment_ids=ids)
        return out

    index = np.arange(padded // block)
    apart = index[:, None] - index  # How far the key block is behind the query block.
    is_seen = (apart >= 0) & (apart * block < (window or padded) + block - 1)

    arrays = jax.tree.map(prepare, (query * size**-0.5, key, value, documents))
    with jax.named_scope(blocks_scope(int(is_seen.sum()))):
        out = jax.vmap(attend_one)(*arrays)
    return out.swapaxes(1, 2)[:, :length]


def _padded_length(length: int) -> tuple[int, int]:
    """Returns the padded length and the length of a block.

    Blocks shorter than 256 would take more time than the padding.
    """
    for block in BLOCKS:
        if length % block == 0:
            return length, block
    unit = LANES if length < BLOCK else BLOCK
    padded = math.ceil(length / unit) * unit
    return padded, min(padded, BLOCK)


def block_sizes(length: int, block: int) -> Any:
    """Returns the kernels' `BlockSizes` for a sequence of `length` positions in blocks of `block`.

    For at most `LONGEST_FUSED` positions one fused kernel computes all gradients, otherwise two
    kernels do.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    is_fused = length <= LONGEST_FUSED
    return kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=None if is_fused else block,
        block_kv_dq=None if is_fused else block,
        use_fused_bwd_kernel=is_fused,
    )


# -------------------------------------------------------------------------------------------------
# Attention to the keys that arrive in one step of a ring, computed by JAX's kernel for TPUs.
#
# Forward, the kernel returns the attention result for only these keys, and the logarithm of each
# query's sum of weights. With these two arrays the keys are added to the sums over the keys of
# other steps, see `blockwise_attention.Sums`.
#
# Backward, the kernel has to weigh these keys by the softmax over all keys. The kernel's gradient
# reads the result and the logarithm that the forward kernel returns. Both arrays have a checkpoint
# name. So this module traces the gradient, and replaces the two arrays with that name by the
# arrays for all keys. Then nothing uses the forward kernel any more, and it is left out.
#
# Symbols: `B` examples, `K` key and value heads, `G` query heads that share a key head, `S`
# queries, `T` keys, `H` features of a head.


def fits_parts(query: jax.Array, key: jax.Array, length: int, scoring: Scoring) -> bool:
    """Returns whether the code is traced for TPUs and the kernel can attend to `length` keys.

    The kernel cannot be used with a window or chunks, because each device would need a different
    mask, and the kernel's mask is a constant.
    """
    can_run = has_tpu_kernels() and splash_misfit(query, key) is None
    return can_run and scoring.window is None and scoring.chunk is None and length % LANES == 0


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
    """Computes the terms of one block of keys in the gradients, in float32."""
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
            named: Any = eqn.outvars[0].aval  # Of an array, though jax annotates any type.
            out = [next(x for x in replacements if x.shape == named.shape)]
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
