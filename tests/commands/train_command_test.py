"""From a command line to a result, in this process: what is shown, what is left, and exit codes."""

import dataclasses
import importlib
import json
import re
import shutil
from pathlib import Path

import jax
import pytest
from absl import flags

from manualpar.commands import train_command as main
from manualpar.commands.command_line import CommandLine, parse_command_line
from manualpar.commands.train_command import run_command
from manualpar.core.mesh.compiler_options import ChosenOptions
from manualpar.core.modes.strategy import MODES
from manualpar.strategies import strategy_kinds
from manualpar.training import experiment
from manualpar.training.checkpoints import CheckpointError
from manualpar.training.experiment import prepare
from manualpar.training.trainer import StoppedError
from tests.paths import ROOT
from tests.training.broken_replicas import break_leaf
from tests.training.monitoring.written import read_events, read_metrics

SMALL = (
    "--config.model.hidden_size=16",
    "--config.model.num_layers=1",
    "--config.optimizer.warmup_steps=0",
)
FEW_STEPS = (
    *SMALL,
    "--config.optimizer.num_minibatches=1",
    "--config.training.num_steps=2",
    "--config.training.eval_every_steps=0",
    "--config.data.source=synthetic",
)


def _command(strategy: str, *arguments: str) -> CommandLine:
    config = ROOT / "configs" / f"{strategy}.py"
    return parse_command_line(["program", *arguments], default_config=config)


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch, devices8):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "strategy", ["zero", *(pytest.param(x, marks=pytest.mark.long) for x in ("dp", "fsdp", "hsdp"))]
)
@pytest.mark.optimized
@pytest.mark.slow
def test_the_default_configs_learn_the_digits(strategy, capsys):
    assert run_command(_command(strategy)) == 0
    shown = capsys.readouterr().out.splitlines()
    accuracy, time, results = shown[-3:]
    assert accuracy.startswith("test accuracy: 0.9")
    assert len(accuracy) == len("test accuracy: 0.9xxx")
    assert float(accuracy.split()[-1]) >= 0.97
    assert time.startswith("time: ")
    assert results == f"results: runs/{strategy}/001"
    mesh = "replica=2, data=4" if strategy == "hsdp" else "data=8"
    assert shown[2] == f"mesh: {mesh} on 8 simulated cpu devices"
    table = [line.split() for line in shown]
    row = ["input_dense/kernel", "64x256", "float32"]
    # In two groups of four a shard of whole rows is whole tiles.
    rows = {
        "dp": [*row, "P()", "65,536"],
        "fsdp": [*row, "P(None,", "'data')", "largest", "8,192"],
        "hsdp": [*row, "P('data',", "None)", "whole", "tiles", "16,384"],
        "zero": [*row, "P(),", "state", "P(None,", "'data')", "largest", "65,536"],
    }
    assert rows[strategy] in table


@pytest.mark.slow
def test_a_run_shows_what_it_writes_and_numbers_its_folders(capsys, monkeypatch):
    chosen = ChosenOptions({"xla_cpu_enable_fast_math": False}, "for cpus")
    monkeypatch.setattr(experiment, "choose_options", lambda *_, **by: chosen)
    arguments = (
        *SMALL,
        "--config.training.num_steps=7",
        "--config.training.eval_every_steps=5",
        "--config.training.log_every_steps=3",
        "--config.data.source=synthetic",
        "--config.parallel.rules=(('embed', None), ('mlp', None))",
    )
    command = _command("fsdp", *arguments)
    Path("runs/fsdp/001").mkdir(parents=True)  # An earlier run's.
    assert run_command(command) == 0
    workdir = Path("runs/fsdp/002")
    stored = json.loads((workdir / "config.json").read_text())
    assert stored["parallel"].pop("rules") == [["embed", None], ["mlp", None]]
    config = command.config.to_dict()
    del config["parallel"]["rules"]
    assert stored == json.loads(json.dumps(config))  # JSON has no tuples.
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
        extra = {"learning_rate"} if record["split"] == "train" else set()
        assert record.keys() == {"step", "split", "loss", "accuracy"} | extra
    rates = read_metrics(workdir, "throughput.jsonl")
    assert [(record["step"], record["split"]) for record in rates] == [
        (step, split) for step, split in at if split == "train"
    ]
    assert all(record["examples_per_second"] > 0 for record in rates)
    scalars = [(step, tag) for step, tag, _ in read_events(workdir)]
    assert (7, "test/accuracy") in scalars
    assert (3, "train/learning_rate") in scalars
    output = capsys.readouterr().out
    assert "\x1b" not in output
    said = "xla_cpu_enable_fast_math=False (for cpus)"
    shown = output.splitlines()
    assert [re.sub(r"\d+\.\d", "1.0", line) for line in shown[:2]] == [
        "tracing the program",
        "traced the program in 1.0 s",
    ]
    assert shown[3] == f"compiler options: {said}"
    compiled = [line.partition(" in ")[0] for line in shown if "compil" in line[:8]]
    assert compiled == [
        "compiler options: xla_cpu_enable_fast_math=False (for cpus)",
        "compiling the evaluation step",
        "compiled the evaluation step",
        "compiling the training step",
        "compiled the training step",
    ]
    assert said in (workdir / "report.html").read_text()
    lines = [line.split()[:3] for line in output.splitlines() if line.startswith("step")]
    assert lines == [["step", f"{step}/7", split] for step, split in at]
    assert f"test accuracy: {records[-1]['accuracy']:.4f}\n" in output


