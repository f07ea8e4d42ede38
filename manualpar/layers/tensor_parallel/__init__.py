"""Tensor parallelism, by a plan of its parameters, of a model written for one device."""
