"""Generates text and tokens with a trained model, as complete answers or token by token.

The prompts of a call run in batches of rows that are about equally long. A batch is padded to a
length from a short list (`padded`), so that calls with other prompts need no new compilation. While
the devices compute a token, the host reads the previous token, decodes it, and compares the text
with the stop strings and the token with the stop tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from manualpar.core.mesh.splitting import typed_key
from manualpar.core.program.program import Program
from manualpar.core.state.train_state import TrainState
from manualpar.data.tokenizer import Tokenizer, frame_prompt
from manualpar.models.generation.answers import Answer, TextPiece, TextPieces, next_piece
from manualpar.models.generation.cached_steps import CachedSteps
from manualpar.models.generation.drawing import Drawing, as_tokens, make_penalties, row_keys
from manualpar.models.transformer import check_lengths

Prompt = str | Sequence[int]
# The most positions and answers that a call may ask for. No model uses so many positions, and the
# cache for more exhausts the memory of the host before any device refuses it.
MOST = {"max_tokens": 1 << 24, "samples": 1 << 20}


class _Call(NamedTuple):
    """The settings of a call of `Generator.stream`."""

    state: TrainState
    drawing: Drawing
    max_tokens: int
    stops: frozenset[int]
    strings: list[str]
    key: jax.Array
    samples: int


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

        Raises:
          TypeError, ValueError: See `CachedSteps`.
        """
        self.steps, self.tokenizer = CachedSteps(program), tokenizer
        self.batch_size = self._divisible(batch_size)
        if stop_tokens is None:
            named = [self.steps.bos_token]
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
          samples: The number of answers that are drawn for each prompt.
          stop: Strings and tokens that end an answer, in addition to `stop_tokens`. The answer does
            not contain them.
          seed: A number or a random key. With the same seed, a prompt at the same index of
            `prompts` gets the same draws, on every mesh and whatever the other prompts are.

        Yields:
          A piece for each token: in each batch the first pieces of all answers, then the second
          pieces, and so on.

        Raises:
          TypeError: A prompt is a string and there is no tokenizer, or a prompt is neither a string
            nor a list of tokens.
          ValueError: A prompt is empty or has unknown tokens; or an argument is out of range; or
            the model cannot represent the positions of an answer, see `check_lengths`.

        Communication:
          For each batch, once for the prompts and once for each further token: the collectives of
          a training step's forward pass, for parameters and over the model axis; an all-gather of
          the logits, `float32[B, V]`, over the model axis; and an all-gather of the tokens,
          `int32[B]`, and of their log-probabilities, `float32[B]`, over the data axes.
        """
        for name, value in (("max_tokens", max_tokens), ("samples", samples)):
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
        if samples > 1 and temperature == 0:
            raise ValueError(
                f"generate: samples is {samples} and temperature is 0, expected a temperature "
                "above 0, because all samples would be the likeliest tokens."
            )
        stops = self.stop_tokens.union(x for x in stop if not isinstance(x, str))
        strings = [x for x in stop if isinstance(x, str)]
        if strings and self.tokenizer is None:
            raise ValueError(
                f"generate: stop has the string {strings[0]!r} and there is no tokenizer; expected "
                "token numbers, or a Generator with a tokenizer."
            )
        encoded = [self.encode(prompt, index) for index, prompt in enumerate(prompts)]
        check_lengths(self.steps.model, map(len, encoded), max_tokens)
        if isinstance(seed, int) and not -(2**63) <= seed < 2**63:
            raise ValueError(f"generate: seed is {seed!s:.100}, expected a number of 64 bits.")
        key = jax.random.key(seed) if isinstance(seed, int) else typed_key("generate", seed)
        call = _Call(self.steps.adopt(state), drawing, max_tokens, stops, strings, key, samples)
        return self._stream(call, [prompt for prompt in encoded for _ in range(samples)])

    def _stream(self, call: _Call, prompts: list[list[int]]) -> Iterator[TextPiece]:
        for batch in _batches(prompts, self.batch_size):
            writers = {row: self._writer(call, prompts[row]) for row in batch}
            unfinished = set(batch)
            for number, drawn in enumerate(self._draws(call, prompts, batch), 1):
                is_last = number == call.max_tokens
                # Rows of padding follow the rows of the batch.
                for row, new in zip(batch, drawn, strict=False):
                    if row not in unfinished:
                        continue
                    piece = next_piece(row, new, writers[row], call.stops, is_last=is_last)
                    if piece.ending:
                        unfinished.remove(row)
                    yield piece
                if not unfinished:
                    break

    def _writer(self, call: _Call, prompt: list[int]) -> TextPieces | None:
        return TextPieces(self.tokenizer, prompt, call.strings) if self.tokenizer else None

    def _draws(
        self, call: _Call, prompts: list[list[int]], batch: list[int]
    ) -> Iterator[list[tuple[int, float]]]:
        """Yields the next tokens of a batch's rows with their log-probabilities, token by token."""
        steps, params, collections = self.steps, call.state.params, call.state.collections
        longest = max(len(prompts[row]) for row in batch)
        tokens, lengths = self.pad([prompts[row] for row in batch], padded(longest))
        numbers = np.zeros(len(tokens), np.uint32)
        numbers[: len(batch)] = batch
        keys = row_keys(call.key, numbers, call.samples)
        size = padded(longest + call.max_tokens)
        given = (steps.put_rows(x) for x in (tokens, lengths, keys))
        rows, latest = steps.prefill(params, collections, *given, call.drawing, size=size)
        for further in reversed(range(call.max_tokens)):
            before = latest
            if further:
                rows, latest = steps.decode(params, collections, rows, call.drawing)
            yield list(zip(before.token.tolist(), before.log_probability.tolist(), strict=True))

    def pad(self, rows: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
        """Pads rows to an array `int32[B, length]`; returns the array and the rows' lengths.

        The array has a power of two rows for each device that shards the rows, at most `batch_size`
        rows in all, so that steps are compiled for few numbers of rows.
        """
        devices = self.steps.row_devices
        parts = -(-len(rows) // devices)
        number = min(1 << (parts - 1).bit_length(), self.batch_size // devices) * devices
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
            return frame_prompt(self.tokenizer, self.tokenizer.encode(prompt))
        tokens = as_tokens(f"generate: prompt {index}", prompt)
        vocabulary = self.steps.model.vocab_size
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise ValueError(
                f"generate: prompt {index} has tokens from {tokens.min()} to {tokens.max()}, "
                f"expected 0 to {vocabulary - 1}."
            )
        return list(map(int, tokens))

    def encode_pair(self, context: str, completion: str) -> tuple[list[int], list[int]]:
        """Encodes a context and its completion as one text; returns the tokens of both.

        A token with letters of both belongs to the completion. The context begins with BOS as the
        tokenizer requires, and always if it would be empty.
        """
        if self.tokenizer is None:
            raise TypeError("generate: there is no tokenizer, expected a Generator with one.")
        joined, border = self.tokenizer.encode_joined(context, completion)
        return frame_prompt(self.tokenizer, joined[:border]), joined[border:].tolist()

    def _divisible(self, batch_size: int) -> int:
        if batch_size < 1:
            raise ValueError(f"generate: batch_size is {batch_size}, expected at least 1.")
        return -(-batch_size // self.steps.row_devices) * self.steps.row_devices


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
