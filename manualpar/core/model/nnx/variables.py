"""Variables that gather themselves where an NNX module reads them.

NNX modules read a parameter through its `nnx.Variable`: `param[...]`, `param.get_value()`, or an
operator. Therefore a parameter's shard is put into a variable whose type is a subclass of the
parameter's type, and whose `get_value` gathers the shard, as `unbox()` does for Linen. The variable
holds only the array of a box, so NNX's transformations treat the variable like any other variable.
The other fields of the box are in the variable's metadata.

A loop (`nnx.scan`, `nnx.vmap`, `jax.lax.scan` over a module) removes dims of an array, but does not
tell the variable which dims. The removed dims are inferred from the shapes. Only dims that loops
run over are candidates; `manualpar.core.model.probe` has recorded them.

Invariants: a value that leaves such a variable is gathered; the parameter's type then applies its
`get_value`; a parameter that is not read is not gathered.
"""

import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import flax.core.spmd
import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from manualpar.core.parameters.annotations import AxesOrLogicalNames
from manualpar.core.parameters.array_box import OF_SHAPE
from manualpar.core.parameters.split_parameter import SplitParameter

Path = tuple[Any, ...]
# The key in a variable's metadata under which the parameter's box is stored, without its array.
BOX = "manualpar_box"


def path_text(path: Path) -> str:
    """Formats a path in a module: `encoder/kernel`, `layers/0/kernel`."""
    return "/".join(map(str, path))


def annotate(variable: nnx.Variable[Any], path: str) -> Any:
    """Returns the value of a parameter, in a box if the parameter is annotated.

    `nnx.with_partitioning` and `nnx.Param(..., out_sharding=...)` annotate parameters. The box has
    the variable's rules (`sharding_rules`), followed by the rules of `nnx.logical_axis_rules`
    around the call. If the annotation also has `split=True`, the box is a `SplitParameter`.

    Raises:
      TypeError: The annotation is not a sequence of names; the message contains `path`.
      ValueError: A split parameter does not have one name for each dim, or has rules for its names.
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


@dataclasses.dataclass(frozen=True, eq=False)  # `==` would compare the arrays of boxes.
class _Use:
    """Makes a parameter from its stored array, where a module reads the parameter."""

    box: Any  # A box without its value.
    shape: tuple[int, ...]  # The shape of the stored array before any loop.
    path: str
    loop_dims: frozenset[int] | None
    split_dims: frozenset[int]

    def gather(self, stored: Any) -> Any:
        """Returns the parameter, or its slice in the surrounding loops."""
        box = self.box.replace(value=stored)
        if stored.shape != self.shape:
            # If several dims have the same size, loops may run over any of them. Removes each in
            # turn, so that a probe records all.
            box, *_ = [self._without(box, dims) for dims in self._removed_dims(stored.shape)]
        module = self.path.rpartition("/")[0]
        with jax.named_scope(module) if module else contextlib.nullcontext():
            return box.unbox()

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
        return self._gathered().get_value(**kwargs)

    def set_value(self: Any, value: Any, **kwargs: Any) -> None:
        """Refuses a new value, because it would be lost at the end of the call."""
        del value, kwargs
        raise ValueError(
            f"model: parameter {self.get_metadata(BOX).path!r} is set when the model is called; "
            "expected only the optimizer to change parameters. Put values that a call changes into "
            "an nnx.Variable of another type, such as nnx.BatchStat."
        )

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
        return jax.eval_shape(self.get_value)


@functools.cache
def _gathering_type(base: type[nnx.Variable[Any]]) -> type[nnx.Variable[Any]]:
    """Makes the gathering subclass of a variable type; cached, because NNX compares types."""
    metaclass: Any = type(base)
    made: type[nnx.Variable[Any]] = metaclass(
        base.__name__, (_Gathering, base), {"__module__": __name__}
    )
    return made
