"""Tokenizers that do not end: what a `tokenizer.json` has run on every text, tried on a short one.

A tokenizer is a program too. Normalizers and decoders replace texts by other texts, and forty that
each double the text make a million of millions of it. A regular expression such as `(a+)+$` takes
exponential time; its library gives up after a second, and the library of tokenizers then panics:
its exception is no `Exception`, and it writes a stack to standard error. So what replaces is
followed step by step on a text of all characters that it mentions, and regular expressions meet
texts that repeat theirs, when a tokenizer is loaded.
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
# How many times as long a text may become on average, and how much one step may write.
MAX_GROWTH, MAX_CHARACTERS = 8, 1 << 24
# Characters of a regular expression to repeat, and how often.
MAX_TRIED, REPEATED = 32, 64


class PanicError(ValueError):
    """The library of tokenizers has panicked."""


def guarded(action: Callable[[], T]) -> T:
    """Calls a function of the library of tokenizers; whatever it raises is a `ValueError`."""
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
    """Refuses a tokenizer that would take all memory, or for ever, for an ordinary text.

    Raises:
      ValueError: It would; the message completes a sentence about it.
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
    """Finds the regular expressions anywhere in a tree of JSON."""
    if isinstance(node, dict):
        if isinstance(node.get("Regex"), str):
            yield node["Regex"]
        node = list(node.values())
    for inner in node if isinstance(node, list) else ():
        yield from _patterns(inner)


def _texts(pattern: str) -> Iterator[str]:
    """Yields texts on which a regular expression may try for long, and then not match."""
    literal = "".join(dict.fromkeys(c for c in pattern if c.isalnum()))[:MAX_TRIED]
    for unit in dict.fromkeys((*literal, literal, "0", " ", "-", "a")):
        yield unit * REPEATED + "!\0"


def _replacing(node: Any) -> Iterator[dict[str, Any]]:
    """Returns the steps of a normalizer or decoder that replace texts, in order."""
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
            raise ValueError(f"has {named} with a text of {len(step['content']):,} characters")
        replace = _replacement(step["pattern"], step["content"])
        text = guarded(functools.partial(replace.normalize_str, text))
        if len(text) > MAX_GROWTH * start:
            raise ValueError(
                f"has {len(steps)} {named} that replace texts, of which some make a text of "
                f"{start} characters more than {MAX_GROWTH} times as long"
            )


def _replacement(pattern: dict[str, str], content: str) -> Any:
    import tokenizers
    from tokenizers import normalizers

    ((kind, text),) = pattern.items()
    return normalizers.Replace(tokenizers.Regex(text) if kind == "Regex" else text, content)


@contextlib.contextmanager
def _held_stderr() -> Iterator[None]:
    """Drops what is written to standard error if an error is raised, and shows it otherwise."""
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
