"""Starts the processes of a cluster for a test, and ends them whatever happens.

Every process is the leader of a process group of its own, with its output in a file. What a test
leaves running is killed; what the processes printed is shown where the test fails.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

from tests.paths import ROOT

# A guard against hanging, no measurement: on a quiet machine nothing takes a tenth of it.
HANG_SECONDS = 120
# What Gloo's threads say of their connections, piece by piece: each piece is a write of its own, so
# that two threads' lines may come as one, or one in the midst of another.
_GLOO = re.compile(
    r"\[Gloo\] Rank |\[Rank |\d+\]?| is connected to | peer ranks\. ?"
    r"|Expected number of connected peer ranks is : "
)


def lines_of_ours(text):
    """The lines of a process, or of a launcher, without what is Gloo's alone."""
    said = (re.sub(r"^\[\d+\] ", "", line) for line in text.splitlines())
    ours = (bool(_GLOO.sub("", line).strip()) for line in said)
    return [line for line, kept in zip(text.splitlines(), ours, strict=True) if kept]


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


class Process:
    """A process whose standard output and error go to files."""

    def __init__(self, command, folder, environment):
        folder.mkdir()
        self.out_path, self.err_path = folder / "out", folder / "err"
        with self.out_path.open("wb") as out, self.err_path.open("wb") as err:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=ROOT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def out(self):
        return self.out_path.read_text()

    @property
    def err(self):
        return self.err_path.read_text()

    def wait_for(self, text, *, in_errors=False):
        """Waits until a line of the output, or of standard error, begins with `text`."""
        deadline = time.monotonic() + HANG_SECONDS
        path = self.err_path if in_errors else self.out_path
        while not any(line.startswith(text) for line in path.read_text().splitlines()):
            assert self.popen.poll() is None, f"ended before {text!r}:\n{self.err}"
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.out}\n{self.err}"
            time.sleep(0.02)

    def send(self, number):
        os.kill(self.popen.pid, number)

    def wait(self):
        return self.popen.wait(timeout=HANG_SECONDS)


class Processes:
    """Starts processes; see the fixture in conftest or `contextlib.closing`."""

    def __init__(self, folder):
        self._folder = folder
        self.all = []

    def start(self, command, **environment):
        folder = self._folder / f"process{len(self.all)}"
        self.all.append(Process(command, folder, environment))
        return self.all[-1]

    def start_workers(self, count, **options):
        """Starts the processes of one cluster."""
        port = free_port()
        return [
            self.start(
                [sys.executable, "-m", "tests.system.cluster.worker", json.dumps(options)],
                MANUALPAR_COORDINATOR_ADDRESS=f"127.0.0.1:{port}",
                MANUALPAR_NUM_PROCESSES=str(count),
                MANUALPAR_PROCESS_ID=str(process),
            )
            for process in range(count)
        ]

    def close(self):
        for process in self.all:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.popen.pid, signal.SIGKILL)
            process.popen.wait()
            print(f"--- {process.popen.args}: {process.popen.returncode}")
            print(process.out[-2000:], process.err[-4000:], sep="\n--\n")
