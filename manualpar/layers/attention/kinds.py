"""Causal attention within documents: one function, and the choice of its implementation.

- `"splash"`: jax's kernel for TPUs, see `splash_attention`.
- `"cudnn"`: NVIDIA's kernel, for dtypes of 16 bits, without `soft_cap`, see `cudnn_attention`.
- `"blockwise"`: plain JAX, one pair of blocks after the other, see `chunked_attention`. It runs
  everywhere. On CPUs it is faster than `"xla"` at every length, and takes less memory.
- `"xla"`: XLA stores the scores `[B, N, S, S]` in memory, and a mask of this size if there are
  documents.

`""` chooses the best kind for the devices for which a program is traced (`best_kind`): splash on
TPUs; cuDNN on NVIDIA GPUs where it can run and its mask of documents fits; otherwise blockwise. The
enclosing mesh gives these devices. (`jax.lax.platform_dependent` would trace all kinds. Then counts
of operations, plans and checks would include branches that do not run.)

Symbols: `B` examples, `S` positions, `N` query heads, `K` key and value heads, `H` features of a
head.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from manualpar.core.mesh.axes import axes_size, axis_tuple
from manualpar.layers.attention.blockwise_attention import Scoring
from manualpar.layers.attention.chunked_attention import attend_in_blocks
from manualpar.layers.attention.cudnn_attention import (
    cudnn_attention,
    cudnn_misfit,
    dot_product_attention,
    mask_bytes,
)
from manualpar.layers.attention.devices import Device, device_traced_for
from manualpar.layers.attention.splash_attention import (
    batch_and_head_axes,
    splash_attention,
    splash_misfit,
)

AttentionKind = Literal["", "splash", "cudnn", "blockwise", "xla"]
ATTENTION_KINDS: tuple[AttentionKind, ...] = get_args(AttentionKind)

# The share of a GPU's memory that the mask of documents and its gradient may take. Parameters,
# optimizer state and activations need the rest.
MASK_SHARE = 1 / 8


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None = None,
    *,
    kind: AttentionKind = "",
    window: int | None = None,
    soft_cap: float | None = None,
    chunk: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attends causally within documents.

    Args:
      query: `[B, S, N, H]`, floating.
      key: `[B, S, K, H]`, where `K` divides `N`: groups of `N / K` query heads share a key head.
      value: `[B, S, K, H]`, of the dtype of `key`.
      documents: `int32[B, S]`, the document number of each position, in any order. A query sees
        only keys with the query's number. `None` if each sequence is one document.
      kind: The implementation; `""` for the best on the devices that the program is traced for.
      window: How many positions a query sees, including the query's position; `None` for all.
      soft_cap: Bounds scores: a score becomes `soft_cap * tanh(score / soft_cap)`; `None` for no
        bound.
      chunk: The length of the chunks into which sequences are divided from their beginning. A query
        sees only keys of its own chunk; `None` for no chunks.
      sinks: `float32[N]`, the score of each head's *sink*: a key that every query sees, and whose
        value is 0, so that the weights of the other keys sum to less than 1; `None` for none. Only
        `"blockwise"` has sinks.

    Returns:
      `[B, S, N, H]`.

    Raises:
      ValueError: Shapes do not fit, an option is out of range, or the kind cannot run.

    Communication:
      None.
    """
    check_attention(query, key, value, documents, scoring := Scoring(window, soft_cap, chunk))
    if kind not in ATTENTION_KINDS:
        known = ", ".join(map(repr, ATTENTION_KINDS))
        raise ValueError(f"attention: kind is {kind!r}, expected one of {known}.")
    if chunk is not None and chunk < query.shape[1]:
        options: Any = {"kind": kind, "window": window, "soft_cap": soft_cap, "sinks": sinks}
        return _attend_to_chunks(query, key, value, documents, chunk, options)
    misfit = _misfit(kind, query, key, documents, scoring) if kind else None
    if kind not in ("", "blockwise") and sinks is not None:
        misfit = "the heads have sinks, but only 'blockwise' has them"
    if misfit is not None:
        raise ValueError(
            f"attention: kind (of models config.model.attention) is {kind!r}, and {misfit}; "
            "expected a kind that can run here. Take '' for the best kind that can."
        )
    if sinks is not None:
        return attend_in_blocks(query, key, value, documents, scoring, sinks)
    kind = kind or _best(query, key, documents, scoring)
    if kind == "splash":
        return splash_attention(query, key, value, documents, window=window, soft_cap=soft_cap)
    if kind == "blockwise":
        return attend_in_blocks(query, key, value, documents, scoring)
    if kind == "cudnn":
        return cudnn_attention(query, key, value, documents, window=window)
    return dot_product_attention(query, key, value, documents, window, "xla")


