"""Opens a directory of token files (the source `tokens`), and maps the files into memory.

`python -m manualpar.data.tokenize` makes a directory with these files:

    train.bin  eval.bin  test.bin   each a `TokenStream` as little-endian uint16 or uint32
    tokenizer.json                  the tokenizer, unless tokens are bytes
    tokenizer_config.json           if the tokenizer's directory had one
    train.lengths ...               for chats: the lengths of examples, as little-endian uint32
    tokens.json                     a `TokenFiles`; written last, it marks the directory complete

A process reads only the pages of the files that contain its own sequences.
"""

import dataclasses
import pathlib
import reprlib
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from manualpar.data.dataset import (
    SPLITS,
    ArrayStream,
    BucketArray,
    LanguageDataset,
    TokenSplit,
    make_fingerprint,
    state_of,
)
from manualpar.data.packing import LongExamples, PackedSplit, pack
from manualpar.data.tokenizer import TOKENIZER, load_tokenizer
from manualpar.errors import printable
from manualpar.system.storage import AnyPath, BucketPath, copied_folder, local_path, user_path
from manualpar.system.storage.untrusted import parse_object, read_object

VERSION = 1
DTYPES = ("<u2", "<u4")
LENGTHS, LENGTHS_SUFFIX = "<u4", ".lengths"
DESCRIPTION = "tokens.json"
# The number of tokens at the beginning of a token file that are checked when it is opened.
LOOKED_AT = 2**16
TYPES: Mapping[Any, str] = {int: "an integer", str: "a string"}
# Fields that `tokens.json` may lack, and the most characters of its remarks that are shown.
OPTIONAL: Mapping[str, Any] = {"examples": 0, "parse_special": 0, "remarks": []}
MOST_SHOWN = 2000


class TokenFilesError(ValueError):
    """A directory does not contain complete token files; the message is one sentence."""


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """The description of one token file."""

    tokens: int  # The number of tokens, including every BOS.
    bytes: int  # The bytes of the text that was tokenized; 0 if unknown.
    documents: int
    blake2b: str  # The file's hash, 16 hexadecimal digits.


@dataclasses.dataclass(frozen=True)
class TokenFiles:
    """The description of a directory of token files, as in `tokens.json`."""

    version: int
    dtype: str  # One of `DTYPES`.
    vocab_size: int
    bos_token: int
    tokenizer: str  # The name of the tokenizer's file in the directory; "" for bytes.
    splits: dict[str, TokenFile]
    examples: int = 0  # 1 if documents are examples of chats, so that there is a file of lengths.
    parse_special: int = 0  # 1 if texts of special tokens were read as tokens.
    remarks: list[str] = dataclasses.field(default_factory=list)  # See `Notes.sentences`.


def load_tokens(
    path: str,
    *,
    sequence_length: int,
    cache: str = "",
    long_examples: LongExamples = "error",
    made_from: str = "",
) -> LanguageDataset:
    """Opens a directory of token files; if the documents are examples, packs them.

    The function checks only the lengths of the files and their first tokens. If the directory is in
    a bucket and no `cache` is given, each sequence is read from the bucket when it is requested.

    Args:
      cache: The local folder to which the files of a bucket are copied; "" to copy nothing.
      long_examples: The treatment of examples that are longer than a sequence, see `pack`.
      made_from: What remarks on the documents name; "" for the directory.
    """
    directory = user_path(path)
    if isinstance(directory, BucketPath) and cache:
        read_description(directory, path)  # Refuses a wrong folder before the files are copied.
        directory = copied_folder(directory, local_path(cache, "`cache`"), setting="`cache`")
    files = read_description(directory, path)
    for remark in files.remarks:
        warnings.warn(f"{made_from or path}: {printable(remark[:MOST_SHOWN])}.", stacklevel=3)
    named = str(directory) if files.tokenizer else ""
    tokenizer = load_tokenizer(named, parse_special=bool(files.parse_special))
    if (tokenizer.vocab_size, tokenizer.bos_token) != (files.vocab_size, files.bos_token):
        raise _refuse(
            path,
            f"whose {files.tokenizer or 'byte tokenizer'} has {tokenizer.vocab_size} tokens and "
            f"BOS {tokenizer.bos_token}, expected {files.vocab_size} tokens and BOS "
            f"{files.bos_token} as in {DESCRIPTION}",
        )

    def load(split: str) -> TokenSplit | PackedSplit:
        part, file = files.splits[split], directory / f"{split}.bin"
        expected = part.tokens * np.dtype(files.dtype).itemsize
        if not file.is_file():
            raise _refuse(path, f"which lacks {file.name}")
        if (size := state_of(file)[0]) != expected:
            raise _refuse(
                path,
                f"whose {file.name} has {size} bytes, expected {expected} for the {part.tokens} "
                f"tokens in {DESCRIPTION}",
            )
        try:
            mapped = _array(file, files.dtype)
            of_examples = directory / f"{split}{LENGTHS_SUFFIX}"
            lengths = _lengths(of_examples) if files.examples else None
        except OSError as error:
            raise _refuse(path, f"whose {file.name} cannot be read ({error})") from error
        if lengths is not None:
            if lengths.sum(dtype=np.int64) != part.tokens or lengths.min() < 2:
                raise _refuse(path, f"whose {of_examples.name} does not fit its {file.name}")
            return pack(
                mapped,
                lengths,
                sequence_length=sequence_length,
                vocab_size=files.vocab_size,
                padding=files.bos_token,
                long_examples=long_examples,
                name=f"{path} ({split})",
            )
        stream = ArrayStream(mapped, str(file), files.vocab_size)
        stream.read(0, min(len(stream), LOOKED_AT))  # Raises if a token is not in the vocabulary.
        return TokenSplit(stream, sequence_length, files.bos_token, part.bytes, part.documents)

    described = dataclasses.asdict(files)
    described |= {"examples": long_examples} if described.pop("examples") else {}
    del described["parse_special"], described["remarks"]  # The hashes tell what they changed.
    fingerprint = make_fingerprint("tokens", sequence_length, described)
    splits = {split: load(split) for split in SPLITS}
    return LanguageDataset(tokenizer=tokenizer, fingerprint=fingerprint, **splits)


