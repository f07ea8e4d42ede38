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

from manualpar.layers.model_fields import FieldGroup, config_field, refuse, refuse_unknown

RotaryKind = Literal["", "linear", "llama3", "dynamic", "yarn", "longrope", "proportional"]
ROTARY_KINDS: tuple[RotaryKind, ...] = get_args(RotaryKind)


@dataclasses.dataclass(frozen=True, repr=False)
class RotaryScaling(FieldGroup):
    """Slows down the rotation of pairs of features.

    Attributes:
      kind: Which pairs slow down, and by how much; `""` for none. `"linear"` slows all pairs down
        by `factor` (Chen et al., https://arxiv.org/abs/2306.15595). `"llama3"` counts the turns of
        a pair in `original_length` positions. It slows a pair with less than `low_factor` turns
        down by `factor`, a pair with more than `high_factor` turns not at all, and pairs between
        these limits in proportion to their turns (Dubey et al., https://arxiv.org/abs/2407.21783).
        `"yarn"` has the same limits, and slows pairs between them in proportion to their index
        (Peng et al., https://arxiv.org/abs/2309.00071). `"dynamic"` enlarges the base in sequences
        longer than `original_length`. `"longrope"` slows each pair down by its own factor, which is
        in `short_factors`, or in `long_factors` for sequences longer than `original_length` (Ding
        et al., https://arxiv.org/abs/2402.13753). `"proportional"` slows as `"linear"` does; with
        `Rotary.features` the frequencies are those of a head whose features are all rotated.
      factor: The ratio of the longest sequence to the sequences in pretraining, or of the old to
        the new frequency.
      low_factor: The number of turns below which pairs are slowed by `factor`, for `"llama3"` and
        `"yarn"`.
      high_factor: The number of turns, more than `low_factor`, above which pairs are not slowed,
        for `"llama3"`, where both may be equal, and `"yarn"`, whose paper has 32.
      original_length: The length of the sequences in pretraining, for all kinds except `"linear"`.
      attention_factor: The factor of rotated queries and of rotated keys, for `"yarn"` and
        `"longrope"`; 0 for the factor that the papers compute from `factor`.
      truncate: Whether `"yarn"` rounds its limits to whole pairs.
      short_factors: The factor of each pair in short sequences, for `"longrope"`.
      long_factors: The factor of each pair in long sequences, for `"longrope"`.
    """

    kind: RotaryKind = config_field("", "rope_scaling", choices=ROTARY_KINDS)
    factor: float = config_field(1.0, "rope_factor", 1)
    low_factor: float = config_field(1.0, "rope_low_factor", 0)
    high_factor: float = config_field(4.0, "rope_high_factor", 0)
    original_length: int = config_field(8192, "rope_original_length", 1)
    attention_factor: float = config_field(0.0, "rope_attention_factor", 0)
    truncate: bool = config_field(True, "rope_truncate")
    short_factors: tuple[float, ...] = config_field((), "rope_short_factors")
    long_factors: tuple[float, ...] = config_field((), "rope_long_factors")

    def __post_init__(self) -> None:
        refuse_unknown(self, "kind", ROTARY_KINDS)
        if not self.factor >= 1:
            refuse(self, "factor", "at least 1, because rotations become slower by this factor")
        if not self.kind and self.factor != 1:
            refuse(self, "factor", "1 without kind")
        # Without pairs between the limits both may be equal, as in Llama 4 Scout.
        are_equal = self.kind == "llama3" and self.low_factor == self.high_factor
        if not 0 < self.low_factor < self.high_factor and not (are_equal and self.low_factor > 0):
            refuse(self, "low_factor", f"between 0 and high_factor={self.high_factor}")
        if self.original_length < 1:
            refuse(self, "original_length", "at least 1, such as 8192")
        if not self.attention_factor >= 0:
            refuse(self, "attention_factor", "more than 0, or 0 for the factor of the papers")
        if self.attention_factor and self.kind not in ("yarn", "longrope"):
            refuse(self, "attention_factor", "0, because only 'yarn' and 'longrope' have one")
        for field in ("short_factors", "long_factors"):
            factors = getattr(self, field)
            if (self.kind == "longrope") != bool(factors) or not all(x > 0 for x in factors):
                expected = "a number above 0 for each pair" if self.kind == "longrope" else "()"
                refuse(self, field, f"{expected} with kind={self.kind!r}")

    @property
    def needs_length(self) -> bool:
        """Whether frequencies depend on the length of a sequence."""
        return self.kind in ("dynamic", "longrope")

    @property
    def amplitude(self) -> float:
        """The factor of rotated queries and of rotated keys."""
        if self.attention_factor or self.kind not in ("yarn", "longrope") or self.factor == 1:
            return self.attention_factor or 1.0
        if self.kind == "yarn":
            return 0.1 * math.log(self.factor) + 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))

    def frequencies(
        self, base: float, size: int, *, length: int | jax.Array | None = None
    ) -> jax.Array:
        """Returns the frequencies, in radians per position, of `size / 2` pairs of features.

        They are `float32[size/2]`, or `float32[B, size/2]` if they depend on the lengths of `B`
        sequences, `int32[B]`. `None` stands for a length that is at most `original_length`.
        """
        if self.needs_length and isinstance(length, jax.Array) and length.ndim == 1:
            each: jax.Array = jax.vmap(lambda own: self.frequencies(base, size, length=own))(length)
            return each
        exponents = jnp.arange(0, size, 2, dtype=jnp.float32) / size
        length = self.original_length if length is None else length
        if self.kind == "dynamic":
            ratio = jnp.maximum(jnp.asarray(length, jnp.float32) / self.original_length, 1.0)
            grown = (self.factor * ratio - (self.factor - 1)) ** (size / (size - 2))
            return (base * grown) ** -exponents
        frequencies = base**-exponents
        if self.kind == "longrope":
            is_long = jnp.asarray(length) > self.original_length
            short, long = jnp.array(self.short_factors), jnp.array(self.long_factors)
            return frequencies / jnp.where(is_long, long, short)
        if not self.kind:
            return frequencies
        slowest = frequencies / self.factor
        if self.kind in ("linear", "proportional"):
            return slowest
        if self.kind == "yarn":
            kept = 1.0 - self._slowed_share(base, size)
        else:
            turns = self.original_length * frequencies / (2 * math.pi)
            width = max(self.high_factor - self.low_factor, 1e-9)
            between = (turns - self.low_factor) / width
            kept = jnp.clip(between, 0.0, 1.0)
        return kept * frequencies + (1 - kept) * slowest

    def _slowed_share(self, base: float, size: int) -> jax.Array:
        """Returns how far `"yarn"` slows each pair down: from 0, not at all, to 1."""

        def index_of(turns: float) -> float:
            return (
                size * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(base) / 2
            )

        first, last = index_of(self.high_factor), index_of(self.low_factor)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        last = first + 0.001 if first == last else last
        return jnp.clip((jnp.arange(size // 2) - first) / (last - first), 0.0, 1.0)


NO_SCALING = RotaryScaling()


@dataclasses.dataclass(frozen=True, repr=False)
class Rotary(FieldGroup):
    """The rotary positions of a model.

    Attributes:
      base: The base of the rotary frequencies, see `rotary_angles`.
      local_base: The base in the layers with a window, if layers are of two kinds; 0 for the base
        of the other layers.
      features: The number of features at the beginning of each head that are rotated, an even
        number; 0 for all.
      learned: The length of a table of learned positions, which are added to the embedding in place
        of rotations; 0 for rotations. Positions count from the beginning of the sequence, also in
        later documents of the sequence.
      interleaved: Whether features `2 i` and `2 i + 1` are a pair, and not `i` and `i + H/2`.
      scaling: Slows rotations down. With layers of two kinds only the layers that see all positions
        are scaled, unless `scales_local` is set.
      scales_local: Whether `scaling` slows the layers with a window down too, if layers are of two
        kinds.
    """

    base: float = config_field(10_000.0, "rope_base", 1, required=True)
    local_base: float = config_field(0.0, "local_rope_base", 0)
    features: int = config_field(0, "rotary_features", 0)
    learned: int = config_field(0, "learned_positions", 0)
    interleaved: bool = config_field(False, "rotary_interleaved")
    scaling: RotaryScaling = NO_SCALING
    scales_local: bool = config_field(False, "rope_scales_local")

    def __post_init__(self) -> None:
        if not self.base > 1:
            refuse(self, "base", "more than 1, such as 10000")
        if self.local_base and not self.local_base > 1:
            refuse(self, "local_base", "more than 1, or 0 for base")
        if self.features < 0 or self.features % 2:
            refuse(self, "features", "an even number, or 0 for all features of a head")


NO_ROTARY = Rotary()


def rotary_angles(
    positions: jax.Array,
    head_size: int,
    *,
    base: float,
    scaling: RotaryScaling = NO_SCALING,
    features: int = 0,
    length: int | jax.Array | None = None,
) -> jax.Array:
    """Computes the angles, in radians, by which rotary positions turn pairs of features.

    The angles are `float32[S, R/2]` for the `R` features that are rotated: `s * base ** (-2 i / R)`
    at position `s` for pair `i`, before `scaling`.

    Args:
      positions: `int32[S]`, or `int32[B, S]` for angles `[B, S, R/2]`.
      head_size: The features of a head, `H`.
      features: See `Rotary`.
      length: The number of positions of the sequence, or `int32[B]` for each sequence. Only some
        kinds of scaling need it.
    """
    size = features or head_size
    if scaling.kind == "proportional":
        frequencies = scaling.frequencies(base, head_size)
        frequencies = jnp.where(jnp.arange(head_size // 2) < size // 2, frequencies, 0.0)
    else:
        frequencies = scaling.frequencies(base, size, length=length)
    places = positions.astype(jnp.float32)
    if frequencies.ndim == 1:
        return jnp.multiply.outer(places, frequencies)
    places = places if places.ndim == 2 else places[None]
    return places[..., None] * frequencies[:, None]


def rotate(
    x: jax.Array, angles: jax.Array, *, scale: float = 1.0, rotary: Rotary = NO_ROTARY
) -> jax.Array:
    """Turns pairs of the features of `[B, S, N, H]`, queries or keys, by `rotary_angles`.

    So the product of a query and a key depends only on the difference of their positions. Of the
    `R` features that are rotated, feature `i` is paired with `i + R/2`, as in GPT-NeoX and LLaMA's
    public checkpoints, unless they are interleaved. The result is computed in float32, multiplied
    by `scale`, and cast to the dtype of `x`. Rotated features are also multiplied by the scaling's
    `amplitude`.
    """
    angles = angles.reshape(-1, angles.shape[-2], 1, angles.shape[-1])
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    if (factor := scale * rotary.scaling.amplitude) != 1.0:
        sin, cos = factor * sin, factor * cos
    size = 2 * angles.shape[-1]
    turning, rest = x[..., :size].astype(jnp.float32), x[..., size:]
    if rotary.interleaved:
        first, second = turning[..., ::2], turning[..., 1::2]
    else:
        first, second = jnp.split(turning, 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    if rotary.interleaved:
        turned = [jnp.stack(turned, axis=-1).reshape(turning.shape)]
    if rest.shape[-1]:
        turned.append(scaled(rest, scale).astype(jnp.float32))
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def scaled(x: jax.Array, scale: float) -> jax.Array:
    """Multiplies in float32, and casts to the dtype of `x`."""
    return x if scale == 1.0 else (x.astype(jnp.float32) * scale).astype(x.dtype)
