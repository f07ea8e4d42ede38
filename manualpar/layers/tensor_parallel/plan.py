"""Tensor parallelism for a Linen model that is written for one device.

A *plan* says which modules compute with shards of their parameters. Its keys are globs on module
paths and its values are styles. On each device a `Column` module computes some of its outputs; a
`Row` module multiplies some of its inputs, and the products are summed over devices; a `Vocab`
module is an embedding with some of the rows. A module whose code uses the number of heads has the
style `PerDevice`. As in Megatron-LM (Shoeybi et al., https://arxiv.org/abs/1909.08053), a `Row`
follows a `Column`, and the devices share the operations between the two, such as the heads of
attention.

```python
model = tensor_parallel(
    model,
    {
        "embed": Vocab(),
        "*/attention/query": Column(-2),
        "*/attention/key": Column(-2),
        "*/attention/value": Column(-2),
        "*/attention/out": Row(-3),
        "*/up": Column(),
        "*/down": Row(),
    },
)
program = manualpar.fsdp(model, tx, loss_fn, mesh=make_mesh({"data": 2, "model": 4}), batch=batch)
```

Invariants: outside of a `shard_map` that binds the axis, the model computes the same as the given
model, and the initial parameters are the same. JAX's types say whether an array differs between
devices, but not along which dim it is split. So a mean over split features compiles and is wrong;
`plan_check` finds such operations.
"""

import dataclasses
import difflib
import fnmatch
from collections.abc import Callable, Mapping
from typing import Any, Self

import flax.linen as nn
import jax
from flax import nnx

from manualpar.core.mesh.axes import is_axis_bound
from manualpar.core.model.interface import register_interface
from manualpar.core.model.linen.linen_model import LinenModel
from manualpar.core.parameters.sharded_parameter import is_box
from manualpar.core.parameters.split_parameter import SplitParameter
from manualpar.core.trees import path_name
from manualpar.layers.ring_chunks import LAYER_OVERLAPS, LayerOverlap
from manualpar.layers.tensor_parallel.plan_calls import PlannedCalls
from manualpar.layers.tensor_parallel.plan_check import check_on_shards
from manualpar.layers.tensor_parallel.plan_styles import (
    Column,
    PerDevice,
    Row,
    Style,
    TensorParallelPlan,
    Vocab,
)


def tensor_parallel(
    model: nn.Module,
    plan: TensorParallelPlan,
    axis: str = "model",
    *,
    sequence: bool = False,
    overlap: LayerOverlap = "none",
    verify: bool = True,
) -> "TensorParallel":
    """Makes a Linen model compute with shards of its parameters, by a plan.

    Args:
      model: The model. It is not changed.
      plan: The style of the modules for each glob on module paths, such as `"*/attention/query"`.
        `*` stands for any characters, slashes too.
      axis: The mesh axis that the parameters are split over.
      sequence: Whether activations between the layers, `[B, S, D]`, are split over `axis` along
        the sequence, dim -2 (Korthikanti et al., https://arxiv.org/abs/2205.05198).
      overlap: `"ring"` (only with `sequence`): the products of `nn.Dense` and `nn.DenseGeneral`
        over the input's last dims overlap with their communication, see `manualpar.layers.ring`.
      verify: Whether building a program refuses operations of the model that are wrong on shards,
        such as a norm over split features; see `plan_check`. The loss function is not checked this
        way, because JAX's types show its errors.

    Returns:
      The model for any builder of a program. Outside of a `shard_map` that binds `axis`, the `init`
      and `apply` of the returned model compute the same as the `init` and `apply` of the given
      model.

    Raises:
      TypeError: An argument is of the wrong kind.
      ValueError: `overlap` is invalid; or, when a program is built, the plan does not fit the model
        or its code (the message names the module).

    Communication:
      In training, one all-reduce of the activations over `axis` for every input that `Column`s
      share, and one for every `Row`: 4 in a layer of attention and MLP. With `sequence` an
      all-gather and a reduce-scatter replace each all-reduce; together they send the same bytes.
    """
    if isinstance(model, nnx.Module):
        raise TypeError(
            f"tensor_parallel: model is the nnx.Module {type(model).__name__}, expected one of "
            "flax.linen: calls of NNX modules cannot be intercepted. Split its parameters where "
            "they are made, with nnx.with_partitioning(init, names, split=True), and call "
            "manualpar.layers.enter and leave around their products."
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"tensor_parallel: model is {model!r}, expected an instance of a flax.linen.Module."
        )
    styles = (Column, Row, Vocab, PerDevice)
    if not isinstance(plan, Mapping) or not all(
        isinstance(key, str) and isinstance(style, styles) for key, style in plan.items()
    ):
        raise TypeError(
            f"tensor_parallel: plan is {plan!r}, expected styles by globs on module paths, such as "
            "{'*/up': Column(), '*/down': Row()}."
        )
    if not isinstance(axis, str):
        raise TypeError(f"tensor_parallel: axis is {axis!r}, expected the name of a mesh axis.")
    if overlap not in LAYER_OVERLAPS or (overlap == "ring" and not sequence):
        raise ValueError(
            f"tensor_parallel: overlap={overlap!r} with sequence={sequence}, expected 'none', "
            "or 'ring' with sequence=True: only a sequence that is split can be sent in parts."
        )
    return TensorParallel(model, tuple(plan.items()), axis, sequence, overlap, verify)


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """A Linen model and the plan of its tensor parallelism; see `tensor_parallel`.

    Attributes:
      module: The given model.
      plan: The pairs of a glob on module paths and a style.
      axis: The mesh axis.
      sequence: Whether activations between layers are split along the sequence.
      overlap: Whether products overlap with their communication, see `tensor_parallel`.
      verify: Whether building a program checks the operations of the model on shards.
    """

    module: nn.Module
    plan: tuple[tuple[str, Style], ...]
    axis: str
    sequence: bool
    overlap: LayerOverlap
    verify: bool

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the `init` of `module`."""
        return self.module.init(rngs, *args, **kwargs)

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the `apply` of `module`, on shards if the axis is bound."""
        return self.call(self.module.apply, variables, *args, **kwargs)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function that applies the module, on shards if the axis is bound."""
        if not is_axis_bound(self.axis):
            return function(*args, **kwargs)
        with nn.intercept_methods(self.calls()):
            return function(*args, **kwargs)

    def calls(self) -> PlannedCalls:
        """Makes the interceptor (see `nn.intercept_methods`) for one application on shards."""
        options: Any = {"sequence": self.sequence, "overlap": self.overlap}
        return PlannedCalls(self.style_of, self.axis, **options)

    def style_of(self, path: str) -> Style | None:
        """Looks up the style of the module at a path; `None` if the plan does not name it.

        Raises:
          ValueError: Two keys of the plan give the module different styles.
        """
        found = {key: style for key, style in self.plan if fnmatch.fnmatchcase(path, key)}
        if len(set(found.values())) > 1:
            raise ValueError(
                f"tensor_parallel: module {path!r} has more than one style in the plan, {found}; "
                "expected one. Make a glob of the plan narrower."
            )
        return next(iter(found.values()), None)


@register_interface
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TensorParallelInterface(LinenModel):
    """How a program calls a `TensorParallel` model.

    With `is_checked`, each call on shards is checked before it runs.
    """

    planned: Any = None
    is_checked: bool = False

    def __repr__(self) -> str:
        return repr(self.planned)

    @classmethod
    def wrap(cls, model: Any) -> Self | None:
        """Wraps a planned model; returns `None` for any other model."""
        return cls(model.module, planned=model) if isinstance(model, TensorParallel) else None

    @property
    def apply_fn(self) -> Callable[..., Any]:
        """The planned model's `apply`, see `LinenModel.apply_fn`."""
        apply: Callable[..., Any] = self.apply if self.axis_aliases.axes else self.planned.apply
        return apply

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Calls `module.init`, and boxes the parameters that the plan splits."""
        variables = super().init(rngs, *args, **kwargs)
        return variables | {"params": _split_params(self.planned, variables.get("params", {}))}

    def annotated(self, path: str, kernel: Any) -> Any:
        """Boxes the kernel of the module at a path in a `SplitParameter` if the plan splits it."""
        return _split_param(self.planned, f"{path}/kernel", kernel)

    def check(self, trace: Callable[[Any], None]) -> None:
        """Checks every call of the model in a loss: `trace(model)` traces the loss with `model`."""
        if self.planned.verify:
            trace(dataclasses.replace(self, is_checked=True))

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls `LinenModel.apply`, on shards if the axis is bound.

        With `is_checked` it also checks the call on shards.
        """
        planned = self.planned
        if self.is_checked and is_axis_bound(planned.axis):
            calls = dataclasses.replace(planned, overlap="none").calls()
            check_on_shards(super().apply, planned.style_of, calls, variables, *args, **kwargs)
        return self.planned.call(super().apply, variables, *args, **kwargs)


