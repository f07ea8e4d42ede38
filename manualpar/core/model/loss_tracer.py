"""Traces a model's loss as a step will call it, before any parameter is sharded.

Each method answers one question with one trace. A trace computes nothing and touches no device.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from manualpar.core.model.carried_collections import CarryingApply, find_carried_collections
from manualpar.core.model.initialise import trace, typed_specs
from manualpar.core.model.interface import InitArgs, ModelInterface
from manualpar.core.model.loss_function import LossFn, call_loss
from manualpar.core.model.probe import find_loop_dims
from manualpar.core.model.whole_parameters import PartOfDevice, as_whole, boxed_parts
from manualpar.core.modes.mode import Mode
from manualpar.core.parameters.parameter_info import (
    ParameterInfo,
    computed_specs,
    describe_parameters,
)
from manualpar.core.parameters.placement import strip_boxes
from manualpar.core.parameters.sharded_parameter import is_box
from manualpar.core.parameters.split_parameter import SplitParameter, take_shared
from manualpar.core.trees import Batch, Collections, Infos, Params, Specs, Variables


class LossTracer:
    """Traces the loss of a model on a mode's mesh.

    Attributes:
      boxed_params: The abstract parameters; annotated and typed parameters are in boxes.
      params: The abstract parameters without boxes.
      infos: The tree of parameters with a `ParameterInfo` at each leaf, made before the dims of
        loops are known.
      collections: The collections that a training state keeps, see `find_collections`.
      describe: `describe(params, loop_dims)` makes a tree like `infos`.
    """

    def __init__(
        self,
        interface: ModelInterface,
        loss_fn: LossFn,
        variables: Variables,
        batch: Batch,
        *,
        batch_specs: Specs,
        mode: Mode,
    ) -> None:
        """Describes the parameters, and traces nothing.

        Args:
          interface: The model.
          loss_fn: The loss.
          variables: The abstract variables by collection; parameters may be in boxes.
          batch: The abstract global batch.
          batch_specs: The tree of the batch with a `PartitionSpec` at each leaf.
          mode: The mode, which decides who writes the collectives.
        """
        self._interface, self._loss_fn, self._mode = interface, loss_fn, mode
        self._batch, self._batch_specs = batch, batch_specs
        self._key = jax.eval_shape(lambda: jax.random.key(0))
        self._variables: Variables = strip_boxes(variables)
        self.boxed_params: Params = variables["params"]
        self.params: Params = self._variables["params"]
        self.collections: Collections = {}
        self.describe: Callable[..., Infos] = functools.partial(
            describe_parameters, mesh=mode.mesh, rules=mode.rules, data_axes=mode.data_axes
        )
        # Leaves out annotations: they may name dims of loops, which are not known yet.
        unannotated = jax.tree.map(
            lambda x: x if isinstance(x, SplitParameter) else strip_boxes(x),
            self.boxed_params,
            is_leaf=is_box,
        )
        self.infos: Infos = self.describe(unannotated, {})
        typed = typed_specs(self.boxed_params)
        self._param_specs = computed_specs(self.infos) if mode.writes_collectives else typed

    def find_collections(self, init_args: InitArgs | None) -> None:
        """Finds the collections that a state keeps; traces a call if the call may add some."""
        self.collections = find_carried_collections(
            self._interface, self._variables, self._trace_call, init_args
        )

    def check_model(self) -> None:
        """Refuses a model that would give wrong results on the mesh, see `ModelInterface.check`."""
        self._interface.check(lambda model: self.trace_loss(self.params, _as_is, model))

    def stacked(self, pipeline: Any) -> frozenset[str]:
        """Returns the paths of the parameters that `pipeline` splits over stages."""
        found: list[frozenset[str]] = []
        paths = [info.path for info in jax.tree.leaves(self.infos)]
        num_stages = self._mode.mesh.shape[pipeline.axis]

        def on_device(
            params: Params, collections: Collections, rng: jax.Array, batch: Batch
        ) -> None:
            def loss(params: Params) -> Any:
                apply_fn = CarryingApply(self._interface, collections)
                return call_loss(self._loss_fn, params, apply_fn, batch, rng)

            closed = jax.make_jaxpr(loss)(self._model_shards(params))
            found.append(pipeline.stacked(closed, paths, num_stages))

        self._trace(on_device, self.params)
        return found[0]

    def loop_dims(
        self,
        strategy: str,
        is_gathered: Callable[[ParameterInfo], bool],
        is_reduced: Callable[[ParameterInfo], bool],
        *,
        gathers_in_loss: bool,
    ) -> dict[str, frozenset[int]]:
        """Finds the dims that loops run over, by path, for each parameter that may be sharded.

        Args:
          strategy: The strategy's name, for messages.
          is_gathered: Returns whether a parameter without an annotation may be in a box.
          is_reduced: As in `trace_model`.
          gathers_in_loss: As in `find_loop_dims`.
        """
        boxed = jax.tree.map(
            lambda x, info: is_box(x) or is_gathered(info),
            self.boxed_params,
            self.infos,
            is_leaf=is_box,
        )
        optional = jax.tree.map(is_reduced, self.infos)
        if not any(jax.tree.leaves((boxed, optional))):
            return {}
        return find_loop_dims(
            strategy,
            self.trace_loss,
            self.params,
            boxed,
            optional,
            gathers_in_loss=gathers_in_loss,
        )

    def trace_loss(
        self, params: Params, box: Callable[[Any], Any], model: ModelInterface | None = None
    ) -> None:
        """Traces the loss with `box(params)` as its parameters; `model`, if given, is the model."""
        mode, model = self._mode, model or self._interface

        def on_device(
            params: Params, collections: Collections, rng: jax.Array, batch: Batch
        ) -> None:
            rng, params = mode.fold(rng), box(self._model_shards(params))
            if mode.writes_collectives:
                params = as_whole(boxed_parts(self.infos, params))
            apply_fn = CarryingApply(model, collections, PartOfDevice(self.infos, params))
            call_loss(self._loss_fn, params, apply_fn, batch, rng)

        self._trace(on_device, params)

    def _trace(self, on_device: Callable[..., None], params: Params) -> None:
        """Traces `on_device(params, collections, rng, batch)` as one device of the mesh runs it."""
        replicated = PartitionSpec()
        in_specs = (self._param_specs, replicated, replicated, self._batch_specs)
        trace(self._mode, on_device, in_specs, params, self.collections, self._key, self._batch)

    def _trace_call(self, call: Callable[..., None], variables: Mapping[str, Any]) -> None:
        """Traces `call(variables, rng, batch)` as one device of the mesh runs it."""

        def with_shards(variables: Any, *args: Any) -> None:
            call({**variables, "params": self._model_shards(variables["params"])}, *args)

        replicated = PartitionSpec()
        variable_specs = dict.fromkeys(variables, replicated) | {"params": self._param_specs}
        in_specs = (variable_specs, replicated, self._batch_specs)
        trace(self._mode, with_shards, in_specs, variables, self._key, self._batch)

    def _model_shards(self, params: Params) -> Params:
        """Takes this device's slice of each parameter with shared entries, see `take_shared`."""
        if not self._mode.writes_collectives:
            return params
        return jax.tree.map(lambda info, x: take_shared(x, info.shared_names), self.infos, params)


def _as_is(params: Params) -> Params:
    return params
