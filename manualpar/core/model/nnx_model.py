"""Calls NNX models as Linen models are called: with `init` and `apply`.

An `nnx.Module` contains its variables. Here a module is split into its static graph and its
variables. The variables are grouped into collections with Linen's names: `nnx.Param` and its
subclasses are `params`, `nnx.BatchStat` is `batch_stats`, and so on. A path consists of the
attributes' names. Applying the model merges the graph and the variables into a module for one call.

Keys and counts of random streams do not belong to a collection: see
`manualpar.core.model.nnx_model`.

Invariants: nothing is materialised before `init`; parameters depend only on the key, not on the
mesh; a variable that several modules share is listed once, at the first of its paths.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Self

import flax.core.spmd
import flax.linen as nn
import flax.nnx.bridge.variables
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import ScopeCollectionNotFound, ScopeParamNotFoundError
from flax.traverse_util import unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from manualpar.core.model.apply_fn import required
from manualpar.core.model.interface import (
    AxisAliases,
    ModelInterface,
    RunPhase,
    SownPath,
    SplitAttention,
    interface_of,
    key_like,
    of_convolution,
    of_einsum,
    register_interface,
)
from manualpar.core.model.loss_function import for_nnx
from manualpar.core.parameters.annotations import AxesOrLogicalNames, SplitParameter
from manualpar.core.parameters.placement import Declared, MatrixDims
from manualpar.core.parameters.sharded_parameter import OF_SHAPE, ArrayBox, LastRead
from manualpar.core.tracing.thread_patches import replaced_in_thread

# -------------------------------------------------------------------------------------------------
# Variables that gather themselves where an NNX module reads them.
#
# NNX modules read a parameter through its `nnx.Variable`: `param[...]`, `param.get_value()`, or an
# operator. Therefore a parameter's shard is put into a variable whose type is a subclass of the
# parameter's type, and whose `get_value` gathers the shard, as `unbox()` does for Linen. The
# variable holds only the array of a box, so NNX's transformations treat the variable like any
# other variable. The other fields of the box are in the variable's metadata.
#
# A loop (`nnx.scan`, `nnx.vmap`, `jax.lax.scan` over a module) removes dims of an array, but does
# not tell the variable which dims. The removed dims are inferred from the shapes. Only dims that
# loops run over are candidates; `manualpar.core.model.loops` has recorded them.
#
# Invariants: a value that leaves such a variable is gathered; the parameter's type then applies
# its `get_value`; a parameter that is not read is not gathered.


Path = tuple[Any, ...]
# The key in a variable's metadata under which the parameter's box is stored, without its array.
BOX = "manualpar_box"
# The key in a variable's metadata under which its path is stored, if it may hold a sown value.
PATH = "manualpar_path"
# The key in the metadata of a variable that `sow` has made before the function that makes the
# module returned.
SOWN = "manualpar_sown"


def path_text(path: Path) -> str:
    """Formats a path in a module: `encoder/kernel`, `layers/0/kernel`."""
    return "/".join(map(path_key, path))


def path_key(part: Any) -> str:
    """Formats a part of a path; a key of a dict may be a path itself."""
    return ".".join(map(path_key, part)) if isinstance(part, tuple) else str(part)


def annotate(variable: nnx.Variable[Any], path: str) -> Any:
    """Returns the value of a parameter, in a box if the parameter is annotated.

    `nnx.with_partitioning` and `nnx.Param(..., out_sharding=...)` annotate parameters. The box has
    the variable's rules (`sharding_rules`), followed by the rules of `nnx.logical_axis_rules`
    around the call. If the annotation also has `split=True`, the box is a `SplitParameter`.
    """
    value = variable.get_raw_value()
    names = variable.get_metadata("out_sharding", None)
    rules = variable.get_metadata("sharding_rules", None) or ()
    is_split, shared = (variable.get_metadata(key, False) for key in ("split", "shared"))
    if is_split or (names and shared):
        _check_split(path, value.shape, names, is_split=is_split, has_rules=bool(rules))
        return SplitParameter(value, tuple(names), shared=shared)
    if not names:
        return value
    names = names.spec if isinstance(names, NamedSharding) else names
    if not isinstance(names, tuple | list | PartitionSpec):
        raise TypeError(
            f"model: parameter {path!r} is annotated with out_sharding={names!r}, expected names: "
            "a tuple, a PartitionSpec or a NamedSharding."
        )
    context = flax.core.spmd.get_logical_axis_rules() or ()
    return AxesOrLogicalNames(value, names=tuple(names), rules=(*rules, *context))


def _check_split(
    path: str, shape: tuple[int, ...], names: Any, *, is_split: Any, has_rules: bool
) -> None:
    where = f"model: parameter {path!r} of shape {shape} is annotated with out_sharding={names!r}"
    if is_split is not True:
        raise ValueError(
            f"{where} and split={is_split!r}, expected split=True with shared=True. Or leave out "
            "shared."
        )
    if has_rules:
        raise ValueError(
            f"{where}, split=True and sharding_rules, expected mesh axes and no rules, because a "
            "module that computes with shards names the axes."
        )
    if not isinstance(names, tuple | list | PartitionSpec):
        raise TypeError(
            f"{where} and split=True, expected a tuple with a mesh axis or None for each dimension."
        )
    if len(names) != len(shape):
        raise ValueError(
            f"{where} and split=True, expected one name for each dimension, also for dimensions "
            "that loops run over. Make a stack with nnx.vmap(..., "
            "transform_metadata={nnx.PARTITION_NAME: None})."
        )


def gathering_variable(
    variable: nnx.Variable[Any], box: Any, *, path: str, loop_dims: frozenset[int] | None
) -> nnx.Variable[Any]:
    """Makes a copy of `variable` that unboxes its parameter wherever the parameter is read.

    `loop_dims` are the dims that loops run over; `None` before these dims are known.
    """
    names = variable.get_metadata("out_sharding", None) if variable.get_metadata("split", 0) else ()
    split_dims = frozenset(dim for dim, name in enumerate(names) if name)
    use = _Use(box.replace(value=None), box.value.shape, path, loop_dims, split_dims)
    metadata = {**variable.get_metadata(), BOX: use}
    return _gathering_type(type(variable)).from_metadata(box.value, metadata)


def refusing_set_params(module: nnx.Module) -> contextlib.AbstractContextManager[None]:
    """Refuses, in this thread, that a call of the module sets a parameter.

    Without it, a parameter that is in no box would have the new value until the end of the call.
    """
    paths = {id(x): path_text(path) for path, x in nnx.to_flat_state(nnx.state(module, nnx.Param))}

    def replacement(_: str, old: Callable[..., None]) -> Callable[..., None]:
        def set_value(variable: nnx.Variable[Any], value: Any, **kwargs: Any) -> None:
            if isinstance(variable, nnx.Param):
                _refuse_set(paths.get(id(variable), type(variable).__name__))
            old(variable, value, **kwargs)

        return set_value

    return replaced_in_thread([(nnx.Variable, "set_value")], replacement)


def _refuse_set(path: str) -> NoReturn:
    raise ValueError(
        f"model: parameter {path!r} is set when the model is called; expected only the optimizer "
        "to change parameters. Put values that a call changes into an nnx.Variable of another "
        "type, such as nnx.BatchStat. In place of a layer that sets the parameters of another "
        "(nnx.WeightNorm, nnx.SpectralNorm), write one that computes with w / norm(w)."
    )


def noting_earlier_sows(found: set[Path]) -> contextlib.AbstractContextManager[None]:
    """Notes, in this thread, the paths of variables in which earlier calls left what they sowed.

    Outside of `nnx.capture` a module sows into an attribute, and the attribute stays. `_merge` has
    put the path into the metadata of all variables that may be such attributes.
    """

    def note(before: Any, after: Any) -> None:
        del after
        path = isinstance(before, nnx.Variable) and before.get_metadata(PATH, None)
        if path:
            found.add(path)

    return _watching_sows(note)


def marking_sows() -> contextlib.AbstractContextManager[None]:
    """Marks, in this thread, the variables that `sow` makes.

    A function may call the module that it makes, as qwix does.
    """

    def mark(before: Any, after: Any) -> None:
        if before is None and isinstance(after, nnx.Variable):
            after.set_metadata(SOWN, True)

    return _watching_sows(mark)


def _watching_sows(watch: Callable[[Any, Any], None]) -> contextlib.AbstractContextManager[None]:
    """Calls `watch` with the attribute into which a module sows, before and after it sows."""

    def replacement(method: str, old: Callable[..., Any]) -> Callable[..., Any]:
        def sow(module: nnx.Module, variable_type: Any, name: str, *args: Any, **kw: Any) -> Any:
            before = vars(module).get(name)
            out = old(module, variable_type, name, *args, **kw)
            watch(before, vars(module).get(name))
            return out

        def perturb(module: nnx.Module, name: str, *args: Any, **kw: Any) -> Any:
            before = vars(module).get(name)
            out = old(module, name, *args, **kw)
            watch(before, vars(module).get(name))
            return out

        return sow if method == "sow" else perturb

    return replaced_in_thread([(nnx.Module, "sow"), (nnx.Module, "perturb")], replacement)


def boxes_in_linen() -> contextlib.AbstractContextManager[None]:
    """Makes `nnx.bridge.ToNNX` hand boxes to its Linen module, in this thread.

    So a parameter is gathered where a module of Linen asks for it.
    """

    def replacement(_: str, convert: Callable[..., Any]) -> Callable[..., Any]:
        def to_linen(attributes: Any) -> Any:
            values, others = {}, {}
            for path, x in nnx.traversals.flatten_mapping(attributes).items():
                if not isinstance(x, nnx.Variable):
                    others[path] = x  # Flax refuses it.
                    continue
                variable: Any = x
                is_boxed = isinstance(x, _Gathering)
                own_type = type(variable).__bases__[1] if is_boxed else type(variable)
                # Without metadata, because Linen would constrain the shardings of annotations.
                values[nnx.variable_name_from_type(own_type), *path] = (
                    variable.get_metadata(BOX).boxed(variable.get_raw_value())
                    if is_boxed
                    else variable.get_value()
                )
            if others:
                convert(nnx.traversals.unflatten_mapping(others))
            return nnx.traversals.unflatten_mapping(values)

        return to_linen

    return replaced_in_thread([(flax.nnx.bridge.variables, "nnx_attrs_to_linen_vars")], replacement)


@dataclasses.dataclass(frozen=True, eq=False)  # `==` would compare the arrays of boxes.
class _Use:
    """Makes a parameter from its stored array, where a module reads the parameter."""

    box: Any  # A box without its value.
    shape: tuple[int, ...]  # The shape of the stored array before any loop.
    path: str
    loop_dims: frozenset[int] | None
    split_dims: frozenset[int]
    last_read: LastRead = dataclasses.field(default_factory=LastRead)

    def gather(self, stored: Any) -> Any:
        """Returns the parameter, or its slice in the surrounding loops."""
        module = self.path.rpartition("/")[0]
        with jax.named_scope(module) if module else contextlib.nullcontext():
            return self.boxed(stored).unbox()

    def boxed(self, stored: Any) -> Any:
        """Returns the parameter's box, or the box of its slice in the surrounding loops."""
        box = self.box.replace(value=stored)
        if stored.shape != self.shape:
            # If several dims have the same size, loops may run over any of them. Removes each in
            # turn, so that a probe records all.
            box, *_ = [self._without(box, dims) for dims in self._removed_dims(stored.shape)]
        return box

    def _removed_dims(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Finds the sets of dims whose removal gives the stored array the shape `shape`."""
        dims = range(len(self.shape)) if self.loop_dims is None else sorted(self.loop_dims)
        number = max(len(self.shape) - len(shape), 0)
        found = [
            removed
            for removed in itertools.combinations(dims, number)
            if tuple(x for dim, x in enumerate(self.shape) if dim not in removed) == shape
        ]
        if not found:
            raise ValueError(
                f"model: parameter {self.path!r} of shape {self.shape} is read as an array of "
                f"shape {shape}; expected its own shape, or the shape without dimensions that "
                "loops run over. Read the parameter with param[...] before you reshape or "
                "transpose it."
            )
        # A shard of a split dim may have the same size as the dim that a loop removes.
        return [removed for removed in found if self.split_dims.isdisjoint(removed)] or found

    @staticmethod
    def _without(box: Any, dims: tuple[int, ...]) -> Any:
        for dim in reversed(dims):
            box = box.remove_axis(dim, {})
        return box


class _Gathering:
    """The methods of variables that gather their parameter where it is read."""

    __slots__ = ()

    def get_value(self: Any, **kwargs: Any) -> Any:
        """Gathers the array, and returns the value that the parameter's own type makes of it."""
        value = self._gathered().get_value(**kwargs)
        self.get_metadata(BOX).last_read.keep(self.get_raw_value(), value)
        return value

    def _read_again(self: Any) -> Any:
        """Returns the array that the module read; qwix compares it with the operands of products.

        Modules read `param[...]`; flax has deprecated `param.value`.
        """
        read = self.get_metadata(BOX).last_read.find(self.get_raw_value())
        return self.get_value() if read is None else read

    def set_value(self: Any, value: Any, **kwargs: Any) -> None:
        """Refuses a new value, because it would be lost at the end of the call."""
        del value, kwargs
        _refuse_set(self.get_metadata(BOX).path)

    value = property(_read_again, set_value)

    @property
    def shape(self: Any) -> tuple[int, ...]:
        """The shape of the gathered value."""
        shape: tuple[int, ...] = self._abstract().shape
        return shape

    def __len__(self: Any) -> int:
        """Returns the length without a gather; NNX's layers need the length for `if self.bias`."""
        return self.shape[0]

    def __getattr__(self: Any, name: str) -> Any:
        metadata = object.__getattribute__(self, "_var_metadata")
        if name in metadata:
            return metadata[name]
        if name.startswith("__"):  # jax and numpy look up such attributes on every object.
            raise AttributeError(name)
        return getattr(self._abstract() if name in OF_SHAPE else self.get_value(), name)

    def _gathered(self: Any) -> nnx.Variable[Any]:
        """Makes a variable of the parameter's type with the gathered value."""
        metadata = self.get_metadata()
        use: _Use = metadata.pop(BOX)
        base: Any = type(self).__bases__[1]
        variable: nnx.Variable[Any] = base.from_metadata(use.gather(self.get_raw_value()), metadata)
        return variable

    def _abstract(self: Any) -> Any:
        """Returns the shape and dtype of the gathered value."""
        return jax.eval_shape(lambda: self._gathered().get_value())


@functools.cache
def _gathering_type(base: type[nnx.Variable[Any]]) -> type[nnx.Variable[Any]]:
    """Makes the gathering subclass of a variable type; cached, because NNX compares types."""
    metaclass: Any = type(base)
    made: type[nnx.Variable[Any]] = metaclass(
        base.__name__, (_Gathering, base), {"__module__": __name__}
    )
    return made


# -------------------------------------------------------------------------------------------------
# Random streams of an NNX module. Each call restarts them from the keys that a loss passes.
#
# A stream is a key and a count of the numbers drawn. A program does not keep streams between
# calls: as in Linen, a loss passes keys, `rngs={"dropout": key}`. Each module's stream starts from
# the key with the stream's name, into which the module's path is folded.
#
# Invariants: no two streams share a key; the streams of a stack of layers have one key for each
# layer; a stream without a key is an error only where its key is used. (`nnx.RNN` draws a key for
# its initial carry, but a carry of zeros does not use the key.)
#
# The key that a dropout layer draws differs along a model axis if the layer's input is split over
# this axis, see `manualpar.core.model.interface`.
#
# A stream counts by `count[...] += 1`. For such an assignment flax reads `sharding` of both
# values. Tracers lack this attribute, and to write the error message JAX 0.10 searches all
# equations so far (74 ms after 8,000 equations; 0.01 ms in JAX 0.12). So the time to trace a model
# would be quadratic in the number of parameters. In the context of `assigning_tracers` an
# assignment does not read the attribute.


def assigning_tracers() -> contextlib.AbstractContextManager[None]:
    """Makes `variable[...] = tracer` cheap in this thread, as a context manager.

    Variables get the same values as in flax.
    """

    def replacement(_: str, old: Callable[..., None]) -> Callable[..., None]:
        def set_item(variable: nnx.Variable[Any], index: Any, value: Any) -> None:
            before = variable.get_raw_value()
            if (
                index is ...
                and isinstance(before, jax.core.Tracer)
                and isinstance(value, jax.core.Tracer)
                and (before.shape, before.dtype) == (value.shape, value.dtype)
            ):
                variable.set_value(value)
            else:
                old(variable, index, value)

        return set_item

    return replaced_in_thread([(nnx.Variable, "__setitem__")], replacement)


def keys_by_stream(rngs: Any) -> dict[str, Any]:
    """Returns keys by the names of streams; `rngs` is a dict, an `nnx.Rngs`, or one key for all."""
    if isinstance(rngs, nnx.Rngs):
        return {name: stream() for name, stream in rngs.items()}
    return dict(rngs) if isinstance(rngs, Mapping) else {"default": rngs}


def call_rngs(keys: Mapping[str, Any]) -> nnx.Rngs:
    """Makes the streams for a call that takes `rngs`; see `stream_keys` for missing keys."""
    if len(keys) == 1 and "default" not in keys:
        (only,) = keys.values()
        keys = {**keys, "default": jax.random.fold_in(only, zlib.crc32(b"default"))}
    return nnx.Rngs(keys)


def stream_keys(module: nnx.Module, rngs: Mapping[str, Any]) -> dict[Path, Any]:
    """Finds the key of each random stream of a module.

    `rngs` maps names of streams to keys. A stream gets the key of its name. A stream without a name
    (`default`) gets the key that its module's `rng_collection` names. If there is no such key, the
    stream gets the key called `default`, or the only key.

    Returns:
      For each stream's path, its key; for a stream without a key, the error message.
    """
    nodes = list(nnx.iter_graph(module))
    modules = {path: node for path, node in nodes if isinstance(node, nnx.Module)}
    keys: dict[Path, Any] = {}
    for path, node in nodes:
        if not isinstance(node, nnx.RngStream):
            continue
        name = node.tag
        if name == "default":
            name = getattr(modules.get(path[:-1]), "rng_collection", name)
        only = rngs if len(rngs) == 1 else ()
        found = [rngs[key] for key in (name, "default", *only) if key in rngs]
        if found:
            keys[path] = jax.random.fold_in(found[0], zlib.crc32(path_text(path).encode()))
        else:
            keys[path] = (
                f"model: its random stream {path_text(path)!r} draws numbers and has no key; "
                f"expected a key in rngs={{{name!r}: key}}; the call was given "
                f"{sorted(rngs) or 'none'}."
            )
    return keys


def stream_variable(variable: nnx.Variable[Any], key: Any) -> nnx.Variable[Any]:
    """Makes the initial variable of a stream's key or count; `key` is as in `stream_keys`."""
    abstract, metadata = variable.get_raw_value(), variable.get_metadata()
    if not isinstance(variable, nnx.RngKey):
        count = jnp.zeros(abstract.shape, abstract.dtype)
        return type(variable).from_metadata(count, metadata)
    if isinstance(key, str):
        none = jnp.broadcast_to(jax.random.key(0), abstract.shape)
        return _NoKey.from_metadata(none, {**metadata, "reason": key})
    key = jax.random.split(key, abstract.shape) if abstract.shape else key
    return type(variable).from_metadata(key, metadata)


def mark_keyless(module: nnx.Module) -> None:
    """Makes streams that have no key return an object that refuses every use."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.RngStream) and isinstance(node.key, _NoKey):
            object.__setattr__(node, "__class__", _KeylessStream)


def with_keys(rngs: nnx.Rngs | None) -> nnx.Rngs | None:
    """Returns the streams that have a key, for a module that draws from all of its streams."""
    if rngs is None:
        return None
    keyed = {name: x for name, x in rngs.items() if not isinstance(x.key, _NoKey)}
    return rngs if len(keyed) == len(rngs) else nnx.Rngs({k: x.key[...] for k, x in keyed.items()})


class SplitDropout(nnx.Dropout):
    """An `nnx.Dropout` whose key differs along the axes over which its input varies."""

    def __call__(
        self, inputs: jax.Array, *, deterministic: bool | None = None, rngs: Any = None
    ) -> jax.Array:
        """Calls `nnx.Dropout` with a key that differs along the axes over which `inputs` varies."""
        rngs = self.rngs if rngs is None else rngs
        is_off = self.deterministic if deterministic is None else deterministic
        if rngs is not None and not is_off and self.rate not in (0, 1):
            stream = rngs[self.rng_collection] if isinstance(rngs, nnx.Rngs) else rngs
            key = stream() if isinstance(stream, nnx.RngStream) else stream
            rngs = key_like(key, inputs)
        return super().__call__(inputs, deterministic=deterministic, rngs=rngs)


def split_dropout(module: nnx.Module) -> None:
    """Changes a module, for one call, so that each shard of split activations has its own mask."""
    if type(module) is nnx.Dropout:
        object.__setattr__(module, "__class__", SplitDropout)
    if isinstance(module, nnx.MultiHeadAttention):
        module.attention_fn = SplitAttention(module.attention_fn)


def adjust_to_mesh(module: nnx.Module, aliases: AxisAliases, phase: RunPhase) -> None:
    """Adapts a module to the mesh for one call: its axis names, its dropout, and the run's phase.

    The module may be a part of a Linen model, see `nnx.bridge.to_linen`.
    """
    for _, part in nnx.iter_modules(module):
        if isinstance(part, nnx.bridge.ToNNX):  # A Linen module, which has no such fields.
            part.to_nnx__rngs = with_keys(part.to_nnx__rngs)
            continue
        for name, value in aliases.resolve(part).items():
            setattr(part, name, value)
        split_dropout(part)
    if phase == "eval_dropout":
        module.set_attributes(use_running_average=True, raise_if_not_found=False)
    elif phase == "eval":
        module.eval()


class _KeylessStream(nnx.RngStream):
    """A stream without a key."""

    def __call__(self) -> Any:
        """Returns an object that refuses every use."""
        return _MissingKey(self.key.get_metadata("reason"))

    def fork(self, **kwargs: Any) -> Any:
        """Returns the stream itself, because it has no key from which to make another stream."""
        del kwargs
        return self


class _MissingKey:
    """The result of a stream without a key; any use of it raises an error with the reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise ValueError(self._reason)


class _NoKey(nnx.RngKey):
    """The key variable of a stream without a key."""

    def get_value(self, **kwargs: Any) -> Any:
        """Raises the error about the missing key."""
        del kwargs
        raise ValueError(self.get_metadata("reason"))


# -------------------------------------------------------------------------------------------------


# The collection of bare arrays: attributes of a module that are in no variable.
CONSTANTS = "constants"
_NOT_GIVEN: Any = object()


@register_interface
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NNXModel(ModelInterface):
    """An NNX model with `init` and `apply`, the functions of Linen that this package calls.

    Attributes:
      module: The module with abstract values.
      make: Makes the module from a key.
      graphdef: The static graph of the module.
      leaves: The abstract variables and bare arrays of the module, with their paths. (Flax takes
        an abstract array in a list or a dict of `module` for static.)
      earlier_sows: The paths of variables that hold what earlier calls of the module have sown;
        of an instance, calls of this object add to them, see `without_earlier_sows`.
      is_instance: Whether the user has made the module, and so may have called it.
    """

    make: Callable[[jax.Array], nnx.Module] = dataclasses.field(kw_only=True)
    graphdef: Any = dataclasses.field(kw_only=True)
    leaves: tuple[tuple[Path, Any], ...] = dataclasses.field(kw_only=True)
    earlier_sows: set[Path] = dataclasses.field(kw_only=True, default_factory=set)
    is_instance: bool = dataclasses.field(kw_only=True, default=False)

    def __repr__(self) -> str:
        return f"NNXModel({type(self.module).__name__})"

    @classmethod
    def wrap(cls, model: Any) -> Self | None:
        """Returns the interface of an NNX model; `None` for anything else.

        Args:
          model: An `nnx.Module`, the class of a module, or a function that makes a module from
            `rngs`. The values of an `nnx.Module` are the initial values for every key. With a class
            or a function, the parameters for a key are the parameters of
            `model(rngs=nnx.Rngs(key))`, and no array is materialised before it is sharded.
        """
        if isinstance(model, nn.Module):
            return None
        if isinstance(model, nnx.Module):
            make = _make_again(model)
        else:
            parameters = _parameters(model)
            is_nnx_class = isinstance(model, type) and issubclass(model, nnx.Module)
            if not is_nnx_class and (isinstance(model, type) or "rngs" not in parameters):
                return None
            name = getattr(model, "__name__", type(model).__name__)
            _check_takes_rngs_alone(name, parameters)
            make = functools.partial(_construct, model, name)
        parts, is_instance = cls._parts(make), isinstance(model, nnx.Module)
        marked = {path for path, leaf in parts["leaves"] if _is_marked(leaf)}
        return cls(**parts, earlier_sows=marked, is_instance=is_instance)

    @staticmethod
    def _parts(make: Callable[[jax.Array], nnx.Module]) -> dict[str, Any]:
        """Returns the fields that depend on the function that makes the module."""
        graphdefs: list[Any] = []

        def split() -> nnx.State:
            graphdef, state = nnx.split(make(jax.random.key(0)))
            graphdefs.append(graphdef)
            return state

        state = jax.eval_shape(split)
        leaves = tuple(nnx.to_flat_state(state))
        _check_params(leaves)
        module = nnx.merge(graphdefs[-1], state)
        return {"module": module, "make": make, "graphdef": graphdefs[-1], "leaves": leaves}

    @property
    def may_hold_sown(self) -> bool:
        """Whether the module has been called as it was made, or is an instance that may have been.

        An instance that has only parameters, statistics and streams has sown nothing.
        """
        is_open = self.is_instance and any(_may_be_sown(leaf) for _, leaf in self.leaves)
        return is_open or bool(self.earlier_sows)

    def without_earlier_sows(self) -> tuple[Self, frozenset[SownPath]]:
        """Removes the attributes that calls before this program have left by `sow`."""
        if not self.earlier_sows:
            return self, frozenset()
        removed = frozenset(self.earlier_sows)

        def make(key: jax.Array) -> nnx.Module:
            module = self.make(key)
            for path, part in list(nnx.iter_modules(module)):
                for name in [name for name in vars(part) if (*path, name) in removed]:
                    delattr(part, name)
            return module

        sown = {
            (name, *map(path_key, path))
            for path, leaf in self.leaves
            if path in removed and (name := collection_of(leaf))
        }
        rest: Any = {**self._parts(make), "earlier_sows": set()}
        return dataclasses.replace(self, **rest), frozenset(sown)

    def declared(
        self, noted: Mapping[str, Declared], params: Mapping[str, Any]
    ) -> Mapping[str, Declared]:
        """Returns how the layers of NNX in the module declare their parameters, by path."""
        found = dict(noted)
        for path, part in nnx.iter_modules(self.module):
            for name in vars(part):
                key = path_text((*path, name))
                declared = _declared(part, name) if key in params else None
                if declared is not None:
                    found[key] = declared
        return found

    @classmethod
    def collections_of(cls, variables: Any) -> Mapping[str, Any] | None:
        """Returns the arrays of a module or an `nnx.State`, without the random streams."""
        if isinstance(variables, nnx.Module):
            variables = nnx.state(variables)
        if not isinstance(variables, nnx.State):
            return None
        return _by_collection(nnx.to_flat_state(variables))

    def adapt_loss(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Understands `loss_fn(model, batch)` too, see `for_nnx`."""
        return for_nnx(loss_fn)

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Makes the variables by collection from a key; annotated parameters are in boxes.

        The arguments of a Linen model's call are ignored.
        """
        del args, kwargs
        module = self.make(rngs["params"] if isinstance(rngs, Mapping) else rngs)
        return {"params": {}} | _by_collection(_leaves(module), box=annotate)

    def apply(
        self, variables: Mapping[str, Any], *args: Any, mutable: Any = False, **kwargs: Any
    ) -> Any:
        """Calls the module as `flax.linen.Module.apply` does; `stream_keys` describes `rngs`.

        If the called method has an argument `rngs`, the method gets the keys as `nnx.Rngs`. A
        method with `**kwargs` gets these `nnx.Rngs` too if the module has no random streams for the
        keys. If the method has no argument `train`, a value passed as `train` calls
        `module.train()` or `module.eval()`.
        """
        names = [mutable] if isinstance(mutable, str) else [] if mutable is True else mutable or []
        every = mutable is True
        out, updates, _ = self._call(variables, *args, requested=names, every=every, **kwargs)
        if mutable is False:
            return out
        names = updates if every else names
        return out, {name: updates[name] for name in names if name in updates}

    def apply_keeping(
        self,
        variables: Any,
        *args: Any,
        kept: Sequence[str],
        requested: Sequence[str],
        **kwargs: Any,
    ) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Calls `apply` and separates variables from sown values, see `ModelInterface`."""
        out, updates, own = self._call(variables, *args, requested=requested, **kwargs)
        asked = {name: updates[name] for name in requested if name in updates}
        return out, asked, {name: own[name] for name in kept if name in own}

    def _call(
        self,
        variables: Mapping[str, Any],
        *args: Any,
        requested: Sequence[str],
        every: bool = False,
        rngs: Any = _NOT_GIVEN,
        method: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Calls the module; captures what it sows into the collections `requested`.

        With `every`, the call may make variables in any collection.

        Returns:
          The result, the variables after the call with the captured values, and without them.
        """
        keys = {} if rngs is _NOT_GIVEN or rngs is None else keys_by_stream(rngs)
        module = self._merge(variables, keys)
        call = getattr(module, method or "__call__") if not callable(method) else method
        parameters = _parameters_of_call(call)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        known = {collection_of(leaf) for _, leaf in self.leaves}
        has_streams = None in known
        if rngs is not _NOT_GIVEN and ("rngs" in parameters or (takes_any and not has_streams)):
            kwargs["rngs"] = None if rngs is None else call_rngs(keys)
        if "train" in kwargs and "train" not in parameters and not takes_any:
            module.train() if kwargs.pop("train") else module.eval()
        adjust_to_mesh(module, self.axis_aliases, self.phase)
        types = [type_ for name in requested for type_ in _types_named(name)]
        bound = functools.partial(call, module) if callable(method) else call

        bridges = [x for _, x in nnx.iter_modules(module) if isinstance(x, nnx.bridge.ToNNX)]

        def run(module: nnx.Module) -> Any:
            del module
            for bridge in bridges:
                del bridge.__captures__  # A bridge takes every attribute for a variable of Linen.
            with jax.named_scope(type(self).__name__):  # Flax puts Linen's modules in such scopes.
                return bound(*args, **kwargs)

        with contextlib.ExitStack() as stack:
            stack.enter_context(assigning_tracers())
            stack.enter_context(refusing_set_params(module))
            if self.is_instance and self.may_hold_sown:
                stack.enter_context(noting_earlier_sows(self.earlier_sows))
            if bridges:
                linen = interface_of(bridges[0].to_nnx__module)
                same = {"phase": self.phase, "axis_aliases": self.axis_aliases}
                stack.enter_context(dataclasses.replace(linen, **same).calls_on_mesh())
                stack.enter_context(boxes_in_linen())
            try:
                out = nnx.capture(run, *types)(module)
            except (ScopeCollectionNotFound, ScopeParamNotFoundError) as error:
                if not bridges:
                    raise
                raise ValueError(
                    "model: a module of Linen in an nnx.bridge.ToNNX has no variables "
                    f"({str(error).partition(' (http')[0]}), expected them when the NNX module is "
                    "made. Write in its __init__: nnx.bridge.ToNNX(module, rngs=rngs).lazy_init("
                    "jnp.ones((1, width)))."
                ) from error
        out, *states = out if types else (out,)
        made = None if every else frozenset(requested) - known
        own = self._collect_kept(module, made)
        captured = [leaf for state in states for leaf in nnx.to_flat_state(state)]
        empty: dict[str, Any] = {name: {} for name in requested if name not in known}
        return out, empty | _by_collection([*own, *captured]), _by_collection(own)

    def _merge(self, variables: Mapping[str, Any], rngs: Mapping[str, Any]) -> nnx.Module:
        """Makes a new module from variables, with its random streams restarted."""
        streams = stream_keys(self.module, rngs)
        known = {"params"}
        leaves = []
        for path, leaf in self.leaves:
            name = collection_of(leaf)
            if name is None:
                leaves.append((path, stream_variable(leaf, streams[path[:-1]])))
                continue
            known.add(name)
            value = _find(variables, name, path)
            leaves.append((path, self._variable(path, leaf, value)))
        unknown = sorted(set(variables) - known)
        if unknown:
            raise ValueError(
                f"model: applied with collections {unknown}, expected only {sorted(known)}, the "
                f"collections of {type(self.module).__name__}."
            )
        module = nnx.merge(self.graphdef, nnx.from_flat_state(leaves))
        mark_keyless(module)
        return module

    def _variable(self, path: Path, leaf: Any, value: Any) -> Any:
        """Returns a leaf with a new value; for a boxed value, a variable that unboxes when read."""
        if not isinstance(leaf, nnx.Variable):
            return value
        if isinstance(value, nn.Partitioned):
            value = value.only_value() if isinstance(value, ArrayBox) else value
        if isinstance(value, nn.Partitioned):
            key = path_text(path)
            dims = None if self.loop_dims is None else self.loop_dims.get(key, frozenset())
            return gathering_variable(leaf, value, path=key, loop_dims=dims)
        metadata = leaf.get_metadata()
        if _may_be_sown(leaf):
            metadata = {**metadata, PATH: path}
        return type(leaf).from_metadata(value, metadata)

    def _collect_kept(
        self, module: nnx.Module, made: frozenset[str] | None
    ) -> list[tuple[Path, Any]]:
        """Collects the variables of a module after a call, except parameters.

        `made` are the collections in which the call may make variables; `None` for all.
        """
        before = {path for path, _ in self.leaves}
        kept = []
        for path, leaf in _leaves(module):
            name = collection_of(leaf)
            if "__captures__" in path or name == "params":
                continue
            if path not in before and made is not None and name not in made:
                raise ValueError(
                    f"model: calling it makes a new variable {path_text(path)!r} of type "
                    f"{type(leaf).__name__}; expected none, because a training state has no place "
                    "for it. Make the variable in the module's __init__. If it is for the loss, "
                    "name its collection in the call of the model: out, made = apply_fn(..., "
                    f"mutable=[{name!r}])."
                )
            kept.append((path, leaf))
        return kept


def collection_of(leaf: Any) -> str | None:
    """Returns the collection of a module's leaf; `None` for the state of random streams."""
    if not isinstance(leaf, nnx.Variable):
        return CONSTANTS
    if isinstance(leaf, nnx.RngState):
        return None
    return _collection_of_type(type(leaf))


def _may_be_sown(leaf: Any) -> bool:
    """Returns whether a call may have sown a module's leaf."""
    others = nnx.Param, nnx.BatchStat, nnx.RngState, nnx.Cache
    return isinstance(leaf, nnx.Variable) and not isinstance(leaf, others)


def _is_marked(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable) and bool(leaf.get_metadata(SOWN, False))


def _collection_of_type(type_: type[nnx.Variable[Any]]) -> str:
    if issubclass(type_, nnx.Param):
        return "params"
    try:
        return nnx.variable_name_from_type(type_)
    except ValueError:  # Flax has no Linen name for this type.
        return type_.__name__


def _types_named(collection: str) -> list[type[nnx.Variable[Any]]]:
    """Finds the variable types of a collection; registers a new type if there is none."""
    found = [x for x in _with_subclasses(nnx.Variable) if _collection_of_type(x) == collection]
    return found or [nnx.variable_type_from_name(collection, allow_register=True)]


def _with_subclasses(base: Any) -> set[Any]:
    return {base}.union(*map(_with_subclasses, base.__subclasses__()))


# The dims of a layer's kernel.

_NORMS = (nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.LayerNorm, nnx.RMSNorm)


def _declared(layer: Any, name: str) -> Declared | None:
    """Returns how a layer makes its parameter `name`; `None` for a layer that flax did not write.

    Loops stack the layer's parameters, and do not change its other attributes.
    """
    own = getattr(layer, "matrix_dims", {})
    if name in own:
        return Declared(None, own[name])
    if isinstance(layer, nnx.Embed):
        matrix = MatrixDims((0,), (1,), hidden=False)
        return Declared((layer.num_embeddings, layer.features), matrix)
    layers = nnx.Linear | nnx.LinearGeneral | nnx.Conv | nnx.ConvTranspose | nnx.Einsum
    if isinstance(layer, _NORMS) or (isinstance(layer, layers) and name != "kernel"):
        return Declared(None, None)
    if isinstance(layer, nnx.Linear):
        return Declared((layer.in_features, layer.out_features), MatrixDims((0,), (1,)))
    if isinstance(layer, nnx.LinearGeneral):
        sizes = tuple(layer.batch_axis.values()), layer.in_features, layer.out_features
        batch, first = len(sizes[0]), len(sizes[0] + sizes[1])
        shape = sizes[0] + sizes[1] + sizes[2]
        dims = tuple(range(len(shape)))
        return Declared(shape, MatrixDims(dims[batch:first], dims[first:]))
    if isinstance(layer, nnx.Einsum):
        return Declared(tuple(layer.kernel_shape), of_einsum(layer.einsum_str))
    if isinstance(layer, nnx.Conv | nnx.ConvTranspose):
        shape, flipped = tuple(layer.kernel_shape), getattr(layer, "transpose_kernel", False)
        # Groups are blocks on the diagonal of a matrix, and not dims of the kernel.
        is_whole = getattr(layer, "feature_group_count", 1) == 1
        return Declared(shape, of_convolution(len(shape), flipped=flipped) if is_whole else None)
    return None


# Making a module from a key.


def _make_again(module: nnx.Module) -> Callable[[jax.Array], nnx.Module]:
    """Returns a function that makes a copy of a module from any key."""
    graphdef, state = nnx.split(module)
    leaves, structure = jax.tree.flatten(state)
    if not all(isinstance(x, jax.Array | np.ndarray) for x in leaves):
        raise TypeError(
            f"model: the {type(module).__name__} has no values, or values that are not arrays; "
            "expected an instance with arrays. Or pass the class, or a function of rngs: then the "
            "program makes the arrays sharded."
        )
    # Copies values to the host, because they may be on devices that the program does not use.
    values = [x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x) for x in leaves]

    def make(key: jax.Array) -> nnx.Module:
        del key
        arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in values]
        return nnx.merge(graphdef, jax.tree.unflatten(structure, arrays))

    return make


