"""Runs the work of one stage in every tick of a pipeline, see `executor`.

In every tick every stage reads its slots and sends activations and gradients. A stage computes a
chunk only in the ticks in which the schedule's table has an entry for the stage.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from manualpar.core.modes.remat import regather_for_backward
from manualpar.core.parameters.collectives import cast_to_varying
from manualpar.core.tracing.scopes import PIPELINE_SCOPE, RECOMPUTED_SCOPE
from manualpar.core.tracing.tick_scopes import ticks_scope
from manualpar.layers.pipeline.saved_activations import KeptInputs, KeptResiduals, PipelineSaves
from manualpar.layers.pipeline.schedule_table import NOTHING, Table
from manualpar.layers.pipeline.slots import branch, put, read, slots, write, zeros
from manualpar.layers.pipeline.staged_loss import Activations, StagedLoss


class _State(NamedTuple):
    """The state that a tick passes to the next tick.

    Attributes:
      inputs: The inputs of chunks, in slots.
      kept: The other arrays that chunks save for their backward passes, in slots.
      gradients: The gradients of the outputs of chunks, in slots.
      sums: The sum of the gradients of each parameter; `optax.MaskedNode` for a frozen parameter.
      results: The sums of the results of the loss.
    """

    inputs: Activations
    kept: list[Any]
    gradients: list[Any]
    sums: list[Any]
    results: Any


class _Row(NamedTuple):
    """The table's entries of a tick by row: for this stage (`mine`), and for all stages, `[S]`."""

    mine: Mapping[str, Any]
    of_stages: Mapping[str, Any]


