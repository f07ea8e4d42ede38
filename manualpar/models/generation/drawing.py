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

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from manualpar.core.mesh.splitting import typed_key

# -------------------------------------------------------------------------------------------------
# Changes logits by the tokens that a row contains, and by a bias for each token.
#
# The steps are those of transformers and of OpenAI's interface, in this order:
#
# 1. The bias of each token is added to its logit.
# 2. The repetition penalty (Keskar et al., https://arxiv.org/abs/1909.05858) divides the positive
#    logits, and multiplies the negative logits, of all tokens of the prompt and the answer.
# 3. The frequency penalty is subtracted from a token's logit for each time that the answer contains
#    it. The presence penalty is subtracted once if the answer contains it.
#
# Symbols: `B` rows, `S` positions of a prompt, `V` tokens of the vocabulary.


# Settings become float32, in which a larger number would be infinite.
LARGEST_FLOAT = float(np.finfo(np.float32).max)


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
    """Returns the settings as arrays; `None` if they change no logit."""
    if not 1 / LARGEST_FLOAT <= repetition <= LARGEST_FLOAT:
        raise ValueError(
            f"generate: repetition_penalty is {repetition!s:.100}, expected a finite number above "
            "0 (1 for none)."
        )
    for name, value in (("frequency_penalty", frequency), ("presence_penalty", presence)):
        if not abs(value) <= LARGEST_FLOAT:
            raise ValueError(
                f"generate: {name} is {value!s:.100}, expected a finite number (0 for none)."
            )
    biases = np.zeros(vocab_size, np.float32)
    for token, value in (bias or {}).items():
        if not 0 <= int(token) < vocab_size:
            raise ValueError(
                f"generate: logit_bias has the token {token!s:.100}, expected 0 to "
                f"{vocab_size - 1}."
            )
        if not abs(value) <= LARGEST_FLOAT and value != -math.inf:
            raise ValueError(
                f"generate: logit_bias adds {value!s:.100} to the token {token}, expected a "
                "number, or -inf to exclude the token."
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


def note(history: History, token: jax.Array) -> History:
    """Adds a token to each row's answer, `int32[B]`."""
    counts = history.in_answer.at[jnp.arange(len(token)), token].add(1)
    return history._replace(in_answer=counts)


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


# -------------------------------------------------------------------------------------------------


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
        """Converts the fields to scalar arrays of fixed dtypes."""
        if not 0 <= self.temperature <= LARGEST_FLOAT:
            raise ValueError(
                f"{function}: temperature is {self.temperature!s:.100}, expected a finite number, "
                "at least 0 (0 takes the likeliest token)."
            )
        if not 0 <= self.top_k < 2**31 or self.top_k != int(self.top_k):
            raise ValueError(
                f"{function}: top_k is {self.top_k!s:.100}, expected a number of tokens, or 0 for "
                "all."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"{function}: top_p is {self.top_p!s:.100}, expected more than 0 and at most 1 "
                "(1 for all)."
            )
        if not 0 <= self.min_p <= 1:
            raise ValueError(
                f"{function}: min_p is {self.min_p!s:.100}, expected at least 0 (0 for all) and at "
                "most 1."
            )
        temperature, top_p, min_p = map(np.float32, (self.temperature, self.top_p, self.min_p))
        return Drawing(temperature, np.int32(self.top_k), top_p, min_p, self.penalties)


def as_tokens(name: str, prompt: Any, *, most_dims: int = 1) -> np.ndarray:
    """Converts a prompt to an array of tokens.

    Args:
      prompt: `int[P]`, or with `most_dims=2` also `int[B, P]`.
      most_dims: The most dimensions that the array may have.
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


# -------------------------------------------------------------------------------------------------
# Samples text from any causal language model, without a cache.
#
# Sampling needs only a model's `apply`, and the parameters may be sharded in any way.
# `manualpar.models.generation.Generator` caches keys and values, so it computes less for a token.
# But it needs a `Transformer`, and a program of mode manual without stages and context axes.
#
# The model sees a window of fixed length: the latest tokens, followed by zeros, which a causal
# model ignores. When the window is full, each new token removes the oldest token. So one program
# is compiled, and draws all tokens in a loop.
#
# Invariant: until the window is full, `Generator.generate` draws the same tokens with the same
# key, except where rounding errors change the choice.
#
# Symbols: `B` prompts, `P` tokens of a prompt, `S` positions of the window, `V` the vocabulary,
# `T` tokens drawn.


def sample_tokens(
    apply_fn: Callable[..., jax.Array],
    params: Any,
    prompt: ArrayLike,
    *,
    num_tokens: int,
    sequence_length: int,
    temperature: float,
    rng: jax.Array,
    collections: Mapping[str, Any] | None = None,
) -> jax.Array:
    """Continues prompts.

    Args:
      apply_fn: The `apply` of a causal model, which returns logits `[B, S, V]` for tokens `[B, S]`,
        such as `state.apply_fn`.
      params: The model's parameters; global arrays may be sharded in any way, but not padded.
      prompt: `int[P]`, or `int[B, P]` for several prompts of one length; the same in every process.
        The model sees only the end of a prompt that is longer than the window.
      num_tokens: How many tokens to draw, `T`.
      sequence_length: The length of the window, `S`; use the sequence length of the training.
      temperature: The divisor of the logits; 0 takes the likeliest token.
      rng: A key; the same key draws the same tokens.
      collections: The other collections that the model reads, such as `state.collections`.

    Returns:
      `int32[T]` or `int32[B, T]`, the tokens after the prompt; replicated on all devices.

    Communication:
      The collectives that XLA derives from the shardings of the parameters.
    """
    tokens = as_tokens("sample_tokens: prompt", prompt, most_dims=2)
    for name, value in (("num_tokens", num_tokens), ("sequence_length", sequence_length)):
        if value < 1:
            raise ValueError(f"sample_tokens: {name} is {value}, expected at least 1.")
    drawing = Drawing(temperature).as_arrays("sample_tokens")
    # NumPy arrays, which jax moves to the devices of the parameters.
    prompt_BP = np.atleast_2d(tokens)[:, -sequence_length:].astype(np.int32)
    window_BS = np.zeros((len(prompt_BP), sequence_length), np.int32)
    window_BS[:, : prompt_BP.shape[1]] = prompt_BP
    tokens_BT = _sample(
        {"params": params, **(collections or {})},
        window_BS,
        np.int32(prompt_BP.shape[1]),
        typed_key("sample_tokens", rng),
        drawing,
        apply_fn=apply_fn,
        num_tokens=num_tokens,
        replicated=_replicated(params),
    )
    return tokens_BT if tokens.ndim == 2 else tokens_BT[0]


@functools.partial(jax.jit, static_argnames=("apply_fn", "num_tokens", "replicated"))
def _sample(
    variables: Any,
    window_BS: jax.Array,
    length: jax.Array,
    rng: jax.Array,
    drawing: Drawing,
    *,
    apply_fn: Callable[..., jax.Array],
    num_tokens: int,
    replicated: NamedSharding | None,
) -> jax.Array:
    sequence_length = window_BS.shape[1]
    keys_B = row_keys(rng, np.arange(len(window_BS)))

    def draw(carry: tuple[jax.Array, jax.Array], position: jax.Array) -> Any:
        window_BS, length = carry
        logits_BSV = apply_fn(variables, window_BS, train=False)
        logits_BV = jax.lax.dynamic_index_in_dim(logits_BSV, length - 1, axis=1, keepdims=False)
        position_B = jnp.full(len(window_BS), position)
        token_B = draw_tokens(logits_BV, keys_B, position_B, drawing)
        is_full = length == sequence_length
        window_BS = jnp.where(is_full, jnp.roll(window_BS, -1, axis=1), window_BS)
        index = jnp.where(is_full, sequence_length - 1, length)
        window_BS = jax.lax.dynamic_update_index_in_dim(window_BS, token_B, index, axis=1)
        return (window_BS, index + 1), token_B

    # Positions go on beyond the window, because each new token needs its own random noise.
    positions_T = length + jnp.arange(num_tokens, dtype=jnp.int32)
    tokens_TB = jax.lax.scan(draw, (window_BS, length), positions_T)[1]
    if replicated is None:
        return tokens_TB.T
    # Replicated, so that every process has all tokens.
    return jax.lax.with_sharding_constraint(tokens_TB.T, replicated)


def _replicated(params: Any) -> NamedSharding | None:
    """Returns a sharding replicated over the parameters' devices; `None` for one device."""
    for x in jax.tree.leaves(params):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
    return None
