"""The state of replicas that train alone: how it is made, and how it lies on the devices.

Its parameters are the *anchor*: what the replicas last agreed on, in the model's own shapes, and
what is evaluated, exported and continued from. What each replica has for itself is in
`state.local`, where every array has a leading dimension of the number of replicas `R`, sharded over
their axes: its parameters (those that are trained), the state of the inner optimizer, the other
collections, and how many examples it has seen since each fragment was last exchanged.
`state.opt_state` is that of the outer optimizer, and lies as the inner optimizer's does.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from manualpar.core.mesh.axes import axes_size
from manualpar.core.parameters.placement import (
    Placement,
    like_params,
    map_padded,
    param_specs,
    state_specs,
)
from manualpar.core.parameters.sharded_parameter import pad_leaf, unpad_leaf
from manualpar.core.parameters.trainable import partition, trained
from manualpar.core.program.program import Program
from manualpar.core.state.train_state import TrainState
from manualpar.strategies.diloco.fragments import Fragments


class DiLoCoState:
    """Makes the state of replicas, each of which has a state of the program `inner`.

    Attributes:
      placements: The tree of parameters with a `Placement` at each leaf.
      fragments: The parts that are exchanged at different steps.
      opt_placements: The placements of the outer optimizer's state, by fragment.
      name: The mesh axis of the replicas, or the tuple of axes.
    """

    def __init__(
        self,
        inner: Program,
        placements: Any,
        mesh: Any,
        axes: tuple[str, ...],
        outer_tx: optax.GradientTransformation,
        num_fragments: int,
    ) -> None:
        """Takes the program of one replica, the placements on the mesh of all, and their axes."""
        self.inner, self.placements, self.part_tx = inner, placements, outer_tx
        self.name, self._size = axes[0] if len(axes) == 1 else axes, axes_size(mesh, axes)
        params = inner.whole_state.params
        self.fragments = Fragments(partition(placements, params)[0], num_fragments)
        self.outer_tx = self.fragments.optimizer(outer_tx)
        opt_state = jax.eval_shape(self._init_outer, params)
        found = like_params(opt_state, params, placements, Placement(()))
        self.opt_placements = self.by_fragment(found)

    def by_fragment(self, opt_state: Any) -> tuple[Any, ...]:
        """The outer optimizer's state of each fragment."""
        return (opt_state,) if self.fragments.number == 1 else opt_state

    def with_fragment(self, opt_state: Any, fragment: int, part: Any) -> Any:
        """The outer optimizer's state with that of a fragment replaced."""
        if self.fragments.number == 1:
            return part
        return (*opt_state[:fragment], part, *opt_state[fragment + 1 :])

    def _init_outer(self, params: Any) -> Any:
        return self.outer_tx.init(partition(self.placements, params)[0])

    def create(self, rng: jax.Array) -> TrainState:
        """The initial state, padded."""
        one = self.inner.create(rng)
        whole = self._unpadded(one.params)
        paddings = [place.padding for place in jax.tree.leaves(self.opt_placements)]
        state = one.replace(
            tx=self.outer_tx, opt_state=map_padded(pad_leaf, self._init_outer(whole), paddings)
        )
        return self.spread(state)

    def spread(self, state: TrainState) -> TrainState:
        """The state with replicas that begin with its parameters and other collections."""
        tx = self.inner.abstract_state.tx
        unpadded = partition(self.placements, self._unpadded(state.params))[0]
        opt_state = map_padded(pad_leaf, tx.init(unpadded), self.inner.step.update.opt_padding)
        return state.replace(local=self._begin(state.replace(opt_state=opt_state)))

    def _begin(self, one: TrainState) -> dict[str, Any]:
        """What replicas have of their own that begin with the state of one."""
        return self._for_each(
            {
                "params": partition(self.placements, one.params)[0],
                "opt_state": one.opt_state,
                "collections": one.collections,
                "examples": jnp.zeros(self.fragments.number, jnp.float32),
            }
        )

    def regroup(self, state: TrainState) -> TrainState:
        """A state of another number of replicas as one of these, which begin all alike.

        After an outer step they begin with the anchor, and otherwise with the replicas' mean, in
        which each has the weight of its examples, as in the exchange that is still to come. Numbers
        of the inner optimizer's state are averaged too, as are other collections; of integers the
        largest stays. Only after an outer step nothing of the collections is lost by that.
        """
        local = state.local
        seen = local["examples"]
        total = seen.sum(0)

        def mean_params(fragment: int, anchor: jax.Array, each: jax.Array) -> jax.Array:
            exact = jnp.promote_types(each.dtype, jnp.float32)
            weights = seen[:, fragment] / jnp.where(total[fragment] > 0, total[fragment], 1)
            mean = jnp.tensordot(weights, each.astype(exact), 1).astype(each.dtype)
            return jnp.where(total[fragment] > 0, mean, anchor)

        def mean(each: jax.Array) -> jax.Array:
            if not jnp.issubdtype(each.dtype, jnp.inexact):
                return each.max(0)
            exact = jnp.promote_types(each.dtype, jnp.float32)
            return each.mean(0, dtype=exact).astype(each.dtype)

        anchor, _ = partition(self.placements, state.params)
        common = {
            "params": jax.tree.map(mean_params, self.fragments.index, anchor, local["params"]),
            "opt_state": jax.tree.map(mean, local["opt_state"]),
            "collections": jax.tree.map(mean, local["collections"]),
            "examples": total / self._size,
        }
        return state.replace(local=self._for_each(common))

    def whole_state(self) -> TrainState:
        """The abstract state with no padding."""

        def make(one: TrainState) -> TrainState:
            opt_state, local = self._init_outer(one.params), self._begin(one)
            return one.replace(tx=self.outer_tx, opt_state=opt_state, local=local)

        return jax.eval_shape(make, self.inner.whole_state)

    def layout(self, held: TrainState) -> TrainState:
        """The state with a `PartitionSpec` at each leaf."""
        one = self.inner.layout
        layout = jax.tree.map(lambda _: PartitionSpec(), held)
        return layout.replace(
            params=param_specs(self.placements),
            opt_state=jax.tree.unflatten(
                jax.tree.structure(held.opt_state),
                jax.tree.leaves(state_specs(self.opt_placements)),
            ),
            local=self.lead(
                {
                    "params": param_specs(trained(self.placements)),
                    "opt_state": one.opt_state,
                    "collections": one.collections,
                    "examples": PartitionSpec(),
                }
            ),
        )

    def _unpadded(self, params: Any) -> Any:
        return jax.tree.map(
            lambda place, x: unpad_leaf(x, place.parameter_padding), self.placements, params
        )

    def _for_each(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (self._size, *x.shape)), tree)

    def lead(self, specs: Any) -> Any:
        """Specs of arrays with a leading dimension for the replicas."""
        return jax.tree.map(lambda spec: PartitionSpec(self.name, *spec), specs)
