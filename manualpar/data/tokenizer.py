"""Tokenizers: one whose tokens are bytes, and one that a Hugging Face file defines.

Every tokenizer has a token BOS, which begins each document. No text is encoded to BOS.
"""

import base64
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
import reprlib
import string
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from manualpar.errors import require
from manualpar.system.storage import BucketPath, copied_files, user_path
from manualpar.system.storage.untrusted import parse_object, read_model_file, read_model_object

if TYPE_CHECKING:
    import tokenizers

TOKENIZER, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
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


FEW = 3  # The number of errors and texts that notes show.


class ByteTokenizer:
    """Encodes a text as its UTF-8 bytes. BOS is 256, so the vocabulary has 257 tokens."""

    fingerprint = "bytes"  # Tokenizers with equal fingerprints encode texts to the same tokens.
    vocab_size = 257  # All tokens are less than this number.
    bos_token = 256
    end_token = 256  # The token that ends an answer: BOS, which also ends documents.
    begins_with_bos = True  # Whether a prompt must begin with BOS.
    files: tuple[pathlib.Path, ...] = ()  # The files from which the tokenizer was loaded.
    parse_special = False  # Whether texts of special tokens are read as these tokens.

    def encode_documents(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Encodes each document as its bytes, `int32[N]` without BOS; also bytes outside UTF-8."""
        return [np.frombuffer(data, np.uint8).astype(np.int32) for data in documents]

    def encode(self, text: str) -> np.ndarray:
        """Encodes a text as its UTF-8 bytes; a surrogate escape becomes the byte it stands for."""
        return self.encode_documents([text.encode(errors="surrogateescape")])[0]

    def encode_joined(self, first: str, second: str) -> tuple[np.ndarray, int]:
        """Encodes a text in two parts; returns its tokens, and the number of the first part's."""
        tokens = self.encode(first)
        return np.concatenate([tokens, self.encode(second)]), len(tokens)

    def count_special(self, documents: Sequence[bytes]) -> Counter[str]:
        """Returns no counts: no text spells a special token, because BOS has no text."""
        del documents
        return Counter()

    def decode(self, tokens: Iterable[int]) -> str:
        """Decodes tokens to a text without BOS; bytes that are not UTF-8 become U+FFFD."""
        return bytes(token for token in map(int, tokens) if token < 256).decode(errors="replace")


class FileTokenizer:
    """The tokenizer of a Hugging Face `tokenizer.json`, with the attributes of a `ByteTokenizer`.

    If a document contains the text of a special token, it is encoded as ordinary text, or with
    `parse_special` as the token. No tokens are added at the beginning or end, and texts are not
    truncated. Bytes of a document that are not UTF-8 are encoded as U+FFFD.
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
        parse_special: bool = False,
    ) -> None:
        """Wraps a tokenizer, and changes its settings; its vocabulary must contain `bos_token`.

        `end_token` is BOS by default, because BOS ends documents.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = not parse_special
        added = tokenizer.get_added_tokens_decoder().values()
        special = sorted({x.content for x in added if x.special and x.content}, key=len)
        self._special = re.compile(b"|".join(re.escape(x.encode()) for x in reversed(special)))
        self.parse_special = parse_special
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

    def encode_joined(self, first: str, second: str) -> tuple[np.ndarray, int]:
        """Encodes a text in two parts; returns its tokens, and the number of the first part's.

        The parts are encoded together, because many tokenizers put a space before a text, or join
        letters across the border. A token with letters of both parts belongs to the second part.
        """
        first, second = (
            text.encode(errors="surrogateescape").decode(errors="replace")
            for text in (first, second)
        )
        encode = functools.partial(self._tokenizer.encode, add_special_tokens=False)
        try:
            encoding = guarded(lambda: encode(first + second))
        except ValueError as error:
            raise ValueError(f"has a text that the tokenizer cannot encode ({error})") from error
        ends = np.array(encoding.offsets, np.int64).reshape(-1, 2)[:, 1]
        after = np.flatnonzero(ends > len(first))
        tokens = np.array(encoding.ids, np.int32)
        return tokens, int(after[0]) if len(after) else len(tokens)

    def count_special(self, documents: Sequence[bytes]) -> Counter[str]:
        """Returns how often documents spell each special token, if that is ordinary text."""
        found: Counter[str] = Counter()
        if not self.parse_special and self._special.pattern:
            for data in documents:
                found.update(map(bytes.decode, self._special.findall(data)))
        return found

    def decode(self, tokens: Iterable[int]) -> str:
        """Decodes tokens to a text; leaves out special tokens."""
        numbers = list(map(int, tokens))
        return str(guarded(lambda: self._tokenizer.decode(numbers, skip_special_tokens=True)))


Tokenizer = ByteTokenizer | FileTokenizer


def frame_document(tokenizer: Tokenizer, tokens: np.ndarray) -> np.ndarray:
    """Puts BOS before the tokens of a document, and the end token after them unless it is BOS.

    Neither is doubled if the document has it already. With `parse_special` a BOS in the middle is
    refused if it is not BOS that ends documents, because attention would end there.
    """
    bos, end = tokenizer.bos_token, tokenizer.end_token
    tokens = tokens[1:] if tokens[:1].tolist() == [bos] else tokens
    if bos == end:
        tokens = tokens[:-1] if tokens[-1:].tolist() == [bos] else tokens
    elif tokens[-1:].tolist() != [end]:
        tokens = np.append(tokens, end)
    if tokenizer.parse_special and bos != end:
        begins = np.flatnonzero(tokens == bos)
        if len(begins) and not (tokens[begins - 1] == end)[begins > 0].all():
            raise ValueError(
                f"spells the token {bos}, which begins a document, in its middle, so attention "
                "would end there; expected the source 'chat' for chats, or no parse_special"
            )
    return np.concatenate([[bos], tokens]).astype(np.int32)


def frame_prompt(tokenizer: Tokenizer, tokens: np.ndarray) -> list[int]:
    """Puts BOS before the tokens of a prompt as the tokenizer requires, and if there are none.

    BOS is not doubled if the prompt has it already, as in a document.
    """
    bos = [tokenizer.bos_token]
    begins = tokenizer.begins_with_bos or not len(tokens)
    given: list[int] = tokens.tolist()
    return bos + given if begins and given[:1] != bos else given


@dataclasses.dataclass
class Notes:
    """What the user should know about encoded rows.

    Attributes:
      spelt: How often the texts spell each special token.
      skipped: The number of rows that are left out because of an error.
      first: The first of these errors, each a sentence with the row's place.
    """

    spelt: Counter[str] = dataclasses.field(default_factory=Counter)
    skipped: int = 0
    first: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: "Notes") -> None:
        """Adds the notes on other rows."""
        self.spelt.update(other.spelt)
        self.skipped += other.skipped
        self.first = [*self.first, *other.first][:FEW]

    def as_json(self) -> dict[str, Any]:
        """Returns the notes as an object that JSON can represent."""
        return {"spelt": dict(self.spelt), "skipped": self.skipped, "first": self.first}

    def sentences(self) -> list[str]:
        """Returns a sentence for each kind of note."""
        said = []
        if self.skipped:
            also = f" (and {self.skipped - len(self.first)} more)" if self.skipped > FEW else ""
            shown = " ".join(self.first).rstrip(".")
            said.append(f"skipped {self.skipped} bad rows: {shown}{also}")
        if self.spelt:
            number = sum(self.spelt.values())
            said.append(
                f"texts spell special tokens {number} times ({spelt_words(self.spelt)}), and these "
                "are encoded as ordinary letters; parse_special (config.data.parse_special) reads "
                "them as tokens"
            )
        return said


