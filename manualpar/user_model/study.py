"""All that a program knows about the model and the loss that it was given, found out once.

`study` makes, initialises and traces the model abstractly and returns one value, a `UserModel`.
Nothing else asks whether the model is of Linen or of NNX, how it is called, what it carries from
step to step, what its annotations say, or which dimensions its loops run over.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh

from manualpar.collection_sync import CollectionSync, check_sync_collections
from manualpar.core.partitioning import is_box
from manualpar.core.strategy import Mode
from manualpar.modes.modes import model_context
from manualpar.nnx.model import Model, NNXModel, with_loop_dims
from manualpar.sharding.annotations import Rules, check_rules
from manualpar.sharding.layout import (
    ParameterInfo,
    check_unmixed,
    describe_parameters,
    strip_boxes,
)
from manualpar.user_model.axis_names import with_axis_aliases
from manualpar.user_model.calling import CarryingApply, init_variables
from manualpar.user_model.initialise import Init, initialisation, model_on_mesh, typed_specs
from manualpar.user_model.loss import LossFn, Metrics, call_loss
from manualpar.user_model.probe import find_carried_collections, find_loop_dims


@dataclasses.dataclass(frozen=True)
class UserModel:
    """A model and its loss, as a program calls them.

    Attributes:
      apply_fn: The model's `apply`, for the training state.
      parameters: The tree of parameters with a `ParameterInfo` at each leaf.
      keeps_types: Whether the model's initialisers type its parameters as sharded.
      sync_collections: How collections that differ between devices are synchronised.
      collections: The names of the collections that a training state carries besides `params`.
      mesh: The mesh.
      mode: Who writes the collectives.
    """

    apply_fn: Callable[..., Any]
    parameters: Any
    keeps_types: bool
    sync_collections: Mapping[str, CollectionSync]
    collections: tuple[str, ...]
    mesh: Mesh
    mode: Mode
    _model: Any
    _init: Init
    _loss_fn: LossFn
    _rules: Rules
    _eval_dropout: bool

    def create_variables(self, key: jax.Array) -> dict[str, Any]:
        """The initial variables by collection: `params` and those that a training state carries.

        Args:
          key: The key for all of them.

        Returns:
          Whole arrays without boxes; parameters are in `param_dtype`.
        """
        variables = strip_boxes(self._init(key))
        return {name: variables[name] for name in ("params", *self.collections)}

    def train_loss(
        self, params: Any, collections: Any, batch: Any, rng: jax.Array
    ) -> tuple[jax.Array, Metrics, Any]:
        """The user's loss.

        Args:
          params: The parameters; those that are sharded are in boxes.
          collections: The model's other collections.
          batch: The part of a batch that the model is called with.
          rng: The key for the loss.

        Returns:
          The loss, the checked metrics, and the collections after the call.
        """
        apply_fn = CarryingApply(self._model, collections, train=True)
        loss, metrics = self._call_loss(params, apply_fn, batch, rng)
        return loss, metrics, apply_fn.collections

    def eval_metrics(self, params: Any, collections: Any, batch: Any, rng: jax.Array) -> Metrics:
        """The metrics of the same loss with training turned off; arguments as `train_loss`."""
        apply_fn = CarryingApply(
            self._model, collections, train=False, eval_dropout=self._eval_dropout
        )
        return self._call_loss(params, apply_fn, batch, rng)[1]

    def _call_loss(self, *args: Any) -> tuple[jax.Array, Metrics]:
        with model_context(self.mode, self.mesh, self._rules):
            return call_loss(self._loss_fn, *args)


def study(
    strategy: str,
    model: Model,
    loss_fn: LossFn,
    batch: Any,
    *,
    batch_specs: Any,
    mesh: Mesh,
    mode: Mode,
    data_axes: tuple[str, ...],
    param_dtype: str | None,
    options: Mapping[str, Any],
    is_gathered: Callable[[ParameterInfo], bool],
    gathers_in_loss: bool,
) -> UserModel:
    """Finds out all about a model and its loss; computes nothing and touches no device.

    Args:
      strategy: The strategy's name, for messages.
      model: The model as the user gave it.
      loss_fn: The loss.
      batch: The abstract global batch.
      batch_specs: The tree of the batch with a `PartitionSpec` at each leaf.
      mesh: The mesh, all axes of `AxisType.Auto`.
      mode: Who writes the collectives.
      data_axes: The mesh axes that examples are split over.
      param_dtype: The dtype that floating-point parameters are cast to, if not `None`.
      options: The `ProgramOptions`; only those about the model are read.
      is_gathered: Whether a parameter would be sharded, or cast where it is used, if no loop ran
        over it and it had no annotation.
      gathers_in_loss: Whether this package gathers parameters where the loss reads them.

    Returns:
      The model.

    Raises:
      TypeError: The model, or an option about it, is of the wrong kind.
      ValueError: The model or the loss does something that a program cannot do; the message says
        how to mend it.
    """
    applied = model_on_mesh(model, mode=mode, mesh=mesh)
    _check_model(strategy, applied)
    applied = with_axis_aliases(
        strategy,
        applied,
        options.get("axis_aliases", {}),
        is_manual=mode == "manual",
        mesh=mesh,
        data_axes=data_axes,
    )
    rules = check_rules(strategy, options.get("rules", ()), mesh)
    init_args = options.get("init_args")
    init, variables = initialisation(
        functools.partial(init_variables, applied, init_args=init_args),
        batch,
        batch_specs=batch_specs,
        mode=mode,
        mesh=mesh,
        dtype=param_dtype,
    )
    params = variables["params"]
    if not jax.tree.leaves(params):
        expected = "expected some to train; in NNX those that an nnx.Param holds"
        raise ValueError(f"{strategy}: model {applied!r} has no parameters, {expected}.")
    collections = find_carried_collections(
        applied,
        strip_boxes(variables),
        batch,
        mesh,
        batch_specs=batch_specs,
        mode=mode,
        data_axes=data_axes,
        init_args=init_args,
    )
    sync = check_sync_collections(strategy, options.get("sync_collections", {}), collections)

    def describe(params: Any, loop_dims: Mapping[str, frozenset[int]]) -> Any:
        infos = describe_parameters(params, loop_dims, mesh, rules)
        jax.tree.map(lambda info: check_unmixed(info, data_axes), infos)
        return infos

    whole = strip_boxes(params)
    boxed = jax.tree.map(
        lambda x, info: is_box(x) or is_gathered(info), params, describe(whole, {}), is_leaf=is_box
    )
    loop_dims: Mapping[str, frozenset[int]] = {}
    if any(jax.tree.leaves(boxed)):
        loop_dims = find_loop_dims(
            strategy,
            model=applied,
            loss_fn=loss_fn,
            params=whole,
            boxed=boxed,
            collections=collections,
            batch=batch,
            batch_specs=batch_specs,
            mode=mode,
            mesh=mesh,
            data_axes=data_axes,
            rules=rules,
            param_specs=typed_specs(params),
            gathers_in_loss=gathers_in_loss,
        )
    infos = describe(params, loop_dims)
    return UserModel(
        apply_fn=applied.apply,
        parameters=infos,
        keeps_types=any(jax.tree.leaves(typed_specs(params))),
        sync_collections=sync,
        collections=tuple(collections),
        mesh=mesh,
        mode=mode,
        _model=with_loop_dims(
            applied, {info.path: info.loop_dims for info in jax.tree.leaves(infos)}
        ),
        _init=init,
        _loss_fn=loss_fn,
        _rules=rules,
        _eval_dropout=options.get("eval_dropout", False),
    )


def _check_model(strategy: str, model: Any) -> None:
    if isinstance(model, nn.Module | NNXModel):
        return
    hint = " Pass its .module." if isinstance(getattr(model, "module", None), nn.Module) else ""
    raise TypeError(
        f"{strategy}: model is {model!r}, expected an instance of a flax.linen.Module, or an "
        f"nnx.Module or what makes one of rngs.{hint}"
    )
