"""Examples by number, in three splits.

A `Split` is random access: example `i` is always the same one, in whatever order examples are read.
This makes a run repeatable, because a pipeline only has to say which numbers it wants.

A split of text is a stream of tokens, `BOS doc BOS doc ... BOS doc BOS`: the token BOS begins a
document and ends the one before it; the last one only ends a document. So every token of every
document, and every document's end, is a label once. Sequence `i` takes the tokens from `i * S` to
`i * S + S`, both included: all but the last are inputs and all but the first are labels. No token
is dropped, and none is a label twice. The inputs show where documents begin, `cumsum(inputs ==
BOS)`, so a model needs no other mask to keep them apart. A document that continues in the next
sequence has no BOS there.

Symbol: `S` tokens in a sequence.
"""

import dataclasses
import hashlib
import json
from typing import Any, Protocol

import jax
import numpy as np

from manualpar.core.state.train_state import Batch
from manualpar.data.tokenizer import Tokenizer

SPLITS = ("train", "eval", "test")


class DamagedDataError(ValueError):
    """A file of the data has changed, or its content is impossible; one sentence for the user."""


class Split(Protocol):
    """Examples by number, from 0 to `len(split) - 1`."""

    def __len__(self) -> int:
        """Returns the number of examples, at least one."""

    def __getitem__(self, index: int) -> Batch:
        """Returns example `index`: a `Batch` of numpy arrays without the leading dimension."""


class LanguageSplit(Split, Protocol):
    """Sequences of tokens."""

    @property
    def tokens_per_byte(self) -> float | None:
        """Labels for each byte of text; `None` if its bytes are unknown."""

    @property
    def abstract_example(self) -> Batch:
        """The shapes and dtypes of all examples, as `jax.ShapeDtypeStruct`s; none is read."""


@dataclasses.dataclass(frozen=True)
class ArraySplit:
    """Examples in memory."""

    inputs: np.ndarray  # `float32[N, D]`.
    labels: np.ndarray  # `int32[N]`.

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return Batch(self.inputs[index], self.labels[index], np.float32(1))


class TokenStream(Protocol):
    """The documents of a split, end to end."""

    def __len__(self) -> int:
        """Returns the number of tokens, with every BOS."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Reads tokens `start` to `stop`, `int32[stop - start]`; both are within the stream."""


@dataclasses.dataclass(frozen=True)
class ArrayStream:
    """A stream that is an array, in memory or mapped into it."""

    tokens: np.ndarray  # `uint[N]`.
    name: str  # Its name in messages.
    vocab_size: int

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Reads tokens `start` to `stop`.

        Raises:
          DamagedDataError: One is not in the vocabulary; a device would clamp it silently.
        """
        tokens = np.array(self.tokens[start:stop], np.int32)
        if (wrong := tokens[(tokens < 0) | (tokens >= self.vocab_size)]).size:
            raise DamagedDataError(
                f"config.data.path: {self.name} has token {wrong[0]} among those from {start} to "
                f"{stop}, expected less than the vocabulary's {self.vocab_size}; make the file "
                "again with `python -m manualpar.data.tokenize`."
            )
        return tokens


@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """A stream as sequences. BOS fills up the last one, and only there the mask is 0."""

    stream: TokenStream  # Two tokens at least.
    sequence_length: int  # `S`.
    bos_token: int
    num_bytes: int  # Bytes of the documents' text; 0 if unknown.
    num_documents: int
    has_documents: bool = False  # Whether inputs are as in `PackedSplit`.

    @property
    def num_labels(self) -> int:
        """The number of labels: all tokens of the stream but the first."""
        return len(self.stream) - 1

    @property
    def tokens_per_byte(self) -> float | None:
        """Labels for each byte of text, if it is known: ends of documents are labels, no bytes."""
        return self.num_labels / self.num_bytes if self.num_bytes else None

    @property
    def abstract_example(self) -> Batch:
        """The shapes and dtypes of all sequences, as `jax.ShapeDtypeStruct`s; none is read."""
        tokens = jax.ShapeDtypeStruct((self.sequence_length,), np.int32)
        inputs = {"tokens": tokens, "documents": tokens} if self.has_documents else tokens
        return Batch(inputs, tokens, jax.ShapeDtypeStruct((self.sequence_length,), np.float32))

    def __len__(self) -> int:
        return -(-self.num_labels // self.sequence_length)

    def __getitem__(self, index: int) -> Batch:
        """Returns sequence `index`: inputs and labels `int32[S]`, mask `float32[S]`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start = index * self.sequence_length
        tokens = self.stream.read(start, min(start + self.sequence_length + 1, len(self.stream)))
        padding = (0, self.sequence_length + 1 - len(tokens))
        mask = np.pad(np.ones(len(tokens) - 1, np.float32), padding)
        tokens = np.pad(tokens, padding, constant_values=self.bos_token)
        inputs: Any = tokens[:-1]
        if self.has_documents:
            documents = np.cumsum(inputs == self.bos_token, dtype=np.int32)
            inputs = {"tokens": inputs, "documents": documents}
        return Batch(inputs, tokens[1:], mask)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Three splits that have no example in common: for training, evaluations on the way, the test.

    The fingerprint says which examples these are and how they are numbered. Two processes, or a run
    and the checkpoint that it resumes, see the same batches only if theirs are equal.
    """

    train: Split
    eval: Split
    test: Split
    fingerprint: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassificationDataset(Dataset):
    """Inputs and the class of each; labels are less than `num_classes`."""

    num_classes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageDataset(Dataset):
    """Text as tokens, made by `tokenizer`; a model needs its `vocab_size` and `bos_token`.

    Bits per byte of a split are `loss / ln 2 * split.tokens_per_byte`, with the loss in nats;
    they are known if the number of the text's bytes is.
    """

    train: LanguageSplit
    eval: LanguageSplit
    test: LanguageSplit
    tokenizer: Tokenizer


def make_fingerprint(*parts: Any) -> str:
    """Hashes parts (JSON or arrays) to 16 hexadecimal digits, which differ if any part does."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, np.ndarray):
            part = [part.dtype.str, part.shape, hashlib.blake2b(part.tobytes()).hexdigest()]
        digest.update(json.dumps(part).encode() + b"\n")
    return digest.hexdigest()
