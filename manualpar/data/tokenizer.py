"""Text as tokens: bytes, or the tokens of a Hugging Face tokenizer file.

Every tokenizer has a token BOS that no text contains; it begins each document.
"""

import functools
import hashlib
import os
import pathlib
import reprlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from manualpar.data.tokenizer_check import check_tokenizer, guarded
from manualpar.errors import require
from manualpar.system.storage import BucketPath, copied_files, user_path
from manualpar.system.storage.untrusted import read_object

if TYPE_CHECKING:
    import tokenizers

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
# Names of the token that begins, or separates, documents; the first one that is there is taken.
BOS_NAMES = (
    "<|begin_of_text|>",
    "<|startoftext|>",
    "<|bos|>",
    "<bos>",
    "<s>",
    "[BOS]",
    "<|endoftext|>",
    "[CLS]",
)


class ByteTokenizer:
    """Tokens are the bytes of UTF-8, and BOS is 256, so the vocabulary has 257."""

    fingerprint = "bytes"  # Equal for tokenizers that make the same tokens of every text.
    vocab_size = 257  # All tokens are less than that.
    bos_token = 256
    end_token = 256  # It ends an answer; a BOS ends documents too.
    begins_with_bos = True  # Whether a prompt does.
    files: tuple[pathlib.Path, ...] = ()  # Files from which `load_tokenizer` can make it again.

    def encode_documents(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Encodes each document as its bytes, `int32[N]` without BOS, UTF-8 or not."""
        return [np.frombuffer(data, np.uint8).astype(np.int32) for data in documents]

    def encode(self, text: str) -> np.ndarray:
        """Encodes a text as its bytes; keeps undecodable bytes of a command line."""
        return self.encode_documents([text.encode(errors="surrogateescape")])[0]

    def decode(self, tokens: Iterable[int]) -> str:
        """Decodes tokens without BOS; U+FFFD stands for bytes that are not UTF-8."""
        return bytes(token for token in map(int, tokens) if token < 256).decode(errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizer.json`, with the attributes of a `ByteTokenizer`.

    Special tokens that are spelled out in a document are ordinary text. Nothing is added in front
    or behind, and nothing is truncated. Parts of a document that are not UTF-8 reach it as U+FFFD.
    """

    def __init__(
        self,
        tokenizer: "tokenizers.Tokenizer",
        *,
        bos_token: int,
        fingerprint: str,
        end_token: int | None = None,
        begins_with_bos: bool = True,
        files: tuple[pathlib.Path, ...] = (),
    ) -> None:
        """Takes a tokenizer whose vocabulary has `bos_token`, and changes its settings.

        Without an `end_token` it is BOS, which ends documents.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        # This is not the count, because numbers in between may be missing.
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        self.bos_token = bos_token
        self.end_token = bos_token if end_token is None else end_token
        self.begins_with_bos = begins_with_bos
        self.fingerprint = fingerprint
        self.files = files

    def encode_documents(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Encodes each document, `int32[N]` without BOS; the cores share the documents."""
        texts = [data.decode(errors="replace") for data in documents]
        encode = functools.partial(self._tokenizer.encode_batch_fast, add_special_tokens=False)
        try:
            encoded = guarded(lambda: encode(texts))
        except ValueError as error:
            raise ValueError(
                f"config.data.tokenizer cannot encode a text ({error}); expected a tokenizer that "
                "has tokens for everything, or one for what is unknown."
            ) from error
        return [np.array(encoding.ids, np.int32) for encoding in encoded]

    def encode(self, text: str) -> np.ndarray:
        """Encodes a text."""
        return self.encode_documents([text.encode(errors="surrogateescape")])[0]

    def decode(self, tokens: Iterable[int]) -> str:
        """Decodes tokens, without special tokens."""
        numbers = list(map(int, tokens))
        return str(guarded(lambda: self._tokenizer.decode(numbers, skip_special_tokens=True)))


Tokenizer = ByteTokenizer | FileTokenizer


def load_tokenizer(path: str) -> Tokenizer:
    """Loads a tokenizer.

    Args:
      path: A `tokenizer.json`; or a directory that holds one, such as that of a model, whose
        `tokenizer_config.json` says which token begins documents and which ends answers; or "" for
        the tokenizer of bytes.

    Raises:
      ValueError: The file is missing, is no tokenizer, or has no token for BOS.
    """
    if not path:
        return ByteTokenizer()

    def refuse(what: object) -> ValueError:
        return ValueError(f"config.data.tokenizer is {path!r}, which {what}.")

    expected = "expected the tokenizer.json of a Hugging Face tokenizer, or '' for bytes"
    place = user_path(path)
    if isinstance(place, BucketPath):
        place = copied_files(place, (TOKENIZER, TOKENIZER_CONFIG, TEMPLATE))
    file = place
    files: tuple[pathlib.Path, ...] = ()
    named: dict[str, str] = {}
    if os.path.isdir(file):
        directory, file = file, file / TOKENIZER
        if os.path.isfile(directory / TOKENIZER_CONFIG):
            names = (TOKENIZER_CONFIG, TEMPLATE)
            files = tuple(directory / name for name in names if os.path.isfile(directory / name))
            try:
                named = special_tokens(read_object(files[0], follow_links=True))
            except (OSError, ValueError) as error:
                raise refuse(f"has a {TOKENIZER_CONFIG} that {error}") from error
    if not os.path.isfile(file):
        raise refuse(f"is no file; {expected}" if not files else f"lacks {TOKENIZER}; {expected}")
    require("config.data.tokenizer", "tokenizers")
    import tokenizers

    try:
        tokenizer = guarded(lambda: tokenizers.Tokenizer.from_file(str(file)))
    except ValueError as error:
        raise refuse(f"cannot be read ({error}); {expected}") from error
    try:
        check_tokenizer(tokenizer)
    except ValueError as error:
        raise refuse(f"{error}; {expected}") from error
    for kind, name in named.items():
        if tokenizer.token_to_id(name) is None:
            raise refuse(f"has no token {name!r}, the {kind} of its {TOKENIZER_CONFIG}")
    called = [named["bos_token"]] if "bos_token" in named else BOS_NAMES
    found = [tokenizer.token_to_id(name) for name in called]
    bos_token = next((token for token in found if token is not None), None)
    end_token = tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
    bos_token = end_token if bos_token is None else bos_token
    if bos_token is None:
        raise refuse(
            "has no token to begin documents with; expected one of "
            f"{', '.join(BOS_NAMES)} among its added tokens"
        )
    most = 2**31 - 1
    if (largest := max(tokenizer.get_vocab().values())) >= most:
        raise refuse(
            f"has a token of number {largest}; expected less than {most}, so that int32 holds them "
            "all"
        )
    digest = hashlib.blake2b(file.read_bytes(), digest_size=8)
    if named:
        digest.update(f"{bos_token} {end_token}".encode())
    # With its configuration it says itself whether a prompt begins with BOS.
    try:
        begins = not files or guarded(lambda: tokenizer.encode("a")).ids[:1] == [bos_token]
    except ValueError as error:
        raise refuse(f"cannot encode a text ({error}); {expected}") from error
    return FileTokenizer(
        tokenizer,
        bos_token=bos_token,
        end_token=end_token,
        begins_with_bos=begins,
        fingerprint=digest.hexdigest(),
        files=(file, *files),
    )


def special_tokens(
    fields: dict[str, Any], names: tuple[str, ...] = ("bos_token", "eos_token")
) -> dict[str, str]:
    """Returns the texts of the tokens that a `tokenizer_config.json` names, by their fields.

    Args:
      fields: The content of the file.
      names: The fields to look at.

    Raises:
      ValueError: A field is neither a text, nor an object with one, nor null.
    """
    found = {}
    for name in names:
        value = fields.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
        elif value is not None:
            raise ValueError(f"has {name}={reprlib.repr(value)}, expected a text")
    return found
