"""A run that is killed, or told to stop, and started again is the run that nobody disturbed."""

import shutil
import signal

import pytest

from manualpar.system.cluster import Cluster
from tests.runs.small_runs import (
    assert_same_run,
    at_step,
    complete_steps,
    content,
    resumed_from,
    run_here,
    start,
    wait_for_checkpoint,
    wait_for_step,
)
from tests.training.monitoring.written import read_metrics


@pytest.mark.slow
@pytest.mark.long
def test_killed_then_told_to_stop_then_finished(processes, tmp_path, undisturbed, capsys):
    workdir = tmp_path / "run"
    killed = start(processes, workdir, kill=22)
    assert killed.wait() == -signal.SIGKILL
    newest = complete_steps(workdir)[-1]
    assert newest in (16, 20)  # The last one may not have been complete.

    stopped = start(processes, workdir, slow=30)
    wait_for_step(stopped, 28)
    stopped.send(signal.SIGTERM)
    assert stopped.wait() == 75
    assert resumed_from(stopped.out) == newest
    saved = complete_steps(workdir)[-1]
    assert 28 <= saved < 40
    lines = stopped.err.splitlines()
    assert lines == [
        "SIGTERM: stopping after this step; a second SIGTERM ends this process",
        f"stopped after step {saved}, which is saved; the same command with "
        f"--workdir={workdir} goes on",
    ]

    capsys.readouterr()
    assert run_here(workdir) == 0
    assert resumed_from(capsys.readouterr().out) == saved
    assert_same_run(workdir, undisturbed)


@pytest.mark.slow
def test_a_second_sigterm_ends_at_once(processes, tmp_path):
    process = start(processes, tmp_path / "run", slow=10, seconds=3600)
    wait_for_checkpoint(tmp_path / "run")
    process.send(signal.SIGTERM)
    process.wait_for("SIGTERM: stopping", in_errors=True)
    process.send(signal.SIGTERM)
    assert process.wait() == 143
    assert process.err.count("\n") == 1
    assert complete_steps(tmp_path / "run")[-1] in (4, 8)


@pytest.mark.slow
@pytest.mark.long
def test_a_signal_while_it_compiles(processes, tmp_path, undisturbed):
    """The signals come before the first step; the table of the layout is what is shown before."""
    process = start(processes, tmp_path / "run", slow=1)
    process.wait_for(" optimizer state")
    process.send(signal.SIGUSR1)
    assert process.wait() == 75
    assert complete_steps(tmp_path / "run") == [1]
    assert run_here(tmp_path / "run") == 0
    assert_same_run(tmp_path / "run", undisturbed)

    process = start(processes, tmp_path / "other", slow=1, seconds=3600)
    process.wait_for(" optimizer state")
    process.send(signal.SIGTERM)
    process.wait_for("SIGTERM: stopping", in_errors=True)
    process.send(signal.SIGTERM)
    assert process.wait() == 143


@pytest.mark.slow
def test_a_stop_without_checkpoints_says_that_nothing_is_saved(tmp_path, monkeypatch, capsys):
    at_step(monkeypatch, 9, Cluster.request_stop)
    assert run_here(tmp_path / "run", "--config.checkpoint.every_steps=0") == 143
    assert capsys.readouterr().err == (
        "stopped after step 9, which is not saved, since config.checkpoint.every_steps is 0; the "
        f"results so far are in {tmp_path / 'run'}\n"
    )
    assert not (tmp_path / "run" / "checkpoints").exists()
    # There is nothing to go on from, and what was written is not overwritten.
    assert run_here(tmp_path / "run", "--config.checkpoint.every_steps=0") == 2
    assert "holds an earlier run (config.json), which is not over" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path, monkeypatch, capsys, undisturbed):
    workdir = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_step(patch, 23, lambda cluster: signal.raise_signal(signal.SIGINT))
        assert run_here(workdir, charts=True) == 130
    error = capsys.readouterr().err
    assert "interrupted" in error
    assert error.count("\n") == 1
    assert str(workdir) in error
    assert complete_steps(workdir) == [20, 23]
    for report in ("report.html", "report.png"):
        assert (workdir / report).stat().st_size > 1000
        (workdir / report).unlink()
    assert run_here(workdir, charts=True) == 0
    assert resumed_from(capsys.readouterr().out) == 23
    assert_same_run(workdir, undisturbed)
    for report in ("report.html", "report.png"):
        assert (workdir / report).stat().st_size > 1000