def _construct(make: Callable[..., Any], name: str, key: jax.Array) -> nnx.Module:
    """Makes a module from a key without sharding its arrays, because the program shards them."""
    with nnx.use_eager_sharding(False), assigning_tracers(), marking_sows():
        module = make(rngs=nnx.Rngs(key))
    if not isinstance(module, nnx.Module):
        raise TypeError(f"model: {name}(rngs=...) makes {module!r}, expected an nnx.Module.")
    for path, part in nnx.iter_modules(module):
        for attribute, value in vars(part).items():
            if isinstance(value, jax.core.Tracer):
                raise TypeError(
                    f"model: {path_text((*path, attribute))!r} is an array of shape {value.shape} "
                    "that is not in an nnx.Variable. Expected an nnx.Param if it is trained, "
                    "and otherwise another nnx.Variable or a NumPy array. Write "
                    f"self.{attribute} = nnx.Param(...)."
                )
    return module


def _check_takes_rngs_alone(name: str, parameters: Mapping[str, inspect.Parameter]) -> None:
    if "rngs" not in parameters:
        raise TypeError(
            f"model: the class {name} takes no argument rngs, expected one, because a program "
            "makes the parameters from a key. Give the class an argument rngs, or pass an instance "
            f"to the program: {name}(...)."
        )
    missing = [key for key in required(parameters) if key != "rngs"]
    if missing:
        raise TypeError(
            f"model: {name} needs {', '.join(missing)} in addition to rngs, expected no "
            f"other argument. Write lambda rngs: {name}({missing[0]}=..., rngs=rngs)."
        )


