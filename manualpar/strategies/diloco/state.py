"""Makes and shards DiLoCo's state.

`state.params` are the *common* parameters, in the model's shapes: the parameters that the replicas
last agreed on. Evaluation and exports use these parameters, and the next outer step starts from
them. `state.local` has the per-replica arrays: the trained parameters, the state of the inner
optimizer, the other collections, and the number of examples seen since each fragment was last
exchanged. Each of these arrays has a leading dimension of size `R`, the number of replicas. This
dimension is sharded over the replicas' axes. `state.opt_state` is the outer optimizer's state,
which is sharded like the inner optimizer's state.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from manualpar.core.mesh.axes import axes_size
from manualpar.core.parameters.placement import (
    Placement,
    combine,
    like_params,
    map_padded,
    param_specs,
    partition,
    state_specs,
    trained,
)
from manualpar.core.parameters.sharded_parameter import pad_leaf, unpad_leaf
from manualpar.core.program.program import Program
from manualpar.core.state.train_state import TrainState


class DiLoCoState:
    """Makes the state of all replicas from the states of `inner`, the program of one replica.

    Attributes:
      placements: The tree of parameters with a `ParameterSharding` at each leaf.
      fragments: Divides the parameters into parts that are exchanged at different steps.
      fragment_tx: The outer optimizer of one fragment.
      outer_tx: The outer optimizer of all fragments.
      opt_placements: For each fragment, the placements of the outer optimizer's state.
      axis_name: The mesh axis of the replicas, or the tuple of axes.
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
        """Takes one replica's program, and the placements, mesh and axes of all replicas."""
        self.inner, self.placements, self.fragment_tx = inner, placements, outer_tx
        self.axis_name = axes[0] if len(axes) == 1 else axes
        self._num_replicas = axes_size(mesh, axes)
        params = inner.unpadded_state.params
        self.fragments = Fragments(partition(placements, params)[0], num_fragments)
        self.outer_tx = self.fragments.optimizer(outer_tx)
        opt_state = jax.eval_shape(self._init_outer, params)
        self.opt_placements = self.by_fragment(
            like_params(opt_state, params, placements, Placement(()))
        )

    def by_fragment(self, opt_state: Any) -> tuple[Any, ...]:
        """Splits the outer optimizer's state into the states of the fragments."""
        return (opt_state,) if self.fragments.number == 1 else opt_state

    def with_fragment(self, opt_state: Any, fragment: int, fragment_state: Any) -> Any:
        """Replaces the state of one fragment in the outer optimizer's state."""
        if self.fragments.number == 1:
            return fragment_state
        return (*opt_state[:fragment], fragment_state, *opt_state[fragment + 1 :])

    def _init_outer(self, params: Any) -> Any:
        return self.outer_tx.init(partition(self.placements, params)[0])

    def create(self, rng: jax.Array) -> TrainState:
        """Makes the padded initial state."""
        inner_state = self.inner.create(rng)
        unpadded = self._unpadded(inner_state.params)
        paddings = [place.padding for place in jax.tree.leaves(self.opt_placements)]
        state = inner_state.replace(
            tx=self.outer_tx, opt_state=map_padded(pad_leaf, self._init_outer(unpadded), paddings)
        )
        return self.start_replicas(state)

    def start_replicas(self, state: TrainState) -> TrainState:
        """Replaces all replicas by new replicas that start with the common parameters."""
        tx = self.inner.abstract_state.tx
        unpadded = partition(self.placements, self._unpadded(state.params))[0]
        opt_state = map_padded(pad_leaf, tx.init(unpadded), self.inner.step.update.opt_padding)
        return state.replace(local=self._replicas_of(state.replace(opt_state=opt_state)))

    def _replicas_of(self, inner_state: TrainState) -> dict[str, Any]:
        """Makes the per-replica arrays of replicas that all start with `inner_state`."""
        return self._for_each_replica(
            {
                "params": partition(self.placements, inner_state.params)[0],
                "opt_state": inner_state.opt_state,
                "collections": inner_state.collections,
                "examples": jnp.zeros(self.fragments.number, jnp.float32),
            }
        )

    def change_replicas(self, state: TrainState) -> TrainState:
        """Converts a state with another number of replicas; all new replicas are equal.

        Directly after an outer step the new replicas start with the common parameters. Otherwise
        they start with the mean of the old replicas. The mean is weighted by the replicas' numbers
        of examples, as in an exchange. Floating-point numbers of the inner optimizer's state and of
        other collections are averaged; integers become the maximum of the old replicas. Directly
        after an outer step the replicas' collections are equal, so they do not change.
        """
        replicas = state.local
        examples = replicas["examples"]
        total = examples.sum(0)

        def mean_params(fragment: int, common: jax.Array, x: jax.Array) -> jax.Array:
            exact = jnp.promote_types(x.dtype, jnp.float32)
            weights = examples[:, fragment] / jnp.where(total[fragment] > 0, total[fragment], 1)
            mean = jnp.tensordot(weights, x.astype(exact), 1).astype(x.dtype)
            return jnp.where(total[fragment] > 0, mean, common)

        def mean(x: jax.Array) -> jax.Array:
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return x.max(0)
            exact = jnp.promote_types(x.dtype, jnp.float32)
            return x.mean(0, dtype=exact).astype(x.dtype)

        common, _ = partition(self.placements, state.params)
        replica = {
            "params": jax.tree.map(mean_params, self.fragments.index, common, replicas["params"]),
            "opt_state": jax.tree.map(mean, replicas["opt_state"]),
            "collections": jax.tree.map(mean, replicas["collections"]),
            "examples": total / self._num_replicas,
        }
        return state.replace(local=self._for_each_replica(replica))

    def unpadded_state(self) -> TrainState:
        """Returns the abstract state without padding."""

        def make(inner_state: TrainState) -> TrainState:
            return inner_state.replace(
                tx=self.outer_tx,
                opt_state=self._init_outer(inner_state.params),
                local=self._replicas_of(inner_state),
            )

        return jax.eval_shape(make, self.inner.unpadded_state)

    def layout(self, padded: TrainState) -> TrainState:
        """Returns the `PartitionSpec` of each leaf of the state."""
        inner_layout = self.inner.layout
        layout = jax.tree.map(lambda _: PartitionSpec(), padded)
        return layout.replace(
            params=param_specs(self.placements),
            opt_state=jax.tree.unflatten(
                jax.tree.structure(padded.opt_state),
                jax.tree.leaves(state_specs(self.opt_placements)),
            ),
            local=self.per_replica_specs(
                {
                    "params": param_specs(trained(self.placements)),
                    "opt_state": inner_layout.opt_state,
                    "collections": inner_layout.collections,
                    "examples": PartitionSpec(),
                }
            ),
        )

    def _unpadded(self, params: Any) -> Any:
        return jax.tree.map(
            lambda place, x: unpad_leaf(x, place.parameter_padding), self.placements, params
        )

    def _for_each_replica(self, tree: Any) -> Any:
        size = self._num_replicas
        return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (size, *x.shape)), tree)

    def per_replica_specs(self, specs: Any) -> Any:
        """Adds a leading dimension to each spec, sharded over the replicas."""
        return jax.tree.map(lambda spec: PartitionSpec(self.axis_name, *spec), specs)


