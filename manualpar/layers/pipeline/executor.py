"""Runs a pipeline: several microbatches at once, each in the layers of a different stage.

A pipeline accumulates gradients over microbatches, and returns the same sums as
`manualpar.core.modes.gradients.scanned`. Each device along the pipeline's axis is a stage. A stage
has the parameters of some layers, and all parameters that do not belong to layers. A table gives
the work of each stage in each tick, see `schedules`: at most one forward pass F of a microbatch
through a chunk of layers, and then at most one backward pass B. After this, activations are sent to
the next stage and gradients to the previous stage. A `lax.scan` runs the ticks.

The stage of the first chunk runs the prefix of the loss before that chunk. The stage of the last
chunk runs the suffix of the loss after that chunk, and immediately afterwards the suffix's backward
pass. All stages differentiate the same loss. So for a parameter outside the layers each stage
computes a term of the gradient, and the sum over stages is the gradient.

Invariants: all devices send activations and gradients in every tick, outside of any `cond`.
Collectives inside a `cond` run among the devices of one stage. No permute is in a `cond` whose
condition differs between devices, because some backends wait in a permute for all devices. So if
the layers contain a permute, and one stage has to compute a chunk in a tick, all stages compute a
chunk in this tick. The stages that have nothing to compute ignore the result.

Symbols: `S` stages, `v` chunks of layers on a stage, `M` microbatches, `L` layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from manualpar.core.mesh.splitting import split_minibatches
from manualpar.core.modes.gradients import ParamPair, Reduce, WeightedLoss
from manualpar.core.modes.remat import regather_for_backward
from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.parameters.placement import combine, is_masked
from manualpar.core.parameters.sharded_parameter import is_box
from manualpar.core.state.metrics import Metrics, StepSums
from manualpar.core.tracing.scopes import PIPELINE_SCOPE, RECOMPUTED_SCOPE, ticks_scope
from manualpar.core.trees import Batch, Collections, Grads
from manualpar.layers.pipeline.schedules import NOTHING, ScheduleName, Table, make_table
from manualpar.layers.pipeline.staged_loss import (
    Activations,
    KeptInputs,
    KeptResiduals,
    PipelineSaves,
    StagedLoss,
    branch,
    put,
    read,
    slots,
    varying,
    write,
    zeros,
)

# -------------------------------------------------------------------------------------------------
# Exchanges layers between stages, so that chunks interleave.
#
# Each stage stores a contiguous run of layers, because a `PartitionSpec` cannot express
# interleaving. With `v` chunks on each of `S` stages, chunk `k` of `v S` runs on stage `k % S`, as
# chunk `k // S` of that stage. So once a step each chunk is sent to the stage that runs it, and
# the gradient of the chunk is sent back.
#
# In each of `v` rounds every stage sends one chunk and receives one chunk. Stage `a` stores the
# chunks `a v, ..., a v + v - 1`. Let `g` be the greatest common divisor of `S` and `v`. In round
# `i` stage `a` sends the chunk that it stores at index `(i // g) g + (i + a g // S) % g`. With
# this order no stage receives two chunks in a round.


def sent_in_round(num_stages: int, chunks: int, index: int) -> list[int]:
    """Returns for each stage the number of the chunk that it sends in round `index`.

    Stage `s` stores the chunks from `s * chunks` to `(s + 1) * chunks - 1`.
    """
    shared = math.gcd(num_stages, chunks)
    places = [
        index // shared * shared + (index + stage * shared // num_stages) % shared
        for stage in range(num_stages)
    ]
    return [stage * chunks + place for stage, place in enumerate(places)]


def exchange(x: Any, axis: str, chunks: int, *, back: bool = False) -> Any:
    """Sends stored layers to the stages that run them, or sends gradients back.

    Args:
      x: `[L/S, ...]`, the contiguous layers that this stage stores; with `back` the layers that
        this stage runs, chunk after chunk.
      chunks: The number of chunks on a stage, a divisor of `L/S`.
      back: Whether to undo the exchange.

    Returns:
      `[L/S, ...]`, the layers that this stage runs; with `back` the layers that it stores.

    Communication:
      One permute for each chunk over `axis`; a device sends at most the bytes of `x`.
    """
    num_stages, stage = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    stored = x.reshape(chunks, -1, *x.shape[1:])
    result = jnp.zeros_like(stored)
    for index in range(chunks):
        sent = sent_in_round(num_stages, chunks, index)
        there = [chunk % num_stages for chunk in sent]
        # For each stage: where it stores the chunk that it sends, and where it puts the chunk that
        # it receives.
        home = [chunk % chunks for chunk in sent]
        away = [sent[there.index(stage)] // num_stages for stage in range(num_stages)]
        pairs = list(enumerate(there))
        if back:
            home, away, pairs = away, home, [(b, a) for a, b in pairs]
        piece = jax.lax.dynamic_index_in_dim(stored, jnp.asarray(home)[stage], keepdims=False)
        with jax.named_scope(PIPELINE_SCOPE):
            piece = jax.lax.ppermute(piece, axis, pairs)
        result = jax.lax.dynamic_update_index_in_dim(result, piece, jnp.asarray(away)[stage], 0)
    return result.reshape(x.shape)


# -------------------------------------------------------------------------------------------------
# Runs the work of one stage in every tick of a pipeline, see `executor`.
#
# In every tick every stage reads its slots and sends activations and gradients. A stage computes a
# chunk only in the ticks in which the schedule's table has an entry for the stage.


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
            collections, part = jax.tree.unflatten(tree, leaves)
            params = jax.tree.unflatten(self._structure, params)
            return loss(params, collections, *part)

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
        # Residuals of a kernel have no axes if a remat policy keeps what the kernel names.
        self._kept_types = [varying(t, axis) for t in self._kept.types]
        returned = staged.returns[1][0] if table.has_backward else staged.returns
        self._results = jax.tree.map(functools.partial(_summed, axes={axis}), returned)

    def run(self) -> tuple[Any, Any]:
        """Runs all ticks; returns the sums of the gradients, and of the results of the loss."""
        table, types = self._table, self.loss.types
        state = _State(
            slots(types, table.activation_slots),
            slots(self._kept_types, table.activation_slots),
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
        before = zeros(self._kept_types) if together else state.kept

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


# -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PipelineRun:
    """An `Accumulation` whose minibatches pass through stages.

    Attributes:
      axis: The mesh axis of stages.
      schedule: The name of the schedule.
      num_stages: The number of stages, `S`.
      chunks: The number of chunks of layers on a stage, `v`. Several chunks are interleaved.
      num_microbatches: The number of microbatches of a step, `M`.
      stacked: For each parameter, whether layers are stacked in dim 0.
      keep: What a chunk saves for its backward pass: its input, or the residuals of autodiff.
      regathers: Whether gathered parameters are dropped after the forward pass of a chunk, and
        gathered again for its backward pass.
    """

    axis: str
    schedule: ScheduleName
    num_stages: int
    chunks: int
    num_microbatches: int
    stacked: tuple[bool, ...]
    keep: PipelineSaves = "residuals"
    regathers: bool = False

    @property
    def table(self) -> Table:
        """The schedule of a training step."""
        return make_table(self.schedule, self.num_stages, self.num_microbatches, self.chunks)

    def staged(
        self, loss: WeightedLoss, params: Any, collections: Any, minibatches: Any
    ) -> StagedLoss:
        """Traces the loss and cuts it into stages; see `__call__` for the arguments."""
        return self._differentiated(loss, params, collections, minibatches).loss

    def __call__(
        self,
        loss: WeightedLoss,
        params: ParamPair,
        collections: Collections,
        minibatches: tuple[Batch, jax.Array],
        reduce: Reduce,
    ) -> tuple[Grads, StepSums, Collections]:
        """Adds up the gradients of all microbatches.

        Args:
          loss: Computes the loss of a microbatch times the microbatch's number of examples.
          params: The pair of a stage's trained and frozen parameters; boxes are allowed. All
            parameters vary over the axes of the batch. Stacked parameters are `[L/S, ...]`, in the
            order in which `exchange_layers` returns the layers.
          collections: The collections, which the loss must not change.
          minibatches: The microbatches and their keys, `[M, ...]`.
          reduce: Applied to the sum of the gradients.

        Returns:
          The sums of the gradients (complete for this stage's stacked parameters, only this stage's
          term for other parameters); the sums of the metrics, the same on all stages; and the
          collections.

        Communication:
          In each tick a permute of a microbatch's activations to the next stage, and a permute of
          the gradients of activations to the previous stage. One all-reduce of the metrics over
          `axis`.
        """
        work = self._differentiated(loss, params, collections, minibatches)
        _check_unchanged(work.loss, collections)
        sums, metrics = work.run()
        return reduce(_split_as(params, sums)[0]), metrics, collections

    def metrics(
        self, measure: Callable[..., Metrics], params: Any, collections: Any, batch: Any, rng: Any
    ) -> Metrics:
        """Computes the metrics of a batch with forward passes only.

        Args:
          measure: `measure(params, collections, batch, rng)`, the metrics of some examples.
          params: A stage's parameters, in one tree.
          collections: The collections, which are only read.
          batch: A device's examples, `[B, ...]`. They are split into `n` microbatches, where
            `n` is the largest divisor of `B` that is at most `M`.

        Communication:
          In each tick a permute of the activations of a microbatch to the next stage. One
          all-reduce of the metrics over `axis`.
        """
        examples = max(len(x) for x in jax.tree.leaves(batch) if jnp.ndim(x))
        number = max(n for n in range(1, self.num_microbatches + 1) if examples % n == 0)
        parts = split_minibatches(batch, number), jax.random.split(rng, number)
        metrics: Metrics = self._work(measure, params, collections, parts, ()).run()[1]
        return metrics

    def _differentiated(
        self, loss: WeightedLoss, params: Any, collections: Any, parts: Any
    ) -> StageWork:
        """Makes the `StageWork` with backward passes; `params`: (trained, frozen) parameters."""

        def combined_loss(combined: Any, *args: Any) -> Any:
            return loss(*_split_as(params, combined), *args)

        is_trained = jax.tree.leaves(combine(_mark_trained(params)))
        return self._work(combined_loss, combine(params), collections, parts, is_trained)

    def _work(
        self,
        loss: Callable[..., Any],
        params: Any,
        collections: Any,
        parts: Any,
        trained: Sequence[bool],
    ) -> StageWork:
        params, others = cast_to_varying((params, (collections, parts)), (self.axis,))
        number, backward = len(parts[1]), any(trained)
        table = make_table(self.schedule, self.num_stages, number, self.chunks, backward=backward)
        return StageWork(
            loss,
            params,
            others,
            table=table,
            axis=self.axis,
            stacked=self.stacked,
            trained=trained,
            keep=self.keep,
            regathers=self.regathers,
        )

    def with_all_layers(self, params: ParamPair) -> ParamPair:
        """Returns a pair of parameters with the layers of all stages, as types to trace a loss."""

        def full(x: Any, is_stacked: bool) -> Any:
            if is_masked(x):
                return x
            shape = (len(x) * self.num_stages, *x.shape[1:]) if is_stacked else x.shape
            axes = varying_axes(x) - {self.axis}
            return jax.eval_shape(lambda: cast_to_varying(jnp.zeros(shape, x.dtype), axes))

        def all_layers(tree: Any) -> Any:
            leaves, structure = jax.tree.flatten(tree, is_leaf=is_masked)
            return jax.tree.unflatten(structure, map(full, leaves, self.stacked))

        return all_layers(params[0]), all_layers(params[1])

    def exchange_layers(self, tree: Any, *, back: bool = False) -> Any:
        """Exchanges the layers that a stage stores for the layers that it runs.

        Args:
          tree: Parameters as they are stored (boxes are allowed), or summed gradients.
          back: Whether to send gradients back to the stages that store the parameters.

        Returns:
          The tree; unchanged with `chunks=1`, because then a stage runs the layers that it stores.

        Communication:
          The communication of `exchange`, for each stacked parameter.
        """
        if self.chunks == 1:
            return tree
        leaves, structure = jax.tree.flatten(tree, is_leaf=is_masked)
        leaves = [
            exchange(x, self.axis, self.chunks, back=back) if is_stacked and not is_masked(x) else x
            for x, is_stacked in zip(leaves, self.stacked, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves)


def _mark_trained(params: tuple[Any, Any]) -> tuple[Any, Any]:
    """Replaces each trained parameter by `True`, and each frozen parameter by `False`."""
    trained, frozen = params
    return jax.tree.map(lambda _: True, trained), jax.tree.map(lambda _: False, frozen)


def _split_as(params: tuple[Any, Any], tree: Any) -> tuple[Any, ...]:
    """Splits a tree into trained and frozen parts, as `params` is split; undoes `combine`."""

    def is_leaf(x: Any) -> bool:
        return is_masked(x) or is_box(x)

    def choose(param: Any, x: Any) -> Any:
        return param if is_masked(param) else x

    return tuple(jax.tree.map(choose, part, tree, is_leaf=is_leaf) for part in params)


def _check_unchanged(loss: StagedLoss, collections: Any) -> None:
    """Refuses a loss that changes collections, because stages run microbatches in parallel."""
    paths = jax.tree_util.tree_leaves_with_path(collections)
    first = len(loss.cut.results) - len(paths)
    for i, (path, _) in enumerate(paths):
        if loss.cut.results[first + i] != loss.first_other + i:
            raise ValueError(
                f"pipeline: the loss changes collection {jax.tree_util.keystr(path)}, expected "
                "none to change, because every stage runs only its own layers. Take "
                "LayerNorm or GroupNorm in place of BatchNorm, and leave collections out of "
                "mutable=[...]."
            )
