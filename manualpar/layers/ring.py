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
import functools
import math
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from manualpar.core.mesh.axes import AxisName
from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.tracing.scopes import SEQUENCE_SCOPE
from manualpar.layers.boundaries import bound_axes, has_lost_types, platform_traced_for
from manualpar.layers.low_precision import Matmul, gradient_tensordot, product_scope, tensordot

# -------------------------------------------------------------------------------------------------
# Sends the chunks of a sequence around a ring, or sums chunks on the way around the ring.
#
# Each device has one chunk. `gather_chunks` uses both directions of the ring: the chunks of the
# devices that are 1, 2, ... places ahead arrive from one side, and the chunks of the devices that
# are 1, 2, ... places behind from the other side. With even `N` the last chunk is equally far on
# both sides, so one half comes from each side. `scatter_chunks` sends partial sums the same ways
# back. So each of the two functions is the gradient of the other.
#
# Symbols: `N` devices along the axis. The *offset* of a chunk is the distance to the device that
# it comes from: 1 for the next device ahead, 0 for the device's own chunk. Chunks are in the order
# in which they arrive: 0, 1, -1, 2, -2, ...


# Whether layers overlap communication with their products. Only activations that are split along
# the sequence can use a ring.
LayerOverlap = Literal["none", "ring"]
LAYER_OVERLAPS: tuple[LayerOverlap, ...] = ("none", "ring")


@flax.struct.dataclass
class Chunks:
    """A full sequence as a tuple of chunks; it is a pytree.

    Apply functions that treat each position separately by `jax.tree.map`. For any other function,
    join the chunks by `whole_sequence`.

    Attributes:
      parts: The chunks `[..., S/axis, ..., D]`, in the order in which they arrive.
      axes: The mesh axes that the sequence is split over.
      dim: The dimension of the sequence.
    """

    parts: tuple[jax.Array, ...]
    axes: tuple[str, ...] = flax.struct.field(pytree_node=False)
    dim: int = flax.struct.field(pytree_node=False)


