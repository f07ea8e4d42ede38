"""Encodes the documents of a part, and writes their tokens for a directory of token files.

A part has a file of tokens for each split, `BOS doc BOS doc ... BOS doc`. A document ends with the
tokenizer's end token, unless this is BOS. When these files are on the disk, a small file with the
numbers of tokens, bytes and documents is written. Without the small file, the part is not finished.

If files have many documents, a hash of a document's content determines its split. So equal
documents are in the same split, even if they are in different files. For the source `text`, a hash
of the file's name determines the split, see `manualpar.data.text`.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from manualpar.data.dataset import SPLITS, DamagedDataError
from manualpar.data.document_files import BadRows, Document, DocumentRange, Rows
from manualpar.data.text import TextFile
from manualpar.data.tokenizer import Notes, Tokenizer, frame_document
from manualpar.data.tokens import DTYPES, LENGTHS, lengths_file
from manualpar.system.storage.durable_files import put_file
from manualpar.system.storage.untrusted import create_file

Label = TypeVar("Label")
Content = TypeVar("Content", bound=Sized)

# The most documents, and about the most bytes, in one call of a tokenizer.
DOCUMENTS_AT_ONCE, BYTES_AT_ONCE = 64, 2**23


@dataclasses.dataclass(frozen=True)
class TextPart:
    """A part for the source `text`: some files of the same split."""

    split: str
    files: tuple[TextFile, ...]

    @property
    def size(self) -> int:
        """The sum of the files' sizes in bytes."""
        return sum(file.size for file in self.files)


class TokenProgress(NamedTuple):
    """The amount of work done so far."""

    bytes: int  # The bytes of the input; in the end the sum of the parts' sizes.
    documents: int
    tokens: int


def finished_file(parts: pathlib.Path, number: int) -> pathlib.Path:
    """Returns the path of the file that marks a part as finished."""
    return parts / f"{number:06d}.json"


def tokens_file(parts: pathlib.Path, number: int, split: str) -> pathlib.Path:
    """Returns the path of the file with a part's tokens for a split."""
    return parts / f"{number:06d}-{split}.bin"


def write_part(
    part: DocumentRange | TextPart,
    number: int,
    parts: pathlib.Path,
    encoder: "Encoder",
    count: Callable[[TokenProgress], None],
) -> None:
    """Writes a part's tokens to a file for each split, and then marks the part as finished.

    Args:
      encoder: Makes the tokens.
      count: Called regularly with the work done since the last call.

    Raises:
      DamagedDataError: A file is damaged.
      OSError: The folder cannot be written to.
    """
    counts: dict[str, Any] = {
        split: {"tokens": 0, "bytes": 0, "unknown": 0, "documents": 0} for split in SPLITS
    }
    encoder.notes = Notes()
    with contextlib.ExitStack() as stack:
        files = {
            split: stack.enter_context(create_file(tokens_file(parts, number, split)))
            for split in SPLITS
        }
        lengths = {
            split: stack.enter_context(create_file(lengths_file(tokens_file(parts, number, split))))
            for split in SPLITS
            if encoder.makes_examples
        }
        for batch in encoder.encode(part):
            for split, tokens, num_bytes in batch:
                if encoder.makes_examples:
                    lengths[split].write(np.array([len(tokens)], LENGTHS).tobytes())
                files[split].write(tokens.astype(encoder.dtype).tobytes())
                of_split = counts[split]
                of_split["tokens"] += len(tokens)
                of_split["documents"] += 1
                of_split["bytes"] += num_bytes or 0
                of_split["unknown"] += num_bytes is None
            # Documents that consist of tokens count as two bytes per token.
            done = sum(len(tokens) * 2 if size is None else size for _, tokens, size in batch)
            count(TokenProgress(done, len(batch), sum(len(tokens) for _, tokens, _ in batch)))
        for file in (*files.values(), *lengths.values()):
            file.flush()
            os.fsync(file.fileno())
    write_whole(finished_file(parts, number), counts | {"notes": encoder.notes.as_json()})


