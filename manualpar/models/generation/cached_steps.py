"""The steps of generation and of scoring, each a `shard_map` over the mesh of a program.

The parameters are sharded as in the training state: each device gathers them layer by layer through
the same boxes as in training. Along a model axis each device computes with its shard. The rows of a
batch and of the cache are sharded over the axes that shard the examples in training. Each device of
the model axis stores the cache of the heads that it computes.

- `prefill` runs the model on the prompts, stores their keys and values, and draws the first tokens.
- `decode` runs the model on the latest token of each row and draws the next token.
- `score` runs the model on complete sequences and returns the log-likelihood of the marked tokens.

Each step is compiled once for each combination of the number of rows, the padded length of prompts,
and the length of the cache. `decode` donates the cache.

In training, an expert may drop tokens. Here no expert drops tokens, because the result of a row
must not depend on its padding or on the length that it has reached.

Symbols: `B` rows, `S` positions of padded prompts or sequences, `V` the vocabulary.
"""

import dataclasses
import functools
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from manualpar.core.mesh.mesh import make_mesh
from manualpar.core.mesh.mesh_context import no_mesh
from manualpar.core.parameters.collectives import gather_invariant
from manualpar.core.parameters.placement import ParameterSharding, map_in_scopes, param_specs
from manualpar.core.parameters.sharded_parameter import is_box
from manualpar.core.program.program import Program
from manualpar.core.state.train_state import Batch, TrainState
from manualpar.core.tracing.scopes import EXAMPLES_SCOPE, TENSOR_SCOPE
from manualpar.layers.attention.key_value_cache import (
    CACHE,
    LATENT,
    NEW_KEYS,
    Past,
    Prompts,
    append,
)
from manualpar.models import Split, Transformer
from manualpar.models.cross_entropy import language_model_loss, mixture_of_experts_loss
from manualpar.models.generation.drawing import (
    Drawing,
    History,
    draw_tokens,
    history_of,
    note,
    penalize,
)
from manualpar.strategies import FSDP


class Rows(NamedTuple):
    """The state of the rows between two tokens.

    Attributes:
      cache: The keys and values of all tokens except the latest, `[layers, B, C, K, H]` (`C`
        positions, `K` heads, `H` features of a head). For layers that are not in a scan, the first
        dim is missing.
      token: `int32[B]`, the latest token.
      position: `int32[B]`, the position of `token`.
      keys: `key[B]`, the random key for each row's draws.
      history: The tokens before `token`, if the settings have penalties.
    """

    cache: Any
    token: jax.Array
    position: jax.Array
    keys: jax.Array
    history: History | None = None


class Drawn(NamedTuple):
    """The new tokens of all rows, the same on all devices.

    Attributes:
      token: `int32[B]`.
      log_probability: `float32[B]`, the token's log-probability in nats, at temperature 1 and
        without `top_k` and `top_p`.
    """

    token: jax.Array
    log_probability: jax.Array


class Scores(NamedTuple):
    """The scores of the marked tokens of each sequence, the same on all devices.

    Attributes:
      log_likelihood: `float32[B]`, the sum of the tokens' log-probabilities, in nats.
      is_greedy: `bool[B]`, whether every marked token is the likeliest token at its position.
    """

    log_likelihood: jax.Array
    is_greedy: jax.Array


