"""Tokenizers: one whose tokens are bytes, and one that a Hugging Face file defines.

Every tokenizer has a token BOS, which begins each document. No text is encoded to BOS.
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
# The chat template, and the folder of those with other names than `default`: `NAME.jinja`.
TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"
# Possible names of BOS, the token that begins documents. The first name in the vocabulary is used.
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
    """Encodes a text as its UTF-8 bytes. BOS is 256, so the vocabulary has 257 tokens."""

    fingerprint = "bytes"  # Tokenizers with equal fingerprints encode texts to the same tokens.
    vocab_size = 257  # All tokens are less than this number.
    bos_token = 256
    end_token = 256  # The token that ends an answer: BOS, which also ends documents.
    begins_with_bos = True  # Whether a prompt must begin with BOS.
    files: tuple[pathlib.Path, ...] = ()  # The files from which the tokenizer was loaded.

    def encode_documents(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Encodes each document as its bytes, `int32[N]` without BOS; also bytes outside UTF-8."""
        return [np.frombuffer(data, np.uint8).astype(np.int32) for data in documents]

    def encode(self, text: str) -> np.ndarray:
        """Encodes a text as its UTF-8 bytes; a surrogate escape becomes the byte it stands for."""
        return self.encode_documents([text.encode(errors="surrogateescape")])[0]

    def decode(self, tokens: Iterable[int]) -> str:
        """Decodes tokens to a text without BOS; bytes that are not UTF-8 become U+FFFD."""
        return bytes(token for token in map(int, tokens) if token < 256).decode(errors="replace")


class FileTokenizer:
    """The tokenizer of a Hugging Face `tokenizer.json`, with the attributes of a `ByteTokenizer`.

    If a document contains the name of a special token, the name is encoded as ordinary text. No
    tokens are added at the beginning or end, and texts are not truncated. Bytes of a document that
    are not UTF-8 are encoded as U+FFFD.
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
        """Wraps a tokenizer, and changes its settings; its vocabulary must contain `bos_token`.

        `end_token` is BOS by default, because BOS ends documents.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        # One more than the largest token; the tokens may be fewer, because numbers may be unused.
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        self.bos_token = bos_token
        self.end_token = bos_token if end_token is None else end_token
        self.begins_with_bos = begins_with_bos
        self.fingerprint = fingerprint
        self.files = files

    def encode_documents(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Encodes each document as `int32[N]` without BOS; uses several cores."""
        texts = [data.decode(errors="replace") for data in documents]
        encode = functools.partial(self._tokenizer.encode_batch_fast, add_special_tokens=False)
        try:
            encoded = guarded(lambda: encode(texts))
        except ValueError as error:
            raise ValueError(
                f"`tokenizer` cannot encode a text ({error}); expected a tokenizer with "
                "tokens for every text, or with a token for unknown text."
            ) from error
        return [np.array(encoding.ids, np.int32) for encoding in encoded]

    def encode(self, text: str) -> np.ndarray:
        """Encodes a text."""
        return self.encode_documents([text.encode(errors="surrogateescape")])[0]

    def decode(self, tokens: Iterable[int]) -> str:
        """Decodes tokens to a text; leaves out special tokens."""
        numbers = list(map(int, tokens))
        return str(guarded(lambda: self._tokenizer.decode(numbers, skip_special_tokens=True)))


Tokenizer = ByteTokenizer | FileTokenizer


def load_tokenizer(path: str) -> Tokenizer:
    """Loads a tokenizer.

    Args:
      path: A `tokenizer.json`; or a directory that contains a `tokenizer.json`, such as that of a
        model; or "" for the tokenizer of bytes. If the directory has a `tokenizer_config.json`,
        this file names the token that begins documents and the token that ends answers.

    Raises:
      ValueError: The file is missing, is not a tokenizer, or has no token for BOS.
    """
    if not path:
        return ByteTokenizer()

    def refuse(what: object) -> ValueError:
        return ValueError(f"`tokenizer` is {path!r}, which {what}.")

    expected = "expected the tokenizer.json of a Hugging Face tokenizer, or '' for bytes"
    place = user_path(path)
    if isinstance(place, BucketPath):
        others = [f"{TEMPLATES}/{name}" for name in (place / TEMPLATES).files()]
        place = copied_files(place, (TOKENIZER, TOKENIZER_CONFIG, TEMPLATE, *others))
    file = place
    files: tuple[pathlib.Path, ...] = ()
    has_config = False
    named: dict[str, str] = {}
    if os.path.isdir(file):
        directory, file = file, file / TOKENIZER
        names = (TOKENIZER_CONFIG, TEMPLATE)
        files = tuple(directory / name for name in names if os.path.isfile(directory / name))
        files += tuple(sorted((directory / TEMPLATES).glob("*.jinja")))
        if has_config := os.path.isfile(directory / TOKENIZER_CONFIG):
            try:
                named = special_tokens(read_object(files[0], follow_links=True))
            except (OSError, ValueError) as error:
                raise refuse(f"has a {TOKENIZER_CONFIG} that {error}") from error
    if not os.path.isfile(file):
        what = f"lacks {TOKENIZER}" if has_config else "is no file"
        raise refuse(f"{what}; {expected}")
    require("`tokenizer`", "tokenizers")
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
            f"has the token {largest}; expected tokens below {most}, because they are stored as "
            "int32"
        )
    digest = hashlib.blake2b(file.read_bytes(), digest_size=8)
    if named:
        digest.update(f"{bos_token} {end_token}".encode())
    # A tokenizer with a `tokenizer_config.json` adds BOS itself if prompts must begin with BOS.
    try:
        begins = not has_config or guarded(lambda: tokenizer.encode("a")).ids[:1] == [bos_token]
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
    """Returns the text of each special token in a `tokenizer_config.json`, by the token's field.

    Args:
      fields: The content of the file.
      names: The fields of the special tokens to return.

    Raises:
      ValueError: A field is not a text, an object with a text, or null.
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
