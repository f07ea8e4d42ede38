"""Refuses a tokenizer file that would need too much time or memory for a short text.

A tokenizer file is a program. Its normalizers and decoders replace parts of a text. Forty
replacements that each double the text make it 10**12 times as long. A regular expression such as
`(a+)+$` needs exponential time. After a second, the library for regular expressions gives up, and
the tokenizers library panics: it prints a stack to standard error, and raises an exception that is
no subclass of `Exception`.

So a tokenizer is tried when it is loaded. The replacements run step by step on a text with all
characters that appear in them. Each regular expression runs on texts that repeat its characters.
"""

import contextlib
import functools
import json
import os
import string
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import tokenizers

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
