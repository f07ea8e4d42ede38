"""Finds what a planned model computes wrongly on shards, before anything runs.

Types say that a value differs between devices, and not along which dimension it is split. So a norm
over split features, or a reshape that puts them behind others, compiles and is wrong. To find it, a
call of the model is traced twice in the same place, on shards and whole, and the two programs are
walked side by side. Outside of the plan's products they consist of the same operations, and each
must give the shard of its whole result, see `plan_operations`. A module of the user's own that the
plan names is looked into: a Row must be linear behind its product.

Invariant: values of the same shape in both programs are equal, and others are shards, because every
operation before them was right.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from manualpar.core.collectives import cast_to_varying, varying_axes
from manualpar.layers.dense import SplitDense
from manualpar.layers.plan_calls import PlannedCalls, StyleOf, overridden, replace_features
from manualpar.layers.plan_operations import WrongOnShardsError, check_operation
from manualpar.layers.plan_styles import Row
from manualpar.purposes import SEQUENCE_SCOPE, TENSOR_SCOPE
from manualpar.user_model.probe import LIBRARIES

_PLANNED_SCOPE = "planned_module"
_OURS = frozenset({_PLANNED_SCOPE, SEQUENCE_SCOPE, TENSOR_SCOPE})
_CASTS = frozenset({"pvary", "pcast"})
# Modules that are known to be right under any style; others are looked into.
_PRODUCTS = (nn.Dense, nn.DenseGeneral, nn.Conv, nn.Embed, SplitDense)
_ROW_SCOPE = "planned_row"
# A sum over devices of what these make is what they make of the sum.
_LINEAR = frozenset(
    """
    add broadcast_in_dim convert_element_type jit name neg reduce_sum reshape squeeze sub transpose
    """.split()  # noqa: SIM905
)


def check_on_shards(
    apply: Callable[..., Any], style_of: StyleOf, calls: PlannedCalls, *args: Any, **kwargs: Any
) -> None:
    """Refuses a call that does not compute on shards what it computes whole.

    It is called within a `shard_map`, with the variables and arguments of one device.

    Args:
      apply: Applies the module, which knows nothing of the plan.
      style_of: The styles by module path.
      calls: The interceptor of calls on shards.
      *args: The arguments of the call, the variables first.
      **kwargs: The other ones.

    Raises:
      ValueError: An operation on a split dimension is wrong or unknown; its module is named.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_array = [isinstance(x, jax.Array | np.ndarray) for x in leaves]

    def trace(intercept: Callable[..., Any]) -> ClosedJaxpr:
        def in_scope(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
            module = context.module
            style = style_of("/".join(module.path)) if module.scope is not None else None
            if style is None:
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
    if devices > 1:
        _compare(trace(calls), trace(_WholeCalls(style_of, axis)), axis, devices, "")


def _with_scoped_parameters(module: nn.Module, function: Callable[..., Any]) -> Any:
    """A method of a module that asks for its parameters in our scope."""

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
    """The interceptor of a model's calls as on one device, although its variables are shards."""

    def __init__(self, style_of: StyleOf, axis: str) -> None:
        self._style_of, self._axis = style_of, axis

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        style = self._style_of("/".join(module.path)) if module.scope is not None else None
        if style is None or "param" in vars(module):
            return next_fun(*args, **kwargs)
        devices = jax.lax.axis_size(self._axis)

        def each(size: int) -> int:
            """As if what is shared stood there once for each device."""
            return max(size, devices) if style.shared else size

        def param(name: str, init_fn: Any, *args: Any, unbox: bool = True, **kwargs: Any) -> Any:
            del unbox
            key = jax.eval_shape(lambda: jax.random.key(0))
            declared = jax.eval_shape(lambda key: nn.unbox(init_fn(key, *args, **kwargs)), key)
            shape = list(declared.shape)
            dim = style.split_dim(name, len(shape))
            if dim is not None:
                shape[dim] = each(shape[dim])
            like = nn.unbox(module.get_variable("params", name))
            zeros = jnp.zeros(shape, like.dtype)
            return cast_to_varying(zeros, varying_axes(like) - {self._axis})

        with overridden(module, param=param), replace_features(module, style, each):
            return next_fun(*args, **kwargs)


def _compare(
    shards: Any, whole: Any, axis: str, devices: int, path: str, is_sum: bool = False
) -> None:
    """Refuses a program on shards that is not the one on whole arrays.

    With `is_sum` its inputs are parts of a sum.
    """
    summed = {path} if is_sum else set[str]()  # The modules whose products are parts of a sum.
    constants: dict[Any, Any] = {}
    jaxprs: list[Jaxpr] = []
    for program in (shards, whole):
        if isinstance(program, ClosedJaxpr):
            constants.update(zip(program.jaxpr.constvars, program.consts, strict=True))
        jaxprs.append(program.jaxpr if isinstance(program, ClosedJaxpr) else program)
        for eqn in jaxprs[-1].eqns:
            if eqn.primitive.name in _CASTS:
                constants[eqn.outvars[0]] = _constant(eqn.invars[0], constants)
    for one, other in _pairs(*map(_foreign, jaxprs)):
        where = "/".join(filter(None, (path, _module(one or other))))
        try:
            if one is None or other is None or one.primitive is not other.primitive:
                names = [eqn.primitive.name if eqn else "nothing" for eqn in (one, other)]
                raise WrongOnShardsError(
                    f"applies {names[0]} to shards and {names[1]} to whole arrays. Have the code "
                    "not depend on sizes of what is split."
                )
            _check_constants(one, other, constants)
            is_product = one.primitive.name in ("dot_general", "conv_general_dilated")
            if is_product and _ROW_SCOPE in str(one.source_info.name_stack).split("/"):
                summed.add(where)
            elif where in summed and not _is_linear(one):
                raise WrongOnShardsError(
                    f"applies {one.primitive.name} to a part of a sum, before the devices' parts "
                    "are added up. Have a Row be a product, and a bias, alone."
                )
            else:
                check_operation(one, other, axis=axis, devices=devices)
        except WrongOnShardsError as error:
            place = f"on shards along {axis!r} module {where!r}{_place(one or other)}"
            raise ValueError(
                f"tensor_parallel: {place} {error} If it is right all the same, say verify=False, "
                "and compare with manualpar.assert_same_as_one_device."
            ) from None
        for pair in zip(_inner(one), _inner(other), strict=True):
            _compare(*pair, axis, devices, where, where in summed)


def _is_linear(eqn: Any) -> bool:
    is_scaling = eqn.primitive.name in ("mul", "div") and any(not x.aval.shape for x in eqn.invars)
    return is_scaling or eqn.primitive.name in _LINEAR


def _pairs(shards: Iterator[Any], whole: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """The operations that correspond to each other; `None` for one that is missing."""
    for one in shards:
        other = next(whole, None)
        # A device's one head needs no broadcasting, as all heads do.
        while other is not None and _is_broadcast(other) and not _is_like(other, one):
            other = next(whole, None)
        yield one, other
    yield from ((None, other) for other in whole if not _is_broadcast(other))


def _is_broadcast(eqn: Any) -> bool:
    return eqn.primitive.name == "broadcast_in_dim"


def _is_like(broadcast: Any, eqn: Any) -> bool:
    dims = "broadcast_dimensions"
    return _is_broadcast(eqn) and eqn.params[dims] == broadcast.params[dims]


def _foreign(jaxpr: Jaxpr) -> Iterator[Any]:
    """The equations that are neither a planned module's nor our own."""
    for eqn in jaxpr.eqns:
        is_ours = not _OURS.isdisjoint(str(eqn.source_info.name_stack).split("/"))
        # `enter` and `leave` look at an index for whether types are checked.
        if not is_ours and eqn.primitive.name not in (*_CASTS, "axis_index"):
            yield eqn


def _inner(eqn: Any) -> list[Any]:
    values = [v if isinstance(v, tuple | list) else (v,) for v in eqn.params.values()]
    return [v for some in values for v in some if isinstance(v, ClosedJaxpr | Jaxpr)]


def _check_constants(one: Any, other: Any, constants: dict[Any, Any]) -> None:
    for variables in zip(one.invars, other.invars, strict=False):
        a, b = (_constant(x, constants) for x in variables)
        if a is not None and b is not None and not np.array_equal(a, b, equal_nan=_has_nan(a)):
            raise WrongOnShardsError(
                f"applies {one.primitive.name} with a constant that is made of the size of what is "
                "split. Make it of the size of the whole, or split another dim."
            )


def _constant(variable: Any, constants: dict[Any, Any]) -> Any:
    """The value of a variable that every run has; `None` if there is none."""
    value = variable.val if isinstance(variable, Literal) else constants.get(variable)
    return None if isinstance(value, jax.core.Tracer) else value


def _has_nan(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact) and np.isnan(x).any())


def _module(eqn: Any) -> str:
    """The path of the module that an equation stands in."""
    parts = str(eqn.source_info.name_stack).split("/")
    return "/".join(part for part in parts if part.isidentifier() and part != _ROW_SCOPE)


def _place(eqn: Any) -> str:
    """The line of the user's code that an equation comes from."""
    folders = [Path(str(sys.modules[name].__file__)).parent for name in LIBRARIES & {*sys.modules}]
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        file = Path(frame.file_name)
        if file.exists() and not any(file.is_relative_to(folder) for folder in folders):
            return f" at {file.name}:{frame.line_num}"
    return ""