def path_of_tokenizer(tokenizer: Tokenizer) -> str:
    """Returns the path with which `load_tokenizer` loads a tokenizer again; "" for bytes."""
    files = tokenizer.files
    return str(files[0].parent if len(files) > 1 else files[0]) if files else ""


def spelt_words(spelt: Counter[str]) -> str:
    """Names the special tokens that texts spell most often."""
    return ", ".join(f"{text!r} {number} times" for text, number in spelt.most_common(FEW))


def load_tokenizer(path: str, *, parse_special: bool = False) -> Tokenizer:
    """Loads a tokenizer.

    Args:
      path: A `tokenizer.json`; or a directory that contains a `tokenizer.json`, such as that of a
        model; or "" for the tokenizer of bytes. If the directory has a `tokenizer_config.json`,
        this file names the token that begins documents and the token that ends answers.
      parse_special: Whether the text of a special token, such as `</s>`, is read as this token. By
        default it is ordinary text, so that a document cannot contain special tokens.

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
    # A user has named the file or the folder itself, so it may be a link.
    file = pathlib.Path(os.path.realpath(place))
    files: tuple[pathlib.Path, ...] = ()
    has_config = False
    named: dict[str, str] = {}
    if is_directory := os.path.isdir(place):
        file = place / TOKENIZER
        names = (TOKENIZER_CONFIG, TEMPLATE)
        files = tuple(place / name for name in names if os.path.lexists(place / name))
        files += tuple(sorted((place / TEMPLATES).glob("*.jinja")))
        if has_config := os.path.lexists(place / TOKENIZER_CONFIG):
            try:
                named = special_tokens(read_model_object(files[0], place))
            except (OSError, ValueError) as error:
                raise refuse(f"has a {TOKENIZER_CONFIG} that {error}") from error
    if not os.path.lexists(file):
        what = f"lacks {TOKENIZER}" if has_config else "is no file"
        model = place / SENTENCEPIECE if is_directory else file
        if os.path.lexists(model) and model.suffix == ".model":
            raise refuse(_only_sentencepiece(model))
        raise refuse(f"{what}; {expected}")
    if file.suffix == ".model":
        raise refuse(_only_sentencepiece(file))
    require("`tokenizer`", "tokenizers")
    import tokenizers

    try:
        data = read_model_file(file, file.parent)
        check_tokenizer(parse_object(data))
    except (OSError, ValueError) as error:
        said = f"has a {TOKENIZER} that {error}" if is_directory else error
        raise refuse(f"{said}; {expected}") from error
    try:
        tokenizer = guarded(lambda: tokenizers.Tokenizer.from_buffer(data))
    except ValueError as error:
        raise refuse(f"cannot be read ({error}); {expected}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
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
    digest = hashlib.blake2b(data, digest_size=8)
    if named:
        digest.update(f"{bos_token} {end_token}".encode())
    if parse_special:
        digest.update(b"parse_special")
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
        parse_special=parse_special,
    )


def _only_sentencepiece(model: pathlib.Path) -> str:
    folder = str(model.parent)
    convert = f"AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder!r})"
    return (
        f"has only {model.name}, the file of SentencePiece; make its {TOKENIZER} once with "
        "pip install transformers sentencepiece protobuf, and "
        f'python -c "from transformers import AutoTokenizer; {convert}"'
    )


def special_tokens(
    fields: dict[str, Any], names: tuple[str, ...] = ("bos_token", "eos_token")
) -> dict[str, str]:
    """Returns the text of each special token in a `tokenizer_config.json`, by the token's field."""
    found = {}
    for name in names:
        value = fields.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
        elif value is not None:
            raise ValueError(f"has {name}={reprlib.repr(value)}, expected a text")
    return found


