import re
import subprocess
import sys

import pytest

from tests.paths import ROOT

README = ROOT / "README.md"


@pytest.fixture(scope="module")
def examples():
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_example_runs_and_learns(examples):
    """As a user would run it, in a process of its own; then what it left is looked at."""
    check = """
assert jax.device_count() == 8
assert state.step == 10
assert metrics["loss"][0] / metrics["loss"][1] < 1.5 < 2.3  # ln 10 is where it begins
assert state.params["layers_0"]["kernel"].addressable_shards[0].data.shape == (784, 256)
"""
    (example,) = examples
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example + check],
        cwd=README.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "P(None, 'data')" in done.stdout
    assert re.search(r"loss: [01]\.\d{6}", done.stdout)


def test_the_first_example_is_short(examples):
    assert len([line for line in examples[0].splitlines() if line.strip()]) == 15


def test_it_is_short():
    assert len(README.read_text().splitlines()) <= 120
