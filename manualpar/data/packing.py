"""Packs several examples of different lengths into a sequence, without attention between them.

An example is an array of `uint32`. The highest bit of an element is set if the token is learned,
that is, if it counts in the loss as a label; the other bits are the token. An example of `n + 1`
tokens needs `n` positions: all tokens but the last are inputs, and all but the first are labels. A
sequence of `S` positions contains complete examples, one after the other. In addition to its
tokens, a sequence has for each position the number of the example there: 1, 2, ..., and 0 for
padding. Attention stays within an example. Positions are counted from the beginning of the
sequence, because rotary attention depends only on differences of positions.

Examples are assigned to sequences once, when they are loaded. They are shuffled, and packed in
groups of `WINDOW` examples. In a group, longer examples are placed first, each into the fullest
sequence that has room for it (best-fit decreasing). In training, an epoch is a permutation of the
sequences, as for any other split. So packing needs no state, and a run can resume at any position.

Symbols: `S` positions, `P` sequences.
"""

import bisect
import dataclasses
from typing import Literal, get_args

import jax
import numpy as np

from manualpar.core.state.train_state import Batch
from manualpar.core.summary import Summarized
from manualpar.data.dataset import DamagedDataError

# The highest bit of a token is set if the token is learned.
LEARNED = np.uint32(2**31)
WINDOW = 1024
# The seed for shuffling examples before packing. It is fixed, so that the data do not depend on the
# seed of a run.
PACKING_SEED = 0
LongExamples = Literal["error", "cut", "drop"]
LONG_EXAMPLES: tuple[LongExamples, ...] = get_args(LongExamples)


