"""The README is short, and its example runs and prints what it shows."""

import re
import subprocess
import sys

from docs.run import matches, read_blocks
from tests.paths import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
CHECK = """
assert jax.device_count() == 8
assert state.step == 10
assert metrics["loss"][0] / metrics["loss"][1] < 1.5 < 2.3  # ln 10 is where it begins
assert state.params["layers_0"]["kernel"].addressable_shards[0].data.shape == (784, 256)
"""


def test_the_example_runs_and_prints_what_it_shows():
    """As a user would run it, in a process of its own; then what it left is looked at."""
    (block,) = read_blocks(TEXT)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block.code + CHECK],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert block.shown is not None
    assert matches(block.shown, done.stdout), done.stdout
    code = [line for line in block.code.splitlines() if line.strip()]
    assert sum(not line.startswith(("import ", "from ")) for line in code) <= 11


def test_it_is_read_in_two_minutes_and_has_one_picture():
    assert len(TEXT.replace("|", " ").split()) <= 600
    assert len(re.findall(r"!\[", TEXT)) == 1
