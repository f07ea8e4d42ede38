"""Samples text from any causal language model, without a cache.

Sampling needs only a model's `apply`, and the parameters may be sharded in any way.
`manualpar.models.generation.Generator` caches keys and values, so it computes less for a token. But
it needs a `Transformer`, and a program of mode manual without stages and context axes.

The model sees a window of fixed length: the latest tokens, followed by zeros, which a causal model
ignores. When the window is full, each new token removes the oldest token. So one program is
compiled, and draws all tokens in a loop.

Invariant: until the window is full, `Generator.generate` draws the same tokens with the same key,
except where rounding errors change the choice.

Symbols: `B` prompts, `P` tokens of a prompt, `S` positions of the window, `V` the vocabulary, `T`
tokens drawn.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from manualpar.core.mesh.rng import typed_key
from manualpar.models.generation.drawing import Drawing, as_tokens, draw_tokens, row_keys


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

    Raises:
      TypeError: The prompt has another dtype, or `rng` is not a key.
      ValueError: The prompt has another shape, or a number is out of range.

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
