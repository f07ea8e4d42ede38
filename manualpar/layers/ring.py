"""Collective matmuls: sequence parallelism that communicates while it computes its products.

Sequence parallelism needs an all-gather before the column-parallel products, and a reduce-scatter
after the row-parallel product. Here a product begins with the device's chunk of the sequence while
the neighbours' chunks arrive. Partial sums are sent from device to device while the terms of the
next chunk are computed (Wang et al., "Overlap communication with dependent computation via
decomposition", ASPLOS 2023, https://dl.acm.org/doi/10.1145/3567955.3567959). The devices send the
same bytes as with an all-gather and a reduce-scatter.

```python
x = enter_ring(x, "model", 1)  # Once for all products of the same input.
gate, up = gather_matmul(x, gate_kernel), gather_matmul(x, up_kernel)
hidden = jax.tree.map(lambda gate, up: nn.silu(gate) * up, gate, up)  # Chunk by chunk.
x = matmul_scatter(hidden, down_kernel, "model", 1)
```

The sequence stays in `Chunks` between the products, so that the compiler can fuse an activation
function into the product before it. Attention, and everything else that combines positions, needs
`whole_sequence(...)`; `matmul_scatter` accepts both chunks and whole sequences.

Symbols: `N` devices along the axis, `S` positions of the sequence.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from manualpar.core.mesh.axes import AxisName
from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.layers.boundaries import bound_axes, has_lost_types
from manualpar.layers.ring_chunks import (
    Chunks,
    cut,
    gather_chunks,
    join_chunks,
    multiply,
    multiply_rows,
    scatter_chunks,
)


def enter_ring(x: jax.Array, axis: AxisName | None, sequence_dim: int) -> jax.Array | Chunks:
    """Sends the chunks of a sequence around a ring, for column-parallel products of the sequence.

    Use it in place of `enter` with a `sequence_dim`. Call it once for all products of the same
    input, such as query, key and value, and give the result to `gather_matmul` or to
    column-parallel `SplitDense`s.

    Args:
      x: This device's chunk, `[..., S/axis, ..., D]`.
      axis: The mesh axis, or tuple of axes, that the sequence and the products are split over. Axes
        that no `shard_map` binds are left out.
      sequence_dim: The dimension along which `x` is split.

    Returns:
      The chunks; `x` itself if no axis is bound.

    Raises:
      ValueError: `x` is the same on all devices by its type, so that it is not split; or types are
        not checked.

    Communication:
      Forward `N - 1` permutes of a chunk, two at a time. With even `N > 2` two permutes of half a
      chunk replace the last permute, if the length of a chunk is even. The bytes are the same as
      for an all-gather. Backward the same permutes of gradients, which are added up on the way.
    """
    axes = bound_axes("enter_ring", axis)
    if not axes:
        return x
    _check_varies("enter_ring", axes, "an input that is split along its sequence", x)
    dim = sequence_dim % x.ndim
    return gather_chunks(x, axes, dim)


def gather_matmul(
    x: jax.Array | Chunks, kernel: jax.Array, contracted: int = 1
) -> jax.Array | Chunks:
    """Multiplies a full sequence with this device's part of a column-parallel kernel.

    Args:
      x: The result of `enter_ring`: `Chunks`, or an array if no axis is bound.
      kernel: `[D, F/axis]`, or with more dims of either kind, such as `[D, N/axis, H]`.
      contracted: How many dims to sum over: the last dims of `x` and the first dims of the kernel.

    Returns:
      `Chunks` of `[..., S, ..., F/axis]` in the dtype of `x` and the kernel; an array if `x` is an
      array.

    Raises:
      ValueError: The kernel does not fit `x`, or the sequence is one of the contracted dims.

    Communication:
      None after `enter_ring`.

    Gradient:
      Written by hand for each device's products: one product for each chunk's gradient, and one
      product over the whole sequence for the kernel's gradient.
    """
    if not isinstance(x, Chunks):
        return multiply_rows(x, kernel, contracted)
    _check_product("gather_matmul", x.parts[0], x.dim, kernel, contracted)
    parts, kernel = _alike((x.parts, kernel))
    return dataclasses.replace(x, parts=multiply(parts, kernel, contracted))


def matmul_scatter(
    x: jax.Array | Chunks,
    kernel: jax.Array,
    axis: AxisName | None,
    sequence_dim: int,
    contracted: int = 1,
) -> jax.Array:
    """Multiplies by a row-parallel kernel, and scatters the sum of the devices' products.

    Use it in place of a product and a `leave` with a `sequence_dim`.

    Args:
      x: This device's features of the whole sequence, `[..., S, ..., F/axis]`, or its `Chunks`.
      kernel: This device's part of the kernel, `[F/axis, D]`, or with more dims of either kind,
        such as `[N/axis, H, D]`.
      axis: The mesh axis, or tuple of axes, that the kernel is split over, see `enter_ring`.
      sequence_dim: The dimension of the sequence, along which the result is split.
      contracted: How many dims to sum over: the last dims of `x` and the first dims of the kernel.

    Returns:
      This device's chunk of the sum, `[..., S/axis, ..., D]`; the product if no axis is bound. The
      sum is rounded on each device to the dtype of `x` and the kernel.

    Raises:
      ValueError: The kernel does not fit `x`; `N` does not divide the length of the sequence; the
        sequence is one of the contracted dims; `x` is `Chunks` of another dim or axis; or neither
        `x` nor the kernel varies over `axis`, and the sum would be `N` times too large.

    Communication:
      Forward the permutes of `enter_ring`, but with chunks of the result. Backward the same
      permutes of the result's gradient.

    Gradient:
      Written by hand for each device's products, see `gather_matmul`.
    """
    axes = bound_axes("matmul_scatter", axis)
    if not axes:
        return multiply_rows(whole_sequence(x), kernel, contracted)
    chunk = x.parts[0] if isinstance(x, Chunks) else x
    dim = sequence_dim + (chunk.ndim + kernel.ndim - 2 * contracted) * (sequence_dim < 0)
    _check_product("matmul_scatter", chunk, dim, kernel, contracted)
    if not isinstance(x, Chunks):
        _check_varies("matmul_scatter", axes, "different terms of a sum", x, kernel)
        size = jax.lax.axis_size(axes)
        if x.shape[dim] % size:
            raise ValueError(
                f"matmul_scatter: {x.shape[dim]} positions along sequence_dim={dim} of an x of "
                f"shape {x.shape}, expected a multiple of the {size} devices along {axes}."
            )
        x = Chunks(cut(cast_to_varying(x, axes), axes, dim), axes, dim)
    elif (x.axes, x.dim) != (axes, dim):
        raise ValueError(
            f"matmul_scatter: x is in chunks along sequence_dim={x.dim} over {x.axes}, expected "
            f"chunks along {dim} over {axes}. Name the same dim and axes in enter_ring, or pass "
            "whole_sequence(x)."
        )
    parts, kernel = _alike((x.parts, kernel))
    return scatter_chunks(dataclasses.replace(x, parts=multiply(parts, kernel, contracted)))


def whole_sequence(x: jax.Array | Chunks) -> jax.Array:
    """Joins `Chunks` to an array `[..., S, ...]`; returns an array unchanged.

    Communication:
      None.
    """
    return join_chunks(x.parts, x.axes, x.dim) if isinstance(x, Chunks) else x


def _check_product(
    function: str, x: jax.Array, dim: int, kernel: jax.Array, contracted: int
) -> None:
    if x.shape[-contracted:] != kernel.shape[:contracted]:
        raise ValueError(
            f"{function}: x of shape {x.shape} and a kernel of shape {kernel.shape}, expected the "
            f"last {contracted} dims of x to equal the first {contracted} of the kernel."
        )
    if not 0 <= dim < x.ndim - contracted:
        raise ValueError(
            f"{function}: sequence_dim={dim} of an x of shape {x.shape}, expected one of its first "
            f"{x.ndim - contracted} dims, because the other dims are summed over."
        )


def _check_varies(function: str, axes: tuple[str, ...], expected: str, *arrays: jax.Array) -> None:
    varying = frozenset().union(*map(varying_axes, arrays))
    if not set(axes) <= varying and not all(has_lost_types(x, axes) for x in arrays):
        raise ValueError(
            f"{function}: x of shape {arrays[0].shape} is the same on all devices along {axes} by "
            f"its type, expected {expected}."
        )


def _alike(arrays: Any) -> Any:
    """Casts all arrays to one dtype and one type, as the handwritten gradient rules need."""
    leaves = jax.tree.leaves(arrays)
    dtype = jnp.result_type(*leaves)
    arrays = jax.tree.map(lambda x: x.astype(dtype), arrays)
    return cast_to_varying(arrays, frozenset().union(*map(varying_axes, leaves)))