class CachedSteps:
    """The compiled steps of generation and scoring for a program's model.

    Attributes:
      program: The program that generates.
      model: The program's `Transformer` without options that concern only training or a context
        axis. A sequence is one document for it, so attention does not end at a BOS: templates of
        chats may write BOS in the middle of a prompt.
      bos_token: The token that begins a document in training; -1 for none.
      row_devices: The number of devices over which rows are sharded.
      prefill: `prefill(params, collections, tokens, lengths, keys, drawing, size=size) -> (rows,
        drawn)`. `tokens` is `int32[B, S]`, padded on the right; `lengths` is `int32[B]`; `keys` is
        `key[B]`; `size` is the number of positions in the cache, for the prompt and the answer.
        `rows` is a `Rows`, and `drawn` is a `Drawn`.
      decode: `decode(params, collections, rows, drawing) -> (rows, drawn)`; `rows` is donated.
      score: `score(params, collections, inputs, labels, marked, packed=False) -> Scores`. `inputs`
        and `labels` are `int32[B, S]`; `marked` is `bool[B, S]`, the tokens of `labels` to score.
        If `packed` is true, each BOS begins another document, as in training.
    """

    def __init__(self, program: Program) -> None:
        """Prepares the steps for the program of a `Transformer`; compiles nothing yet.

        If the program cannot generate, another one does, see `Adopter`.
        """
        self._adopter = Adopter(program)
        program = self._adopter.program
        interface = program.model.interface
        _check(interface.module)
        self.program, self.model = program, _for_generation(interface.module)
        self.bos_token: int = interface.module.bos_token
        self._interface = dataclasses.replace(interface, module=self.model, phase="eval")
        axes = program.roles.data_axes
        self._rows, self._data_axes = PartitionSpec(axes), axes
        self.row_devices = 1
        for axis in axes:
            self.row_devices *= program.mesh.shape[axis]
        split = self.model.split.axis
        self._split_axes = (split,) if split and split in program.mesh.shape else ()
        self.prefill = self._jit(self._prefill, static_argnames="size")
        self.decode = self._jit(self._decode, donate_argnames="rows")
        self.score = self._jit(self._score, static_argnames="packed")

    def adopt(self, state: TrainState) -> TrainState:
        """Returns a state of the program as a state for these steps, see `Adopter.adopt`."""
        return self._adopter.adopt(state)

    def _jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        jitted = jax.jit(function, **options)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with no_mesh():
                return jitted(*args, **kwargs)

        call.jitted = jitted  # type: ignore[attr-defined]
        return call

    def _prefill(
        self,
        params: Any,
        collections: Any,
        tokens: jax.Array,
        lengths: jax.Array,
        keys: jax.Array,
        drawing: Drawing,
        *,
        size: int,
    ) -> tuple[Rows, Any]:
        def on_device(params: Any, collections: Any, drawing: Drawing, *args: Any) -> Any:
            tokens, lengths, keys = args
            logits, cache = self._apply(params, collections, tokens, Prompts(lengths, size))
            history = None
            if drawing.penalties is not None:
                history = history_of(tokens, lengths, self.model.vocab_size)
            drawn = self._choose(logits, history, keys, lengths, drawing)
            return Rows(cache, drawn.token, lengths, keys, history), self._gather_rows(drawn)

        run = self._on_mesh(on_device, (self._rows,) * 3, self._cache_specs(tokens))
        rows, drawn = run(params, collections, drawing, tokens, lengths, keys)
        return rows, drawn

    def _decode(
        self,
        params: Any,
        collections: Any,
        rows: Rows,
        drawing: Drawing,
    ) -> tuple[Rows, Any]:
        specs = jax.tree_util.tree_map_with_path(self._cache_spec, rows.cache)

        def on_device(params: Any, collections: Any, drawing: Drawing, *args: Any) -> Any:
            rows: Rows = args[0]
            position = rows.position
            collections = {**collections, CACHE: rows.cache}
            past = Past(position)
            logits, new = self._apply(params, collections, rows.token[:, None], past)
            cache = append(rows.cache, new, position)
            history = None if rows.history is None else note(rows.history, rows.token)
            after = position + 1
            drawn = self._choose(logits, history, rows.keys, after, drawing)
            new_rows = Rows(cache, drawn.token, after, rows.keys, history)
            return new_rows, self._gather_rows(drawn)

        run = self._on_mesh(on_device, (self._rows_specs(specs),), specs)
        rows, drawn = run(params, collections, drawing, rows)
        return rows, drawn

    def _score(
        self,
        params: Any,
        collections: Any,
        inputs: jax.Array,
        labels: jax.Array,
        marked: jax.Array,
        *,
        packed: bool = False,
    ) -> Scores:
        bos_token = self.bos_token if packed else -1
        model = dataclasses.replace(self._interface, module=self.model.clone(bos_token=bos_token))

        def on_device(params: Any, collections: Any, *batch: jax.Array) -> Scores:
            inputs, labels, marked = batch
            variables = {"params": self._boxes(params), **collections}
            with self.program.step.mode.context():
                losses, is_best = model.apply(variables, inputs, train=False, labels=labels)
            total = -jnp.where(marked, losses, 0).sum(axis=1)
            scores: Scores = self._gather_rows(Scores(total, jnp.all(is_best | ~marked, axis=1)))
            return scores

        whole, mode = PartitionSpec(), self.program.step.mode
        in_specs = (param_specs(self.program.placements), whole, *(self._rows,) * 3)
        run = mode.run(on_device, in_specs=in_specs, out_specs=whole)
        scores: Scores = run(params, collections, inputs, labels, marked)
        return scores

    def _on_mesh(self, on_device: Callable[..., Any], own: Any, cache: Any) -> Callable[..., Any]:
        """Makes a function of global arrays, (params, collections, drawing, *own), from a step.

        `own` has the specs of the step's other arguments, and `cache` the specs of the cache.
        """
        whole, step = PartitionSpec(), self.program.step
        return step.mode.run(
            on_device,
            in_specs=(param_specs(step.placements), whole, whole, *own),
            out_specs=(self._rows_specs(cache), whole),
        )

    def _apply(self, params: Any, collections: Any, tokens: Any, rows: Any) -> Any:
        """Computes the logits after each row's last token, and the keys and values for the cache.

        The logits, `float32[B, V]`, are the same on all devices along the model axis. If the
        vocabulary is sharded over this axis, they are gathered.
        """
        variables = {"params": self._boxes(params), **collections}
        with self.program.step.mode.context():
            logits, new = self._interface.apply(
                variables, tokens, train=False, rows=rows, mutable=[NEW_KEYS]
            )
        if self._split_axes:
            logits = gather_invariant(logits, 1, self._split_axes, scope=TENSOR_SCOPE)
        return logits[:, : self.model.vocab_size], new[NEW_KEYS]

    def _boxes(self, params: Any) -> Any:
        def box(place: ParameterSharding, x: jax.Array) -> Any:
            boxed = self.program.step.mode.box(place, x)
            return boxed.unbox() if place.keep and is_box(boxed) else boxed

        return map_in_scopes(box, self.program.placements, params)

    def _choose(
        self,
        logits: jax.Array,
        history: History | None,
        keys: jax.Array,
        position: jax.Array,
        drawing: Drawing,
    ) -> Drawn:
        """Draws each row's next token."""
        likelihood, changed = jax.nn.log_softmax(logits), logits
        if history is not None and drawing.penalties is not None:
            changed = penalize(changed, history, drawing.penalties)
        token = draw_tokens(changed, keys, position, drawing)
        of_token = jnp.take_along_axis(likelihood, token[:, None], axis=1)
        return Drawn(token, of_token[:, 0])

    def _gather_rows(self, rows: Any) -> Any:
        """Gathers the rows of all devices over the data axes."""
        gather = functools.partial(gather_invariant, scope=EXAMPLES_SCOPE)
        return jax.tree.map(lambda x: gather(x, 0, self._data_axes), rows)

    def _rows_specs(self, cache: Any) -> Any:
        specs: Any = (self._rows,) * 4
        return Rows(cache, *specs)

    def _cache_spec(self, path: Any, x: Any) -> PartitionSpec:
        is_shared = path[-1].key == LATENT  # All heads share it, so no axis splits it.
        heads = self._split_axes[0] if self._split_axes and not is_shared else None
        return PartitionSpec(*(None,) * (x.ndim - 4), self._data_axes, None, heads, None)

    def _cache_specs(self, tokens: jax.Array) -> Any:
        """Returns a tree like the cache, with a `PartitionSpec` at each leaf."""

        def keep(params: Any) -> Any:
            state = self.program.unpadded_state
            variables = {"params": params, **state.collections}
            rows = Prompts(jnp.ones(tokens.shape[:1], jnp.int32), tokens.shape[1])
            call = functools.partial(self._interface.apply, train=False, mutable=[NEW_KEYS])
            return call(variables, tokens, rows=rows)[1][NEW_KEYS]

        cache = jax.eval_shape(keep, self.program.unpadded_state.params)
        return jax.tree_util.tree_map_with_path(self._cache_spec, cache)

    def put_rows(self, x: Any) -> jax.Array:
        """Shards rows `[B, ...]` over the devices; all processes must pass the same rows."""
        sharding = NamedSharding(self.program.mesh, self._rows)
        return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


