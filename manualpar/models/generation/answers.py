"""Answers, and the pieces in which they are streamed."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

# -------------------------------------------------------------------------------------------------
# Decodes tokens to text, piece by piece, without incomplete characters.
#
# A character may consist of several tokens. The text of a token may depend on the previous token;
# for example, a space may precede it. So a piece is the text that new tokens add to the text of
# earlier tokens, once all characters are complete. Text that may be the beginning of a stop string
# is held back until later tokens show whether the stop string follows.


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


# -------------------------------------------------------------------------------------------------


Ending = Literal["stop", "length"]


class TextPiece(NamedTuple):
    """A new piece of an answer.

    Attributes:
      row: The index of the answer: of the prompt, times `samples`, plus that of the sample.
      token: The token; `None` for a stop token, which is not a part of the answer.
      log_probability: The token's log-probability in nats as the model gives it, at temperature 1
        and without penalties, `top_k`, `top_p` and `min_p`.
      text: The new text that later tokens cannot change; always empty without a tokenizer.
      ending: Why the answer ends here, as in `Answer`; `None` if the answer goes on.
    """

    row: int
    token: int | None
    log_probability: float
    text: str
    ending: Ending | None = None


@dataclasses.dataclass
class Answer:
    """A model's answer to a prompt.

    Attributes:
      tokens: The tokens, without the stop token.
      log_probabilities: Each token's log-probability in nats as the model gives it, at
        temperature 1 and without penalties, `top_k`, `top_p` and `min_p`.
      text: The text of the tokens, up to a stop string; empty without a tokenizer.
      ending: `"stop"` if a stop token or a stop string ended the answer; `"length"` if the answer
        reached the limit of `max_tokens` tokens.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probabilities: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    ending: Ending = "length"


def next_piece(
    row: int,
    drawn: tuple[int, float],
    writer: TextPieces | None,
    stops: frozenset[int],
    *,
    is_last: bool,
) -> TextPiece:
    """Makes the next piece of a row.

    Args:
      writer: The row's text so far; `None` without a tokenizer.
      is_last: Whether the answer has reached its length.
    """
    if drawn[0] in stops:
        return TextPiece(row, None, 0.0, writer.finish() if writer else "", "stop")
    text = writer.add(drawn[0]) if writer else ""
    if writer and writer.is_stopped:
        return TextPiece(row, *drawn, text, "stop")
    if is_last:
        return TextPiece(row, *drawn, text + (writer.finish() if writer else ""), "length")
    return TextPiece(row, *drawn, text)
