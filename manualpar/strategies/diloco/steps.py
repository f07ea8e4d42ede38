"""DiLoCo's inner step (each replica separately) and outer step (all replicas together).

An inner step runs the step of one replica's program inside a `jax.shard_map` over only the
replicas' axes. The `shard_map` of that program is nested inside and runs over the other axes. In an
inner step replicas send each other only the sums of the metrics. An outer step runs over all axes
and sends the outer gradient, see `manualpar.strategies.diloco.steps`.

Invariants: after an outer step all replicas have the common parameters, bit for bit. The random
keys differ between replicas. Frozen parameters have no per-replica copy.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.mesh.splitting import check_batch, fold_rng_over_axis
from manualpar.core.model.loss_function import Metrics
from manualpar.core.modes.gradients import sync_metrics
from manualpar.core.modes.manual import Manual
from manualpar.core.modes.mode import Mode
from manualpar.core.modes.variable_reduction import KNOWN, CollectionSync, sync_collections
from manualpar.core.parameters.collectives import MixedPrecisionPolicy, cast_to_varying
from manualpar.core.parameters.placement import (
    Placement,
    combine,
    is_inside,
    param_specs,
    parameter_sharding,
    partition,
    state_specs,
    trained,
)
from manualpar.core.parameters.sharded_parameter import pad_leaf
from manualpar.core.program.optimizer_update import Update
from manualpar.core.program.program import Program
from manualpar.core.program.step import Step
from manualpar.core.state.train_state import TrainState
from manualpar.core.tracing.scopes import COUNT_SCOPE, OUTER_SCOPE
from manualpar.core.trees import path_name
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
    """DiLoCo's step functions, before they are jitted.

    Attributes:
      inner: The program of one replica.
      replicated_step: The step on the mesh of all devices, with the state replicated over `axes`.
      axes: The mesh axes of the replicas.
      state: Makes and shards the state.
    """

    def __init__(
        self,
        inner: Program,
        replicated_step: Step,
        axes: tuple[str, ...],
        state: DiLoCoState,
        outer_comm: MixedPrecisionPolicy,
    ) -> None:
        """Sets the attributes; `outer_comm` has the dtype and quantizer of sent differences."""
        self.inner, self.axes, self.state = inner, axes, state
        self.replicated_step, self.outer_comm = replicated_step, outer_comm
        self.mesh, self._placements = replicated_step.mode.mesh, replicated_step.placements
        types = dict.fromkeys(axes, AxisType.Manual)
        replica_mesh = cast(Any, self.mesh.abstract_mesh.update_axis_types(types))
        mode = inner.step.mode
        values = {field.name: getattr(mode, field.name) for field in dataclasses.fields(mode)}
        changed = {"mesh": replica_mesh, "outer_axes": axes}
        self._replica_step = _with_mode(inner.step, _ReplicaMode(**(values | changed)))

    def train(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Takes an inner step on each replica."""
        check_batch("batch", batch, self.mesh, self.replicated_step.roles)
        first = PartitionSpec(self.state.axis_name)
        batch_specs = jax.tree.map(lambda x: first if jnp.ndim(x) else PartitionSpec(), batch)
        run = jax.shard_map(
            self._train_replica,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), first, batch_specs),
            out_specs=(first, PartitionSpec()),
            axis_names={*self.axes},
            check_vma=True,
        )
        replicas, metrics = run(state.replace(local={}), state.local, batch)
        rng, _ = jax.random.split(state.rng)
        return state.replace(step=state.step + 1, rng=rng, local=replicas), dict(metrics)

    def _train_replica(self, state: TrainState, replica: Any, batch: Any) -> tuple[Any, Metrics]:
        replica = jax.tree.map(lambda x: x[0], replica)
        frozen = partition(self._placements, state.params)[1]
        inner_state = state.replace(
            tx=self.inner.abstract_state.tx,
            params=combine((replica["params"], frozen)),
            opt_state=replica["opt_state"],
            collections=replica["collections"],
            rng=fold_rng_over_axis(state.rng, self.axes),
        )
        # Without constraints XLA may choose another sharding inside the outer `shard_map`.
        inner_state = jax.tree.map(self._constrain, inner_state, self.inner.layout)
        inner_state, metrics = self._replica_step.train(inner_state, batch)
        inner_state = jax.tree.map(self._constrain, inner_state, self.inner.layout)
        count = metrics["loss"][1].astype(jnp.float32)
        if self._replica_step.nonfinite == "skip":  # If a step is skipped, its count may be NaN.
            count = jnp.where(metrics["nonfinite"][0] > 0, jnp.zeros_like(count), count)
        replica = {
            "params": partition(self._placements, inner_state.params)[0],
            "opt_state": inner_state.opt_state,
            "collections": inner_state.collections,
            "examples": replica["examples"] + count,
        }
        return to_replica(replica, self.axes), sync_metrics(metrics, self.axes)

    def outer_step(self, fragment: int, state: TrainState) -> TrainState:
        """Takes an outer step for a fragment, which makes the fragment equal on all replicas."""
        return self._apply(fragment, state, *self._exchange(fragment, state), None)

    def overlapped_outer_step(
        self, fragment: int, state: TrainState, batch: Any
    ) -> tuple[TrainState, Metrics]:
        """Takes an inner step, and at the same time exchanges a fragment from before this step.

        The exchange does not include the change that a replica makes in this inner step. The next
        exchange includes this change.
        """
        exchanged = self._exchange(fragment, state)
        after, metrics = self.train(state, batch)
        return self._apply(fragment, after, *exchanged, state.local), metrics

    def _exchange(self, fragment: int, state: TrainState) -> tuple[Any, Any]:
        """Returns a fragment's outer gradient and, for the last fragment, the mean collections.

        For other fragments the second value is `None`.
        """
        select = functools.partial(self.state.fragments.select, fragment)
        placements = select(trained(self._placements))
        specs = state_specs(placements)
        replicated, per_replica = PartitionSpec(), PartitionSpec(self.state.axis_name)
        with_collections = fragment == self.state.fragments.number - 1
        collections = (state.collections, state.local["collections"]) if with_collections else None
        collection_specs = (replicated, per_replica) if with_collections else None

        def on_device(
            common: Any, replica: Any, examples: jax.Array, collections: Any
        ) -> tuple[Any, Any]:
            replica = jax.tree.map(lambda x: x[0], replica)
            count = examples[0, fragment]
            delta = mean_difference(common, replica, count, self.axes, self.outer_comm)
            if collections is None:
                return delta, None
            before, after = collections[0], jax.tree.map(lambda x: x[0], collections[1])
            rules = self.replicated_step.model.sync_collections
            return delta, mean_collections(before, after, self.axes, rules)

        run = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(specs, self.state.per_replica_specs(specs), per_replica, collection_specs),
            out_specs=(specs, replicated if with_collections else None),
            check_vma=True,
        )
        params, _ = partition(self._placements, state.params)
        delta, common_collections = run(
            self._shard_like_state(placements, select(params), 0),
            self._shard_like_state(placements, select(state.local["params"]), 1),
            state.local["examples"],
            collections,
        )
        return delta, common_collections

    def _apply(
        self, fragment: int, state: TrainState, delta: Any, collections: Any, before: Any
    ) -> TrainState:
        """Applies the outer optimizer to a fragment, and updates the replicas.

        `before` has the per-replica arrays from the time of the exchange if the replicas have taken
        a step since then; otherwise it is `None`.
        """
        fragments, layout = self.state.fragments, self.state
        params, frozen = partition(self._placements, state.params)
        placements = fragments.select(fragment, trained(self._placements))
        paddings = [place.padding for place in jax.tree.leaves(layout.opt_placements[fragment])]
        update = Update(self.replicated_step.mode, placements, tuple(paddings))
        new, opt_state, _ = update(
            _without_loss(layout.fragment_tx),
            fragments.select(fragment, params),
            delta,
            opt_state=layout.by_fragment(state.opt_state)[fragment],
            value=jnp.zeros(()),
            value_and_grad=lambda params: (jnp.zeros(()), params),
        )
        replicas = {
            "params": fragments.select(fragment, state.local["params"]),
            "examples": state.local["examples"],
        }
        common = {"params": new}
        specs = {"params": param_specs(placements), "examples": PartitionSpec()}
        if collections is not None:
            replicas["collections"] = state.local["collections"]
            common["collections"] = collections
            specs["collections"] = self.inner.layout.collections
        old = None
        if before is not None:
            old = before | {"params": fragments.select(fragment, before["params"])}
            old = {name: old[name] for name in replicas}

        def on_device(replica: Any, common: Any, old: Any) -> Any:
            replica, old = jax.tree.map(lambda x: x[0], (replica, old))
            count = replica.pop("examples")
            since = jnp.zeros_like(count) if old is None else count - old.pop("examples")
            if old is None:
                updated = jax.tree.map(lambda x: cast_to_varying(x, self.axes), common)
            else:
                # The exchange ran during an inner step. Each replica adds the change that it made
                # in this step to the common values.
                updated = jax.tree.map(lambda x, now, then: x + (now - then), common, replica, old)
            return to_replica(
                updated | {"examples": count.at[fragment].set(since[fragment])}, self.axes
            )

        replica_specs = layout.per_replica_specs(specs)
        common_specs = {name: specs[name] for name in common}
        run = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(replica_specs, common_specs, None if old is None else replica_specs),
            out_specs=replica_specs,
            check_vma=True,
        )
        updated = run(replicas, common, old)
        updated["params"] = combine((updated["params"], state.local["params"]))
        return state.replace(
            params=combine((combine((new, params)), frozen)),
            opt_state=layout.with_fragment(state.opt_state, fragment, opt_state),
            collections=state.collections if collections is None else collections,
            local=state.local | updated,
        )

    def _shard_like_state(self, placements: Any, params: Any, num_leading: int) -> Any:
        """Shards parameters, which have `num_leading` extra dims, like the optimizer's state."""

        def shard(place: Placement, x: jax.Array) -> jax.Array:
            if place.state_names is None:
                return x
            spec = place.state_spec
            if num_leading:
                spec = PartitionSpec(self.state.axis_name, *spec)
            padding = (*(0,) * num_leading, *place.padding) if place.padding else ()
            sharding = NamedSharding(self.mesh, spec)
            return jax.lax.with_sharding_constraint(pad_leaf(x, padding), sharding)

        return jax.tree.map(shard, placements, params)

    def _constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        mesh = self._replica_step.mode.mesh
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def replicated_step(
    name: str, inner: Program, mesh: Mesh, roles: AxisRoles, axes: tuple[str, ...]
) -> Step:
    """Makes, from one replica's step, a step of all devices; `axes` replicate the state."""
    step = inner.step
    mode = dataclasses.replace(step.mode, mesh=mesh, data_axes=roles.data_axes)
    infos = step.model.parameters
    placements = jax.tree.map(
        lambda info, place: parameter_sharding(place, info, roles, mesh), infos, step.placements
    )
    strategy = dataclasses.replace(
        step.strategy, name=name, replica_axes=(*axes, *step.strategy.replica_axes)
    )
    step = dataclasses.replace(step, strategy=strategy, roles=roles, placements=placements)
    return _with_mode(step, mode)


