"""The head of a language model, and its cross entropy without an array of all logits.

The logits of `T` tokens are `T V` float32 numbers, often the largest array of a step. Autodiff
keeps this array for the backward pass and makes a second one for the gradients. This module
computes the logits of one chunk of columns at a time. It keeps a few numbers for each token: the
largest logit and the sum of the exponentials so far (Milakov and Gimelshein,
https://arxiv.org/abs/1805.02867), and the label's logit. The backward pass computes the chunk's
logits again, and adds their contribution to the gradients of the input and of the head (Wijmans et
al., https://arxiv.org/abs/2411.09009).

Symbols: `T` tokens of a device, `D` features, `V` columns of the head on a device.

Invariants: logits, sums and the gradient of the input, added up over chunks, are float32 or wider.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from manualpar.core.mesh.axes import AxisName
from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.tracing.scopes import CONTEXT_SCOPE
from manualpar.layers.boundaries import bound_axes
from manualpar.layers.ring import multiply_rows
from manualpar.layers.vocabulary import (
    check_labels,
    check_same_labels,
    first_of_largest,
    is_split,
    label_index,
    largest_of_all,
    losses_of_sums,
    split_argmax,
    split_cross_entropy,
)

CHUNK_ELEMENTS = 2**24  # By default a chunk has about this many logits (64 MiB).
# By default a chunk has at least this many columns, because memory limits the speed of smaller
# products.
FEWEST_COLUMNS = 2048

Carry = TypeVar("Carry")


class _Static(NamedTuple):
    """The static arguments of the computation in chunks.

    Attributes:
      chunk: The number of columns of a chunk.
      soft_cap: See `head_logits`.
      sums_all: Whether to sum all logits.
    """

    chunk: int
    soft_cap: float | None
    sums_all: bool


class _Sums(NamedTuple):
    """A device's sums over its columns, for each token: arrays `[...]`.

    Attributes:
      log_normalizer: `log(sum(exp(logits)))`.
      target: The label's logit; 0 if the label is not among these columns.
      of_all: The sum of the logits; 0 without `sums_all`.
      largest: The largest logit.
      best: `int32`, the column of the largest logit; the first column if several logits are equal.
    """

    log_normalizer: jax.Array
    target: jax.Array
    of_all: jax.Array
    largest: jax.Array
    best: jax.Array


def head_logits(
    x: jax.Array,
    head: jax.Array,
    *,
    axis: AxisName | None = None,
    vocab_size: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Computes the logits of a head.

    Args:
      x: `[..., D]`.
      head: `[D, V/axis]`; it is cast to the dtype of `x` before the product.
      axis: The mesh axis, or tuple of axes, that the columns are split over; `None` for none.
      vocab_size: The number of tokens; the logits of later columns become -inf. `None` for all.
      soft_cap: Bounds logits: they become `soft_cap * tanh(logit / soft_cap)`
        (Gemma 2, https://arxiv.org/abs/2408.00118, section 2); `None` for no bound.

    Returns:
      `[..., V/axis]` in float32 (float64 if `x` is float64), never rounded to the dtype of `x`.

    Communication:
      None.
    """
    axes = bound_axes("head_logits", axis)
    axes = axes if is_split("head_logits", head, axes) else ()
    return _logits(x, head, 0, _visible_columns(head, vocab_size, axes), soft_cap)


