"""Checks a strategy and its placements; errors name the strategy and the parameter."""

import dataclasses
import inspect

from jax.sharding import Mesh

from manualpar.core.mesh.axes import axes_size, axis_tuple
from manualpar.core.mesh.mesh import platform_of
from manualpar.core.model.options import check_choice
from manualpar.core.modes.strategy import CommCounts, Strategy
from manualpar.core.parameters.placement import ParameterInfo, Placement, split_names
from manualpar.core.summary import describe_function


def check_strategy(strategy: Strategy, num_minibatches: int) -> None:
    """Refuses a strategy with a wrong value in a field."""
    name = strategy.name
    check_choice(name, "gather_every", strategy.gather_every, ("minibatch", "step"))
    check_choice(name, "reduce_every", strategy.reduce_every, ("minibatch", "step"))
    _check_signature(strategy, "place", 3, "(parameter, axes, number of devices) -> Placement")
    _check_signature(strategy, "sends", 2, "(number of minibatches, keep) -> CommCounts")
    if not isinstance(strategy.replica_axes, tuple):
        raise TypeError(
            f"{name}: replica_axes={strategy.replica_axes!r}, expected a tuple of axes."
        )
    try:
        sends = strategy.sends(num_minibatches, False)
    except Exception as error:
        error.add_note(
            f"raised by `sends` of strategy {name!r}, called with ({num_minibatches}, False)"
        )
        raise
    if not isinstance(sends, CommCounts):
        raise TypeError(f"{name}: sends returned {sends!r}, expected a CommCounts.")


def _check_signature(strategy: Strategy, field: str, count: int, expected: str) -> None:
    """Refuses a function in a field of the strategy that does not take `count` arguments."""
    function, shown = getattr(strategy, field), ""
    try:
        shown = f"{describe_function(function)}{inspect.signature(function)}"
        inspect.signature(function).bind(*[None] * count)
    except ValueError:  # Some builtins have no signature.
        return
    except TypeError as error:
        raise TypeError(
            f"{strategy.name}: {field} is {shown or repr(function)}, expected a function "
            f"{expected} ({error})."
        ) from None


def place_parameter(
    strategy: Strategy, info: ParameterInfo, axes: tuple[str, ...], mesh: Mesh
) -> Placement:
    """Asks a strategy for the placement of a parameter, and checks the placement."""
    prefix = f"{strategy.name}: place of parameter {info.path!r} of shape {info.shape}"
    shared = {axis for name in info.shared_names for axis in axis_tuple(name)}
    axes = tuple(axis for axis in axes if axis not in info.split_axes | shared)
    if not axes:  # The model computes with shards over all axes, so the strategy gets none.
        return Placement(info.names)
    info = dataclasses.replace(info, platform=platform_of(mesh))
    try:
        placement = strategy.place(info, axes, axes_size(mesh, axes))
    except Exception as error:
        error.add_note(f"raised by {prefix}")
        raise
    if not isinstance(placement, Placement):
        raise TypeError(f"{prefix} returned {placement!r}, expected a Placement.")
    for field, names, padding in (
        ("names", placement.names, placement.parameter_padding),
        ("state_names", placement.sharded_names, placement.padding),
    ):
        if len(names) != len(info.shape):
            raise ValueError(
                f"{prefix} has {field}={names}, expected one entry for each dimension."
            )
        if any(names[d] != n for d, n in enumerate(split_names(info)) if n):
            raise ValueError(
                f"{prefix} has {field}={names}, expected {split_names(info)} to stay: the model "
                "computes with the shards of these dims. Shard another dim."
            )
        if any(names[dim] for dim in info.unsharded_dims):
            raise ValueError(
                f"{prefix} has {field}={names}, expected None for dims "
                f"{sorted(info.unsharded_dims)}, because a loop runs over them or devices share "
                "their entries."
            )
        used = [axis for name in names for axis in axis_tuple(name)]
        if len(set(used)) < len(used) or not set(used) <= set(mesh.shape):
            raise ValueError(
                f"{prefix} has {field}={names}, expected each mesh axis at most once, of "
                f"{list(mesh.shape)}."
            )
        widths = padding or (0,) * len(names)
        for dim, (size, width, name) in enumerate(zip(info.shape, widths, names, strict=True)):
            shards = axes_size(mesh, axis_tuple(name))
            if (size + width) % shards:
                raise ValueError(
                    f"{prefix} has {field}={names}, and {size + width} elements along dim {dim} do "
                    f"not divide over {shards} devices; choose a dim that divides, or a padding."
                )
    return placement
