"""Computes the product that a low-rank adapter adds to a layer's result.

A layer with a kernel `W` computes `x W`. With an adapter it computes `x W + (alpha / r) (x a) b`,
where `a` maps the input to `r` features and `b` maps these features to the output (Hu et al., LoRA,
https://arxiv.org/abs/2106.09685). The product `a b` is never computed, so no array of the size of
`W` is made. The gradient of `W`, which costs as much as the layer's forward pass, is not computed.

The layer's fields (`SplitDense.contracted`, `nn.DenseGeneral.axis`) determine the input dims of the
kernel. `a` has the input dims and then `r`; `b` has `r` and then the output dims. So `b` is sharded
in a column-parallel layer, and `a` in a row-parallel layer, each along the dim along which the
kernel is sharded.

The kernel that expands the latents of attention multiplies latents or queries, see
`manualpar.models.latent_attention`. So the product `a b` is added to this kernel itself.

Invariants: an adapter computes in the dtype of its layer. A layer that cannot have an adapter is
refused, and the message gives the reason.

Symbols: `r` the rank of an adapter.
"""

from typing import Any

import flax.linen as nn
import jax
from flax.linen.dtypes import promote_dtype

from manualpar.core.mesh.axes import axis_tuple
from manualpar.layers import SplitDense, leave
from manualpar.layers.ring import gather_matmul, matmul_scatter
from manualpar.models.latent_attention import Compress, Expand

ADAPTED_LAYERS = "SplitDense, nn.Dense, nn.DenseGeneral or nn.Einsum"


def input_dims(module: nn.Module) -> int:
    """Counts the input dims of a layer's kernel, which are the kernel's first dims.

    Raises:
      ValueError: The layer cannot have an adapter. The message is the end of a sentence; the caller
        adds the layer's path at its beginning.
    """
    kind = _kind_of(module)
    if kind is SplitDense:
        return int(module.contracted)
    if kind in (nn.Dense, Compress, Expand):
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
      x: The layer's input; for a column-parallel layer the result of `enter` or `enter_ring`; not
        used for `Expand`, which has none.
      y: The layer's result.
      a: `[..., r]`; the first dims are the kernel's input dims, or this device's shard of them.
      b: `[r, ...]`; the last dims are the kernel's output dims, or this device's shard of them.
      scale: The factor by which the product is multiplied, `alpha / r`.

    Returns:
      The sum: an array, or `Chunks` if `y` is `Chunks`.

    Communication:
      None if the layer is column-parallel. In a row-parallel layer, `leave` or `matmul_scatter` of
      the product `x a`, which has only `r` features.
    """
    kind, inputs = _kind_of(module), a.ndim - 1
    if kind is Expand:
        x = ()
    parts, structure = jax.tree.flatten(x)
    dtype = module.config.dtype if kind in (Compress, Expand) else module.dtype
    *parts, a, b = promote_dtype(*parts, a, b, dtype=dtype)
    x = jax.tree.unflatten(structure, parts)
    if kind is SplitDense:
        low = _split_product(module, x, a, y)
    elif kind is Expand:
        low = a
    elif kind is nn.Einsum:
        terms = _einsum_terms(module)
        dims = [terms[0].index(name) - len(terms[0]) for name in terms[1][:inputs]]
        low = _contract(x, a, dims)
    else:
        axis = _tuple(module.axis) if kind is nn.DenseGeneral else (-1,)
        low = _contract(x, a, axis)
    return jax.tree.map(lambda y, more: y + scale * more.astype(y.dtype), y, gather_matmul(low, b))


def _split_product(module: Any, x: Any, a: jax.Array, y: Any) -> Any:
    """Computes `x a` for a `SplitDense`; sums it over devices if the layer is row-parallel."""
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
    """Returns the supported class whose `__call__` the module uses; `None` for other modules."""
    kinds = (SplitDense, nn.Dense, nn.DenseGeneral, nn.Einsum, Compress, Expand)
    return next((kind for kind in kinds if type(module).__call__ is kind.__call__), None)


def _einsum_terms(module: Any) -> tuple[str, str, str]:
    """Parses the string of an `nn.Einsum`: the dim names of the input, the kernel and the result.

    Raises:
      ValueError: The string does not name all dims of the kernel, or names a dim twice.
    """
    text = "".join((module.einsum_str or "").split())
    operands, arrow, y = text.partition("->")
    x, comma, kernel = operands.partition(",")
    if not (arrow and comma) or "." in kernel or len(set(kernel)) < len(kernel):
        raise ValueError(f"computes {module.einsum_str!r}, expected 'x,kernel->y' with all names")
    return x.replace("...", ""), kernel, y.replace("...", "")


def _tuple(axis: Any) -> tuple[int, ...]:
    return tuple(axis) if isinstance(axis, tuple | list) else (axis,)
