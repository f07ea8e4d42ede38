"""Helpers for rows of the tables: messages of one line, and messages with a common beginning."""

import re
from collections.abc import Iterator
from typing import Any


def one_line(words: str) -> str:
    """Returns a regular expression for texts of one line that contain the words."""
    return rf"^.*{words}.*\Z"


def cases(
    *given: tuple[Any, str], error: type[Exception] = ValueError, begins: str = ""
) -> Iterator[tuple[Any, type[Exception], str]]:
    """Yields cases of one class of error; `begins` is put before the words of each."""
    for argument, words in given:
        yield argument, error, begins + words


def literally(*given: tuple[Any, str]) -> Iterator[tuple[Any, str]]:
    """Yields cases whose words are plain text (no regular expression) in a message of one line."""
    for argument, words in given:
        yield argument, one_line(re.escape(words))
