"""The source `tokens`: files of tokens, mapped into memory.

`python -m manualpar.data.tokenize` makes a directory with

    train.bin  eval.bin  test.bin   each a `TokenStream` as little-endian uint16 or uint32
    tokenizer.json                  the tokenizer, unless tokens are bytes
    tokens.json                     a `TokenFiles`, written last: without it nothing is complete

A process touches only the pages of the files that its sequences lie in.
"""

import dataclasses
import os
import pathlib
import reprlib
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np

from manualpar.data.dataset import (
    SPLITS,
    ArrayStream,
    LanguageDataset,
    TokenSplit,
    make_fingerprint,
)
from manualpar.data.tokenizer import load_tokenizer
from manualpar.untrusted import read_object

VERSION = 1
DTYPES = ("<u2", "<u4")
DESCRIPTION = "tokens.json"
TOKENIZER = "tokenizer.json"
LOOKED_AT = 2**16
MADE_BY = "make it with `python -m manualpar.data.tokenize --input=TEXT --output=DIRECTORY`"
TYPES: Mapping[Any, str] = {int: "an integer", str: "a string", dict: "an object"}


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """The content of one file.

    Attributes:
      tokens: The number of tokens, with every BOS.
      bytes: The bytes of text that they were made of.
      documents: The number of documents.
      blake2b: The file's hash, 16 hexadecimal digits.
    """

    tokens: int
    bytes: int
    documents: int
    blake2b: str


@dataclasses.dataclass(frozen=True)
class TokenFiles:
    """The content of a directory of token files.

    Attributes:
      version: `VERSION`.
      dtype: One of `DTYPES`.
      vocab_size: The number that every token is less than.
      bos_token: The token that begins a document.
      tokenizer: The tokenizer's file in the directory, or "" for bytes.
      splits: The files by split.
    """

    version: int
    dtype: str
    vocab_size: int
    bos_token: int
    tokenizer: str
    splits: dict[str, TokenFile]


def load_tokens(path: str, *, sequence_length: int) -> LanguageDataset:
    """Opens a directory of token files.

    Of the files, only the lengths and the first tokens are checked.

    Raises:
      ValueError: A file is missing, or does not fit the description.
    """
    directory = pathlib.Path(os.path.expanduser(path))
    files = _read_description(directory, path)
    tokenizer = load_tokenizer(str(directory / files.tokenizer) if files.tokenizer else "")
    if (tokenizer.vocab_size, tokenizer.bos_token) != (files.vocab_size, files.bos_token):
        raise ValueError(
            f"config.data.path is {path!r}, whose {files.tokenizer or 'byte tokenizer'} has "
            f"{tokenizer.vocab_size} tokens and BOS {tokenizer.bos_token}, expected the "
            f"{files.vocab_size} and {files.bos_token} of its {DESCRIPTION}; {MADE_BY}."
        )

    def load(split: str) -> TokenSplit:
        part, file = files.splits[split], directory / f"{split}.bin"
        expected = part.tokens * np.dtype(files.dtype).itemsize
        if not os.path.isfile(file):
            raise ValueError(f"config.data.path is {path!r}, which lacks {file.name}; {MADE_BY}.")
        if (size := file.stat().st_size) != expected:
            raise ValueError(
                f"config.data.path is {path!r}, whose {file.name} has {size} bytes, expected "
                f"{expected} for the {part.tokens} tokens in {DESCRIPTION}; {MADE_BY}."
            )
        try:
            stream = ArrayStream(np.memmap(file, files.dtype, "r"), str(file), files.vocab_size)
        except OSError as error:
            raise ValueError(
                f"config.data.path is {path!r}, whose {file.name} cannot be read ({error})."
            ) from error
        stream.read(0, min(len(stream), LOOKED_AT))  # Files of another tokenizer show at once.
        return TokenSplit(stream, sequence_length, files.bos_token, part.bytes, part.documents)

    fingerprint = make_fingerprint("tokens", sequence_length, dataclasses.asdict(files))
    splits = {split: load(split) for split in SPLITS}
    return LanguageDataset(tokenizer=tokenizer, fingerprint=fingerprint, **splits)


def _read_description(directory: pathlib.Path, path: str) -> TokenFiles:
    """Reads and checks `tokens.json`."""
    file = directory / DESCRIPTION
    if not os.path.isfile(file):
        raise ValueError(
            f"config.data.path is {path!r}, expected a directory of token files, complete with its "
            f"{DESCRIPTION}; {MADE_BY}."
        )
    try:
        return _parse_description(read_object(file, follow_links=True))
    except (OSError, ValueError) as error:
        found = f"cannot be read ({error})" if isinstance(error, OSError) else error
        raise ValueError(
            f"config.data.path is {path!r}, whose {DESCRIPTION} {found}; {MADE_BY}."
        ) from error


def _parse_description(fields: dict[str, Any]) -> TokenFiles:
    """The `TokenFiles` of a JSON object; errors complete a sentence that begins with its file."""
    if fields.get("version") != VERSION:
        raise ValueError(f"has the version {fields.get('version')!r}, expected {VERSION}")
    _check_types(fields, TokenFiles)
    for field, allowed in (("dtype", DTYPES), ("tokenizer", ("", TOKENIZER))):
        if fields[field] not in allowed:
            raise ValueError(f"has {field}={fields[field]!r}, expected one of {allowed}")
    splits = {split: fields["splits"].get(split) for split in SPLITS}
    for split, part in splits.items():
        _check_types(part, TokenFile, f"splits.{split}")
        # The smallest stream has a token besides the BOS that begins it.
        for field, least in (("tokens", 2), ("bytes", 1), ("documents", 1)):
            if part[field] < least:
                value = part[field]
                raise ValueError(f"has splits.{split}.{field}={value}, expected at least {least}")
    parts = {split: TokenFile(**part) for split, part in splits.items()}
    return TokenFiles(**(fields | {"splits": parts}))


def _check_types(values: Any, kind: type[TokenFile | TokenFiles], name: str = "") -> None:
    """Refuses a JSON value that is not an object of the fields of a dataclass."""
    where = f"{name}." if name else ""
    if not isinstance(values, dict):
        raise ValueError(f"has {name}={reprlib.repr(values)}, expected an object")
    types: dict[str, Any] = {
        field.name: typing.get_origin(field.type) or field.type
        for field in dataclasses.fields(kind)
    }
    for field in sorted(types.keys() ^ values.keys()):
        what = "lacks" if field in types else "has the unknown field"
        raise ValueError(f"{what} {where}{field}")
    for field, value in values.items():
        if not isinstance(value, types[field]) or isinstance(value, bool):
            raise ValueError(
                f"has {where}{field}={reprlib.repr(value)}, expected {TYPES[types[field]]}"
            )
