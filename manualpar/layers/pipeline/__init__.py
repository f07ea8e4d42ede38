"""Pipelines: a model's layers in stages on different devices, and schedules of microbatches."""

from manualpar.layers.pipeline.stages import KEEPS, SCHEDULES, Pipeline

__all__ = ["KEEPS", "SCHEDULES", "Pipeline"]
