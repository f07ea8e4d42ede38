"""Mode `manual`: a step runs in `shard_map`, and this package writes the collectives.

Each device runs the step on its part of the arrays. This is the package's main mode, and the only
mode whose traced program shows all communication.
`manualpar.core.modes.mode` explains modes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax

from manualpar.core.mesh.axes import Names
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.mesh.splitting import fold_rng_over_axis, split_minibatches, to_zigzag
from manualpar.core.modes.gradients import Sums, reduce_gradient, sync_metrics
from manualpar.core.modes.mode import Mode
from manualpar.core.modes.strategy import ModeName
from manualpar.core.modes.variable_reduction import Rule, sync_collections
from manualpar.core.parameters.placement import (
    ParameterSharding,
    map_in_scopes,
    param_specs,
    state_specs,
)
from manualpar.core.parameters.sharded_parameter import (
    ShardedParameter,
    boxed_axes,
    reduction_dtype,
    replicate_shards,
    scatter_gradients,
)
from manualpar.core.trees import Batch, Collections, Params, Placements, Specs


class Manual(Mode):
    """Mode `manual`: runs a step in `shard_map`, with the collectives of this package."""

    name: ClassVar[ModeName] = "manual"
    writes_collectives: ClassVar[bool] = True

    @property
    def varying_axes(self) -> tuple[str, ...]:
        """The axes along which devices run the code on different examples."""
        return self.data_axes

    def run(
        self, function: Callable[..., Any], *, in_specs: Specs, out_specs: Specs
    ) -> Callable[..., Any]:
        """Runs a function of per-device arrays in `shard_map`."""
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True
        )

    def fold(self, rng: jax.Array) -> jax.Array:
        """Derives a key that differs between devices with different examples."""
        return fold_rng_over_axis(rng, self.data_axes)

    def to_zigzag(self, batch: Batch, roles: AxisRoles) -> Any:
        """Puts the sequences of a device's batch into zig-zag order if an axis splits them."""
        return batch if roles.context_axis is None else to_zigzag(batch, roles.context_axis)

    def split(self, batch: Batch, num_minibatches: int, roles: AxisRoles) -> Any:
        """Splits `[B, ...]` leaves into `[M, B/M, ...]`, `M` minibatches; repeats scalars."""
        del roles
        return split_minibatches(batch, num_minibatches)

    def scatter(self, place: ParameterSharding, shard: Any, g: Any) -> Any:
        """Divides a gradient and scatters it, see `Mode`."""
        if place.divisor > 1:
            # Divides before quantization, so that residuals are errors of the mean on every mesh.
            g = jax.tree.map(lambda x: x / place.divisor, g)
        return g if boxed_axes(g) == boxed_axes(shard) else scatter_gradients(g, shard)

    def sync(self, place: ParameterSharding, shard: Any, g: Any) -> Any:
        """Reduces a gradient over the axes of its placement. `scatter` explains the arguments."""
        return reduce_gradient(
            g,
            reduction_dtype(shard),
            mean_axes=place.mean_axes,
            sum_axes=place.sum_axes,
        )

    def sync_metrics(self, metrics: Sums) -> Sums:
        """Sums metrics over the devices."""
        return sync_metrics(metrics, self.data_axes)

    def sync_collections(
        self, collections: Collections, before: Any, rules: Mapping[str, Rule]
    ) -> Any:
        """Makes the collections outside `params` equal on all devices."""
        return sync_collections(collections, self.data_axes, before=before, rules=rules)

    def replicate(self, placements: Placements, params: Params) -> Any:
        """Gathers updated parameters, which the optimizer leaves sharded like their gradients."""
        exact = dataclasses.replace(self, comm=self.comm.exact)

        def gather(place: ParameterSharding, x: Any) -> Any:
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