def head_cross_entropy(
    x: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    *,
    axis: AxisName | None = None,
    vocab_size: int | None = None,
    chunk: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes a head's cross entropy, and whether the label has the largest logit.

    The results are the same as from `split_cross_entropy` and `split_argmax` of `head_logits`, but
    there is no array of all logits, except in two cases. The head has at most `chunk` columns (by
    default `FEWEST_COLUMNS`); or the arrays are global (modes `auto` and `explicit`), where a chunk
    of columns is not a shard.

    Args:
      x: Floating `[..., D]`; if the columns are split, the same on all devices along `axis`, or
        the result of `enter`.
      head: `[D, V/axis]`, this device's columns; `[D, V]` if the type of the head shows that the
        columns are not split. Each chunk is cast to the dtype of `x` when it is used.
      labels: `int[...]`, the same on all devices along `axis`. A label from `-V` to -1 counts from
        the end, and any other label that the head does not have gives NaN.
      axis: The mesh axis, or tuple of axes, that the columns are split over; `None` for none. Axes
        that no `shard_map` binds are left out.
      vocab_size: The number of tokens; later columns are ignored. `None` for all columns.
      chunk: The number of columns to compute at a time (the last chunk may have fewer); `None` for
        `default_chunk`.
      label_smoothing: See `split_cross_entropy`.
      z_loss: See `split_cross_entropy`.
      soft_cap: See `head_logits`.

    Returns:
      The losses in nats, `[...]` in float32 (float64 if `x` is float64), and `bool[...]`, whether
      the label has the largest logit. Both are the same on all devices along `axis`.

    Raises:
      ValueError: The shapes do not fit, a number is out of range, or the types contradict `axis`.
      TypeError: The labels are not integers, or `x` is not floating-point.

    Communication:
      Forward the collectives of `split_cross_entropy` and `split_argmax`. Backward none, except
      that `enter` sums the gradient of `x` over `axis`.

    Gradient:
      Written by hand: it computes the logits once more. Each chunk's products are in the dtype of
      `x`. The gradient of `x` is added up over chunks in float32. The gradient of the head is
      written chunk by chunk in the dtype of `head`. If `x` is bfloat16 and has no more tokens than
      features, the gradients of all logits are kept in bfloat16. In this case one product computes
      the gradient of `x`, and one product the gradient of the head.
    """
    _check_arguments(x, head, label_smoothing, soft_cap, chunk)
    check_labels("head_cross_entropy", x, labels, what="inputs")
    axes = bound_axes("head_cross_entropy", axis)
    axes = axes if is_split("head_cross_entropy", head, axes) else ()
    check_same_labels("head_cross_entropy", labels, axes)
    columns = head.shape[1]
    visible = _visible_columns(head, vocab_size, axes)
    # This choice must not depend on the number of tokens, because the check of a context axis
    # compares programs with different numbers of tokens.
    if columns <= (chunk or FEWEST_COLUMNS) or _is_of_global_arrays():
        logits = _logits(x, head, 0, visible, soft_cap)
        losses = split_cross_entropy(
            logits, labels, axis=axes, label_smoothing=label_smoothing, z_loss=z_loss
        )
        return losses, split_argmax(logits, axes) == labels

    index, is_mine = label_index(labels, columns, axes)
    args = (x, head, index, visible)
    chunk = chunk or default_chunk(math.prod(labels.shape))
    static = _Static(min(chunk, columns), soft_cap, bool(label_smoothing))
    sums = _summed(*cast_to_varying(args, varying_axes(args)), static)
    top = largest_of_all(sums.log_normalizer, axes)
    target = jnp.where(is_mine & (index >= columns), jnp.nan, sums.target)
    stacked = [jnp.exp(sums.log_normalizer - top), target]
    if label_smoothing:
        number = columns if visible is None else jnp.clip(visible, 0, columns)
        stacked += [sums.of_all, jnp.zeros_like(target) + number]
    losses = losses_of_sums(stacked, top, axes, label_smoothing=label_smoothing, z_loss=z_loss)
    best = first_of_largest(sums.largest, sums.best, columns, axes) if axes else sums.best
    return losses, best == labels


def default_chunk(tokens: int) -> int:
    """Returns the number of columns of a chunk of about `CHUNK_ELEMENTS` logits.

    It is a multiple of 128.
    """
    return max(FEWEST_COLUMNS, CHUNK_ELEMENTS // max(tokens, 1) // 128 * 128)


def _logits(
    x: jax.Array, weights: jax.Array, first: Any, visible: Any, soft_cap: float | None
) -> jax.Array:
    """Computes the logits of some columns of the head; `first` is the index of the first one."""
    return _capped(_product(x, weights), first, visible, soft_cap)


def _product(x: jax.Array, weights: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    return multiply_rows(x, weights.astype(x.dtype), 1, dtype)


def _capped(logits: jax.Array, first: Any, visible: Any, soft_cap: float | None) -> jax.Array:
    """Caps logits, and sets the columns without a token to -inf."""
    if soft_cap:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    if visible is None:
        return logits
    is_visible = first + jnp.arange(logits.shape[-1]) < visible
    return jnp.where(jnp.expand_dims(is_visible, range(logits.ndim - 1)), logits, -jnp.inf)


def _visible_columns(
    head: jax.Array, vocab_size: int | None, axes: tuple[str, ...]
) -> jax.Array | None:
    """Counts this device's columns that stand for tokens; `None` if no column is padding."""
    columns = head.shape[1]
    parts = jax.lax.axis_size(axes) if axes else 1
    if vocab_size is None or vocab_size >= columns * parts:
        return None
    return jnp.int32(vocab_size) - (jax.lax.axis_index(axes) * columns if axes else 0)


def _is_of_global_arrays() -> bool:
    """Returns whether arrays in this code are global arrays on several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    return any(kind != AxisType.Manual and size > 1 for kind, size in kinds)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _summed(
    x: jax.Array, head: jax.Array, index: jax.Array, visible: jax.Array | None, static: _Static
) -> _Sums:
    """Computes a device's sums; `index` is the label's column, counted from the device's first."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    zero = jnp.zeros_like(index, dtype)

    def add(carry: tuple[jax.Array, _Sums], first: Any, weights: jax.Array) -> Any:
        total, sums = carry
        logits = _logits(x, weights, first, visible, static.soft_cap)
        top = logits.max(axis=-1)
        largest = jnp.maximum(sums.largest, top)
        # A finite number is subtracted in the exponents, so that no difference is NaN.
        base = jnp.where(jnp.isfinite(largest), largest, 0)
        total = total * jnp.exp(sums.largest - base) + jnp.exp(logits - base[..., None]).sum(-1)
        is_larger = (top > sums.largest) | (jnp.isnan(top) & ~jnp.isnan(sums.largest))
        best = first + logits.argmax(axis=-1).astype(jnp.int32)
        of_all = sums.of_all
        if static.sums_all:
            of_all += jnp.where(logits > -jnp.inf, logits, 0).sum(axis=-1)
        target = jnp.where(_is_label(logits, index, first), logits, 0).sum(axis=-1)
        return total, _Sums(
            base,
            sums.target + target,
            of_all,
            largest,
            jnp.where(is_larger, best, sums.best),
        )

    start = _Sums(zero, zero, zero, zero - jnp.inf, jnp.zeros_like(index))
    total, sums = _over_chunks(add, (zero, start), head, static.chunk)
    return sums._replace(log_normalizer=jnp.log(total) + sums.log_normalizer)


def _summed_forward(
    x: jax.Array, head: jax.Array, index: jax.Array, visible: jax.Array | None, static: _Static
) -> tuple[_Sums, Any]:
    sums = _summed(x, head, index, visible, static)
    return sums, (x, head, index, visible, sums.log_normalizer)


def _summed_backward(static: _Static, residuals: Any, grads: Any) -> tuple[Any, ...]:
    x, head, index, visible, log_normalizer = residuals
    dtype = jnp.promote_types(x.dtype, jnp.bfloat16)  # Float16 would lose small gradients.
    rows, tokens = x.reshape(-1, x.shape[-1]), math.prod(index.shape)

    def of_product(first: Any, weights: jax.Array) -> jax.Array:
        logits, pull = jax.vjp(
            lambda product: _capped(product, first, visible, static.soft_cap), _product(x, weights)
        )
        of_logits = jnp.exp(logits - log_normalizer[..., None]) * grads.log_normalizer[..., None]
        of_logits += jnp.where(_is_label(logits, index, first), grads.target[..., None], 0)
        if static.sums_all:
            of_logits += grads.of_all[..., None]
        return pull(of_logits)[0].astype(dtype)

    def of_weights(of_columns: jax.Array) -> jax.Array:
        # The product rounds its result, because XLA can overlap a scatter with a product, but not
        # with a product and a cast.
        wider = jnp.promote_types(dtype, head.dtype)
        of_columns = of_columns.reshape(tokens, -1)
        return jnp.matmul(rows.T, of_columns, preferred_element_type=wider).astype(head.dtype)

    def add(carry: tuple[jax.Array, jax.Array], first: Any, weights: jax.Array) -> Any:
        of_x, of_head = carry
        of_chunk = of_product(first, weights)
        of_x += _product(of_chunk, weights.astype(x.dtype).T)
        return of_x, _written(of_head, of_weights(of_chunk), first)

    def keep(of_logits: jax.Array, first: Any, weights: jax.Array) -> jax.Array:
        return _written(of_logits, of_product(first, weights), first)

    if dtype.itemsize < 4 and tokens <= head.shape[0]:
        # The gradients of all logits are no larger than the head's gradient. So they are kept, and
        # one product computes the head's gradient. A compiler can scatter the result of one product
        # while it is computed.
        start = jnp.zeros_like(x, dtype, shape=(*index.shape, head.shape[1]))
        of_logits = _over_chunks(keep, start, head, static.chunk)
        with jax.named_scope(CONTEXT_SCOPE):
            of_x, of_head = _product(of_logits, head.T), of_weights(of_logits)
    else:
        zero = jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32))
        of_x, of_head = _over_chunks(add, (zero, jnp.zeros_like(head)), head, static.chunk)
    return of_x.astype(x.dtype), of_head, None, None


