"""The products that adapters of low rank add to a layer's result.

A layer with a kernel `W` computes `x W`. With an adapter it computes `x W + (alpha / r) (x a) b`,
where `a` maps the input to `r` features and `b` maps these features to the output (Hu et al., LoRA,
https://arxiv.org/abs/2106.09685). Activations are added, not weights. So no array of the size of
`W` is made. The gradient of `W`, which costs as much as the layer's forward pass, is not computed.

The layer's fields (`SplitDense.contracted`, `nn.DenseGeneral.axis`) choose the input dims of the
kernel. `a` has the input dims and then `r`; `b` has `r` and then the output dims. So mesh axes
split `b` in a column-parallel layer, and `a` in a row-parallel layer. The split dim is the kernel's
split dim.

Invariants: an adapter computes in the dtype of its layer. A layer that cannot be adapted is
refused, and the message says why.

Symbols: `r` the rank of an adapter.
"""

from typing import Any

import flax.linen as nn
import jax
from flax.linen.dtypes import promote_dtype

from manualpar.core.mesh.axes import axis_tuple
from manualpar.layers import SplitDense, leave
from manualpar.layers.ring import gather_matmul, matmul_scatter

ADAPTED_LAYERS = "SplitDense, nn.Dense, nn.DenseGeneral or nn.Einsum"


def input_dims(module: nn.Module) -> int:
    """Counts the input dims of a layer's kernel. These are the kernel's first dims.

    Raises:
      ValueError: The layer cannot be adapted. The caller names the layer before the message.
    """
    kind = _kind_of(module)
    if kind is SplitDense:
        return int(module.contracted)
    if kind is nn.Dense:
        return 1
    if kind is nn.DenseGeneral:
        if module.batch_dims:
            raise ValueError(f"has batch_dims={module.batch_dims}, expected none")
        return len(_tuple(module.axis))
    if kind is nn.Einsum:
        x, kernel, y = _einsum_terms(module)
        inputs = [name for name in kernel if name in x]
        if set(inputs) & set(y) or "".join(inputs) != kernel[: len(inputs)]:
            raise ValueError(
                f"computes {module.einsum_str!r}, expected that the dims which the kernel shares "
                "with the input are its first dims, and are summed over"
            )
        rest = "".join(name for name in x if name not in inputs)
        if not inputs or y != rest + kernel[len(inputs) :]:
            raise ValueError(
                f"computes {module.einsum_str!r}, expected a result with the other dims of the "
                "input and then those of the kernel, in their order"
            )
        return len(inputs)
    raise ValueError(f"is a {type(module).__name__}, expected one of {ADAPTED_LAYERS}")


def add_low_rank(
    module: nn.Module, x: Any, y: Any, a: jax.Array, b: jax.Array, scale: float
) -> Any:
    """Adds the product of a layer's adapter to the layer's result `y`.

    Args:
      module: The layer.
      x: The layer's input; for a column-parallel layer the result of `enter` or `enter_ring`.
      y: The layer's result.
      a: `[..., r]`; the first dims are the kernel's inputs, or this device's part of the inputs.
      b: `[r, ...]`; the last dims are the kernel's outputs, or this device's part of the outputs.
      scale: The factor of the product.

    Returns:
      The sum: an array, or `Chunks` if `y` is `Chunks`.

    Communication:
      None if the layer is column-parallel. If it is row-parallel, `leave` or `matmul_scatter` of
      the product with `a`, which has only `r` features.
    """
    kind, inputs = _kind_of(module), a.ndim - 1
    parts, structure = jax.tree.flatten(x)
    *parts, a, b = promote_dtype(*parts, a, b, dtype=module.dtype)
    x = jax.tree.unflatten(structure, parts)
    if kind is SplitDense:
        low = _split_product(module, x, a, y)
    elif kind is nn.Einsum:
        terms = _einsum_terms(module)
        dims = [terms[0].index(name) - len(terms[0]) for name in terms[1][:inputs]]
        low = _contract(x, a, dims)
    else:
        axis = _tuple(module.axis) if kind is nn.DenseGeneral else (-1,)
        low = _contract(x, a, axis)
    return jax.tree.map(lambda y, more: y + scale * more.astype(y.dtype), y, gather_matmul(low, b))


def _split_product(module: Any, x: Any, a: jax.Array, y: Any) -> Any:
    """Multiplies by `a`; sums the result over devices if the layer sums its own product."""
    axes = tuple(axis for name in module.names[: module.contracted] for axis in axis_tuple(name))
    if not axes:
        return gather_matmul(x, a, module.contracted)
    dim = module.sequence_dim
    dim = None if dim is None else dim % y.ndim
    if module.overlap == "ring" and dim is not None:
        return matmul_scatter(x, a, axes, dim, module.contracted)
    return leave(_contract(x, a, range(-module.contracted, 0)), axes, dim)


def _contract(x: jax.Array, a: jax.Array, dims: Any) -> jax.Array:
    """Contracts `dims` of `x` with the first dims of `a`; the other dims of `x` come first."""
    own = tuple(dim % x.ndim for dim in dims)
    return jax.lax.dot_general(x, a, ((own, tuple(range(len(own)))), ((), ())))


def _kind_of(module: nn.Module) -> type[nn.Module] | None:
    """Returns the supported class whose `__call__` the module has; `None` for other modules."""
    kinds = (SplitDense, nn.Dense, nn.DenseGeneral, nn.Einsum)
    return next((kind for kind in kinds if type(module).__call__ is kind.__call__), None)


def _einsum_terms(module: Any) -> tuple[str, str, str]:
    """Splits an einsum into the dim names of the input, the kernel and the result.

    Raises:
      ValueError: The einsum has dims without names.
    """
    text = "".join((module.einsum_str or "").split())
    operands, arrow, y = text.partition("->")
    x, comma, kernel = operands.partition(",")
    if not (arrow and comma) or "." in kernel or len(set(kernel)) < len(kernel):
        raise ValueError(f"computes {module.einsum_str!r}, expected 'x,kernel->y' with all names")
    return x.replace("...", ""), kernel, y.replace("...", "")


def _tuple(axis: Any) -> tuple[int, ...]:
    return tuple(axis) if isinstance(axis, tuple | list) else (axis,)
