"""Layers that compute with a part of their parameters, and send what makes the result whole."""

from manualpar.layers.boundaries import enter, leave
from manualpar.layers.dense import SplitDense

__all__ = ["SplitDense", "enter", "leave"]
