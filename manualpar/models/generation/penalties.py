"""Changes logits by the tokens that a row contains, and by a bias for each token.

The steps are those of transformers and of OpenAI's interface, in this order:

1. The bias of each token is added to its logit.
2. The repetition penalty (Keskar et al., https://arxiv.org/abs/1909.05858) divides the positive
   logits, and multiplies the negative logits, of all tokens of the prompt and the answer.
3. The frequency penalty is subtracted from a token's logit for each time that the answer contains
   it. The presence penalty is subtracted once if the answer contains it.

Symbols: `B` rows, `S` new tokens of a row, `V` tokens of the vocabulary.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Penalties(NamedTuple):
    """The settings that change logits.

    Attributes:
      repetition: The divisor of the logits of tokens in the prompt or the answer; 1 for none.
      frequency: Subtracted for each time that the answer contains a token; 0 for none.
      presence: Subtracted if the answer contains a token; 0 for none.
      bias: `float32[V]`, added to the logits.
    """

    repetition: Any
    frequency: Any
    presence: Any
    bias: Any


class History(NamedTuple):
    """The tokens that rows contain.

    Attributes:
      in_prompt: `bool[B, V]`, whether the prompt contains a token.
      in_answer: `int32[B, V]`, how often the answer contains a token.
    """

    in_prompt: jax.Array
    in_answer: jax.Array


def make_penalties(
    vocab_size: int,
    repetition: float,
    frequency: float,
    presence: float,
    bias: Mapping[int, float] | None,
) -> Penalties | None:
    """Returns the settings as arrays; `None` if they change no logit.

    Raises:
      ValueError: A number is out of range, or a token of `bias` is not in the vocabulary.
    """
    if not 0 < repetition < math.inf:
        raise ValueError(
            f"generate: repetition_penalty is {repetition}, expected a finite number above 0 (1 "
            "for none)."
        )
    for name, value in (("frequency_penalty", frequency), ("presence_penalty", presence)):
        if not math.isfinite(value):
            raise ValueError(f"generate: {name} is {value}, expected a finite number (0 for none).")
    biases = np.zeros(vocab_size, np.float32)
    for token, value in (bias or {}).items():
        if not 0 <= int(token) < vocab_size:
            raise ValueError(
                f"generate: logit_bias has the token {token}, expected 0 to {vocab_size - 1}."
            )
        if math.isnan(value) or value == math.inf:
            raise ValueError(
                f"generate: logit_bias adds {value} to the token {token}, expected a number, or "
                "-inf to exclude the token."
            )
        biases[int(token)] = value
    if repetition == 1 and frequency == presence == 0 and not biases.any():
        return None
    return Penalties(np.float32(repetition), np.float32(frequency), np.float32(presence), biases)


def history_of(tokens: jax.Array, lengths: jax.Array, vocab_size: int) -> History:
    """Returns the history of prompts `int32[B, S]` of `lengths` tokens, and of empty answers."""
    rows, places = (jnp.arange(size) for size in tokens.shape)
    is_token = places[None] < lengths[:, None]
    none = jnp.zeros_like(tokens, jnp.int32, shape=(len(tokens), vocab_size))
    counts = none.at[rows[:, None], tokens].add(is_token.astype(jnp.int32))
    return History(counts > 0, jnp.zeros_like(counts))


def note(history: History, tokens: jax.Array, is_counted: jax.Array | bool = True) -> History:
    """Adds tokens of each row's answer, `int32[B, S]`, those where `is_counted`, `bool[B, S]`."""
    rows, number = jnp.arange(len(tokens))[:, None], jnp.asarray(is_counted, jnp.int32)
    return history._replace(in_answer=history.in_answer.at[rows, tokens].add(number))


def penalize(logits: jax.Array, history: History, penalties: Penalties) -> jax.Array:
    """Returns the changed logits `float32[B, V]`.

    Communication:
      None.
    """
    logits = logits + penalties.bias[None]
    is_in_answer = history.in_answer > 0
    repeated = jnp.where(logits < 0, logits * penalties.repetition, logits / penalties.repetition)
    logits = jnp.where(history.in_prompt | is_in_answer, repeated, logits)
    counted = penalties.frequency * history.in_answer + penalties.presence * is_in_answer
    return logits - counted
