"""Refuses models and losses that compute wrong results from some of a sequence's positions.

With a context axis a device runs the model on a part of each sequence. The part is not one run of
neighbouring positions, but two half blocks (`mesh.zigzag`). Code that treats every position
separately is right. Attention, convolutions, sums, shifts and position numbers have to handle the
axis, see `manualpar.layers.Context`. Shapes and types do not show whether code ignores the axis. So
this check traces the loss twice, on a device's positions and on all positions, and compares the two
traces operation by operation.

Sums over positions are right if they only contribute to the mean loss and the metrics, because a
step sums both over the devices. The loss may be `sum / count`, where `count` is the count of
`metrics["loss"]`. The loss may replace a count of 0 before it divides, as with data axes, because a
device without a valid position has the weight 0.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from manualpar.core.checks.sequence_values import is_mean, power_of_sum
from manualpar.core.checks.sequence_walk import SequenceWalk
from manualpar.core.checks.shard_operations import Reason
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.model.trace_model import TracedModel
from manualpar.core.modes.variable_reduction import choose_sync
from manualpar.core.parameters.collectives import cast_to_varying
from manualpar.core.parameters.parameter_info import computed_specs
from manualpar.core.parameters.split_parameter import take_shared
from manualpar.core.tracing.scopes import CONTEXT_SCOPE
from manualpar.core.trees import Batch, Collections, Params

_POSITIONS = (
    "A device has some positions of a sequence, and not neighbouring ones: take their numbers from "
    "manualpar.layers.Context(axis).positions(length), and pass labels and other shifted arrays in "
    "the batch"
)
_ATTENTION = (
    "Other positions are on other devices: mix positions only by the attention of "
    "manualpar.layers.Context(axis), with document ids instead of a mask, or build the program "
    "without a context axis"
)
_SUM = (
    "A sum or a mean over positions may go into the loss and the metrics, which are added up over "
    "the devices: divide by the count of metrics['loss'], kept from being 0 by jnp.maximum(count, "
    "1), jnp.where(count > 0, count, 1) or count + 1e-8. For anything else sum "
    "over the devices too, with manualpar.layers.Context(axis).total or jax.lax.psum, in "
    "nn.BatchNorm with all of program.data_axes as its axis_name"
)
_MENDS: Mapping[Reason, str] = {
    "examples": "Each device has only some positions of its examples: call gather_examples(x, "
    "axis_name=...) with the axes that split examples, without the context axis",
    "axis": "Context needs the axis that context_axis names, and split layers need another axis",
    "constant": _POSITIONS,
    "convolution": _ATTENTION,
    "loop": _ATTENTION,
    "mixed": _POSITIONS,
    "pad": _POSITIONS,
    "parts": _POSITIONS,
    "product": _ATTENTION,
    "program": f"The code depends on the length of a sequence. {_POSITIONS}. Put code "
    f"that handles the axis itself in jax.named_scope({CONTEXT_SCOPE!r})",
    "random": "Draw random numbers for each position, with the key that the model or the loss gets",
    "reduction": _ATTENTION,
    "reshape": "Keep all positions in one dim and in one order, and do not group neighbouring "
    "positions, because they may be on different devices",
    "size": _POSITIONS,
    "sum": _SUM,
    "two dims": _ATTENTION,
    "unknown": "It is not known whether the operation is right on a part of the positions. If it "
    f"is right, put it in jax.named_scope({CONTEXT_SCOPE!r})",
}


def check_context(strategy: str, model: TracedModel, batch: Batch, roles: AxisRoles) -> None:
    """Refuses a model or a loss that computes wrong results from a part of a sequence.

    Nothing is checked if XLA writes the collectives, or if no axis of several devices splits dim 1
    of the batch. Code in `named_scope("context_parallel")` is trusted. Nothing is compiled.

    Args:
      strategy: The strategy's name, for messages.
      model: The traced model and its loss.
      batch: The abstract global batch.
      roles: The roles of all mesh axes.

    Raises:
      ValueError: An operation mixes positions, or is not known to keep them separate. The message
        names the operation's module.
    """
    axis = roles.context_axis
    if axis is None or not model.mode.writes_collectives or model.mode.mesh.shape[axis] == 1:
        return
    devices = model.mode.mesh.shape[axis]
    sizes = {**model.mode.mesh.shape, axis: 1}
    mesh: Any = model.mode.mesh.abstract_mesh.update(axis_sizes=tuple(sizes.values()))
    whole = dataclasses.replace(model, mode=dataclasses.replace(model.mode, mesh=mesh))
    complaint = f"{strategy}: with context_axis={axis!r}"
    for training in (True, False):
        (part_jaxpr, results), (whole_jaxpr, _) = (
            _trace_loss(each, batch, roles, training=training) for each in (model, whole)
        )
        walk = SequenceWalk(axis, devices, _MENDS, complaint)
        outputs = walk.outputs(part_jaxpr, whole_jaxpr)
        loss, metrics, collections = jax.tree.unflatten(results, outputs)
        _check_results(complaint, loss, metrics)
        if collections is not None:
            _check_collections(complaint, model, axis, collections)


def _trace_loss(
    model: TracedModel, batch: Batch, roles: AxisRoles, *, training: bool
) -> tuple[ClosedJaxpr, Any]:
    """Returns the jaxpr of a device's loss, and the structure of (loss, metrics, collections).

    Without `training`, the loss and the collections are `None`.
    """
    mode, traces = model.mode, list[tuple[ClosedJaxpr, Any]]()
    variables = dict(model.variables)
    params = variables.pop("params")

    def measure(params: Params, collections: Collections, rng: jax.Array, batch: Batch) -> Any:
        if training:
            return model.train_loss(params, collections, batch, rng)
        metrics = model.eval_metrics(params, collections, batch, rng)
        return None, metrics, None

    def on_device(params: Params, collections: Collections, rng: jax.Array, batch: Batch) -> None:
        def model_shard(info: Any, x: Any) -> Any:
            return take_shared(x, info.shared_names)

        params = jax.tree.map(model_shard, model.parameters, params)
        params = cast_to_varying(params, mode.varying_axes)
        jaxpr, shapes = jax.make_jaxpr(_with_folded_key(mode, measure), return_shape=True)(
            params, collections, rng, batch
        )
        traces.append((jaxpr, jax.tree.structure(shapes)))

    def with_all_layers(info: Any) -> Any:
        """Removes stage axes from a parameter's names: the loss gets the layers of all stages."""
        names = tuple(None if name in roles.stage_axes else name for name in info.names)
        return dataclasses.replace(info, names=names)

    replicated, infos = PartitionSpec(), jax.tree.map(with_all_layers, model.parameters)
    in_specs = (computed_specs(infos), replicated, replicated, roles.batch_specs(batch))
    key = jax.eval_shape(lambda: jax.random.key(0))
    run = mode.run(on_device, in_specs=in_specs, out_specs=replicated)
    jax.eval_shape(run, params, variables, key, batch)
    return traces[-1]


