"""Draws the next token from logits, for generation with a cache and without one.

The temperature divides the logits. Then `top_k` keeps the likeliest tokens, and `top_p` keeps the
fewest tokens whose total probability is at least `top_p` (Holtzman et al.,
https://arxiv.org/abs/1904.09751). `min_p` keeps the tokens whose probability is at least `min_p`
times that of the likeliest token (Nguyen et al., https://arxiv.org/abs/2407.01082). Gumbel noise is
added to the logits, and the token with the largest sum is drawn. This is a draw from the softmax of
the logits.

Invariants: a row's draw depends on its logits, its key and the position, but not on other rows, on
the mesh or on a cache. The settings are arguments of the compiled step, so other settings need no
new compilation.

Symbols: `B` rows, `V` tokens of the vocabulary.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from manualpar.models.generation.penalties import Penalties


class Drawing(NamedTuple):
    """The settings for drawing tokens.

    Attributes:
      temperature: The divisor of the logits; 0 always chooses the likeliest token.
      top_k: The number of likeliest tokens to draw from; 0 for all tokens.
      top_p: Draws from the fewest tokens whose total probability is at least this; 1 for all.
      min_p: Draws from the tokens with at least this fraction of the likeliest token's
        probability; 0 for all.
      penalties: Changes of the logits before all this; `None` for none.
    """

    temperature: float | Any = 0.0
    top_k: int | Any = 0
    top_p: float | Any = 1.0
    min_p: float | Any = 0.0
    penalties: Penalties | None = None

    def as_arrays(self, function: str = "generate") -> "Drawing":
        """Converts the fields to scalar arrays of fixed dtypes.

        Args:
          function: The name of the caller, for error messages.

        Raises:
          ValueError: A number is out of range.
        """
        if not 0 <= float(self.temperature) < math.inf:
            raise ValueError(
                f"{function}: temperature is {self.temperature}, expected a finite number, at "
                "least 0 (0 takes the likeliest token)."
            )
        if self.top_k != int(self.top_k) or self.top_k < 0:
            raise ValueError(
                f"{function}: top_k is {self.top_k}, expected a number of tokens, or 0 for all."
            )
        if not 0 < float(self.top_p) <= 1:
            raise ValueError(
                f"{function}: top_p is {self.top_p}, expected more than 0 and at most 1 (1 for "
                "all)."
            )
        if not 0 <= float(self.min_p) <= 1:
            raise ValueError(
                f"{function}: min_p is {self.min_p}, expected at least 0 (0 for all) and at most 1."
            )
        temperature, top_p, min_p = map(np.float32, (self.temperature, self.top_p, self.min_p))
        return Drawing(temperature, np.int32(self.top_k), top_p, min_p, self.penalties)


def as_tokens(name: str, prompt: Any, *, most_dims: int = 1) -> np.ndarray:
    """Converts a prompt to an array of tokens.

    Args:
      name: What the caller calls the prompt, for error messages.
      prompt: `int[P]`, or with `most_dims=2` also `int[B, P]`.
      most_dims: The most dimensions that the array may have.

    Raises:
      ValueError: The prompt has another number of dimensions, or no token.
      TypeError: The prompt has other values than integers.
    """
    tokens = np.asarray(prompt)
    if not 1 <= tokens.ndim <= most_dims or not tokens.size:
        shapes = "[tokens]" if most_dims == 1 else "[tokens] or [prompts, tokens]"
        raise ValueError(
            f"{name} has the shape {tokens.shape}, expected {shapes} with at least one token; "
            "begin with the BOS token."
        )
    if not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(
            f"{name} is of {tokens.dtype}, expected integers, which a tokenizer makes of a text."
        )
    return tokens


def row_keys(key: jax.Array, rows: np.ndarray, samples: int = 1) -> jax.Array:
    """Derives the keys `key[B]` of rows from the key of a call and the rows' numbers `int[B]`.

    With several `samples` of each prompt, row `r` is sample `r % samples` of prompt
    `r // samples`. The key of a prompt's sample 0 does not depend on `samples`.
    """
    fold = jax.vmap(jax.random.fold_in)
    keys: jax.Array = jax.vmap(jax.random.fold_in, (None, 0))(
        key, (rows // samples).astype(np.uint32)
    )
    if samples == 1:
        return keys
    number = (rows % samples).astype(np.uint32)
    data = jnp.where(
        (number > 0)[:, None],
        jax.random.key_data(fold(keys, number)),
        jax.random.key_data(keys),
    )
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


def draw_tokens(
    logits: jax.Array, keys: jax.Array, position: jax.Array, drawing: Drawing
) -> jax.Array:
    """Draws the next token of each row.

    Args:
      logits: `float32[B, V]`.
      keys: `key[B]`, a key for each row.
      position: `int32[B]`, the position of the token. It is folded into the key, so that each
        position of a row gets its own noise.
      drawing: The settings, from `Drawing.as_arrays`.

    Returns:
      `int32[B]`.

    Communication:
      None.
    """

    def draw() -> jax.Array:
        scaled = logits / jnp.where(drawing.temperature > 0, drawing.temperature, 1)
        cuts = (drawing.top_k > 0) | (drawing.top_p < 1) | (drawing.min_p > 0)
        kept = jax.lax.cond(cuts, lambda: keep_likeliest(scaled, drawing), lambda: scaled)
        own = jax.vmap(jax.random.fold_in)(keys, position)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(own)
        return jnp.argmax(kept + noise, axis=-1)

    chosen = jax.lax.cond(drawing.temperature > 0, draw, lambda: jnp.argmax(logits, axis=-1))
    return chosen.astype(jnp.int32)


def keep_likeliest(logits: jax.Array, drawing: Drawing) -> jax.Array:
    """Sets logits `[B, V]` to -inf for the tokens that `top_k`, `top_p` or `min_p` excludes.

    Tokens with the same logit as the least likely kept token are kept too.
    """
    ordered = -jnp.sort(-logits, axis=-1)
    rank = jnp.arange(logits.shape[1])[None]
    is_kept = rank < jnp.where(drawing.top_k > 0, drawing.top_k, logits.shape[1])
    probability = jax.nn.softmax(jnp.where(is_kept, ordered, -jnp.inf), axis=-1)
    likelier = jnp.cumsum(probability, axis=-1) - probability
    # The likeliest token is always kept, even if `top_p` is rounded to 0.
    is_kept &= (likelier < drawing.top_p) | (drawing.top_p >= 1) | (rank == 0)
    least = jnp.min(jnp.where(is_kept, ordered, jnp.inf), axis=-1, keepdims=True)
    least = jnp.maximum(least, ordered[:, :1] + jnp.log(drawing.min_p))
    return jnp.where(logits >= least, logits, -jnp.inf)
