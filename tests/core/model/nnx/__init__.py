"""Models in flax's NNX."""
