"""Intercepts the module calls of a model with a tensor parallelism plan, if it runs on shards.

While a module of the plan runs, the interceptor changes what the module's code assumes about the
full arrays: the shapes of its parameters, and the features to which `nn.DenseGeneral` reshapes. It
calls `enter` on the inputs of a `Column`, and `leave` on the result of a `Row`.
"""

import contextlib
import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import ScopeParamShapeError
from jax.extend.core import get_opaque_trace_state

from manualpar.core.model.linen_model import replace_fields
from manualpar.core.parameters.collectives import varying_axes
from manualpar.core.tracing.scopes import SEQUENCE_SCOPE, TENSOR_SCOPE
from manualpar.layers.boundaries import enter, has_lost_types, leave
from manualpar.layers.low_precision import float8_dot_general
from manualpar.layers.ring import (
    LayerOverlap,
    enter_ring,
    gather_matmul,
    matmul_scatter,
    whole_sequence,
)
from manualpar.layers.tensor_parallel.plan_styles import Column, PerDevice, Row, Style, Vocab
from manualpar.layers.vocabulary import split_lookup

_enter_float8 = functools.partial(enter, float8=True)
# The style of the module at a path; `None` if the plan does not name it.
StyleOf = Callable[[str], Style | None]


class PlannedCalls:
    """Intercepts the module calls in one application of a model with a plan."""

    def __init__(
        self,
        style_of: StyleOf,
        axis: str,
        *,
        sequence: bool,
        overlap: LayerOverlap,
        gathers_float8: bool = False,
    ) -> None:
        self._style_of, self.axis = style_of, axis
        self._sequence, self._overlap = sequence, overlap
        self._gathers_float8 = gathers_float8
        # Cache: (input, entering function, trace, entered input).
        self._entered: list[tuple[Any, Any, Any, Any]] = []

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Calls a module's method, see `nn.intercept_methods`."""
        module, method = context.module, context.method_name
        if module.scope is None:
            return next_fun(*args, **kwargs)
        path = "/".join(module.path)
        style = self._style_of(path)
        # A method of nn.remat(Layer) or nn.scan(Layer) only calls the same method of a Layer.
        is_lifted = type(module).__module__ == "flax.linen.transforms"
        is_within = method == "setup" or (is_lifted and method in vars(type(module)))
        if isinstance(style, PerDevice) and not is_within:
            return self._call_with_local_sizes(module, path, style, next_fun, args, kwargs)
        forget_shares(module)
        kind = type(module).__name__
        if style is None or isinstance(style, PerDevice):
            where = f"tensor_parallel: module {path or kind!r} ({kind})"
            return self._call_unplanned(where, module, None, next_fun, args, kwargs)
        if "param" in vars(module):  # A method of the module calls another method of the module.
            return next_fun(*args, **kwargs)
        with self._on_shards(module, style):
            if is_within:
                return next_fun(*args, **kwargs)
            where = f"tensor_parallel: module {path!r} ({style})"
            run = {Column: self._column, Row: self._row, Vocab: self._vocab}[type(style)]
            try:
                return run(where, module, method, next_fun, args, kwargs)
            except TypeError as error:
                raise ValueError(
                    f"{where} cannot compute with its shard: {error} Check the dim of its style, "
                    "and its input: a Row needs split features, and a Column needs all features."
                ) from error

    def _column(
        self, where: str, module: nn.Module, method: str, next_fun: Any, args: Any, kwargs: Any
    ) -> Any:
        del method
        x = [*args, *kwargs.values()][0]
        if not self._overlaps(module, x):
            how = _enter_float8 if self._is_float8(module, x) else enter

            def entered(x: Any) -> Any:
                return self._enter(where, x, how) if _is_activation(x) else x

            args, kwargs = jax.tree.map(entered, (args, kwargs))
            return next_fun(*args, **kwargs)

        def dot_general(x: Any, kernel: Any, dims: Any, **_: Any) -> Any:
            parts = jax.tree.map(lambda part: part.astype(x.dtype), chunks)
            return whole_sequence(gather_matmul(parts, kernel, len(dims[0][0])))

        chunks = self._enter(where, x, enter_ring)
        with replace_fields(module, {"dot_general": dot_general}):
            return next_fun(x)

    def _row(
        self, where: str, module: nn.Module, method: str, next_fun: Any, args: Any, kwargs: Any
    ) -> Any:
        del method
        for x in jax.tree.leaves((args, kwargs)):
            if _is_activation(x) and self._is_whole(x):
                raise ValueError(
                    f"{where} has an input of shape {x.shape} that is the same on every "
                    "device, expected an input whose features are split. Give the module that "
                    "computes this input the style Column."
                )
        x = [*args, *kwargs.values()][0]
        if self._overlaps(module, x):

            def dot_general(x: Any, kernel: Any, dims: Any, **_: Any) -> Any:
                contracted = len(dims[0][0])
                return matmul_scatter(x, kernel, self.axis, x.ndim - contracted - 1, contracted)

            with replace_fields(module, {"dot_general": dot_general}):
                y = next_fun(x)
        else:
            y = next_fun(*args, **kwargs)
            y = leave(y, self.axis, self._sequence_dim(y), float8=self._is_float8(module, y))
        if not module.has_variable("params", "bias"):
            return y
        bias = nn.unbox(module.get_variable("params", "bias"))
        if bias.shape != y.shape[y.ndim - bias.ndim :]:
            raise ValueError(
                f"{where} has a bias of shape {bias.shape} and a result of shape {y.shape}; "
                "expected a bias with the last dims of the result, because the bias is added after "
                "the sum over devices."
            )
        with jax.named_scope(SEQUENCE_SCOPE if self._sequence else TENSOR_SCOPE):
            return y + jnp.expand_dims(bias.astype(y.dtype), range(y.ndim - bias.ndim))

    def _vocab(
        self, where: str, module: nn.Module, method: str, next_fun: Any, args: Any, kwargs: Any
    ) -> Any:
        if not isinstance(module, nn.Embed):
            kind = type(module).__name__
            raise ValueError(f"{where} is a {kind}, expected an nn.Embed. Give it another style.")
        if method == "attend":
            return self._column(where, module, method, next_fun, args, kwargs)
        if type(module).__call__ is not nn.Embed.__call__:
            kind = type(module).__name__
            raise ValueError(f"{where}: {kind} has a __call__ of its own, expected nn.Embed's.")
        tokens = [*args, *kwargs.values()][0]
        # A negative token counts from the end, as on one device.
        tokens = jnp.where(tokens < 0, tokens + module.num_embeddings, tokens)
        tables = module.promote_dtype(module.embedding, dtype=module.dtype, inexact=False)
        table = cast(jax.Array, tables[0])
        return split_lookup(table, tokens, self.axis, tokens.ndim - 1 if self._sequence else None)

    def _overlaps(self, module: nn.Module, x: Any) -> bool:
        """Returns whether a module's product overlaps with its communication.

        This is possible only for flax's own products over the last dims.
        """
        if self._overlap == "none" or not isinstance(module, nn.Dense | nn.DenseGeneral):
            return False
        overrides = (module.precision, module.dot_general, module.dot_general_cls)
        dims = getattr(module, "axis", -1)
        dims = [dims] if isinstance(dims, int) else list(dims)
        is_last = [dim % x.ndim for dim in dims] == list(range(x.ndim - len(dims), x.ndim))
        return is_last and overrides == (None,) * 3 and not getattr(module, "batch_dims", ())

    def _is_float8(self, module: nn.Module, x: Any) -> bool:
        """Returns whether float8 codes may be gathered, because only a product in float8 reads `x`.

        A product that casts `x` to a narrower dtype would find other codes.
        """
        if not self._gathers_float8 or not isinstance(module, nn.Dense | nn.DenseGeneral):
            return False
        dtype = module.dtype or x.dtype
        is_float8 = module.dot_general is float8_dot_general and module.dot_general_cls is None
        return is_float8 and jnp.promote_types(x.dtype, dtype) == dtype

    def _enter(self, where: str, x: jax.Array, how: Callable[..., Any]) -> Any:
        """Calls `how` (such as `enter_ring`) on `x`; only once if several modules get `x`."""
        trace = get_opaque_trace_state(convention="flax")
        for before, how_before, trace_before, entered in self._entered:
            if before is not x or trace_before != trace:
                continue
            if how_before is how:
                return entered
            if {how, how_before} == {enter, _enter_float8}:
                raise ValueError(
                    f"{where} has an input of shape {x.shape} that another module reads too, and "
                    "only one of their products is in float8, expected both or none with "
                    "gather_code='float8': with two gathers, the gradients would be summed "
                    "otherwise. Give both dot_general=float8_dot_general, or leave the code out."
                )
        if not self._sequence and self.axis in varying_axes(x):
            raise ValueError(
                f"{where} has an input of shape {x.shape} that differs between devices along "
                f"{self.axis!r}, expected an input that is the same on all devices. Its features "
                "are split, or it is a term of a sum. Give the module that computes this input the "
                "style Row."
            )
        if self._sequence and self._is_whole(x):
            raise ValueError(
                f"{where} has an input of shape {x.shape} that is the same on all devices along "
                f"{self.axis!r}, expected one that is split along its sequence, because "
                "sequence=True. Give the embedding the style Vocab, whose result is split."
            )
        entered = how(x, self.axis, self._sequence_dim(x))
        self._entered.append((x, how, trace, entered))
        return entered

    def _is_whole(self, x: jax.Array) -> bool:
        return self.axis not in varying_axes(x) and not has_lost_types(x, (self.axis,))

    def _sequence_dim(self, x: jax.Array) -> int | None:
        return x.ndim - 2 if self._sequence else None

    @contextlib.contextmanager
    def _on_shards(self, module: nn.Module, style: Style) -> Iterator[None]:
        """Makes a module accept shards as its parameters, within a `with` block."""
        size = jax.lax.axis_size(self.axis)
        original = module.param

        def per_device(number: int) -> int:
            return 1 if style.shared and number < size else number // size

        def param(name: str, init_fn: Any, *args: Any, **kwargs: Any) -> Any:
            if not module.has_variable("params", name):
                return original(name, init_fn, *args, **kwargs)
            value = jax.eval_shape(nn.unbox, module.get_variable("params", name))

            def shard_init(key: Any, *args: Any, **kwargs: Any) -> Any:
                declared = nn.unbox(init_fn(key, *args, **kwargs))
                shape = list(declared.shape)
                dim = style.split_dim(name, len(shape))
                if dim is not None and declared.shape != value.shape:
                    shape[dim] = per_device(shape[dim])
                return jnp.zeros(shape, declared.dtype)

            x = original(name, shard_init, *args, **kwargs)
            # The bias of a Row is added after the sum.
            return jnp.zeros_like(x) if isinstance(style, Row) and name == "bias" else x

        with overridden(module, param=param), replace_features(module, style, per_device):
            yield

    def _call_with_local_sizes(
        self, module: nn.Module, path: str, style: PerDevice, next_fun: Any, args: Any, kwargs: Any
    ) -> Any:
        where = f"tensor_parallel: module {path!r} ({style})"
        with local_sizes(where, module, style, jax.lax.axis_size(self.axis)):
            return self._call_unplanned(where, module, style, next_fun, args, kwargs)

    def _call_unplanned(
        self,
        where: str,
        module: nn.Module,
        style: Style | None,
        next_fun: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        try:
            return next_fun(*args, **kwargs)
        except ScopeParamShapeError as error:
            raise ValueError(
                f"{where} gets only a part of the features that it expects, and the plan does not "
                f"name it: {error} If it contracts these features, give it the style Row. "
                "Otherwise put a Row before it."
            ) from error
        except (ArithmeticError, AssertionError, IndexError, TypeError, ValueError) as error:
            if _is_from_this_package(error):
                raise
            message = str(error).partition("\n")[0].rstrip(".")
            raise ValueError(
                f"{where} cannot compute with what the plan splits: {message}. "
                f"{self._mend(module, style, message)}"
            ) from error

    def _mend(self, module: nn.Module, style: Style | None, error: str) -> str:
        """Returns advice about an error that a module raises on shards."""
        if self._sequence and "reshape" not in error:
            return (
                "With sequence=True modules outside of the plan get only a part of the positions. "
                "Compute masks and positions from the tokens, at the beginning of the model, and "
                "pass them to the layers; or pass sequence=False."
            )
        if isinstance(style, PerDevice):
            names = numbers_to_name(module, error)
            such = f", such as {', '.join(map(repr, names))}," if names else ""
            return (
                f"Name in PerDevice the other numbers{such} that count what the plan splits, or "
                "have the module write -1, or the size of its input, in their place."
            )
        heads = numbers_to_name(module, error, ("head", "heads"))
        per_device = f"{PerDevice(*heads)}" if heads else "PerDevice"
        return (
            "Where it says how many heads or features there are, as in a reshape, have it take "
            f"those of its input; or give it the style {per_device}, by which it gets this "
            "device's share of the number."
        )


@contextlib.contextmanager
def overridden(module: nn.Module, **methods: Any) -> Iterator[None]:
    """Replaces methods of a module within a `with` block."""
    vars(module).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(module)[name]


def replace_features(
    module: nn.Module, style: Style, size: Callable[[int], int]
) -> contextlib.AbstractContextManager[None]:
    """Replaces the field `features` of an `nn.DenseGeneral` within a `with` block.

    An `nn.DenseGeneral` reshapes its bias to `features`. Other modules stay unchanged.
    """
    if not (isinstance(style, Column) and isinstance(module, nn.DenseGeneral)):
        return contextlib.nullcontext()
    features = module.features
    features = [features] if isinstance(features, int) else list(features)
    if -style.dim <= len(features):
        features[style.dim] = size(features[style.dim])
    return replace_fields(module, {"features": tuple(features)})


def _is_from_this_package(error: Exception) -> bool:
    """Returns whether this package raised an error."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    name = frame.tb_frame.f_globals.get("__name__", "") if frame is not None else ""
    return isinstance(error, ValueError) and name.split(".")[0] == __name__.split(".")[0]


def _is_activation(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)


# -------------------------------------------------------------------------------------------------
# Replaces numbers in a module's fields, such as the number of heads, by a device's share of them.
#
# A module that reshapes the output of a `Column` to heads needs the number of heads. The number is
# in a field, in an attribute that `setup` sets, or in the module's config. While one of the
# module's methods runs on shards, the style `PerDevice` replaces the number by a `LocalSize`.
# `setup`, and modules that are made during the call, get the undivided number, because the plan
# itself divides the parameters of these modules.


class LocalSize(int):
    """This device's share of a number, for example of the number of heads.

    An undivided number divided by a `LocalSize` is divided by `whole`. So
    `hidden_size // num_heads` is still the size of a head. A multiple of a `LocalSize`, such as
    `num_heads * head_size`, is a `LocalSize` too.

    Attributes:
      whole: The number on all devices together.
    """

    whole: int

    def __new__(cls, share: int, whole: int) -> "LocalSize":
        """Makes a share of `whole`."""
        size = super().__new__(cls, share)
        size.whole = whole
        return size

    def __mul__(self, other: Any) -> Any:
        """Returns a share of the product."""
        product = super().__mul__(other)
        return LocalSize(product, self.whole * other) if type(other) is int else product

    def __rmul__(self, other: Any) -> Any:
        """Returns a share of the product."""
        return self * other

    def __rfloordiv__(self, other: Any) -> Any:
        """Divides an undivided number by `whole`."""
        return other // self.whole

    def __rtruediv__(self, other: Any) -> Any:
        """Divides an undivided number by `whole`."""
        return other / self.whole

    def __rmod__(self, other: Any) -> Any:
        """Returns the remainder of an undivided number divided by `whole`."""
        return other % self.whole


@contextlib.contextmanager
def local_sizes(where: str, module: nn.Module, style: PerDevice, devices: int) -> Iterator[None]:
    """Replaces the numbers that a `PerDevice` style names by shares, within a `with` block."""
    with contextlib.ExitStack() as stack:
        for name in style.names:
            try:
                whole = _look_up(module, name)
            except (AttributeError, KeyError):
                whole = None
            if isinstance(whole, LocalSize):  # One method of the module calls another.
                continue
            if not isinstance(whole, int):
                raise ValueError(
                    f"{where}: the module has no number {name}, expected a number "
                    "that the module has during a call: a field, an attribute that setup sets, or "
                    "an entry of a field or attribute, such as "
                    f"{', '.join(_numbers(module))}."
                )
            if whole % devices:
                raise ValueError(
                    f"{where}: {name} is {whole}, expected a multiple of the {devices} devices of "
                    "the axis. Use fewer devices along it, or leave this module and those in it "
                    "out of the plan."
                )
            field, _, rest = name.partition(".")
            before, share = getattr(module, field), LocalSize(whole // devices, whole)
            value = _replace_at(before, rest, share) if rest else share
            stack.enter_context(replace_fields(module, {field: value}))
            if _look_up(module, name) != share:
                raise ValueError(
                    f"{where}: {name} cannot be set in a copy of a {type(before).__name__}, "
                    "expected a dataclass, a dict, or another object whose attributes can be set. "
                    f"Let setup set an attribute, as in self.num_heads = self.{name}."
                )
        yield


def forget_shares(module: nn.Module) -> None:
    """Restores the undivided numbers in the fields of a module that was given `LocalSize`s."""
    for field in dataclasses.fields(module):
        value = getattr(module, field.name, None)
        if isinstance(value, LocalSize):
            object.__setattr__(module, field.name, value.whole)
        elif isinstance(value, tuple | list) and any(isinstance(x, LocalSize) for x in value):
            whole = [x.whole if isinstance(x, LocalSize) else x for x in value]
            object.__setattr__(module, field.name, tuple(whole))


def numbers_to_name(module: nn.Module, error: str, suffixes: tuple[str, ...] = ("",)) -> list[str]:
    """Finds the numbers of a module or its config that are in the new shape of a failed reshape.

    Args:
      error: The message of JAX, "cannot reshape array of shape (4, 8, 2) into shape (4, 8, 8)".
      suffixes: The endings of names to consider; `("",)` for all names.

    Returns:
      The names of the numbers: fields and attributes of the module if there are any, otherwise
      entries of its config.
    """
    shapes = [part.split(", ") for part in re.findall(r"shape \(([-\d, ]+)\)", error)]
    if len(shapes) < 2:
        return []
    # The dims before the split dim are equal in both shapes.
    same = [a == b for a, b in zip(*shapes, strict=False)][:-1]
    made = set(shapes[1][same.index(False) if False in same else len(same) :])
    found = [
        name
        for name, number in _numbers(module).items()
        if str(number) in made and not isinstance(number, LocalSize) and name.endswith(suffixes)
    ]
    return [name for name in found if "." not in name] or found


def _numbers(module: nn.Module) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, value in {"": module, **vars(module)}.items():
        is_config = not isinstance(value, nn.Module | int)
        if not name or (is_config and not name.startswith("_")):
            entries = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
            prefix = f"{name}." if name else ""
            found |= {f"{prefix}{k}": v for k, v in entries.items() if type(v) in (int, LocalSize)}
    return found


def _look_up(owner: Any, name: str) -> Any:
    for part in name.split("."):
        owner = owner[part] if isinstance(owner, Mapping) else getattr(owner, part)
    return owner


def _replace_at(owner: Any, name: str, value: Any) -> Any:
    """Copies an object, and replaces the attribute or entry at a dotted name in the copy."""
    part, _, rest = name.partition(".")
    if rest:
        value = _replace_at(_look_up(owner, part), rest, value)
    if isinstance(owner, Mapping):
        return {**owner, part: value}
    other = copy.copy(owner)
    try:
        setattr(other, part, value)
    except AttributeError:  # A frozen dataclass.
        object.__setattr__(other, part, value)
    return other
