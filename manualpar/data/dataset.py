"""Defines datasets: three splits, in which each example has a number.

A `Split` gives random access to examples. Example `i` does not depend on the order in which the
examples are read. So a second run with the same example numbers repeats the first run.

A split of text is a stream of tokens, `BOS doc BOS doc ... BOS doc BOS`. Each BOS ends the previous
document and begins the next document. The last BOS only ends a document. So every token of a
document, and every end of a document, is a label exactly once. Sequence `i` consists of the tokens
from `i * S` to `i * S + S`, both included: all but the last are inputs, and all but the first are
labels. No token is dropped, and no token is a label twice. A model can number the documents of a
sequence as `cumsum(inputs == BOS)`, and needs no other mask to separate the documents. If a
document continues in the next sequence, there is no BOS at the beginning of that sequence.

Symbol: `S` tokens in a sequence.
"""

import dataclasses
import glob
import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import numpy as np

from manualpar.core.state.train_state import Batch
from manualpar.core.summary import Summarized, describe_fields
from manualpar.data.tokenizer import Tokenizer
from manualpar.system.storage import AnyPath, BucketPath, ContentError, Version

SPLITS = ("train", "eval", "test")


class DamagedDataError(ValueError):
    """A data file has changed or has impossible content; the message is one sentence."""


class Split(Protocol):
    """Examples by number, from 0 to `len(split) - 1`."""

    def __len__(self) -> int:
        """Returns the number of examples, at least one."""

    def __getitem__(self, index: int) -> Batch:
        """Returns example `index`: a `Batch` of numpy arrays without the leading dimension."""


class LanguageSplit(Split, Protocol):
    """A split whose examples are sequences of tokens."""

    @property
    def tokens_per_byte(self) -> float | None:
        """The number of labels per byte of text; `None` if the number of bytes is unknown."""

    @property
    def abstract_example(self) -> Batch:
        """The shapes and dtypes of any example, as `jax.ShapeDtypeStruct`s; reads no example."""


@dataclasses.dataclass(frozen=True, repr=False)
class ArraySplit(Summarized):
    """A split whose examples are in memory."""

    inputs: np.ndarray  # `float32[N, D]`.
    labels: np.ndarray  # `int32[N]`.

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return Batch(self.inputs[index], self.labels[index], np.float32(1))


class TokenStream(Protocol):
    """The tokens of a split's documents, one document after the other."""

    def __len__(self) -> int:
        """Returns the number of tokens, including every BOS."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Reads tokens `start` to `stop` of the stream, `int32[stop - start]`."""


@dataclasses.dataclass(frozen=True, repr=False)
class ArrayStream(Summarized):
    """A stream of tokens in an array, which is in memory or a mapped file."""

    tokens: np.ndarray  # `uint[N]`.
    name: str  # The stream's name in messages.
    vocab_size: int

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Reads tokens `start` to `stop`.

        Raises:
          DamagedDataError: A token is not in the vocabulary. Without this error, the model would
            silently use another token.
        """
        tokens = np.array(self.tokens[start:stop], np.int32)
        if (wrong := tokens[(tokens < 0) | (tokens >= self.vocab_size)]).size:
            raise DamagedDataError(
                f"{self.name} has token {wrong[0]} between positions {start} and "
                f"{stop}, expected less than the vocabulary's {self.vocab_size}; make the file "
                "again with `python -m manualpar.data.tokenize`."
            )
        return tokens


@dataclasses.dataclass(frozen=True, repr=False)
class TokenSplit(Summarized):
    """A split that cuts a stream into sequences.

    The last sequence is padded with BOS, and the mask is 0 at the padding.
    """

    stream: TokenStream  # At least two tokens.
    sequence_length: int  # `S`.
    bos_token: int
    num_bytes: int  # The bytes of the documents' text; 0 if unknown.
    num_documents: int
    has_documents: bool = False  # Whether inputs have `tokens` and `documents`, see `PackedSplit`.

    @property
    def num_labels(self) -> int:
        """The number of labels: every token of the stream except the first is a label."""
        return len(self.stream) - 1

    @property
    def tokens_per_byte(self) -> float | None:
        """The labels, including ends of documents, per byte of text; `None` if unknown."""
        return self.num_labels / self.num_bytes if self.num_bytes else None

    @property
    def abstract_example(self) -> Batch:
        """The shapes and dtypes of any sequence, as `jax.ShapeDtypeStruct`s; reads no tokens."""
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


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Dataset(Summarized):
    """Three splits with no example in common: for training, evaluation and the test.

    The splits of a user may be streams of batches, and those for evaluation and the test may be
    missing, see `user_data`.

    The fingerprint depends on the examples and their numbers. If the fingerprints of two processes
    differ, the processes read different batches. The fingerprint in a checkpoint must equal the
    fingerprint of the run that resumes from the checkpoint.
    """

    train: Any
    eval: Any = None
    test: Any = None
    fingerprint: str

    def _summary(self) -> tuple[str, dict[str, str]]:
        splits = {name: f"{len(getattr(self, name)):,} examples" for name in SPLITS}
        return type(self).__name__, describe_fields(self) | splits


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ClassificationDataset(Dataset):
    """A dataset of inputs with their classes; the labels are less than `num_classes`."""

    train: Split
    eval: Split
    test: Split
    num_classes: int


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LanguageDataset(Dataset):
    """A dataset of texts, encoded by `tokenizer`.

    If `split.tokens_per_byte` is known, `loss / ln(2) * split.tokens_per_byte` converts a loss in
    nats per token to bits per byte.
    """

    train: LanguageSplit
    eval: LanguageSplit
    test: LanguageSplit
    tokenizer: Tokenizer


def make_fingerprint(*parts: Any) -> str:
    """Hashes JSON values and arrays; returns 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, np.ndarray):
            part = [part.dtype.str, part.shape, hashlib.blake2b(part.tobytes()).hexdigest()]
        digest.update(json.dumps(part).encode() + b"\n")
    return digest.hexdigest()