@pytest.mark.slow
def test_a_finished_run_given_again_only_repeats_its_test(tmp_path, capsys, undisturbed):
    workdir = tmp_path / "run"
    shutil.copytree(undisturbed, workdir)
    before = content(workdir / "checkpoints")
    assert run_here(workdir) == 0
    output = capsys.readouterr().out
    assert resumed_from(output) == 40
    (line,) = [line for line in output.splitlines() if line.startswith("step")]
    assert line.startswith("step 40/40  test   loss ")
    assert_same_run(workdir, undisturbed)
    assert content(workdir / "checkpoints") == before


@pytest.mark.slow
def test_a_run_that_was_to_end_later_goes_on_past_its_end(tmp_path, capsys, undisturbed):
    """The learning rate is constant, so it does not depend on where the training ends."""
    workdir = tmp_path / "run"
    shutil.copytree(undisturbed, workdir)
    assert run_here(workdir, "--config.training.num_steps=47") == 0
    output = capsys.readouterr().out
    assert "changed since the run began: training.num_steps: 40 -> 47\n" in output
    assert resumed_from(output) == 40
    assert run_here(tmp_path / "whole", "--config.training.num_steps=47") == 0
    # The end is reported, so the line that was the last stays, and sums begin anew after it.
    records, whole = read_metrics(workdir), read_metrics(tmp_path / "whole")
    assert [record for record in whole if record["step"] < 40] == [
        record for record in records if record["step"] < 40
    ]
    at_the_end = [(record["step"], record["split"]) for record in records if record["step"] == 40]
    assert at_the_end == [(40, "train"), (40, "eval")]
    assert [record for record in whole if record["step"] > 42] == [
        record for record in records if record["step"] > 42
    ]


@pytest.mark.slow
def test_a_profile_on_request(tmp_path, capsys):
    workdir = tmp_path / "run"
    assert run_here(workdir, "--config.profile=3:5", "--config.training.num_steps=8") == 0
    (trace,) = (workdir / "profile").rglob("perfetto_trace.json.gz")
    assert list(trace.parent.glob("*.xplane.pb"))
    said = [line for line in capsys.readouterr().out.splitlines() if "profile" in line]
    assert any(str(workdir / "profile") in line and "3" in line for line in said)


@pytest.mark.slow
@pytest.mark.long
def test_a_language_model_that_is_killed(processes, tmp_path, devices8):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(9):
        lines = [f"{number} times {other} is {number * other}\n" for other in range(60)]
        (text / f"{number}.txt").write_text("".join(lines))
    tiny = (
        f"--config.data.path={text}",
        "--config.data.sequence_length=32",
        "--config.model.mlp_size=32",
        "--config.model.num_heads=2",
        "--config.model.num_kv_heads=1",
        "--config.model.dropout_rate=0.1",
        "--config.sample.num_tokens=20",
    )
    killed = start(processes, tmp_path / "run", *tiny, kill=22, config="fsdp_lm.py")
    assert killed.wait() == -signal.SIGKILL
    resumed = start(processes, tmp_path / "run", *tiny, config="fsdp_lm.py")
    assert resumed.wait() == 0
    assert resumed_from(resumed.out) in (16, 20)
    straight = start(processes, tmp_path / "straight", *tiny, config="fsdp_lm.py")
    assert straight.wait() == 0
    assert_same_run(tmp_path / "run", tmp_path / "straight")
    samples = [
        process.out.split("sample:\n")[1].split("time:")[0] for process in (resumed, straight)
    ]
    assert samples[0] == samples[1]
    assert samples[0].startswith("  def ")
