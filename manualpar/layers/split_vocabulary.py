"""Combines results over devices that each have some columns of the logits.

The devices exchange a few numbers for each label, and no logits. If `axes` is `()`, each device has
all columns and nothing is sent.
"""

import jax
import jax.numpy as jnp

from manualpar.core.parameters.collectives import gather_invariant, varying_axes
from manualpar.core.tracing.scopes import CROSS_ENTROPY_SCOPE


def largest_of_all(top: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns the largest `top` of all devices, to be subtracted from logits in exponents.

    Infinite and NaN results are replaced by 0. The result has no gradient.

    Communication:
      One all-reduce of `top`.
    """
    top = jax.lax.stop_gradient(top)
    if axes:
        with jax.named_scope(CROSS_ENTROPY_SCOPE):
            top = jax.lax.pmax(top, axes)
    return jnp.where(jnp.isfinite(top), top, 0)


def losses_of_sums(
    sums: list[jax.Array],
    top: jax.Array,
    axes: tuple[str, ...],
    *,
    label_smoothing: float,
    z_loss: float,
) -> jax.Array:
    """Computes the cross entropy from each device's sums over its columns.

    Args:
      sums: Arrays `[...]`: the sum of `exp(logits - top)`; the label's logit, 0 if another device
        has the label's column; and with `label_smoothing` the sum of the logits that are not -inf,
        and the number of these logits.
      top: `[...]`, the same on all devices along `axes`.
      axes: The mesh axes that the columns are split over; `()` for none.
      label_smoothing: See `split_cross_entropy`.
      z_loss: See `split_cross_entropy`.

    Returns:
      `[...]`, the same on all devices along `axes`.

    Communication:
      One all-reduce of all sums.
    """
    stacked = jnp.stack(sums)
    if axes:
        with jax.named_scope(CROSS_ENTROPY_SCOPE):
            stacked = jax.lax.psum(stacked, axes)
    total, target, *of_all = stacked
    log_normalizer = jnp.log(total) + top
    if label_smoothing:
        sum_of_all, number = of_all
        target = (1 - label_smoothing) * target + label_smoothing * (sum_of_all / number)
    losses = log_normalizer - target
    return losses + z_loss * log_normalizer**2 if z_loss else losses


def first_of_largest(
    top: jax.Array, index: jax.Array, size: int, axes: tuple[str, ...]
) -> jax.Array:
    """Finds the index of the largest logit of all devices, from each device's largest logit.

    Args:
      top: `[...]`, a device's largest logit.
      index: `int[...]`, the column of this logit on the device.
      size: The number of columns of a device.
      axes: The mesh axes that the columns are split over.

    Returns:
      `int32[...]`, the same on all devices along `axes`; among equal logits the first wins.

    Communication:
      One all-gather of two float32 numbers for each result.
    """
    top = jax.lax.stop_gradient(top)
    # Float32 is exact for every index up to 2**24.
    dtype = jnp.promote_types(top.dtype, jnp.float32)
    index += jax.lax.axis_index(axes) * size
    pair = jnp.stack([top.astype(dtype), index.astype(dtype)])
    tops, indices = gather_invariant(pair[:, None], 1, axes, scope=CROSS_ENTROPY_SCOPE)
    best = tops.argmax(axis=0, keepdims=True)
    return jnp.take_along_axis(indices, best, axis=0)[0].astype(jnp.int32)


def label_index(labels: jax.Array, size: int, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns the labels' columns on this device, and whether this device has the label's column.

    A device has `size` columns. A label outside of the vocabulary counts as a label of the first or
    the last device, and gets the index `size`, which is out of bounds.
    """
    parts = jax.lax.axis_size(axes) if axes else 1
    labels = labels.astype(jnp.int32)
    labels = jnp.where(labels < 0, labels + size * parts, labels)
    index, is_mine = index_here(labels, size, axes, parts)
    # A negative index would count from the end.
    return jnp.where(index < 0, size, index), is_mine


def index_here(
    indices: jax.Array, size: int, axes: tuple[str, ...], parts: int
) -> tuple[jax.Array, jax.Array]:
    """Converts indices into a dim that is split into `parts` parts of `size` entries.

    Returns:
      The indices into this device's part, and whether each entry is in this part. An index outside
      of the full dim counts as one in the first or the last part, where it is also out of bounds.
    """
    indices = indices.astype(jnp.int32)
    if not axes:
        return indices, jnp.ones_like(indices, bool)
    here = jax.lax.axis_index(axes)
    owner = jnp.clip(indices // size, 0, parts - 1)
    return indices - here * size, owner == here


def is_split(function: str, x: jax.Array, axes: tuple[str, ...]) -> bool:
    """Returns whether, by its type, `x` varies over `axes`.

    Raises:
      ValueError: `x` varies over only some of `axes`.
    """
    varying = varying_axes(x) & set(axes)
    if varying and varying != set(axes):
        raise ValueError(
            f"{function}: an array of shape {x.shape} varies over {sorted(varying)} by its type, "
            f"expected all of the axes {axes} or none. Name the axes over which its dimension is "
            "split."
        )
    return bool(varying)


def check_labels(function: str, x: jax.Array, labels: jax.Array, *, what: str = "logits") -> None:
    """Refuses labels that are not one integer for each row of `x`; the message names `x` by `what`.

    Raises:
      ValueError: The shapes differ.
      TypeError: The labels are not integers, or `x` is not floating-point.
    """
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"{function}: labels have the shape {labels.shape}, expected {x.shape[:-1]}: one for "
            f"each row of the {what} {x.shape}. If the sequence is split, call enter with "
            "sequence_dim before the head."
        )
    dtypes = (x.dtype, labels.dtype)
    if not jnp.issubdtype(dtypes[0], jnp.floating) or not jnp.issubdtype(dtypes[1], jnp.integer):
        raise TypeError(
            f"{function}: {what} are {dtypes[0]} and labels {dtypes[1]}, expected floats and "
            "integers."
        )


def check_same_labels(function: str, labels: jax.Array, axes: tuple[str, ...]) -> None:
    """Refuses labels that differ along axes that split the columns.

    Raises:
      ValueError: The labels vary over some of these axes by their type.
    """
    if varying_axes(labels) & set(axes):
        raise ValueError(
            f"{function}: labels vary over {axes} by their type, expected the same "
            "labels on all devices along these axes, because each device has some columns of the "
            "logits."
        )
