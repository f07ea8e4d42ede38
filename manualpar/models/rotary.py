"""Rotary positions (RoPE): queries and keys are rotated by angles that grow with the position.

So attention depends only on differences of positions (Su et al., https://arxiv.org/abs/2104.09864).
`RotaryScaling` slows rotations down, so that a model can attend over longer sequences than in its
pretraining.

Symbols: `B` examples, `S` positions, `N` heads, `H` features of a head.
"""

import dataclasses
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from manualpar.layers.field_groups import FieldGroup, config_field, refuse, refuse_unknown

RotaryKind = Literal["", "linear", "llama3"]
ROTARY_KINDS: tuple[RotaryKind, ...] = get_args(RotaryKind)


@dataclasses.dataclass(frozen=True, repr=False)
class RotaryScaling(FieldGroup):
    """Slows down the rotation of pairs of features.

    Attributes:
      kind: Which pairs slow down: none (`""`), all (`"linear"`), or the pairs with few turns
        (`"llama3"`). `"linear"` slows all pairs down by `factor` (Chen et al.,
        https://arxiv.org/abs/2306.15595). `"llama3"` counts the turns of a pair in
        `original_length` positions. It slows a pair with less than `low_factor` turns down by
        `factor`, a pair with more than `high_factor` turns not at all, and pairs between these
        limits in proportion (Dubey et al., https://arxiv.org/abs/2407.21783).
      factor: The largest ratio of the old to the new frequency.
      low_factor: The number of turns below which pairs are slowed by `factor`, for `"llama3"`.
      high_factor: The number of turns, more than `low_factor`, above which pairs are not slowed,
        for `"llama3"`.
      original_length: The length of the sequences in pretraining, only for `"llama3"`.
    """

    kind: RotaryKind = config_field("", "rope_scaling", choices=ROTARY_KINDS)
    factor: float = config_field(1.0, "rope_factor", 1)
    low_factor: float = config_field(1.0, "rope_low_factor", 0)
    high_factor: float = config_field(4.0, "rope_high_factor", 0)
    original_length: int = config_field(8192, "rope_original_length", 1)

    def __post_init__(self) -> None:
        refuse_unknown(self, "kind", ROTARY_KINDS)
        if not self.factor >= 1:
            refuse(self, "factor", "at least 1, because rotations become slower by this factor")
        if not self.kind and self.factor != 1:
            refuse(self, "factor", "1 without kind")
        if not 0 < self.low_factor < self.high_factor:
            refuse(self, "low_factor", f"between 0 and high_factor={self.high_factor}")
        if self.original_length < 1:
            refuse(self, "original_length", "at least 1, such as 8192")

    def __call__(self, frequencies: jax.Array) -> jax.Array:
        """Scales frequencies, which are in radians per position."""
        if not self.kind:
            return frequencies
        slowest = frequencies / self.factor
        if self.kind == "linear":
            return slowest
        turns = self.original_length * frequencies / (2 * math.pi)
        between = (turns - self.low_factor) / (self.high_factor - self.low_factor)
        kept = jnp.clip(between, 0.0, 1.0)
        return kept * frequencies + (1 - kept) * slowest


NO_SCALING = RotaryScaling()


@dataclasses.dataclass(frozen=True, repr=False)
class Rotary(FieldGroup):
    """The rotary positions of a model.

    Attributes:
      base: The base of the rotary frequencies, see `rotary_angles`.
      local_base: The base in the layers with a window, if layers are of two kinds; 0 for the base
        of the other layers.
      scaling: Slows rotations down. With layers of two kinds only the layers that see all positions
        are scaled, unless `scales_local` is set.
      interleaved: Whether feature `2 i` is paired with `2 i + 1`, and not `i` with `i + H/2`.
      scales_local: Whether `scaling` slows the layers with a window down too, if layers are of two
        kinds.
    """

    base: float = config_field(10_000.0, "rope_base", 1, required=True)
    local_base: float = config_field(0.0, "local_rope_base", 0)
    scaling: RotaryScaling = NO_SCALING
    interleaved: bool = config_field(False, "rotary_interleaved")
    scales_local: bool = config_field(False, "rope_scales_local")

    def __post_init__(self) -> None:
        if not self.base > 1:
            refuse(self, "base", "more than 1, such as 10000")
        if self.local_base and not self.local_base > 1:
            refuse(self, "local_base", "more than 1, or 0 for base")


def rotary_angles(
    positions: jax.Array,
    head_size: int,
    *,
    base: float,
    scaling: RotaryScaling = NO_SCALING,
) -> jax.Array:
    """Computes the angles, in radians, by which rotary positions turn pairs of features.

    The angles are `float32[S, H/2]`: `s * base ** (-2 i / H)` at position `s` for pair `i`, before
    `scaling`. The positions are `int32[S]`, or `[B, S]` for angles `[B, S, H/2]`.
    """
    frequencies = base ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    frequencies = scaling(frequencies)
    return jnp.multiply.outer(positions.astype(jnp.float32), frequencies)


def rotate(
    x: jax.Array, angles: jax.Array, *, scale: float = 1.0, rotary: Rotary = Rotary()
) -> jax.Array:
    """Turns pairs of the features of `[B, S, N, H]`, queries or keys, by `rotary_angles`.

    So the product of a query and a key depends only on the difference of their positions. Feature
    `i` is paired with `i + H/2`, as in GPT-NeoX and LLaMA's public checkpoints. The result is
    computed in float32, multiplied by `scale`, and cast to the dtype of `x`. If interleaved,
    feature `2 i` is paired with `2 i + 1`, and the result has the turned pairs as `i` and
    `i + H/2`. Queries and keys are reordered alike, so that their products are the same.
    """
    angles = angles.reshape(-1, angles.shape[-2], 1, angles.shape[-1])
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    if scale != 1.0:
        sin, cos = scale * sin, scale * cos
    x32 = x.astype(jnp.float32)
    first, second = (
        (x32[..., ::2], x32[..., 1::2]) if rotary.interleaved else jnp.split(x32, 2, axis=-1)
    )
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
