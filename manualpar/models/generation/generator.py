"""Generates text and tokens with a trained model, as complete answers or token by token.

The prompts of a call run in batches of rows that are about equally long. A batch is padded to a
length from a short list (`padded`), so that calls with other prompts need no new compilation. While
the devices compute a token, the host reads the previous token, decodes it, and compares the text
with the stop strings and the token with the stop tokens.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import numpy as np

from manualpar.core.mesh.splitting import typed_key
from manualpar.core.program.program import Program
from manualpar.core.state.train_state import TrainState
from manualpar.data.tokenizer import Tokenizer
from manualpar.models.generation.answers import Answer, NewToken, TextPiece, TextPieces, next_piece
from manualpar.models.generation.cached_steps import CachedSteps, Proposed
from manualpar.models.generation.drawing import Drawing, as_tokens, make_penalties, row_keys
from manualpar.models.generation.speculative import Draft, Speculation, SpeculativeSteps
from manualpar.models.transformer import check_lengths

# -------------------------------------------------------------------------------------------------
# Beam search for one prompt, with the rules of transformers' `generate`.
#
# Each step proposes the likeliest next tokens of every beam. The most likely continuations of all
# beams together are kept. A continuation that ends, by a stop token, a stop string or its length,
# is an answer if it is among the best `beams` continuations; its score is the sum of its tokens'
# log-probabilities, divided by the number of its tokens to the power `length_penalty`.
#
# The search ends when no running beam can become better than the worst of the `beams` best
# answers. This is estimated: with `early_stopping="never"` from the longest answer that is
# possible, else from the beam's present length. With `early_stopping=True` the search ends as soon
# as there are `beams` answers.


MOST_PENALTY = 5
NO_SCORE = np.float32(-1e9)  # The score of a beam that does not count, as in transformers.


class Search(NamedTuple):
    """The settings of a beam search.

    Attributes:
      beams: The number of beams.
      length_penalty: The exponent of the length that divides an answer's score; above 0 long
        answers are preferred to short ones.
      early_stopping: When the search ends, see `manualpar.models.generation.generator`.
    """

    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def width(self, num_stop_tokens: int) -> int:
        """Returns the number of continuations that each step proposes."""
        return max(2, 1 + num_stop_tokens) * self.beams

    def check(self, samples: int, temperature: float) -> None:
        """Refuses settings that do not go together.

        Args:
          samples: The number of answers to each prompt.
          temperature: The temperature of draws.

        Raises:
          ValueError: The settings do not go together.
        """
        if not abs(self.length_penalty) <= MOST_PENALTY:
            raise ValueError(
                f"generate: length_penalty is {self.length_penalty!s:.100}, expected a number from "
                f"-{MOST_PENALTY} to {MOST_PENALTY}, because it is the exponent of a length."
            )
        if self.beams > 1 and temperature > 0:
            raise ValueError(
                f"generate: beams is {self.beams} and temperature is {temperature}, expected 0, "
                "because a beam search takes the likeliest tokens."
            )
        if self.beams > 1 and samples > self.beams:
            raise ValueError(
                f"generate: samples is {samples} and beams is {self.beams}, expected at most as "
                "many samples as beams."
            )
        if self.beams == 1 and samples > 1 and temperature == 0:
            raise ValueError(
                f"generate: samples is {samples} and temperature is 0, expected a temperature "
                "above 0 or beams, because all samples would be the likeliest tokens."
            )
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(
                f"generate: early_stopping is {self.early_stopping!r}, expected True, False or "
                "'never'."
            )


class Beam(NamedTuple):
    """The tokens of an answer, with the log-probability of each."""

    tokens: tuple[int, ...] = ()
    log_probabilities: tuple[float, ...] = ()


class BeamSearch:
    """The beams of one prompt.

    Attributes:
      is_done: Whether the search has ended.
    """

    def __init__(
        self, search: Search, max_tokens: int, width: int, ends: Callable[[Sequence[int]], bool]
    ) -> None:
        """Begins a search.

        Args:
          search: The settings.
          max_tokens: The most tokens of an answer.
          width: The number of continuations that a step keeps, see `Search.width`.
          ends: Returns whether an answer ends with its last token.
        """
        self._search, self._max_tokens, self._width, self._ends = search, max_tokens, width, ends
        beams = search.beams
        self._running = [Beam()] * beams
        # At first all beams are the same, so only one of them counts.
        self._running_scores: np.ndarray = np.full(beams, NO_SCORE)
        self._running_scores[0] = 0
        self._answers = [Beam()] * beams
        self._scores: np.ndarray = np.full(beams, NO_SCORE)
        self._is_answer = np.zeros(beams, bool)
        self._length = 0
        self.is_done = False

    def advance(
        self, tokens: np.ndarray, scores: np.ndarray, log_probabilities: np.ndarray
    ) -> tuple[list[int], list[int]]:
        """Takes the likeliest next tokens of each beam, with their scores, all `[beams, width]`.

        Returns:
          For each new beam, the number of the beam that it continues, and its latest token.
        """
        beams = self._search.beams
        sums = (scores + self._running_scores[:, None]).ravel()
        parents = np.repeat(np.arange(beams), tokens.shape[1])
        best = np.lexsort((tokens.ravel(), parents, -sums))[: self._width]
        sums, parents, own = sums[best], parents[best], tokens.ravel()[best]
        new = [
            Beam(
                (*self._running[parent].tokens, int(token)),
                (*self._running[parent].log_probabilities, float(log_probability)),
            )
            for parent, token, log_probability in zip(
                parents, own, log_probabilities.ravel()[best], strict=True
            )
        ]
        self._length += 1
        is_last = self._length == self._max_tokens
        ended = np.array([is_last or self._ends(beam.tokens) for beam in new])
        running = sums + ended * NO_SCORE
        kept = np.argsort(-running, kind="stable")[:beams]
        self._running, self._running_scores = [new[index] for index in kept], running[kept]
        self._finish(new, sums, ended & (np.arange(len(new)) < beams))
        self.is_done |= bool(ended.all()) or not self._can_improve()
        return parents[kept].tolist(), own[kept].tolist()

    def best(self, number: int) -> list[Beam]:
        """Returns the best answers, at most `number`."""
        return self._answers[:number]

    def _finish(self, new: list[Beam], sums: np.ndarray, are_answers: np.ndarray) -> None:
        sums = sums / np.float32(self._length**self._search.length_penalty)
        if self._is_answer.all() and self._search.early_stopping is True:
            sums = sums + NO_SCORE
        scores = np.concatenate([self._scores, sums + ~are_answers * NO_SCORE])
        best = np.argsort(-scores, kind="stable")[: self._search.beams]
        answers, flags = self._answers + new, np.concatenate([self._is_answer, are_answers])
        self._answers = [answers[index] for index in best]
        self._scores, self._is_answer = scores[best], flags[best]

    def _can_improve(self) -> bool:
        search = self._search
        if search.early_stopping is True and self._is_answer.all():
            return False
        longest = search.early_stopping == "never" and search.length_penalty > 0
        length = self._max_tokens if longest else self._length
        possible = self._running_scores[0] / np.float32(length**search.length_penalty)
        worst = np.where(self._is_answer, self._scores.min(), NO_SCORE)
        return bool((possible > worst).any())


def run_searches(
    searches: Sequence[BeamSearch],
    beams: int,
    proposed: Proposed,
    step: Callable[[np.ndarray, np.ndarray], Proposed],
    device_rows: int,
) -> None:
    """Runs searches of several prompts until all have ended.

    Args:
      searches: The searches; the beams of search `n` are the rows from `n * beams` on.
      beams: The number of beams of each search, which divides `device_rows`.
      proposed: The proposals after the prompts.
      step: Replaces rows by copies of other rows on their device, followed by a token, and returns
        the proposals for the next token.
      device_rows: The number of rows on a device.
    """
    while True:
        found = [np.asarray(x) for x in proposed]
        parents = np.arange(len(found[0]), dtype=np.int32) % device_rows
        tokens = np.zeros(len(parents), np.int32)
        for number, search in enumerate(searches):
            own = slice(number * beams, (number + 1) * beams)
            if not search.is_done:
                before, tokens[own] = search.advance(*(x[own] for x in found))
                parents[own] = parents[own][before]
        if all(search.is_done for search in searches):
            return
        proposed = step(parents, tokens)


# -------------------------------------------------------------------------------------------------


Prompt = str | Sequence[int]
# The most positions, answers and beams that a call may ask for. No model uses so many positions,
# and the cache for more exhausts the memory of the host before any device refuses it.
MOST = {"max_tokens": 1 << 24, "samples": 1 << 20, "beams": 1 << 10}


class _Call(NamedTuple):
    """The settings of a call of `Generator.stream`."""

    state: TrainState
    drawing: Drawing
    max_tokens: int
    stops: frozenset[int]
    strings: list[str]
    key: jax.Array
    samples: int
    search: Search


class Generator:
    """Generates answers with a program's model, and keeps the compiled steps between calls.

    Each call gets the state whose parameters are used.

    Attributes:
      steps: The compiled steps.
      tokenizer: Converts strings to tokens and back; `None` if prompts are tokens.
      batch_size: The most rows that run at once; a multiple of the devices that shard the rows.
      stop_tokens: The tokens that end every answer.
    """

    def __init__(
        self,
        program: Program,
        tokenizer: Tokenizer | None = None,
        *,
        batch_size: int = 32,
        stop_tokens: Sequence[int] | None = None,
        draft: Draft | None = None,
    ) -> None:
        """Prepares generation with a `Transformer`.

        Args:
          program: The program of the model. Its states are used, but not trained. If its mesh has
            stages or a context axis, or its mode is not manual, another program on the same
            devices generates, see `Adopter`, and a warning says so.
          tokenizer: The tokenizer of the model.
          batch_size: The most rows that run at once, rounded up to a multiple of the devices that
            shard the rows.
          stop_tokens: The tokens that end every answer. By default these are the tokens that begin
            and end documents, if the model or the tokenizer defines them.
          draft: A small model with the same tokens, which drafts tokens that the model checks
            several at a time. The answers are those without a draft, up to rounding.

        Raises:
          TypeError, ValueError: See `CachedSteps` and `Speculation`.
        """
        self.steps = SpeculativeSteps(program) if draft else CachedSteps(program)
        tokens = tokenizer.vocab_size if tokenizer else None
        self._speculation = Speculation(draft, self.steps, tokens) if draft else None
        self.tokenizer = tokenizer
        # Batches are divisible over the devices that shard the rows of each model.
        drafting = self._speculation.steps.row_devices if self._speculation else 1
        self._row_devices = math.lcm(self.steps.row_devices, drafting)
        self.batch_size = self._divisible(batch_size)
        if stop_tokens is None:
            named = [self.steps.model.bos_token]
            named += [tokenizer.bos_token, tokenizer.end_token] if tokenizer else []
            stop_tokens = [token for token in named if token >= 0]
        self.stop_tokens = frozenset(map(int, stop_tokens))

    def generate(
        self, state: TrainState, prompts: Sequence[Prompt], **options: Any
    ) -> list[Answer]:
        """Generates a complete answer to each prompt.

        Args:
          state: A state of the program, as `init`, `train_step` or `adopt` return it.
          prompts: Lists of tokens, or strings, see `encode`.
          **options: See `stream`.

        Returns:
          `samples` answers to each prompt, in the order of the prompts.

        Raises:
          TypeError, ValueError: See `stream`.

        Communication:
          The communication of `stream`.
        """
        pieces = self.stream(state, prompts, **options)  # Checks the options.
        answers = [Answer() for _ in range(len(prompts) * options.get("samples", 1))]
        for piece in pieces:
            answer = answers[piece.row]
            answer.text += piece.text
            if piece.token is not None:
                answer.tokens.append(piece.token)
                answer.log_probabilities.append(piece.log_probability)
            answer.drafted += piece.is_drafted
            answer.forward_passes = piece.forward_passes
            answer.ending = piece.ending or answer.ending
        return answers

    def stream(
        self,
        state: TrainState,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        samples: int = 1,
        beams: int = 1,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        stop: Sequence[str | int] = (),
        seed: int | jax.Array = 0,
    ) -> Iterator[TextPiece]:
        """Generates answers to prompts, and yields each piece as soon as its token is drawn.

        Args:
          state: A state of the program.
          prompts: Lists of tokens, or strings; at least one token each.
          max_tokens: The most tokens of an answer.
          temperature: The divisor of the logits; 0 always chooses the likeliest token.
          top_k: Draws only from this number of likeliest tokens; 0 for all.
          top_p: Draws only from the fewest tokens that together have this probability; 1 for all.
          min_p: Draws only from tokens with at least this fraction of the likeliest token's
            probability; 0 for all.
          repetition_penalty: Divides the positive logits of all tokens of the prompt and the
            answer, and multiplies the negative ones; 1 for none.
          frequency_penalty: Subtracted from a token's logit for each time that the answer contains
            the token; 0 for none.
          presence_penalty: Subtracted from the logit of each token that the answer contains; 0 for
            none.
          logit_bias: Numbers to add to the logits of tokens; `-math.inf` excludes a token.
          samples: The number of answers to each prompt: of draws, or of the best beams.
          beams: The number of beams of a beam search, see `manualpar.models.generation.generator`;
          1
            for none. A search yields its answers when it has ended.
          length_penalty: With beams, the exponent of an answer's length that divides its score.
          early_stopping: With beams, whether a search ends as soon as there are `beams` answers;
            `"never"` if it ends only when no better answer is possible.
          stop: Strings and tokens that end an answer, in addition to `stop_tokens`. The answer does
            not contain them.
          seed: A number or a random key. With the same seed, a prompt at the same index of
            `prompts` gets the same draws, on every mesh and whatever the other prompts are.

        Yields:
          A piece for each token: in each batch the first pieces of all answers, then the second
          pieces, and so on. With a draft, the pieces of an answer from one forward pass follow one
          another.

        Raises:
          TypeError: A prompt is a string and there is no tokenizer, or a prompt is neither a string
            nor a list of tokens.
          ValueError: A prompt is empty or has unknown tokens; or an argument is out of range; or
            the model cannot represent the positions of an answer, see `check_lengths`.

        Communication:
          For each batch, once for the prompts and once for each further token: the collectives of
          a training step's forward pass, for parameters and over the model axis; an all-gather of
          the logits, `float32[B, V]`, over the model axis; and an all-gather of the tokens,
          `int32[B]`, and of their log-probabilities, `float32[B]`, over the data axes. With a
          draft of `D` tokens, once for each forward pass, with `D + 1` logits, tokens and
          log-probabilities for each row; and for the draft model `D` times what a token costs.
        """
        for name, value in (("max_tokens", max_tokens), ("samples", samples), ("beams", beams)):
            if not 1 <= value <= MOST[name] or value != int(value):
                raise ValueError(
                    f"generate: {name} is {value!s:.100}, expected at least 1 and at most "
                    f"{MOST[name]:,}."
                )
        penalties = make_penalties(
            self.steps.model.vocab_size,
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            logit_bias,
        )
        drawing = Drawing(temperature, top_k, top_p, min_p, penalties).as_arrays()
        search = Search(beams, length_penalty, early_stopping)
        search.check(samples, float(temperature))
        stops = self.stop_tokens.union(x for x in stop if not isinstance(x, str))
        strings = [x for x in stop if isinstance(x, str)]
        if strings and self.tokenizer is None:
            raise ValueError(
                f"generate: stop has the string {strings[0]!r} and there is no tokenizer; expected "
                "token numbers, or a Generator with a tokenizer."
            )
        encoded = [self.encode(prompt, index) for index, prompt in enumerate(prompts)]
        check_lengths(self.steps.model, map(len, encoded), max_tokens)
        if self._speculation:
            self._speculation.check(beams, list(map(len, encoded)), max_tokens)
        if isinstance(seed, int) and not -(2**63) <= seed < 2**63:
            raise ValueError(f"generate: seed is {seed!s:.100}, expected a number of 64 bits.")
        key = jax.random.key(seed) if isinstance(seed, int) else typed_key("generate", seed)
        call = _Call(
            self.steps.adopt(state), drawing, max_tokens, stops, strings, key, samples, search
        )
        if beams > 1:
            return self._stream_beams(call, encoded)
        return self._stream(call, [prompt for prompt in encoded for _ in range(samples)])

    def _stream(self, call: _Call, prompts: list[list[int]]) -> Iterator[TextPiece]:
        for batch in _batches(prompts, self.batch_size):
            writers = {row: self._writer(call, prompts[row]) for row in batch}
            counts = dict.fromkeys(batch, 0)  # The number of tokens drawn for each unfinished row.
            for number, drawn in enumerate(self._draws(call, prompts, batch), 1):
                # Rows of padding follow the rows of the batch.
                for row, tokens in zip(batch, drawn, strict=False):
                    for new in tokens if row in counts else ():
                        counts[row] += 1
                        when: Any = {"is_last": counts[row] == call.max_tokens}
                        when["forward_passes"] = number
                        piece = next_piece(row, new, writers[row], call.stops, **when)
                        yield piece
                        if piece.ending:
                            del counts[row]
                            break
                if not counts:
                    break

    def _stream_beams(self, call: _Call, prompts: list[list[int]]) -> Iterator[TextPiece]:
        devices, beams = self.steps.row_devices, call.search.beams
        size = max(1, self.batch_size // devices // beams) * devices
        for batch in _batches(prompts, size):
            searches = self._run_searches(call, [prompts[row] for row in batch])
            for row, search in zip(batch, searches, strict=True):
                for sample, beam in enumerate(search.best(call.samples)):
                    writer, answer = self._writer(call, prompts[row]), row * call.samples + sample
                    for place, new in enumerate(zip(*beam, strict=True), 1):
                        is_last = place == len(beam.tokens)
                        of_beam = NewToken(*new)
                        yield next_piece(answer, of_beam, writer, call.stops, is_last=is_last)

    def _run_searches(self, call: _Call, prompts: list[list[int]]) -> list[BeamSearch]:
        def ends(prompt: list[int], tokens: Sequence[int]) -> bool:
            if tokens[-1] in call.stops:
                return True
            if not call.strings or (writer := self._writer(call, prompt)) is None:
                return False
            for token in tokens:
                writer.add(token)
            return writer.is_stopped

        beams, steps = call.search.beams, self.steps
        width = call.search.width(len(call.stops))
        searches = [
            BeamSearch(call.search, call.max_tokens, width, functools.partial(ends, prompt))
            for prompt in prompts
        ]
        longest = max(map(len, prompts))
        rows = [prompt for prompt in prompts for _ in range(beams)]
        tokens, lengths = self.pad(rows, padded(longest), beams)
        given = (tokens, lengths, row_keys(call.key, np.arange(len(tokens))))
        variables = call.state.params, call.state.collections
        size = padded(longest + call.max_tokens)
        held, proposed = steps.prefill(
            *variables, *map(steps.put_rows, given), call.drawing, size=size, width=width
        )

        def step(*moves: np.ndarray) -> Proposed:
            nonlocal held
            placed = tuple(map(steps.put_rows, moves))
            held, found = steps.decode(*variables, held, call.drawing, placed, width=width)
            return cast(Proposed, found)

        run_searches(searches, beams, proposed, step, len(tokens) // steps.row_devices)
        return searches

    def _writer(self, call: _Call, prompt: list[int]) -> TextPieces | None:
        return TextPieces(self.tokenizer, prompt, call.strings) if self.tokenizer else None

    def _draws(
        self, call: _Call, prompts: list[list[int]], batch: list[int]
    ) -> Iterator[list[list[NewToken]]]:
        """Yields the new tokens of each of a batch's rows, for each forward pass of the model."""
        steps, params, collections = self.steps, call.state.params, call.state.collections
        longest = max(len(prompts[row]) for row in batch)
        tokens, lengths = self.pad([prompts[row] for row in batch], padded(longest))
        numbers = np.zeros(len(tokens), np.uint32)
        numbers[: len(batch)] = batch
        keys = row_keys(call.key, numbers, call.samples)
        size = padded(longest + call.max_tokens)
        if self._speculation:
            yield from self._speculation.passes(
                cast(SpeculativeSteps, steps),
                (params, collections),
                (tokens, lengths, keys),
                call.drawing,
                call.max_tokens,
                size,
            )
            return
        given = (steps.put_rows(x) for x in (tokens, lengths, keys))
        rows, latest = steps.prefill(params, collections, *given, call.drawing, size=size)
        for further in reversed(range(call.max_tokens)):
            before = latest
            if further:
                rows, latest = steps.decode(params, collections, rows, call.drawing)
            found = before.token.tolist(), before.log_probability.tolist()
            yield [[NewToken(*new)] for new in zip(*found, strict=True)]

    def pad(
        self, rows: Sequence[Sequence[int]], length: int, group: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Pads rows to an array `int32[B, length]`; returns the array and the rows' lengths.

        The array has a power of two groups of `group` rows for each device that shards the rows,
        at most `batch_size` rows in all, so that steps are compiled for few numbers of rows.
        """
        devices = self._row_devices
        parts = -(-len(rows) // (devices * group))
        most = max(1, self.batch_size // devices // group)
        number = min(1 << (parts - 1).bit_length(), most) * devices * group
        tokens, lengths = np.zeros((number, length), np.int32), np.ones(number, np.int32)
        for index, row in enumerate(rows):
            tokens[index, : len(row)], lengths[index] = row, len(row)
        return tokens, lengths

    def encode(self, prompt: Prompt, index: int = 0) -> list[int]:
        """Returns the tokens of a prompt; puts BOS before a string as the tokenizer requires."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TypeError(
                    f"generate: prompt {index} is a string and there is no tokenizer; expected "
                    "tokens, or a Generator with a tokenizer."
                )
            encoded: list[int] = self.tokenizer.encode(prompt).tolist()
            begins = self.tokenizer.begins_with_bos or not encoded
            return [self.tokenizer.bos_token, *encoded] if begins else encoded
        tokens = as_tokens(f"generate: prompt {index}", prompt)
        vocabulary = self.steps.model.vocab_size
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise ValueError(
                f"generate: prompt {index} has tokens from {tokens.min()} to {tokens.max()}, "
                f"expected 0 to {vocabulary - 1}."
            )
        return list(map(int, tokens))

    def _divisible(self, batch_size: int) -> int:
        if batch_size < 1:
            raise ValueError(f"generate: batch_size is {batch_size}, expected at least 1.")
        return -(-batch_size // self._row_devices) * self._row_devices


def generate(
    program: Program,
    state: TrainState,
    prompts: Sequence[Prompt],
    *,
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> list[Answer]:
    """Generates answers to prompts with a program's model; see `Generator.stream` for the options.

    Each call compiles its steps again. For several calls make a `Generator`.
    """
    return Generator(program, tokenizer).generate(state, prompts, **options)


def padded(length: int) -> int:
    """Rounds a length up to 16, 32, 48, 64, or one of four lengths between two powers of two."""
    step = max(16, 1 << max((length - 1).bit_length() - 3, 0))
    return -(-length // step) * step


def _batches(prompts: list[list[int]], size: int) -> Iterator[list[int]]:
    """Yields the indices of prompts in batches of about equal length."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for first in range(0, len(order), size):
        yield order[first : first + size]
