"""A config for `--config` that has something happen to the run, as the variable `FAULTS` says.

`configs/fsdp.py` or `FAULTS["config"]` is what is run. `FAULTS` is a JSON object with any of

    kill      a step after which the process kills itself, before its checkpoint is saved
    fail      a process and a step after which it raises an exception
    hang      a process and a step after which its main thread does nothing any more
    slow      a step from which on each takes a second longer
    seconds   how much longer, instead of a second

All processes of a cluster have the same environment, so a fault that is one process's names it.
"""

import json
import os
import signal
import time
from pathlib import Path

import ml_collections

from manualpar.system.cluster import Cluster
from manualpar.training.config import load_config

CONFIGS = Path(__file__).parents[2] / "configs"


def get_config() -> ml_collections.ConfigDict:
    faults = json.loads(os.environ.get("FAULTS", "{}"))
    should_stop = Cluster.should_stop

    def disturbed(self: Cluster, step: int) -> bool:
        if step == faults.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if [self.process_id, step] == faults.get("fail"):
            raise ValueError("a mistake of this process")
        if [self.process_id, step] == faults.get("hang"):
            time.sleep(10_000)
        if step >= faults.get("slow", step + 1):
            time.sleep(faults.get("seconds", 1.0))
        return should_stop(self, step)

    Cluster.should_stop = disturbed  # type: ignore[method-assign]
    return load_config(CONFIGS / faults.get("config", "fsdp.py"))
