"""The steps of replicas that train alone: each its own, and those in which they meet.

A step of training runs the step of another program, that of one replica, inside a `jax.shard_map`
over the replicas' axes alone; the step's own `shard_map`, nested in it, runs over the others.
Between replicas it sends the sums of the metrics and nothing else. An outer step runs over all axes
and sends the mean difference, see `manualpar.strategies.diloco.exchange`.

Invariants: after an outer step all replicas have the anchor, bit for bit. The keys of random
numbers differ between replicas. Frozen parameters are the anchor's alone.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from manualpar.core.mesh.rng import fold_rng_over_axis
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.mesh.splitting import check_batch
from manualpar.core.model.loss_function import Metrics
from manualpar.core.modes.gradients import sync_metrics
from manualpar.core.modes.manual import Manual
from manualpar.core.parameters.collectives import CommPolicy, cast_to_varying
from manualpar.core.parameters.placement import (
    Placement,
    complete_placement,
    param_specs,
    state_specs,
)
from manualpar.core.parameters.sharded_parameter import pad_leaf
from manualpar.core.parameters.trainable import combine, partition, trained
from manualpar.core.program.optimizer_update import Update
from manualpar.core.program.program import Program
from manualpar.core.program.step import Step
from manualpar.core.state.train_state import TrainState
from manualpar.strategies.diloco.exchange import mean_collections, mean_difference, to_replica
from manualpar.strategies.diloco.state import DiLoCoState


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
        state: DiLoCoState,
        outer_wire: CommPolicy,
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
        frozen = partition(self._placements, state.params)[1]
        own = state.replace(
            tx=self.inner.abstract_state.tx,
            params=combine((local["params"], frozen)),
            opt_state=local["opt_state"],
            collections=local["collections"],
            rng=fold_rng_over_axis(state.rng, self.axes),
        )
        # Otherwise the compiler is free to lay out what the outer `shard_map` hands in.
        own = jax.tree.map(self._constrain_own, own, self.inner.layout)
        own, metrics = self.own.train(own, batch)
        own = jax.tree.map(self._constrain_own, own, self.inner.layout)
        counted = metrics["loss"][1].astype(jnp.float32)
        if self.own.nonfinite == "skip":  # What has changed nothing has no weight; it may be NaN.
            counted = jnp.where(metrics["nonfinite"][0] > 0, jnp.zeros_like(counted), counted)
        local = {
            "params": partition(self._placements, own.params)[0],
            "opt_state": own.opt_state,
            "collections": own.collections,
            "examples": local["examples"] + counted,
        }
        return to_replica(local, self.axes), sync_metrics(metrics, self.axes)

    def meet(self, fragment: int, state: TrainState) -> TrainState:
        """Takes an outer step for a fragment: replicas go on from where they are on average."""
        return self._apply(fragment, state, *self._exchange(fragment, state), None)

    def train_and_meet(
        self, fragment: int, state: TrainState, batch: Any
    ) -> tuple[TrainState, Metrics]:
        """Takes a step on each replica, and meanwhile exchanges a fragment as it was before.

        What a replica has done in this step alone stays its own, and counts in the next exchange.
        """
        exchanged = self._exchange(fragment, state)
        after, metrics = self.train(state, batch)
        return self._apply(fragment, after, *exchanged, state.local), metrics

    def _exchange(self, fragment: int, state: TrainState) -> tuple[Any, Any]:
        """The mean difference of a fragment and, with the last one, the common collections."""
        part = functools.partial(self.state.fragments.part, fragment)
        placements = part(trained(self._placements))
        specs = state_specs(placements)
        whole, each = PartitionSpec(), PartitionSpec(self.state.name)
        with_collections = fragment == self.state.fragments.number - 1
        collections = (state.collections, state.local["collections"]) if with_collections else None

        def on_device(
            anchor: Any, local: Any, examples: jax.Array, collections: Any
        ) -> tuple[Any, Any]:
            local = jax.tree.map(lambda x: x[0], local)
            seen = examples[0, fragment]
            delta = mean_difference(anchor, local, seen, self.axes, self.outer_wire)
            if collections is None:
                return delta, None
            before, own = collections[0], jax.tree.map(lambda x: x[0], collections[1])
            rules = self.anchor.model.sync_collections
            return delta, mean_collections(before, own, self.axes, rules)

        run = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(specs, self.state.lead(specs), each, (whole, each) if collections else None),
            out_specs=(specs, whole if collections else None),
            check_vma=True,
        )
        params, _ = partition(self._placements, state.params)
        delta, common = run(
            self._as_state(placements, part(params), 0),
            self._as_state(placements, part(state.local["params"]), 1),
            state.local["examples"],
            collections,
        )
        return delta, common

    def _apply(
        self, fragment: int, state: TrainState, delta: Any, collections: Any, before: Any
    ) -> TrainState:
        """The state after an exchange.

        `before` is what replicas had when it began, if they have taken a step since then.
        """
        fragments, layout = self.state.fragments, self.state
        params, frozen = partition(self._placements, state.params)
        placements = fragments.part(fragment, trained(self._placements))
        paddings = [place.padding for place in jax.tree.leaves(layout.opt_placements[fragment])]
        update = Update(self.anchor.mode, placements, tuple(paddings))
        new, opt_state, _ = update(
            _without_loss(layout.part_tx),
            fragments.part(fragment, params),
            delta,
            opt_state=layout.by_fragment(state.opt_state)[fragment],
            value=jnp.zeros(()),
            value_and_grad=lambda params: (jnp.zeros(()), params),
        )
        own = {
            "params": fragments.part(fragment, state.local["params"]),
            "examples": state.local["examples"],
        }
        common = {"params": new}
        specs = {"params": param_specs(placements), "examples": PartitionSpec()}
        if collections is not None:
            own["collections"], common["collections"] = state.local["collections"], collections
            specs["collections"] = self.inner.layout.collections
        old = None
        if before is not None:
            old = before | {"params": fragments.part(fragment, before["params"])}
            old = {name: old[name] for name in own}

        def on_device(own: Any, common: Any, old: Any) -> Any:
            own, old = jax.tree.map(lambda x: x[0], (own, old))
            seen = own.pop("examples")
            since = jnp.zeros_like(seen) if old is None else seen - old.pop("examples")
            if old is None:
                local = jax.tree.map(lambda x: cast_to_varying(x, self.axes), common)
            else:  # What the step has changed.
                local = jax.tree.map(lambda x, now, then: x + (now - then), common, own, old)
            return to_replica(
                local | {"examples": seen.at[fragment].set(since[fragment])}, self.axes
            )

        lead = layout.lead(specs)
        run = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(lead, {name: specs[name] for name in common}, None if old is None else lead),
            out_specs=lead,
            check_vma=True,
        )
        local = run(own, common, old)
        local["params"] = combine((local["params"], state.local["params"]))
        return state.replace(
            params=combine((combine((new, params)), frozen)),
            opt_state=layout.with_fragment(state.opt_state, fragment, opt_state),
            collections=state.collections if collections is None else collections,
            local=state.local | local,
        )

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
        lambda info, place: complete_placement(place, info, roles, mesh), infos, step.placements
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