# A document's split, the tokens to write, and the number of bytes of its text (`None` if unknown).
Encoded = tuple[str, np.ndarray, int | None]


class Encoder(Protocol):
    """An object that makes the tokens of documents."""

    dtype: str  # The dtype of the files of tokens, one of `DTYPES`.
    makes_examples: bool  # Whether documents are examples to pack, see `manualpar.data.packing`.
    notes: Notes  # On all documents since it was set.

    def encode(self, part: DocumentRange | TextPart) -> Iterator[list[Encoded]]:
        """Encodes the documents of a part in order, and yields lists of several documents."""


class DocumentEncoder:
    """Encodes documents that are texts or tokens; puts BOS before and the end token after them."""

    makes_examples = False

    def __init__(self, tokenizer: Tokenizer, held_out: float, bad_rows: BadRows = "error") -> None:
        """Makes an encoder; `held_out` is the fraction of documents in eval, and also in test."""
        self._tokenizer, self._held_out, self._bad_rows = tokenizer, held_out, bad_rows
        self.notes = Notes()
        self.dtype = DTYPES[0] if tokenizer.vocab_size <= 2**16 else DTYPES[1]

    def encode(self, part: DocumentRange | TextPart) -> Iterator[list[Encoded]]:
        """Implements `Encoder`."""
        rows = None if isinstance(part, TextPart) else Rows(part, self._bad_rows, self.notes)
        for batch in batches(self._documents(part, rows)):
            texts = [document for _, document in batch if isinstance(document, bytes)]
            self.notes.spelt.update(self._tokenizer.count_special(texts))
            encoded = iter(self._tokenizer.encode_documents(texts))
            made: list[Encoded] = []
            for (split, where), document in batch:
                is_text = isinstance(document, bytes)
                tokens = next(encoded) if is_text else np.asarray(document)
                try:
                    framed = self._framed(tokens)
                except ValueError as error:
                    if rows is None:
                        raise DamagedDataError(f"{where} {error}.") from error
                    rows.refuse(int(where), error)
                    continue
                if rows:
                    rows.accept()
                made.append((split, framed, len(document) if is_text else None))
            yield made

    def _documents(
        self, part: DocumentRange | TextPart, rows: Rows | None
    ) -> Iterator[tuple[tuple[str, Any], Document]]:
        if isinstance(part, TextPart):
            for file in part.files:
                yield (part.split, file.path), file.read(0, file.size)
        for place, document in rows.documents() if rows else ():
            content = document if isinstance(document, bytes) else document.tobytes()
            yield (split_of_content(content, self._held_out), place), document

    def _framed(self, tokens: np.ndarray) -> np.ndarray:
        if len(tokens) and (largest := tokens.max()) >= self._tokenizer.vocab_size:
            raise ValueError(
                f"has the token {largest}, expected tokens below {self._tokenizer.vocab_size}, the "
                "vocabulary size of `tokenizer`"
            )
        return frame_document(self._tokenizer, tokens)


def split_of_content(content: bytes, held_out: float) -> str:
    """Chooses the split of a document by a hash of its content."""
    place = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64
    return "eval" if place < held_out else "test" if place < 2 * held_out else "train"


def batches(documents: Iterable[tuple[Label, Content]]) -> Iterator[list[tuple[Label, Content]]]:
    """Collects pairs (label, document) in lists, each for one call of a tokenizer."""
    collected: list[tuple[Label, Content]] = []
    size = 0
    for label, document in documents:
        collected.append((label, document))
        size += len(document)
        if len(collected) == DOCUMENTS_AT_ONCE or size >= BYTES_AT_ONCE:
            yield collected
            collected, size = [], 0
    if collected:
        yield collected


def write_whole(path: pathlib.Path, content: Any) -> None:
    """Writes a JSON file in one atomic step, and waits until the file is on the disk."""
    put_file(path, (json.dumps(content, indent=2) + "\n").encode())