def _with_mode(step: Step, mode: Mode) -> Step:
    """Copies a step to another mode, which may have another mesh."""
    return dataclasses.replace(
        step,
        mode=mode,
        model=dataclasses.replace(step.model, mode=mode),
        update=dataclasses.replace(step.update, mode=mode, placements=trained(step.placements)),
    )


def _without_loss(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wraps an optimizer so that it gets no loss, because outer steps have none."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return updates, state

    return optax.GradientTransformation(tx.init, update)


# -------------------------------------------------------------------------------------------------
# The outer gradient: the replicas' mean difference from the common parameters.
#
# The functions run inside a `jax.shard_map` over all axes of the mesh, on a device's shards. Only
# the difference may be quantized, never the parameters: quantized parameters would be too coarse
# for the change of a few steps. The types show that the results do not vary over the replicas'
# axes, so all replicas have the same bits.
#
# A replica's difference is weighted by the number of examples that the replica has seen. A step
# weights minibatches and devices in the same way. So after one inner step of plain gradient
# descent the mean difference is proportional to the gradient of the global mean loss, also with
# masked examples.


def mean_difference(
    common: Any,
    replica: Any,
    examples: jax.Array,
    axes: tuple[str, ...],
    comm: MixedPrecisionPolicy,
) -> Any:
    """Returns the mean over replicas of `common - replica`.

    Args:
      common: A tree of shards of the common parameters, with which all replicas began.
      replica: A tree of the same shards of this replica's parameters.
      examples: `float32[]`, the number of examples that this replica has seen since it began with
        `common`.

    Returns:
      The tree of means, weighted by the numbers of examples; unweighted means if no replica has
      seen an example. The means do not vary over `axes`.

    Communication:
      One all-reduce over `axes` for each leaf: `2 b P (R - 1) / R` bytes for a shard of `P` numbers
      on `R` replicas. A quantizer uses an all-to-all and an all-gather instead, if that saves
      bytes. One further all-reduce of 4 bytes.
    """
    size = jax.lax.axis_size(axes)
    with jax.named_scope(f"{OUTER_SCOPE}/{COUNT_SCOPE}"):
        mean = jax.lax.pmean(examples, axes)
    weight = jnp.where(mean > 0, examples / jnp.where(mean > 0, mean, 1), jnp.ones_like(mean))

    def mean_of(path: Any, before: jax.Array, now: jax.Array) -> jax.Array:
        dtype = comm.reduce.dtype or now.dtype
        # If the sum is in 16 bits, weight each term before it is rounded.
        exact = jnp.promote_types(now.dtype, jnp.float32)
        difference = (before.astype(exact) - now.astype(exact)) * weight
        with jax.named_scope(f"{path_name(path)}/{OUTER_SCOPE}"):
            quantizer = comm.reduce_quantizer(now.size / size, jnp.dtype(dtype), axes)
            if quantizer and size > 1:
                mean_delta, _ = quantizer.mean(difference, axes)
            else:
                mean_delta = jax.lax.pmean(difference.astype(dtype), axes)
        return mean_delta.astype(now.dtype)

    return jax.tree_util.tree_map_with_path(mean_of, common, replica)


def mean_collections(
    before: Any, after: Any, axes: tuple[str, ...], rules: Mapping[str, CollectionSync]
) -> Any:
    """Reduces the collections of all replicas to common collections.

    A variable without a rule is equal on all devices of a replica after a step. Replicas can differ
    in such a variable only because they have different random keys. So a floating-point variable
    becomes the mean over the replicas, and an integer becomes the maximum.

    Communication:
      One all-reduce over `axes` for each leaf.
    """
    default = _default_rules(before, {**KNOWN, **rules})
    return sync_collections(after, axes, before=before, rules={**default, **rules})


def to_replica(tree: Any, axes: tuple[str, ...]) -> Any:
    """Makes per-replica arrays, which vary over `axes` and have a leading dimension of 1."""
    return jax.tree.map(lambda x: cast_to_varying(x, axes)[None], tree)


def _default_rules(collections: Any, names: Iterable[str]) -> Mapping[str, CollectionSync]:
    """Makes rules for the leaves that no name in `names` covers: mean for floats, else maximum."""
    leaves = [(path_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(collections)]
    unnamed = [(path, x) for path, x in leaves if not any(is_inside(path, name) for name in names)]
    return {path: "mean" if jnp.issubdtype(x.dtype, jnp.inexact) else "max" for path, x in unnamed}
