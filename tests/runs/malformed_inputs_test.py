"""Commands answer in one sentence what they cannot follow: `benchmarks.malformed_inputs`."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLASSES = ("launch", "docs.run", "workdirs", "meshes", "text", "tokenize")


@pytest.mark.slow
@pytest.mark.long
def test_a_sample_is_answered():
    # Another process, because its forks answer, which they cannot once jax has its devices.
    command = [sys.executable, "-m", "benchmarks.malformed_inputs", f"--only={','.join(CLASSES)}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"\n{kind} " in done.stdout for kind in CLASSES)