@dataclasses.dataclass(frozen=True, repr=False)
class PackedSplit(Summarized):
    """A split of packed examples; `pack` makes it.

    Attributes:
      tokens: `uint32[N]`, the tokens of all examples, one after the other; the bit `LEARNED` is set
        for learned tokens.
      starts: The index in `tokens` at which each example begins, and the length of `tokens`.
      order: The numbers of the examples in each sequence, one sequence after the other.
      firsts: `[P + 1]`, the index in `order` at which each sequence begins, and the length of
        `order`.
      sequence_length: `S`.
      vocab_size: All tokens are less than this number.
      padding: The token at positions without an example.
      name: The name of the data, for messages.
      unlearned: The number of examples that are left out, because cutting them left no learned
        token.
    """

    tokens: np.ndarray
    starts: np.ndarray
    order: np.ndarray
    firsts: np.ndarray
    sequence_length: int
    vocab_size: int
    padding: int
    name: str
    unlearned: int = 0

    @property
    def tokens_per_byte(self) -> None:
        """`None`, because the number of bytes of the learned text is unknown."""

    @property
    def filled(self) -> float:
        """The fraction of the positions that belong to an example."""
        lengths = np.minimum(np.diff(self.starts)[self.order] - 1, self.sequence_length)
        return float(lengths.sum() / (len(self) * self.sequence_length))

    @property
    def abstract_example(self) -> Batch:
        """The shapes and dtypes of any sequence, as `jax.ShapeDtypeStruct`s."""
        numbers = jax.ShapeDtypeStruct((self.sequence_length,), np.int32)
        mask = jax.ShapeDtypeStruct((self.sequence_length,), np.float32)
        return Batch({"tokens": numbers, "documents": numbers}, numbers, mask)

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def __getitem__(self, index: int) -> Batch:
        """Returns sequence `index`: `tokens`, `documents` and labels, each `int32[S]`, and a mask.

        Raises:
          DamagedDataError: A token is not in the vocabulary.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        shape = self.sequence_length
        inputs, labels = np.full((2, shape), self.padding, np.int32)
        documents, mask = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        at = 0
        for number, example in enumerate(self.order[self.firsts[index] : self.firsts[index + 1]]):
            content = np.array(self.tokens[self.starts[example] : self.starts[example + 1]])
            tokens, learned = tokens_of(content), learned_of(content)
            if tokens.max() >= self.vocab_size:
                raise DamagedDataError(
                    f"{self.name} has token {tokens.max()} in example {example}, "
                    f"expected less than the vocabulary's {self.vocab_size}; make the file again."
                )
            end = min(at + len(tokens) - 1, shape)
            inputs[at:end], labels[at:end] = tokens[: end - at], tokens[1 : end - at + 1]
            mask[at:end], documents[at:end] = learned[1 : end - at + 1], number + 1
            at = end
        return Batch({"tokens": inputs, "documents": documents}, labels, mask)


def pack(
    tokens: np.ndarray,
    lengths: np.ndarray,
    *,
    sequence_length: int,
    vocab_size: int,
    padding: int,
    long_examples: LongExamples,
    name: str,
) -> PackedSplit:
    """Assigns examples to sequences, and returns the split of these sequences.

    Args:
      tokens: See `PackedSplit`.
      lengths: The number of tokens of each example, at least two.
      sequence_length: `S`.
      vocab_size: See `PackedSplit`.
      padding: See `PackedSplit`.
      long_examples: The treatment of examples with more than `S` positions: `"error"` refuses them,
        `"cut"` keeps their first `S` positions, and leaves out those that then have no learned
        token, and `"drop"` leaves all out.
      name: See `PackedSplit`.
    """
    positions = lengths.astype(np.int64) - 1
    is_long = positions > sequence_length
    if is_long.any() and long_examples == "error":
        raise ValueError(
            f"`sequence_length` is {sequence_length}, and {is_long.sum()} of "
            f"{len(lengths)} examples of {name} are longer, the longest {positions.max()}; "
            f"expected at least {positions.max()}, or `long_examples='cut'` or 'drop'."
        )
    kept = np.flatnonzero(~is_long) if long_examples == "drop" else np.arange(len(lengths))
    if not len(kept):
        raise ValueError(
            f"`sequence_length` is {sequence_length}, and all examples of {name} are "
            f"longer; expected at least {positions.min()}."
        )
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    unlearned = 0
    if long_examples == "cut":
        labels = ((n, tokens[starts[n] + 1 :][:sequence_length]) for n in np.flatnonzero(is_long))
        nothing = [n for n, some in labels if not (np.asarray(some) & LEARNED).any()]
        kept, unlearned = np.setdiff1d(kept, nothing), len(nothing)
        if not len(kept):
            raise ValueError(
                f"`sequence_length` is {sequence_length} and `long_examples='cut'`, which cuts "
                f"away all that is learned of {name}; expected at least {positions.max()}."
            )
    shuffled = np.random.default_rng(PACKING_SEED).permutation(kept)
    order: list[int] = []
    firsts = [0]
    for first in range(0, len(shuffled), WINDOW):
        window = shuffled[first : first + WINDOW]
        for members in _fill(
            window, np.minimum(positions[window], sequence_length), sequence_length
        ):
            order += members
            firsts.append(len(order))
    return PackedSplit(
        tokens,
        starts,
        np.array(order, np.int64),
        np.array(firsts, np.int64),
        sequence_length,
        vocab_size,
        padding,
        name,
        unlearned,
    )


def _fill(numbers: np.ndarray, positions: np.ndarray, room: int) -> list[list[int]]:
    """Packs a group of examples, the longest first; returns the examples in each sequence."""
    sequences: list[list[int]] = []
    # Pairs (free positions, sequence) for the sequences with room; the fullest comes first.
    left: list[tuple[int, int]] = []
    for index in np.argsort(-positions, kind="stable"):
        size = int(positions[index])
        place = bisect.bisect_left(left, (size, 0))
        if place < len(left):
            free, sequence = left.pop(place)
        else:
            free, sequence = room, len(sequences)
            sequences.append([])
        sequences[sequence].append(int(numbers[index]))
        if free > size:
            bisect.insort(left, (free - size, sequence))
    return sequences


def tokens_of(examples: np.ndarray) -> np.ndarray:
    """Returns the tokens of examples without the bit `LEARNED`, `int32[N]`."""
    return (examples & ~LEARNED).astype(np.int32)


def learned_of(examples: np.ndarray) -> np.ndarray:
    """Returns 1.0 for each learned token of examples and 0.0 for others, `float32[N]`."""
    return (examples >> np.uint32(31)).astype(np.float32)
