"""`enter` and `leave`: the collectives before and after a layer's products with split kernels.

Column-parallel products need the full input on every device along the model axis. After
row-parallel products each device has one term of a sum. Megatron-LM (Shoeybi et al.,
https://arxiv.org/abs/1909.08053) calls the two functions f and g. `enter` is f: it sends nothing
forward, and all-reduces the gradient backward. `leave` is g: it all-reduces the terms forward, and
sends nothing backward.

With `sequence_dim` the activations from a `leave` to the next `enter` are split along the sequence
(Korthikanti et al., https://arxiv.org/abs/2205.05198). An all-gather and a reduce-scatter replace
each all-reduce and send the same bytes. Each device stores only its positions of the activations
between layers.

With `float8` these all-gathers send codes of 8 bits, with the scale of the gathered array. Products
in float8 find the same codes again (see `manualpar.layers.low_precision`), so no bit of them
changes; anything else would compute with rounded numbers, and building a program refuses that.
Reduce-scatters send what they sent, because rounding changes a sum.

Under `check_vma=True` the types say which arrays differ along the axis. So JAX refuses most
mistakes, such as a forgotten sum. `enter` and `leave` refuse those mistakes that would compile.

Symbols: `N` devices along the axis.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from manualpar.core.mesh.axes import AxisName, axis_tuple, is_axis_bound
from manualpar.core.parameters.collectives import cast_to_varying, is_vma_checked, varying_axes
from manualpar.core.tracing.scopes import CODES_SCOPE, SEQUENCE_SCOPE, TENSOR_SCOPE
from manualpar.layers.low_precision import GRADIENT8
from manualpar.quantization.quantized_collectives import (
    FLOAT8,
    Float8Gather,
    encode_float8,
    float8_scale,
)


def enter(
    x: jax.Array,
    axis: AxisName | None,
    sequence_dim: int | None = None,
    *,
    scope: str = TENSOR_SCOPE,
    float8: bool = False,
) -> jax.Array:
    """Makes the input of column-parallel products: on every device, the activations in full.

    Call it once for all products of the same input (query, key and value), because each call adds
    a collective.

    Args:
      x: The input, the same on all devices along `axis`; with `sequence_dim` this device's part of
        the input, `[..., S/axis, ...]`.
      axis: The mesh axis, or tuple of axes, that the products are split over. Axes that no
        `shard_map` binds are left out. If no axis is bound, nothing is split.
      sequence_dim: The dimension along which `x` is split between layers; `None` if `x` is not
        split.
      scope: The named scope of the all-reduce; ledgers and profiles show it as the purpose.
      float8: Whether the all-gather sends float8 codes. Then only products in float8 may read the
        result, and they must compute in the dtype of `x`.

    Returns:
      The full input, typed as varying over `axis`.

    Raises:
      ValueError: `x` already varies over `axis`, so a sum is missing; or there is a `sequence_dim`
        and `x` does not vary, so it is not split; or types are not checked.

    Communication:
      Forward none, backward one all-reduce of the gradient: a device sends `2 (N - 1) / N` of the
      gradient's bytes. With `sequence_dim` an all-gather forward and a reduce-scatter backward: in
      each a device sends `(N - 1) / N` of the bytes of the full input. With `float8` the all-gather
      sends a byte for each number, after an all-reduce of the largest magnitude.
    """
    axes = bound_axes("enter", axis)
    if not axes:
        return x
    if sequence_dim is None:
        _check(
            "enter",
            x,
            axes,
            not varying_axes(x) & set(axes),
            f"varies over {axes} by its type, expected the same on all devices along it. Apply "
            "leave to the result of a row-parallel product, which is not summed yet; and enter an "
            "input once",
        )
        with jax.named_scope(scope):
            return jax.lax.pcast(x, axes, to="varying")
    _check(
        "enter",
        x,
        axes,
        set(axes) <= varying_axes(x),
        f"is the same on all devices along {axes} by its type, expected a part of a sequence that "
        f"is split along dim {sequence_dim}. Leave sequence_dim out, or have leave scatter it",
    )
    if float8:
        return _enter_float8(cast_to_varying(x, axes), axes, sequence_dim % x.ndim)
    with jax.named_scope(SEQUENCE_SCOPE):
        return jax.lax.all_gather(x, axes, axis=sequence_dim, tiled=True)


def leave(
    x: jax.Array,
    axis: AxisName | None,
    sequence_dim: int | None = None,
    *,
    scope: str = TENSOR_SCOPE,
    float8: bool = False,
) -> jax.Array:
    """Sums the results of a row-parallel product over devices.

    Add a bias to the sum. If the bias is added to `x`, the sum contains it once for each device.

    Args:
      x: This device's term of the sum, in the shape of the result.
      axis: The mesh axis, or tuple of axes, that the product is split over, see `enter`.
      sequence_dim: The dimension along which the result is split between layers; `None` if it is
        not.
      scope: The named scope of the all-reduce; ledgers and profiles show it as the purpose.
      float8: Whether the all-gather of the gradient sends float8 codes, see `enter`. Then `x` must
        be the result of a product in float8.

    Returns:
      The sum, the same on all devices along `axis`; with `sequence_dim` this device's part of the
      sum, `[..., S/axis, ...]`.

    Raises:
      ValueError: `x` does not vary over `axis`: all devices have the same value, and the sum would
        be `N` times too large; or `N` does not divide the sequence; or types are not checked.

    Communication:
      Forward one all-reduce: a device sends `2 (N - 1) / N` of the bytes of `x`. Backward none.
      With `sequence_dim` a reduce-scatter forward and an all-gather backward: in each a device
      sends `(N - 1) / N` of the bytes of `x`; with `float8` the all-gather as in `enter`.
    """
    axes = bound_axes("leave", axis)
    if not axes:
        return x
    _check(
        "leave",
        x,
        axes,
        set(axes) <= varying_axes(x),
        f"is the same on all devices along {axes} by its type, expected what each device "
        "contributes to a sum: its product with a split parameter. The sum of equal values is as "
        "many times too large as there are devices",
    )
    if sequence_dim is None:
        with jax.named_scope(scope):
            return jax.lax.psum(x, axes)
    size = jax.lax.axis_size(axes)
    if x.shape[sequence_dim] % size:
        raise ValueError(
            f"leave: x of shape {x.shape} has {x.shape[sequence_dim]} entries along "
            f"sequence_dim={sequence_dim}, expected a multiple of the {size} devices along {axes}."
        )
    if float8:
        return _leave_float8(cast_to_varying(x, axes), axes, sequence_dim % x.ndim)
    return _scatter(x, axes, sequence_dim % x.ndim)


def _scatter(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    with jax.named_scope(SEQUENCE_SCOPE):
        return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def _gather_codes(x: jax.Array, axes: tuple[str, ...], dim: int, dtype: Any) -> jax.Array:
    """Gathers parts as codes in a float8 dtype; returns what they stand for."""
    with jax.named_scope(SEQUENCE_SCOPE):
        scale = float8_scale(jax.lax.pmax(Float8Gather().largest(x), axes), dtype)
        codes = encode_float8(x, scale, dtype)
        codes = jax.lax.all_gather(codes, axes, axis=dim, tiled=True)
        with jax.named_scope(CODES_SCOPE):
            return codes.astype(x.dtype) * scale.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _enter_float8(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    return _gather_codes(x, axes, dim, FLOAT8)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _leave_float8(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    return _scatter(x, axes, dim)


_enter_float8.defvjp(
    lambda x, axes, dim: (_enter_float8(x, axes, dim), None),
    lambda axes, dim, _, g: (_scatter(g, axes, dim),),
)
_leave_float8.defvjp(
    lambda x, axes, dim: (_leave_float8(x, axes, dim), None),
    lambda axes, dim, _, g: (_gather_codes(g, axes, dim, GRADIENT8),),
)


def bound_axes(function: str, axis: AxisName | None) -> tuple[str, ...]:
    """Returns the axes in `axis` that a `shard_map` binds; refuses one with `check_vma=False`."""
    axes = tuple(axis for axis in axis_tuple(axis or None) if is_axis_bound(axis))
    if axes and not is_vma_checked(axes[0]):
        raise ValueError(
            f"{function}: the surrounding jax.shard_map does not check types (check_vma=False), "
            f"expected check_vma=True: otherwise the gradients of sums over {axes} are wrong."
        )
    return axes


def has_lost_types(x: jax.Array, axes: tuple[str, ...]) -> bool:
    """Returns whether the type of `x` may lack its varying axes, because `nn.scan` dropped them.

    `nn.scan` traces its body twice, the first time without varying axes. Otherwise activations vary
    over the axes that split the batch. So the result is `True` if `x` varies over no axis, although
    the mesh has manual axes other than `axes`.
    """
    return not varying_axes(x) and set(jax.sharding.get_abstract_mesh().manual_axes) > set(axes)


def platform_traced_for() -> str | None:
    """Returns the platform for which the code is traced, such as `"tpu"`.

    It is the platform of the enclosing mesh's devices, because a program for TPUs may be traced on
    a host without a TPU. Without a mesh it is JAX's default backend. It is `None` if the mesh is
    abstract and names no device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.default_backend()
    return mesh.abstract_device.platform if mesh.abstract_device else None


