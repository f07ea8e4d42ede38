"""One step: gradients on each device inside `shard_map`, the optimizer's update outside of it.

The forward pass, the backward pass and the reductions of gradients and metrics run inside
`shard_map`. Read `Step._gradients_on_device` first. This method has three parts: *box* the
parameters, so that they gather themselves; *accumulate* the gradients of the loss over minibatches;
*reduce* gradients over the devices. In mode `manual`, this package writes all its collectives.

The optimizer's *update* runs outside, on global arrays. There the norm of a gradient is the norm
of the global gradient, and an elementwise update needs no collective. Gradients have the specs of
the optimizer's state. ZeRO-1 and -2 replicate parameters and shard the optimizer's state. They
slice the parameters before the update and gather them after it. The slicing sends nothing.

The mode implements these operations: box, scatter, reduce and others. The default mode is
`manualpar.core.modes.manual`.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.sharding import PartitionSpec

from manualpar.core.mesh.axes import AxisName, axis_tuple
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.mesh.splitting import check_batch
from manualpar.core.model.loss_function import LearnedCountError
from manualpar.core.model.options import Nonfinite
from manualpar.core.model.trace_model import TracedModel
from manualpar.core.modes.gradients import Accumulation, CarryingLossFn, accumulate, unrolled
from manualpar.core.modes.layer_loops import LayerLoops
from manualpar.core.modes.mode import Mode
from manualpar.core.modes.remat import regather_for_backward
from manualpar.core.modes.strategy import Pipelined, Strategy
from manualpar.core.modes.variable_reduction import Rule, keep_unused
from manualpar.core.parameters.collectives import (
    agree_on_largest,
    cast_to_varying,
    varying_axes,
)
from manualpar.core.parameters.placement import (
    ParameterSharding,
    combine,
    is_masked,
    map_in_scopes,
    param_specs,
    partition,
    state_specs,
    strip_boxes,
    trained,
)
from manualpar.core.parameters.sharded_parameter import (
    AveragedParameter,
    ReplicatedParameter,
    ShardedParameter,
    boxed_axes,
    is_box,
    unpad_leaf,
    zeros_of_shard,
)
from manualpar.core.program.optimizer_update import Update
from manualpar.core.state.metrics import UNEVEN, Metrics, StepSums, mean
from manualpar.core.state.train_state import TrainState
from manualpar.core.summary import Summarized
from manualpar.core.tracing.jaxprs import inner_jaxprs, run_needed
from manualpar.core.tracing.scopes import GATHER_SCOPE, NONFINITE_SCOPE, REGATHER, purpose_of
from manualpar.core.trees import (
    Batch,
    Collections,
    Grads,
    Params,
    PerDevice,
    Placements,
    Specs,
    path_name,
)

# What a step carries to the next one, beside parameters and the optimizer's state.
Carried: TypeAlias = tuple[Collections, PerDevice]
_NO_OTHERS: Mapping[str, Any] = types.MappingProxyType({})


class Rounding:
    """The rounding of a step's quantized gradients: to the nearest number that can be sent.

    `manualpar.quantization.gradient_rounding` has subclasses, which correct the rounding's errors.
    """

    def specs(self) -> dict[str, Any]:
        """Returns the specs of `TrainState.local`."""
        return {}

    def zeros(self) -> dict[str, Any]:
        """Returns the initial `TrainState.local`."""
        return {}

    def with_keys(self, rng: jax.Array, *trees: Params) -> Sequence[Params]:
        """Gives each box in `trees` its key for stochastic rounding in this step, if needed."""
        del rng
        return trees

    def reduce(
        self,
        reduce: Callable[[Params, Grads], Grads],
        grad_boxes: Params,
        grads: Grads,
        per_device: PerDevice,
    ) -> tuple[Grads, PerDevice]:
        """Reduces gradients over the devices by `reduce(grad_boxes, grads)`.

        Args:
          grad_boxes: The tree of parameters, in boxes that are sharded like the gradients.
          grads: The tree of gradients; gradients that are already scattered are in boxes.
          per_device: The state that differs between devices, `TrainState.local`.

        Returns:
          The reduced gradients, and the new `per_device`.
        """
        return reduce(grad_boxes, grads), per_device


@dataclasses.dataclass(frozen=True, repr=False)
class Step(Summarized):
    """The functions of a training step and of an evaluation step, to be jitted.

    Attributes:
      strategy: Decides when parameters are gathered and gradients scattered.
      model: The model with its loss.
      mode: Decides whether this package or XLA writes the collectives.
      roles: The role of each mesh axis.
      placements: The tree of parameters with a `ParameterSharding` at each leaf.
      update: Applies the optimizer to the gradients.
      num_minibatches: The number of minibatches into which a device splits its part of a batch.
      schedule: Runs the minibatches one after another, see `modes.gradients`.
      pipeline: Runs the minibatches in place of `schedule` if stages split the layers.
      nonfinite: What to do if a loss or a gradient is not finite, see `ProgramOptions`.
      rounding: How quantized gradients are rounded.
      loops: Chooses how layers run, except in a pipeline.
    """

    strategy: Strategy
    model: TracedModel
    mode: Mode
    roles: AxisRoles
    placements: Placements
    update: Update
    num_minibatches: int = 1
    schedule: Accumulation = unrolled
    pipeline: Pipelined | None = None
    nonfinite: Nonfinite = "ignore"
    rounding: Rounding = dataclasses.field(default_factory=Rounding)
    loops: LayerLoops = dataclasses.field(default_factory=LayerLoops)

    def train(
        self, state: TrainState, batch: Batch, others: Mapping[str, Any] = _NO_OTHERS
    ) -> tuple[TrainState, Metrics]:
        """Makes one training step; returns the new state and the metrics of the batch.

        `others` are the variables of the model's `others` by name, each by collection.
        """
        check_batch("batch", batch, self.mode.mesh, self.roles)
        rng, key = jax.random.split(state.rng)
        own = self.model.own
        all_params, collections = self.model.with_others(state.params, state.collections, others)
        carried = collections, state.local
        gradients = self.gradients(batch)
        grads, sums, (updated, per_device) = gradients(all_params, carried, key, batch)
        updated = self._compute_from_parameters(all_params, collections, updated, key, batch)
        new = updated, per_device
        metrics = dict(sums.metrics) | self._uneven(sums)
        is_applied, (collections, per_device) = self._check_finite(sums, metrics, new, carried)
        params, frozen = partition(self.placements, all_params)
        frozen_others = {name: frozen[name] for name in self.model.others}
        params, frozen = own(params), own(frozen)

        def value_and_grad(params: Params) -> tuple[jax.Array, Grads]:
            params = combine((params, frozen))
            params = {**params, **frozen_others} if frozen_others else params
            grads, sums, _ = gradients(params, carried, key, batch)
            return sums.loss, own(grads)

        params, opt_state, norms = self.update(
            state.tx,
            params,
            own(grads),
            opt_state=state.opt_state,
            value=sums.loss,
            value_and_grad=value_and_grad,
            collections=self.model.own_collections(collections),
            is_applied=is_applied,
        )
        metrics |= {name: (norm, jnp.ones(())) for name, norm in norms.items()}
        state = state.replace(
            step=state.step + 1,
            params=combine((params, frozen)),
            opt_state=opt_state,
            rng=rng,
            collections=self.model.own_collections(collections),
            local=per_device,
        )
        return state, metrics

    def evaluate(
        self, state: TrainState, batch: Batch, others: Mapping[str, Any] = _NO_OTHERS
    ) -> Metrics:
        """Returns the metrics of the batch with training turned off; the state does not change."""
        check_batch("batch", batch, self.mode.mesh, self.roles)
        return self._metrics(self.model.eval_metrics, state, batch, others)

    @property
    def checks_loss(self) -> bool:
        """Whether a trace of `train` already checks the loss, so that `loss_only` is not traced."""
        return self._regathers and self.strategy.gather_every == "minibatch"

    def loss_only(
        self, state: TrainState, batch: Batch, others: Mapping[str, Any] = _NO_OTHERS
    ) -> Metrics:
        """Calls the loss on one minibatch as `train` does, but without derivatives.

        Only the checks of a program trace this function.
        """

        def first_minibatch(
            boxes: Params, collections: Collections, batch: Batch, rng: jax.Array
        ) -> Metrics:
            boxes = cast_to_varying(boxes, self.mode.varying_axes)
            if self.pipeline is None:
                minibatches = self.mode.split(batch, self.num_minibatches, self.roles)
                batch = jax.tree.map(lambda x: x[0], minibatches)
            return self.model.train_loss(boxes, collections, batch, rng)[1]

        return self._metrics(first_minibatch, state, batch, others)

    def gradients(
        self, batch: Batch
    ) -> Callable[[Params, Carried, jax.Array, Batch], tuple[Grads, StepSums, Carried]]:
        """Returns a function that computes the global gradients of batches shaped like `batch`.

        The returned function takes global arrays and runs `_gradients_on_device` on each device.
        Its gradients have the specs of the optimizer's state.
        """
        carried_specs = PartitionSpec(), self.rounding.specs()
        out_specs = (state_specs(trained(self.placements)), PartitionSpec(), carried_specs)
        return self._on_mesh(self._gradients_on_device, batch, out_specs, carried_specs)

    def _gradients_on_device(
        self, params: Params, carried: Carried, rng: jax.Array, batch: Batch
    ) -> tuple[Grads, StepSums, Carried]:
        """Computes the gradients on one device, from its shards and its examples.

        Args:
          params: The parameters, sharded as they are stored.
          carried: The model's collections, and the state that differs between devices
            (`TrainState.local`).

        Returns:
          The gradients, sharded like the optimizer's state; the loss and the metrics, summed over
          all devices; and the new `carried`.
        """
        mode, (collections, per_device) = self.mode, carried
        # Box the parameters twice: with the specs of parameters, and with the specs of gradients.
        boxes = self._gather_for_step(self._boxes(params))
        params, _ = partition(self.placements, params)
        grad_boxes = self._map_trained(functools.partial(mode.box, as_state=True), params)
        boxes, frozen = partition(self.placements, boxes)
        boxes, grad_boxes = self.rounding.with_keys(rng, boxes, grad_boxes)
        boxes, others = self._split_off_scattered(boxes, grad_boxes, frozen)
        # Differentiate the loss of each minibatch, and add up the gradients.
        grads, sums, new_collections = self._accumulate(
            (boxes, others),
            collections,
            mode.split(mode.to_zigzag(batch, self.roles), self.num_minibatches, self.roles),
            mode.fold(rng),
            reduce=functools.partial(self._scatter_each_minibatch, grad_boxes),
        )
        # Reduce over devices.
        grads, per_device = self.rounding.reduce(self._reduce, grad_boxes, grads, per_device)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        sums = mode.sync_metrics(self._with_nonfinite(sums, grads))
        apart: dict[str, Rule] = dict.fromkeys(self.model.of_parameters, "parameters")
        rules = {**self.model.sync_collections, **apart}
        new_collections = mode.sync_collections(new_collections, collections, rules)
        return grads, sums, (keep_unused(new_collections, collections), per_device)

    def _accumulate(
        self,
        params: tuple[Params, Params],
        collections: Collections,
        minibatches: Batch,
        rng: jax.Array,
        *,
        reduce: Callable[[Grads], Grads],
    ) -> tuple[Grads, StepSums, Collections]:
        """Calls `accumulate`; if a count of the loss has a gradient, calls it once more."""

        def run(model: TracedModel) -> tuple[Grads, StepSums, Collections]:
            return accumulate(
                self._loss_that_regathers(model.train_loss),
                params,
                collections,
                minibatches,
                rng,
                schedule=self.pipeline or self.schedule,
                reduce=reduce,
                join=lambda pair: self._map(_join, *pair),
                outer_axes=self.mode.outer_axes,
                learns_counts=model.learns_counts,
                whole=self.pipeline.with_all_layers if self.pipeline else None,
            )

        try:
            return run(self.model)
        except LearnedCountError:
            if self.pipeline is not None:  # A stage has only some layers.
                raise
        return run(dataclasses.replace(self.model, learns_counts=True))

    def _gather_for_step(self, boxes: Params) -> Params:
        """Gathers parameters once, if the strategy keeps them gathered for the whole step."""
        if self.strategy.gather_every != "step":
            return boxes
        return self._map(lambda _, x: x.gather_data_axes() if is_box(x) else x, boxes)

    def _split_off_scattered(
        self, boxes: Params, grad_boxes: Params, frozen: Params
    ) -> tuple[Params, Params]:
        """Divides a replicated parameter if its gradient is scattered where it is used.

        The first tree then has zeros in the shape of the gradient's shard, which are
        differentiated, and the second tree has the parameter. A parameter whose gradient is
        averaged where it is used stays in the first tree, in a box.
        """
        if not self.mode.writes_collectives or self.pipeline is not None:
            return boxes, frozen

        def averaged(place: ParameterSharding, box: Any) -> Any:
            if not place.is_averaged_in_loop or is_masked(box):
                return box
            return AveragedParameter.from_parameter(place.mean_axes, box)

        boxes = self._map(averaged, boxes)

        def is_divided(place: ParameterSharding, box: Any, grad_box: Any) -> bool:
            is_scattered = self.strategy.scatters_in_backward and place.in_loop
            return is_scattered and boxed_axes(box) != boxed_axes(grad_box)

        def zeros(yes: bool, box: Any, grad_box: Any) -> Any:
            return zeros_of_shard(grad_box) if yes else box

        def whole(yes: bool, box: Any, other: Any) -> Any:
            return box if yes else other

        divided = self._map(is_divided, boxes, grad_boxes)
        first = jax.tree.map(zeros, divided, boxes, grad_boxes)
        second = jax.tree.map(whole, divided, boxes, frozen)

        def magnitude(_: ParameterSharding, box: Any, other: Any) -> Any:
            is_apart = isinstance(box, ShardedParameter) and box.largest is not None
            return _Largest(box.largest) if is_apart else other

        def without(box: Any) -> Any:
            return box.replace(largest=None) if isinstance(box, ShardedParameter) else box

        # Magnitudes are not differentiated.
        second = self._map(magnitude, first, second)
        return jax.tree.map(without, first, is_leaf=is_box), second

    def _loss_that_regathers(self, loss: CarryingLossFn) -> CarryingLossFn:
        """Makes the layers of a loss run as `loops` chooses.

        If needed, its backward pass gathers parameters again.
        """
        if not self._regathers and (self.pipeline or not self.loops.changes_layers):
            return loss
        return regather_for_backward(
            loss,
            keep_gathered=not self.strategy.reshard_after_forward,
            axes=self.strategy.regather_axes,
            check=functools.partial(check_derivatives, self.strategy.name),
            loops=self.loops,
        )

    @property
    def _regathers(self) -> bool:
        dequantizes = self.model.interface.decodes_weights or self.mode.comm.gather.quantizer
        return self.pipeline is None and bool(self.strategy.reshard_after_forward or dequantizes)

    def _scatter_each_minibatch(self, grad_boxes: Params, grads: Grads) -> Grads:
        """Scatters a minibatch's gradients, unless the strategy scatters only once a step."""
        if self.strategy.reduce_every != "minibatch":
            return grads
        return self._map_trained(self.mode.scatter, grad_boxes, grads)

    def _reduce(self, grad_boxes: Params, grads: Grads) -> Grads:
        """Reduces accumulated gradients over the devices."""
        if self.strategy.reduce_every != "minibatch":
            grads = self._map_trained(self.mode.scatter, grad_boxes, grads)
        if self.pipeline is not None:
            grads = self.pipeline.exchange_layers(grads, back=True)
        return strip_boxes(self._map_trained(self.mode.sync, grad_boxes, grads))

    def _with_nonfinite(self, sums: StepSums, grads: Grads) -> StepSums:
        """Adds to `sums` whether this device's gradients are finite, if `nonfinite` needs this."""
        if self.nonfinite == "ignore":
            return sums
        axes = self.mode.data_axes + self.mode.outer_axes
        return sums._replace(nonfinite=(find_nonfinite(grads, axes), jnp.ones(())))

    def _boxes(self, params: Params) -> Params:
        """Boxes the parameters; with a pipeline, each stage gets the layers that it runs."""
        boxes = self._map(self.mode.box, params)
        if self.pipeline is not None:
            return self.pipeline.exchange_layers(boxes)
        return self._with_largest(boxes)

    def _with_largest(self, boxes: Params) -> Params:
        """Adds to boxes the magnitudes on which devices agree before they gather codes.

        Communication:
          An all-reduce of the magnitudes, once for all minibatches: parameters do not change.
        """
        leaves, structure = jax.tree.flatten(boxes, is_leaf=is_box)
        chosen, arrays = [], []
        for i, info in enumerate(jax.tree.leaves(self.model.parameters)):
            box = leaves[i]
            if is_box(box) and (dims := box.gather_dims()):
                axes = tuple(dict.fromkeys(axis for _, of_dim in dims for axis in of_dim))
                chosen.append(i)
                arrays.append((box.value, box.comm, axes, tuple(sorted(info.loop_dims))))
        for i, largest in zip(chosen, agree_on_largest(arrays), strict=True):
            leaves[i] = leaves[i].replace(largest=largest)
        return jax.tree.unflatten(structure, leaves)

    def _metrics(
        self,
        measure: Callable[..., Metrics],
        state: TrainState,
        batch: Batch,
        others: Mapping[str, Any],
    ) -> Metrics:
        """Runs `measure(boxes, collections, batch, rng)` on each device; sums its metrics."""

        def on_device(
            params: Params, collections: Collections, rng: jax.Array, batch: Batch
        ) -> Metrics:
            boxes = self._map(_unbox_kept, self._boxes(params))
            args = boxes, collections, self.mode.to_zigzag(batch, self.roles), self.mode.fold(rng)
            return self.mode.sync_metrics(
                measure(*args) if self.pipeline is None else self.pipeline.metrics(measure, *args)
            )

        on_mesh = self._on_mesh(on_device, batch, PartitionSpec())
        params, collections = self.model.with_others(state.params, state.collections, others)
        metrics: Metrics = on_mesh(params, collections, state.rng, batch)
        return metrics

    def _compute_from_parameters(
        self,
        params: Params,
        before: Collections,
        collections: Collections,
        key: jax.Array,
        batch: Batch,
    ) -> Collections:
        """Computes the variables that depend on parameters alone, such as a teacher's average.

        In the gradients' trace parameters vary over devices, and such variables with them. So the
        loss is traced once more, with parameters that do not vary, and reduced to these variables.

        Communication:
          XLA gathers the sharded parameters from which the variables are computed.
        """
        names = self.model.of_parameters
        if not names:
            return collections
        places = jax.tree.map(_unsharded_over_data, self.placements)

        def chosen(tree: Collections) -> dict[str, jax.Array]:
            leaves = jax.tree_util.tree_leaves_with_path(tree)
            return {path_name(path): x for path, x in leaves if path_name(path) in names}

        def put(tree: Collections, values: dict[str, jax.Array]) -> Collections:
            return jax.tree_util.tree_map_with_path(
                lambda path, x: values.get(path_name(path), x), tree
            )

        def on_device(
            params: Params, collections: Collections, rng: jax.Array, batch: Batch
        ) -> dict[str, jax.Array]:
            boxes = map_in_scopes(self.mode.box, places, params)
            batch = self.mode.to_zigzag(batch, self.roles)
            minibatches = self.mode.split(batch, self.num_minibatches, self.roles)
            first = jax.tree.map(lambda x: x[0], minibatches)
            rng = self.mode.fold(rng)

            def call(_: Any, values: dict[str, jax.Array]) -> dict[str, jax.Array]:
                before = put(collections, values)
                return chosen(self.model.train_loss(boxes, before, first, rng)[2])

            values = chosen(collections)
            if self.num_minibatches == 1:
                return call(0, values)
            return jax.lax.fori_loop(0, self.num_minibatches, call, values)

        replicated = PartitionSpec()
        specs = (param_specs(places), replicated, replicated, self.roles.batch_specs(batch))
        run = self.mode.run(on_device, in_specs=specs, out_specs=replicated)
        params = jax.tree.map(
            lambda place, x: unpad_leaf(x, place.parameter_padding), self.placements, params
        )
        return put(collections, run_needed(run, params, before, key, batch))

    def _check_finite(
        self, sums: StepSums, metrics: Metrics, new: Carried, carried: Carried
    ) -> tuple[jax.Array | None, Carried]:
        """Decides whether the step is applied, and adds the metric `nonfinite`.

        Returns:
          `bool[]`, whether the step is applied (`None` if every step is), and `new`, or `carried`
          if the step is not applied.
        """
        if self.nonfinite == "ignore":
            return None, new
        if "nonfinite" in metrics:
            raise ValueError(
                f"{self.strategy.name}: nonfinite={self.nonfinite!r} reports a metric 'nonfinite', "
                "but loss_fn returns a metric of that name too. Rename the metric of loss_fn."
            )
        finite = is_finite(sums)
        metrics["nonfinite"] = (1 - finite.astype(jnp.float32), jnp.ones(()))
        if self.nonfinite == "report":
            return None, new
        select = functools.partial(jax.lax.select, finite)
        return finite, jax.tree.map(select, new, carried)

    def _uneven(self, sums: StepSums) -> Metrics:
        """Returns how far the loss is off if its parts have different divisors, see `UNEVEN`."""
        if sums.rest is None:
            return {}
        mode, ((total, _),) = self.mode, sums.objective.values()
        of_device = mode.data_axes if mode.writes_collectives else ()
        shares = self.num_minibatches * math.prod(mode.mesh.shape[axis] for axis in of_device)
        explained, count = sums.metrics["loss"]
        by_count, by_share = mean((total - explained, count)), sums.rest / shares
        size = jnp.maximum(jnp.abs(sums.loss), jnp.abs(by_share))
        off = jnp.abs(by_count - by_share) / jnp.where(size == 0, 1, size)
        return {UNEVEN: (off, jnp.ones(()))}

    def _on_mesh(
        self,
        function: Callable[..., Any],
        batch: Batch,
        out_specs: Specs,
        carried_specs: Specs = None,
    ) -> Callable[..., Any]:
        """Turns a function that runs on each device into a function of global arrays.

        The function takes `(params, carried, rng, batch)`. Without `carried_specs`, `carried` is
        replicated.
        """
        in_specs = (
            param_specs(self.placements),
            carried_specs or PartitionSpec(),
            PartitionSpec(),
            self.roles.batch_specs(batch),
        )
        return self.mode.run(function, in_specs=in_specs, out_specs=out_specs)

    def _map(self, function: Callable[..., Any], *trees: Any) -> Any:
        return map_in_scopes(function, self.placements, *trees)

    def _map_trained(self, function: Callable[..., Any], *trees: Any) -> Any:
        return map_in_scopes(function, trained(self.placements), *trees)


