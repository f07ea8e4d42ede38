"""Reads files with many documents: JSON lines, JSON arrays, Parquet and ArrayRecord.

Files of JSON may be compressed with gzip or zstd, and may begin with a byte order mark. A document
is a text in UTF-8, or a list of tokens that another program has made. It is one field of a JSON
object, one value in a column of a table, or one record.

Files are divided into parts of about `PART_BYTES`. The division depends only on the files.
Processes read parts independently of each other. Only a few documents are in memory at a time: at
most a line, a batch of rows, or a group of records.

Everything in a file is checked. A line that is not JSON, a missing field, a value of another type,
and bytes that are not UTF-8 each raise a `DamagedDataError`, or are skipped on request, see `Rows`.
The error names the file, and the line, row or record, counted from 1. What is decompressed is
bounded by the size of the file, because a small file may stand for terabytes.
"""

import contextlib
import dataclasses
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar, get_args

import numpy as np

from manualpar.data.dataset import DamagedDataError, state_of
from manualpar.data.text import files_of_path
from manualpar.data.tokenizer import FEW, Notes
from manualpar.errors import require
from manualpar.system.storage import BucketPath, as_path, open_for_reading
from manualpar.system.storage.untrusted import MAX_BYTES, MAX_DEPTH, parse_object

# The suffixes of the files that are found in a directory, by source. If the path is a file or a
# glob, files may have any suffix.
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
SUFFIXES = {
    "jsonl": tuple(name + also for also in ("", ".gz", ".zst") for name in JSON_SUFFIXES),
    "parquet": (".parquet",),
    "arrayrecord": (".array_record", ".arrayrecord"),
}
# How compressed files, byte order marks and Parquet files begin.
GZIP, ZSTD, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
BOM, UTF_16 = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
# A byte of a compressed file may stand for this many bytes. Gzip reaches 1032, for equal bytes.
MOST_TIMES = 1100
BadRows = Literal["error", "skip"]
BAD_ROWS: tuple[BadRows, ...] = get_args(BadRows)
# If the first rows are all bad, the file or a setting is wrong.
ALL_BAD = 1000
PART_BYTES = 2**24
ROWS_AT_ONCE = 256
PIECE_BYTES = 2**16  # The bytes of JSON that are read at once.
# The dtypes that tokens in an ArrayRecord file may have; the argument `field` names one of them.
TOKEN_DTYPES = ("<u2", "<i4", "<u4", "<i8")
Document = bytes | np.ndarray
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class DocumentFile:
    """A file of documents, with its size and modification time when it was found.

    Attributes:
      path: The path of the file.
      name: The path relative to the directory of all files, with slashes.
      size: The number of bytes.
      modified: The modification time in nanoseconds; in a bucket, a hash of the version.
    """

    path: str
    name: str
    size: int
    modified: int


@dataclasses.dataclass(frozen=True)
class DocumentRange:
    """Consecutive documents of a file.

    Attributes:
      source: One of `SUFFIXES`.
      file: The file.
      field: The field or the column with the document; for ArrayRecord see `Rows.documents`.
      start: The number of the first byte, row group or record.
      stop: The number after the last byte, row group or record. A line belongs to the range in
        which it begins.
      size: The estimated number of bytes.
    """

    source: str
    file: DocumentFile
    field: str
    start: int
    stop: int
    size: int


def find_document_files(path: str, source: str) -> list[DocumentFile]:
    """Finds files that are not empty, in the order of the hashes of their names.

    Args:
      path: A file, a directory or a glob. A directory stands for all files in it and its
        subdirectories that have one of the source's `SUFFIXES` and are not hidden.
      source: One of `SUFFIXES`, or "chat" for those of `jsonl` and `parquet`.
    """
    suffixes = SUFFIXES.get(source) or SUFFIXES["jsonl"] + SUFFIXES["parquet"]
    found = files_of_path(path, suffixes) if path else []
    if not found:
        raise ValueError(
            f"`path` is {path!r}, which names no file, or only empty files; expected "
            f"a file, a glob, or a directory with {' or '.join(suffixes)} files."
        )
    if source == "arrayrecord" and isinstance(found[0].path, BucketPath):
        raise ValueError(
            f"`path` is {path!r}, expected a path on a disk, because ArrayRecord files "
            "cannot be read from a bucket; copy them to a disk, or make token files of them."
        )
    return [DocumentFile(str(file.path), file.name, *state_of(file.path)) for file in found]


