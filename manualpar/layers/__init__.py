"""Layers that compute with a part of their parameters, and send what makes the result whole."""
