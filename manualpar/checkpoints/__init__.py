"""Checkpoints: saved in the background, checked, restored on any mesh under any strategy."""

from manualpar.checkpoints.compatibility import check_resumable
from manualpar.checkpoints.failures import CheckpointError
from manualpar.checkpoints.store import Checkpoints, Restored

__all__ = ["CheckpointError", "Checkpoints", "Restored", "check_resumable"]
