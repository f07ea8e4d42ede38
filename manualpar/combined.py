"""Several parameters in one collective.

A collective costs a latency besides its bytes, and what the compilers make of many small ones
differs: all merge all-reduces, the TPU's no all-gathers, the CPU's neither those nor
reduce-scatters. Where many parameters are gathered or scattered at one time, those that follow one
another in the tree are therefore put in *buckets* of at most `Wire.combine_bytes`, and each bucket
travels as one array. (Where each parameter gathers itself as it is used there is nothing to put
together.)

A bucket is a box too: the shards that a device has of its parameters, flat and one after the
other, are its row of `[N/axes, total]`, for `N` devices. So it is gathered and scattered as any box
is, and only the order of elements is of this file. In a bucket are parameters of one dtype that are
sharded over the same axes. Elements are copied into a bucket and out of it once each.
"""

import dataclasses
import itertools
import math
import os.path
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from manualpar.core.collectives import varying_axes
from manualpar.core.partitioning import (
    ShardedParameter,
    boxed_axes,
    is_box,
    replicate_shards,
    scatter_gradients,
    wire_dtype,
)
from manualpar.sharding.mesh import axis_tuple


def gather_boxes(boxes: Any) -> Any:
    """Gathers whatever is sharded over data axes in a tree of boxes.

    Args:
      boxes: A tree of arrays and boxes, inside `shard_map` or not.

    Returns:
      The tree with each box as its `gather_data_axes()` returns it.

    Communication:
      One all-gather for each bucket, and for each sharded dimension of what is in none.
    """

    def gather_bucket(bucket: list[ShardedParameter]) -> list[ShardedParameter]:
        whole = _unpack_whole(_pack_boxes(bucket).gather_data_axes().value, bucket)
        return [
            x.replace(value=x.unpad(value), names=_names_without(x, _data_dim(x)), sizes=())
            for x, value in zip(bucket, whole, strict=True)
        ]

    def gather(x: Any) -> Any:
        return x.gather_data_axes() if is_box(x) else x

    return _map_buckets(gather, gather_bucket, boxes)


def replicate_boxes(boxes: Any) -> Any:
    """Gathers whole parameters that all devices hold: `replicate_shards`, bucket by bucket.

    Communication:
      One all-gather for each bucket, and for each sharded dimension of what is in none.
    """

    def replicate_bucket(bucket: list[ShardedParameter]) -> list[jax.Array]:
        whole = _unpack_whole(replicate_shards(_pack_boxes(bucket)), bucket)
        return [x.unpad(value) for x, value in zip(bucket, whole, strict=True)]

    def replicate(x: Any) -> Any:
        return replicate_shards(x)

    return _map_buckets(replicate, replicate_bucket, boxes)


def scatter_boxes(grads: Any, shards: Any) -> Any:
    """Leaves each device its shards of mean gradients: `scatter_gradients`, bucket by bucket.

    Args:
      grads: A tree of each device's own gradients of whole parameters, boxed where the parameters
        are.
      shards: The same tree with a box for each gradient that is to be scattered.

    Returns:
      The tree of `shards` with gradients for values; what is in a box like its shard's has been
      scattered already and stays as it is.

    Communication:
      One reduce-scatter for each bucket, and for each sharded dimension of what is in none.
    """

    def prepare(shard: Any, g: Any) -> Any:
        if boxed_axes(g) == boxed_axes(shard):
            return _Ready(g)
        return shard.replace(value=(g.value if is_box(g) else g).astype(wire_dtype(shard)))

    def scatter(x: Any) -> Any:
        return x.gradient if isinstance(x, _Ready) else scatter_gradients(x.value, x)

    def scatter_bucket(bucket: list[ShardedParameter]) -> list[ShardedParameter]:
        shapes = [_shard_shape(x) for x in bucket]
        row = scatter_gradients(_pack_whole(bucket), _pack_boxes(bucket)).value[0]
        parts = _split(row, [math.prod(shape) for shape in shapes])
        return [
            x.replace(value=part.reshape(shape))
            for x, part, shape in zip(bucket, parts, shapes, strict=True)
        ]

    whole = jax.tree.map(prepare, shards, grads, is_leaf=is_box)
    return _map_buckets(scatter, scatter_bucket, whole, is_whole=True)


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A gradient that lies as its shard does."""

    gradient: Any


def _map_buckets(
    one: Callable[[Any], Any],
    together: Callable[[list[Any]], list[Any]],
    boxes: Any,
    *,
    is_whole: bool = False,
) -> Any:
    """Maps `one` over what travels alone, and `together` over buckets, in the scope of each."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(boxes, is_leaf=is_box)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    results: list[Any] = [None] * len(leaves)
    for bucket in _buckets([x for _, x in leaves], is_whole=is_whole):
        inside = [leaves[i][1] for i in bucket]
        with jax.named_scope(os.path.commonpath([paths[i] for i in bucket])):
            out = [one(inside[0])] if len(bucket) == 1 else together(inside)
        for i, result in zip(bucket, out, strict=True):
            results[i] = result
    return jax.tree.unflatten(structure, results)