def has_tpu_kernels() -> bool:
    """Returns whether the code is traced for TPUs and may contain their kernels.

    A plan without a compiler knows the kind of a TPU, and not its cores
    (`manualpar.planner.hardware.Chip`). It reads attention in blocks of plain JAX.
    """
    mesh = jax.sharding.get_abstract_mesh()
    is_planned = not mesh.empty and getattr(mesh.abstract_device, "num_cores", None) is None
    return platform_traced_for() == "tpu" and not is_planned


def _check(function: str, x: jax.Array, axes: tuple[str, ...], fits: bool, why: str) -> None:
    if not fits and not has_lost_types(x, axes):
        raise ValueError(f"{function}: x of shape {x.shape} {why}.")


# -------------------------------------------------------------------------------------------------
# The mean of squares over the features of all heads, which devices share.


def mean_square_of_heads(x_BSNH: jax.Array, axis: str | None) -> jax.Array:
    """Returns the mean of squares over the last two dims of all devices, `[B, S, 1, 1]`.

    Devices along `axis` that share a key head all have it, and equally many of them. So the mean of
    the devices' means is the mean of all heads.

    Communication:
      An all-reduce of the means over `axis`, and another in the backward pass.
    """
    mean = jnp.mean(jnp.square(x_BSNH), axis=(-2, -1), keepdims=True)
    if axes := bound_axes("WideNorm", axis):
        with jax.named_scope(TENSOR_SCOPE):
            mean = jax.lax.pmean(mean, axes)
    return mean
