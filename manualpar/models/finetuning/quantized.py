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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from manualpar.core.model.interface import interface_of, register_interface
from manualpar.core.parameters.array_box import ArrayBox
from manualpar.core.parameters.block_quantization import quantized_block_size
from manualpar.core.parameters.sharded_parameter import is_box
from manualpar.core.parameters.split_parameter import SplitParameter
from manualpar.core.state.state_arrays import Leaf
from manualpar.core.tracing.scopes import DECODE_SCOPE
from manualpar.layers import TensorParallel
from manualpar.models.finetuning.encoding import Encoding
from manualpar.models.finetuning.stored_codes import Code, decode, encode
from manualpar.models.finetuning.wrapped_model import WrappingInterface

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
        """Returns the block length of a parameter; `None` if no target matches its path.

        Raises:
          ValueError: Two targets give the parameter different lengths.
        """
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
                found[plain] = Encoding.of(plain, codes, by_name[plain + SCALES])
        return found

    def intercepted(self, interceptor: Callable[..., Any]) -> Self:
        """Returns the same model with one more interceptor of its modules' methods."""
        return dataclasses.replace(self, base=self.base.intercepted(interceptor))

    def annotated(self, path: str, kernel: Any) -> Any:
        """Returns a kernel as the given model's `init` does: boxed if it is split, else bare."""
        return self.base.annotated(path, kernel)

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Initializes the given model's variables, and replaces the chosen parameters.

        Raises:
          ValueError: A target matches no parameter, or one that cannot be quantized.
        """
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
                params[plain] = EncodedParameter.of(params.pop(path), params.pop(plain + SCALES))
        variables = {**variables, "params": unflatten_dict(params, sep="/")}
        return self.called(self.base).apply(variables, *args, **kwargs)


class EncodedParameter(ArrayBox, eq=False):
    """A box with a quantized parameter, which is dequantized when it is unboxed.

    Attributes:
      value: The pair of codes and scales; both may be boxes.
      names: `None` for each dim; only the number of dims is used.
    """

    @classmethod
    def of(cls, codes: Any, scales: Any) -> "EncodedParameter":
        """Makes the box from codes and scales, which may be boxes or arrays."""
        value = codes.value if is_box(codes) else codes
        return cls((codes, scales), names=(None,) * value.ndim)

    def unbox(self, apply_constraint: bool = True) -> Any:
        """Dequantizes the parameter.

        Communication:
          The communication of unboxing the codes and the scales, such as their all-gathers.
        """
        del apply_constraint
        codes, scales = nn.unbox(self.value)
        with jax.named_scope(DECODE_SCOPE):
            return decode(codes, scales)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "EncodedParameter":
        """Adds a dim to codes and scales, for `nn.scan` and `nn.vmap`."""
        value = nn.meta.add_axis(self.value, index, params)
        return self.replace(value=value, names=(None, *self.names))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "EncodedParameter":
        """Removes a dim from codes and scales, for `nn.scan` and `nn.vmap`.

        Raises:
          ValueError: The dim is divided into blocks.
        """
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