def _with_folded_key(mode: Any, measure: Callable[..., Any]) -> Callable[..., Any]:
    def call(params: Params, collections: Collections, rng: jax.Array, batch: Batch) -> Any:
        return measure(params, collections, mode.fold(rng), batch)

    return call


def _check_results(complaint: str, loss: Any, metrics: Any) -> None:
    """Refuses a loss and metrics that a step would combine wrongly over the devices."""
    count, number = metrics["loss"][1]
    if loss is not None and not is_mean(loss[0], count, number):
        raise ValueError(
            f"{complaint} the loss is {loss[0].description}, which is not a mean over the count of "
            "metrics['loss']; expected sum / count, where count is the count of metrics['loss'] "
            "and both are sums over this device's positions, or a value that is the same on all "
            "devices along the axis."
        )
    for name, ((total, _), (count, _)) in metrics.items():
        powers = {power_of_sum(value) for value in (total, count) if value.kind != "zero"}
        if len(powers) > 1 or None in powers:
            raise ValueError(
                f"{complaint} metrics[{name!r}] is the pair of {total.description} and "
                f"{count.description}; expected two sums over this device's positions (a step adds "
                "them up over the devices), or two numbers that are the same on all devices."
            )


def _check_collections(
    complaint: str, model: TracedModel, axis: str, collections: Collections
) -> None:
    """Refuses variables that would differ between devices and that a step does not average."""

    def check(path: Any, before: Any, result: Any) -> None:
        value, _ = result
        if value.is_plain and value.kind in ("same", "zero", "device"):
            return
        is_equal_mean = value.kind == "sum" and value.power == 1 and value.count is None
        rule = choose_sync(path, before, model.sync_collections, (axis,))
        if not is_equal_mean or rule != "mean":
            raise ValueError(
                f"{complaint} the variable {jax.tree_util.keystr(path)} becomes "
                f"{value.description}; expected the same value on all devices along the axis, "
                "or a mean over positions that sync_collections averages."
            )

    before = {name: tree for name, tree in model.variables.items() if name != "params"}
    jax.tree_util.tree_map_with_path(check, before, collections)
