"""Documents end to end, cut into sequences of one length.

The documents of a split form one stream of tokens, `BOS doc BOS doc ... BOS doc BOS`: the token BOS
begins a document and ends the one before, and the last one stands there only to end something. So
the stream asks for each token of each document once, and for each document's end: as many labels
as it has tokens, less the first.

Sequence `i` takes `stream[i * S : i * S + S + 1]`, all but the last as inputs and all but the first
as labels: no token is dropped, and none is a label twice. Where documents begin can be read off the
inputs, `cumsum(inputs == BOS)`, so a model needs no other mask to keep them apart. What a sequence
has of a document that began in the one before is a document without its BOS.

S is the length of a sequence.
"""

import dataclasses
from typing import Protocol

import jax
import numpy as np

from manualpar.train_state import Batch


class DamagedDataError(ValueError):
    """A file of the data is not what it was, or holds what it cannot; one sentence for the user."""


class TokenStream(Protocol):
    """The documents of a split, end to end."""

    def __len__(self) -> int:
        """How many tokens there are, with every BOS."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop`, `int32[stop - start]`; both lie within the stream."""


@dataclasses.dataclass(frozen=True)
class ArrayStream:
    """A stream that is an array, in memory or mapped into it.

    Attributes:
      tokens: `uint[N]`.
      name: What the array is, for messages.
      vocab_size: What each token is less than.
    """

    tokens: np.ndarray
    name: str
    vocab_size: int

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop`."""
        tokens = np.array(self.tokens[start:stop], np.int32)
        # Indexing on a device would clamp it without a word.
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            token = tokens.max() if tokens.max() >= self.vocab_size else tokens.min()
            raise DamagedDataError(
                f"config.data.path: {self.name} has token {token} among those from {start} to "
                f"{stop}, expected less than the vocabulary's {self.vocab_size}; make the file "
                "again with `python -m manualpar.data.tokenize`."
            )
        return tokens


@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """A stream as sequences.

    The last sequence is filled up with BOS, and only there the mask is 0.

    Attributes:
      stream: The documents, two tokens at least.
      sequence_length: S.
      bos_token: What begins a document.
      num_bytes: Bytes of the documents' text.
      num_documents: How many they are.
    """

    stream: TokenStream
    sequence_length: int
    bos_token: int
    num_bytes: int
    num_documents: int

    @property
    def num_labels(self) -> int:
        """How many tokens are asked for: all but the stream's first."""
        return len(self.stream) - 1

    @property
    def tokens_per_byte(self) -> float:
        """Labels for each byte of text; the ends of documents are labels and no bytes."""
        return self.num_labels / self.num_bytes

    @property
    def abstract_example(self) -> Batch:
        """The shapes and dtypes of all sequences, as `jax.ShapeDtypeStruct`s; none is read."""
        tokens = jax.ShapeDtypeStruct((self.sequence_length,), np.int32)
        return Batch(tokens, tokens, jax.ShapeDtypeStruct((self.sequence_length,), np.float32))

    def __len__(self) -> int:
        return -(-self.num_labels // self.sequence_length)

    def __getitem__(self, index: int) -> Batch:
        """Sequence `index`: inputs and labels `int32[S]`, mask `float32[S]`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start = index * self.sequence_length
        tokens = self.stream.read(start, min(start + self.sequence_length + 1, len(self.stream)))
        padding = (0, self.sequence_length + 1 - len(tokens))
        mask = np.pad(np.ones(len(tokens) - 1, np.float32), padding)
        tokens = np.pad(tokens, padding, constant_values=self.bos_token)
        return Batch(tokens[:-1], tokens[1:], mask)
