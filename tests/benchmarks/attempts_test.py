"""Every attempt of docs/limits.md to break a run is survived; takes an hour."""

import subprocess
import sys

import pytest

from tests.paths import ROOT


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("module", ["malformed_inputs", "checkpoint_faults", "process_faults"])
def test_every_attempt_is_survived(module):
    command = [sys.executable, "-m", f"benchmarks.{module}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