def open_document_file(path: str) -> BinaryIO:
    """Opens a file of documents, for reading its bytes.

    Raises:
      DamagedDataError: The file cannot be opened.
    """
    try:
        return open_for_reading(as_path(path))
    except OSError as error:
        raise DamagedDataError(
            f"{path} cannot be read ({error.strerror or error}); restore the file."
        ) from error


def divide(source: str, files: Sequence[DocumentFile], field: str) -> list[DocumentRange]:
    """Divides all files into parts, in order.

    Raises:
      DamagedDataError: A file does not have the format of `source`, or lacks the column `field`.
    """
    if source == "chat":
        of_files = ("parquet" if _begins_with(file, PARQUET) else "jsonl" for file in files)
        return [
            DocumentRange(kind, file, "", start, stop, size)
            for kind, file in zip(of_files, files, strict=True)
            for start, stop, size in (_row_parts if kind == "parquet" else _line_parts)(file, "")
        ]
    if not field:
        raise ValueError("`field` is '', expected the name of the field with the text.")
    if source == "arrayrecord" and field != "text" and field not in TOKEN_DTYPES:
        raise ValueError(
            f"`field` is {field!r}, expected 'text' if the records are UTF-8 text, "
            f"or the dtype of the tokens if they are tokens, one of {TOKEN_DTYPES}."
        )
    of_file = {"jsonl": _line_parts, "parquet": _row_parts, "arrayrecord": _record_parts}[source]
    return [
        DocumentRange(source, file, field, start, stop, size)
        for file in files
        for start, stop, size in of_file(file, field)
    ]


class Rows:
    """Reads the rows of a part; errors of single rows are raised, or skipped and counted.

    Attributes:
      notes: The rows that were skipped.
    """

    def __init__(self, part: DocumentRange, bad_rows: BadRows, notes: Notes | None = None) -> None:
        """Prepares to read a part; `bad_rows` is "error" or "skip"."""
        self._part, self._skips = part, bad_rows == "skip"
        self.notes = notes or Notes()
        self._good = 0

    def refuse(self, place: int, error: Exception) -> None:
        """Counts the row at a place as skipped, or raises its error with the place."""
        if not self._skips:
            raise row_error(self._part, place, error) from error
        self.notes.skipped += 1
        if len(self.notes.first) < FEW:
            self.notes.first.append(str(row_error(self._part, place, error)))
        if self.notes.skipped >= ALL_BAD and not self._good:
            raise DamagedDataError(
                f"the first {ALL_BAD} rows are all bad ({self.notes.first[0].rstrip('.')})."
            )

    def accept(self) -> None:
        """Counts a row as good."""
        self._good += 1

    def documents(self) -> Iterator[tuple[int, Document]]:
        """Yields (place, document) for each document that is not empty, in order.

        For ArrayRecord, `part.field` is "text", or one of `TOKEN_DTYPES` if records contain tokens.

        Raises:
          DamagedDataError: The file is damaged or has changed, or a document has the wrong type.
        """
        part = self._part
        _check_unchanged(part)
        read = {"jsonl": _read_lines, "parquet": _read_column, "arrayrecord": _read_records}
        for place, document in read[part.source](part):
            if isinstance(document, ValueError):
                self.refuse(place, document)
            elif len(document):
                yield place, document

    def objects(self) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
        """Yields (place, row) for each row of JSON, which is not parsed yet, or of Parquet."""
        _check_unchanged(self._part)
        if self._part.source == "parquet":
            for place, fields in _read_table(self._part, None):
                yield place, _without_none(fields)
        else:
            yield from lines_of(self._part)


def _check_unchanged(part: DocumentRange) -> None:
    try:
        found = state_of(as_path(part.file.path))
    except (FileNotFoundError, NotADirectoryError):
        found = None
    if found != (part.file.size, part.file.modified):
        raise DamagedDataError(
            f"{part.file.path} has changed since it was found; do not change data files while they "
            "are in use."
        )


def _begins_with(file: DocumentFile, magic: bytes) -> bool:
    with open_document_file(file.path) as opened:
        return opened.read(len(magic)) == magic


