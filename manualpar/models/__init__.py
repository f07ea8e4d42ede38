"""Linen models written for one device: the strategies shard them from outside."""

from manualpar.models.classifier import Classifier

__all__ = ["Classifier"]
