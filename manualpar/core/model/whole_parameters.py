"""What a loss reads of parameters that the model computes with in parts (`split_parameter`).

A penalty on experts is one on all of them, as on one device. So a loss gets boxes that gather over
all axes, experts too. `apply_fn` takes them back to what the model asks for: boxes that leave split
dimensions as they are and, of an array that the loss has gathered, this device's part.

The gather is typed as the same on all devices. Where devices then add it to losses of their own,
the cast sums their gradients, which is what the gradient of experts is in any case.
"""

import dataclasses
from typing import Any

import jax

from manualpar.core.mesh.axes import axis_tuple, is_axis_bound
from manualpar.core.parameters.array_box import ArrayBox
from manualpar.core.parameters.collectives import cast_to_varying
from manualpar.core.parameters.placement import path_name, split_names
from manualpar.core.parameters.sharded_parameter import ShardedParameter, is_box
from manualpar.core.parameters.split_parameter import take_shared


def as_whole(params: Any) -> Any:
    """Makes boxes that a loss may read."""
    return jax.tree.map(
        lambda x: x.replace(is_whole=True) if isinstance(x, ArrayBox) else x, params, is_leaf=is_box
    )


def boxed_parts(infos: Any, params: Any) -> Any:
    """Puts the parts of split parameters into boxes, if they are in none."""

    def box(info: Any, x: Any) -> Any:
        names = split_names(info)
        return x if is_box(x) or not any(names) else ShardedParameter(x, names)

    return jax.tree.map(box, infos, params)


@dataclasses.dataclass(frozen=True)
class PartOfDevice:
    """Makes what the model computes with of the parameters that a loss has.

    Attributes:
      infos: The tree of parameters with a `ParameterInfo` at each leaf.
    """

    infos: Any

    def __call__(self, params: Any) -> Any:
        """The same tree of boxes and arrays.

        Communication:
          None. Backward, of an array that the loss has gathered, an all-reduce of its gradient.
        """
        infos = {info.path: info for info in jax.tree.leaves(self.infos)}

        def part(path: Any, x: Any) -> Any:
            if isinstance(x, ArrayBox):
                return x.replace(is_whole=False)
            info = infos.get(path_name(path))
            if info is None or is_box(x) or getattr(x, "shape", None) != info.shape:
                return x
            for dim, name in enumerate(split_names(info)):
                axes = tuple(axis for axis in axis_tuple(name) if is_axis_bound(axis))
                if axes:
                    size = x.shape[dim] // jax.lax.axis_size(axes)
                    start = jax.lax.axis_index(axes) * size
                    x = cast_to_varying(x, axes)
                    x = jax.lax.dynamic_slice_in_dim(x, start, size, axis=dim)
            shared = {axis for name in info.shared_names for axis in axis_tuple(name)}
            if not all(map(is_axis_bound, shared)):
                return x
            return take_shared(cast_to_varying(x, frozenset(shared)), info.shared_names)

        return jax.tree_util.tree_map_with_path(part, params, is_leaf=is_box)
