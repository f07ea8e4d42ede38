"""Causal attention within documents: one function, and the choice of its implementation.

- `"splash"`: jax's kernel for TPUs, see `splash_attention`.
- `"cudnn"`: NVIDIA's kernel, for dtypes of 16 bits, without `soft_cap`, see `cudnn_attention`.
- `"blockwise"`: plain JAX, one pair of blocks after the other, see `chunked_attention`. It runs
  everywhere. On CPUs it is faster than `"xla"` at every length, and takes less memory.
- `"xla"`: XLA stores the scores `[B, N, S, S]` in memory, and a mask of this size if there are
  documents.

`""` chooses the best kind for the devices for which a program is traced: splash on TPUs; cuDNN on
NVIDIA GPUs, if the mask of documents is no larger than the queries; otherwise blockwise. The
enclosing mesh gives these devices. (`jax.lax.platform_dependent` would trace all kinds. Then counts
of operations, plans and checks would include branches that do not run.)

Symbols: `B` examples, `S` positions, `N` query heads, `K` key and value heads, `H` features of a
head.
"""

from typing import Literal, get_args

import jax

from manualpar.layers.attention.blockwise_attention import Scoring
from manualpar.layers.attention.chunked_attention import attend_in_blocks
from manualpar.layers.attention.cudnn_attention import (
    cudnn_attention,
    cudnn_misfit,
    dot_product_attention,
)
from manualpar.layers.attention.splash_attention import splash_attention, splash_misfit
from manualpar.layers.boundaries import platform_traced_for

AttentionKind = Literal["", "splash", "cudnn", "blockwise", "xla"]
ATTENTION_KINDS: tuple[AttentionKind, ...] = get_args(AttentionKind)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None = None,
    *,
    kind: AttentionKind = "",
    window: int | None = None,
    soft_cap: float | None = None,
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

    Returns:
      `[B, S, N, H]`.

    Raises:
      ValueError: Shapes do not fit, an option is out of range, or the kind cannot run.

    Communication:
      None.
    """
    check_attention(query, key, value, documents, scoring := Scoring(window, soft_cap))
    if kind not in ATTENTION_KINDS:
        known = ", ".join(map(repr, ATTENTION_KINDS))
        raise ValueError(f"attention: kind is {kind!r}, expected one of {known}.")
    misfit = _misfit(kind, query, key, documents, scoring) if kind else None
    if misfit is not None:
        raise ValueError(
            f"attention: kind (of models config.model.attention) is {kind!r}, and {misfit}; "
            "expected a kind that can run here. Take '' for the best kind that can."
        )
    kind = kind or _best(query, key, documents, scoring)
    if kind == "splash":
        return splash_attention(query, key, value, documents, window=window, soft_cap=soft_cap)
    if kind == "blockwise":
        return attend_in_blocks(query, key, value, documents, scoring)
    if kind == "cudnn":
        return cudnn_attention(query, key, value, documents, window=window)
    return dot_product_attention(query, key, value, documents, window, "xla")


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
    if scoring.soft_cap is not None and not scoring.soft_cap > 0:
        raise ValueError(
            f"attention: soft_cap is {scoring.soft_cap}, expected more than 0, or None for none."
        )


def _best(
    query: jax.Array, key: jax.Array, documents: jax.Array | None, scoring: Scoring
) -> AttentionKind:
    """Chooses the kernel for the devices of the program if it fits, else blockwise."""
    is_alone = not jax.sharding.get_abstract_mesh().empty or jax.device_count() == 1
    # Without a mesh XLA may partition a program over several devices, but cannot partition kernels.
    if platform_traced_for() == "tpu" and is_alone and splash_misfit(query, key) is None:
        return "splash"
    _, S, N, H = query.shape
    # The mask of documents and its gradient are `[B, S, S]` in 16 bits. cuDNN is chosen only if the
    # mask is no larger than the queries.
    is_mask_small = documents is None or S <= N * H
    if is_mask_small and _misfit("cudnn", query, key, documents, scoring) is None:
        return "cudnn"
    return "blockwise"


def _misfit(
    kind: AttentionKind,
    query: jax.Array,
    key: jax.Array,
    documents: jax.Array | None,
    scoring: Scoring,
) -> str | None:
    """Returns why a kind cannot run, or `None`."""
    if kind == "splash":
        platform = platform_traced_for()
        if platform not in ("tpu", None):
            return f"the devices are {platform}s, and no TPUs"
        return splash_misfit(query, key)
    if kind in ("cudnn", "xla") and scoring.soft_cap is not None:
        return f"soft_cap is {scoring.soft_cap}, but this kind has no soft cap"
    return cudnn_misfit(query, key, documents) if kind == "cudnn" else None
