"""Several processes that train together: how they meet, stop together, and notice who is gone."""

from manualpar.cluster.cluster import Cluster
from manualpar.cluster.exit_codes import (
    FAILED_EXIT_CODE,
    LOST_PROCESS_EXIT_CODE,
    TERMINATED_EXIT_CODE,
)
from manualpar.cluster.facts import DisagreementError
from manualpar.cluster.startup import initialize

__all__ = [
    "FAILED_EXIT_CODE",
    "LOST_PROCESS_EXIT_CODE",
    "TERMINATED_EXIT_CODE",
    "Cluster",
    "DisagreementError",
    "initialize",
]
