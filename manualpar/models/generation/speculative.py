"""Speculative decoding: a small model drafts tokens, and the model checks them in one forward pass.

Leviathan et al., https://arxiv.org/abs/2211.17192, accept a drafted token at random, so that the
accepted tokens have the distribution of the model. Here the answers are even the same as without a
draft. A draw depends on the logits and on a key of the prompt and the position. So the draft draws
with the keys with which the model will draw, and often draws the same token. The model then draws
its own token at every drafted position. The drafted tokens up to the first difference are accepted,
and the model's own token follows them.

The keys of rejected tokens stay in the cache and are overwritten, see
`manualpar.layers.attention.key_value_cache`. Rows accept different numbers of tokens, so each row
has its own position. A row that has all its tokens stays where it is.

Symbols: `B` rows, `D` drafted tokens, `S = D + 1` positions that the model checks, `V` the
vocabulary.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from manualpar.core.parameters.placement import param_specs
from manualpar.core.program.program import Program
from manualpar.core.state.train_state import TrainState
from manualpar.layers.attention.key_value_cache import CACHE, Past, append
from manualpar.models import Transformer
from manualpar.models.generation.answers import NewToken
from manualpar.models.generation.cached_steps import CachedSteps, Rows
from manualpar.models.generation.drawing import Drawing, History, note
from manualpar.models.transformer import check_lengths

# Few drafts are right for more than ten tokens. The logits of many more do not fit into memory.
MOST_DRAFTED = 1024


class Draft(NamedTuple):
    """A model that drafts tokens for another model.

    Attributes:
      program: The program of the draft model, on the devices of the other model's program. The
        parallelism may be another.
      state: A state of the program.
      tokens: The number of tokens that are drafted for each forward pass of the other model.
    """

    program: Program
    state: TrainState
    tokens: int = 4


class Checked(NamedTuple):
    """The tokens that the model itself draws at the drafted positions, the same on all devices.

    Attributes:
      token: `int32[B, S]`, the model's own tokens, right up to the token after the accepted ones.
      log_probability: `float32[B, S]`, the tokens' log-probabilities, as in `Drawn`.
      accepted: `int32[B]`, the number of drafted tokens before the first difference.
    """

    token: jax.Array
    log_probability: jax.Array
    accepted: jax.Array


class SpeculativeSteps(CachedSteps):
    """The compiled steps of a model that drafts tokens, or of a model that checks them.

    Attributes:
      propose: `propose(params, collections, cache, ends, previous, last, drawing, number=D) ->
        (cache, drafts)`. `ends` is the `Rows` of the model that checks, without its cache;
        `previous` is `int32[B]`, the token before the latest; `last` is `int32[B]`, the position of
        the last token that a row may get; `drafts` is `int32[B, D]`. `cache` is donated.
      check: `check(params, collections, rows, drafts, last, drawing) -> (rows, previous, checked)`.
        `checked` is a `Checked`. `rows` is donated.
    """

    def __init__(self, program: Program, vocab_size: int = 0) -> None:
        """Prepares the steps, see `CachedSteps`; draws from `vocab_size` tokens if it is given."""
        super().__init__(program)
        self.vocab_size = vocab_size or self.vocab_size
        self.propose = self._jit(self._propose, static_argnames="number", donate_argnames="cache")
        self.check = self._jit(self._check, donate_argnames="rows")

    def _propose(
        self,
        params: Any,
        collections: Any,
        cache: Any,
        ends: Rows,
        previous: jax.Array,
        last: jax.Array,
        drawing: Drawing,
        *,
        number: int,
    ) -> tuple[Any, jax.Array]:
        specs = jax.tree_util.tree_map_with_path(self._cache_spec, cache)

        def on_device(params: Any, collections: Any, drawing: Drawing, *args: Any) -> Any:
            cache, ends, previous, last = args

            def draw(rows: Rows, tokens: jax.Array, first: jax.Array) -> Rows:
                """Adds tokens `int32[B, N]`, the last of them new, and draws the next token."""
                if rows.history is not None:
                    rows = rows._replace(history=note(rows.history, tokens[:, -1:]))
                rows, _, logits = self._extend(params, collections, rows, tokens, first, last)
                after = first + tokens.shape[1]
                token, _ = self._choose(logits[:, -1], rows.history, rows.keys, after, drawing)
                return rows._replace(token=token)

            def go_on(rows: Rows, place: jax.Array) -> tuple[Rows, jax.Array]:
                rows = draw(rows, rows.token[:, None], ends.position + place)
                return rows, rows.token

            # If all drafted tokens were accepted, the keys of the last one are not in the cache.
            tokens = jnp.stack([previous, ends.token], axis=1)
            rows = draw(ends._replace(cache=cache), tokens, ends.position - 1)
            others, drafts = jax.lax.scan(go_on, rows, jnp.arange(1, number))
            return others.cache, jnp.concatenate([rows.token[:, None], drafts.T], axis=1)

        run = self.program.step.mode.run(
            on_device,
            in_specs=(*self._model_specs(), specs, *(self._rows,) * 3),
            out_specs=(specs, self._rows),
        )
        cache, drafts = run(params, collections, drawing, cache, ends, previous, last)
        return cache, drafts

    def _check(
        self,
        params: Any,
        collections: Any,
        rows: Rows,
        drafts: jax.Array,
        last: jax.Array,
        drawing: Drawing,
    ) -> tuple[Rows, jax.Array, Checked]:
        specs = jax.tree_util.tree_map_with_path(self._cache_spec, rows.cache)

        def on_device(params: Any, collections: Any, drawing: Drawing, *args: Any) -> Any:
            rows, drafts, last = args
            tokens = jnp.concatenate([rows.token[:, None], drafts], axis=1)
            new, starts, logits = self._extend(
                params, collections, rows, tokens, rows.position, last
            )

            def draw(history: History | None, of_place: Any) -> Any:
                place, token, logits = of_place
                history = None if history is None else note(history, token[:, None])
                position = rows.position + place + 1
                _, drawn = self._choose(logits, history, rows.keys, position, drawing)
                return history, drawn

            places = jnp.arange(tokens.shape[1])
            of_places = places, tokens.T, jnp.swapaxes(logits, 0, 1)
            _, drawn = jax.lax.scan(draw, rows.history, of_places)
            own = drawn.token.T
            accepted = jnp.cumprod(own[:, :-1] == drafts, axis=1).sum(axis=1)
            count = jnp.minimum(accepted + 1, last - rows.position)

            def latest(of_tokens: jax.Array, otherwise: jax.Array) -> jax.Array:
                index = jnp.maximum(count - 1, 0)[:, None]
                taken = jnp.take_along_axis(of_tokens, index, axis=1)[:, 0]
                return jnp.where(count > 0, taken, otherwise)

            history = rows.history
            if history is not None:
                history = note(history, tokens, places[None] < count[:, None])
            after = Rows(
                new.cache,
                latest(own, rows.token),
                rows.position + count,
                latest(starts, rows.start),
                rows.keys,
                history,
            )
            checked = self._of_all(Checked(own, drawn.log_probability.T, accepted))
            return after, latest(tokens, rows.token), checked

        run = self.program.step.mode.run(
            on_device,
            in_specs=(*self._model_specs(), self._rows_specs(specs), *(self._rows,) * 2),
            out_specs=(self._rows_specs(specs), self._rows, PartitionSpec()),
        )
        rows, previous, checked = run(params, collections, drawing, rows, drafts, last)
        return rows, previous, checked

    def _extend(
        self,
        params: Any,
        collections: Any,
        rows: Rows,
        tokens: jax.Array,
        first: jax.Array,
        last: jax.Array,
    ) -> tuple[Rows, jax.Array, jax.Array]:
        """Adds tokens `int32[B, N]` to the rows' caches, from the positions `first` on.

        Tokens beyond a row's end count as its last input: their results are not used, and they need
        no slot. Returns the rows, the starts of the tokens' documents, and the logits.
        """
        positions = first[:, None] + jnp.arange(tokens.shape[1])[None]
        positions = jnp.minimum(positions, last[:, None] - 1)
        begins = jnp.where(tokens == self.model.bos_token, positions, 0)
        starts = jnp.maximum(rows.start[:, None], jax.lax.cummax(begins, axis=1))
        collections = {**collections, CACHE: rows.cache}
        logits, new = self._apply(params, collections, tokens, Past(positions, starts))
        cache = append(rows.cache, new, positions)
        return rows._replace(cache=cache, start=starts[:, -1]), starts, logits

    def _model_specs(self) -> tuple[Any, ...]:
        return param_specs(self.program.step.placements), PartitionSpec(), PartitionSpec()

    def _apply(self, params: Any, collections: Any, tokens: Any, rows: Any) -> Any:
        # A draft model may have rows of padding for another number of tokens than its target.
        tokens = jnp.minimum(tokens, self.model.vocab_size - 1)
        logits, new = super()._apply(params, collections, tokens, rows)
        missing = max(0, self.vocab_size - logits.shape[-1])
        logits = jnp.pad(logits, [(0, 0), (0, 0), (0, missing)], constant_values=-jnp.inf)
        return logits[..., : self.vocab_size], new

    def move_rows(self, rows: Any) -> Any:
        """Moves rows of another program on the same devices to this program's mesh.

        Communication:
          None if both programs shard rows alike; otherwise an exchange of the rows.
        """
        return jax.device_put(rows, NamedSharding(self.program.mesh, self._rows))


class Speculation:
    """Drafts tokens for a model's steps, and lets them check the tokens.

    Attributes:
      steps: The steps of the draft model.
    """

    def __init__(self, draft: Draft, target: CachedSteps, tokens: int | None = None) -> None:
        """Prepares the steps of the draft model; compiles nothing yet.

        Both models have the tokenizer's `tokens`, and may have different numbers of rows of padding
        after them. Without a tokenizer (`None`), both need the same number of tokens.

        Raises:
          TypeError: The draft is not a `Draft`, or its model is not a `Transformer`.
          ValueError: The draft is on other devices, or has another vocabulary, or drafts no token.
        """
        if not isinstance(draft, Draft):
            raise TypeError(
                f"Generator: draft is a {type(draft).__name__}, expected a Draft(program, state)."
            )
        model = draft.program.model.interface.module
        if not isinstance(model, Transformer):
            raise TypeError(
                f"Generator: draft.program has a {type(model).__name__}, expected a Transformer."
            )
        if not 1 <= draft.tokens <= MOST_DRAFTED or draft.tokens != int(draft.tokens):
            raise ValueError(
                f"Generator: draft.tokens is {draft.tokens!s:.100}, expected a whole number from 1 "
                f"to {MOST_DRAFTED}, because each forward pass computes the logits of all of them."
            )
        own, others = model.vocab_size, target.model.vocab_size
        if own != others and not (tokens and tokens <= min(own, others)):
            raise ValueError(
                f"Generator: draft.program has a model of {own} tokens, expected {others}, the "
                "vocabulary of the model that it drafts for, or a tokenizer of at most as many."
            )
        devices, expected = (
            {device.id for device in program.mesh.devices.flat}
            for program in (draft.program, target.program)
        )
        if devices != expected:
            raise ValueError(
                f"Generator: draft.program is on the devices {sorted(devices)}, expected those of "
                f"the model that it drafts for, {sorted(expected)}; build both on the same mesh."
            )
        self.steps, self._draft = SpeculativeSteps(draft.program, others), draft

    def check(self, prompts: list[int], max_tokens: int) -> None:
        """Refuses a call that cannot have a draft.

        Args:
          prompts: The number of tokens of each prompt.
          max_tokens: The most tokens of an answer.

        Raises:
          ValueError: The draft model cannot represent the positions.
        """
        try:
            check_lengths(self.steps.model, prompts, max_tokens)
        except ValueError as error:
            raise ValueError(f"{error} This is a limit of the draft model.") from error

    def passes(
        self,
        target: SpeculativeSteps,
        variables: tuple[Any, Any],
        given: tuple[np.ndarray, np.ndarray, jax.Array],
        drawing: Drawing,
        max_tokens: int,
        size: int,
    ) -> Iterator[list[list[NewToken]]]:
        """Yields the new tokens of each row, for each forward pass of the model.

        Args:
          target: The steps of the model.
          variables: The parameters and the collections of the model.
          given: The padded prompts, their lengths, and the keys of the rows.
          drawing: The settings.
          max_tokens: The most tokens of an answer.
          size: The number of positions of the cache.
        """
        number, steps = int(self._draft.tokens), self.steps
        state = steps.adopt(self._draft.state)
        own = state.params, state.collections
        tokens, lengths, _ = given
        options: Any = {"size": size, "spare": number}
        rows, drawn = target.prefill(*variables, *map(target.put_rows, given), drawing, **options)
        kept = steps.prefill(*own, *map(steps.put_rows, given), drawing, **options)[0].cache
        last = (lengths + np.int32(max_tokens - 1)).astype(np.int32)
        ends = target.put_rows(last), steps.put_rows(last)
        before = tokens[np.arange(len(tokens)), lengths - 1]
        previous = steps.put_rows(before)
        checked: Any = drawn.token[:, None], drawn.log_probability[:, None], np.zeros_like(last)
        left: np.ndarray = np.full(len(tokens), max_tokens)
        while True:
            found = [np.asarray(x) for x in checked]
            counts = np.minimum(found[2] + 1, left)
            left = left - counts
            if left.any():
                latest = steps.move_rows((rows._replace(cache=None), previous))
                # The draft model runs while the host reads the tokens of the last pass.
                kept, drafts = steps.propose(*own, kept, *latest, ends[1], drawing, number=number)
            yield [_new_tokens(*row) for row in zip(*found, counts, strict=True)]
            if not left.any():
                return
            drafts = target.move_rows(drafts)
            rows, previous, checked = target.check(*variables, rows, drafts, ends[0], drawing)


def _new_tokens(
    tokens: np.ndarray, log_probabilities: np.ndarray, accepted: int, count: int
) -> list[NewToken]:
    new = zip(tokens[:count].tolist(), log_probabilities[:count].tolist(), strict=True)
    return [NewToken(*each, place < int(accepted)) for place, each in enumerate(new)]