_summed.defvjp(_summed_forward, _summed_backward)


def _written(array: jax.Array, columns: jax.Array, first: Any) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, columns, first, array.ndim - 1)


def _is_label(logits: jax.Array, index: jax.Array, first: Any) -> jax.Array:
    columns = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return columns == (index - first)[..., None]


def _over_chunks(
    step: Callable[[Carry, Any, jax.Array], Carry], carry: Carry, head: jax.Array, chunk: int
) -> Carry:
    """Runs `step(carry, first, weights)` on each full chunk, and on the remaining columns."""
    full_chunks = head.shape[1] // chunk

    def run(carry: Carry, first: jax.Array) -> tuple[Carry, None]:
        return step(carry, first, jax.lax.dynamic_slice_in_dim(head, first, chunk, 1)), None

    # The number of chunks may depend on the number of positions. So this code is in a scope that
    # the check of models with a context axis trusts.
    with jax.named_scope(CONTEXT_SCOPE):
        carry, _ = jax.lax.scan(run, carry, jnp.arange(full_chunks, dtype=jnp.int32) * chunk)
        if head.shape[1] % chunk:
            carry = step(carry, jnp.int32(full_chunks * chunk), head[:, full_chunks * chunk :])
    return carry


def _check_arguments(
    x: jax.Array, head: jax.Array, label_smoothing: float, soft_cap: float | None, chunk: int | None
) -> None:
    if head.ndim != 2 or x.shape[-1:] != head.shape[:1]:
        raise ValueError(
            f"head_cross_entropy: x has the shape {x.shape} and head {head.shape}, expected [..., "
            "D] and [D, V]. If the head is an embedding, transpose it."
        )
    for name, value, fits, expected in (
        ("label_smoothing", label_smoothing, 0 <= label_smoothing < 1, "from 0 to less than 1"),
        ("soft_cap", soft_cap, soft_cap is None or soft_cap > 0, "more than 0, or None for none"),
        ("chunk", chunk, chunk is None or chunk > 0, "at least 1, or None for default_chunk"),
    ):
        if not fits:
            raise ValueError(f"head_cross_entropy: {name} is {value}, expected {expected}.")
