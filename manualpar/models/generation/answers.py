"""Answers, and the pieces in which they are streamed."""

import dataclasses
from typing import Literal, NamedTuple

from manualpar.models.generation.text_pieces import TextPieces

Ending = Literal["stop", "length"]


class NewToken(NamedTuple):
    """A token of an answer, its log-probability, and whether the draft model proposed it."""

    token: int
    log_probability: float
    is_drafted: bool = False


class TextPiece(NamedTuple):
    """A new piece of an answer.

    Attributes:
      row: The index of the answer: of the prompt, times `samples`, plus that of the sample.
      token: The token; `None` for a stop token, which is not a part of the answer.
      log_probability: The token's log-probability in nats as the model gives it, at temperature 1
        and without penalties, `top_k`, `top_p` and `min_p`.
      text: The new text that later tokens cannot change; always empty without a tokenizer.
      ending: Why the answer ends here, as in `Answer`; `None` if the answer goes on.
      is_drafted: Whether a draft model proposed the token.
      forward_passes: The number of the forward pass that gave the token, as in `Answer`.
    """

    row: int
    token: int | None
    log_probability: float
    text: str
    ending: Ending | None = None
    is_drafted: bool = False
    forward_passes: int = 0


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
      drafted: The number of `tokens` that a draft model proposed.
      forward_passes: The number of the model's forward passes for the answer, the pass over the
        prompt included; 0 for an answer of a beam search.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probabilities: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    ending: Ending = "length"
    drafted: int = 0
    forward_passes: int = 0


def next_piece(
    row: int,
    new: NewToken,
    writer: TextPieces | None,
    stops: frozenset[int],
    *,
    is_last: bool,
    forward_passes: int = 0,
) -> TextPiece:
    """Makes the next piece of a row.

    Args:
      row: The index of the answer.
      new: The new token.
      writer: The row's text so far; `None` without a tokenizer.
      stops: The tokens that end an answer.
      is_last: Whether the answer has reached its length.
      forward_passes: The number of the pass that gave the token.
    """
    ending: Ending | None = None
    if new.token in stops:
        text = writer.finish() if writer else ""
        return TextPiece(row, None, 0.0, text, "stop", False, forward_passes)
    text = writer.add(new.token) if writer else ""
    if writer and writer.is_stopped:
        ending = "stop"
    elif is_last:
        text, ending = text + (writer.finish() if writer else ""), "length"
    known = row, new.token, new.log_probability, text, ending
    return TextPiece(*known, new.is_drafted, forward_passes)
