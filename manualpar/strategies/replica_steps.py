"""The steps of replicas that train alone: each its own, and those in which they meet.

A step of training runs the step of another program, that of one replica, inside a `jax.shard_map`
over the replicas' axes alone; the step's own `shard_map`, nested in it, runs over the others.
Between replicas it sends the sums of the metrics and nothing else. An outer step runs over all axes
and sends the mean difference, see `manualpar.strategies.replica_exchange`.

Invariants: after an outer step all replicas have the anchor, bit for bit. The keys of random
numbers differ between replicas. Frozen parameters are the anchor's alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from manualpar.core.collectives import Wire
from manualpar.core.gradients import sync_metrics
from manualpar.core.partitioning import pad_leaf
from manualpar.core.program import Program
from manualpar.core.step import Step
from manualpar.modes.manual import Manual
from manualpar.rng import fold_rng_over_axis
from manualpar.sharding.layout import Placement, complete, param_specs, state_specs
from manualpar.sharding.roles import AxisRoles
from manualpar.sharding.splitting import check_batch
from manualpar.sharding.trainable import merge, split_trained, trained
from manualpar.strategies.local_state import LocalState
from manualpar.strategies.replica_exchange import mean_collections, mean_difference, to_replica
from manualpar.train_state import TrainState
from manualpar.update import Update
from manualpar.user_model.loss_function import Metrics


class _ReplicaMode(Manual):
    """Mode `manual` inside a `shard_map` over `outer_axes`."""

    def run(
        self, function: Callable[..., Any], *, in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={*self.mesh.axis_names} - {*self.outer_axes},
            check_vma=True,
        )


class ReplicaSteps:
    """The functions that are jitted.

    Attributes:
      inner: The program of one replica.
      anchor: Its step as one of all devices, see `anchor_step`.
      axes: The mesh axes of the replicas.
      state: How the state lies.
    """

    def __init__(
        self,
        inner: Program,
        anchor: Step,
        axes: tuple[str, ...],
        state: LocalState,
        outer_wire: Wire,
    ) -> None:
        """Takes the attributes, and how differences travel."""
        self.inner, self.anchor, self.axes, self.state = inner, anchor, axes, state
        self.outer_wire = outer_wire
        self.mesh, self._placements = anchor.mode.mesh, anchor.placements
        types = dict.fromkeys(axes, AxisType.Manual)
        own_mesh = cast(Any, self.mesh.abstract_mesh.update_axis_types(types))
        mode = inner.step.mode
        values = {field.name: getattr(mode, field.name) for field in dataclasses.fields(mode)}
        changed = {"mesh": own_mesh, "outer_axes": axes}
        self.own = _with_mode(inner.step, _ReplicaMode(**(values | changed)))

    def train(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Takes a step on each replica."""
        check_batch("batch", batch, self.mesh, self.anchor.roles)
        first = PartitionSpec(self.state.name)
        batch_specs = jax.tree.map(lambda x: first if jnp.ndim(x) else PartitionSpec(), batch)
        run = jax.shard_map(
            self._train_replica,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), first, batch_specs),
            out_specs=(first, PartitionSpec()),
            axis_names={*self.axes},
            check_vma=True,
        )
        local, metrics = run(state.replace(local={}), state.local, batch)
        rng, _ = jax.random.split(state.rng)
        return state.replace(step=state.step + 1, rng=rng, local=local), dict(metrics)

    def _train_replica(self, state: TrainState, local: Any, batch: Any) -> tuple[Any, Metrics]:
        local = jax.tree.map(lambda x: x[0], local)
        frozen = split_trained(self._placements, state.params)[1]
        own = state.replace(
            tx=self.inner.abstract_state.tx,
            params=merge((local["params"], frozen)),
            opt_state=local["opt_state"],
            collections=local["collections"],
            rng=fold_rng_over_axis(state.rng, self.axes),
        )
        # Otherwise the compiler is free to lay out what the outer `shard_map` hands in.
        own = jax.tree.map(self._constrain_own, own, self.inner.layout)
        own, metrics = self.own.train(own, batch)
        own = jax.tree.map(self._constrain_own, own, self.inner.layout)
        counted = metrics["loss"][1].astype(jnp.float32)
        if self.own.nonfinite == "skip":  # What has changed nothing has no weight.
            counted *= 1 - metrics["nonfinite"][0]
        local = {
            "params": split_trained(self._placements, own.params)[0],
            "opt_state": own.opt_state,
            "collections": own.collections,
            "examples": local["examples"] + counted,
        }
        return to_replica(local, self.axes), sync_metrics(metrics, self.axes)

    def meet(self, state: TrainState) -> TrainState:
        """Takes an outer step: replicas go on from where they have come to on average."""
        placements = trained(self._placements)
        params, frozen = split_trained(self._placements, state.params)
        update = Update(
            self.anchor.mode,
            placements,
            tuple(place.padding for place in jax.tree.leaves(self.state.opt_placements)),
        )
        specs = state_specs(placements)
        exchange = jax.shard_map(
            self._exchange,
            mesh=self.mesh,
            in_specs=(
                specs,
                self.state.lead(specs),
                PartitionSpec(),
                PartitionSpec(self.state.name),
                PartitionSpec(self.state.name),
            ),
            out_specs=(specs, PartitionSpec()),
            check_vma=True,
        )
        delta, collections = exchange(
            self._as_state(placements, params, 0),
            self._as_state(placements, state.local["params"], 1),
            state.collections,
            state.local["collections"],
            state.local["examples"],
        )
        params, opt_state, _ = update(
            _without_loss(self.state.outer_tx),
            params,
            delta,
            opt_state=state.opt_state,
            value=jnp.zeros(()),
            value_and_grad=lambda params: (jnp.zeros(()), params),
        )
        common = {
            "params": params,
            "collections": collections,
            "examples": jnp.zeros((), jnp.float32),
        }
        specs = {
            "params": param_specs(placements),
            "collections": self.inner.layout.collections,
            "examples": PartitionSpec(),
        }
        spread = jax.shard_map(
            lambda tree: to_replica(tree, self.axes),
            mesh=self.mesh,
            in_specs=(specs,),
            out_specs=self.state.lead(specs),
            check_vma=True,
        )
        return state.replace(
            params=merge((params, frozen)),
            opt_state=opt_state,
            collections=collections,
            local=state.local | spread(common),
        )

    def _exchange(
        self, anchor: Any, local: Any, collections: Any, own_collections: Any, examples: jax.Array
    ) -> tuple[Any, Any]:
        local, own_collections = jax.tree.map(lambda x: x[0], (local, own_collections))
        delta = mean_difference(anchor, local, examples[0], self.axes, self.outer_wire)
        rules = self.anchor.model.sync_collections
        return delta, mean_collections(collections, own_collections, self.axes, rules)

    def _as_state(self, placements: Any, params: Any, lead: int) -> Any:
        """Parameters as the optimizer's state lies, with so many dimensions before their own."""

        def shard(place: Placement, x: jax.Array) -> jax.Array:
            if place.state_names is None:
                return x
            spec = place.state_spec
            if lead:
                spec = PartitionSpec(self.state.name, *spec)
            padding = (*(0,) * lead, *place.padding) if place.padding else ()
            sharding = NamedSharding(self.mesh, spec)
            return jax.lax.with_sharding_constraint(pad_leaf(x, padding), sharding)

        return jax.tree.map(shard, placements, params)

    def _constrain_own(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.own.mode.mesh, spec))


def anchor_step(
    name: str, inner: Program, mesh: Mesh, roles: AxisRoles, axes: tuple[str, ...]
) -> Step:
    """The step of one replica as one of all devices, the state replicated over the replicas."""
    step = inner.step
    mode = dataclasses.replace(step.mode, mesh=mesh, data_axes=roles.data_axes)
    infos = step.model.parameters
    placements = jax.tree.map(
        lambda info, place: complete(place, info, roles, mesh), infos, step.placements
    )
    strategy = dataclasses.replace(
        step.strategy, name=name, replica_axes=(*axes, *step.strategy.replica_axes)
    )
    step = dataclasses.replace(step, strategy=strategy, roles=roles, placements=placements)
    return _with_mode(step, mode)


def _with_mode(step: Step, mode: Manual) -> Step:
    """The same step in another mode, or on another mesh."""
    return dataclasses.replace(
        step,
        mode=mode,
        model=dataclasses.replace(step.model, mode=mode),
        update=dataclasses.replace(step.update, mode=mode, placements=trained(step.placements)),
    )


def _without_loss(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, to which no loss is offered: between replicas there is none."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return updates, state

    return optax.GradientTransformation(tx.init, update)
