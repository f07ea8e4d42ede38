"""Attention on one device and over split sequences, and the kernels that compute it."""

from manualpar.layers.attention.causal_attention import ATTENTION_KINDS, AttentionKind, attention

__all__ = ["ATTENTION_KINDS", "AttentionKind", "attention"]
