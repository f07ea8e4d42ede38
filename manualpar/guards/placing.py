"""What a strategy says, checked where it says it: an error names the strategy and the parameter."""

from jax.sharding import Mesh

from manualpar.core.strategy import Sends, Strategy
from manualpar.guards.options import check_choice
from manualpar.sharding.axes import axes_size, axis_tuple
from manualpar.sharding.layout import ParameterInfo, Placement


def check_strategy(strategy: Strategy, num_minibatches: int) -> None:
    """Refuses a strategy that cannot be read.

    Raises:
      ValueError: `gather_every` or `reduce_every` is none of the words that it may be.
      TypeError: `replica_axes` is no tuple, or `sends` returns something else than `Sends`.
    """
    name = strategy.name
    check_choice(name, "gather_every", strategy.gather_every, ("minibatch", "step"))
    check_choice(name, "reduce_every", strategy.reduce_every, ("minibatch", "step"))
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
    if not isinstance(sends, Sends):
        raise TypeError(f"{name}: sends returned {sends!r}, expected a Sends.")


def place_parameter(
    strategy: Strategy, info: ParameterInfo, axes: tuple[str, ...], mesh: Mesh
) -> Placement:
    """Where a strategy places a parameter.

    Raises:
      ValueError: The placement does not fit the parameter or the mesh.
      TypeError: It is no `Placement`.
    """
    what = f"{strategy.name}: place of parameter {info.path!r} of shape {info.shape}"
    try:
        placement = strategy.place(info, axes, axes_size(mesh, axes))
    except Exception as error:
        error.add_note(f"raised by {what}")
        raise
    if not isinstance(placement, Placement):
        raise TypeError(f"{what} returned {placement!r}, expected a Placement.")
    for field, names, padding in (
        ("names", placement.names, placement.parameter_padding),
        ("state_names", placement.sharded_names, placement.padding),
    ):
        if len(names) != len(info.shape):
            raise ValueError(f"{what} has {field}={names}, expected one for each dimension.")
        used = [axis for name in names for axis in axis_tuple(name)]
        if len(set(used)) < len(used) or not set(used) <= set(mesh.shape):
            raise ValueError(
                f"{what} has {field}={names}, expected each mesh axis once at most, of "
                f"{list(mesh.shape)}."
            )
        widths = padding or (0,) * len(names)
        for dim, (size, width, name) in enumerate(zip(info.shape, widths, names, strict=True)):
            shards = axes_size(mesh, axis_tuple(name))
            if (size + width) % shards:
                raise ValueError(
                    f"{what} has {field}={names}, and {size + width} elements along dim {dim} do "
                    f"not divide over {shards} devices; expected a dim that divides, or a padding."
                )
    return placement