def _array(file: AnyPath, dtype: str) -> Any:
    if isinstance(file, BucketPath):
        return BucketArray(file, dtype)
    return np.memmap(file, dtype, mode="r")


def lengths_file(tokens: pathlib.Path) -> pathlib.Path:
    """Returns the path of the file with the lengths of the examples in a token file."""
    return tokens.with_suffix(LENGTHS_SUFFIX)


def _lengths(file: AnyPath) -> np.ndarray:
    return np.frombuffer(file.read_bytes(), LENGTHS)


def _refuse(path: str, what: str) -> TokenFilesError:
    made_by = "make it with `python -m manualpar.data.tokenize --input=TEXT --output=DIRECTORY`"
    return TokenFilesError(f"`path` is {path!r}, {what}; {made_by}.")


def read_description(directory: AnyPath, path: str) -> TokenFiles:
    """Reads and checks a directory's `tokens.json`; messages name the directory `path`."""
    file = directory / DESCRIPTION
    if not file.is_file():
        complete = f"complete with its {DESCRIPTION}"
        raise _refuse(path, f"expected a directory of token files, {complete}")
    try:
        if isinstance(file, BucketPath):
            return _parse_description(parse_object(file.read_bytes()))
        return _parse_description(read_object(file, follow_links=True))
    except (OSError, ValueError) as error:
        found = f"cannot be read ({error})" if isinstance(error, OSError) else error
        raise _refuse(path, f"whose {DESCRIPTION} {found}") from error


def _parse_description(fields: Any) -> TokenFiles:
    """Parses `TokenFiles` from JSON; the caller puts the file's name before an error's message."""
    if fields.get("version") != VERSION:
        raise ValueError(f"has the version {fields.get('version')!r}, expected {VERSION}")
    fields = {**OPTIONAL, **fields}
    _check_fields(fields, TokenFiles)
    remarks = fields["remarks"]
    if not isinstance(remarks, list) or not all(isinstance(each, str) for each in remarks):
        raise ValueError(f"has remarks={reprlib.repr(remarks)}, expected a list of strings")
    choices: dict[str, tuple[Any, ...]] = {"dtype": DTYPES, "tokenizer": ("", TOKENIZER)}
    choices |= dict.fromkeys(("examples", "parse_special"), (0, 1))
    for field, allowed in choices.items():
        if fields[field] not in allowed:
            raise ValueError(f"has {field}={fields[field]!r}, expected one of {allowed}")
    splits = _object(fields["splits"], "splits")
    parts = {}
    for split in SPLITS:
        part = _object(splits.get(split), f"splits.{split}")
        _check_fields(part, TokenFile, f"splits.{split}.")
        # The smallest stream has two tokens: a BOS and one token.
        for field, least in (("tokens", 2), ("bytes", 0), ("documents", 1)):
            if (value := part[field]) < least:
                raise ValueError(f"has splits.{split}.{field}={value}, expected at least {least}")
        parts[split] = TokenFile(**part)
    return TokenFiles(**(fields | {"splits": parts}))


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"has {name}={reprlib.repr(value)}, expected an object")
    return value


def _check_fields(
    values: dict[str, Any], kind: type[TokenFile | TokenFiles], prefix: str = ""
) -> None:
    """Refuses an object whose fields do not have the names and types of the fields of `kind`."""
    types: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(kind)}
    for field in sorted(types.keys() ^ values.keys()):
        what = "lacks" if field in types else "has the unknown field"
        raise ValueError(f"{what} {prefix}{field}")
    for field, value in values.items():
        if types[field] in TYPES and type(value) is not types[field]:
            found, expected = reprlib.repr(value), TYPES[types[field]]
            raise ValueError(f"has {prefix}{field}={found}, expected {expected}")
