"""Products in float8 and int8, with scales that are computed anew for each product.

A quantized product takes codes of both factors, and multiplies the result by their scales. The
scales are those of the numbers at hand (*current scaling*), so there is no state and no collective.

- `"float8"`: e4m3 codes of the factors and e5m2 codes of gradients (Micikevicius et al.,
  https://arxiv.org/abs/2209.05433), with one scale for a factor, or one for each expert. The scale
  is a power of two. Such a scale changes no digit of a code, unless a number is 2^15 times smaller
  than the largest. So it hardly matters which devices' numbers have chosen the scale.
- `"int8"`: 8-bit integers, with a scale for each sum: one for each row of the first factor, and one
  for each column of the second. A device computes a kernel's gradient with the scales of its own
  examples, so its rounding depends on the mesh, as the rounding of any sum does, but coarser.

The gradient's two products are quantized like the product itself. Sums are in float32 or int32,
and results in the dtype of the factors, as for any product.
"""

import contextlib
import functools
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.tracing.scopes import FLOAT8_SCOPE, QUANTIZED_SCOPE
from manualpar.quantization.quantized_collectives import (
    FLOAT8,
    encode_float8,
    float8_scale,
    in_float32,
)

# The formats of quantized products; `""` for products in the dtype of their factors.
Matmul = Literal["", "float8", "int8"]
MATMULS: tuple[Matmul, ...] = get_args(Matmul)
GRADIENT8 = jnp.dtype(jnp.float8_e5m2)
LARGEST_INT8 = 127
# The kinds of devices that have units for int8 and none for float8.
WITHOUT_FLOAT8 = re.compile(r"\b(A100|A10G?|A30|A40|A2|T4|V100)\b|TPU v[2-6]")

# Dims of a product as in `jax.lax.dot_general`: contracted dims and batch dims of both factors.
Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


class Codes(NamedTuple):
    """A quantized factor of a product: codes, and scales whose dims of size 1 share a scale."""

    codes: jax.Array
    scale: jax.Array


def float8_dot_general(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, *args: Any, **kwargs: Any
) -> jax.Array:
    """Multiplies in float8, in place of `jax.lax.dot_general`.

    It is the `dot_general` of a layer: `nn.Dense(features, dot_general=float8_dot_general)`, and of
    `nn.DenseGeneral`, `nnx.Linear` and `nnx.LinearGeneral` likewise.

    Args:
      lhs: The first factor, floating-point.
      rhs: The second factor.
      dimension_numbers: As in `jax.lax.dot_general`; there is a scale for each index of batch dims.
      *args: The precision, which is not used.
      **kwargs: `preferred_element_type` is the dtype of the result, by default that of the factors.
        `precision` is not used. `out_sharding` must be `None`.

    Returns:
      The product, in the shape that `jax.lax.dot_general` returns.

    Raises:
      TypeError: A factor is not floating-point.
      ValueError: `out_sharding` is given.

    Communication:
      None.

    Gradient:
      Two products in float8, in which gradients have e5m2 codes.
    """
    return dot_general("float8", lhs, rhs, dimension_numbers, *args, **kwargs)


def int8_dot_general(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, *args: Any, **kwargs: Any
) -> jax.Array:
    """Multiplies in int8, in place of `jax.lax.dot_general`; see `float8_dot_general`.

    There is a scale for each row of the first factor and for each column of the second.

    Args:
      lhs: The first factor, floating-point.
      rhs: The second factor.
      dimension_numbers: As in `jax.lax.dot_general`.
      *args: The precision, which is not used.
      **kwargs: As in `float8_dot_general`.

    Returns:
      The product, in the shape that `jax.lax.dot_general` returns.

    Raises:
      TypeError: A factor is not floating-point.
      ValueError: `out_sharding` is given.

    Communication:
      None.

    Gradient:
      Two products in int8, each with scales of its own.
    """
    return dot_general("int8", lhs, rhs, dimension_numbers, *args, **kwargs)