def test_a_failure_of_the_compiler_names_the_options_that_it_was_given(monkeypatch):
    chosen = ChosenOptions({"xla_no_such": "true"}, "for cpus")
    monkeypatch.setattr(experiment, "choose_options", lambda *_, **by: chosen)
    monkeypatch.setattr(experiment, "keep_if_known", lambda options, device: options)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such") as caught:
        run_command(_command("fsdp", *FEW_STEPS))
    note = next(note for note in caught.value.__notes__ if "xla_no_such" in note)
    assert note.startswith("The compiler was given xla_no_such.")
    assert "--config.parallel.overlap=none" in note


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.data.batch_size=100"], "config.data.batch_size is 100, expected a multiple of"),
        (["--config.optimizer.num_minibatches=3"], "times config.optimizer.num_minibatches=3."),
        (["--config.parallel.mesh.data=16"], "needs 16 devices, got 8"),
        (["--config.parallel.mesh={'model': 8}"], "the mesh has the axes ['model']"),
        (["--config.parallel.strategy=zero"], "expected one of 'dp', 'zero1', 'zero2', 'fsdp'"),
        (["--config.parallel.strategy=hsdp"], "set --config.parallel.mesh=\"{'replica': 2, 'data'"),
        (["--config.parallel.rules=(('a', 'b'),)"], "names ['b'], but the mesh has the axes ['da"),
        (["--config.debug.draw_sharding=kernel"], "expected the path of a parameter, 'all' or ''"),
        (["--config.model.num_classes=9"], "expected at least the 10 classes"),
        (
            ["--workdir=run", "--config.checkpoint.every_steps=0"],
            "--workdir=run holds an earlier run (metrics.jsonl)",
        ),
        (["--workdir=run/metrics.jsonl/new"], "run/metrics.jsonl is a file, not a folder; name"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_ends_in_one_sentence(arguments, message, capsys):
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text("{}\n")
    assert run_command(_command("fsdp", *arguments)) == 2
    output, error = capsys.readouterr()
    # Mistakes that tracing finds come after its line.
    assert re.fullmatch(r"(tracing the program\n(traced the program in .* s\n)?)?", output)
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=() if name == "hsdp" else pytest.mark.slow)
        for name, kind in strategy_kinds().items()
        if kind.is_exact
    ],
)
def test_one_line_selects_a_strategy(strategy, capsys):
    mesh = ["--config.parallel.mesh={'replica': 2, 'data': -1}"] if strategy == "hsdp" else []
    arguments = (*FEW_STEPS, *mesh, "--config.debug.draw_sharding=input_dense/kernel")
    assert run_command(_command("fsdp", *arguments, f"--config.parallel.strategy={strategy}")) == 0
    shown = capsys.readouterr().out
    name = "data_parallel" if strategy == "dp" else strategy
    assert f"\n{name} on 8 devices" in shown
    spec = "P('data', None)" if strategy in ("fsdp", "hsdp") else "P()"
    drawn = shown.index(f"input_dense/kernel [784, 16] {spec}\n")
    devices = {"fsdp": "CPU 3", "hsdp": "CPU 3,7"}.get(strategy, "CPU 0,1,2,3,4,5,6,7")
    assert shown.index(devices) < shown.index("step 2/2")
    assert shown.index(name) < drawn < shown.index(devices)
    assert [record["split"] for record in read_metrics(Path("runs/fsdp/001"))] == ["train", "test"]


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=pytest.mark.slow) for mode in MODES if mode != "manual"],
)
def test_one_line_selects_a_mode(mode, capsys):
    arguments = (*FEW_STEPS, f"--config.parallel.mode={mode}", "--config.data.source=digits")
    assert run_command(_command("zero", *arguments)) == 0
    assert [record["split"] for record in read_metrics(Path("runs/zero/001"))] == ["train", "test"]


