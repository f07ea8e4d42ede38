"""Axis names that a model was written with, and the mesh axes that they stand for.

`nn.BatchNorm(axis_name="batch")` takes its statistics over the devices along an axis called
`batch`, whatever the mesh calls it. An alias says which mesh axes are meant. While the model runs,
the field `axis_name` of its modules (in NNX the attribute) holds those, if they are bound: inside
`shard_map`. On global arrays the batch is whole, so the field is `None` and nothing is reduced,
which is the same if the alias stands for all axes that the batch is split over.

Only such fields are renamed: no alias reaches the argument of a collective that somebody calls.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from manualpar.sharding.mesh import AxisName, axis_tuple, is_axis_bound
from manualpar.user_model.module_fields import replace_fields


@dataclasses.dataclass(frozen=True)
class AxisAliases:
    """The mesh axes that names stand for.

    Attributes:
      axes: The mesh axes by name.
      split: The mesh axes of more than one device that the batch is split over.
    """

    axes: Mapping[str, tuple[str, ...]]
    split: tuple[str, ...]

    def resolve(self, module: Any) -> dict[str, AxisName | None]:
        """What the field `axis_name` of a module is to hold, if it has an alias.

        Raises:
          ValueError: On global arrays there is no such group of devices.
        """
        names = getattr(module, "axis_name", None)
        given = names if isinstance(names, tuple | list) else (names,)
        if not any(name in self.axes for name in given if isinstance(name, str)):
            return {}
        axes = tuple(axis for name in given for axis in self.axes.get(name, (name,)))
        if all(map(is_axis_bound, axes)):
            return {"axis_name": axes if len(axes) > 1 else axes[0]}
        groups = getattr(module, "axis_index_groups", None)
        if set(self.split) - set(axes) or groups is not None:
            raise ValueError(
                f"model: {type(module).__name__} has axis_name={names!r}, which stands for {axes}"
                f"{'' if groups is None else ', in groups'}, but in this mode the batch is that of "
                f"all devices along {self.split}. Let the alias stand for all of these, or use "
                "mode='manual'."
            )
        return {"axis_name": None}

    def intercept(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Renames while a method of a Linen module runs; for `flax.linen.intercept_methods`."""
        with replace_fields(context.module, self.resolve(context.module)):
            return next_fun(*args, **kwargs)

    def rename(self, module: nnx.Module) -> None:
        """Renames in an NNX module that lives for one call."""
        for _, inner in nnx.iter_modules(module):
            for name, value in self.resolve(inner).items():
                setattr(inner, name, value)


@dataclasses.dataclass(frozen=True, eq=False)
class AliasedLinen:
    """A Linen model in which names are aliases; it is used like the model itself."""

    module: nn.Module
    axis_aliases: AxisAliases

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """`module.apply`."""
        with nn.intercept_methods(self.axis_aliases.intercept):
            return self.module.apply(*args, **kwargs)


def with_axis_aliases(
    strategy: str,
    model: Any,
    aliases: Any,
    *,
    is_manual: bool,
    mesh: Mesh | AbstractMesh,
    data_axes: tuple[str, ...],
) -> Any:
    """The model, told what its axis names stand for.

    Args:
      strategy: Who was given the aliases, for the messages.
      model: A Linen model, or an `NNXModel`.
      aliases: A mesh axis, or a tuple of axes, by the model's name for it.
      is_manual: Whether the mode is. No axis is bound in the others, which rename `data_axes` too.
      mesh: The mesh.
      data_axes: The mesh axes that the batch is split over.

    Returns:
      A model that is used like the one given; that itself if there are no aliases.

    Raises:
      TypeError: The aliases are no names for axes.
      ValueError: An alias is an axis of the mesh, or stands for one that the mesh lacks.
    """
    example = "axis_aliases={'batch': 'data'}"
    is_mapping = isinstance(aliases, Mapping) and all(isinstance(name, str) for name in aliases)
    if not is_mapping or not all(isinstance(x, str | tuple) for x in aliases.values()):
        raise TypeError(
            f"{strategy}: axis_aliases={aliases!r}, expected a dict with a mesh axis, or a tuple "
            f"of axes, for each name that the model uses. Write {example}."
        )
    axes = {name: axis_tuple(value) for name, value in aliases.items()}
    for name, value in axes.items():
        unknown = [axis for axis in value if axis not in mesh.shape]
        if unknown or not value:
            raise ValueError(
                f"{strategy}: axis_aliases has {name!r}: {aliases[name]!r}, expected axes of the "
                f"mesh, which has {list(mesh.shape)}. Write {example}."
            )
        if name in mesh.shape and value != (name,):
            raise ValueError(
                f"{strategy}: axis_aliases has {name!r}: {aliases[name]!r}, but {name!r} is an "
                "axis of the mesh, expected a name that it does not have. Rename the mesh's axis."
            )
    if not is_manual:
        axes = {axis: (axis,) for axis in data_axes} | axes
    if not axes:
        return model
    found = AxisAliases(axes, tuple(axis for axis in data_axes if mesh.shape[axis] > 1))
    if isinstance(model, nn.Module):
        return AliasedLinen(model, found)
    return dataclasses.replace(model, axis_aliases=found)
