"""Runs with several processes: connects them, stops them together, and detects a lost process."""

from manualpar.system.cluster.cluster import (
    FAILED_EXIT_CODE,
    LOST_PROCESS_EXIT_CODE,
    TERMINATED_EXIT_CODE,
    Cluster,
)
from manualpar.system.cluster.facts import DisagreementError
from manualpar.system.cluster.failure_detector import UNWATCHED
from manualpar.system.cluster.startup import initialize

__all__ = [
    "FAILED_EXIT_CODE",
    "LOST_PROCESS_EXIT_CODE",
    "TERMINATED_EXIT_CODE",
    "UNWATCHED",
    "Cluster",
    "DisagreementError",
    "initialize",
]