class _Decompressed(io.RawIOBase):
    """A stream of decompressed bytes, which ends with an error if they are too many."""

    def __init__(self, stream: Any, path: str, most: int) -> None:
        self._stream, self._path, self._left = stream, path, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise DamagedDataError(
                f"{self._path} is damaged or cut off ({_first_line(error)})."
            ) from error
        self._left -= len(data)
        if self._left < 0:
            raise DamagedDataError(
                f"{self._path} has more than {MOST_TIMES} times as many bytes when it is "
                "decompressed, which no text has; expected a smaller file, or decompress it."
            )
        buffer[: len(data)] = data
        return len(data)


class _Json(NamedTuple):
    """An open file of JSON.

    Attributes:
      file: The decompressed bytes.
      start: The bytes of the byte order mark.
      is_array: Whether the file is an array of objects; otherwise each line is an object.
      is_whole: Whether the file can only be read from its beginning to its end.
    """

    file: BinaryIO
    start: int
    is_array: bool
    is_whole: bool


@contextlib.contextmanager
def _open_json(path: str) -> Iterator[_Json]:
    """Opens a file of JSON, decompressed.

    In the context's value, the bytes of a byte order mark have been read.
    """
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(open_document_file(path))
        begin = file.peek(4)[:4]
        if begin.startswith(UTF_16):
            raise DamagedDataError(
                f"{path} is UTF-16, expected UTF-8; convert it: iconv -f UTF-16 -t UTF-8."
            )
        is_compressed = begin.startswith((GZIP, ZSTD))
        if is_compressed:
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            if begin.startswith(GZIP):
                stream: Any = stack.enter_context(gzip.GzipFile(fileobj=file))
            else:
                require(f"{path}, a file of zstd,", "pyarrow")
                import pyarrow

                stream = stack.enter_context(pyarrow.CompressedInputStream(file, "zstd"))
            raw = _Decompressed(stream, path, MOST_TIMES * size + MAX_BYTES)
            file = stack.enter_context(io.BufferedReader(raw, PIECE_BYTES))
        start = len(BOM) if file.peek(len(BOM)).startswith(BOM) else 0
        file.read(start)
        is_array = file.peek(1).lstrip().startswith(b"[")
        yield _Json(file, start, is_array, is_compressed or is_array)


def _line_parts(file: DocumentFile, field: str) -> Iterator[tuple[int, int, int]]:
    del field
    with _open_json(file.path) as opened:
        is_whole = opened.is_whole
    if is_whole:
        yield 0, file.size, file.size
        return
    for start in range(0, file.size, PART_BYTES):
        stop = min(start + PART_BYTES, file.size)
        yield start, stop, stop - start


def lines_of(part: DocumentRange) -> Iterator[tuple[int, bytes]]:
    """Yields (position in bytes, line) for each line that begins in a part; skips blank lines."""
    with _open_json(part.file.path) as (file, start, is_array, is_whole):
        if is_array:
            yield from _items(file, start, part.file.path)
            return
        place = start
        if part.start:
            # If a line goes across `start`, the line belongs to the previous part.
            file.seek(part.start - 1)
            while not (piece := file.readline(MAX_BYTES)).endswith(b"\n") and piece:
                pass
            place = file.tell()
        while (is_whole or place < part.stop) and (line := file.readline(MAX_BYTES + 1)):
            if line.strip():
                yield place, line
            place += len(line)


# What ends a string, and what changes the depth or ends an item outside of strings.
_IN_STRING, _OUTSIDE = re.compile(rb'["\\]'), re.compile(rb'["\[\]{},]')


