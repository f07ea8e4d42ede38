"""What there is to learn from: examples by number, in three splits.

A `Split` is random access: example `i` is always the same one, whoever asks and in which order. All
that makes a run repeatable stands on it, since a pipeline only has to say which numbers it wants.
"""

import dataclasses
import hashlib
import json
from typing import Any, Protocol

import numpy as np

from manualpar.data.packing import TokenSplit
from manualpar.data.tokenizer import Tokenizer
from manualpar.train_state import Batch


class Split(Protocol):
    """Examples by number, from 0 to `len(split) - 1`."""

    def __len__(self) -> int:
        """How many examples there are, at least one."""

    def __getitem__(self, index: int) -> Batch:
        """Example `index`: a `Batch` of numpy arrays without the leading dimension."""


@dataclasses.dataclass(frozen=True)
class ArraySplit:
    """Examples in memory.

    Attributes:
      inputs: `float32[N, D]`.
      labels: `int32[N]`.
    """

    inputs: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return Batch(self.inputs[index], self.labels[index], np.float32(1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Three splits that have no example in common.

    Attributes:
      train: What is trained on.
      eval: What is looked at meanwhile.
      test: What is touched once, at the end.
      fingerprint: Says which examples these are and how they are numbered. Two processes, or a run
        and the checkpoint that it resumes, see the same batches only if theirs are equal.
    """

    train: Split
    eval: Split
    test: Split
    fingerprint: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassificationDataset(Dataset):
    """Inputs and the class of each.

    Attributes:
      num_classes: Labels are less than it.
    """

    num_classes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageDataset(Dataset):
    """Text as tokens.

    Bits per byte of a split are `loss / ln 2 * split.tokens_per_byte`, with the loss in nats.

    Attributes:
      train: What is trained on.
      eval: What is looked at meanwhile.
      test: What is touched once, at the end.
      tokenizer: What made the tokens; a model needs its `vocab_size` and `bos_token`.
    """

    train: TokenSplit
    eval: TokenSplit
    test: TokenSplit
    tokenizer: Tokenizer


def make_fingerprint(*parts: Any) -> str:
    """Sixteen hexadecimal digits that differ if any part does; a part is JSON or an array."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, np.ndarray):
            part = [part.dtype.str, part.shape, hashlib.blake2b(part.tobytes()).hexdigest()]
        digest.update(json.dumps(part).encode() + b"\n")
    return digest.hexdigest()
