"""Finds all facts that a program needs about a model and its loss, by traces.

`trace_model` makes and initialises the model abstractly, traces its loss with a `LossTracer`, and
returns a `TracedModel`. No other module has to find these facts: the model's library, its call, the
collections that it updates, its annotations, and the dims that its loops run over.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax

from manualpar.core.model.axis_names import check_axis_aliases
from manualpar.core.model.carried_collections import CarryingApply
from manualpar.core.model.initialise import (
    Init,
    initialisation,
    typed_specs,
    with_mesh_if_needed,
)
from manualpar.core.model.interface import Model, ModelInterface, RunPhase, interface_of
from manualpar.core.model.loss_function import LossFn, Metrics, check_loss, tracing_loss
from manualpar.core.model.loss_tracer import LossTracer
from manualpar.core.model.options import StoredDtypes
from manualpar.core.model.whole_parameters import PartOfDevice, as_whole
from manualpar.core.modes.mode import Mode
from manualpar.core.modes.variable_reduction import CollectionSync, check_sync_collections
from manualpar.core.parameters.collectives import varying_axes
from manualpar.core.parameters.parameter_info import ParameterInfo, on_stages
from manualpar.core.parameters.placement import strip_boxes
from manualpar.core.parameters.sharded_parameter import cast_floating, is_box
from manualpar.core.parameters.trainable import is_trained
from manualpar.core.summary import Summarized
from manualpar.core.trees import path_name


@dataclasses.dataclass(frozen=True, repr=False)
class TracedModel(Summarized):
    """A model and its loss, as a program calls them.

    Attributes:
      apply_fn: The model's `apply`, for the training state.
      parameters: The tree of parameters with a `ParameterInfo` at each leaf.
      trainable: Globs over the paths of the trained parameters.
      stored_dtypes: The dtypes, if given, in which frozen and trained parameters are stored.
      keeps_types: Whether an initialiser gives a parameter a type that is sharded.
      sync_collections: How collections that differ between devices are reduced.
      variables: The abstract variables that `create_variables` makes.
      mode: The mode, which decides who writes the collectives.
      interface: The interface of the model.
    """

    apply_fn: Callable[..., Any]
    parameters: Any
    trainable: tuple[str, ...]
    stored_dtypes: StoredDtypes
    keeps_types: bool
    sync_collections: Mapping[str, CollectionSync]
    variables: dict[str, Any]
    mode: Mode
    interface: ModelInterface
    _eval_phase: RunPhase
    _init: Init
    _loss_fn: LossFn

    def create_variables(self, key: jax.Array) -> dict[str, Any]:
        """Creates the initial variables by collection: `params`, and collections of the state.

        The variables are unsharded and not in boxes. Parameters have the dtypes in which they are
        stored.
        """
        variables = strip_boxes(self._init(key))
        return {name: variables[name] for name in self.variables}

    def train_loss(
        self, params: Any, collections: Any, batch: Any, rng: jax.Array
    ) -> tuple[jax.Array, Metrics, Any]:
        """Calls the user's loss; sharded parameters are in boxes.

        Returns:
          The loss, the checked metrics, and the collections after the call. Only the loss has a
          gradient: otherwise the backward pass would multiply the derivatives of metrics and
          collections by zeros, and an infinite derivative would make the gradient NaN.
        """
        before = {id(x) for x in jax.tree.leaves(collections)}
        apply_fn = CarryingApply(self.interface, collections, PartOfDevice(self.parameters, params))
        with self.mode.context(), tracing_loss():
            result = self._loss_fn(as_whole(params), apply_fn, batch, rng)
        loss, metrics = check_loss(result)
        _check_same_along_model_axes(loss, metrics, varying_axes((batch, rng)))
        # A variable that the loss does not change stays the same array: pipelines need this.
        metrics, collections = jax.tree.map(
            lambda x: x if id(x) in before else jax.lax.stop_gradient(x),
            (metrics, apply_fn.collections),
        )
        return loss, metrics, collections

    def eval_metrics(self, params: Any, collections: Any, batch: Any, rng: jax.Array) -> Metrics:
        """Calls `train_loss` with training turned off, and returns its metrics."""
        interface = dataclasses.replace(self.interface, phase=self._eval_phase)
        in_evaluation = dataclasses.replace(self, interface=interface)
        return in_evaluation.train_loss(params, collections, batch, rng)[1]


def trace_model(
    strategy: str,
    model: Model,
    loss_fn: LossFn,
    batch: Any,
    *,
    batch_specs: Any,
    mode: Mode,
    stored_dtypes: StoredDtypes,
    options: Mapping[str, Any],
    is_gathered: Callable[[ParameterInfo], bool],
    is_reduced: Callable[[ParameterInfo], bool],
    gathers_in_loss: bool,
) -> TracedModel:
    """Traces a model and its loss; computes nothing and touches no device.

    Args:
      strategy: The strategy's name, for messages.
      model: The model as the user gave it.
      loss_fn: The loss.
      batch: The abstract global batch.
      batch_specs: The tree of the batch with a `PartitionSpec` at each leaf.
      mode: The mode, which decides who writes the collectives.
      stored_dtypes: The dtypes that floating-point parameters are cast to.
      options: The `ProgramOptions`; only options of the model are read.
      is_gathered: Returns whether the program would shard a parameter, or cast it where it is used,
        if the parameter had no annotation and no loop ran over its dims.
      is_reduced: Returns whether the gradient of a parameter that is not gathered should be
        reduced where the model uses the parameter, if the loss allows this.
      gathers_in_loss: Whether parameters are gathered where the loss reads them.
    """
    interface = _interface_of(strategy, model, mode, options)
    trainable = tuple(options["trainable"] or interface.trainable)
    init, variables = initialisation(
        interface,
        batch,
        batch_specs,
        mode,
        init_args=options["init_args"],
        cast=functools.partial(_cast, stored_dtypes, trainable),
    )
    if not jax.tree.leaves(variables["params"]):
        expected = "expected some to train; in NNX those that an nnx.Param holds"
        raise ValueError(f"{strategy}: model {interface!r} has no parameters, {expected}.")
    tracer = LossTracer(interface, loss_fn, variables, batch, batch_specs=batch_specs, mode=mode)
    tracer.find_collections(options["init_args"])
    tracer.check_model()
    pipeline = options["pipeline"]
    stacked = tracer.stacked(pipeline) if pipeline else frozenset[str]()
    # Stacked layers of a pipeline are in boxes, whether they are gathered or not.
    loop_dims = tracer.loop_dims(
        strategy,
        lambda info: is_gathered(info) or info.path in stacked,
        is_reduced,
        gathers_in_loss=gathers_in_loss and mode.writes_collectives,
    )
    infos = tracer.describe(tracer.boxed_params, loop_dims)
    if pipeline:
        infos = on_stages(infos, stacked, pipeline.axis)
    infos = jax.tree.map(
        lambda info: dataclasses.replace(info, trainable=is_trained(info.path, trainable)), infos
    )
    all_dims = {info.path: info.loop_dims for info in jax.tree.leaves(infos)}
    sync = options["sync_collections"]
    return TracedModel(
        apply_fn=interface.apply_fn,
        parameters=infos,
        trainable=trainable,
        stored_dtypes=stored_dtypes,
        keeps_types=any(jax.tree.leaves(typed_specs(tracer.boxed_params))),
        sync_collections=check_sync_collections(strategy, sync, tracer.collections),
        variables={"params": tracer.params, **tracer.collections},
        interface=dataclasses.replace(interface, loop_dims=all_dims),
        _eval_phase="eval_dropout" if options["eval_dropout"] else "eval",
        _init=init,
        _loss_fn=loss_fn,
        mode=mode,
    )


def _cast(stored_dtypes: StoredDtypes, trainable: tuple[str, ...], params: Any) -> Any:
    """Casts parameters to the dtypes in which they are stored."""

    def cast_one(path: Any, x: Any) -> Any:
        dtype = stored_dtypes[is_trained(path_name(path), trainable)]
        return jax.tree.map(lambda x: cast_floating(x, dtype), x)

    return jax.tree_util.tree_map_with_path(cast_one, params, is_leaf=is_box)


def _check_same_along_model_axes(loss: Any, metrics: Metrics, data_axes: frozenset[str]) -> None:
    """Refuses a loss or a metric that differs along axes that do not split the batch.

    Autodiff would take the gradient of the sum of the loss over the devices along these axes.
    """
    named = {f"metrics[{name!r}]": metric for name, metric in metrics.items()}
    for name, value in {"the loss": loss, **named}.items():
        if axes := varying_axes(value) - data_axes:
            raise ValueError(
                f"loss_fn: {name} has a type that varies over {sorted(axes)}, expected the same "
                "value on all devices along axes that do not split the batch. Where logits are "
                "split, call split_cross_entropy and split_argmax of manualpar.layers. Where each "
                "device has a part of a sum, call manualpar.layers.leave(part, axis)."
            )


def _interface_of(
    strategy: str, model: Any, mode: Mode, options: Mapping[str, Any]
) -> ModelInterface:
    """Makes the model's interface; a function that makes a model runs on a mesh if needed."""
    aliases = check_axis_aliases(
        strategy,
        options["axis_aliases"],
        mesh=mode.mesh,
        data_axes=mode.data_axes,
        on_global_arrays=not mode.writes_collectives,
    )

    def make_on_mesh() -> Any:
        assert mode.model_mesh is not None
        with jax.sharding.use_abstract_mesh(mode.model_mesh):
            return interface_of(model)

    interface = with_mesh_if_needed(mode, lambda: interface_of(model), make_on_mesh)
    if isinstance(interface, ModelInterface):
        return dataclasses.replace(interface, axis_aliases=aliases)
    hint = " Pass its .module." if isinstance(getattr(model, "module", None), nn.Module) else ""
    raise TypeError(
        f"{strategy}: model is {model!r}, expected an instance of a flax.linen.Module, or an "
        f"nnx.Module or what makes one of rngs.{hint}"
    )
