"""The experiments as processes: from the shell to the exit code."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.training.monitoring.written import read_events, read_metrics

SMALL = (
    "--config.model.hidden_size=16",
    "--config.model.num_layers=1",
    "--config.optimizer.warmup_steps=0",
)
ENDLESS = (*SMALL, "--config.training.num_steps=1000000", "--config.training.log_every_steps=5")


def _start(module: str, *arguments: str, cwd: Path) -> subprocess.Popen:
    """Starts `python -m experiments.<module>` as a user would, whatever jax is told in here."""
    ours = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.Popen(
        [sys.executable, "-m", f"experiments.{module}", *arguments],
        cwd=cwd,
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _read_until_step(process: subprocess.Popen, step: int) -> list[str]:
    """The lines that the process prints up to the report of `step`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.match(rf"step +{step}/", line):
            return lines
    process.wait()
    pytest.fail("".join(lines) + process.stderr.read())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=configs/fsdp.py", "--config.nonsense=1"], "the config has no field 'nonsense'"),
        pytest.param(
            ["--config=configs/fsdp.py", "--devices=3"],
            "config.data.batch_size is 128, expected",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--config=configs/none.py"],
            "--config=configs/none.py: there is no such file",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--config.parallel.strategy=hsdp"],
            "config.parallel.mesh has the axes ['data'], expec",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["unknown key", "devices", "missing file", "hsdp without replicas"],
)
def test_a_mistake_ends_in_one_sentence_and_code_2(arguments, message):
    process = _start("fsdp", *arguments, cwd=ROOT)
    output, error = process.communicate()
    assert process.returncode == 2
    assert output == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.slow
def test_a_run_needs_no_flag_and_no_folder(tmp_path):
    arguments = (*SMALL, "--config.training.num_steps=5", "--config.training.eval_every_steps=0")
    process = _start("dp", *arguments, cwd=tmp_path)
    output, error = process.communicate()
    assert process.returncode == 0, error
    assert error == ""
    lines = output.splitlines()
    assert lines[2] == "mesh: data=8 on 8 simulated cpu devices"
    assert re.fullmatch(r"test accuracy: \d\.\d{4}", lines[-3])
    assert lines[-1] == "results: runs/dp/001"
    assert len(read_metrics(tmp_path / "runs/dp/001")) == 2


@pytest.mark.slow
@pytest.mark.long
def test_a_language_model_with_experts_learns(tmp_path):
    arguments = (*SMALL, "--config.training.num_steps=10", "--config.training.eval_batches=1")
    # XLA warns where it shards the text generator's one example.
    more = (
        "--config.data.batch_size=8",
        "--config.sample.num_tokens=0",
        "--config.model.num_heads=4",
    )
    process = _start("moe_lm", *arguments, *more, cwd=tmp_path)
    output, error = process.communicate()
    assert process.returncode == 0, error
    assert error == ""
    lines = output.splitlines()
    assert lines[2] == "mesh: data=2, expert=4 on 8 simulated cpu devices"
    assert "expert_0" not in output
    assert "busiest_expert" in output
    first, *_, last = read_metrics(tmp_path / "runs/moe_lm/001")
    assert last["loss"] < first["loss"]
    assert 0 < last["dropped"] < 1
    assert sum(last[f"expert_{index}"] for index in range(8)) == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh", "field"),
    [
        ("tp_lm", "data=2, model=4", "num_heads=8"),
        ("pp_lm", "data=2, stage=4", "num_layers=4"),
        ("long_lm", "data=2, context=4", "num_heads=4"),
        ("nd_lm", "data=2, model=2, stage=2", "num_layers=2"),
    ],
)
def test_a_language_model_on_a_mesh_of_several_axes_learns(tmp_path, name, mesh, field):
    arguments = (*SMALL, "--config.training.num_steps=10", "--config.training.eval_batches=1")
    more = ("--config.model.num_heads=4", f"--config.model.{field}", "--config.data.batch_size=16")
    process = _start(name, *arguments, *more, cwd=tmp_path)
    output, error = process.communicate()
    assert process.returncode == 0, error
    assert error == ""
    lines = output.splitlines()
    assert lines[2].startswith(f"mesh: {mesh} on 8 simulated cpu devices")
    assert any(line.startswith("  def ") for line in lines)
    first, *_, last = read_metrics(tmp_path / f"runs/{name}/001")
    assert last["loss"] < first["loss"]


@pytest.mark.slow
def test_a_killed_run_has_on_disk_what_it_had_printed(tmp_path):
    process = _start("fsdp", "--devices=2", "--workdir=killed", *ENDLESS, cwd=tmp_path)
    lines = _read_until_step(process, 20)
    process.kill()
    rest, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL
    printed = re.findall(r"^step +(\d+)/1000000  (\w+)", "".join(lines) + rest, re.MULTILINE)
    printed = [(int(step), split) for step, split in printed]
    assert printed[-1] >= (20, "train")
    records = read_metrics(tmp_path / "killed")
    assert [(record["step"], record["split"]) for record in records][: len(printed)] == printed
    in_events = {(step, tag.split("/")[0]) for step, tag, _ in read_events(tmp_path / "killed")}
    assert in_events >= set(printed)


@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_a_message(tmp_path):
    process = _start("dp", "--devices=4", "--workdir=stopped", *ENDLESS, cwd=tmp_path)
    _read_until_step(process, 10)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == (
        "error: interrupted; the results so far are in stopped, and the same command with "
        "--workdir=stopped goes on\n"
    )
    assert len(read_metrics(tmp_path / "stopped")) >= 3
