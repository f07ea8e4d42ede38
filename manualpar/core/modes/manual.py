"""Mode `manual`: every device runs the code on its part of the arrays; we write every collective.

This is the package's main mode, and the only mode whose traced program shows all communication. In
the other modes, see `manualpar.core.modes.global_arrays`, the same step runs on global arrays and
XLA derives the collectives. A step uses a mode only through the methods below.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, Mesh

from manualpar.core.mesh.axes import Names, axis_tuple
from manualpar.core.mesh.rng import fold_rng_over_axis
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.mesh.splitting import split_minibatches
from manualpar.core.mesh.zigzag import to_zigzag
from manualpar.core.modes.gradients import reduce_gradient, sync_metrics
from manualpar.core.modes.strategy import ModeName
from manualpar.core.modes.variable_reduction import CollectionSync, sync_collections
from manualpar.core.parameters.annotations import Rules
from manualpar.core.parameters.comm_policy import EXACT, CommPolicy
from manualpar.core.parameters.placement import Placement, map_in_scopes, param_specs, state_specs
from manualpar.core.parameters.sharded_parameter import (
    ShardedParameter,
    boxed_axes,
    reduction_dtype,
    replicate_shards,
    scatter_gradients,
)
from manualpar.core.state.metrics import Metrics

_MODES: dict[str, type["Manual"]] = {}


def register_mode(mode: type["Manual"]) -> type["Manual"]:
    """Registers a mode's class under its name, so that `mode_named` finds it; a decorator."""
    _MODES[mode.name] = mode
    return mode


def mode_named(name: str) -> type["Manual"]:
    """Returns the class of a mode, by its name."""
    return _MODES[name]


@register_mode
@dataclasses.dataclass(frozen=True)
class Manual:
    """Runs the operations of a step on the mesh.

    Attributes:
      mesh: The mesh, all axes of `AxisType.Auto`.
      data_axes: The mesh axes along which devices see different examples.
      comm: The formats to send in, and the order of the axes.
      rules: The mesh axes of the logical names of activations, for modes in which XLA derives the
        collectives.
      outer_axes: Axes of a `shard_map` around the step; devices along them take separate steps.
    """

    name: ClassVar[ModeName] = "manual"
    writes_collectives: ClassVar[bool] = True  # False if XLA writes them.

    mesh: Mesh
    data_axes: tuple[str, ...]
    comm: CommPolicy = EXACT
    rules: Rules = ()
    outer_axes: tuple[str, ...] = ()

    @property
    def varying_axes(self) -> tuple[str, ...]:
        """The axes along which devices run the code on different examples."""
        return self.data_axes

    def run(
        self, function: Callable[..., Any], *, in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Turns a function of per-device arrays into a function of global arrays."""
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True
        )

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which a model is applied, inside `run`."""
        # The axes are manual, so the model's constraints on activations must do nothing.
        return nn.logical_axis_rules(())

    @property
    def model_mesh(self) -> AbstractMesh | None:
        """The mesh whose axes a model may name when it is built and initialised."""
        return None

    def under_mesh(self, function: Callable[..., Any], in_specs: Any) -> Callable[..., Any]:
        """Wraps a function of global arrays so that it runs under `model_mesh`."""
        del in_specs
        return function

    def fold(self, rng: jax.Array) -> jax.Array:
        """Derives a key that differs between devices with different examples."""
        return fold_rng_over_axis(rng, self.data_axes)

    def to_zigzag(self, batch: Any, roles: AxisRoles) -> Any:
        """Puts the sequences of a device's batch into zig-zag order if an axis splits them."""
        return batch if roles.context_axis is None else to_zigzag(batch, roles.context_axis)

    def split(self, batch: Any, num_minibatches: int, roles: AxisRoles) -> Any:
        """Splits `[B, ...]` leaves into `[M, B/M, ...]`, `M` minibatches; repeats scalars."""
        del roles
        return split_minibatches(batch, num_minibatches)

    def box(self, place: Placement, x: jax.Array, *, as_state: bool = False) -> Any:
        """Boxes a parameter, so that it gathers itself where it is used.

        `x` is a device's shard, or the global array if XLA writes the collectives. With `as_state`,
        `x` is sharded like its gradient. An array that needs no gather and no cast is returned
        without a box.
        """
        names = place.sharded_names if as_state else place.names
        padding = place.padding if as_state else place.parameter_padding
        comm = self.comm.for_parameter(x.dtype, trainable=place.trainable)
        is_sharded = any(map(axis_tuple, (*names, *place.shared_names)))
        if not is_sharded and not comm.changes_values:
            return x
        return self._make_box(
            x,
            names,
            gather_axes=place.mean_axes,
            storage_axes=place.storage_axes,
            shared_names=place.shared_names,
            padding=padding,
            comm=comm,
        )

    def scatter(self, place: Placement, shard: Any, g: Any) -> Any:
        """Divides a gradient by its placement's divisor, and scatters it.

        `shard` is the box that `box(..., as_state=True)` makes of the parameter. A gradient that
        the backward pass has scattered is only divided.
        """
        if place.divisor > 1:
            # Divide before any quantizer: its residuals are then errors of the mean on every mesh.
            g = jax.tree.map(lambda x: x / place.divisor, g)
        return g if boxed_axes(g) == boxed_axes(shard) else scatter_gradients(g, shard)

    def sync(self, place: Placement, shard: Any, g: Any) -> Any:
        """Reduces a gradient over the axes of its placement. `scatter` explains the arguments."""
        return reduce_gradient(
            g,
            reduction_dtype(shard),
            mean_axes=place.mean_axes,
            sum_axes=place.sum_axes,
        )

    def sync_metrics(self, metrics: Metrics) -> Metrics:
        """Sums metrics over the devices."""
        return sync_metrics(metrics, self.data_axes)

    def sync_collections(
        self, collections: Any, before: Any, rules: Mapping[str, CollectionSync]
    ) -> Any:
        """Makes a model's other collections the same on all devices."""
        return sync_collections(collections, self.data_axes, before=before, rules=rules)

    def replicate(self, placements: Any, params: Any) -> Any:
        """Gathers updated parameters: from the specs of gradients to those of parameters."""
        exact = dataclasses.replace(self, comm=self.comm.exact)

        def gather(place: Placement, x: Any) -> Any:
            if place.state_names is None:
                return x
            return replicate_shards(exact.box(place, x, as_state=True))

        run = self.run(
            lambda params: map_in_scopes(gather, placements, params),
            in_specs=(state_specs(placements),),
            out_specs=param_specs(placements),
        )
        return run(params)

    def _make_box(self, x: jax.Array, names: Names, **fields: Any) -> ShardedParameter:
        return ShardedParameter(x, names, **fields)
