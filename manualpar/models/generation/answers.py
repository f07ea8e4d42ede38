"""Answers, and the pieces in which they are streamed."""

import dataclasses
from typing import Literal, NamedTuple

from manualpar.models.generation.text_pieces import TextPieces

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
      row: The index of the answer.
      drawn: The new token and its log-probability.
      writer: The row's text so far; `None` without a tokenizer.
      stops: The tokens that end an answer.
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