@pytest.mark.slow
def test_norms_are_reported_on_request(capsys):
    arguments = (*FEW_STEPS, "--config.training.norm_metrics=true")
    assert run_command(_command("fsdp", *arguments)) == 0
    norms = {"gradient_norm", "update_norm", "parameter_norm"}
    train, test = read_metrics(Path("runs/fsdp/001"))
    assert all(train[name] > 0 for name in norms)
    assert not norms & test.keys()
    tags = {tag for _, tag, _ in read_events(Path("runs/fsdp/001"))}
    assert {f"train/{name}" for name in norms} <= tags
    assert re.search(r"gradient norm \S+  update norm \S+  parameter norm", capsys.readouterr().out)


@pytest.mark.slow
def test_replicas_that_differ_stop_a_run(monkeypatch, capsys):
    def prepare_broken(config, **options):
        experiment = prepare(config, **options)
        step = experiment.program.train_step

        def train_step(state, batch):
            state, metrics = step(state, batch)
            if int(state.step) == 5:
                device = experiment.program.mesh.devices.flat[3]
                state = break_leaf(state, "params/output_dense/bias", device)
            return state, metrics

        program = dataclasses.replace(experiment.program, train_step=train_step)
        return experiment._replace(program=program)

    monkeypatch.setattr(main, "prepare", prepare_broken)
    arguments = (
        *FEW_STEPS,
        "--config.training.num_steps=100",
        "--config.training.log_every_steps=1",
        "--config.debug.check_replicas_every=2",
        "--force",  # Nobody can trace a step that is broken so.
    )
    assert run_command(_command("fsdp", *arguments)) == 3
    output, error = capsys.readouterr()
    assert "replica check: every 2 steps, 7 of 16 arrays have copies to compare\n" in output
    # The difference has spread from the bias to other arrays by the time of the check.
    assert error.startswith(
        "error: stopped, the results so far are in runs/fsdp/001; after step 6 'params/"
    )
    assert " is not the same, bit for bit, on devices that hold copies of it: device " in error
    assert error.count("\n") == 1
    steps = [record["step"] for record in read_metrics(Path("runs/fsdp/001"))]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_report_that_fails_does_not_change_how_a_run_ends(monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise OSError(24, "Too many\nopen files")

    monkeypatch.setattr("manualpar.training.monitoring.report.draw_charts", fail)
    monkeypatch.setattr("manualpar.training.run.Trainer.train", lambda self, state, position: state)
    command = _command("fsdp", *FEW_STEPS, "--workdir=run", "--force")
    traced = prepare(command.config)
    monkeypatch.setattr(main, "prepare", lambda *args, **kwargs: traced)
    assert run_command(command) == 0
    output, error = capsys.readouterr()
    said = "run has no new report: [Errno 24] Too many open files\n"
    assert f"\n{said}" in output
    assert error == ""
    ends = (
        (CheckpointError("not saved"), 6, "; not saved"),
        (StoppedError(2, is_saved=True), 75, "stopped after step 2, which is"),
        (KeyboardInterrupt(), 130, "error: interrupted; "),
    )
    for end, code, sentence in ends:

        def stop(self, state, position, end=end):
            raise end

        monkeypatch.setattr("manualpar.training.run.Trainer.train", stop)
        shutil.rmtree("run")
        assert run_command(command) == code
        first, *others = capsys.readouterr().err.splitlines(keepends=True)
        assert sentence in first
        assert others == [f"also: {said}"]


def test_our_own_mistakes_keep_their_traceback(monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("a bug in the loop")

    monkeypatch.setattr(main, "run", fail)
    with pytest.raises(ValueError, match="a bug in the loop"):
        run_command(_command("fsdp"))

    def break_(*args, **kwargs):
        raise TypeError("a bug before it")

    monkeypatch.setattr(main, "prepare", break_)
    with pytest.raises(TypeError, match="a bug before it"):
        run_command(_command("fsdp"))


def test_ctrl_c_before_training_is_not_a_traceback_either(monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "prepare", interrupt)
    assert run_command(_command("fsdp")) == 130
    assert capsys.readouterr().err == "error: interrupted; nothing was written\n"


@pytest.mark.parametrize("name", ["dp", "fsdp", "hsdp", "zero"])
def test_help_lists_flags_and_fields(name, capsys, monkeypatch):
    experiment = importlib.import_module(f"experiments.{name}")
    monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
    with pytest.raises(SystemExit) as ended:
        main.main([f"python -m experiments.{name}", "--help"], experiment.__doc__, name)
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"python -m experiments.{name}" in shown
    for text in ("--config", "--workdir", "--devices", "optimizer.learning_rate", "0.003"):
        assert text in shown
    assert "--parallel.mode=manual\n      Who writes the collectives: this package" in shown
    assert "[one of 'manual', 'auto', 'explicit', 'auto-unconstrained';" in " ".join(shown.split())
