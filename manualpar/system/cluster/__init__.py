"""Runs with several processes: connects them, stops them together, and detects a lost process."""

from manualpar.system.cluster.cluster import (
    FAILED_EXIT_CODE,
    LOST_PROCESS_EXIT_CODE,
    TERMINATED_EXIT_CODE,
    Cluster,
)
from manualpar.system.cluster.facts import DisagreementError
from manualpar.system.cluster.failure_detector import UNWATCHED
from manualpar.system.cluster.messages import NotMetError
from manualpar.system.cluster.preflight import PreflightError
from manualpar.system.cluster.startup import WAIT_SECONDS, examine, initialize

__all__ = [
    "FAILED_EXIT_CODE",
    "LOST_PROCESS_EXIT_CODE",
    "TERMINATED_EXIT_CODE",
    "UNWATCHED",
    "WAIT_SECONDS",
    "Cluster",
    "DisagreementError",
    "NotMetError",
    "PreflightError",
    "examine",
    "initialize",
]
