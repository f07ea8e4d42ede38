"""Words that the messages of several rows share, or that are all of a line."""

import re
from collections.abc import Iterator
from typing import Any


def one_line(words: str) -> str:
    """Returns a pattern of texts that hold the words and no line break."""
    return rf"^.*{words}.*\Z"


def cases(
    *given: tuple[Any, str], error: type[Exception] = ValueError, begins: str = ""
) -> Iterator[tuple[Any, type[Exception], str]]:
    """Yields cases of one error, whose words follow the same beginning."""
    for argument, words in given:
        yield argument, error, begins + words


def literally(*given: tuple[Any, str]) -> Iterator[tuple[Any, str]]:
    """Yields cases whose words stand in the message as they are, in one line."""
    for argument, words in given:
        yield argument, one_line(re.escape(words))
