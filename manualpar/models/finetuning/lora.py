"""Low-rank adapters for a frozen model (LoRA).

```python
model = manualpar.lora(model, {"*/attention/query": 8, "*/attention/value": 8}, alpha=16)
program = manualpar.fsdp(model, tx, loss_fn, mesh=mesh, batch=batch)
state = program.init_from(pretrained, rng, missing="init")
```

Each chosen layer gets two more parameters, `lora_a` and `lora_b`, see `low_rank`. Parameters that
are no layer's kernel, such as an embedding, get adapters too, see `adapted_parameter`. By default
adapters are trained and all other parameters are frozen; `trainable=` of the program's builder can
change this. An interceptor of Linen's method calls (`nn.intercept_methods`) makes the adapters when
the model is initialized, and adds their products when the model is applied. So the model's code
need not change, and loops over layers stack adapters in the same way as kernels. With
`magnitudes=True` a layer gets a third parameter, see `add_low_rank`.

Invariants: all other parameters have the same paths and the same initial bits as without adapters.
Initially an adapter's product is zero, so the model's results are the same as without adapters.
"""

import contextlib
import dataclasses
import difflib
import fnmatch
import functools
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.scope import LazyRng
from flax.linen.dtypes import promote_dtype
from flax.traverse_util import flatten_dict, unflatten_dict

from manualpar.core.mesh.axes import axis_tuple, is_axis_bound
from manualpar.core.mesh.splitting import fold_rng_over_axis
from manualpar.core.model.interface import ModelInterface, interface_of, register_interface
from manualpar.core.model.linen_model import LinenModel
from manualpar.core.parameters.collectives import varying_axes
from manualpar.core.parameters.placement import Declared, MatrixDims
from manualpar.core.parameters.sharded_parameter import ArrayBox, is_box
from manualpar.layers import SplitDense, TensorParallel, leave
from manualpar.layers.ring import gather_matmul, matmul_scatter
from manualpar.models.finetuning.quantized import (
    CODES,
    SCALES,
    EncodedParameter,
    QuantizedModel,
    WrappingInterface,
    decode,
    plain_shape,
)
from manualpar.models.transformer_layer import Compress, Expand

# -------------------------------------------------------------------------------------------------
# Computes the product that a low-rank adapter adds to a layer's result.
#
# A layer with a kernel `W` computes `x W`. With an adapter it computes `x W + (alpha / r) (x a)
# b`, where `a` maps the input to `r` features and `b` maps these features to the output (Hu et
# al., LoRA, https://arxiv.org/abs/2106.09685). The product `a b` is never computed, so no array of
# the size of `W` is made. The gradient of `W`, which costs as much as the layer's forward pass, is
# not computed.
#
# The layer's fields (`SplitDense.contracted`, `nn.DenseGeneral.axis`) determine the input dims of
# the kernel. `a` has the input dims and then `r`; `b` has `r` and then the output dims. So `b` is
# sharded in a column-parallel layer, and `a` in a row-parallel layer, each along the dim along
# which the kernel is sharded.
#
# The kernel that expands the latents of attention multiplies latents or queries, see
# `manualpar.models.transformer_layer`. So the product `a b` is added to this kernel itself.
#
# In training a share of the entries of `x` may be dropped before `a`. Features that are split over
# devices are dropped independently; devices with the same features drop the same entries.
#
# DoRA (Liu et al., https://arxiv.org/abs/2402.09353) scales the columns of `W + (alpha / r) a b` to
# trained lengths `m`. As in the library peft, the `length` that a column has before is a constant
# for the gradient, and the layer computes `x W + (m / length - 1) x W + (m / length) (alpha / r) (x
# a) b`, where entries of `x` are dropped in the second and the third product. The lengths need the
# sum `W + (alpha / r) a b` in each forward pass, but not its gradient.
#
# Invariants: an adapter computes in the dtype of its layer, and lengths in float32. A layer that
# cannot have an adapter is refused, and the message gives the reason.
#
# Symbols: `r` the rank of an adapter.


ADAPTED_LAYERS = "SplitDense, nn.Dense, nn.DenseGeneral or nn.Einsum"