def _split_params(planned: TensorParallel, params: Any) -> Any:
    modules: set[str] = set()

    def box(path: Any, x: Any) -> Any:
        modules.add(path_name(path).rpartition("/")[0])
        return x if isinstance(x, PlannedParameter) else _split_param(planned, path_name(path), x)

    boxed = jax.tree_util.tree_map_with_path(box, params, is_leaf=is_box)
    parents = {
        "/".join(parts[:n])
        for parts in (m.split("/") for m in modules)
        for n in range(len(parts) + 1)
    }
    for key, style in planned.plan:
        candidates, kind = modules, "module that has parameters of its own"
        if isinstance(style, PerDevice):
            candidates, kind = parents, "module"
        if not fnmatch.filter(candidates, key):
            near = difflib.get_close_matches(key, sorted(candidates), n=3, cutoff=0.0)
            raise ValueError(
                f"tensor_parallel: the plan's key {key!r} ({style}) matches no {kind}, expected "
                f"one, such as {', '.join(map(repr, near))}."
            )
    return boxed


def _split_param(planned: TensorParallel, path: str, x: Any) -> Any:
    """Boxes a parameter if the plan splits it, otherwise returns its value."""
    module, _, name = path.rpartition("/")
    style = planned.style_of(module)
    if style is None or isinstance(style, PerDevice):
        return x
    value = x
    if isinstance(x, nn.LogicallyPartitioned):  # The plan replaces the rules of logical names.
        value = x.value
    elif is_box(x):
        raise ValueError(
            f"tensor_parallel: parameter {path!r} is annotated already, with names {x.names}, and "
            f"the plan gives its module {style}; expected one of the two. Take the annotation "
            "away, or leave the module out of the plan."
        )
    dim = style.split_dim(name, value.ndim)
    if dim is None and isinstance(style, Row) and name != "bias":
        raise ValueError(
            f"tensor_parallel: parameter {path!r} has {value.ndim} dims, and the plan gives its "
            f"module {style}; expected at least {-style.dim} dims. A parameter that is added to "
            "the sum must be called 'bias'."
        )
    if dim is None:
        return value
    names: list[str | None] = [None] * value.ndim
    names[dim] = planned.axis
    return PlannedParameter(value, tuple(names), shared=style.shared)


class PlannedParameter(SplitParameter):
    """The box of a parameter that a plan splits."""
