"""Generates text and tokens with a trained model, as complete answers or token by token.

The prompts of a call run in batches of rows that are about equally long. A batch is padded to a
length from a short list (`padded`), so that calls with other prompts need no new compilation. While
the devices compute a token, the host reads the previous token, decodes it, and compares the text
with the stop strings and the token with the stop tokens.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from manualpar.core.mesh.rng import typed_key
from manualpar.core.program.program import Program
from manualpar.core.state.train_state import TrainState
from manualpar.data.tokenizer import Tokenizer
from manualpar.models.generation.cached_steps import CachedSteps
from manualpar.models.generation.drawing import Drawing, as_tokens, row_keys
from manualpar.models.generation.text_pieces import TextPieces

Prompt = str | Sequence[int]
Ending = Literal["stop", "length"]


class TextPiece(NamedTuple):
    """A new piece of an answer.

    Attributes:
      row: The index of the prompt.
      token: The token; `None` for a stop token, which is not a part of the answer.
      log_probability: The token's log-probability in nats, at temperature 1 and without `top_k` and
        `top_p`.
      text: The new text that later tokens cannot change; always empty without a tokenizer.
      ending: Why the answer ends here, as in `Answer`; `None` if the answer goes on.
    """

    row: int
    token: int | None
    log_probability: float
    text: str
    ending: Ending | None = None


@dataclasses.dataclass
class Answer:
    """A model's answer to a prompt.

    Attributes:
      tokens: The tokens, without the stop token.
      log_probabilities: Each token's log-probability in nats, at temperature 1 and without `top_k`
        and `top_p`.
      text: The text of the tokens, up to a stop string; empty without a tokenizer.
      ending: `"stop"` if a stop token or a stop string ended the answer; `"length"` if the answer
        reached the limit of `max_tokens` tokens.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probabilities: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    ending: Ending = "length"


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
        """Prepares generation with a `Transformer`, on any mesh without stages and context axes.

        Args:
          program: The program of the model. Its states are used, but not trained.
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
          An `Answer` to each prompt, in the order of the prompts.

        Raises:
          TypeError, ValueError: See `stream`.

        Communication:
          The communication of `stream`.
        """
        answers = [Answer() for _ in prompts]
        for piece in self.stream(state, prompts, **options):
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
          ValueError: A prompt is empty or has unknown tokens; or an argument is out of range.

        Communication:
          For each batch, once for the prompts and once for each further token: the collectives of
          a training step's forward pass, for parameters and over the model axis; an all-gather of
          the logits, `float32[B, V]`, over the model axis; and an all-gather of the tokens,
          `int32[B]`, and of their log-probabilities, `float32[B]`, over the data axes.
        """
        if max_tokens < 1 or max_tokens != int(max_tokens):
            raise ValueError(f"generate: max_tokens is {max_tokens}, expected at least 1.")
        drawing = Drawing(temperature, top_k, top_p).as_arrays()
        stops = self.stop_tokens.union(x for x in stop if not isinstance(x, str))
        strings = [x for x in stop if isinstance(x, str)]
        if strings and self.tokenizer is None:
            raise ValueError(
                f"generate: stop has the string {strings[0]!r} and there is no tokenizer; expected "
                "token numbers, or a Generator with a tokenizer."
            )
        encoded = [self.encode(prompt, index) for index, prompt in enumerate(prompts)]
        key = jax.random.key(seed) if isinstance(seed, int) else typed_key("generate", seed)
        return self._stream(state, encoded, drawing, max_tokens, stops, strings, key)

    def _stream(
        self,
        state: TrainState,
        prompts: list[list[int]],
        drawing: Drawing,
        max_tokens: int,
        stops: frozenset[int],
        strings: list[str],
        key: jax.Array,
    ) -> Iterator[TextPiece]:
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        for first in range(0, len(order), self.batch_size):
            batch = order[first : first + self.batch_size]
            writers = {
                row: TextPieces(self.tokenizer, prompts[row], strings)
                for row in batch
                if self.tokenizer is not None
            }
            counts = dict.fromkeys(batch, 0)  # The number of tokens drawn for each unfinished row.
            for drawn in self._draws(state, prompts, batch, drawing, max_tokens, key):
                # Rows of padding follow the rows of the batch.
                for row, token, log_probability in zip(batch, *drawn, strict=False):
                    if row not in counts:
                        continue
                    counts[row] += 1
                    is_last = counts[row] == max_tokens
                    piece = _piece(
                        row, (int(token), log_probability), writers.get(row), stops, is_last=is_last
                    )
                    if piece.ending:
                        del counts[row]
                    yield piece
                if not counts:
                    break

    def _draws(
        self,
        state: TrainState,
        prompts: list[list[int]],
        batch: list[int],
        drawing: Drawing,
        max_tokens: int,
        key: jax.Array,
    ) -> Iterator[tuple[list[int], list[float]]]:
        """Yields the next tokens of a batch's rows and their log-probabilities, token by token."""
        steps, params, collections = self.steps, state.params, state.collections
        longest = max(len(prompts[row]) for row in batch)
        tokens, lengths = self.pad([prompts[row] for row in batch], padded(longest))
        numbers = np.zeros(len(tokens), np.uint32)
        numbers[: len(batch)] = batch
        given = (steps.put_rows(x) for x in (tokens, lengths, row_keys(key, numbers)))
        size = padded(longest + max_tokens)
        rows, latest = steps.prefill(params, collections, *given, drawing, size=size)
        for _ in range(max_tokens - 1):
            before = latest
            rows, latest = steps.decode(params, collections, rows, drawing)
            yield before.token.tolist(), before.log_probability.tolist()
        yield latest.token.tolist(), latest.log_probability.tolist()

    def pad(self, rows: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
        """Pads rows to an array `int32[B, length]`; returns the array and the rows' lengths.

        The array has a power of two rows for each device that shards the rows, at most
        `batch_size` rows in all, so that steps are compiled for few numbers of rows.
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


def _piece(
    row: int,
    drawn: tuple[int, float],
    writer: TextPieces | None,
    stops: frozenset[int],
    *,
    is_last: bool,
) -> TextPiece:
    """Makes the next piece of a row from a new token and its log-probability."""
    if drawn[0] in stops:
        return TextPiece(row, None, 0.0, writer.finish() if writer else "", "stop")
    text = writer.add(drawn[0]) if writer else ""
    if writer and writer.is_stopped:
        return TextPiece(row, *drawn, text, "stop")
    if is_last:
        return TextPiece(row, *drawn, text + (writer.finish() if writer else ""), "length")
    return TextPiece(row, *drawn, text)