def _buckets(leaves: list[Any], *, is_whole: bool) -> Iterator[list[int]]:
    """The indices of what travels together, of neighbours as many as fit."""
    by_kind: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        if not is_box(x) or not x.wire.combine_bytes or len(_data_dims(x)) != 1:
            yield [i]
        else:
            # What varies over other axes would make the whole bucket vary.
            varying = varying_axes(x.value)
            kind = _data_axes(x), x.value.dtype, x.gather_axes, x.wire, varying
            by_kind.setdefault(kind, []).append(i)
    for indices in by_kind.values():
        bucket: list[int] = []
        filled = 0
        for i in indices:
            value, wire = leaves[i].value, leaves[i].wire
            devices = 1 if is_whole else jax.lax.axis_size(_data_axes(leaves[i]))
            size = value.size * devices * _itemsize(leaves[i], is_whole=is_whole)
            if bucket and filled + size > wire.combine_bytes:
                yield bucket
                bucket, filled = [], 0
            bucket.append(i)
            filled += size
        yield bucket


def _itemsize(x: ShardedParameter, *, is_whole: bool) -> int:
    """The bytes of an element as it travels; a gradient has been cast already."""
    is_cast = not is_whole and jnp.issubdtype(x.value.dtype, jnp.floating)
    dtype = x.wire.gather_dtype if is_cast else None
    return int(jnp.dtype(dtype or x.value.dtype).itemsize)


def _data_dims(x: ShardedParameter) -> list[int]:
    """The dims of a box that are gathered over data axes."""
    return [i for i, name in enumerate(x.names) if set(axis_tuple(name)) & set(x.gather_axes)]


def _data_dim(x: ShardedParameter) -> int:
    """The one such dim."""
    [dim] = _data_dims(x)
    return dim


def _data_axes(x: ShardedParameter) -> tuple[str, ...]:
    """The axes that it is sharded over."""
    return axis_tuple(x.names[_data_dim(x)])


def _names_without(x: ShardedParameter, dim: int) -> tuple[Any, ...]:
    """A box's names where one dim is gathered."""
    return (*x.names[:dim], None, *x.names[dim + 1 :])


def _pack_boxes(bucket: list[ShardedParameter]) -> ShardedParameter:
    """The box of a bucket, whose value is this device's row."""
    first = bucket[0]
    row = jnp.concatenate([x.value.ravel() for x in bucket])[None]
    return ShardedParameter(
        row, (_data_axes(first), None), gather_axes=first.gather_axes, wire=first.wire
    )


def _unpack_whole(rows: jax.Array, bucket: list[ShardedParameter]) -> list[jax.Array]:
    """The whole parameters, padded, from the rows of all devices."""
    whole = []
    for part, x in zip(_split(rows, [x.value.size for x in bucket]), bucket, strict=True):
        dim, shape = _data_dim(x), list(x.value.shape)
        shards = jnp.moveaxis(part.reshape(len(rows), *shape), 0, dim)
        shape[dim] *= len(rows)
        whole.append(shards.reshape(shape))
    return whole


def _shard_shape(x: ShardedParameter) -> tuple[int, ...]:
    """The shape of a device's shard of the whole value that a box holds, padding included."""
    dim, size = _data_dim(x), jax.lax.axis_size(_data_axes(x))
    return tuple(-(-n // size) if i == dim else n for i, n in enumerate(x.value.shape))


def _pack_whole(bucket: list[ShardedParameter]) -> jax.Array:
    """The whole values that boxes hold as rows of which each device is to have one."""
    num_rows = jax.lax.axis_size(_data_axes(bucket[0]))
    rows = []
    for x in bucket:
        dim, shape = _data_dim(x), _shard_shape(x)
        missing = shape[dim] * num_rows - x.value.shape[dim]
        value = jnp.pad(x.value, [(0, missing if i == dim else 0) for i in range(len(shape))])
        shards = value.reshape(*shape[:dim], num_rows, *shape[dim:])
        rows.append(jnp.moveaxis(shards, dim, 0).reshape(num_rows, math.prod(shape)))
    return jnp.concatenate(rows, axis=1)


def _split(x: jax.Array, sizes: list[int]) -> list[jax.Array]:
    """Parts of the last dim."""
    ends = list(itertools.accumulate(sizes))
    return jnp.split(x, ends[:-1], axis=-1)
