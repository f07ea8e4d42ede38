"""Stores frozen parameters in int8 or NF4, without changes in the model's code.

```python
model = manualpar.quantized(model)
model = manualpar.lora(model, {"*/attention/query": 8}, alpha=16)
state = manualpar.load_hf(manualpar.fsdp(model, ...), "models/llama", missing="init")
```

Two parameters replace each chosen parameter `kernel`: `kernel_codes`, int8 in the kernel's shape or
uint8 with two numbers in a byte, and `kernel_scales`, one number for each block along the last dim,
see `stored_codes`. Both are sharded, gathered, saved and restored like other parameters, without
being dequantized. When a module requests the kernel, the module gets a Flax metadata box. Unboxing
it gathers codes and scales and dequantizes them. Gradients of activations are computed with the
dequantized kernel.

Invariants: a device dequantizes only the values that it computes with. Before the gather, several
devices may store parts of the same block. The backward pass dequantizes again, so that no
dequantized kernel is kept in memory. Codes and scales do not depend on the mesh. All other
parameters have the same paths and the same initial bits as without quantization.
"""

import dataclasses
import difflib
import fnmatch
import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from manualpar.core.mesh.axes import axes_size, axis_tuple, with_axis_types
from manualpar.core.mesh.mesh_context import no_mesh, with_auto_axes
from manualpar.core.model.interface import (
    InitArgs,
    ModelInterface,
    interface_of,
    register_interface,
)
from manualpar.core.parameters.annotations import SplitParameter
from manualpar.core.parameters.placement import Declared
from manualpar.core.parameters.sharded_parameter import ArrayBox, is_box
from manualpar.core.program.state_arrays import Leaf
from manualpar.core.tracing.scopes import DECODE_SCOPE
from manualpar.layers import TensorParallel
from manualpar.quantization.quantized_collectives import (
    dequantize,
    quantize,
    quantized_block_size,
)

# -------------------------------------------------------------------------------------------------
# Codes in which frozen parameters are stored: int8, or the 16 levels of NF4.
#
# Int8 is that of `block_quantization`. NF4 (Dettmers et al., QLoRA,
# https://arxiv.org/abs/2305.14314) is for numbers with a normal distribution: its levels are the
# quantiles of one, with 0 among them, between -1 and 1. The scale of a block is its largest
# magnitude, and the code of a number stands for the level nearest to `number / scale`. A byte has
# the codes of two adjacent numbers, the first in its upper bits. The code of 0 is 0, so it is the
# index of the level with its bits flipped as those of `ZERO`; bitsandbytes stores the index.
#
# Scales have the 8 significant bits of bfloat16. So with `frozen_dtype="bfloat16"` a number takes
# 4.25 bits in blocks of 64. That is less than 4.5 with float32 scales, and near the 4.13 of scales
# that are quantized again ("double quantization"), which would need a second step to decode.
#
# Invariants: if decoded numbers are encoded again, codes and scales stay the same. The codes of
# zeros are zeros. A block with a number that is not finite becomes NaN, and a block whose scale
# would be subnormal becomes zeros.


Code = Literal["int8", "nf4"]
# The levels that bitsandbytes has for the type `nf4`.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
ZERO = NF4.index(0.0)
BORDERS = tuple(float(np.float32(a + b) / 2) for a, b in itertools.pairwise(NF4))


def encode(x: jax.Array, block: int, code: Code) -> tuple[jax.Array, jax.Array]:
    """Quantizes an array, `[..., K]`, in blocks along its last dim.

    Returns:
      The codes, `[..., K]` of int8 or for NF4 `[..., K / 2]` of uint8, and the scales,
      `[..., ceil(K / block)]` of the dtype of `x`.

    Communication:
      None, if each device has complete blocks.
    """
    if code == "int8":
        return quantize(x, block)
    *rows, size = x.shape
    wide = jnp.promote_types(x.dtype, jnp.float32)
    padding = [(0, 0)] * len(rows) + [(0, -size % block)]
    blocks = jnp.pad(x.astype(wide), padding).reshape(*rows, -1, block)
    peaks = jnp.abs(blocks).max(-1)
    scales = jnp.clip(peaks, max=float(jnp.finfo(jnp.bfloat16).max)).astype(jnp.bfloat16)
    scales = jnp.where(scales < jnp.finfo(jnp.bfloat16).tiny, 0, scales).astype(wide)
    scales = jnp.where(jnp.isfinite(peaks), scales, jnp.nan)
    shares = blocks / jnp.where(scales == 0, 1, scales)[..., None]
    shares = jnp.where(scales[..., None] == 0, 0, shares)
    # The number of borders below a share is the index of its level.
    codes = sum((shares > border).astype(jnp.uint8) for border in BORDERS)
    codes = (jnp.asarray(codes) ^ ZERO).reshape(*rows, -1)[..., :size].reshape(*rows, -1, 2)
    return codes[..., 0] << 4 | codes[..., 1], scales.astype(x.dtype)


def decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Decodes codes and scales of `encode`, in the dtype of the scales.

    Args:
      codes: The codes; a device may also pass a shard: complete blocks, or a part of one block.

    Communication:
      None, if the scales are sharded like the codes.
    """
    if codes.dtype != jnp.uint8:
        return dequantize(codes, scales)
    wide = jnp.promote_types(scales.dtype, jnp.float32)
    numbers = jnp.stack([codes >> 4, codes & 15], -1).reshape(plain_shape(codes))
    size, count = numbers.shape[-1], scales.shape[-1]
    factors = jnp.repeat(scales.astype(wide), -(-size // count), axis=-1)[..., :size]
    return (jnp.asarray(NF4, wide)[numbers ^ ZERO] * factors).astype(scales.dtype)


def plain_shape(codes: Any) -> tuple[int, ...]:
    """Returns the shape of the array that codes of this shape and dtype stand for."""
    *rows, size = codes.shape
    return (*rows, size * 2 if codes.dtype == jnp.uint8 else size)


# -------------------------------------------------------------------------------------------------
# Quantizes loaded kernels to codes and scales, on the devices, one kernel at a time.
#
# A kernel is loaded as a sharded float32 array. Each device quantizes its shard, so that no device
# and no host stores more of the kernel than its shards. A shard of the codes may end in the middle
# of a block. Such a kernel is loaded with another sharding, in which every shard contains complete
# blocks, and the devices exchange the codes afterwards.
#
# Invariants: padding consists of zeros, and the codes of zeros are zeros. So padding need not be
# removed before an array is quantized.


class Encoding(NamedTuple):
    """A parameter that is stored as codes: its leaves before and after quantization.

    Attributes:
      plain: The parameter before quantization, in float32. It is sharded so that each device has
        complete blocks.
      codes: The parameter's codes, as the program stores them.
      scales: The scales of the blocks, as the program stores them.
    """

    plain: Leaf
    codes: Leaf
    scales: Leaf

    @classmethod
    def from_leaves(cls, name: str, codes: Leaf, scales: Leaf) -> "Encoding":
        """Makes the `Encoding` of the parameter `name` from the leaves of its codes and scales."""
        dtype = jnp.promote_types(scales.dtype, jnp.float32)
        layout: Any = codes.abstract.sharding
        shape = _plain(codes, codes.shape)
        held, sharding = _whole_blocks(
            shape, _plain(codes, codes.padded_shape), layout, _block(codes, scales)
        )
        abstract = jax.ShapeDtypeStruct(held, dtype, sharding=sharding)
        keys = name.partition("/")[0], *codes.keys[1:-1], name.rpartition("/")[2]
        return cls(Leaf(name, keys, abstract, shape, held, dtype), codes, scales)

    @property
    def padding(self) -> tuple[int, ...]:
        """The padding of the result of `decode`."""
        own, held = (_plain(self.codes, x) for x in (self.codes.shape, self.codes.padded_shape))
        return tuple(b - a for a, b in zip(own, held, strict=True))

    def encode(self, x: jax.Array) -> dict[str, jax.Array]:
        """Quantizes the parameter `x`, which is donated; returns codes and scales by name.

        Communication:
          None for most parameters. Codes are sent if their shards end within blocks. Scales are
          sent if scales and codes are sharded differently.
        """
        with no_mesh():
            made = _encoder(*self._types, _block(self.codes, self.scales))(x)
        return dict(zip((self.codes.name, self.scales.name), made, strict=True))

    def decode(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        """Dequantizes the parameter; the result has the sharding and the padding of the codes.

        Communication:
          The communication of `encode`, in the other direction.
        """
        with no_mesh():
            return _decoder(*self._types, _block(self.codes, self.scales))(codes, scales)

    @property
    def _types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self.plain.abstract, self.codes.abstract, self.scales.abstract


def _block(codes: Leaf, scales: Leaf) -> int:
    return -(-_plain(codes, codes.shape)[-1] // scales.shape[-1])


def _plain(codes: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    return plain_shape(jax.ShapeDtypeStruct(shape, codes.dtype))


def _whole_blocks(
    shape: tuple[int, ...], held: tuple[int, ...], sharding: NamedSharding, block: int
) -> tuple[tuple[int, ...], NamedSharding]:
    """Returns a padded shape and a sharding in which no shard ends within a block."""
    axes = [*map(axis_tuple, sharding.spec), *[()] * (len(shape) - len(sharding.spec))]
    parts = axes_size(sharding.mesh, axes[-1])
    if parts == 1 or held[-1] // parts % block == 0:
        return held, sharding
    # The axes that would split blocks of the last dim shard the largest other dim instead.
    sizes = list(held[:-1])
    dim = sizes.index(max(sizes))
    axes[dim], axes[-1] = (*axes[dim], *axes[-1]), ()
    sizes[dim] = _round_up(shape[dim], axes_size(sharding.mesh, axes[dim]))
    return (*sizes, shape[-1]), NamedSharding(
        sharding.mesh, PartitionSpec(*(names or None for names in axes))
    )


def _round_up(size: int, parts: int) -> int:
    return math.ceil(size / parts) * parts


@functools.lru_cache
def _encoder(plain: Any, codes: Any, scales: Any, block: int) -> Callable[[jax.Array], Any]:
    """Makes the compiled function that quantizes parameters of these shapes and shardings."""

    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = encode(x, block, "int8" if codes.dtype == jnp.int8 else "nf4")
        return _resize(made[0], codes.shape), _resize(made[1].astype(scales.dtype), scales.shape)

    return _jit(run, (codes.sharding, scales.sharding))


@functools.lru_cache
def _decoder(plain: Any, codes: Any, scales: Any, block: int) -> Callable[..., jax.Array]:
    # Inside `run` all mesh axes are of type `Auto`, even if they have other types in the program.
    mesh = with_axis_types(plain.sharding.mesh, AxisType.Auto)
    sharding = NamedSharding(mesh, plain.sharding.spec)

    def run(of_codes: jax.Array, of_scales: jax.Array) -> jax.Array:
        factor = _plain(codes, (1,))[0]
        of_codes = _resize(of_codes, (*plain.shape[:-1], plain.shape[-1] // factor))
        of_codes = jax.lax.with_sharding_constraint(of_codes, sharding)
        count = -(-plain.shape[-1] // block)
        of_scales = _resize(of_scales, (*plain.shape[:-1], count))
        return _resize(decode(of_codes, of_scales), _plain(codes, codes.shape))

    return _jit(run, codes.sharding)


def _jit(run: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
    mesh = jax.tree.leaves(shardings)[0].mesh
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    return jax.jit(with_auto_axes(run, mesh=mesh, out_specs=specs), out_shardings=shardings)


def _resize(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Brings an array to a shape: cuts off the end of longer dims, pads shorter dims with zeros."""
    pairs = list(zip(x.shape, shape, strict=True))
    x = x[tuple(slice(min(own, size)) for own, size in pairs)]
    return jnp.pad(x, [(0, max(size - own, 0)) for own, size in pairs])


