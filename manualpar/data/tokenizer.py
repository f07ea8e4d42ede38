"""Tokenizers: one whose tokens are bytes, and one that a Hugging Face file defines.

Every tokenizer has a token BOS, which begins each document. No text is encoded to BOS.
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import reprlib
import string
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from manualpar.errors import require
from manualpar.system.storage import BucketPath, copied_files, user_path
from manualpar.system.storage.untrusted import read_object

if TYPE_CHECKING:
    import tokenizers


# -------------------------------------------------------------------------------------------------
# Refuses a tokenizer file that would need too much time or memory for a short text.
#
# A tokenizer file is a program. Its normalizers and decoders replace parts of a text. Forty
# replacements that each double the text make it 10**12 times as long. A regular expression such as
# `(a+)+$` needs exponential time. After a second, the library for regular expressions gives up,
# and the tokenizers library panics: it prints a stack to standard error, and raises an exception
# that is no subclass of `Exception`.
#
# So a tokenizer is tried when it is loaded. The replacements run step by step on a text with all
# characters that appear in them. Each regular expression runs on texts that repeat its characters.


T = TypeVar("T")

PANIC = "pyo3_runtime"
# The limits: a text may become MAX_GROWTH times as long, and one step of a normalizer or decoder
# may write MAX_CHARACTERS characters.
MAX_GROWTH, MAX_CHARACTERS = 8, 1 << 24
# The check repeats MAX_TRIED characters of a regular expression, each REPEATED times.
MAX_TRIED, REPEATED = 32, 64


class PanicError(ValueError):
    """The tokenizers library has panicked."""


def guarded(action: Callable[[], T]) -> T:
    """Calls `action`, and turns exceptions of the tokenizers library into `ValueError`s."""
    try:
        return action()
    except BaseException as error:
        said = " ".join(str(error).split())
        if type(error).__module__ == PANIC:
            raise PanicError(said) from None
        if isinstance(error, Exception):
            raise ValueError(said) from error
        raise


def check_tokenizer(tokenizer: "tokenizers.Tokenizer") -> None:
    """Refuses a tokenizer that would use all memory or never finish for an ordinary text.

    Raises:
      ValueError: The tokenizer is refused. The caller puts the tokenizer's file before the message.
    """
    steps = {
        name: json.loads(part.__getstate__())
        for name in ("normalizer", "pre_tokenizer", "decoder")
        if (part := getattr(tokenizer, name)) is not None
    }
    patterns = list(dict.fromkeys(_patterns(list(steps.values()))))
    chains = {
        f"{name}s": list(_replacing(steps[name]))
        for name in ("normalizer", "decoder")
        if name in steps
    }
    if not patterns and not any(chains.values()):
        return
    with _held_stderr():
        for pattern in patterns:
            _check_time(pattern)
        for named, chain in chains.items():
            _check_growth(named, chain)


def _patterns(node: Any) -> Iterator[str]:
    """Yields the regular expressions anywhere in a JSON value."""
    if isinstance(node, dict):
        if isinstance(node.get("Regex"), str):
            yield node["Regex"]
        node = list(node.values())
    for inner in node if isinstance(node, list) else ():
        yield from _patterns(inner)


def _texts(pattern: str) -> Iterator[str]:
    """Yields texts on which a regular expression may search for long before it finds no match."""
    literal = "".join(dict.fromkeys(c for c in pattern if c.isalnum()))[:MAX_TRIED]
    for unit in dict.fromkeys((*literal, literal, "0", " ", "-", "a")):
        yield unit * REPEATED + "!\0"


def _replacing(node: Any) -> Iterator[dict[str, Any]]:
    """Yields the steps that replace texts in a normalizer or decoder, in order."""
    if node.get("type") == "Sequence":
        for inner in node.get("normalizers") or node.get("decoders") or ():
            yield from _replacing(inner)
    elif node.get("type") == "Replace":
        yield node


def _check_time(pattern: str) -> None:
    remove = _replacement({"Regex": pattern}, "")
    for text in _texts(pattern):
        try:
            guarded(functools.partial(remove.normalize_str, text))
        except PanicError as error:
            raise ValueError(
                f"has a regular expression, {pattern[:60]!r}, that takes exponential time ({error})"
            ) from None


def _check_growth(named: str, steps: list[dict[str, Any]]) -> None:
    mentioned = [part for step in steps for part in (*step["pattern"].values(), step["content"])]
    characters = sorted(set(string.printable).union(*mentioned))
    text = "".join([*characters, *(part[:REPEATED] for part in dict.fromkeys(mentioned))])
    start = len(text)
    for step in steps:
        if len(step["content"]) * (len(text) + 1) > MAX_CHARACTERS:
            raise ValueError(
                f"has {named} that insert a text of {len(step['content']):,} characters"
            )
        replace = _replacement(step["pattern"], step["content"])
        text = guarded(functools.partial(replace.normalize_str, text))
        if len(text) > MAX_GROWTH * start:
            raise ValueError(
                f"has {len(steps)} {named} that replace texts, and they make a text of {start} "
                f"characters more than {MAX_GROWTH} times as long"
            )


def _replacement(pattern: dict[str, str], content: str) -> Any:
    import tokenizers
    from tokenizers import normalizers

    ((kind, text),) = pattern.items()
    return normalizers.Replace(tokenizers.Regex(text) if kind == "Regex" else text, content)


@contextlib.contextmanager
def _held_stderr() -> Iterator[None]:
    """Holds back standard error during a context; prints it at the end if there was no error."""
    with tempfile.TemporaryFile() as held:
        saved = os.dup(2)
        try:
            os.dup2(held.fileno(), 2)
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        held.seek(0)
        os.write(2, held.read())


# -------------------------------------------------------------------------------------------------


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
