"""The source `text`: each file is a document. If there are only one or two files, they are cut up.

Only a hash of a file's name determines the file's split and position in the split. So both are the
same in every run, on every file system and in every locale, and stay the same when other files are
added or removed. The order by hash mixes the files well: the first sequences of a split are like a
random sample of the split.

If tokens are bytes, loading reads only the names and sizes of files, and each sequence reads only
the bytes that it needs. With a tokenizer file, loading reads and encodes all files. For more than
some tens of megabytes, make token files once (`manualpar.data.tokenize`) and use the source
`tokens`.
"""

import bisect
import dataclasses
import glob
import hashlib
import itertools
import os
import pathlib
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from manualpar.data.dataset import (
    SPLITS,
    ArrayStream,
    DamagedDataError,
    LanguageDataset,
    TokenSplit,
    TokenStream,
    find_in_bucket,
    make_fingerprint,
    read_range,
)
from manualpar.data.tokenizer import ByteTokenizer, Notes, Tokenizer, frame_document
from manualpar.system.reports.progress_bars import bytes_bar
from manualpar.system.storage import AnyPath, BucketPath, open_for_reading, user_path

# The fraction of the files in eval; test has the same fraction.
HELD_OUT = 0.02
# Directories of installed packages inside the standard library's directory.
INSTALLED = frozenset({"site-packages", "dist-packages"})
# If there are only one or two files, each file is cut into this many pieces, so that eval and test
# are not empty.
PIECES = 50
# The number of documents to encode at once, so that the tokenizer can use several cores.
DOCUMENTS_AT_ONCE = 64