class _Largest(NamedTuple):
    """The field `largest` of a trained parameter's box, which is not differentiated."""

    value: jax.Array


def _join(place: ParameterSharding, x: Any, other: Any) -> Any:
    """Joins what `_split_off_scattered` and `partition` divided, and gathers it if it is kept."""
    if is_masked(x):
        x = other
    elif isinstance(other, _Largest):
        x = x.replace(largest=other.value)
    elif not is_masked(other):
        x = ReplicatedParameter.from_gradient(x, other)
    return _unbox_kept(place, x)


def _unsharded_over_data(place: ParameterSharding) -> ParameterSharding:
    """Returns the placement of a parameter that is whole on the devices along `mean_axes`."""
    data = {*place.mean_axes}
    names = tuple(None if data & {*axis_tuple(name)} else name for name in place.names)
    return dataclasses.replace(place, names=names, state_names=None, padding=())


def _unbox_kept(place: ParameterSharding, x: Any) -> Any:
    """Gathers a parameter if it must be gathered once for each minibatch (`Placement.keep`)."""
    if not place.keep or not is_box(x):
        return x
    split = tuple(n if place.split_axes.issuperset(axis_tuple(n)) else None for n in x.names)
    gathered = x.unbox()
    # The shard of a split parameter stays in a box, so that a loss can gather the full parameter.
    is_part = any(split) and type(x) is ShardedParameter
    return ShardedParameter(gathered, split) if is_part else gathered


