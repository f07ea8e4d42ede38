"""Layers that compute with a part of their parameters."""
