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
need not change, and loops over layers stack adapters in the same way as kernels.

Invariants: all other parameters have the same paths and the same initial bits as without adapters.
Initially an adapter's product is zero, so the model's results are the same as without adapters.
"""

import dataclasses
import difflib
import fnmatch
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.scope import LazyRng
from flax.linen.dtypes import promote_dtype
from flax.traverse_util import flatten_dict, unflatten_dict

from manualpar.core.mesh.axes import axis_tuple
from manualpar.core.model.interface import ModelInterface, interface_of, register_interface
from manualpar.core.model.linen_model import LinenModel
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
# Invariants: an adapter computes in the dtype of its layer. A layer that cannot have an adapter is
# refused, and the message gives the reason.
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


def add_low_rank(
    module: nn.Module, x: Any, y: Any, a: jax.Array, b: jax.Array, scale: float
) -> Any:
    """Adds the product of a layer's adapter to the layer's result `y`.

    Args:
      x: The layer's input; for a column-parallel layer the result of `enter` or `enter_ring`; not
        used for `Expand`, which has none.
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


# The names of an adapter's two parameters: in a layer, or after the name of another parameter.
DOWN, UP = "lora_a", "lora_b"
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
    for part in (DOWN, UP):
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


# Globs of the paths of an adapter's two parameters.
ADAPTERS = ("*lora_a", "*lora_b")


def lora(
    model: nn.Module | TensorParallel | QuantizedModel,
    targets: Mapping[str, int],
    *,
    alpha: float,
    rank_stabilized: bool = False,
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

    Returns:
      The model with adapters, from which any strategy can build a program. It has the parameters of
      the given model and, for each adapted layer, `lora_a` of shape `[..., r]` and `lora_b` of
      shape `[r, ...]`. If a loop stacks layers, its dim comes first in both shapes.

    Raises:
      TypeError: An argument is of the wrong type.
      ValueError: A glob matches no layer, or a layer that cannot have an adapter. The message names
        the module's path and the reason. The error is raised here or when a program is built.

    Communication:
      Base parameters are gathered as without adapters. Only the gradients of adapters are reduced,
      because base parameters have no gradients.
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
    return LowRankModel(model, tuple(targets.items()), float(alpha), bool(rank_stabilized))


@dataclasses.dataclass(frozen=True)
class LowRankModel:
    """A model with adapters; see `lora`.

    Attributes:
      model: The given model.
      targets: The pairs of a glob on module paths and a rank.
      alpha: An adapter's product is multiplied by `alpha / rank`.
      rank_stabilized: Whether the product is multiplied by `alpha / sqrt(rank)` instead.
    """

    model: Any
    targets: tuple[tuple[str, int], ...]
    alpha: float
    rank_stabilized: bool = False

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
        more = ", rank_stabilized=True" if self.low_rank.rank_stabilized else ""
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
        """The globs of the parameters that are trained by default: the adapters."""
        return ADAPTERS

    def declared(
        self, noted: Mapping[str, Declared], params: Mapping[str, Any]
    ) -> Mapping[str, Declared]:
        """Adds the adapters to the parameters of the given model."""
        found = dict(super().declared(noted, params))
        for path in filter(is_adapter, params):
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
        return variables | {"params": unflatten_dict({**params, **made}, sep="/")}

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the given model's `apply`, and adds the adapters' products in its layers."""
        # Adapters read the inputs of layers exactly.
        base = dataclasses.replace(self.called(self.base), gathers_float8=False)
        variables = adapt_parameters(variables, self.low_rank.scale)
        return base.intercepted(self._add).apply(variables, *args, **kwargs)

    def _add(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Intercepts a module's call, and adds the product of its adapter to the result."""
        module, y = context.module, next_fun(*args, **kwargs)
        if not _computes(context) or not module.has_variable("params", DOWN):
            return y
        a, b = (nn.unbox(module.get_variable("params", name)) for name in (DOWN, UP))
        scale = self.low_rank.scale(b.shape[0])
        first = next(iter([*args, *kwargs.values()]), None)
        return add_low_rank(module, first, y, a, b, scale)


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