def dot_general(
    matmul: Matmul,
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Any = None,
) -> jax.Array:
    """Multiplies in the format `matmul`, see `float8_dot_general`."""
    if out_sharding is not None:
        raise ValueError(
            f"{matmul}_dot_general: out_sharding is {out_sharding!r}, expected None: a quantized "
            "product has the sharding that XLA finds, or in mode='manual' none."
        )
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = device.device_kind if device is not None else ""
    if matmul == "float8" and WITHOUT_FLOAT8.search(kind):
        raise ValueError(
            f"float8_dot_general: the mesh is of {kind!r}, which computes float8 in a wider dtype, "
            "so nothing would be gained; expected GPUs such as H100 or TPUs from v7 on. These "
            "devices multiply int8: use int8_dot_general, or config.model.matmul='int8'."
        )
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"{matmul}_dot_general: {name} has the dtype {x.dtype}, expected a floating-point "
                "dtype, because the product quantizes both factors itself."
            )
    (contracted, batch) = dimension_numbers
    dims: Any = tuple(tuple(tuple(map(int, each)) for each in pair) for pair in (contracted, batch))
    dtype = jnp.result_type(lhs, rhs)
    axes = varying_axes((lhs, rhs))
    lhs, rhs = (cast_to_varying(x.astype(dtype), axes) for x in (lhs, rhs))
    with product_scope(matmul, has_stacks=bool(batch[0])):
        y = _product(lhs, rhs, dims, matmul)
    return y.astype(preferred_element_type or dtype)


def product_scope(
    matmul: Matmul, *, has_stacks: bool = False
) -> contextlib.AbstractContextManager[Any]:
    """Returns the named scope around a product, or around a stack of products."""
    if not matmul:
        return contextlib.nullcontext()
    has_one_scale = matmul == "float8" and not has_stacks
    return jax.named_scope(FLOAT8_SCOPE if has_one_scale else QUANTIZED_SCOPE)


def tensordot(
    x: jax.Array, y: jax.Array, contracted: int, matmul: Matmul, dtype: DTypeLike | None = None
) -> jax.Array:
    """Multiplies as `jnp.tensordot(x, y, contracted)` does, in the format `matmul`.

    `dtype` is the dtype of the result, by default that of the factors.
    """
    if not matmul:
        return jnp.tensordot(x, y, contracted, preferred_element_type=dtype)
    dims = tuple(range(x.ndim - contracted, x.ndim)), tuple(range(contracted))
    return dot_general(matmul, x, y, (dims, ((), ())), preferred_element_type=dtype)


def multiply_stacks(x: jax.Array, y: jax.Array, matmul: Matmul) -> jax.Array:
    """Multiplies `[E, T, D]` by `[E, D, F]`, each of `E` pairs with scales of its own."""
    if not matmul:
        return jnp.matmul(x, y)
    return dot_general(matmul, x, y, (((2,), (1,)), ((0,), (0,))))


def gradient_tensordot(
    x: jax.Array, y: jax.Array, contracted: Any, matmul: Matmul, *, side: int = 0
) -> jax.Array:
    """Multiplies as `jnp.tensordot` does, in a backward pass that is written by hand.

    Both factors have one dtype. The factor with the index `side` is the gradient.
    """
    if not matmul:
        return jnp.tensordot(x, y, contracted)
    dims: Any = (tuple(map(tuple, contracted)), ((), ()))
    formats = (GRADIENT8, FLOAT8) if side == 0 else (FLOAT8, GRADIENT8)
    factors = [_quantize(z, dims, i, matmul, formats[i]) for i, z in enumerate((x, y))]
    return _multiply(factors[0], factors[1], dims, x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x: jax.Array, y: jax.Array, dims: Dims, matmul: Matmul) -> jax.Array:
    return _forward(x, y, dims, matmul)[0]


def _forward(
    x: jax.Array, y: jax.Array, dims: Dims, matmul: Matmul
) -> tuple[jax.Array, tuple[Any, Any]]:
    quantized = [_quantize(z, dims, side, matmul, FLOAT8) for side, z in enumerate((x, y))]
    out = _multiply(quantized[0], quantized[1], dims, x.dtype)
    # The codes in float8 serve the gradients too; those in int8 do not, see `_backward`.
    return out, (quantized[0], quantized[1]) if matmul == "float8" else (x, y)


