"""A vocabulary that is split over a model axis: the embedding, and the loss of the logits.

Each device has the embedding rows of some tokens, and computes the logits of the same tokens.
Neither rows nor logits are gathered. A lookup adds up the devices' rows, because one device has the
right row and the other devices have zeros. The cross entropy sends a few numbers for each label:
the largest logit, the sum of exponentials and the label's logit (Megatron-LM, Shoeybi et al.,
https://arxiv.org/abs/1909.08053, section 3).

If no axis is bound, or if the types say that the table or the logits are not split, these are the
ordinary functions of one device. An index outside of the vocabulary gives the same result in both
cases.

The number of devices must divide the vocabulary. A model may have more columns than tokens. If the
additional columns have logits of -inf, all of these functions ignore these columns.

Symbols: `N` devices along the axis, `V` tokens of the vocabulary, `D` features.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from manualpar.core.mesh.axes import AxisName
from manualpar.core.parameters.collectives import gather_invariant, varying_axes
from manualpar.core.tracing.scopes import CROSS_ENTROPY_SCOPE
from manualpar.layers.boundaries import bound_axes, leave


def split_lookup(
    table: jax.Array, tokens: jax.Array, axis: AxisName | None, sequence_dim: int | None = None
) -> jax.Array:
    """Looks up the rows of an embedding whose rows are split over devices.

    Args:
      table: `[V/axis, D]`, this device's rows; `[V, D]` if no `shard_map` binds `axis`, or if the
        table is the same on all devices along `axis` by its type.
      tokens: `int[...]`, the same on all devices along `axis`.
      axis: The mesh axis, or tuple of axes, that the rows are split over.
      sequence_dim: The dimension along which the result is split between layers, see `leave`;
        `None` if it is not split.

    Returns:
      The rows, `[..., D]`, the same on all devices along `axis`; with `sequence_dim` this device's
      part of the rows, `[..., S/axis, ..., D]`. A token that is negative or has no row in the table
      gives NaN (in an integer table the least number).

    Raises:
      ValueError: The tokens vary over `axis`, so that rows of different tokens would be added up;
        the table varies over only some of the axes; or `leave` raises.

    Communication:
      See `leave`: forward one all-reduce of the rows (a device sends `2 (N - 1) / N` of the
      bytes), backward none. With `sequence_dim` a reduce-scatter forward and an all-gather
      backward, and an all-reduce of the gradient if the table is not split.
    """
    axes = bound_axes("split_lookup", axis)
    has_parts = is_split("split_lookup", table, axes)
    if not axes or (sequence_dim is None and not has_parts):
        return _look_up(table, tokens)
    if varying_axes(tokens) & set(axes):
        raise ValueError(
            f"split_lookup: tokens of shape {tokens.shape} vary over {axes} by their type, "
            "expected the same tokens on all devices along these axes, because the rows "
            "that the devices find are added up. Pass the tokens of the full sequence, and let "
            "sequence_dim split the result."
        )
    # If the table is replicated, the first device looks up all rows.
    parts = jax.lax.axis_size(axes) if has_parts else 1
    index, is_mine = index_here(tokens, table.shape[0], axes, parts)
    rows = _look_up(table, index)
    return leave(jnp.where(is_mine[..., None], rows, jnp.zeros_like(rows)), axes, sequence_dim)


def split_cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    axis: AxisName | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> jax.Array:
    """Computes the cross entropy of labels, from logits that may be split over devices.

    Without options it computes `optax.softmax_cross_entropy_with_integer_labels`, and calls it if
    the logits are not split.

    Args:
      logits: Floating `[..., V/axis]`, this device's columns; `[..., V]` if they are not split. A
        column of -inf does not count in the loss.
      labels: `int[...]`, from 0 to `V - 1`, the same on all devices along `axis`. As in optax, a
        label from `-V` to -1 counts from the end, and any other label gives NaN.
      axis: The mesh axis, or tuple of axes, that the columns are split over, `()` for none. By
        default the types decide: the columns are split over the axis over which the logits vary and
        the labels do not.
      label_smoothing: The share of a label that is spread evenly over all columns that are not -inf
        (Szegedy et al., https://arxiv.org/abs/1512.00567, section 7).
      z_loss: The factor of an additional term `log(Z)**2`, where `Z` is the sum of the
        exponentials. The term keeps the logits from drifting. PaLM has 1e-4 (Chowdhery et al.,
        https://arxiv.org/abs/2204.02311, section 5).

    Returns:
      The losses in nats, `[...]`, in the dtype of the logits, the same on all devices along `axis`.
      If the logits are split or an option is given, the losses are computed in float32 or wider.

    Raises:
      ValueError: The shapes do not fit; or the types do not show the axis, or contradict `axis`.
      TypeError: The logits are not floating-point, or the labels are not integers.

    Communication:
      Forward two all-reduces over `axis`. For each label, the first sums one float32 number, and
      the second sums two numbers (four with `label_smoothing`). A device sends `2 (N - 1) / N` of
      the bytes of these numbers. Backward none.
    """
    check_labels("split_cross_entropy", logits, labels)
    if axis is None:
        axes = vocabulary_axes(logits, labels)
    else:
        axes = bound_axes("split_cross_entropy", axis)
        axes = axes if is_split("split_cross_entropy", logits, axes) else ()
        check_same_labels("split_cross_entropy", labels, axes)
    if not (axes or label_smoothing or z_loss):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    top = largest_of_all(x.max(axis=-1), axes)
    sums = [jnp.exp(x - top[..., None]).sum(axis=-1), _pick(x, labels, axes)]
    if label_smoothing:
        is_visible = x > -jnp.inf
        sums += [jnp.where(is_visible, x, 0).sum(axis=-1), is_visible.sum(axis=-1, dtype=x.dtype)]
    losses = losses_of_sums(sums, top, axes, label_smoothing=label_smoothing, z_loss=z_loss)
    return losses.astype(logits.dtype)


def split_argmax(logits: jax.Array, axis: AxisName | None) -> jax.Array:
    """Finds the index of the largest logit (the first of equal logits); logits may be split.

    Args:
      logits: `[..., V/axis]`, this device's columns; `[..., V]` if they are not split.
      axis: The mesh axis, or tuple of axes, that the columns are split over.

    Returns:
      `int32[...]`, from 0 to `V - 1`, the same on all devices along `axis`. As in `jnp.argmax`, NaN
      is larger than any number.

    Raises:
      ValueError: The logits vary over only some of the axes, or types are not checked.

    Communication:
      One all-gather over `axis` of two float32 numbers for each result: a device sends
      `8 (N - 1)` bytes for each result. There is no gradient.
    """
    axes = bound_axes("split_argmax", axis)
    index = logits.argmax(axis=-1)
    if not is_split("split_argmax", logits, axes):
        return index
    return first_of_largest(logits.max(axis=-1), index, logits.shape[-1], axes)


def vocabulary_axes(logits: jax.Array, labels: jax.Array) -> tuple[str, ...]:
    """Finds the mesh axis that splits the columns of logits, by the types; `()` for none.

    Logits and labels vary over the axes that split the examples. Only logits vary over the axis
    that splits the vocabulary.
    """
    axes = varying_axes(logits) - varying_axes(labels)
    if axes and not varying_axes(labels):
        raise ValueError(
            f"split_cross_entropy: logits of shape {logits.shape} vary over {sorted(axes)} by "
            "their type and labels over no axis; expected labels that vary over the axes of the "
            "batch, so that the types show which axis splits the vocabulary. Name this axis, "
            "axis='model', or pass axis=() if the logits are not split."
        )
    if len(axes) > 1:
        raise ValueError(
            f"split_cross_entropy: logits of shape {logits.shape} vary over {sorted(axes)} by "
            "their type and labels do not, expected one axis that splits the vocabulary. If "
            "several axes split the columns, name them in order, axis=('model', 'expert'). "
            "Otherwise a sum is missing before the logits: call leave there."
        )
    return tuple(axes)


def _look_up(table: jax.Array, indices: jax.Array) -> jax.Array:
    """Looks up rows of a table; gives NaN for an index that the table does not have."""
    # In explicit mode a gather needs the sharding of its result, which is the sharding of the
    # indices.
    names = jax.typeof(indices).sharding.spec
    spec = PartitionSpec(*names, None) if any(names) else None
    rows = jnp.asarray(table).at[indices]
    return rows.get(mode="fill", wrap_negative_indices=False, out_sharding=spec)


def _pick(x: jax.Array, labels: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Picks the labels' logits; gives 0 for a label whose column is on another device."""
    index, is_mine = label_index(labels, x.shape[-1], axes)
    picked = jnp.take_along_axis(x, index[..., None], axis=-1, mode="fill")[..., 0]
    return jnp.where(is_mine, picked, 0)


# -------------------------------------------------------------------------------------------------
# Combines results over devices that each have some columns of the logits.
#
# The devices exchange a few numbers for each label, and no logits. If `axes` is `()`, each device
# has all columns and nothing is sent.


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
    """Returns whether, by its type, `x` varies over `axes`."""
    varying = varying_axes(x) & set(axes)
    if varying and varying != set(axes):
        raise ValueError(
            f"{function}: an array of shape {x.shape} varies over {sorted(varying)} by its type, "
            f"expected all of the axes {axes} or none. Name the axes over which its dimension is "
            "split."
        )
    return bool(varying)


def check_labels(function: str, x: jax.Array, labels: jax.Array, *, what: str = "logits") -> None:
    """Refuses labels that are not one integer for each row of `x`; `what` names `x` in errors."""
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
    """Refuses labels that differ along axes that split the columns."""
    if varying_axes(labels) & set(axes):
        raise ValueError(
            f"{function}: labels vary over {axes} by their type, expected the same "
            "labels on all devices along these axes, because each device has some columns of the "
            "logits."
        )