def _check_params(leaves: Iterable[tuple[Path, Any]]) -> None:
    """Refuses parameters that are not arrays or that are references."""
    for path, leaf in leaves:
        if not isinstance(leaf, nnx.Param):
            continue
        if not isinstance(leaf.get_raw_value(), jax.ShapeDtypeStruct):
            raise TypeError(
                f"model: parameter {path_text(path)!r} holds a "
                f"{type(leaf.get_raw_value()).__name__}, expected an array; make an nnx.Param of "
                "each of its arrays."
            )
        if leaf.hijax or leaf.ref:
            raise TypeError(
                f"model: parameter {path_text(path)!r} is a reference (hijax or ref), expected a "
                "plain variable: a step is a function of arrays. Make it without nnx.var_defaults."
            )


# Variables by path.


def _leaves(module: nnx.Module) -> Iterable[tuple[Path, Any]]:
    """Flattens a module into its variables and bare arrays with their paths."""
    leaves: Iterable[tuple[Path, Any]] = nnx.to_flat_state(nnx.state(module))
    return leaves


def _by_collection(
    leaves: Iterable[tuple[Path, Any]], box: Callable[[Any, str], Any] | None = None
) -> dict[str, Any]:
    """Nests the values of variables in dicts by collection; applies `box` to parameters."""
    values = {}
    for path, leaf in leaves:
        name = collection_of(leaf)
        if name is not None:
            value = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
            boxed = box(leaf, path_text(path)) if box and name == "params" else value
            values[name, *map(path_key, path)] = boxed
    collections: dict[str, Any] = unflatten_dict(values)
    return collections