# -------------------------------------------------------------------------------------------------
# The base class of model interfaces that wrap the interface of another model.


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class WrappingInterface(ModelInterface):
    """A model interface that calls `base`, the interface of the *given* model.

    Attributes:
      base: The interface of the given model, the argument of `lora` or `quantized`.
    """

    base: Any = None
    makes_variables_in_calls: ClassVar[bool] = True

    @property
    def trainable(self) -> tuple[str, ...]:
        """The globs of the parameters that are trained by default, as in the given model."""
        globs: tuple[str, ...] = self.base.trainable
        return globs

    @property
    def decodes_weights(self) -> bool:
        """Whether the given model dequantizes weights."""
        return bool(self.base.decodes_weights)

    def encodings(self, leaves: Any) -> dict[str, Any]:
        """Returns the encodings of the given model."""
        return dict(self.base.encodings(leaves))

    def derived(self, params: Mapping[str, Any], missing: Collection[str]) -> dict[str, Any]:
        """Returns the parameters that follow from others in the given model."""
        return dict(self.base.derived(params, missing))

    def drops(self, *args: Any, **kwargs: Any) -> bool:
        """Returns whether a call drops activations, as in the given model."""
        return bool(self.called(self.base).drops(*args, **kwargs))

    def initial_call(
        self, batch: Any, init_args: InitArgs | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of the given model's first call."""
        call: tuple[tuple[Any, ...], dict[str, Any]] = self.base.initial_call(batch, init_args)
        return call

    def first_call(self, loss_fn: Callable[..., Any], batch: Any) -> InitArgs | None:
        """Returns the first call in a loss, as the given model does."""
        found: InitArgs | None = self.base.first_call(loss_fn, batch)
        return found

    def declared(
        self, noted: Mapping[str, Declared], params: Mapping[str, Any]
    ) -> Mapping[str, Declared]:
        """Returns how modules declare the parameters, as in the given model."""
        found: Mapping[str, Declared] = self.base.declared(noted, params)
        return found

    def called(self, base: Any) -> Any:
        """Returns a copy of the interface `base` with the module, phase and axes of `self`."""
        same = ("module", "phase", "axis_aliases", "loop_dims", "gathers_float8")
        return dataclasses.replace(base, **{name: getattr(self, name) for name in same})

    def check(self, trace: Callable[[ModelInterface], None]) -> None:
        """Checks the given model in the calls that this interface makes."""
        self.base.check(lambda base: trace(dataclasses.replace(self, base=base)))


# -------------------------------------------------------------------------------------------------


CODES, SCALES = "_codes", "_scales"
# Globs on parameter paths -> the block length, the number of elements that share a scale.
KERNELS: Mapping[str, int] = {"*kernel": 64}


def quantized(
    model: nn.Module | TensorParallel,
    targets: Mapping[str, int] = KERNELS,
    *,
    code: Code = "int8",
) -> "QuantizedModel":
    """Stores parameters of a Linen model in int8 or NF4, and freezes these parameters.

    Args:
      model: A Linen model, or the result of `tensor_parallel`. It is not changed.
      targets: Maps a glob on parameter paths to the block length, the number of elements that share
        a scale. `*` stands for any characters, including slashes. By default every `kernel` is
        stored in blocks of 64. The default excludes embeddings, because a step needs few of their
        rows, and the `head` of a `Transformer`, because its rounding errors would be errors of the
        logits. If the last dim is sharded over `N` devices by tensor parallelism, its number of
        blocks must be a multiple or a divisor of `N`.
      code: `"int8"`, or `"nf4"` for the 4-bit code of QLoRA, which packs two numbers into a byte.

    Returns:
      The model for `lora`, or for a program whose `trainable=` names the trained parameters.
      `init_from` and `load_hf` accept the parameters of the given model.

    Raises:
      TypeError: An argument is of the wrong type.
      ValueError: A glob matches no parameter, or a parameter that cannot be stored so. The
        message names the path and the reason. The error is raised here or when a program is built.

    Communication:
      Codes and scales are gathered before they are dequantized. They have a little more than a
      quarter of the bytes of the float32 kernels, with NF4 a little more than an eighth.
    """
    if isinstance(model, nnx.Module):
        raise TypeError(
            f"quantized: model is the nnx.Module {type(model).__name__}, expected a "
            "flax.linen.Module, because NNX modules store their parameters themselves."
        )
    if not isinstance(model, nn.Module | TensorParallel):
        raise TypeError(
            f"quantized: model is {model!r}, expected an instance of a flax.linen.Module, or the "
            "result of tensor_parallel. Add adapters afterwards: lora(quantized(model), ...)."
        )
    if not isinstance(targets, Mapping) or not targets:
        raise TypeError(
            f"quantized: targets is {targets!r}, expected a dict from globs on parameter "
            "paths to block lengths, such as {'*kernel': 64}."
        )
    for glob, block in targets.items():
        if not isinstance(glob, str) or isinstance(block, bool) or not isinstance(block, int):
            raise TypeError(
                f"quantized: targets has {glob!r}: {block!r}, expected a glob and a block length."
            )
        if block < 1:
            raise ValueError(
                f"quantized: targets has {glob!r}: {block}, expected a block of at least 1."
            )
    if code not in (known := get_args(Code)):
        raise ValueError(
            f"quantized: code is {code!r}, expected one of {', '.join(map(repr, known))}."
        )
    return QuantizedModel(model, tuple(targets.items()), code)


@dataclasses.dataclass(frozen=True)
class QuantizedModel:
    """A model that stores some parameters as codes; see `quantized`.

    Attributes:
      model: The given model.
      targets: The pairs of a glob on parameter paths and a block length.
      code: The code of the parameters.
    """

    model: Any
    targets: tuple[tuple[str, int], ...]
    code: Code = "int8"

    @property
    def module(self) -> nn.Module:
        """The Linen module."""
        module: nn.Module = interface_of(self.model).module
        return module

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Calls the given model's `init`, and quantizes the chosen parameters."""
        variables: dict[str, Any] = interface_of(self).init(rngs, *args, **kwargs)
        return variables

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the given model's `apply`; `variables` have the form that `init` returns."""
        return interface_of(self).apply(variables, *args, **kwargs)

    def block_of(self, path: str) -> int | None:
        """Returns the block length of a parameter; `None` if no target matches its path."""
        found = {glob: block for glob, block in self.targets if fnmatch.fnmatchcase(path, glob)}
        if len(set(found.values())) > 1:
            raise ValueError(
                f"quantized: parameter {path!r} has more than one block length in targets, "
                f"{found}; expected one. Make a glob narrower."
            )
        return next(iter(found.values()), None)


@register_interface
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QuantizedInterface(WrappingInterface):
    """The interface through which a program calls a `QuantizedModel`.

    Attributes:
      quantized: The `QuantizedModel`, with the block lengths.
    """

    quantized: Any = None

    def __repr__(self) -> str:
        more = "" if self.quantized.code == "int8" else f", code={self.quantized.code!r}"
        return f"quantized({self.base!r}, {dict(self.quantized.targets)}{more})"

    @classmethod
    def wrap(cls, model: Any) -> Self | None:
        """Makes the interface of a `QuantizedModel`; returns `None` for any other model."""
        if not isinstance(model, QuantizedModel):
            return None
        base = interface_of(model.model)
        return cls(base.module, quantized=model, base=base)

    @property
    def decodes_weights(self) -> bool:
        """Whether the model dequantizes weights; always true."""
        return True

    def encodings(self, leaves: Sequence[Leaf]) -> dict[str, Encoding]:
        """Returns the `Encoding` of each quantized parameter, by the parameter's name."""
        by_name = {leaf.name: leaf for leaf in leaves}
        found = {}
        for name, codes in by_name.items():
            plain = name.removesuffix(CODES)
            if name != plain and self.quantized.block_of(plain.partition("/")[2]):
                found[plain] = Encoding.from_leaves(plain, codes, by_name[plain + SCALES])
        return found

    def intercepted(self, interceptor: Callable[..., Any]) -> Self:
        """Returns the same model with one more interceptor of its modules' methods."""
        return dataclasses.replace(self, base=self.base.intercepted(interceptor))

    def annotated(self, path: str, kernel: Any) -> Any:
        """Returns a kernel as the given model's `init` does: boxed if it is split, else bare."""
        return self.base.annotated(path, kernel)

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Initializes the given model's variables, and replaces the chosen parameters."""
        variables = dict(self.called(self.base).init(rngs, *args, **kwargs))
        params = flatten_dict(variables.get("params", {}), sep="/")
        for glob, block in self.quantized.targets:
            if not fnmatch.filter(params, glob):
                near = difflib.get_close_matches(glob, sorted(params), n=3, cutoff=0.0)
                raise ValueError(
                    f"quantized: targets has {glob!r}: {block}, but this glob matches no "
                    f"parameter, expected a path such as {', '.join(map(repr, near))}."
                )
        encoded: dict[str, Any] = {}
        for path, x in params.items():
            block = self.quantized.block_of(path)
            encoded.update(
                {path: x} if block is None else _encoded(path, x, block, self.quantized.code)
            )
        return variables | {"params": unflatten_dict(encoded, sep="/")}

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the given model's `apply` with boxes that dequantize parameters when unboxed."""
        params = flatten_dict(variables.get("params", {}), sep="/")
        for path in [path for path in params if path.endswith(CODES)]:
            plain = path.removesuffix(CODES)
            if plain + SCALES in params and self.quantized.block_of(plain):
                params[plain] = EncodedParameter.from_codes(
                    params.pop(path), params.pop(plain + SCALES)
                )
        variables = {**variables, "params": unflatten_dict(params, sep="/")}
        return self.called(self.base).apply(variables, *args, **kwargs)


class EncodedParameter(ArrayBox, eq=False, repr=False):
    """A box with a quantized parameter, which is dequantized when it is unboxed.

    Attributes:
      value: The pair of codes and scales; both may be boxes.
      names: `None` for each dim; only the number of dims is used.
    """

    @classmethod
    def from_codes(cls, codes: Any, scales: Any) -> "EncodedParameter":
        """Makes the box from codes and scales, which may be boxes or arrays."""
        value = codes.value if is_box(codes) else codes
        return cls((codes, scales), names=(None,) * value.ndim)

    def to_array(self) -> Any:
        """Dequantizes the parameter.

        Communication:
          The communication of unboxing the codes and the scales, such as their all-gathers.
        """
        codes, scales = nn.unbox(self.value)
        with jax.named_scope(DECODE_SCOPE):
            return decode(codes, scales)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "EncodedParameter":
        """Adds a dim to codes and scales, for `nn.scan` and `nn.vmap`."""
        value = nn.meta.add_axis(self.value, index, params)
        return self.replace(value=value, names=(None, *self.names))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "EncodedParameter":
        """Removes a dim from codes and scales, for `nn.scan` and `nn.vmap`."""
        if index % len(self.names) == len(self.names) - 1:
            raise ValueError(
                "quantized: a loop stacks a quantized parameter along its last dim, expected dim "
                "0, because the last dim is divided into blocks. Make the glob narrower, or stack "
                "with variable_axes={'params': 0}."
            )
        value = nn.meta.remove_axis(self.value, index, params)
        return self.replace(value=value, names=self.names[1:])


def _encoded(path: str, box: Any, most: int, code: Code) -> dict[str, Any]:
    """Quantizes a parameter in blocks of at most `most`; boxes the results if `box` is a box."""
    x = box.value if is_box(box) else box
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.ndim < 2 or not x.size:
        raise ValueError(
            f"quantized: targets name parameter {path!r}, which is {x.dtype} of shape {x.shape}, "
            "expected floating-point numbers with two dims or more. Make the glob narrower."
        )
    size = x.shape[-1]
    if code == "nf4" and size % 2:
        raise ValueError(
            f"quantized: targets name parameter {path!r} of shape {x.shape}, expected an even last "
            "dim with code='nf4', because a byte has two numbers. Make the glob narrower."
        )
    block = quantized_block_size(size, most)
    codes, scales = encode(x, block, code)
    if is_box(box):
        names = (*box.names, *(None,) * (x.ndim - len(box.names)))
        codes_box, scales_box = box.replace(value=codes), box.replace(value=scales)
        # In a box of another class, the last dim of the scales has no name, so each device gathers
        # all scales.
        if not isinstance(box, SplitParameter):
            scales_box = scales_box.replace(names=(*names[:-1], None))
        elif names[-1] is not None:
            if size % block:
                raise ValueError(
                    f"quantized: parameter {path!r} of shape {x.shape} is split over {names[-1]!r} "
                    f"along its last dim, and a block length of {block} does not divide its "
                    f"{size} entries; expected equal blocks. Use a block length that divides them."
                )
            scales_box = scales_box.replace(shared=True)
        codes, scales = codes_box, scales_box
    return {path + CODES: codes, path + SCALES: scales}
