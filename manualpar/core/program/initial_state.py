"""The training state of a program before the first step: its values, padding and shardings."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from manualpar.core.model.trace_model import TracedModel
from manualpar.core.parameters.placement import (
    Placement,
    like_params,
    map_padded,
    param_specs,
    state_specs,
)
from manualpar.core.parameters.sharded_parameter import pad_leaf
from manualpar.core.parameters.trainable import partition
from manualpar.core.program.gradient_rounding import GradientRounding
from manualpar.core.program.optimizer_update import explain_optimizer
from manualpar.core.state.train_state import TrainState
from manualpar.core.trees import Placements


class InitialState:
    """Makes, pads and shards the training state.

    Attributes:
      unpadded: The abstract state as one device would hold it.
      padded: The abstract state as the program holds it.
      layout: The state with a `PartitionSpec` at each leaf.
      opt_padding: The padding of each leaf of the optimizer's state.
    """

    def __init__(
        self,
        model: TracedModel,
        tx: optax.GradientTransformation,
        placements: Placements,
        rounding: GradientRounding,
    ) -> None:
        self._model, self._tx, self._placements, self._rounding = model, tx, placements, rounding
        key = jax.eval_shape(lambda: jax.random.key(0))
        self.unpadded = jax.eval_shape(self._state, model.variables, key)
        opt_placements = like_params(
            self.unpadded.opt_state, self.unpadded.params, placements, Placement(())
        )
        self.opt_padding = tuple(place.padding for place in jax.tree.leaves(opt_placements))
        self.padded = jax.eval_shape(self._pad, self.unpadded)
        layout = jax.tree.map(lambda _: PartitionSpec(), self.padded)
        self.layout = layout.replace(
            params=param_specs(placements),
            opt_state=state_specs(opt_placements),
            local=rounding.specs(),
        )

    def create(self, rng: jax.Array) -> TrainState:
        """Creates the initial state, padded."""
        init_rng, rng = jax.random.split(rng)
        return self._pad(self._state(self._model.create_variables(init_rng), rng))

    def _pad(self, state: TrainState) -> TrainState:
        params = jax.tree.map(
            lambda place, x: pad_leaf(x, place.parameter_padding), self._placements, state.params
        )
        opt_state = map_padded(pad_leaf, state.opt_state, self.opt_padding)
        return state.replace(params=params, opt_state=opt_state)

    def _state(self, variables: dict[str, Any], rng: jax.Array) -> TrainState:
        params = variables["params"]
        with explain_optimizer("its init"):
            opt_state = self._tx.init(partition(self._placements, params)[0])
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            apply_fn=self._model.apply_fn,
            params=params,
            tx=self._tx,
            opt_state=opt_state,
            rng=rng,
            collections={name: tree for name, tree in variables.items() if name != "params"},
            local=self._rounding.zeros(),
        )