def _backward(
    dims: Dims, matmul: Matmul, residuals: tuple[Any, Any], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    ndims = [jax.tree.leaves(z)[0].ndim for z in residuals]
    grads, codes = [], None
    for side, other in enumerate(reversed(residuals)):
        product, order = _gradient_dims(dims, side, ndims[side], ndims[1 - side])
        # Both products take the same codes in float8. Those in int8 have scales for other sums.
        if codes is None or matmul == "int8":
            codes = _quantize(g, product, 0, matmul, GRADIENT8)
        factor = other if isinstance(other, Codes) else _quantize(other, product, 1, matmul, FLOAT8)
        grads.append(jnp.transpose(_multiply(codes, factor, product, g.dtype), order))
    return grads[0], grads[1]


_product.defvjp(_forward, _backward)


def _gradient_dims(dims: Dims, side: int, ndim: int, other_ndim: int) -> tuple[Dims, Sequence[int]]:
    """Returns the dims of a gradient's product with the other factor, and the order of its result.

    `dims` are those of the forward product. The gradient is of the factor with the index `side`,
    which has `ndim` dims.
    """
    (contracted, batch) = dims
    free = _free(ndim, contracted[side], batch[side])
    other_free = _free(other_ndim, contracted[1 - side], batch[1 - side])
    num_batch = len(batch[0])
    # The result of the product has batch dims, the free dims of the first, those of the second.
    start = num_batch + (len(free) if side == 0 else 0)
    of_result = tuple(range(start, start + len(other_free)))
    product: Dims = ((of_result, other_free), (tuple(range(num_batch)), batch[1 - side]))
    # This product's result has batch dims, free dims, and the contracted dims as `other` has them.
    pairs = sorted(zip(contracted[1 - side], contracted[side], strict=True))
    places = (*batch[side], *free, *(mine for _, mine in pairs))
    return product, sorted(range(len(places)), key=places.__getitem__)


def _free(ndim: int, contracted: tuple[int, ...], batch: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dim for dim in range(ndim) if dim not in (*contracted, *batch))


def _quantize(x: jax.Array, dims: Dims, side: int, matmul: Matmul, float8: Any) -> Codes:
    """Quantizes a factor of a product: with a scale for each batch index, or for each sum."""
    (contracted, batch) = dims
    if matmul == "float8":
        over = tuple(dim for dim in range(x.ndim) if dim not in batch[side])
        largest = in_float32(jnp.max(jnp.abs(x), over, keepdims=True, initial=0))
        scale = float8_scale(largest, float8)
        return Codes(encode_float8(x, scale, float8), scale)
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), contracted[side], keepdims=True, initial=0)
    scale = jnp.where(largest == 0, 1, largest / LARGEST_INT8)
    return Codes(jnp.round(wide / scale).astype(jnp.int8), scale)


def _multiply(x: Codes, y: Codes, dims: Dims, dtype: Any) -> jax.Array:
    """Multiplies codes, and the result by the scales."""
    is_integer = x.codes.dtype == jnp.int8
    # The result of e4m3 codes is at most 2^18 times the contracted size: too much for float16.
    sums = jnp.int32 if is_integer else jnp.promote_types(dtype, jnp.bfloat16)
    out = jax.lax.dot_general(x.codes, y.codes, dims, preferred_element_type=sums)
    scale = _of_result(x.scale, dims, 0, out.ndim) * _of_result(y.scale, dims, 1, out.ndim)
    if not is_integer:
        return (out * scale.astype(out.dtype)).astype(dtype)
    return (out.astype(jnp.float32) * scale).astype(dtype)


def _of_result(scale: jax.Array, dims: Dims, side: int, ndim: int) -> jax.Array:
    """Returns a factor's scales in dims that broadcast against the result of the product."""
    (contracted, batch) = dims
    free = _free(scale.ndim, contracted[side], batch[side])
    sizes = [scale.shape[dim] for dim in free]
    batch_sizes = [scale.shape[dim] for dim in batch[side]]
    scale = jnp.transpose(scale, (*batch[side], *free, *contracted[side]))
    others = [1] * (ndim - len(batch_sizes) - len(sizes))
    return scale.reshape(*batch_sizes, *(sizes + others if side == 0 else others + sizes))
