"""Pipelines: a model's layers in stages on different devices, and schedules of microbatches."""
