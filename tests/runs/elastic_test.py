"""A run goes on elsewhere: on other devices, under another strategy, with other minibatches.

The run is begun with FSDP on 8 devices. Without dropout the losses after the checkpoint depend on
how the work is divided by rounding alone, and on the examples, which stay the same.
"""

import json
import re
import shutil
import signal
import time

import pytest

from manualpar.training.monitoring.run_record import add_up, read_run
from tests.runs.small_runs import (
    assert_close_metrics,
    checkpoint_arrays,
    complete_steps,
    resumed_from,
    run_here,
    start,
    start_cluster,
    start_launcher,
    wait_for_checkpoint,
    wait_for_step,
)
from tests.system.cluster.processes import lines_of_ours

EXACT = (
    "--config.model.dropout_rate=0.0",
    "--config.model.dtype=float32",
    "--config.training.num_steps=24",
    "--config.training.log_every_steps=1",
    "--config.checkpoint.every_steps=12",
    # SGD would show a wrong scale; so does Adam where there is decay and a gradient to clip.
    "--config.optimizer.clip_norm=0.1",
)
# No number of devices divides it.
WIDE = "--config.model.hidden_size=27"


def mesh(**axes):
    return f"--config.parallel.mesh={axes}"


def begin(workdir, *more, config="fsdp.py"):
    """A run of 24 steps, and it again as it was when it was killed after step 20."""
    assert run_here(workdir, *EXACT, *more, config=config) == 0
    killed = workdir.parent / "killed"
    shutil.copytree(workdir, killed)
    shutil.rmtree(killed / "checkpoints" / "24")
    lines = (killed / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines = [line for line in lines if step_of(line) <= 20]
    (killed / "metrics.jsonl").write_text("".join(lines))
    assert complete_steps(killed) == [12]
    return workdir, killed


@pytest.fixture(scope="module")
def runs(tmp_path_factory, devices8):
    return begin(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def padded(tmp_path_factory, devices8):
    """Runs of a model whose dimensions no mesh divides."""
    return begin(tmp_path_factory.mktemp("padded") / "run", WIDE)


ELSEWHERE = {
    "one device": ([mesh(data=1)], "fsdp on 1 device"),
    "two devices": ([mesh(data=2)], "fsdp on 2 devices"),
    "four devices, minibatches": (
        [mesh(data=4), "--config.optimizer.num_minibatches=4"],
        "fsdp on 4 devices",
    ),
    "dp": (["--config.parallel.strategy=dp"], "data_parallel on 8 devices"),
    "zero1": (["--config.parallel.strategy=zero1"], "zero1 on 8 devices"),
    "zero2": (["--config.parallel.strategy=zero2"], "zero2 on 8 devices"),
    "hsdp": (
        ["--config.parallel.strategy=hsdp", mesh(replica=2, data=-1)],
        "mesh: replica=2, data=4 on 8 ",
    ),
    "auto": (["--config.parallel.mode=auto"], "fsdp, mode auto"),
}
QUICK = ("hsdp",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ELSEWHERE],
)
def test_it_goes_on_elsewhere_with_the_same_losses(where, runs, tmp_path, capsys):
    changes, shown = ELSEWHERE[where]
    assert shown in goes_on(runs, tmp_path / "run", changes, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4, 8])
def test_it_goes_on_padded(devices, padded, tmp_path, capsys):
    changes = ["--config.parallel.pad=true"] + ([mesh(data=devices)] if devices < 8 else [])
    output = goes_on(padded, tmp_path / "run", changes, capsys, also=(WIDE,))
    assert f"fsdp on {devices} device" in output
    assert ("padded" in output.replace(str(tmp_path), "")) == (devices > 1)


@pytest.mark.slow
def test_a_language_model_goes_on_with_split_layers(tmp_path, capsys, devices8):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(60):
        (text / f"{number}.txt").write_text(f"{number} and {number**2} and no more\n" * 5)
    whole, split = "--config.parallel.sequence=False", "--config.parallel.sequence=True"
    tiny = (
        f"--config.data.path={text}",
        "--config.data.sequence_length=8",
        "--config.model.mlp_size=16",
        "--config.sample.num_tokens=0",
    )
    runs = begin(tmp_path / "run", *tiny, whole, mesh(data=8), config="tp_lm.py")
    changes = [mesh(data=2, model=4), split]
    capsys.readouterr()
    output = goes_on(runs, tmp_path / "on", changes, capsys, also=tiny, config="tp_lm.py")
    assert "fsdp on 8 devices (data=2 x model=4)" in output


def divided(now, before):
    """The sentence about a division that has changed."""
    return (
        f"the 48 examples of a step are divided as {now} (devices x minibatches x examples), "
        f"before as {before}: they are the same examples, whose sums are added in another order"
    )