def _find(variables: Mapping[str, Any], collection: str, path: Path) -> Any:
    """Looks up the value at a path of a collection."""
    tree: Any = variables.get(collection, {})
    for name in map(path_key, path):
        if not isinstance(tree, Mapping) or name not in tree:
            raise ValueError(
                f"model: applied without the variable {path_text(path)!r} of collection "
                f"{collection!r}, expected every variable that init makes."
            )
        tree = tree[name]
    return tree


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function or a class; `{}` for anything else."""
    if not callable(function):
        return {}
    partial = function if isinstance(function, functools.partial) else functools.partial(function)
    called = partial.func
    if isinstance(called, type):  # NNX's metaclass takes any arguments and passes them on.
        constructor: Any = called
        called = functools.partial(constructor.__init__, None)
    called = functools.partial(called, *partial.args, **partial.keywords)
    return inspect.signature(called).parameters


def _parameters_of_call(call: Any) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters that keywords of a call reach: `nnx.Sequential` hands keywords on."""
    own = _parameters(call)
    if getattr(call, "__func__", None) is not nnx.Sequential.__call__ or not call.__self__.layers:
        return own
    layers = [x.__call__ if isinstance(x, nnx.Module) else x for x in call.__self__.layers]
    if "rngs" in own:  # An older flax hands `rngs` to every layer, other keywords to the first.
        return {**_parameters_of_call(layers[0]), "rngs": own["rngs"]}
    return {name: x for layer in layers for name, x in _parameters_of_call(layer).items()}
