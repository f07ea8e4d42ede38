"""Tensor parallelism for a model written for one device, by a plan for its parameters."""