def _items(file: BinaryIO, place: int, path: str) -> Iterator[tuple[int, bytes]]:
    """Yields (position in bytes, text) for each item of a JSON array, without parsing the items."""
    depth, is_string, is_done = 0, False, False
    escaped = -1  # The position of a character after a backslash.
    item, begin = bytearray(), place
    while chunk := file.read(PIECE_BYTES):
        at = kept = 0
        while found := (_IN_STRING if is_string else _OUTSIDE).search(chunk, at):
            at, sign = found.end(), found[0]
            if place + at - 1 == escaped:
                continue
            if is_string:
                escaped = place + at if sign == b"\\" else escaped
                is_string = sign != b'"'
                continue
            is_string = sign == b'"'
            depth += (sign in (b"[", b"{")) - (sign in (b"]", b"}"))
            is_done = is_done or not depth
            if sign == b"[" and depth == 1:
                kept, begin = at, place + at
            elif (sign == b"," and depth == 1) or (is_done and depth == 0 and sign == b"]"):
                item += chunk[kept : at - 1]
                if item.strip() or sign == b",":
                    yield begin + len(item) - len(item.lstrip()), bytes(item)
                item, kept, begin = bytearray(), at, place + at
            if is_done:
                break
        item += chunk[kept:]
        if len(item) > MAX_BYTES:
            raise DamagedDataError(f"{path} has an item of more than {MAX_BYTES:,} bytes.")
        place += len(chunk)
        if is_done:
            break
    if not is_done or item.strip() or file.read(PIECE_BYTES).strip():
        what = "has text after its array" if is_done else "is cut off before the end of its array"
        raise DamagedDataError(f"{path} {what}, expected a JSON array of objects.")


def row_error(part: DocumentRange, place: int, what: object) -> DamagedDataError:
    """Makes the error of a row, whose place is that of `Rows`."""
    if part.source != "jsonl":
        kind = "row" if part.source == "parquet" else "record"
        return DamagedDataError(f"{part.file.path}, {kind} {place}: {what}.")
    with _open_json(part.file.path) as (file, start, _, _):
        number, left = 1, place - start
        while left > 0 and (piece := file.read(min(left, 2**20))):
            number, left = number + piece.count(b"\n"), left - len(piece)
    return DamagedDataError(f"{part.file.path}, line {number}: {what}.")


def attempt(action: Callable[..., T], *arguments: Any, **options: Any) -> T | ValueError:
    """Returns what `action` returns, or the error that it raises."""
    try:
        return action(*arguments, **options)
    except ValueError as error:
        return error


# A document with its place, or the error of a row.
_Placed = Iterator[tuple[int, Document | ValueError]]


def _read_lines(part: DocumentRange) -> _Placed:
    for place, line in lines_of(part):
        fields = attempt(parse_object, line)
        if isinstance(fields, ValueError):
            yield place, fields
        elif part.field not in fields:
            there = ", ".join(map(repr, list(fields)[:8])) or "none"
            yield place, ValueError(f"has no field {part.field!r}, only {there}")
        else:
            yield place, attempt(_as_document, fields[part.field], f"in {part.field!r}")


def _as_document(value: Any, where: str) -> Document:
    """Converts a value to a document."""
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"has half of a surrogate pair {where} at character {error.start}, which is no text"
            ) from None
    # Compares types, because True and 1.0 are no tokens.
    if isinstance(value, list) and all(type(token) is int for token in value):
        if value and not (min(value) >= 0 and max(value) < 2**31):
            raise ValueError(f"has a token {where} below 0, or above 2**31 - 1")
        return np.array(value, np.int64)
    kind = "a list that is not all integers" if isinstance(value, list) else type(value).__name__
    kind = {"NoneType": "null"}.get(kind, kind)
    raise ValueError(f"has {kind} {where}, expected a text or a list of tokens")


@contextlib.contextmanager
def _parquet(file: DocumentFile) -> Iterator[Any]:
    require("`source='parquet'`", "pyarrow")
    import pyarrow
    import pyarrow.parquet

    with open_document_file(file.path) as opened:
        try:
            table = pyarrow.parquet.ParquetFile(opened)
        except (OSError, pyarrow.ArrowException) as error:
            raise DamagedDataError(
                f"{file.path} is no Parquet file ({_first_line(error)})."
            ) from error
        yield table


def _row_parts(file: DocumentFile, field: str) -> Iterator[tuple[int, int, int]]:
    with _parquet(file) as table:
        import pyarrow

        schema, metadata = table.schema_arrow, table.metadata
        if not field:
            yield from _groups(metadata)
            return
        if schema.names.count(field) != 1:
            there = ", ".join(map(repr, schema.names[:8]))
            raise DamagedDataError(
                f"{file.path} has {schema.names.count(field)} columns {field!r}, expected one; it "
                f"has {there}. Name the column with the text in `field`."
            )
        kind = schema.field(field).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        types = pyarrow.types
        is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
        is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        if not is_text and not (is_list and types.is_integer(kind.value_type)):
            raise DamagedDataError(
                f"{file.path} has the type {kind} in its column {field!r}, expected texts or lists "
                "of tokens."
            )
        yield from _groups(metadata)


