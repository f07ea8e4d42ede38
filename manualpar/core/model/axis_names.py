"""Axis names that a model was written with, and the mesh axes that they stand for.

`nn.BatchNorm(axis_name="batch")` takes its statistics over the devices along an axis called
`batch`, whatever the mesh calls it. An alias says which mesh axes are meant. While the model runs,
the field `axis_name` of its modules (in NNX the attribute) holds those axes if they are bound, that
is, inside `shard_map`. On global arrays the batch is whole, so the field is `None` and nothing is
reduced; the result is the same if the alias stands for all axes that the batch is split over.

Only such fields are renamed, never the argument of a collective that somebody calls.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from manualpar.core.mesh.axes import AxisName, axis_tuple, is_axis_bound


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
        """The value for the field `axis_name` of a module, by that name; `{}` without an alias.

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


NO_ALIASES = AxisAliases({}, ())


def check_axis_aliases(
    strategy: str,
    aliases: Any,
    *,
    mesh: Mesh | AbstractMesh,
    data_axes: tuple[str, ...],
    on_global_arrays: bool,
) -> AxisAliases:
    """Checks a user's aliases: a mesh axis, or a tuple of axes, by the model's name for it.

    On global arrays, where no axis is bound, `data_axes` are renamed too.

    Raises:
      TypeError: The aliases are not names of axes.
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
    if on_global_arrays:
        axes = {axis: (axis,) for axis in data_axes} | axes
    split = tuple(axis for axis in data_axes if mesh.shape[axis] > 1)
    return AxisAliases(axes, split)
