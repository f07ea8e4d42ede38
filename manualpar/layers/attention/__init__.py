"""Attention on one device and over split sequences, and the kernels that compute it."""

from manualpar.layers.attention.blockwise_attention import Scoring
from manualpar.layers.attention.causal_attention import (
    ATTENTION_KINDS,
    WITH_SINKS,
    AttentionKind,
    Device,
    attention,
    best_kind,
    planned_device,
)

__all__ = [
    "ATTENTION_KINDS",
    "WITH_SINKS",
    "AttentionKind",
    "Device",
    "Scoring",
    "attention",
    "best_kind",
    "planned_device",
]