class StageWork:
    """Runs the ticks of a stage.

    Attributes:
      loss: The loss in pieces.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        params: Any,
        others: tuple[Any, Any],
        *,
        table: Table,
        axis: str,
        stacked: Sequence[bool],
        trained: Sequence[bool],
        keep: PipelineSaves,
        regathers: bool,
    ) -> None:
        """Traces and cuts a loss.

        Args:
          loss: `loss(params, collections, minibatch, key)`. With backward passes the loss returns a
            scalar and a pair, otherwise metrics.
          params: A stage's parameters; stacked layers are in the order in which they run.
          others: The collections, and the microbatches with their keys, `[M, ...]`.
          table: The schedule.
          axis: The mesh axis of stages. All inputs vary over this axis.
          stacked: For each parameter, whether layers are stacked in dim 0.
          trained: For each parameter, whether it is differentiated; `()` without backward passes.
          keep: What a chunk saves for its backward pass, see `PipelineRun`.
          regathers: Whether the backward passes gather parameters again.
        """
        self._table, self._axis = table, axis
        self._stage = jax.lax.axis_index(axis)
        named, self._structure = jax.tree_util.tree_flatten_with_path(params)
        self._params = [x for _, x in named]
        self._trained = {i for i, is_trained in enumerate(trained) if is_trained}
        self._collections, self._parts = map(jax.tree.leaves, others)
        tree = jax.tree.structure(others)

        def flat_loss(params: Sequence[Any], leaves: Sequence[Any]) -> Any:
            collections, (minibatch, key) = jax.tree.unflatten(tree, leaves)
            params = jax.tree.unflatten(self._structure, params)
            return loss(params, collections, minibatch, key)

        first = self._others(0)
        self.loss = staged = StagedLoss(
            flat_loss,
            {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in named},
            first,
            stacked=stacked,
            num_stages=table.num_stages,
            chunks=table.chunks,
            axis=axis,
        )

        # `fixed` has all arguments that are not differentiated.
        def run_chunk(params: Any, inexact: list[Any], fixed: Any) -> Activations:
            *others, frozen = fixed
            return staged.chunk({**params, **frozen}, inexact, tuple(others))

        functions: list[Callable[..., Any]] = [staged.prefix, run_chunk, staged.suffix]
        if regathers and table.has_backward:
            functions = [regather_for_backward(function) for function in functions]
        self._prefix, chunk, self._suffix = functions
        self._kept = KeptInputs(chunk)
        if table.has_backward and keep == "residuals":
            x = zeros(staged.types)
            params, frozen = self._split_trained(self._chunk_params(0))
            fixed = x.exact, first, self._stage, frozen
            self._kept = KeptResiduals(chunk, params, x.inexact, fixed)
        returned = staged.returns[1][0] if table.has_backward else staged.returns
        self._results = jax.tree.map(functools.partial(_summed, axes={axis}), returned)

    def run(self) -> tuple[Any, Any]:
        """Runs all ticks; returns the sums of the gradients, and of the results of the loss."""
        table, types = self._table, self.loss.types
        state = _State(
            slots(types, table.activation_slots),
            slots(self._kept.types, table.activation_slots),
            slots(types.inexact, table.gradient_slots) if table.has_backward else [],
            [
                zeros(_summed(x)) if i in self._trained else optax.MaskedNode()
                for i, x in enumerate(self._params)
            ],
            zeros(self._results),
        )
        rows = {name: jnp.asarray(row) for name, row in table.rows.items()}
        state, _ = jax.lax.scan(lambda state, row: (self._tick(state, row), None), state, rows)
        with jax.named_scope(PIPELINE_SCOPE):  # Results are zero except on the last stage.
            results = jax.lax.psum(state.results, self._axis)
        if not table.has_backward:
            return None, results
        return jax.tree.unflatten(self._structure, state.sums), results

    def _tick(self, state: _State, of_stages: Mapping[str, Any]) -> _State:
        mine = {name: x[self._stage] for name, x in of_stages.items()}
        row = _Row(mine, of_stages)
        state, y = self._forward(state, row)
        inputs, gradients = state.inputs, state.gradients
        if self._table.has_backward:
            state, dx = self._backward(state, row)
            dx = self._hop(dx, -1)
            gradients = write(state.gradients, mine["arriving_gradient_slot"], dx)
        inputs = write(state.inputs, mine["arriving_slot"], self._hop(y, 1))
        return state._replace(inputs=inputs, gradients=gradients)

    def _forward(self, state: _State, row: _Row) -> tuple[_State, Activations]:
        """Runs a chunk, with the prefix before the first and the suffix after the last chunk."""
        mine = row.mine
        loss, cut, types = self.loss, self.loss.cut, self.loss.types
        others = self._others(mine["forward_microbatch"])
        index = self._index(mine["forward_chunk"])
        # The slot is read outside of the branch, because XLA copies a buffer if a branch reads it.
        arrived = read(state.inputs, mine["forward_slot"])
        together = cut.layers_permute
        # The branch itself writes the kept arrays into slots. If code after the branch wrote them,
        # XLA would copy the buffers in every tick. There is one exception. If all stages run the
        # branch together, the results of idle stages are discarded by a `where`. In the branch, it
        # would have to run over each full buffer, so the write comes after the branch.
        before = zeros(self._kept.types) if together else state.kept

        def run() -> Any:
            x = self._where(
                "is_first",
                row,
                lambda: self._prefix(self._pick(loss.prefix_params), others),
                types,
                otherwise=lambda: arrived,
                permutes=cut.prefix.permutes,
            )
            params, frozen = self._split_trained(self._chunk_params(mine["forward_chunk"]))
            fixed = x.exact, others, index, frozen
            y, kept = self._kept.forward(params, x.inexact, fixed)
            return x, y, kept if together else put(state.kept, mine["forward_slot"], kept)

        x, y, kept = self._where(
            "forward_microbatch",
            row,
            run,
            (types, types, before),
            otherwise=lambda: (*zeros((types, types)), before),
            permutes=together,
        )
        inputs = state.inputs
        if self._table.has_backward and self._kept.keeps_input:
            inputs = write(inputs, jnp.where(mine["is_first"] > 0, mine["forward_slot"], -1), x)
        if together:
            kept = write(state.kept, mine["forward_slot"], kept)
        state = state._replace(inputs=inputs, kept=kept)
        return self._finish(state, row, y, others), y

    def _finish(self, state: _State, row: _Row, y: Activations, others: Sequence[Any]) -> _State:
        """Runs the suffix after the last chunk, and the suffix's backward pass."""
        before = self._sums(state, self.loss.suffix_params)

        def run() -> Any:
            params, frozen = self._split_trained(self._pick(self.loss.suffix_params))

            def call(params: Any, inexact: list[Any]) -> Any:
                return self._suffix({**params, **frozen}, inexact, (y.exact, others))

            if not self._table.has_backward:
                return [], {}, _added(state.results, call(params, y.inexact))
            loss, pullback, (metrics, _) = jax.vjp(call, params, y.inexact, has_aux=True)
            grads, dy = pullback(jnp.ones_like(loss))
            return dy, self._summed(before, grads), _added(state.results, metrics)

        dy_types = self.loss.types.inexact if self._table.has_backward else []
        dy, sums, results = self._where(
            "is_last",
            row,
            run,
            (dy_types, before, state.results),
            otherwise=lambda: (zeros(dy_types), before, state.results),
            permutes=self.loss.cut.suffix.permutes,
        )
        gradients = write(state.gradients, row.mine["last_gradient_slot"], dy)
        return state._replace(gradients=gradients, sums=_put(state.sums, sums), results=results)

    def _backward(self, state: _State, row: _Row) -> tuple[_State, list[Any]]:
        """Runs a chunk's backward pass, and after the first chunk the prefix's backward pass."""
        mine = row.mine
        loss, cut, types = self.loss, self.loss.cut, self.loss.types.inexact
        others = self._others(mine["backward_microbatch"])
        index = self._index(mine["backward_chunk"])
        x, kept = read((state.inputs, state.kept), mine["backward_slot"])
        gradient = read(state.gradients, mine["gradient_slot"])
        before = self._sums(state, (*loss.chunk_params, *cut.stacked))

        def run() -> Any:
            params, frozen = self._split_trained(self._chunk_params(mine["backward_chunk"]))
            fixed = x.exact, others, index, frozen
            grads, dx = self._kept.backward(params, x.inexact, fixed, kept, gradient)
            return dx, self._summed(before, grads, mine["backward_chunk"])

        dx, sums = self._where(
            "backward_microbatch",
            row,
            run,
            (types, before),
            otherwise=lambda: (zeros(types), before),
            permutes=cut.layers_permute,
        )
        state = state._replace(sums=_put(state.sums, sums))
        before = self._sums(state, loss.prefix_params)
        if not before:
            return state, dx

        def run_prefix() -> Any:
            params, frozen = self._split_trained(self._pick(loss.prefix_params))

            def prefix(params: Any) -> tuple[list[Any], list[Any]]:
                x = self._prefix({**params, **frozen}, others)
                return x.inexact, x.exact

            with jax.named_scope(RECOMPUTED_SCOPE):
                _, pullback, _ = jax.vjp(prefix, params, has_aux=True)
            return self._summed(before, pullback(dx)[0])

        sums = self._where(
            "backward_is_first",
            row,
            run_prefix,
            before,
            otherwise=lambda: before,
            permutes=cut.prefix.permutes,
        )
        return state._replace(sums=_put(state.sums, sums)), dx

    def _where(
        self, name: str, row: _Row, run: Any, types: Any, *, permutes: bool, **options: Any
    ) -> Any:
        """Calls `run` in a `branch` if row `name` of the table has an entry for this stage."""
        nothing = NOTHING.get(name, -1)
        if permutes:
            options["anywhere"] = (row.of_stages[name] > nothing).any()
        scope = ticks_scope(self._table.is_run(name, together=permutes))
        return branch(row.mine[name] > nothing, run, types, scope=scope, **options)

    def _hop(self, values: Any, step: int) -> Any:
        """Sends values to the next stage (`step=1`) or to the previous stage (`step=-1`)."""
        number, wraps = self._table.num_stages, self._table.chunks > 1
        pairs = [(i, i + 1) for i in range(number - 1)] + [(number - 1, 0)] * wraps
        pairs = pairs if step > 0 else [(b, a) for a, b in pairs]
        if not pairs:
            return values
        with jax.named_scope(PIPELINE_SCOPE):
            return jax.tree.map(lambda x: jax.lax.ppermute(x, self._axis, pairs), values)

    def _others(self, microbatch: Any) -> list[Any]:
        """Reads the inputs of the loss that are not parameters, for a microbatch."""
        return [*self._collections, *read(self._parts, microbatch)]

    def _index(self, chunk: Any) -> Any:
        """Returns the index of a chunk of this stage among the chunks of all stages."""
        return jnp.maximum(chunk, 0) * self._table.num_stages + self._stage

    def _pick(self, numbers: Sequence[int]) -> dict[int, Any]:
        return {i: self._params[i] for i in numbers}

    def _split_trained(self, params: dict[int, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
        """Splits parameters into trained (to differentiate) and frozen parameters."""
        trained = {i: x for i, x in params.items() if i in self._trained}
        return trained, {i: x for i, x in params.items() if i not in self._trained}

    def _sums(self, state: _State, numbers: Sequence[int]) -> dict[int, Any]:
        """Picks the gradient sums of the trained parameters among `numbers`."""
        return {i: state.sums[i] for i in numbers if i in self._trained}

    def _chunk_params(self, chunk: Any) -> dict[int, Any]:
        """Collects the parameters of a chunk; stacked parameters have only the chunk's layers."""
        size = self.loss.chunk_layers
        first = jnp.maximum(chunk, 0) * size
        return self._pick(self.loss.chunk_params) | {
            i: jax.lax.dynamic_slice_in_dim(self._params[i], first, size)
            for i in self.loss.cut.stacked
        }

    def _summed(self, sums: Any, grads: Any, chunk: Any = 0) -> dict[int, Any]:
        """Adds gradients to their sums; stacked gradients belong to the layers of `chunk`."""
        first = jnp.maximum(chunk, 0) * self.loss.chunk_layers
        new = {}
        for i, g in grads.items():
            if i in self.loss.cut.stacked:
                part = jax.lax.dynamic_slice_in_dim(sums[i], first, len(g))
                new[i] = jax.lax.dynamic_update_slice_in_dim(sums[i], _added(part, g), first, 0)
            else:
                new[i] = _added(sums[i], g)
        return new


def _summed(t: Any, axes: Any = ()) -> Any:
    """Returns the types of sums of arrays `t`: at least float32, and varying also over `axes`."""

    def cast(x: Any) -> Any:
        x = cast_to_varying(x, frozenset(axes))
        is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if is_inexact else x

    return jax.eval_shape(cast, t)


def _added(sums: Any, values: Any) -> Any:
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, values)


def _put(values: Sequence[Any], new: Mapping[int, Any]) -> list[Any]:
    return [new.get(i, x) for i, x in enumerate(values)]
