"""Checkpoints: saved in the background, checked, restored on any mesh under any strategy."""

from manualpar.training.checkpoints.compatibility import check_resumable
from manualpar.training.checkpoints.failures import CheckpointError
from manualpar.training.checkpoints.store import Checkpoints, Restored

__all__ = ["CheckpointError", "Checkpoints", "Restored", "check_resumable"]
