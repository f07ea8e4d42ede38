"""One process of a run of `benchmarks.process_faults`: trains, and may cause a fault in itself.

The environment variable `FAULTS` is a JSON object. Its field `process` is the number of the process
with the fault. `do` is the action of this process when it enters the phase `phase` for the `at`-th
time, or when it starts if `phase` is empty. `FAULTS_FLAGS` is a JSON object with the additional
flags of each process, by its number.
"""

import ctypes
import importlib.metadata
import json
import os
import resource
import runpy
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

LATE_SECONDS = 4.0
HANGS = "this process hangs now"


def act(what: str, cluster: Any = None) -> None:
    """Performs the action `what`; `cluster` is this process's connection to the others."""
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "raise":
        raise RuntimeError("a mistake of this process\nin two lines")
    elif what == "hang":
        print(HANGS, flush=True)
        time.sleep(10_000)
    elif what == "hang holding Python's lock":
        ctypes.PyDLL(None).sleep(10_000)  # Unlike CDLL, PyDLL blocks other threads.
    elif what == "exit with code 0":
        os._exit(0)
    elif what == "raise MemoryError":
        raise MemoryError
    elif what == "raise RESOURCE_EXHAUSTED":
        import jax

        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")
    elif what.startswith("leave MiB "):
        limit_memory(int(what.split()[-1]) << 20)
    elif what == "say nonsense":
        cluster._channel.send({"kind": ["beat"], "progress": None})
        time.sleep(10_000)
    elif what.startswith("hide "):
        # Mounts another file system over the folder, for this process only; this needs root.
        libc, folder = ctypes.CDLL(None, use_errno=True), what.removeprefix("hide ").encode()
        os.makedirs(folder, exist_ok=True)
        if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
            raise OSError(ctypes.get_errno(), "no namespace")
        if libc.mount(b"tmpfs", folder, b"tmpfs", 0, None):
            raise OSError(ctypes.get_errno(), "no file system")
    elif what == "late":
        time.sleep(LATE_SECONDS)
    elif what.startswith("version "):
        package, version = what.split()[1], importlib.metadata.version
        importlib.metadata.version = lambda distribution_name: (
            "0.0.1" if distribution_name == package else version(distribution_name)
        )
    elif what == "data":
        from manualpar.data import sources

        make = sources.make_fingerprint
        sources.make_fingerprint = lambda *parts: make(*parts, "other")
    else:
        raise AssertionError(what)


def limit_memory(room: int) -> None:
    """Limits this process's memory to its current size and `room` bytes more."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limit = pages * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    """Trains with `experiments.fsdp`, after the fault is prepared."""
    process = int(os.environ["MANUALPAR_PROCESS_ID"])
    fault = json.loads(os.environ["FAULTS"])
    sys.argv += json.loads(os.environ["FAULTS_FLAGS"]).get(str(process), [])
    from manualpar.system.cluster import Cluster

    if fault and fault["process"] == process:
        if not fault["phase"]:
            act(fault["do"])
        enter, times = Cluster.enter, Counter[str]()

        def disturbed(self: Cluster, phase: str, **limits: Any) -> None:
            enter(self, phase, **limits)
            times[phase] += 1
            # The full name of the phase "saving" also contains the folder of the checkpoint.
            if phase.startswith(fault["phase"]) and times[phase] == fault["at"]:
                act(fault["do"], self)

        Cluster.enter = disturbed  # type: ignore[method-assign]
    runpy.run_module("experiments.fsdp", run_name="__main__")


if __name__ == "__main__":
    main()