def _for_generation(model: Transformer) -> Transformer:
    """Sets fields that concern only training or a context axis to values without effect."""
    return model.clone(
        split=Split(model.split.axis),
        context=dataclasses.replace(model.context, axis=None),
        experts=dataclasses.replace(model.experts, capacity_factor=0.0),
        bos_token=-1,
        remat="none",
        dropout_rate=0.0,
    )


def _check(module: Any) -> None:
    """Refuses a model that these steps do not support."""
    if not isinstance(module, Transformer):
        raise TypeError(
            f"generate: the model is a {type(module).__name__}, expected a Transformer, because "
            "other models store no keys and values. For other causal models use "
            "manualpar.models.generation.drawing.sample_tokens, which needs no cache."
        )


# -------------------------------------------------------------------------------------------------
# Programs that can generate, for programs that cannot.
#
# A program with stages or a context axis divides one token's layers or positions, and in the modes
# `auto` and `explicit` XLA writes the collectives. The steps of generation need a program in mode
# manual, on a mesh of data, expert and model axes. Such a program is built on the same devices,
# and takes the parameters of each state.


def obstacle(program: Program) -> str:
    """Returns why a program's own steps cannot generate; "" if they can."""
    roles = program.roles
    if not program.step.mode.writes_collectives:
        return f"the program's mode is {program.mode!r}"
    for kind, axes in (("stage", roles.stage_axes), ("context", (roles.context_axis or "",))):
        if any(axes):
            return f"the program's mesh has the {kind} axis {axes[0]!r}"
    return ""


