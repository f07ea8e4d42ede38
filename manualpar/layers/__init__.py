"""Mesh-aware Linen layers."""

from manualpar.layers.prefetch import prefetched_scan

__all__ = ["prefetched_scan"]
