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
from collections.abc import Callable, Mapping
from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.scope import LazyRng
from flax.traverse_util import flatten_dict, unflatten_dict

from manualpar.core.model.interface import ModelInterface, interface_of, register_interface
from manualpar.core.model.linen.linen_model import LinenModel
from manualpar.core.parameters.sharded_parameter import is_box
from manualpar.layers import TensorParallel
from manualpar.models.finetuning.adapted_parameter import (
    DOWN,
    UP,
    PlainShape,
    adapt_parameters,
    make_adapter,
    plain_shapes,
)
from manualpar.models.finetuning.low_rank import ADAPTED_LAYERS, add_low_rank, input_dims
from manualpar.models.finetuning.quantized import QuantizedModel
from manualpar.models.finetuning.wrapped_model import WrappingInterface

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
        """Returns the rank for the module at a path; `None` if no target matches the path.

        Raises:
          ValueError: Two targets give the module different ranks.
        """
        return self._rank("module", path, _matches)

    def rank_of_parameter(self, path: str) -> int | None:
        """Returns the rank for a parameter that is no kernel; `None` if no target names it.

        Raises:
          ValueError: Two targets give the parameter different ranks.
        """
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

    def check(self, trace: Callable[[ModelInterface], None]) -> None:
        """Checks only the given model: adapters compute correctly with shards and need no check."""
        self.base.check(lambda base: trace(self.called(base)))

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Initializes the variables of the given model, and adds adapters to the parameters.

        Raises:
          ValueError: A target matches no layer, or a layer that cannot have an adapter.
        """
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
        base = self.called(self.base)
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
