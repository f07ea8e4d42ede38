"""Linen models written for one device: the strategies shard them from outside."""

from manualpar.models.classifier import Classifier
from manualpar.models.transformer import Transformer
from manualpar.models.transformer_fields import flops_per_token

__all__ = ["Classifier", "Transformer", "flops_per_token"]