def gather_chunks(x: jax.Array, axes: tuple[str, ...], dim: int) -> Chunks:
    """Sends every device's chunk `x` to all other devices.

    Communication:
      `N - 1` permutes of a chunk. With even `N > 2` two permutes of half a chunk replace the last
      permute, if the length of a chunk is even. Backward the permutes of `scatter_chunks`.
    """
    size = jax.lax.axis_size(axes)
    parts, ahead, behind = [x], x, x
    for _ in range((size - 1) // 2):
        ahead, behind = shift(ahead, axes, -1), shift(behind, axes, 1)
        parts += [ahead, behind]
    if size % 2 == 0:
        last = [shift(_split_last(ahead, axes, dim)[0], axes, -1)]
        last += [shift(half, axes, 1) for half in _split_last(behind, axes, dim)[1:]]
        parts.append(jnp.concatenate(last, dim))
    return Chunks(tuple(parts), axes, dim)


def scatter_chunks(x: Chunks) -> jax.Array:
    """Reduce-scatters chunks: returns this device's chunk, summed over all devices.

    `x` has a chunk for each device: this device's contribution to that device's sum.

    Communication:
      Forward: the permutes of `gather_chunks`, in reverse order. Backward: those permutes.
    """
    mine, *others = x.parts
    ahead: jax.Array | int = 0  # Partial sums, to send to the next device ahead.
    behind: jax.Array | int = 0  # Partial sums, to send to the next device behind.
    if len(x.parts) % 2 == 0:
        first, *second = _split_last(others.pop(), x.axes, x.dim)
        rest = mine.shape[x.dim] - first.shape[x.dim]
        ahead = _pad(shift(first, x.axes, 1), x.dim, (0, rest))
        for half in second:
            behind = _pad(shift(half, x.axes, -1), x.dim, (rest, 0))
    for index in reversed(range(0, len(others), 2)):
        ahead = shift(others[index] + ahead, x.axes, 1)
        behind = shift(others[index + 1] + behind, x.axes, -1)
    return mine + ahead + behind


def shift(
    x: jax.Array, axes: tuple[str, ...], by: int, *, scope: str = SEQUENCE_SCOPE
) -> jax.Array:
    """Sends `x` to the device that is `by` devices ahead, in the named scope `scope`.

    Communication:
      One permute: each device sends all of `x`.
    """
    # Over several axes `ppermute` counts devices in the order of the mesh, and `axis_index` in the
    # order of `axes`.
    ordered = [axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in axes]
    sizes = [jax.lax.axis_size(axis) for axis in ordered]
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    devices = devices.transpose([ordered.index(axis) for axis in axes]).ravel()
    pairs = zip(devices.tolist(), np.roll(devices, -by).tolist(), strict=True)
    with jax.named_scope(scope):
        return jax.lax.ppermute(x, tuple(ordered), list(pairs))


def _split_last(x: jax.Array, axes: tuple[str, ...], dim: int) -> list[jax.Array]:
    """Cuts the farthest chunk into one half for each direction, or keeps it in one part."""
    # On two devices both directions lead to the same device.
    is_halved = jax.lax.axis_size(axes) > 2 and x.shape[dim] % 2 == 0
    return jnp.split(x, 2, dim) if is_halved else [x]


def _pad(x: jax.Array, dim: int, widths: tuple[int, int]) -> jax.Array:
    return jnp.pad(x, [widths if i == dim else (0, 0) for i in range(x.ndim)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def cut(x: jax.Array, axes: tuple[str, ...], dim: int) -> tuple[jax.Array, ...]:
    """Cuts a whole sequence into chunks; `join_chunks` is its transpose."""
    length = x.shape[dim] // jax.lax.axis_size(axes)
    with jax.named_scope(SEQUENCE_SCOPE):
        return tuple(
            jax.lax.dynamic_slice_in_dim(x, place * length, length, dim) for place in _places(axes)
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def join_chunks(parts: tuple[jax.Array, ...], axes: tuple[str, ...], dim: int) -> jax.Array:
    """Joins chunks to the whole sequence; `cut` is its transpose."""
    shape = list(parts[0].shape)
    shape[dim] *= len(parts)
    with jax.named_scope(SEQUENCE_SCOPE):
        # Filling the array with zeros first would take as long as half a product.
        whole = jax.lax.empty(tuple(shape), parts[0].dtype)
        for place, part in zip(_places(axes), parts, strict=True):
            start = place * part.shape[dim]
            whole = jax.lax.dynamic_update_slice_in_dim(whole, part, start, dim)
        return whole


# Written by hand, because autodiff would make and add up an array of the full sequence per chunk.
cut.defvjp(
    lambda x, axes, dim: (cut(x, axes, dim), None),
    lambda axes, dim, _, gs: (join_chunks(gs, axes, dim),),
)
join_chunks.defvjp(
    lambda parts, axes, dim: (join_chunks(parts, axes, dim), None),
    lambda axes, dim, _, g: (cut(g, axes, dim),),
)


def _places(axes: tuple[str, ...]) -> list[jax.Array]:
    """Returns each chunk's place in the sequence, in the order in which the chunks arrive."""
    device, size = jax.lax.axis_index(axes), jax.lax.axis_size(axes)
    # Offsets that differ by `size` lead to the same device.
    offsets = [0, *(i // 2 if i % 2 == 0 else size - i // 2 for i in range(2, size + 1))]
    return [(device + offset) % size for offset in offsets]


def multiply_rows(
    x: jax.Array,
    kernel: jax.Array,
    contracted: int,
    dtype: DTypeLike | None = None,
    matmul: Matmul = "",
) -> jax.Array:
    """Multiplies an array with a kernel as one matrix product.

    Before the product, all dims of `x` that are not contracted are merged into one. So the gradient
    of the kernel is a sum over one dim. For a sum over several dims, XLA:CPU first writes
    transposed copies of both factors, which doubles the time of an MLP. The merging changes no bit
    of the results. Dims that may be sharded are not merged, because XLA would then gather them:
    dims after the first that are sharded by the type of `x`, and, except on CPUs, all dims if XLA
    chooses the sharding (mode `auto`).

    Args:
      x: `[..., D]`.
      kernel: `[D, F]`, or with more dims of either kind.
      contracted: How many dims to sum over: the last dims of `x` and the first dims of the kernel.
      dtype: The dtype of the product; by default the dtype of the factors.
      matmul: The format of the product, see `manualpar.layers.low_precision`.

    Returns:
      `[..., F]`.
    """
    num_batch = x.ndim - contracted
    is_automatic = bool(jax.sharding.get_abstract_mesh().auto_axes)
    has_parts = any(jax.typeof(x).sharding.spec[1:num_batch])
    if has_parts or (is_automatic and platform_traced_for() != "cpu"):
        return tensordot(x, kernel, contracted, matmul, dtype)
    y = tensordot(_rows(x, num_batch), kernel, contracted, matmul, dtype)
    return y.reshape(*x.shape[:num_batch], *y.shape[1:])


def _rows(x: jax.Array, num_dims: int) -> jax.Array:
    """Merges the first dims of an array into one."""
    return x.reshape(math.prod(x.shape[:num_dims]), *x.shape[num_dims:])


def multiply(
    parts: tuple[jax.Array, ...], kernel: jax.Array, contracted: int, matmul: Matmul = ""
) -> tuple[jax.Array, ...]:
    """Multiplies every chunk with a kernel, in the format `matmul`, see `low_precision`.

    Chunks and kernel have equal dtypes and varying axes.

    Gradient:
      Written by hand. The kernel's gradient is one product over the whole sequence, as if the
      sequence were not in chunks. Autodiff would add up one product for each chunk, and round each
      sum to the dtype.
    """
    with product_scope(matmul):
        return _multiply(parts, kernel, contracted, matmul)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _multiply(
    parts: tuple[jax.Array, ...], kernel: jax.Array, contracted: int, matmul: Matmul
) -> tuple[jax.Array, ...]:
    return tuple(multiply_rows(part, kernel, contracted, matmul=matmul) for part in parts)


def _multiply_forward(
    parts: tuple[jax.Array, ...], kernel: jax.Array, contracted: int, matmul: Matmul
) -> tuple[tuple[jax.Array, ...], Any]:
    return _multiply(parts, kernel, contracted, matmul), (parts, kernel)


def _multiply_backward(
    contracted: int, matmul: Matmul, residuals: Any, gs: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    parts, kernel = residuals
    num_batch = parts[0].ndim - contracted
    outputs = (*range(num_batch, gs[0].ndim),), (*range(contracted, kernel.ndim),)
    grads = tuple(gradient_tensordot(g, kernel, outputs, matmul) for g in gs)
    # The order of the rows does not matter if it is the same in both factors.
    x, g = (_rows(jnp.concatenate(chunks), num_batch) for chunks in (parts, gs))
    return grads, gradient_tensordot(x, g, ((0,), (0,)), matmul, side=1)


_multiply.defvjp(_multiply_forward, _multiply_backward)


# -------------------------------------------------------------------------------------------------


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
    x: jax.Array | Chunks, kernel: jax.Array, contracted: int = 1, matmul: Matmul = ""
) -> jax.Array | Chunks:
    """Multiplies a full sequence with this device's part of a column-parallel kernel.

    Args:
      x: The result of `enter_ring`: `Chunks`, or an array if no axis is bound.
      kernel: `[D, F/axis]`, or with more dims of either kind, such as `[D, N/axis, H]`.
      contracted: How many dims to sum over: the last dims of `x` and the first dims of the kernel.
      matmul: The format of the product: `"float8"` or `"int8"`, see `float8_dot_general`, or `""`.

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
        return multiply_rows(x, kernel, contracted, matmul=matmul)
    _check_product("gather_matmul", x.parts[0], x.dim, kernel, contracted)
    parts, kernel = _alike((x.parts, kernel))
    return dataclasses.replace(x, parts=multiply(parts, kernel, contracted, matmul))


def matmul_scatter(
    x: jax.Array | Chunks,
    kernel: jax.Array,
    axis: AxisName | None,
    sequence_dim: int,
    contracted: int = 1,
    matmul: Matmul = "",
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
      matmul: The format of the product, see `gather_matmul`.

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
        return multiply_rows(whole_sequence(x), kernel, contracted, matmul=matmul)
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
    parts = multiply(parts, kernel, contracted, matmul)
    return scatter_chunks(dataclasses.replace(x, parts=parts))


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