@dataclasses.dataclass(frozen=True)
class TextFile:
    """A document: a file of the corpus, or a piece of a file. Offsets and sizes are in bytes."""

    path: AnyPath
    name: str  # The path relative to the directory of the corpus, with slashes.
    file_size: int
    start: int  # The offset at which the document begins in the file.
    size: int  # The size of the document, at least 1.

    @property
    def name_hash(self) -> float:
        """A hash of the document's name, from 0 to 1."""
        digest = hashlib.blake2b(os.fsencode(self.name), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64

    def read(self, offset: int, size: int) -> bytes:
        """Reads `size` bytes of the document from `offset` on.

        Raises:
          DamagedDataError: The file can no longer be read, or its size has changed.
        """
        if isinstance(self.path, BucketPath):
            return read_range(self.path, self.start + offset, self.start + offset + size)
        try:
            with open(self.path, "rb", buffering=0) as opened:
                now = os.fstat(opened.fileno()).st_size
                opened.seek(self.start + offset)
                data = opened.read(size)
        except OSError as error:
            raise DamagedDataError(
                f"{self.path} could be read when the run began, but not now "
                f"({error.strerror}); restore the file."
            ) from error
        if now != self.file_size or len(data) != size:
            raise DamagedDataError(
                f"{self.path} had {self.file_size} bytes when the run began and "
                f"has {now} now; do not change the files of a corpus during a run."
            )
        return data


def load_text(path: str, *, sequence_length: int, tokenizer: Tokenizer) -> LanguageDataset:
    """Loads the files of `path` as sequences of tokens."""
    parts = split_files(find_files(path), path)
    fingerprint = make_fingerprint(
        "text",
        sequence_length,
        tokenizer.fingerprint,
        {split: [(file.name, file.size) for file in files] for split, files in parts.items()},
    )

    notes = Notes()
    done, total = 0, sum(file.size for files in parts.values() for file in files)

    def encode(split: str) -> np.ndarray:
        nonlocal done
        pieces = []
        for file, tokens in itertools.zip_longest(
            parts[split], encode_files(parts[split], tokenizer, notes)
        ):
            pieces.append(tokens)
            done += file.size if file else 0  # The last piece is the BOS at the end.
            show(done)
        return np.concatenate(pieces)

    def load(split: str) -> TokenSplit:
        files = parts[split]
        stream: TokenStream
        if isinstance(tokenizer, ByteTokenizer):
            stream = ByteStream(files)
        else:
            stream = ArrayStream(encode(split), split, tokenizer.vocab_size)
        num_bytes = sum(file.size for file in files)
        return TokenSplit(stream, sequence_length, tokenizer.bos_token, num_bytes, len(files))

    makes_tokens = not isinstance(tokenizer, ByteTokenizer)
    with bytes_bar("tokenizing", total, is_shown=makes_tokens) as show:
        splits = {split: load(split) for split in SPLITS}
    for sentence in notes.sentences():
        warnings.warn(f"{path}: {sentence}.", stacklevel=3)
    return LanguageDataset(tokenizer=tokenizer, fingerprint=fingerprint, **splits)


def find_files(path: str) -> list[TextFile]:
    """Finds the files of a corpus that are not empty, sorted by the hashes of their names.

    Binary files are not recognised; use a glob to exclude them.

    Args:
      path: A file, a directory, a glob, or "". A directory stands for all files in it and its
        subdirectories, except for names that begin with a dot. In a glob, such as `~/code/**/*.py`,
        `**` stands for any directories. "" stands for the `.py` files of Python's standard library.
    """
    files = files_of_path(path)
    if packed := [file for file in files if file.name.endswith((".gz", ".zst"))]:
        raise ValueError(
            f"`path` is {path!r}, where {packed[0].path} is compressed; expected text files: "
            "decompress it, or use the source 'jsonl', which reads .gz and .zst."
        )
    described = repr(path)
    if not path:
        described = f"'' for Python's standard library in {sysconfig.get_path('stdlib')}"
    if not files:
        raise ValueError(
            f"`path` is {described}, which stands for no file with any text in it; "
            "expected a file, a directory or a glob such as '~/books/**/*.txt'."
        )
    if len(files) < len(SPLITS):
        files = _in_order(piece for file in files for piece in _cut(file))
    return files


def files_of_path(path: str, suffixes: tuple[str, ...] = ()) -> list[TextFile]:
    """Finds the files of a path as `find_files` does, but cuts no file and may return no files.

    Args:
      path: A file, a directory or a glob, on a disk or in a bucket; or "" for Python's standard
        library.
      suffixes: The suffixes of the files to find in a directory; empty for all files.
    """
    place = user_path(path)
    if isinstance(place, BucketPath):
        there = find_in_bucket(place, suffixes)
        return _in_order(TextFile(file, name, size, 0, size) for file, name, size in there if size)
    if not path:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        paths = [file for file in _files_under(root, INSTALLED) if file.suffix == ".py"]
    else:
        expanded = os.path.expanduser(path)
        root = place
        if os.path.isdir(root):
            found = _files_under(root, frozenset())
            paths = [file for file in found if file.name.endswith(suffixes or "")]
        else:
            root = _fixed_part(root)
            # First looks for a file of this name, because a name may contain characters of globs.
            named = [expanded] if os.path.isfile(expanded) else glob.iglob(expanded, recursive=True)
            paths = [pathlib.Path(file) for file in named if os.path.isfile(file)]
    for file in paths:
        if not os.access(file, os.R_OK):
            raise ValueError(
                f"`path` is {path!r}, where {file} cannot be read; give yourself the "
                "permission, or write a glob that leaves it out."
            )
    return _in_order(
        TextFile(file, file.relative_to(root).as_posix(), size, 0, size)
        for file in paths
        if (size := file.stat().st_size)
    )


def _in_order(files: Iterable[TextFile]) -> list[TextFile]:
    return sorted(files, key=lambda file: (file.name_hash, file.name))


def _files_under(root: pathlib.Path, left_out: frozenset[str]) -> Iterator[pathlib.Path]:
    """Yields the files under `root`, except hidden files and files in directories in `left_out`."""
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = {name for name in subdirectories if name[0] != "."} - left_out
        paths = (pathlib.Path(directory, name) for name in names if name[0] != ".")
        yield from (path for path in paths if path.is_file())


def _fixed_part(pattern: pathlib.Path) -> pathlib.Path:
    """Returns the last directory before a pattern's first wildcard, or the file's directory."""
    for parent in reversed(pattern.parents):
        if glob.has_magic(parent.name):
            return parent.parent
    return pattern.parent


def _cut(file: TextFile) -> Iterator[TextFile]:
    """Cuts a file into pieces of about equal size; each piece has complete lines."""
    ends = {file.size}
    with open_for_reading(file.path) as opened:
        for piece in range(1, PIECES):
            opened.seek(file.size * piece // PIECES)
            opened.readline()
            ends.add(opened.tell())
    start = 0
    for end in sorted(ends):
        name = f"{file.name}[{start}:{end}]"
        yield dataclasses.replace(file, name=name, start=start, size=end - start)
        start = end


def split_files(files: Sequence[TextFile], path: str = "") -> dict[str, list[TextFile]]:
    """Divides files, in the order of `find_files`, into train, eval and test.

    The hash of a file's name, from 0 to 1, determines its split. Files with a hash below `HELD_OUT`
    are in eval, and files with a hash from there to `2 * HELD_OUT` are in test. If a split would be
    empty, it gets the next file.
    """
    if len(files) < len(SPLITS):
        raise ValueError(
            f"`path` is {path!r}, which has too few lines to hold some out for eval and "
            "test; expected three files, or one with at least three lines."
        )
    num_eval, num_both = (
        sum(file.name_hash < share for file in files) for share in (HELD_OUT, 2 * HELD_OUT)
    )
    num_eval = min(max(num_eval, 1), len(files) - 2)
    num_both = min(max(num_both, num_eval + 1), len(files) - 1)
    return {
        "train": list(files[num_both:]),
        "eval": list(files[:num_eval]),
        "test": list(files[num_eval:num_both]),
    }


def encode_files(
    files: Sequence[TextFile], tokenizer: Tokenizer, notes: Notes
) -> Iterator[np.ndarray]:
    """Yields the stream of a split in pieces, `int32[N]`, and adds to `notes`.

    The stream consists of BOS, the tokens of each file and the end token unless this is BOS, and a
    last BOS.
    """
    bos = np.array([tokenizer.bos_token], np.int32)
    for start in range(0, len(files), DOCUMENTS_AT_ONCE):
        part = files[start : start + DOCUMENTS_AT_ONCE]
        texts = [file.read(0, file.size) for file in part]
        notes.spelt.update(tokenizer.count_special(texts))
        for file, tokens in zip(part, tokenizer.encode_documents(texts), strict=True):
            try:
                yield frame_document(tokenizer, tokens)
            except ValueError as error:
                raise DamagedDataError(f"{file.path} {error}.") from error
    yield bos


class ByteStream:
    """A stream whose tokens are the bytes of files; reads only the bytes that are requested."""

    def __init__(self, files: Sequence[TextFile]) -> None:
        self._files = files
        # The position of each file's BOS, and of the BOS that ends the stream.
        self._starts = [0, *np.cumsum([1 + file.size for file in files]).tolist()]

    def __len__(self) -> int:
        return self._starts[-1] + 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """Reads tokens `start` to `stop`."""
        tokens = np.full(stop - start, ByteTokenizer.bos_token, np.int32)
        for index in range(bisect.bisect_right(self._starts, start) - 1, len(self._files)):
            text = self._starts[index] + 1
            first, last = max(start, text), min(stop, self._starts[index + 1])
            if first < last:
                data = self._files[index].read(first - text, last - first)
                tokens[first - start : last - start] = np.frombuffer(data, np.uint8)
            if text > stop:
                break
        return tokens
