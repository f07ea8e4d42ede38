"""Gives a loss full parameters although the model computes with parts (`split_parameter`).

A penalty on experts covers all experts, as on one device. So a loss gets boxes that gather over all
axes, including the axes of experts. `apply_fn` turns these boxes back into boxes that do not gather
split dims. If the loss has gathered an array, `apply_fn` takes this device's part of the array.

The type of a gathered array does not vary. If each device adds the array to its loss, the array is
cast to varying, and the transpose of the cast sums the gradients over the devices. The gradient of
experts is a sum over devices in any case.
"""

import dataclasses
from typing import Any

import jax

from manualpar.core.mesh.axes import axis_tuple, is_axis_bound
from manualpar.core.parameters.array_box import ArrayBox
from manualpar.core.parameters.collectives import cast_to_varying
from manualpar.core.parameters.parameter_info import split_names
from manualpar.core.parameters.sharded_parameter import ShardedParameter, is_box
from manualpar.core.parameters.split_parameter import take_shared
from manualpar.core.trees import Infos, Params, path_name


def as_whole(params: Params) -> Any:
    """Makes boxes gather over all axes, for a loss that reads them."""
    return jax.tree.map(
        lambda x: x.replace(is_whole=True) if isinstance(x, ArrayBox) else x, params, is_leaf=is_box
    )


def boxed_parts(infos: Infos, params: Params) -> Any:
    """Boxes this device's shards of split parameters, unless they are in boxes already."""

    def box(info: Any, x: Any) -> Any:
        names = split_names(info)
        return x if is_box(x) or not any(names) else ShardedParameter(x, names)

    return jax.tree.map(box, infos, params)


@dataclasses.dataclass(frozen=True)
class PartOfDevice:
    """Converts a loss's parameters to the parts with which the model computes.

    Attributes:
      infos: The tree of parameters with a `ParameterInfo` at each leaf.
      given: The parameters with which the loss is called. An array in this tree that is in no box
        is a part already.
    """

    infos: Infos
    given: Any

    def __call__(self, params: Params) -> Any:
        """Makes boxes stop gathering split dims; takes this device's part of gathered arrays.

        Communication:
          Forward: none. Backward: one all-reduce for the gradient of each array that the loss has
          gathered.
        """
        given = jax.tree_util.tree_leaves_with_path(self.given, is_leaf=is_box)
        boxed = {path_name(path) for path, x in given if is_box(x)}
        infos = {info.path: info for info in jax.tree.leaves(self.infos) if info.path in boxed}

        def part(path: Any, x: Any) -> Any:
            if isinstance(x, ArrayBox):
                return x.replace(is_whole=False)
            info = infos.get(path_name(path))
            if info is None or is_box(x) or getattr(x, "shape", None) != info.shape:
                return x
            names = split_names(info)
            named = {axis for name in (*names, *info.shared_names) for axis in axis_tuple(name)}
            if not all(map(is_axis_bound, named)):
                return x  # The model computes with global arrays.
            x = cast_to_varying(x, frozenset(named))  # One cast, so that there is one all-reduce.
            for dim, name in enumerate(names):
                if axes := axis_tuple(name):
                    size = x.shape[dim] // jax.lax.axis_size(axes)
                    start = jax.lax.axis_index(axes) * size
                    x = jax.lax.dynamic_slice_in_dim(x, start, size, axis=dim)
            return take_shared(x, info.shared_names)

        return jax.tree_util.tree_map_with_path(part, params, is_leaf=is_box)