def input_dims(module: nn.Module) -> int:
    """Counts the input dims of a layer's kernel, which are the kernel's first dims.

    If the layer cannot have an adapter, the error's message is the end of a sentence; the caller
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


class Magnitude(NamedTuple):
    """What a layer with magnitudes (DoRA) needs besides its adapter.

    Attributes:
      value: The trained lengths, of the shape of the kernel's output dims.
      kernel: The kernel, or this device's shard of it.
      bias: The bias that is in the layer's result; `None` if there is none.
      axes: The mesh axes that split the kernel's input dims.
    """

    value: jax.Array
    kernel: jax.Array
    bias: jax.Array | None
    axes: tuple[str, ...]


def add_low_rank(
    module: nn.Module,
    x: Any,
    y: Any,
    a: jax.Array,
    b: jax.Array,
    scale: float,
    *,
    dropped: Any = None,
    magnitude: Magnitude | None = None,
) -> Any:
    """Adds the product of a layer's adapter to the layer's result `y`.

    Args:
      x: The layer's input; for a column-parallel layer the result of `enter` or `enter_ring`; not
        used for `Expand`, which has none.
      a: `[..., r]`; the first dims are the kernel's input dims, or this device's shard of them.
      b: `[r, ...]`; the last dims are the kernel's output dims, or this device's shard of them.
      scale: The factor by which the product is multiplied, `alpha / r`.
      dropped: The input in which entries have been dropped; `None` if none have been.
      magnitude: The lengths of the columns, for DoRA.

    Returns:
      The sum: an array, or `Chunks` if `y` is `Chunks`.

    Communication:
      None if the layer is column-parallel. In a row-parallel layer, `leave` or `matmul_scatter` of
      the product `x a`, which has only `r` features; with a magnitude also `leave` of the squared
      lengths, and with dropped entries that of a second product with the kernel.
    """
    kind = _kind_of(module)
    given = () if kind is Expand else x if dropped is None else dropped
    dtype: Any = module.config.dtype if kind in (Compress, Expand) else module.dtype
    dtype = promote_dtype(*jax.tree.leaves(given), a, b, dtype=dtype)[0].dtype

    def cast(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype), tree)

    low = gather_matmul(_product(module, cast(given), cast(a), y), cast(b))
    if magnitude is None:
        return jax.tree.map(lambda y, more: y + scale * more.astype(y.dtype), y, low)
    kernel, wide = magnitude.kernel, jnp.float32
    constants = [jax.lax.stop_gradient(x) for x in (kernel, a, b)]
    length = lengths(constants[0], constants[1], constants[2], scale, axes=magnitude.axes)
    ratio = _like_last(magnitude.value.astype(wide) / length, jax.tree.leaves(y)[0])
    if dropped is not None:
        base = _product(module, cast(dropped), cast(kernel), y)
    elif (bias := magnitude.bias) is None:
        base = y
    else:
        base = jax.tree.map(lambda y: y - _like_last(bias, y).astype(y.dtype), y)

    def combine(y: jax.Array, base: jax.Array, low: jax.Array) -> jax.Array:
        more = (ratio - 1) * base.astype(wide) + ratio * scale * low.astype(wide)
        return y + more.astype(y.dtype)

    return jax.tree.map(combine, y, base, low)


def lengths(
    kernel: jax.Array,
    a: jax.Array,
    b: jax.Array,
    scale: float,
    *,
    axes: tuple[str, ...] = (),
    loops: int = 0,
) -> jax.Array:
    """Returns the lengths of the columns of `kernel + scale * a b`, in float32; 1 in place of 0.

    The first `loops` dims of the three arrays are those along which loops stack layers.

    Communication:
      `leave` of the squared lengths over `axes`, the mesh axes that split the kernel's input dims.
    """
    total = kernel.astype(jnp.float32) + scale * stacked_product(a, b, loops)
    squares = jnp.square(total).sum(tuple(range(loops, a.ndim - 1)))
    squares = leave(squares, axes) if axes else squares
    return jnp.sqrt(jnp.where(squares == 0, 1, squares))


def stacked_product(a: jax.Array, b: jax.Array, loops: int) -> jax.Array:
    """Multiplies the adapters of stacked layers, in float32: `[loops..., in..., out...]`."""
    dims = tuple(range(loops))
    return jax.lax.dot_general(
        a.astype(jnp.float32),
        b.astype(jnp.float32),
        (((a.ndim - 1,), (loops,)), (dims, dims)),
        precision=jax.lax.Precision.HIGHEST,
    )


def _like_last(x: jax.Array, y: jax.Array) -> jax.Array:
    """Adds dims in front of `x`, whose dims are the last of `y`."""
    return x.reshape((1,) * (y.ndim - x.ndim) + x.shape)


def _product(module: Any, x: Any, w: jax.Array, y: Any) -> Any:
    """Multiplies a layer's input by `w`, `[..., out...]`, as the layer does by its kernel.

    `w` is the kernel or `lora_a`. For `Expand`, which has no input, the result is `w`.
    """
    kind, inputs = _kind_of(module), input_dims(module)
    if kind is Expand:
        return w
    if kind is SplitDense:
        return _split_product(module, x, w, y)
    if kind is nn.Einsum:
        terms = _einsum_terms(module)
        return _contract(x, w, [terms[0].index(name) - len(terms[0]) for name in terms[1][:inputs]])
    return _contract(x, w, _tuple(module.axis) if kind is nn.DenseGeneral else (-1,))


def _split_product(module: Any, x: Any, a: jax.Array, y: Any) -> Any:
    """Computes `x a` for a `SplitDense`; sums it over devices if the layer is row-parallel.

    `a` may also be the layer's kernel.
    """
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
    """Parses the string of an `nn.Einsum`: the dim names of input, kernel and result."""
    text = "".join((module.einsum_str or "").split())
    operands, arrow, y = text.partition("->")
    x, comma, kernel = operands.partition(",")
    if not (arrow and comma) or "." in kernel or len(set(kernel)) < len(kernel):
        raise ValueError(f"computes {module.einsum_str!r}, expected 'x,kernel->y' with all names")
    return x.replace("...", ""), kernel, y.replace("...", "")


def _tuple(axis: Any) -> tuple[int, ...]:
    return tuple(axis) if isinstance(axis, tuple | list) else (axis,)


# -------------------------------------------------------------------------------------------------
# Low-rank adapters of parameters that are no kernel of a layer: embeddings, heads and experts.
#
# The adapter of a parameter `W` is added to the parameter where a module asks for it: the module
# gets `W + scale * a b`, as for the `target_parameters` of the library peft. The last two dims of
# `W` are those of the product, and the dims before them (experts, and layers of a loop) are dims
# of all three. So `a` is `[..., in, r]` and `b` is `[..., r, out]`, and each is sharded as `W` is.
#
# The sum is made in each forward and backward pass, so it costs an array of the size of `W`, which
# is not kept, and the gradient of `W`, from which the gradients of `a` and `b` are computed. The
# adapter of a kernel costs neither, see `low_rank`.
#
# Symbols: `r` the rank of an adapter.


# The names of an adapter's parameters: in a layer, or after the name of another parameter.
DOWN, UP = "lora_a", "lora_b"
# The name of a layer's trained lengths (DoRA).
MAGNITUDE = "lora_magnitude"
OF_PARAMETER = "_"
# Names of parameters that are vectors, although loops may stack them.
VECTORS = ("bias", "scale")


class PlainShape(NamedTuple):
    """The shape of a parameter before it is quantized, and the leaf that has its sharding."""

    shape: tuple[int, ...]
    leaf: Any


def is_adapter(path: str) -> bool:
    """Returns whether the parameter at a path is a part of an adapter."""
    return adapted_path(path) != path


def adapted_path(path: str) -> str:
    """Returns the path of the parameter to which the adapter with the parameter `path` is added."""
    head, slash, name = path.rpartition("/")
    for part in (DOWN, UP, MAGNITUDE):
        if name == part:
            return f"{head}{slash}kernel"
        if name.endswith(OF_PARAMETER + part):
            return path.removesuffix(OF_PARAMETER + part)
    return path


def plain_shapes(params: Mapping[str, Any]) -> dict[str, PlainShape]:
    """Returns the shapes of parameters by path; quantized ones have their own path and shape."""
    found = {}
    for path, leaf in params.items():
        x = leaf.value if is_box(leaf) else leaf
        is_codes = path.endswith(CODES) and path.removesuffix(CODES) + SCALES in params
        plain = path.removesuffix(CODES) if is_codes else path
        found[plain] = PlainShape(plain_shape(x) if is_codes else x.shape, leaf)
    return found


def make_adapter(path: str, plain: PlainShape, rank: int, key: jax.Array) -> dict[str, Any]:
    """Makes the adapter of the parameter at `path`; returns its two parameters by path.

    The product of an embedding's adapter is zero because of `a`, so that each token's row has a
    gradient in the first step, and because of `b` otherwise.
    """
    shape, leaf = plain
    name = path.rpartition("/")[2]
    if name in VECTORS or len(shape) < 2:
        raise ValueError(
            f"lora: targets name the parameter {path!r} of shape {shape}, expected a parameter "
            "with at least two dims in each layer, such as an embedding. Make the glob narrower."
        )
    key = jax.random.fold_in(key, zlib.crc32(path.encode()))
    batch, dims = range(len(shape) - 2), range(len(shape))
    a_shape, b_shape = (*shape[:-1], rank), (*shape[:-2], rank, shape[-1])
    if name == "embedding":
        a, b = jnp.zeros(a_shape), jax.random.normal(key, b_shape)
    else:
        init = nn.initializers.variance_scaling(
            1 / 3, "fan_in", "uniform", -2, -1, batch_axis=tuple(batch)
        )
        a, b = init(key, a_shape, jnp.float32), jnp.zeros(b_shape)
    made: dict[str, Any] = {DOWN: (a, (*dims[:-1], None)), UP: (b, (*batch, None, dims[-1]))}
    for part, (value, kept) in made.items():
        if is_box(leaf):
            names = (*leaf.names, *(None,) * (len(shape) - len(leaf.names)))
            names = tuple(None if dim is None else names[dim] for dim in kept)
            value = leaf.replace(value=value, names=names)
        made[part] = value
    return {f"{path}{OF_PARAMETER}{part}": value for part, value in made.items()}


def adapt_parameters(variables: Any, scale: Callable[[int], float]) -> Any:
    """Puts each parameter that has an adapter of its own in a box that adds the product."""
    params = flatten_dict(variables.get("params", {}), sep="/")
    paths = [path for path in params if path.endswith(OF_PARAMETER + DOWN)]
    if not paths:
        return variables
    for path in paths:
        plain = adapted_path(path)
        a, b = params.pop(path), params.pop(path.removesuffix(DOWN) + UP)
        if plain + CODES in params:
            value: Any = EncodedParameter.from_codes(
                params.pop(plain + CODES), params.pop(plain + SCALES)
            )
        else:
            value = params[plain]
        params[plain] = AdaptedParameter.from_parts(value, a, b, scale)
    return {**variables, "params": unflatten_dict(params, sep="/")}


class AdaptedParameter(ArrayBox, eq=False, repr=False):
    """A box with a parameter and its adapter, whose product is added when the box is unboxed.

    Attributes:
      value: The parameter, `a` and `b`; each may be a box.
      names: `None` for each dim; only the number of dims is used.
      scale: The factor of the product, as a function of the rank.
    """

    scale: Any = flax.struct.field(default=None, pytree_node=False)

    @classmethod
    def from_parts(
        cls, value: Any, a: Any, b: Any, scale: Callable[[int], float]
    ) -> "AdaptedParameter":
        """Makes the box from a parameter and its adapter, which may be boxes or arrays."""
        number = (a.value if is_box(a) else a).ndim
        return cls((value, a, b), names=(None,) * number, scale=scale)

    def to_array(self) -> Any:
        """Adds the product to the parameter.

        Communication:
          The communication of unboxing the three parameters, such as their all-gathers.
        """
        value, a, b = (nn.unbox(x) for x in self.value)
        return value + self.scale(a.shape[-1]) * jnp.matmul(a, b)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "AdaptedParameter":
        """Adds a dim to the three parameters, for `nn.scan` and `nn.vmap`."""
        value = nn.meta.add_axis(self.value, index, params)
        return self.replace(value=value, names=(None, *self.names))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "AdaptedParameter":
        """Removes a dim from the three parameters, for `nn.scan` and `nn.vmap`."""
        value = nn.meta.remove_axis(self.value, index, params)
        return self.replace(value=value, names=self.names[1:])


# -------------------------------------------------------------------------------------------------


# Globs of the paths of an adapter's two matrices.
ADAPTERS = ("*lora_a", "*lora_b")
# The stream of keys for dropout, as in flax.
DROPOUT = "dropout"


def lora(
    model: nn.Module | TensorParallel | QuantizedModel,
    targets: Mapping[str, int],
    *,
    alpha: float,
    rank_stabilized: bool = False,
    dropout: float = 0.0,
    magnitudes: bool = False,
    save: Sequence[str] = (),
) -> "LowRankModel":
    """Adds trainable low-rank adapters to layers of a Linen model, and freezes the model.

    Args:
      model: A Linen model, or the result of `tensor_parallel` or `quantized`. It is not changed.
      targets: Maps a glob on module paths, such as `"*/attention/query"`, to the rank of these
        modules' adapters. `*` stands for any characters, including slashes. A glob may also match
        the path of a module's kernel. The modules must be `SplitDense`, `nn.Dense`,
        `nn.DenseGeneral`, `nn.Einsum`, or the parts of latent attention. Modules without a kernel,
        such as norms, are left alone. Other parameters get an adapter if a glob ends with their
        name: `"embedding"`, `"head"` or `"*/experts/up"`.
      alpha: An adapter's product is multiplied by `alpha / rank`.
      rank_stabilized: Whether the product is multiplied by `alpha / sqrt(rank)` instead (rsLoRA,
        https://arxiv.org/abs/2312.03732).
      dropout: The share of a layer's input that its adapter does not get in training. A call trains
        if it has a key of the stream `dropout` and no switch, such as `train=False`, is off.
      magnitudes: Whether each layer also gets `lora_magnitude`, to which the columns of the kernel
        with its adapter are scaled (DoRA, https://arxiv.org/abs/2402.09353). Its initial values are
        the lengths of the kernel's columns.
      save: Globs on the paths of other parameters that are trained as a whole, and saved with the
        adapters, such as `("embedding", "head", "final_norm/*")`.

    Returns:
      The model with adapters, from which any strategy can build a program. It has the parameters of
      the given model and, for each adapted layer, `lora_a` of shape `[..., r]` and `lora_b` of
      shape `[r, ...]`. If a loop stacks layers, its dim comes first in both shapes.

    Raises:
      TypeError: An argument is of the wrong type.
      ValueError: A glob matches no layer, or a layer that cannot have an adapter. The message names
        the module's path and the reason. The error is raised here or when a program is built.

    Communication:
      Base parameters are gathered as without adapters. Only the gradients of trained parameters
      are reduced, because the others have no gradients. With `magnitudes` and input features that
      are split over devices, one all-reduce of a number for each output feature.
    """
    if isinstance(model, nnx.Module):
        raise TypeError(
            f"lora: model is the nnx.Module {type(model).__name__}, expected a flax.linen.Module, "
            "because calls of NNX modules cannot be intercepted. Use the layer nnx.LoRA, and train "
            "only its parameters with trainable=('*lora_*',)."
        )
    if not isinstance(model, nn.Module | TensorParallel | QuantizedModel):
        raise TypeError(
            f"lora: model is {model!r}, expected an instance of a flax.linen.Module, or the result "
            "of tensor_parallel or quantized."
        )
    plain = model.model if isinstance(model, QuantizedModel) else model
    if isinstance(plain, TensorParallel) and plain.overlap != "none":
        raise ValueError(
            f"lora: model has a plan with overlap={plain.overlap!r}, expected 'none', because "
            "adapters cannot use the chunks of sequences with which such layers compute."
        )
    if not isinstance(targets, Mapping) or not targets:
        raise TypeError(
            f"lora: targets is {targets!r}, expected a dict from globs on module paths "
            "to ranks, such as {'*/attention/query': 8}."
        )
    for glob, rank in targets.items():
        if not isinstance(glob, str) or isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"lora: targets has {glob!r}: {rank!r}, expected a glob and a rank.")
        if rank < 1:
            raise ValueError(f"lora: targets has {glob!r}: {rank}, expected a rank of at least 1.")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise TypeError(f"lora: alpha is {alpha!r}, expected a number, such as twice the rank.")
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(f"lora: alpha is {alpha}, expected a finite number above 0.")
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"lora: dropout is {dropout!r}, expected a number from 0 to below 1.")
    if isinstance(save, str) or not all(isinstance(glob, str) for glob in save):
        raise TypeError(
            f"lora: save is {save!r}, expected a tuple of globs on paths of parameters, such as "
            "('head', 'final_norm/*')."
        )
    return LowRankModel(
        model,
        tuple(targets.items()),
        float(alpha),
        bool(rank_stabilized),
        float(dropout),
        bool(magnitudes),
        tuple(save),
    )


@dataclasses.dataclass(frozen=True)
class LowRankModel:
    """A model with adapters; see `lora`.

    Attributes:
      model: The given model.
      targets: The pairs of a glob on module paths and a rank.
      alpha: An adapter's product is multiplied by `alpha / rank`.
      rank_stabilized: Whether the product is multiplied by `alpha / sqrt(rank)` instead.
      dropout: The share of the inputs that is dropped in training.
      magnitudes: Whether adapters have magnitudes.
      save: Globs on the paths of parameters that are trained as a whole.
    """

    model: Any
    targets: tuple[tuple[str, int], ...]
    alpha: float
    rank_stabilized: bool = False
    dropout: float = 0.0
    magnitudes: bool = False
    save: tuple[str, ...] = ()

    @property
    def module(self) -> nn.Module:
        """The Linen module."""
        module: nn.Module = _adapted(self).module
        return module

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Calls the given model's `init`, and adds adapters to its parameters."""
        return _adapted(self).init(rngs, *args, **kwargs)

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the given model's `apply`, and adds the adapters' products in its layers."""
        return _adapted(self).apply(variables, *args, **kwargs)

    def scale(self, rank: int) -> float:
        """Returns the factor by which the product of an adapter of this rank is multiplied."""
        return self.alpha / (rank**0.5 if self.rank_stabilized else rank)

    def saves(self, path: str) -> bool:
        """Returns whether the parameter at a path is trained and saved with the adapters."""
        return is_adapter(path) or any(fnmatch.fnmatchcase(path, glob) for glob in self.save)

    def rank_of(self, path: str) -> int | None:
        """Returns the rank for the module at a path; `None` if no target matches the path."""
        return self._rank("module", path, _matches)

    def rank_of_parameter(self, path: str) -> int | None:
        """Returns the rank for a parameter that is no kernel; `None` if no target names it."""
        return self._rank("parameter", path, _names)

    def _rank(self, kind: str, path: str, matches: Callable[[str, str], bool]) -> int | None:
        found = {glob: rank for glob, rank in self.targets if matches(path, glob)}
        if len(set(found.values())) > 1:
            raise ValueError(
                f"lora: {kind} {path!r} has more than one rank in targets, {found}; expected one. "
                "Make a glob narrower."
            )
        return next(iter(found.values()), None)


def _adapted(model: LowRankModel) -> "LoRAInterface":
    adapter: LoRAInterface = interface_of(model)
    return adapter


def _matches(path: str, glob: str) -> bool:
    return fnmatch.fnmatchcase(path, glob) or fnmatch.fnmatchcase(f"{path}/kernel", glob)


def _names(path: str, glob: str) -> bool:
    """Returns whether a glob matches a parameter that is no kernel, and ends with its name.

    So a glob such as `*/attention/*` chooses no biases and no scales.
    """
    name = path.rpartition("/")[2]
    is_named = name != "kernel" and glob.rpartition("/")[2] == name
    return is_named and fnmatch.fnmatchcase(path, glob)


@register_interface
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LoRAInterface(WrappingInterface):
    """The interface through which a program calls a `LowRankModel`.

    Attributes:
      low_rank: The `LowRankModel`, with the ranks.
    """

    low_rank: Any = None

    def __repr__(self) -> str:
        names = ("rank_stabilized", "dropout", "magnitudes", "save")
        given = {name: getattr(self.low_rank, name) for name in names}
        more = "".join(f", {name}={value!r}" for name, value in given.items() if value)
        targets, alpha = dict(self.low_rank.targets), self.low_rank.alpha
        return f"lora({self.base!r}, {targets}, alpha={alpha}{more})"

    @classmethod
    def wrap(cls, model: Any) -> Self | None:
        """Makes the interface of a `LowRankModel`; returns `None` for any other model."""
        if not isinstance(model, LowRankModel):
            return None
        base = interface_of(model.model)
        return cls(base.module, low_rank=model, base=base)

    @property
    def trainable(self) -> tuple[str, ...]:
        """The globs of the parameters that are trained by default: those that are saved."""
        magnitudes = (f"*{MAGNITUDE}",) if self.low_rank.magnitudes else ()
        return (*ADAPTERS, *magnitudes, *self.low_rank.save)

    def declared(
        self, noted: Mapping[str, Declared], params: Mapping[str, Any]
    ) -> Mapping[str, Declared]:
        """Adds the adapters to the parameters of the given model."""
        found = dict(super().declared(noted, params))
        for path in filter(is_adapter, params):
            if path.endswith(MAGNITUDE):
                continue
            plain = noted.get(adapted_path(path))
            if plain is None or plain.shape is None or plain.matrix is None:
                continue
            is_own = path.endswith((OF_PARAMETER + DOWN, OF_PARAMETER + UP))
            batch = len(plain.shape) - 2 if is_own else 0
            first = batch + 1 if is_own else len(plain.matrix.inputs)
            shape, of_plain = params[path].shape, plain.shape
            if path.endswith(DOWN):
                own = (*of_plain[:first], shape[-1])
            else:
                rank = shape[len(shape) - len(of_plain) + first - 1]
                own, first = (*of_plain[:batch], rank, *of_plain[first:]), batch + 1
            dims = tuple(range(len(own)))
            matrix = MatrixDims(dims[batch:first], dims[first:], plain.matrix.hidden)
            found[path] = Declared(own, matrix)
        return found

    def check(self, trace: Callable[[ModelInterface], None]) -> None:
        """Checks only the given model: adapters compute correctly with shards and need no check."""
        self.base.check(lambda base: trace(self.called(base)))

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Initializes the variables of the given model, and adds adapters to the parameters."""
        making = _Making(self.low_rank, self.base)
        variables = dict(self.base.intercepted(making).init(rngs, *args, **kwargs))
        params = flatten_dict(variables.get("params", {}), sep="/")
        shapes = plain_shapes(params)
        made: dict[str, Any] = {}
        for path, plain in shapes.items():
            rank = self.low_rank.rank_of_parameter(path)
            if rank is not None:
                made |= make_adapter(path, plain, rank, _key(rngs))
        making.check(shapes)
        if self.low_rank.magnitudes and made:
            raise ValueError(
                f"lora: magnitudes is True and targets name the parameter "
                f"{adapted_path(next(iter(made)))!r}, expected layers, because only the kernels of "
                "layers have magnitudes. Name the parameter in save, or leave it out."
            )
        params |= made
        params |= self._magnitudes(params) if self.low_rank.magnitudes else {}
        self._check_saved(params, shapes)
        return variables | {"params": unflatten_dict(params, sep="/")}

    def derived(self, params: Mapping[str, Any], missing: Collection[str]) -> dict[str, Any]:
        """Returns the magnitudes among the parameters `missing`: the lengths of the columns."""
        found = dict(self.base.derived(params, missing))
        if self.low_rank.magnitudes:
            made = self._magnitudes(params)
            found |= {path: x for path, x in made.items() if path in missing}
        return found

    def _magnitudes(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Makes the magnitudes of all adapters by path, boxed as the kernels are."""
        made = {}
        values = {path: x.value if is_box(x) else x for path, x in params.items()}
        for path in (path for path in params if path.rpartition("/")[2] == DOWN):
            module = path.removesuffix(DOWN)
            a, b, name = values[path], values[module + UP], f"{module}kernel"
            if name not in params:
                stored = params[name + CODES]
                kernel = decode(values[name + CODES], values[name + SCALES])
            else:
                stored, kernel = params[name], values[name]
            loops = a.ndim + b.ndim - 2 - kernel.ndim
            value: Any = lengths(kernel, a, b, self.low_rank.scale(b.shape[loops]), loops=loops)
            if is_box(stored):
                names = (*stored.names, *(None,) * (kernel.ndim - len(stored.names)))
                names = (*names[:loops], *names[a.ndim - 1 :])
                value = params[path].replace(value=value, names=names)
            made[module + MAGNITUDE] = value
        return made

    def _check_saved(self, params: Mapping[str, Any], shapes: Mapping[str, PlainShape]) -> None:
        """Refuses a glob of `save` that matches no parameter, or one that is not trained so."""
        adapted = {adapted_path(path) for path in params if is_adapter(path)}
        plain = sorted(path for path in shapes if not is_adapter(path))
        for glob in self.low_rank.save:
            found = [path for path in plain if fnmatch.fnmatchcase(path, glob)]
            where = f"lora: save has {glob!r}"
            if not found:
                near = difflib.get_close_matches(glob, plain, n=3, cutoff=0.0)
                raise ValueError(
                    f"{where}, but this glob matches no parameter, expected a path such as "
                    f"{', '.join(map(repr, near))}."
                )
            for path in found:
                if path not in params:
                    raise ValueError(
                        f"{where}, and parameter {path!r} is stored in codes, which are not "
                        "trained; expected a parameter in floats. Leave it out of quantized."
                    )
                if path in adapted:
                    raise ValueError(
                        f"{where}, and parameter {path!r} has an adapter, expected one of the two. "
                        "Make a glob narrower."
                    )

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the given model's `apply`, and adds the adapters' products in its layers."""
        low_rank = self.low_rank
        # Adapters read the inputs of layers exactly.
        base = dataclasses.replace(self.called(self.base), gathers_float8=False)
        drops = bool(low_rank.dropout) and base.drops(*args, **kwargs)
        if drops:
            _check_dropped(variables, low_rank.dropout)
        variables = adapt_parameters(variables, low_rank.scale)
        add = functools.partial(self._add, drops)
        return base.intercepted(add).apply(variables, *args, **kwargs)

    def _add(self, drops: bool, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Intercepts a module's call, and adds the product of its adapter to the result."""
        module = context.module
        if not _computes(context) or not module.has_variable("params", DOWN):
            return next_fun(*args, **kwargs)
        has_magnitude = module.has_variable("params", MAGNITUDE)
        reading: contextlib.AbstractContextManager[dict[str, Any]] = contextlib.nullcontext({})
        with _reading(module) if has_magnitude else reading as read:
            y = next_fun(*args, **kwargs)
        boxes = [module.get_variable("params", name) for name in (DOWN, UP)]
        axes = _split_axes(module, boxes[0])
        a, b = map(nn.unbox, boxes)
        x = next(iter([*args, *kwargs.values()]), None)
        dropped = _drop(module, x, self.low_rank.dropout, axes) if drops else None
        magnitude = None
        if has_magnitude:
            value = nn.unbox(module.get_variable("params", MAGNITUDE))
            magnitude = Magnitude(value, read["kernel"], read.get("bias"), axes)
        scale = self.low_rank.scale(b.shape[0])
        return add_low_rank(module, x, y, a, b, scale, dropped=dropped, magnitude=magnitude)


@contextlib.contextmanager
def _reading(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yields a dict that gets the parameters that the module reads, so that none is sent twice."""
    before, original = vars(module).get("param"), module.param
    read: dict[str, Any] = {}

    def param(name: str, *args: Any, **kwargs: Any) -> Any:
        read[name] = original(name, *args, **kwargs)
        return read[name]

    vars(module)["param"] = param
    try:
        yield read
    finally:
        if before is None:
            del vars(module)["param"]
        else:
            vars(module)["param"] = before


def _split_axes(module: Any, box: Any) -> tuple[str, ...]:
    """Returns the mesh axes that split the input dims of a layer's kernel in this call.

    `box` is that of `lora_a`. Its names say how a plan of `tensor_parallel` splits the kernel.
    """
    names: Any = ()
    gathered: set[str] = set()
    if _kind_of(module) is SplitDense:
        names = module.names[: module.contracted]
    elif is_box(box):
        names = box.names
        gathered = {*getattr(box, "gather_axes", ()), *getattr(box, "shard_only_axes", ())}
    axes = (axis for name in names for axis in axis_tuple(name))
    return tuple(axis for axis in axes if axis not in gathered and is_axis_bound(axis))


def _drop(module: nn.Module, x: Any, rate: float, axes: tuple[str, ...]) -> Any:
    """Drops entries of the input of an adapter; `axes` are those that split its features."""
    if _kind_of(module) is Expand:
        raise ValueError(
            f"lora: module {'/'.join(module.path)!r} has an adapter and dropout is {rate}, "
            "expected 0, because latent attention multiplies by this kernel without its input. "
            "Make the glob narrower, or set dropout to 0."
        )
    if not module.has_rng(DROPOUT):
        raise ValueError(
            f"lora: dropout is {rate} and module {'/'.join(module.path)!r} has no key of the "
            f"stream {DROPOUT!r}, expected one in each layer. Give loops over layers "
            "split_rngs={'dropout': True}."
        )
    key = module.make_rng(DROPOUT)
    if isinstance(module, Compress) and module.config.split.sequence_dim is not None:
        axes = (*axes, *axis_tuple(module.config.split.axis))  # Devices have different positions.
    if axes and varying_axes(key):
        key = fold_rng_over_axis(key, axes)
    parts, structure = jax.tree.flatten(x)
    keys = [jax.random.fold_in(key, number) for number in range(len(parts))]
    kept = [
        jax.random.bernoulli(key, 1 - rate, x.shape) for key, x in zip(keys, parts, strict=True)
    ]
    return jax.tree.unflatten(
        structure, [jnp.where(k, x / (1 - rate), 0) for k, x in zip(kept, parts, strict=True)]
    )


def _check_dropped(variables: Any, rate: float) -> None:
    """Refuses dropout for adapters of parameters, which have no input; embeddings drop nothing."""
    paths = flatten_dict(variables.get("params", {}), sep="/")
    for path in (path for path in paths if path.endswith(OF_PARAMETER + DOWN)):
        plain = adapted_path(path)
        if plain.rpartition("/")[2] != "embedding":
            raise ValueError(
                f"lora: dropout is {rate} and the parameter {plain!r} has an adapter, expected "
                "adapters of layers and embeddings, because only a layer's adapter has an input. "
                "Set dropout to 0, or name the parameter in save instead."
            )


def _key(rngs: Any) -> jax.Array:
    """Returns the key for parameters among the arguments of `init`."""
    key: jax.Array = rngs["params"] if isinstance(rngs, Mapping) else rngs
    return key


class _Making:
    """An interceptor that makes adapters while a model is initialized."""

    def __init__(self, low_rank: LowRankModel, base: LinenModel) -> None:
        self._low_rank, self._base = low_rank, base
        # The shapes of each adapted module's parameters, by path, without the dims of loops.
        self._made: dict[str, dict[str, tuple[int, ...]]] = {}
        self._refused: dict[str, str] = {}

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Calls a module's method, and then makes the module's adapter if a target asks for one."""
        module, y = context.module, next_fun(*args, **kwargs)
        if not _computes(context):
            return y
        path = "/".join(module.path)
        rank = self._low_rank.rank_of(path)
        if rank is None:
            return y
        try:
            if not module.has_variable("params", DOWN):
                self._make(module, path, rank, input_dims(module))
        except ValueError as error:
            self._refused[path] = str(error)
        return y

    def _make(self, module: nn.Module, path: str, rank: int, inputs: int) -> None:
        box = self._base.annotated(path, module.get_variable("params", "kernel"))
        kernel = box.value if is_box(box) else box
        shape = kernel.shape
        # Initial weights are uniform between -/+ 1/sqrt(inputs), as in other LoRA libraries.
        init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", range(inputs), (-1,))
        # Not `make_rng`: it counts calls, so it would change the keys of other parameters.
        assert module.scope is not None
        key = LazyRng.create(module.scope.rngs["params"], DOWN).as_jax_rng()
        values = {
            DOWN: (init(key, (*shape[:inputs], rank), jnp.float32), (*range(inputs), None)),
            UP: (jnp.zeros((rank, *shape[inputs:])), (None, *range(inputs, len(shape)))),
        }
        self._made[path] = {"kernel": shape, **{name: x.shape for name, (x, _) in values.items()}}
        for name, (value, dims) in values.items():
            if is_box(box):
                names = (*box.names, *(None,) * (len(shape) - len(box.names)))
                names = tuple(None if dim is None else names[dim] for dim in dims)
                value = box.replace(value=value, names=names)
            module.put_variable("params", name, value)

    def check(self, shapes: Mapping[str, PlainShape]) -> None:
        """Refuses a target that matches no layer, or a layer that cannot have an adapter.

        Modules without a kernel are refused only if a glob matches nothing else.
        """
        modules = {path.rpartition("/")[0] for path in shapes}
        for glob, rank in self._low_rank.targets:
            where = f"lora: targets has {glob!r}: {rank}"
            found = sorted(path for path in modules if _matches(path, glob))
            layers = [path for path in found if f"{path}/kernel" in shapes]
            is_named = any(_names(path, glob) for path in shapes)
            if not found and not is_named:
                near = difflib.get_close_matches(glob, sorted(modules), n=3, cutoff=0.0)
                raise ValueError(
                    f"{where}, but this glob matches no module with parameters, expected a glob "
                    f"on a module such as {', '.join(map(repr, near))}."
                )
            for path in layers or ([] if is_named else found):
                why = self._refused.get(path, f"is not called, expected one of {ADAPTED_LAYERS}")
                if path in self._made:
                    own = self._made[path]
                    whole = {name: shapes[f"{path}/{name}"].shape for name in own}
                    if all(whole[name][-len(shape) :] == shape for name, shape in own.items()):
                        continue
                    why = (
                        f"is in a loop that stacks kernels {own['kernel']} as {whole['kernel']}, "
                        "expected the loop's dim in front"
                    )
                raise ValueError(f"{where}, and module {path!r} {why}. Make the glob narrower.")


def _computes(context: Any) -> bool:
    """Returns whether an intercepted call computes the module's result and has its variables.

    The call of a module that `nn.remat` or `nn.scan` wraps does not compute by itself. It makes a
    second call, of the same module without the transform, and the second call computes.
    """
    module, method = context.module, context.method_name
    is_lifted = type(module).__module__ == "flax.linen.transforms" and method in vars(type(module))
    return module.scope is not None and method == "__call__" and not is_lifted
