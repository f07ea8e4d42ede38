"""Modes decide whether this package or XLA writes the collectives of a step.

A step uses a mode only through the methods of `Mode`. In mode `manual`, see
`manualpar.core.modes.manual`, this package writes every collective. In the modes of
`manualpar.core.modes.global_arrays` the same step runs on global arrays, and XLA derives the
collectives.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, Mesh

from manualpar.core.mesh.axes import Names, axis_tuple
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.modes.gradients import Sums
from manualpar.core.modes.strategy import ModeName
from manualpar.core.modes.variable_reduction import Rule
from manualpar.core.parameters.annotations import Rules
from manualpar.core.parameters.collectives import EXACT, MixedPrecisionPolicy
from manualpar.core.parameters.placement import ParameterSharding
from manualpar.core.parameters.sharded_parameter import ShardedParameter
from manualpar.core.trees import Batch, Collections, Params, Placements, Specs


@dataclasses.dataclass(frozen=True)
class Mode(abc.ABC):
    """Runs the operations of a step on the mesh.

    Attributes:
      mesh: The mesh; all of its axes have `AxisType.Auto`.
      data_axes: The mesh axes along which devices see different examples.
      comm: The formats in which values are sent, and whether collectives run axis by axis.
      rules: The mesh axes of the logical names of activations, for modes in which XLA derives the
        collectives.
      outer_axes: Axes of a `shard_map` around the step, along which devices take separate steps.
    """

    name: ClassVar[ModeName]
    writes_collectives: ClassVar[bool]  # False if XLA writes them.

    mesh: Mesh
    data_axes: tuple[str, ...]
    comm: MixedPrecisionPolicy = EXACT
    rules: Rules = ()
    outer_axes: tuple[str, ...] = ()

    @property
    @abc.abstractmethod
    def varying_axes(self) -> tuple[str, ...]:
        """The axes along which devices run the code on different examples."""

    @abc.abstractmethod
    def run(
        self, function: Callable[..., Any], *, in_specs: Specs, out_specs: Specs
    ) -> Callable[..., Any]:
        """Makes a function of global arrays, sharded by the specs, that runs the code of a step."""

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which a model is applied, inside `run`."""
        return nn.logical_axis_rules(())  # The model's constraints on activations do nothing.

    @property
    def model_mesh(self) -> AbstractMesh | None:
        """The mesh whose axes a model may name while the model is initialised, or `None`."""
        return None

    def under_mesh(self, function: Callable[..., Any], in_specs: Specs) -> Callable[..., Any]:
        """Wraps a function of global arrays so that it runs under `model_mesh`."""
        del in_specs
        return function

    @abc.abstractmethod
    def fold(self, rng: jax.Array) -> jax.Array:
        """Derives a key that differs between devices with different examples."""

    @abc.abstractmethod
    def to_zigzag(self, batch: Batch, roles: AxisRoles) -> Batch:
        """Puts the sequences of a device's batch into zig-zag order if an axis splits them."""

    @abc.abstractmethod
    def split(self, batch: Batch, num_minibatches: int, roles: AxisRoles) -> Batch:
        """Splits `[B, ...]` leaves into `[M, B/M, ...]`, `M` minibatches; repeats scalars."""

    def box(self, place: ParameterSharding, x: jax.Array, *, as_state: bool = False) -> Any:
        """Boxes a parameter, so that it gathers itself where it is used.

        `x` is a device's shard, or the global array if XLA writes the collectives. With `as_state`,
        `x` is sharded like the gradient. If `x` needs no gather and no cast, it is returned without
        a box.
        """
        names = place.sharded_names if as_state else place.names
        padding = place.padding if as_state else place.parameter_padding
        comm = self.comm.for_parameter(
            x.dtype, trainable=place.trainable, is_float8=place.is_float8
        )
        is_sharded = any(map(axis_tuple, (*names, *place.shared_names)))
        if not is_sharded and not comm.changes_values:
            return x
        return self._make_box(
            x,
            names,
            gather_axes=place.mean_axes,
            shard_only_axes=place.shard_only_axes,
            shared_names=place.shared_names,
            padding=padding,
            comm=comm,
        )

    @abc.abstractmethod
    def scatter(self, place: ParameterSharding, shard: Any, g: Any) -> Any:
        """Divides a gradient by its placement's divisor, and scatters it.

        `place` is the placement of the parameter, and `g` its gradient. `shard` is the box that
        `box(..., as_state=True)` makes of the parameter. A gradient that the backward pass has
        scattered is only divided.
        """

    @abc.abstractmethod
    def sync(self, place: ParameterSharding, shard: Any, g: Any) -> Any:
        """Reduces a gradient over the axes of its placement. `scatter` explains the arguments."""

    @abc.abstractmethod
    def sync_metrics(self, metrics: Sums) -> Sums:
        """Sums metrics over the devices."""

    @abc.abstractmethod
    def sync_collections(
        self, collections: Collections, before: Collections, rules: Mapping[str, Rule]
    ) -> Collections:
        """Makes the collections outside `params` equal on all devices."""

    @abc.abstractmethod
    def replicate(self, placements: Placements, params: Params) -> Params:
        """Gathers updated parameters, which the optimizer leaves sharded like their gradients."""

    @abc.abstractmethod
    def _make_box(self, x: jax.Array, names: Names, **fields: Any) -> ShardedParameter:
        """Makes a box with the fields of `ShardedParameter`."""
