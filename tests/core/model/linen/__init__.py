"""Models in flax's Linen."""