def _attend_to_chunks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    chunk: int,
    options: Mapping[str, Any],
) -> jax.Array:
    """Attends within chunks: each chunk is a sequence of its own, and so is the rest at the end."""
    B, S = query.shape[:2]
    end, parts = S // chunk * chunk, []
    for start, stop in ((0, end), (end, S)):
        if start == stop:
            continue

        def cut(x: jax.Array, start: int = start, stop: int = stop) -> jax.Array:
            size = min(chunk, stop - start)
            x = x[:, start:stop].reshape(B, -1, size, *x.shape[2:])
            return x.reshape(-1, *x.shape[2:])

        of_documents = None if documents is None else cut(documents)
        out = attention(cut(query), cut(key), cut(value), of_documents, **options)
        # In mode `explicit` the examples may be sharded, and so are the chunks then.
        spec = jax.typeof(out).sharding.spec
        by_examples = PartitionSpec(spec[0], None, *spec[1:]) if any(spec) else None
        out = jnp.reshape(out, (B, -1, *out.shape[1:]), out_sharding=by_examples)
        parts.append(out.reshape(B, stop - start, *out.shape[3:]))
    return jnp.concatenate(parts, axis=1)


def check_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    scoring: Scoring,
) -> None:
    """Refuses arguments that no kind of attention can compute.

    Raises:
      ValueError: Shapes do not fit, or an option is out of range.
    """

    def shown(x: jax.Array) -> str:
        return f"{x.dtype}{list(x.shape)}"

    if key.shape != value.shape or key.dtype != value.dtype:
        raise ValueError(
            f"attention: key is {shown(key)} and value {shown(value)}, expected the same shape and "
            "dtype."
        )
    B, S, N, H = query.shape
    if key.shape != (B, S, key.shape[2], H) or N % key.shape[2]:
        raise ValueError(
            f"attention: query is {shown(query)} and key {shown(key)}, expected the same examples, "
            "positions and features in both. The number of query heads must be a multiple of the "
            "number of key heads, because groups of equal size share a key head."
        )
    if documents is not None and documents.shape != (B, S):
        raise ValueError(
            f"attention: documents are {shown(documents)}, expected the number of each position's "
            f"document, int32{[B, S]}."
        )
    if scoring.window is not None and scoring.window < 1:
        raise ValueError(
            f"attention: window is {scoring.window}, expected at least 1, or None for all."
        )
    if scoring.chunk is not None and scoring.chunk < 1:
        raise ValueError(
            f"attention: chunk is {scoring.chunk}, expected at least 1, or None for no chunks."
        )
    if scoring.soft_cap is not None and not scoring.soft_cap > 0:
        raise ValueError(
            f"attention: soft_cap is {scoring.soft_cap}, expected more than 0, or None for none."
        )


def best_kind(
    device: Device,
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    scoring: Scoring,
    *,
    has_documents: bool,
) -> AttentionKind:
    """Chooses the best kind for a device, which need not be a device of this process.

    - Splash on TPUs, if it has the dtype.
    - cuDNN on GPUs, if there is no soft cap, the kernel can run (`cudnn_misfit`), and the mask
      fits. Causal masks and windows take no memory. Documents need an array `[B, 1, S, S]`, and the
      backward pass its gradient. All heads and layers share the two arrays. So they are compared
      with the device's memory (`MASK_SHARE`), and not with the queries, which are few if heads are
      split. While the arrays fit, the kernel is faster than blocks in plain JAX.
    - Blockwise otherwise.

    Args:
      device: The device.
      query: `[B, S, N, H]`, with the device's own examples and heads; only the shape and the dtype
        are read.
      key: `[B, S, K, H]`, likewise.
      scoring: The window and the soft cap.
      has_documents: Whether a query sees only keys of its own document.
    """
    if device.platform == "tpu" and splash_misfit(query, key) is None:
        return "splash"
    can_run = scoring.soft_cap is None and not cudnn_misfit(
        device, query, key, has_documents=has_documents
    )
    mask = mask_bytes(query, has_documents=has_documents)
    return "cudnn" if can_run and mask <= MASK_SHARE * device.memory_bytes else "blockwise"


def _best(
    query: jax.Array, key: jax.Array, documents: jax.Array | None, scoring: Scoring
) -> AttentionKind:
    """Chooses the best kind for the devices of the program."""
    device, mesh = device_traced_for(), jax.sharding.get_abstract_mesh()
    if device.platform == "tpu" and mesh.empty and jax.device_count() > 1:
        # Without a mesh XLA may partition a program over several devices, but cannot partition
        # splash attention.
        return "blockwise"
    own: jax.Array | jax.ShapeDtypeStruct = query
    if device.platform == "gpu" and {*mesh.auto_axes, *mesh.explicit_axes}:
        axes, _ = batch_and_head_axes(mesh, query, key)  # The arrays are global.
        examples = query.shape[0] // axes_size(mesh, axis_tuple(axes))
        own = jax.ShapeDtypeStruct((examples, *query.shape[1:]), query.dtype)
    return best_kind(device, own, key, scoring, has_documents=documents is not None)


def _misfit(
    kind: AttentionKind,
    query: jax.Array,
    key: jax.Array,
    documents: jax.Array | None,
    scoring: Scoring,
) -> str | None:
    """Returns why a kind cannot run, or `None`."""
    device = device_traced_for()
    if kind == "splash":
        if device.platform not in ("tpu", ""):
            return f"the devices are {device.platform}s, and no TPUs"
        return splash_misfit(query, key)
    if kind in ("cudnn", "xla") and scoring.soft_cap is not None:
        return f"soft_cap is {scoring.soft_cap}, but this kind has no soft cap"
    if kind == "cudnn":
        return cudnn_misfit(device, query, key, has_documents=documents is not None)
    return None
