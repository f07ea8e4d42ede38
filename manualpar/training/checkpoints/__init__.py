"""Saves checkpoints in the background, checks them, and restores them on any mesh or strategy."""

from manualpar.training.checkpoints.compatibility import check_resumable
from manualpar.training.checkpoints.saved_state import CheckpointError
from manualpar.training.checkpoints.store import Checkpoints, Restored

__all__ = ["CheckpointError", "Checkpoints", "Restored", "check_resumable"]