class Adopter:
    """Takes the states of one program for another program, which generates.

    Attributes:
      program: The program that generates: the given program if it can.
    """

    def __init__(self, program: Program) -> None:
        """Builds a program that generates if `program` cannot, and says so in a warning."""
        self.program = program
        self._latest: tuple[Any, TrainState] | None = None
        self._is_other = False
        model = program.model.interface.module
        why = obstacle(program)
        if not why or not isinstance(model, Transformer):
            return
        self.program, self._is_other = _generating(program, model), True
        axes = ", ".join(f"{axis}={size}" for axis, size in self.program.mesh.shape.items())
        warnings.warn(
            f"generate: {why}, so a program of fsdp in mode 'manual' on the mesh {axes} generates, "
            "and takes the parameters of each state.",
            stacklevel=3,
        )

    def adopt(self, state: TrainState) -> TrainState:
        """Returns a state for `program`; the latest state's parameters are kept.

        Communication:
          None for a program that generates itself; otherwise that of `Program.init_from`.
        """
        if not self._is_other:
            return state
        leaf = jax.tree.leaves(state.params)[0]
        if self._latest is None or self._latest[0]() is not leaf:
            variables = {"params": state.params, **state.collections}
            self._latest = weakref.ref(leaf), self.program.init_from(variables)
        return self._latest[1]


def _generating(program: Program, model: Transformer) -> Program:
    shape = program.mesh.shape
    split, expert = (
        axis if axis and axis in shape else None for axis in (model.split.axis, model.experts.axis)
    )
    kept = {axis: shape[axis] for axis in (expert, split) if axis}
    data = next(name for name in ("data", "examples", "rows") if name not in kept)
    devices = program.mesh.devices.ravel().tolist()
    axes = {data: len(devices) // math.prod(kept.values()), **kept}
    plain = model.clone(
        split=dataclasses.replace(model.split, axis=split),
        context=dataclasses.replace(model.context, axis=None),
        experts=dataclasses.replace(model.experts, axis=expert),
    )
    tokens = jax.ShapeDtypeStruct((len(devices), 16), "int32")
    loss = mixture_of_experts_loss if model.experts.num_experts else language_model_loss
    return FSDP.builder(
        plain,
        optax.identity(),
        loss,
        mesh=make_mesh(axes, devices),
        batch=Batch(tokens, tokens),
        axis_name=(data, expert) if expert else (data,),
        pad=True,
    )
