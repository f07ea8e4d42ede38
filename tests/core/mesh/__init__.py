"""Axes, meshes, and how batches and keys are divided."""