# -------------------------------------------------------------------------------------------------
# Refuses a tokenizer file that would need too much time or memory for a short text.
#
# A tokenizer file is a program. Its steps (normalizers, pre-tokenizers, post-processors and
# decoders) rewrite a text one after another. Forty steps that each double the text make it 10**12
# times as long. A regular expression such as `(a+)+$` needs exponential time. After a second, the
# library for regular expressions gives up, and the tokenizers library panics: it prints a stack to
# standard error, and raises an exception that is no subclass of `Exception`.
#
# So the steps are tried before the tokenizer is loaded. Each kind of step runs alone, step by
# step, on short texts, and a text must not become more than `MAX_GROWTH` times as long. This is
# measured, and does not depend on the names of the steps. A step writes at most the longest text
# in the step itself for each character that it gets. So the product of the two numbers is bounded
# before the step runs. Each regular expression runs on texts that repeat its characters.


T = TypeVar("T")

PANIC = "pyo3_runtime"
# The kinds of steps: the field of a tokenizer's file, and the field of a `Sequence` of steps.
KINDS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
# The limits: a text may become MAX_GROWTH times as long, and one step may write MAX_CHARACTERS
# characters. A Korean syllable becomes 9 times as long if it is decomposed and written as bytes.
MAX_GROWTH, MAX_CHARACTERS = 64, 1 << 24
# The steps of a kind may have MAX_LENGTH characters in JSON, and there may be MAX_STEPS. The
# largest known table of replacements has half a million characters, and ten steps are many.
MAX_LENGTH, MAX_STEPS = 1 << 21, 128
# The check repeats MAX_TRIED characters of a regular expression, each REPEATED times.
MAX_TRIED, REPEATED = 32, 64
# A text that is tried repeats one character, or one text of a step, to about TRIED characters. If
# there would be more than MAX_TEXTS texts, some of them are joined.
TRIED, MAX_TEXTS = 64, 512
# Characters of two, three and four bytes, with accents, in several scripts.
CHARACTERS = string.printable + "\xa0\xe9\xdf\u0130\u1ec7\u0301\u4e2d\uac01\u0e33\u0928"
CHARACTERS += "\u2581\u2026\U0001f600"
# This field contains a table in base64, whose texts `_table` finds.
TABLE = "precompiled_charsmap"


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


