import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(scope="module")
def examples():
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_examples_run_and_learn(examples):
    """As a user would run them, in a process of its own; then what they left is looked at."""
    linen_check = """
assert jax.device_count() == 8
assert state.step == 10
assert metrics["loss"][0] / metrics["loss"][1] < 1.5 < 2.3  # ln 10 is where it begins
assert state.params["layers_0"]["kernel"].addressable_shards[0].data.shape == (784, 256)
"""
    nnx_check = """
assert state.step == 1
assert abs(metrics["loss"][0] / metrics["loss"][1] - 2.3) < 0.5
plain = Classifier(rngs=nnx.Rngs(jax.random.split(jax.random.key(0))[0]))
kernel = program.init(jax.random.key(0)).params["up"]["kernel"]
assert kernel.addressable_shards[0].data.shape == (98, 512)
assert (kernel == plain.up.kernel[...]).all()
"""
    linen, nnx = examples
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "".join((linen, linen_check, nnx, nnx_check))],
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


def test_the_files_that_it_points_to_exist():
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert links
    for link in links:
        assert (README.parent / link).exists(), link
