"""Pipelines: a model's layers in stages on different devices, and schedules of microbatches."""

from manualpar.layers.pipeline.stages import Pipeline

__all__ = ["Pipeline"]