def check_tokenizer(fields: Mapping[str, Any]) -> None:
    """Refuses a tokenizer that would use all memory or never finish for an ordinary text.

    The caller puts the tokenizer's file before an error's message.

    Args:
      fields: The content of a `tokenizer.json`.
    """
    with _held_stderr():
        chains = {
            kind: _steps(kind, fields[kind]) for kind in KINDS if fields.get(kind) is not None
        }
        for pattern in dict.fromkeys(_patterns(list(chains.values()))):
            _check_time(pattern)
        for kind, steps in chains.items():
            _check_growth(kind, steps)


def _steps(kind: str, part: Any) -> list[dict[str, Any]]:
    """Returns the steps in a part of a tokenizer's file, in order."""
    if (length := len(json.dumps(part))) > MAX_LENGTH:
        raise ValueError(f"has a {_named(kind)} of {length:,} characters")
    # The library reads several spellings of a step, and writes one. Loading a step does not run it.
    written = json.loads(_load(kind, part).__getstate__())
    steps = list(itertools.islice(_flat(KINDS[kind], written), MAX_STEPS + 1))
    if len(steps) > MAX_STEPS:
        raise ValueError(f"has more than {MAX_STEPS} {_named(kind)}s")
    return steps


def _flat(name: str, step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step.get("type") == "Sequence" and isinstance(step.get(name), list):
        for inner in step[name]:
            yield from _flat(name, inner)
    else:
        yield step


def _load(kind: str, part: Any) -> Any:
    """Loads a part of a tokenizer's file, in a tokenizer with one word."""
    import tokenizers

    parts = {**dict.fromkeys(KINDS), kind: part}
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    whole = {"version": "1.0", "added_tokens": [], **parts, "model": model}
    text = json.dumps({**whole, "truncation": None, "padding": None})
    try:
        return getattr(guarded(lambda: tokenizers.Tokenizer.from_str(text)), kind)
    except ValueError as error:
        raise ValueError(f"has a {_named(kind)} that cannot be read ({error})") from error


def _named(kind: str) -> str:
    return kind.replace("_", "-")


def _patterns(node: Any) -> Iterator[str]:
    """Yields the regular expressions anywhere in a JSON value."""
    if isinstance(node, dict):
        if isinstance(node.get("Regex"), str):
            yield node["Regex"]
        node = list(node.values())
    for inner in node if isinstance(node, list) else ():
        yield from _patterns(inner)


def _check_time(pattern: str) -> None:
    import tokenizers
    from tokenizers import normalizers

    remove = normalizers.Replace(tokenizers.Regex(pattern), "")
    for text in _texts(pattern):
        try:
            guarded(functools.partial(remove.normalize_str, text))
        except PanicError as error:
            raise ValueError(
                f"has a regular expression, {pattern[:60]!r}, that takes exponential time ({error})"
            ) from None


def _texts(pattern: str) -> Iterator[str]:
    """Yields texts on which a regular expression may search for long before it finds no match."""
    literal = "".join(dict.fromkeys(c for c in pattern if c.isalnum()))[:MAX_TRIED]
    for unit in dict.fromkeys((*literal, literal, "0", " ", "-", "a")):
        yield unit * REPEATED + "!\0"


def _check_growth(kind: str, steps: Sequence[dict[str, Any]]) -> None:
    """Tries the steps of a kind on all texts that appear in them."""
    mentioned = list(dict.fromkeys(text for step in steps for text in _mentioned(step)))
    trial = _TRIALS[kind]
    loaded = [(_load(kind, step), _longest(kind, step)) for step in steps]
    for text in _tried(mentioned) if trial.depends_on_text else ("",):
        value = trial.begin(text)
        start = length = trial.size(value)
        for step, longest in loaded:
            if longest * (length + 1) > MAX_CHARACTERS:
                raise ValueError(f"has {_named(kind)}s that insert {longest:,} characters at once")
            try:
                value = guarded(functools.partial(trial.run, step, value))
            except ValueError as error:
                raise ValueError(f"has a {_named(kind)} that fails for a text ({error})") from error
            length = trial.size(value)
            if length > MAX_GROWTH * start:
                raise ValueError(
                    f"has {len(steps)} {_named(kind)}s, and they make a text more than "
                    f"{MAX_GROWTH} times as long"
                )


def _mentioned(node: Any) -> Iterator[str]:
    """Yields the texts in a step; a dict is a step or the part of a step."""
    if isinstance(node, dict):
        for key, inner in node.items():
            yield from _table(inner) if key == TABLE else _mentioned(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from _mentioned(inner)
    elif isinstance(node, str):
        yield node


def _table(value: str) -> list[str]:
    """Returns the texts in a table of replacements: a trie, and then texts that end in NUL."""
    data = base64.b64decode(value)
    begin = 4 + int.from_bytes(data[:4], "little")
    return [text.decode(errors="replace") for text in data[begin:].split(b"\0")]


def _longest(kind: str, step: dict[str, Any]) -> int:
    """Returns a bound of the length of what a step makes of one character or token."""
    if kind == "post_processor":
        return len(json.dumps(step))  # It can repeat the tokens once for each entry.
    # A character can become eighteen characters if it is decomposed. A pattern is not written.
    written = {key: inner for key, inner in step.items() if key != "pattern"}
    return max(18, *map(len, _mentioned(written)))


def _tried(mentioned: Sequence[str]) -> Iterator[str]:
    """Yields the texts to try: each character and each text in `mentioned` repeated, and all."""
    units = list(dict.fromkeys([*CHARACTERS, *"".join(mentioned), *filter(None, mentioned)]))
    joined = -(-len(units) // MAX_TEXTS)
    for first in range(0, len(units), joined):
        yield "".join(unit * -(-TRIED // len(unit)) for unit in units[first : first + joined])
    yield "".join(units)


class _Trial(NamedTuple):
    """How the steps of a kind are tried.

    Attributes:
      begin: Makes what the first step gets, from a text.
      run: Calls a step with the result of the step before.
      size: Returns the length of what a step has made.
      depends_on_text: Whether it matters which text the first step gets.
    """

    begin: Callable[[str], Any]
    run: Callable[[Any, Any], Any]
    size: Callable[[Any], int]
    depends_on_text: bool = True


def _normalized(text: str) -> Any:
    import tokenizers

    return tokenizers.NormalizedString(text)


def _normalize(step: Any, text: Any) -> Any:
    step.normalize(text)
    return text


def _pre_tokenized(text: str) -> Any:
    import tokenizers

    return tokenizers.PreTokenizedString(text)


def _pre_tokenize(step: Any, text: Any) -> Any:
    step.pre_tokenize(text)
    return text


def _encoded(text: str) -> Any:
    import tokenizers

    del text  # A post-processor gets only numbers.
    model = tokenizers.models.WordLevel({"a": 0}, unk_token="a")
    words = tokenizers.Tokenizer(model)
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return words.encode("a " * TRIED)


def _decode(step: Any, text: str) -> str:
    """Decodes a text as three tokens, because a decoder may treat the last token differently."""
    half = len(text) // 2
    decoded: str = step.decode([text[:half], "!", text[half:]])
    return decoded


_TRIALS = {
    "normalizer": _Trial(_normalized, _normalize, lambda text: len(text.normalized)),
    "pre_tokenizer": _Trial(
        _pre_tokenized, _pre_tokenize, lambda text: sum(len(x) for x, *_ in text.get_splits())
    ),
    "post_processor": _Trial(
        _encoded,
        lambda step, encoding: step.process(encoding),
        lambda encoding: len(encoding.ids),
        depends_on_text=False,
    ),
    "decoder": _Trial(str, _decode, len),
}


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
