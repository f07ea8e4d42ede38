"""Tensor parallelism of a model that does not know of it, by a plan of its parameters."""
