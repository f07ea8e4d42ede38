"""Reads files with many documents: JSON lines, Parquet and ArrayRecord.

A document is a text in UTF-8, or a list of tokens that another program has made. It is one field of
a JSON object, one value in a column of a table, or one record.

Files are divided into parts of about `PART_BYTES`. The division depends only on the files.
Processes read parts independently of each other. Only a few documents are in memory at a time: at
most a line, a batch of rows, or a group of records.

Everything in a file is checked. A line that is not JSON, a missing field, a value of another type,
and bytes that are not UTF-8 each raise a `DamagedDataError`. The error names the file, and the
line, row or record, counted from 1.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from manualpar.data.dataset import DamagedDataError, state_of
from manualpar.data.text import files_of_path
from manualpar.errors import require
from manualpar.system.storage import BucketPath, as_path, open_for_reading
from manualpar.system.storage.untrusted import MAX_BYTES, parse_object

# The suffixes of the files that are found in a directory, by source. If the path is a file or a
# glob, files may have any suffix.
SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
    "arrayrecord": (".array_record", ".arrayrecord"),
}
PART_BYTES = 2**24
ROWS_AT_ONCE = 256
# The dtypes that tokens in an ArrayRecord file may have; the argument `field` names one of them.
TOKEN_DTYPES = ("<u2", "<i4", "<u4", "<i8")
Document = bytes | np.ndarray


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
      field: The field or the column with the document; for ArrayRecord see `read_documents`.
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
      source: One of `SUFFIXES`.
    """
    found = files_of_path(path, SUFFIXES[source]) if path else []
    if not found:
        raise ValueError(
            f"`path` is {path!r}, which names no file, or only empty files; expected "
            f"a file, a glob, or a directory with {' or '.join(SUFFIXES[source])} files."
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


def read_documents(part: DocumentRange) -> Iterator[Document]:
    """Yields the documents of a part in order, without empty documents.

    For ArrayRecord, `part.field` is "text", or one of `TOKEN_DTYPES` if records contain tokens.

    Raises:
      DamagedDataError: The file is damaged or has changed, or a document has the wrong type.
    """
    try:
        found = state_of(as_path(part.file.path))
    except (FileNotFoundError, NotADirectoryError):
        found = None
    if found != (part.file.size, part.file.modified):
        raise DamagedDataError(
            f"{part.file.path} has changed since it was found; do not change data files while they "
            "are in use."
        )
    read = {"jsonl": _read_lines, "parquet": _read_rows, "arrayrecord": _read_records}[part.source]
    for document in read(part):
        if len(document):
            yield document


def _line_parts(file: DocumentFile, field: str) -> Iterator[tuple[int, int, int]]:
    del field
    for start in range(0, file.size, PART_BYTES):
        stop = min(start + PART_BYTES, file.size)
        yield start, stop, stop - start


def lines_of(part: DocumentRange) -> Iterator[tuple[int, bytes]]:
    """Yields (position in bytes, line) for each line that begins in a part; skips blank lines."""
    with open_document_file(part.file.path) as file:
        if part.start:
            # If a line goes across `start`, the line belongs to the previous part.
            file.seek(part.start - 1)
            while not (piece := file.readline(MAX_BYTES)).endswith(b"\n") and piece:
                pass
        while (place := file.tell()) < part.stop and (line := file.readline(MAX_BYTES + 1)):
            if line.strip():
                yield place, line


def line_error(part: DocumentRange, place: int, what: object) -> DamagedDataError:
    """Makes the error for the line that begins at byte `place` of the file."""
    with open_document_file(part.file.path) as file:
        number, left = 1, place
        while left and (piece := file.read(min(left, 2**20))):
            number, left = number + piece.count(b"\n"), left - len(piece)
    return DamagedDataError(f"{part.file.path}, line {number}: {what}.")


def _read_lines(part: DocumentRange) -> Iterator[Document]:
    for place, line in lines_of(part):
        try:
            fields = parse_object(line)
            if part.field not in fields:
                there = ", ".join(map(repr, list(fields)[:8])) or "none"
                raise ValueError(f"has no field {part.field!r}, only {there}")
            yield as_document(fields[part.field], f"in {part.field!r}")
        except ValueError as error:
            raise line_error(part, place, error) from error


def as_document(value: Any, where: str) -> Document:
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
        first = size = 0
        for group in range(metadata.num_row_groups):
            size += metadata.row_group(group).total_byte_size
            if size >= PART_BYTES or group == metadata.num_row_groups - 1:
                yield first, group + 1, size
                first, size = group + 1, 0


def _read_rows(part: DocumentRange) -> Iterator[Document]:
    with _parquet(part.file) as table:
        import pyarrow

        groups = range(part.start, part.stop)
        row = sum(table.metadata.row_group(group).num_rows for group in range(part.start))
        batches = table.iter_batches(
            ROWS_AT_ONCE, row_groups=groups, columns=[part.field], use_threads=False
        )
        while True:
            try:
                batch = next(batches, None)
                values = [] if batch is None else batch.column(0).to_pylist()
            except (OSError, ValueError, pyarrow.ArrowException) as error:
                raise DamagedDataError(
                    f"{part.file.path} is damaged after row {row} ({_first_line(error)})."
                ) from error
            if batch is None:
                return
            for value in values:
                row += 1
                try:
                    yield as_document(value, f"in {part.field!r}")
                except ValueError as error:
                    raise DamagedDataError(f"{part.file.path}, row {row}: {error}.") from error


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


def _read_records(part: DocumentRange) -> Iterator[Document]:
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
                try:
                    yield _record_document(record, part.field)
                except ValueError as error:
                    raise DamagedDataError(
                        f"{part.file.path}, record {number}: {error}."
                    ) from error
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