@pytest.mark.slow
@pytest.mark.long
def test_four_processes_come_back_as_three_and_then_as_four(processes, tmp_path, devices8):
    steady = (
        "--config.model.dropout_rate=0.0",
        "--config.model.dtype=float32",
        "--config.data.batch_size=48",
        "--mesh=data=-1",
        "--config.training.log_every_steps=1",
        "--config.training.eval_every_steps=8",
        "--config.checkpoint.every_steps=8",
        "--config.watch.lost_seconds=5",
    )
    last = "--config.training.num_steps=24"
    assert run_here(tmp_path / "undisturbed", *steady, last) == 0
    workdir = tmp_path / "run"
    began = start_cluster(processes, workdir, *steady, last, count=4, devices=2, slow=10)
    wait_for_step(began[0], 11)
    wait_for_checkpoint(workdir, 8)
    began[3].send(signal.SIGKILL)
    for process in began[:3]:
        assert process.wait() == 4, process.err
        assert "process 3 on " in process.err
    saved = complete_steps(workdir)
    assert saved == [8]

    def go_on(count, steps):
        more = [f"--config.training.num_steps={steps}"]
        run = start_launcher(processes, workdir, *steady, *more, count=count, devices=2)
        assert run.wait() == 0, run.err
        said = lines_of_ours(run.out)
        (sentence,) = [line for line in said if "examples of a step are divided" in line]
        return resumed_from(run.out), sentence

    eight, six = "8 devices x 1 x 6", "6 devices x 2 x 4"
    assert go_on(3, 16) == (8, f"[0] {divided(six, eight)}")
    assert go_on(4, 24) == (16, f"[0] {divided(eight, six)}")
    assert_close_metrics(workdir, tmp_path / "undisturbed")


@pytest.mark.slow
def test_a_run_comes_back_with_six_of_eight_devices_and_says_where_its_time_went(
    processes, tmp_path, capsys, devices8
):
    workdir = tmp_path / "run"
    own = ["--config.data.batch_size=48", "--mesh=data=-1", "--config.checkpoint.every_steps=8"]
    assert run_here(workdir, *own, "--config.training.num_steps=12") == 0
    run = start(processes, workdir, *own, "--config.training.num_steps=20", devices=6)
    assert run.wait() == 0, run.err
    assert resumed_from(run.out) == 12
    drawn = ", but other random numbers are drawn for them (dropout masks)\n"
    eight, six = "8 devices x 1 x 6", "6 devices x 2 x 4"
    assert f"\n{divided(six, eight)}{drawn}" in run.out
    record = read_run(workdir)
    assert record.left_out == []
    found = add_up(record.times)
    began, last = record.times[0]["began"], record.times[-1]
    assert found.total == pytest.approx(last["began"] + last["seconds"] - began, abs=0.01)
    assert [one["what"] for one in record.times if one.get("starts")] == ["starting"] * 2
    assert {"restoring", "compiling", "training", "saving", "standing still"} <= set(found.seconds)
    assert found.total < time.time() - began + 1
    page = (workdir / "report.html").read_text()
    assert "<h2>Time</h2>" in page
    assert page.count('<th scope="row">starting</th>') >= 2
    # With five devices the numbers that divide the batch are named.
    run = start(processes, workdir, *own, devices=5)
    assert run.wait() == 2
    assert "Of fewer devices, 1, 2, 3, 4 would divide it." in run.err
    # All devices are back.
    capsys.readouterr()
    assert run_here(workdir, *own, "--config.training.num_steps=24") == 0
    shown = capsys.readouterr().out
    assert resumed_from(shown) == 20
    assert f"\n{divided(eight, six)}{drawn}" in shown


def goes_on(runs, workdir, changes, capsys, *, also=(), config="fsdp.py"):
    """Goes on with a copy of the killed run, compares it with the other, returns the output."""
    undisturbed, killed = runs
    shutil.copytree(killed, workdir)
    assert run_here(workdir, *EXACT, *also, *changes, config=config) == 0
    output, error = capsys.readouterr()
    assert error == ""
    assert resumed_from(output) == 12
    said = re.findall(r"^changed since the run began: ([\w.]+): .* -> ", output, re.MULTILINE)
    assert said == sorted(change.split("=")[0].removeprefix("--config.") for change in changes)
    before, after = (
        [line for line in (folder / "metrics.jsonl").read_text().splitlines() if step_of(line) < 13]
        for folder in (undisturbed, workdir)
    )
    assert after == before
    assert_close_metrics(workdir, undisturbed, rtol=2e-5)
    assert complete_steps(workdir)[-1] == 24
    shapes = [
        {name: x.shape for name, x in checkpoint_arrays(folder, 24).items()}
        for folder in (workdir, undisturbed)
    ]
    assert shapes[0] == shapes[1]
    return output


def step_of(line):
    return json.loads(line)["step"]