def check_derivatives(name: str, jaxpr: Jaxpr) -> None:
    """Refuses gathers of parameters outside a `custom_vjp`: the model has differentiated them."""
    for eqn in jaxpr.eqns:
        scope = str(eqn.source_info.name_stack)
        if eqn.primitive.name == "all_gather" and purpose_of(scope) in (GATHER_SCOPE, REGATHER):
            raise ValueError(
                f"{name}: a parameter that is gathered ({scope}) is differentiated within the "
                "model or the loss (jax.vjp, nn.vjp), expected only the training step to "
                "differentiate it. In a loss, read nn.unbox(params). For a module that "
                "differentiates its own parameters, use replicate= or data_parallel."
            )
        if "custom_vjp" not in eqn.primitive.name:
            for _, inner in inner_jaxprs(eqn):
                check_derivatives(name, inner)


# -------------------------------------------------------------------------------------------------
# Checks whether the loss and the gradients of a step are finite.


def find_nonfinite(grads: Grads, axis_names: AxisName) -> jax.Array:
    """Returns whether a gradient is not finite; checks each element, because a norm may overflow.

    Args:
      grads: A tree of gradients without boxes. They must be summed and cast already, because the
        sum and the cast may overflow. Integers and empty arrays are finite.

    Returns:
      `float32[]`, 1 if a gradient is not finite, else 0. Inside `shard_map`, devices along
      `axis_names` may have different results, which `sync_metrics` can sum.

    Communication:
      One all-reduce of 4 bytes over the axes not in `axis_names` over which gradients vary.
    """
    with jax.named_scope(NONFINITE_SCOPE):
        found = [~jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]
        flag = jnp.stack([jnp.zeros((), bool), *found]).any().astype(jnp.float32)
        others = tuple(sorted(varying_axes(flag) - set(axis_tuple(axis_names))))
        return jnp.minimum(jax.lax.psum(flag, others), 1) if others else flag


def is_finite(sums: StepSums) -> jax.Array:
    """Returns whether the loss and all gradients of a step are finite, `bool[]`.

    `sums` are summed over all devices, so all devices get the same result. `sums.nonfinite` is the
    pair of the sum of `find_nonfinite` and the number of devices.
    """
    assert sums.nonfinite is not None
    means = jnp.stack([sums.loss, mean(sums.metrics["loss"])])
    return (sums.nonfinite[0] == 0) & jnp.isfinite(means).all()
