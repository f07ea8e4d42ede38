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
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import FlaxError
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from manualpar.checks.shard_operations import (
    Reason,
    WrongOnShardsError,
    cast_values,
    check_operation,
    check_same_operation,
    inner_programs,
    module_of_equation,
    paired,
    place_of,
    refuse,
    stands_in,
)
from manualpar.core.mesh.axes import is_axis_bound
from manualpar.core.model.interface import register_interface
from manualpar.core.model.linen_model import LinenModel, replace_fields
from manualpar.core.parameters.annotations import SplitParameter
from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.parameters.sharded_parameter import is_box
from manualpar.core.tracing.scopes import CONTEXT_SCOPE, SEQUENCE_SCOPE, TENSOR_SCOPE
from manualpar.core.trees import path_name
from manualpar.layers.boundaries import leave
from manualpar.layers.dense import SplitDense
from manualpar.layers.ring import LAYER_OVERLAPS, LayerOverlap
from manualpar.layers.tensor_parallel.plan_calls import (
    PlannedCalls,
    StyleOf,
    overridden,
    replace_features,
)
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
      gathers_float8: Whether activations that only products in float8 read are gathered as codes.
        A program with `gather_code="float8"` sets it.
    """

    module: nn.Module
    plan: tuple[tuple[str, Style], ...]
    axis: str
    sequence: bool
    overlap: LayerOverlap
    verify: bool
    gathers_float8: bool = False

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
        options["gathers_float8"] = self.gathers_float8
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
        planned = dataclasses.replace(planned, gathers_float8=self.gathers_float8)
        return planned.call(super().apply, variables, *args, **kwargs)


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


# -------------------------------------------------------------------------------------------------
# Finds operations of a model that are wrong on shards, before anything runs.
#
# JAX's types say that an array differs between devices, but not along which dim it is split. So a
# norm over split features, or a reshape that merges them behind another dim, compiles and is
# wrong. To find such an operation, a call of the model is traced twice in the same place: on
# shards and on full arrays. The two programs are compared equation by equation. Outside of the
# products of the modules in the plan, both programs have the same operations. On shards each
# operation must return the shard of its result on full arrays, see
# `manualpar.checks.shard_operations`. If the plan names a module that flax did not write, the
# module's code is checked too: after its product a `Row` may contain only linear operations,
# because the devices' results are summed afterwards.
#
# Invariant: arrays of the same shape in both programs are equal, and an array with another shape
# on shards is a shard of the full array, because all earlier operations were right.


_PLANNED_SCOPE = "planned_module"
# Attention of this package runs in the scope of a context axis. It is right on shards, because it
# computes each head separately.
_TRUSTED_SCOPES = frozenset({_PLANNED_SCOPE, CONTEXT_SCOPE, SEQUENCE_SCOPE, TENSOR_SCOPE})
# Modules whose code is known to be right with any style. The code of other modules is checked.
_PRODUCTS = (nn.Dense, nn.DenseGeneral, nn.Conv, nn.Embed, SplitDense)
_ROW_SCOPE = "planned_row"
_SCOPES = frozenset({_ROW_SCOPE})
# Linear operations. If each device applies them to its term of a sum, the results sum to the right
# array.
_LINEAR = frozenset(
    """
    add broadcast_in_dim convert_element_type jit name neg reduce_sum reshape squeeze sub transpose
    """.split()  # noqa: SIM905
)
_WHOLE_SEQUENCES = {"sequence": False, "sequence_dim": None}
_WHOLE_SIZE = (
    "Put it behind a Row; and take sizes and positions from an array that is not split, such as "
    "the tokens"
)
_MENDS: Mapping[Reason, str] = {
    "axis": "Name the axis of the plan",
    "constant": "Compute it from the size of an array that is not split, or split another dim",
    "convolution": "Give the convolution a style, Column() or Row()",
    "examples": "Gather examples over axes that split them",
    "loop": "Scan over dims that are not split",
    "mixed": "Split both, or neither",
    "pad": "Pad dims that are not split",
    "parts": "The parts are on different devices. Have one product for each part, such as query, "
    "key and value, or split each head into its parts, as in reshape(..., num_heads, 3 * "
    "head_size); or leave the modules before and behind it out of the plan",
    "product": "Give the module that contracts it the style Row",
    "program": "Change the code so that it does not depend on sizes of split arrays",
    "random": "Let nn.Dropout draw them",
    "reduction": "A norm, a mean or a softmax needs all of it: put it behind a Row",
    "reshape": "A device's part is not contiguous in it. Keep the split dim in front of the dims "
    "that it is merged with: heads before their features, as in reshape(..., -1, head_size); or "
    "give the module that says how many heads there are the style PerDevice('num_heads')",
    "size": _WHOLE_SIZE,
    "sum": "A Row may contain only a product and a bias",
    "two dims": "Only one dim may be split: put the other one behind a Row, which makes it whole",
    "unknown": "This check does not know whether that is right",
}


def check_on_shards(
    apply: Callable[..., Any], style_of: StyleOf, calls: PlannedCalls, *args: Any, **kwargs: Any
) -> None:
    """Refuses a call of a module that computes a different result on shards than on whole arrays.

    Call this function within a `shard_map`, with the variables and arguments of one device.

    Args:
      apply: Applies the model without the plan.
      style_of: Returns the style of the module at a path.
      *args: The arguments of the call, the variables first.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_array = [isinstance(x, jax.Array | np.ndarray) for x in leaves]

    def trace(intercept: Callable[..., Any]) -> ClosedJaxpr:
        def in_scope(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
            module = context.module
            style = style_of("/".join(module.path)) if module.scope is not None else None
            if style is None or isinstance(style, PerDevice):
                return intercept(next_fun, args, kwargs, context)
            if isinstance(module, _PRODUCTS):
                with jax.named_scope(_PLANNED_SCOPE):
                    return intercept(next_fun, args, kwargs, context)
            next_fun = _with_scoped_parameters(module, next_fun)
            with jax.named_scope(_ROW_SCOPE) if isinstance(style, Row) else nullcontext():
                return intercept(next_fun, args, kwargs, context)

        def call(arrays: list[Any]) -> Any:
            rest = iter(arrays)
            filled = [next(rest) if is_it else x for is_it, x in zip(is_array, leaves, strict=True)]
            args, kwargs = jax.tree.unflatten(structure, filled)
            with nn.intercept_methods(in_scope):
                return apply(*args, **kwargs)

        return jax.make_jaxpr(call)(list(itertools.compress(leaves, is_array)))

    axis, devices = calls.axis, jax.lax.axis_size(calls.axis)
    if devices == 1:
        return
    shards = trace(calls)
    try:
        whole = trace(_WholeCalls(style_of, axis))
    except (FlaxError, TypeError, ValueError) as error:
        raise ValueError(
            "tensor_parallel: verify=True compares a trace of the model on shards with a trace on "
            f"full arrays, and the trace on full arrays fails: {error}\nA model that calls enter, "
            "leave or split_lookup with a sequence_dim cannot be compared: pass verify=False, and "
            "compare with manualpar.assert_same_as_one_device."
        ) from error
    _compare(shards, whole, axis, devices, "")


def _with_scoped_parameters(module: nn.Module, function: Callable[..., Any]) -> Any:
    """Wraps a method so that its module's parameters are made in the scope `_PLANNED_SCOPE`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        param = vars(module)["param"]

        def scoped_param(*args: Any, **kwargs: Any) -> Any:
            with jax.named_scope(_PLANNED_SCOPE):
                return param(*args, **kwargs)

        vars(module)["param"] = scoped_param
        try:
            return function(*args, **kwargs)
        finally:
            vars(module)["param"] = param

    return call


class _WholeCalls:
    """Intercepts calls so that they compute with full shapes, although the variables are shards."""

    def __init__(self, style_of: StyleOf, axis: str) -> None:
        self._style_of, self._axis = style_of, axis

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        style = self._style_of("/".join(module.path)) if module.scope is not None else None
        if style is None or isinstance(style, PerDevice):
            with replace_fields(module, _without_sequence(module)):
                return next_fun(*args, **kwargs)
        if "param" in vars(module):  # A method of the module calls another method of the module.
            return next_fun(*args, **kwargs)
        devices = jax.lax.axis_size(self._axis)

        def unshared_size(size: int) -> int:
            """Returns the size that a dim has if each device has its own copy of a shared entry."""
            return max(size, devices) if style.shared else size

        def param(name: str, init_fn: Any, *args: Any, unbox: bool = True, **kwargs: Any) -> Any:
            del unbox
            key = jax.eval_shape(lambda: jax.random.key(0))
            declared = jax.eval_shape(lambda key: nn.unbox(init_fn(key, *args, **kwargs)), key)
            shape = list(declared.shape)
            dim = style.split_dim(name, len(shape))
            if dim is not None:
                shape[dim] = unshared_size(shape[dim])
            like = nn.unbox(module.get_variable("params", name))
            if isinstance(style, Row) and name == "bias":  # Zero, as on shards.
                zeros = jnp.zeros(shape, like.dtype)
                return cast_to_varying(zeros, varying_axes(like) - {self._axis})
            # The array is computed from the shard, so that nn.scan moves the same operations out of
            # a loop in both programs.
            entry = like[(0,) * like.ndim]
            is_varying = self._axis in varying_axes(entry)
            return jnp.broadcast_to(leave(entry, self._axis) if is_varying else entry, shape)

        with overridden(module, param=param), replace_features(module, style, unshared_size):
            return next_fun(*args, **kwargs)


def _without_sequence(module: nn.Module) -> dict[str, Any]:
    """Returns the fields to replace so that a layer of this package splits no sequence."""
    if type(module).__module__.split(".")[0] != __name__.split(".")[0]:
        return {}
    names = {field.name for field in dataclasses.fields(module)}
    values: dict[str, Any] = {name: x for name, x in _WHOLE_SEQUENCES.items() if name in names}
    split: Any = getattr(module, "split", None)
    if hasattr(split, "sequence_parallel"):  # The module is a Transformer.
        values["split"] = dataclasses.replace(split, sequence_parallel=False, overlap="none")
    return values


def _compare(
    shards: Any, whole: Any, axis: str, devices: int, path: str, is_sum: bool = False
) -> None:
    """Refuses a program on shards in which an operation is wrong, see the module.

    `path` is the path of the module around the programs. With `is_sum` the inputs of the program on
    shards are terms of a sum.
    """
    summed = {path} if is_sum else set[str]()  # The modules whose products are terms of a sum.
    constants: dict[Any, Any] = {}
    casts: dict[Any, Any] = {}
    jaxprs: list[Jaxpr] = []
    for program in (shards, whole):
        if isinstance(program, ClosedJaxpr):
            constants.update(zip(program.jaxpr.constvars, program.consts, strict=True))
        jaxprs.append(program.jaxpr if isinstance(program, ClosedJaxpr) else program)
        casts |= cast_values(jaxprs[-1])
    constants |= {cast: _constant(value, constants) for cast, value in casts.items()}
    for one, other in paired(*(_checked_equations(jaxpr, casts) for jaxpr in jaxprs)):
        where = "/".join(filter(None, (path, module_of_equation(one or other, _SCOPES))))
        try:
            check_same_operation(one, other)
            _check_constants(one, other, constants)
            is_product = one.primitive.name in ("dot_general", "conv_general_dilated")
            if is_product and stands_in(one, _SCOPES):
                summed.add(where)
            elif where in summed and not _is_linear(one):
                action = f"applies {one.primitive.name} to a term of a sum"
                refuse(f"{action}, before the devices' terms are added up", "sum")
            else:
                check_operation(one, other, axis=axis, devices=devices)
        except WrongOnShardsError as error:
            place = f"on shards along {axis!r} module {where!r}{place_of(one or other)}"
            raise ValueError(
                f"tensor_parallel: {place} {error.mended(_MENDS)} If the code is right, pass "
                "verify=False, and compare with manualpar.assert_same_as_one_device."
            ) from None
        for pair in zip(inner_programs(one), inner_programs(other), strict=True):
            _compare(*pair, axis, devices, where, where in summed)


def _is_linear(eqn: Any) -> bool:
    is_scaling = eqn.primitive.name in ("mul", "div") and any(not x.aval.shape for x in eqn.invars)
    return is_scaling or eqn.primitive.name in _LINEAR


def _checked_equations(jaxpr: Jaxpr, casts: Collection[Any]) -> Iterator[Any]:
    """Yields the equations that come neither from a planned module nor from this package.

    `casts` are the results of casts, which are not yielded.
    """
    for eqn in jaxpr.eqns:
        is_trusted = stands_in(eqn, _TRUSTED_SCOPES)
        # `enter` and `leave` use an axis_index to find out whether types are checked.
        is_cast = any(x in casts for x in eqn.outvars)
        if not (is_trusted or is_cast or eqn.primitive.name == "axis_index"):
            yield eqn


def _check_constants(one: Any, other: Any, constants: dict[Any, Any]) -> None:
    for variables in zip(one.invars, other.invars, strict=False):
        a, b = (_constant(x, constants) for x in variables)
        if a is not None and b is not None and not np.array_equal(a, b, equal_nan=_has_nan(a)):
            action = f"applies {one.primitive.name} with a constant"
            refuse(f"{action} that is computed from the size of a split array", "constant")


def _constant(variable: Any, constants: dict[Any, Any]) -> Any:
    """Returns the value of a constant; `None` if a variable is not constant."""
    value = variable.val if isinstance(variable, Literal) else constants.get(variable)
    return None if isinstance(value, jax.core.Tracer) else value


def _has_nan(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact) and np.isnan(x).any())
