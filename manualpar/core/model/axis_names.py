"""Replaces the axis names in a model's modules by the mesh axes that they stand for.

`nn.BatchNorm(axis_name="batch")` computes its statistics over the devices along an axis called
`batch`. The mesh's axes may have other names, so an alias maps `batch` to mesh axes. While the
model runs inside `shard_map`, the field `axis_name` of its modules (in NNX the attribute) is set to
these axes. In the other modes arrays are global, so the field is set to `None` and nothing is
reduced. All modes give the same result if the alias stands for all axes that split the batch.

Only fields with the name `axis_name` are replaced. If a model calls a collective, the axis argument
of the call does not change.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from manualpar.core.mesh.axes import AxisName, axis_tuple, is_axis_bound


@dataclasses.dataclass(frozen=True)
class AxisAliases:
    """Maps names that a model uses to mesh axes.

    Attributes:
      axes: For each name, the mesh axes that it stands for.
      split: The mesh axes of more than one device over which the batch is split.
    """

    axes: Mapping[str, tuple[str, ...]]
    split: tuple[str, ...]

    def resolve(self, module: Any) -> dict[str, AxisName | None]:
        """Returns the new field of a module, `{"axis_name": axes}`; `{}` if no alias fits it.

        If the mesh axes are not bound, because arrays are global, the new value is `None`.

        Raises:
          ValueError: The module gets global arrays, but the alias stands for only some of the
            devices.
        """
        names = getattr(module, "axis_name", None)
        all_names = names if isinstance(names, tuple | list) else (names,)
        if not any(name in self.axes for name in all_names if isinstance(name, str)):
            return {}
        axes = tuple(axis for name in all_names for axis in self.axes.get(name, (name,)))
        if all(map(is_axis_bound, axes)):
            return {"axis_name": axes if len(axes) > 1 else axes[0]}
        groups = getattr(module, "axis_index_groups", None)
        if set(self.split) - set(axes) or groups is not None:
            raise ValueError(
                f"model: {type(module).__name__} has axis_name={names!r}, which stands for {axes}"
                f"{'' if groups is None else ', and axis_index_groups'}, but in this mode the "
                f"batch is global along {self.split}, expected an alias for all of these axes"
                f"{'' if groups is None else ' and no groups'}, or mode='manual'."
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
    """Checks a user's aliases, which map a name in the model to a mesh axis or a tuple of axes.

    With `on_global_arrays` no axis is bound, so each of `data_axes` becomes an alias of itself.

    Raises:
      TypeError: The aliases do not map names to axes.
      ValueError: An alias is an axis of the mesh, or stands for an axis that the mesh lacks.
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
                "axis of the mesh; expected a name that is not an axis of the mesh. Rename the "
                "mesh's axis."
            )
    if on_global_arrays:
        axes = {axis: (axis,) for axis in data_axes} | axes
    split = tuple(axis for axis in data_axes if mesh.shape[axis] > 1)
    return AxisAliases(axes, split)
