"""The source `tokens`: files of tokens, mapped into memory.

`python -m manualpar.data.tokenize` makes a directory with

    train.bin  eval.bin  test.bin   each a `packing.TokenStream`: little-endian uint16 or uint32
    tokenizer.json                  the tokenizer, if it was not bytes
    tokens.json                     a `TokenFiles`, written last: without it nothing is complete

A process touches only the pages of the files that its sequences lie in.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping

import numpy as np

from manualpar.data.dataset import LanguageDataset, make_fingerprint
from manualpar.data.packing import ArrayStream, TokenSplit
from manualpar.data.text import SPLITS
from manualpar.data.tokenizer import load_tokenizer

VERSION = 1
DTYPES = ("<u2", "<u4")
DESCRIPTION = "tokens.json"
TOKENIZER = "tokenizer.json"
MADE_BY = "make it with `python -m manualpar.data.tokenize --input=TEXT --output=DIRECTORY`"


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """What one file holds.

    Attributes:
      tokens: How many, with every BOS.
      bytes: How much text they were made of.
      documents: Of how many documents.
      blake2b: Of the file, 16 hexadecimal digits.
    """

    tokens: int
    bytes: int
    documents: int
    blake2b: str


@dataclasses.dataclass(frozen=True)
class TokenFiles:
    """What a directory of token files holds.

    Attributes:
      version: `VERSION`.
      dtype: One of `DTYPES`.
      vocab_size: What each token is less than.
      bos_token: What begins a document.
      tokenizer: The tokenizer's file in the directory, or "" for bytes.
      splits: By name.
    """

    version: int
    dtype: str
    vocab_size: int
    bos_token: int
    tokenizer: str
    splits: Mapping[str, TokenFile]


def load_tokens(path: str, *, sequence_length: int) -> LanguageDataset:
    """Opens a directory of token files.

    Args:
      path: The directory.
      sequence_length: Tokens in a sequence.

    Returns:
      The dataset. Whether the files are what they were is told from their length alone.

    Raises:
      ValueError: Something is missing, or does not fit the description.
    """
    directory = pathlib.Path(path).expanduser()
    files = _read_description(directory, path)
    tokenizer = load_tokenizer(str(directory / files.tokenizer) if files.tokenizer else "")
    if (tokenizer.vocab_size, tokenizer.bos_token) != (files.vocab_size, files.bos_token):
        raise ValueError(
            f"config.data.path is {path!r}, whose {files.tokenizer or 'byte tokenizer'} has "
            f"{tokenizer.vocab_size} tokens and BOS {tokenizer.bos_token}, expected the "
            f"{files.vocab_size} and {files.bos_token} of its {DESCRIPTION}; {MADE_BY}."
        )

    def load(split: str) -> TokenSplit:
        part = files.splits[split]
        file = directory / f"{split}.bin"
        expected = part.tokens * np.dtype(files.dtype).itemsize
        if not file.is_file():
            raise ValueError(f"config.data.path is {path!r}, which lacks {file.name}; {MADE_BY}.")
        if (size := file.stat().st_size) != expected:
            raise ValueError(
                f"config.data.path is {path!r}, whose {file.name} has {size} bytes, expected "
                f"{expected} for the {part.tokens} tokens in {DESCRIPTION}; {MADE_BY}."
            )
        return TokenSplit(
            ArrayStream(np.memmap(file, files.dtype, "r"), str(file), files.vocab_size),
            sequence_length=sequence_length,
            bos_token=files.bos_token,
            num_bytes=part.bytes,
            num_documents=part.documents,
        )

    return LanguageDataset(
        train=load("train"),
        eval=load("eval"),
        test=load("test"),
        tokenizer=tokenizer,
        fingerprint=make_fingerprint("tokens", sequence_length, dataclasses.asdict(files)),
    )


def _read_description(directory: pathlib.Path, path: str) -> TokenFiles:
    """Reads and checks `tokens.json`."""
    file = directory / DESCRIPTION
    if not file.is_file():
        raise ValueError(
            f"config.data.path is {path!r}, expected a directory of token files, complete with its "
            f"{DESCRIPTION}; {MADE_BY}."
        )
    try:
        fields = json.loads(file.read_text())
        if fields["version"] != VERSION or fields["dtype"] not in DTYPES:
            raise ValueError(f"version {fields['version']} with dtype {fields['dtype']!r}")
        splits = {split: TokenFile(**fields["splits"][split]) for split in SPLITS}
        if min(part.tokens for part in splits.values()) < 2:
            raise ValueError("a split without tokens")
        return TokenFiles(**{**fields, "splits": splits})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"config.data.path is {path!r}, whose {DESCRIPTION} is not one of version {VERSION} "
            f"({type(error).__name__}: {error}); {MADE_BY}."
        ) from error
