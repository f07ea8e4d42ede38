"""Words of messages that are one line, as commands print them."""

import re
from collections.abc import Iterator
from typing import Any


def one_line(words: str) -> str:
    """Returns a pattern of texts that hold the words and no line break."""
    return rf"^.*{words}.*\Z"


def literally(*cases: tuple[Any, str]) -> Iterator[tuple[Any, str]]:
    """Yields cases whose words stand in the message as they are, in one line."""
    for argument, words in cases:
        yield argument, one_line(re.escape(words))