def _groups(metadata: Any) -> Iterator[tuple[int, int, int]]:
    """Divides the groups of rows of a Parquet file into parts."""
    first = size = 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        if size >= PART_BYTES or group == metadata.num_row_groups - 1:
            yield first, group + 1, size
            first, size = group + 1, 0


def _read_column(part: DocumentRange) -> _Placed:
    for row, value in _read_table(part, part.field):
        yield row, attempt(_as_document, value, f"in {part.field!r}")


def _read_table(part: DocumentRange, column: str | None) -> Iterator[tuple[int, Any]]:
    """Yields (number of the row, value), or with `column=None` a dict of all columns."""
    with _parquet(part.file) as table:
        import pyarrow

        groups = range(part.start, part.stop)
        row = sum(table.metadata.row_group(group).num_rows for group in range(part.start))
        batches = table.iter_batches(
            ROWS_AT_ONCE,
            row_groups=groups,
            columns=None if column is None else [column],
            use_threads=False,
        )
        while True:
            try:
                batch = next(batches, None)
                values = [] if batch is None else _values(batch, column)
            except (OSError, ValueError, pyarrow.ArrowException) as error:
                raise DamagedDataError(
                    f"{part.file.path} is damaged after row {row} ({_first_line(error)})."
                ) from error
            if batch is None:
                return
            for value in values:
                row += 1
                yield row, value


def _values(batch: Any, column: str | None) -> list[Any]:
    values: list[Any] = batch.to_pylist() if column is None else batch.column(0).to_pylist()
    return values


def _without_none(value: Any, depth: int = 0) -> Any:
    """Removes fields without a value, because all structs of a column have the same fields."""
    if depth > MAX_DEPTH:
        raise DamagedDataError(f"a column of a Parquet file is nested deeper than {MAX_DEPTH}.")
    if isinstance(value, dict):
        kept = {name: inner for name, inner in value.items() if inner is not None}
        return {name: _without_none(inner, depth + 1) for name, inner in kept.items()}
    return [_without_none(x, depth + 1) for x in value] if isinstance(value, list) else value


def _records(file: DocumentFile) -> Any:
    require("`source='arrayrecord'`", "array_record")
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(file.path)
    if not reader.ok() or not reader.num_records():
        raise DamagedDataError(f"{file.path} is no ArrayRecord file, or has no record.")
    return reader


def _record_parts(file: DocumentFile, field: str) -> Iterator[tuple[int, int, int]]:
    del field
    reader = _records(file)
    count = reader.num_records()
    reader.close()
    parts = min(count, -(-file.size // PART_BYTES))
    for index in range(parts):
        start, stop = count * index // parts, count * (index + 1) // parts
        yield start, stop, file.size * stop // count - file.size * start // count


def _read_records(part: DocumentRange) -> _Placed:
    reader = _records(part.file)
    try:
        for start in range(part.start, part.stop, ROWS_AT_ONCE):
            stop = min(start + ROWS_AT_ONCE, part.stop)
            try:
                records = reader.read(start, stop)
            except Exception as error:  # The library does not export its exception classes.
                raise DamagedDataError(
                    f"{part.file.path} is damaged after record {start} ({_first_line(error)})."
                ) from error
            if len(records) != stop - start:
                raise DamagedDataError(f"{part.file.path} is damaged after record {start}.")
            for number, record in enumerate(records, start + 1):
                yield number, attempt(_record_document, record, part.field)
    finally:
        reader.close()


def _record_document(record: bytes, field: str) -> Document:
    if field == "text":
        try:
            record.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"is not UTF-8 (byte {error.start})") from None
        return record
    if len(record) % np.dtype(field).itemsize:
        raise ValueError(f"has {len(record)} bytes, expected tokens of type {field}")
    tokens = np.frombuffer(record, field).astype(np.int64)
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() < 2**31):
        raise ValueError("has a token below 0, or above 2**31 - 1")
    return tokens


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
