"""Rules by which strategies place parameters: replicate, shard one dim, shard the state only.

Each rule is a `PlaceFn`, or becomes a `PlaceFn` by `functools.partial`. `choose_shard_dim` decides
which dim is sharded.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable
from typing import Any

from manualpar.core.mesh.axes import Names, axis_tuple
from manualpar.core.parameters.parameter_info import ParameterInfo, split_names
from manualpar.core.parameters.placement import Placement

# A tile of a 16-bit array in TPU memory: 128 entries of the last dimension by 16 entries of the
# dimension before it. See https://openxla.org/xla/tiled_layout.
TILE = (128, 16)
# The platforms that average a layer's gradient while they compute other layers, and the elements of
# a layer's parameter that are worth an all-reduce. A TPU v5e computes nothing during an all-reduce.
OVERLAPS_MEANS = frozenset({"gpu"})
MIN_MEAN_SIZE = 2**18


def replicate(
    parameter: ParameterInfo,
    axes: tuple[str, ...],
    axis_size: int,
    *,
    mean_in_loop: bool = False,
) -> Placement:
    """Replicates a parameter, except along the dims that its annotation shards.

    With `mean_in_loop` a loop over layers averages the gradient of each layer, if the platform
    overlaps such means and the parameter of one layer is large enough.
    """
    del axes
    dims = enumerate(parameter.shape)
    layer_size = math.prod(size for dim, size in dims if dim not in parameter.loop_dims)
    mean_in_loop &= axis_size > 1 and layer_size >= MIN_MEAN_SIZE
    mean_in_loop &= parameter.platform in OVERLAPS_MEANS
    return Placement(parameter.names, mean_in_loop=mean_in_loop)


def shard_one_dim(
    parameter: ParameterInfo,
    axes: tuple[str, ...],
    axis_size: int,
    *,
    min_weight_size: int,
    pad: bool = False,
    keep_gathered: tuple[str, ...] = (),
    replicate: tuple[str, ...] = (),
) -> Placement:
    """Shards a parameter along the dim that `choose_shard_dim` returns, and pads it if needed.

    A parameter in `keep_gathered` gets `Placement.keep`. A parameter in `replicate` is replicated,
    even if it is annotated.
    """
    if any(is_inside(parameter.path, name) for name in replicate):
        return Placement(split_names(parameter), "named by replicate", keep=True)
    keep = any(is_inside(parameter.path, name) for name in keep_gathered)
    if set(axes) & {axis for name in parameter.names for axis in axis_tuple(name)}:
        return Placement(parameter.names, "annotated", keep=keep)
    shape, names = parameter.shape, parameter.names
    dim, note = choose_shard_dim(
        shape,
        names,
        axis_size,
        min_weight_size=min_weight_size,
        excluded_dims=parameter.unsharded_dims,
        pad=pad,
        prefers_first=parameter.platform == "gpu",
    )
    if dim is None:
        return Placement(names, note, keep=keep)
    padding: tuple[int, ...] = ()
    if missing := -shape[dim] % axis_size:
        padding = tuple(missing if i == dim else 0 for i in range(len(shape)))
        note = f"padded from {shape[dim]} to {shape[dim] + missing}"
    name = axes[0] if len(axes) == 1 else axes
    names = (*names[:dim], name, *names[dim + 1 :])
    return Placement(names, note, padding=padding, keep=keep)


def shard_state_only(
    parameter: ParameterInfo, axes: tuple[str, ...], axis_size: int, **placing: Any
) -> Placement:
    """Shards the gradient and the optimizer state like `shard_one_dim`, but not the parameter.

    `placing` has the keyword arguments of `shard_one_dim`.
    """
    sharded = shard_one_dim(parameter, axes, axis_size, **placing)
    if sharded.names == parameter.names or sharded.keep:
        return sharded
    return dataclasses.replace(sharded, names=parameter.names, state_names=sharded.names)


def choose_shard_dim(
    shape: tuple[int, ...],
    names: Names,
    axis_size: int,
    *,
    min_weight_size: int,
    excluded_dims: frozenset[int] = frozenset(),
    pad: bool = False,
    prefers_first: bool = False,
) -> tuple[int | None, str]:
    """Decides which dimension of a parameter to shard.

    The candidates are the free dimensions (their name is `None`) that `axis_size` divides. If there
    are none, `pad` makes every free dimension a candidate. Dimensions whose shards are complete
    tiles (`TILE`) are preferred, because TPUs have to copy partial tiles before sending. The
    largest preferred dimension is chosen. If several have this size, the first is chosen, because
    its shards are contiguous. A simulation on CPUs has the layout of TPUs. With `prefers_first` the
    first candidate is chosen. This is the rule on GPUs, because XLA:GPU gathers and scatters along
    the first dimension only, and keeps a transposed copy of a stack of parameters that is sharded
    along another one. A parameter of fewer than `min_weight_size` elements is not worth a
    collective and stays replicated. `excluded_dims` are not sharded, because each use of the
    parameter gets only one slice along them (as in `nn.scan`).

    Returns:
      The dimension, or `None` if no dimension is sharded, and the reason.
    """
    size = math.prod(shape)
    if size < min_weight_size:
        return None, f"too small: {size} < {min_weight_size}"
    if size == 0 or not shape:
        return None, "no elements to shard" if shape else "a scalar"
    seen = [dim for dim in range(len(shape)) if dim not in excluded_dims]
    free = [dim for dim in seen if names[dim] is None]
    candidates = [dim for dim in free if shape[dim] % axis_size == 0]
    candidates = candidates or [dim for dim in free if pad and shape[dim] > 1]
    if not candidates:
        return None, f"none of {[shape[dim] for dim in free]} divides by {axis_size}"
    if prefers_first:
        return candidates[0], "only one that divides" if len(candidates) == 1 else "first"
    tile = dict(zip(reversed(seen), TILE, strict=False))
    tiled = [dim for dim in candidates if shape[dim] % (axis_size * tile.get(dim, 1)) == 0]
    dim = max(tiled or candidates, key=lambda dim: (shape[dim], -dim))
    if len(candidates) == 1:
        return dim, "only one that divides"
    largest = max(shape[dim] for dim in candidates)
    return dim, "largest" if shape[dim] == largest else "whole tiles"


def is_inside(path: str, name: str) -> bool:
    """Returns whether a path is `name` or below it: `head/kernel` is inside `head`."""
    return f"{path}/".startswith(f"{name}/")


def check_named(
    builder: str,
    parameters: Iterable[tuple[ParameterInfo, Placement]],
    **fields: tuple[str, ...],
) -> None:
    """Refuses a name in `fields` that is not a parameter or module of the model.

    `fields` are options of the builder, such as `replicate=("head",)`.
    """
    paths = [info.path for info, _ in parameters]
    for field, name in ((field, name) for field, names in fields.items() for name in names):
        if not any(is_inside(path, name) for path in paths):
            known = [*paths, *{path.split("/")[0] for path in paths}]
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0)
            raise ValueError(
                f"{builder}: {field} names {name!r}, expected a parameter or a module with "
                f"parameters, such as {near[0]!r}; inspect.layout_table shows all parameters."
            )
