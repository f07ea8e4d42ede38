"""Decodes tokens to text, piece by piece, without incomplete characters.

A character may consist of several tokens. The text of a token may depend on the previous token; for
example, a space may precede it. So a piece is the text that new tokens add to the text of earlier
tokens, once all characters are complete. Text that may be the beginning of a stop string is held
back until later tokens show whether the stop string follows.
"""

from collections.abc import Sequence
from typing import Protocol

# Decoders write this character for bytes that are not a complete character.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# The number of prompt tokens that are decoded with the first new token, because its text may depend
# on them.
CONTEXT_TOKENS = 8


class Decoder(Protocol):
    """A tokenizer, with the one method that `TextPieces` needs."""

    def decode(self, tokens: Sequence[int], /) -> str:
        """Decodes tokens to text."""


class TextPieces:
    """Converts one row's tokens to text while they arrive.

    Attributes:
      is_stopped: Whether a stop string was found; the text ends before it.
    """

    def __init__(self, tokenizer: Decoder, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, [stop for stop in stops if stop]
        self._tokens = list(prompt[-CONTEXT_TOKENS:])
        # The range of the latest tokens whose text is known. New tokens are decoded with them.
        self._first, self._read = 0, len(self._tokens)
        self._held = ""
        self.is_stopped = False

    def add(self, token: int) -> str:
        """Adds a token and returns the new text that cannot change any more; it may be empty."""
        self._tokens.append(token)
        new = self._new_text()
        if not new or new.endswith(UNFINISHED):
            return ""
        self._first, self._read = self._read, len(self._tokens)
        return self._certain(self._held + new)

    def finish(self) -> str:
        """Returns the rest of the text after the last token."""
        if self.is_stopped:
            return ""
        text = self._held + self._new_text()
        self._first = self._read = len(self._tokens)
        return self._certain(text) + self._held

    def _new_text(self) -> str:
        decode = self._tokenizer.decode
        before = decode(self._tokens[self._first : self._read])
        return decode(self._tokens[self._first :])[len(before) :]

    def _certain(self, text: str) -> str:
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                self._held = text[-size:]
                return text[:-size]
        self._held = ""
        return text
