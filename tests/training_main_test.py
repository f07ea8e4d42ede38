"""From a command line to a result, in this process: what is shown, what is left, and exit codes."""

import importlib
import json
from pathlib import Path

import pytest

from manualpar.training import main
from manualpar.training.command_line import CommandLine, parse_command_line
from manualpar.training.main import run_command
from tests.training_writers_test import read_events, read_metrics

ROOT = Path(__file__).parent.parent
SMALL = ("--config.model.hidden_size=16", "--config.model.num_layers=1")


def _command(strategy: str, *arguments: str) -> CommandLine:
    config = ROOT / "configs" / f"{strategy}.py"
    return parse_command_line(["program", *arguments], default_config=config)


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch, devices8):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_the_default_configs_learn_the_digits(strategy, capsys):
    assert run_command(_command(strategy), strategy=strategy) == 0
    shown = capsys.readouterr().out.splitlines()
    accuracy, time, results = shown[-3:]
    assert accuracy.startswith("test accuracy: 0.9")
    assert len(accuracy) == len("test accuracy: 0.9xxx")
    assert float(accuracy.split()[-1]) >= 0.97
    assert time.startswith("time: ")
    assert results == f"results: runs/{strategy}/001"
    assert shown[0] == "mesh: data=8 on 8 simulated cpu devices"
    table = [line.split() for line in shown]
    sharded = ["input_dense/kernel", "64x256", "float32", "P(None,", "'data')", "8,192"]
    whole = ["input_dense/kernel", "64x256", "float32", "P()", "65,536"]
    assert (sharded if strategy == "fsdp" else whole) in table


def test_a_run_shows_what_it_writes_and_numbers_its_folders(capsys):
    arguments = (
        *SMALL,
        "--config.training.num_steps=7",
        "--config.training.eval_every_steps=5",
        "--config.training.log_every_steps=3",
        "--config.data.source=synthetic",
    )
    command = _command("fsdp", *arguments)
    for number in (1, 2):
        assert run_command(command, strategy="fsdp") == 0
        workdir = Path(f"runs/fsdp/{number:03d}")
        assert json.loads((workdir / "config.json").read_text()) == command.config.to_dict()
        records = read_metrics(workdir)
        at = [(record["step"], record["split"]) for record in records]
        assert at == [
            (0, "eval"),
            (3, "train"),
            (5, "eval"),
            (6, "train"),
            (7, "train"),
            (7, "eval"),
            (7, "test"),
        ]
        for record in records:
            extra = (
                {"learning_rate", "examples_per_second"} if record["split"] == "train" else set()
            )
            assert record.keys() == {"step", "split", "loss", "accuracy"} | extra
        scalars = [(step, tag) for step, tag, _ in read_events(workdir)]
        assert (7, "test/accuracy") in scalars
        assert (3, "train/learning_rate") in scalars
        output = capsys.readouterr().out
        assert "\x1b" not in output
        lines = [line.split()[:3] for line in output.splitlines() if line.startswith("step")]
        assert lines == [["step", f"{step}/7", split] for step, split in at]
        assert f"test accuracy: {records[-1]['accuracy']:.4f}\n" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.data.batch_size=100"], "config.data.batch_size is 100, expected a multiple of"),
        (["--config.optimizer.num_minibatches=3"], "times config.optimizer.num_minibatches=3."),
        (["--config.parallel.mesh.data=16"], "needs 16 devices, got 8"),
        (["--config.parallel.mesh={'model': 8}"], "the mesh has the axes ['model']"),
        (["--config.parallel.strategy=dp"], "run python -m experiments.dp for that one."),
        (["--config.parallel.strategy=zero"], "expected one of 'dp', 'fsdp'"),
        (["--config.model.num_classes=9"], "expected at least the 10 classes"),
        (["--workdir=run"], "--workdir=run holds an earlier run (metrics.jsonl)"),
        (["--workdir=run/metrics.jsonl/new"], "the results cannot be written: "),
    ],
)  # fmt: skip
def test_what_cannot_be_run_ends_in_one_sentence(arguments, message, capsys):
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text("{}\n")
    assert run_command(_command("fsdp", *arguments), strategy="fsdp") == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not Path("runs").exists()


def test_our_own_mistakes_keep_their_traceback(monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("a bug in the loop")

    monkeypatch.setattr(main, "run", fail)
    with pytest.raises(ValueError, match="a bug in the loop"):
        run_command(_command("fsdp"), strategy="fsdp")

    def break_(*args, **kwargs):
        raise TypeError("a bug before it")

    monkeypatch.setattr(main, "prepare", break_)
    with pytest.raises(TypeError, match="a bug before it"):
        run_command(_command("fsdp"), strategy="fsdp")


def test_ctrl_c_before_training_is_not_a_traceback_either(monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "prepare", interrupt)
    assert run_command(_command("fsdp"), strategy="fsdp") == 130
    assert capsys.readouterr().err == "error: interrupted; nothing was written\n"


@pytest.mark.parametrize("name", ["dp", "fsdp"])
def test_help_lists_flags_and_fields(name, capsys):
    experiment = importlib.import_module(f"experiments.{name}")
    parse = main.flags_parser(experiment.__doc__, experiment.DEFAULT_CONFIG)
    with pytest.raises(SystemExit) as ended:
        parse(["program", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"python -m experiments.{name}" in shown
    for text in ("--config", "--workdir", "--devices", "optimizer.learning_rate", "0.003"):
        assert text in shown