# -------------------------------------------------------------------------------------------------
# Finds data files in a bucket, and reads ranges of them.
#
# Nothing from a bucket is copied to a disk unless the config names a cache.


def find_in_bucket(
    path: BucketPath, suffixes: tuple[str, ...]
) -> Iterator[tuple[BucketPath, str, int]]:
    """Yields the path, name and size of each file that a path in a bucket stands for.

    The path is a file, a folder or a glob. A name is relative to the last folder before the first
    `*`, `?` or `[`. In a folder, only files with one of the suffixes are found; if `suffixes` is
    empty, all files. Hidden files are found only if a component of the pattern begins with a dot.
    """
    magic = [number for number, part in enumerate(path.parts) if glob.has_magic(part)]
    if magic:
        root = BucketPath(path.scheme, path.bucket, "/".join(path.parts[: magic[0]]))
        takes_hidden = any(part.startswith(".") for part in path.parts[magic[0] :])
        for found, size in path.glob().items():
            name = str(found.relative_to(root))
            if takes_hidden or not _is_hidden(name):
                yield found, name, size
        return
    if path.key and path.is_file():
        yield path, path.name, path.size()
        return
    for name, size in path.files().items():
        if not _is_hidden(name) and name.endswith(suffixes or ""):
            yield path / name, name, size


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def state_of(path: AnyPath) -> tuple[int, int]:
    """Returns the size of a file, and a number that changes if the content of the file changes."""
    if isinstance(path, BucketPath):
        version = path.version()
        digest = hashlib.blake2b(version.tag.encode(), digest_size=8).digest()
        return version.size, int.from_bytes(digest, "big") >> 1
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


class BucketArray:
    """An array that is stored in an object of a bucket; only requested slices are read."""

    def __init__(self, path: BucketPath, dtype: str) -> None:
        """Opens the object in its current version; all slices are read from this version."""
        self._path, self._dtype, self._version = path, np.dtype(dtype), path.version()
        self._length = self._version.size // self._dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self._length)
        start, stop = start * self._dtype.itemsize, stop * self._dtype.itemsize
        return np.frombuffer(read_range(self._path, start, stop, self._version), self._dtype)


def read_range(path: BucketPath, start: int, stop: int, version: Version | None = None) -> bytes:
    """Reads the bytes `start` to `stop` of an object; `version=None` accepts any version.

    Raises:
      DamagedDataError: The object can no longer be read, has become shorter, or has another
        version.
    """
    try:
        data = path.read_bytes(start, stop, version=version)
    except ContentError as error:
        raise DamagedDataError(
            f"{error}; do not change the files of a corpus during a run."
        ) from None
    except OSError as error:
        raise DamagedDataError(f"{error}; the file could be read when the run began.") from None
    if len(data) != stop - start:
        raise DamagedDataError(
            f"{path} is shorter than when the run began; do not change the files "
            "of a corpus during a run."
        )
    return data
