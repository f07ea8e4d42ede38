"""Low-rank adapters of parameters that are no kernel of a layer: embeddings, heads and experts.

The adapter of a parameter `W` is added to the parameter where a module asks for it: the module gets
`W + scale * a b`, as for the `target_parameters` of the library peft. The last two dims of `W` are
those of the product, and the dims before them (experts, and layers of a loop) are dims of all
three. So `a` is `[..., in, r]` and `b` is `[..., r, out]`, and each is sharded as `W` is.

The sum is made in each forward and backward pass, so it costs an array of the size of `W`, which is
not kept, and the gradient of `W`, from which the gradients of `a` and `b` are computed. The adapter
of a kernel costs neither, see `low_rank`.

Symbols: `r` the rank of an adapter.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from manualpar.core.parameters.array_box import ArrayBox
from manualpar.core.parameters.sharded_parameter import is_box
from manualpar.models.finetuning.quantized import CODES, SCALES, EncodedParameter
from manualpar.models.finetuning.stored_codes import plain_shape

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

    Raises:
      ValueError: The parameter is not a matrix or several matrices.
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
            value: Any = EncodedParameter.of(params.pop(plain + CODES), params.pop(plain + SCALES))
        else:
            value = params[plain]
        params[plain] = AdaptedParameter.of(value, a, b, scale)
    return {**variables, "params": unflatten_dict(params, sep="/")}


class AdaptedParameter(ArrayBox, eq=False):
    """A box with a parameter and its adapter, whose product is added when the box is unboxed.

    Attributes:
      value: The parameter, `a` and `b`; each may be a box.
      names: `None` for each dim; only the number of dims is used.
      scale: The factor of the product, as a function of the rank.
    """

    scale: Any = flax.struct.field(default=None, pytree_node=False)

    @classmethod
    def of(cls, value: Any, a: Any, b: Any, scale: Callable[[int], float]) -> "AdaptedParameter":
        """Makes the box from a parameter and its adapter, which may be boxes or arrays."""
        number = (a.value if is_box(a) else a).ndim
        return cls((value, a, b), names=(None,) * number, scale=scale)

    def unbox(self, apply_constraint: bool = True) -> Any:
        """Adds the product to the parameter.

        Communication:
          The communication of unboxing the three parameters, such as their all-gathers.
        """
        del apply_constraint
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
