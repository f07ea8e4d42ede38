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
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec

from manualpar.core.mesh.axes import axes_size, axis_tuple
from manualpar.core.tracing.attention_blocks import blocks_scope
from manualpar.layers.attention.blockwise_attention import ATTENDED
from manualpar.layers.attention.unchecked import run_unchecked

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

    Raises:
      ValueError: The kernel cannot run on such arrays.

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
    arrays = [query, key, value] + ([] if documents is None else [documents])
    mesh = jax.sharding.get_abstract_mesh()
    if not {*mesh.auto_axes, *mesh.explicit_axes}:
        return run_unchecked(attend, *arrays)
    batch, heads = batch_and_head_axes(mesh, query, key)
    specs = [PartitionSpec(batch, None, heads)] * 3 + [PartitionSpec(batch)]
    specs = specs[: len(arrays)]
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