# -------------------------------------------------------------------------------------------------
# Fragments: parts of a model, exchanged at different steps to send fewer bytes at a time.
#
# A fragment is a set of trained parameters. All fragments have about the same number of bytes, and
# each has its own state of the outer optimizer. With `F` fragments and `H` steps between two
# exchanges of a fragment, fragment `f` is exchanged after step `(f + 1) H // F` and then every `H`
# steps. So a device sends `1 / F` of the bytes at a time. In `H` steps a device sends as many
# bytes as without fragments (Douillard et al., Streaming DiLoCo,
# https://arxiv.org/abs/2501.18512).


class Fragments:
    """Divides trees that have the structure of the trained parameters.

    Attributes:
      number: The number of fragments.
      index: A tree like the trained parameters, with the number of its fragment at each leaf.
    """

    def __init__(self, params: Any, number: int) -> None:
        """Divides the abstract trained parameters into `number` fragments."""
        leaves, structure = jax.tree.flatten(params)
        if number > len(leaves):
            raise ValueError(
                f"diloco: outer_fragments={number}, expected at most {len(leaves)}, the number of "
                "trained parameters. (The layers of a scan are stacked in the same parameters.)"
            )
        sizes = [math.prod(x.shape) * x.dtype.itemsize for x in leaves]
        totals, chosen = [0] * number, [0] * len(leaves)
        for i in sorted(range(len(leaves)), key=lambda i: -sizes[i]):
            chosen[i] = min(range(number), key=totals.__getitem__)  # The smallest fragment so far.
            totals[chosen[i]] += sizes[i]
        self.number, self.index = number, jax.tree.unflatten(structure, chosen)

    def select(self, fragment: int, tree: Any) -> Any:
        """Returns a tree in which the leaves outside of a fragment are masked."""
        return jax.tree.map(
            lambda i, x: x if i == fragment else optax.MaskedNode(), self.index, tree
        )

    def due_at(self, number: int, every: int) -> int | None:
        """Returns the fragment to exchange at step `number`, counted from 1, or `None`."""
        offset = (number - 1) % every + 1
        offsets = [(fragment + 1) * every // self.number for fragment in range(self.number)]
        return offsets.index(offset) if offset in offsets else None

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Returns `tx` with a separate state for each fragment; `tx` itself for one fragment."""
        if self.number == 1:
            return tx
        fragments = range(self.number)

        def init(params: Any) -> Any:
            return tuple(tx.init(self.select(i, params)) for i in fragments)

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            results = [
                tx.update(self.select(i, updates), state[i], self.select(i, params))
                for i in fragments
            ]
            merged = functools.reduce(lambda x, y: combine((x, y)), [x for x, _ in results])
            return merged, tuple(fragment_state for _, fragment_state in results)

        return optax.GradientTransformation(init, update)
