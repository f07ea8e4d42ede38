"""The commands: a run's newest checkpoint answers and scores on other devices than it had."""

import json
import sys

import jax
import numpy as np
import pytest

from manualpar.commands import evaluate_command, generate_command
from manualpar.commands.command_flags import output_line, read_lines
from manualpar.commands.command_line import parse_command_line
from manualpar.commands.evaluate_command import summary
from manualpar.commands.train_command import run_command
from manualpar.models.generation.scoring import Score
from tests.commands.fake_model import ask
from tests.compiling import ENVIRONMENT
from tests.paths import ROOT
from tests.system.cluster.processes import free_port, lines_of_ours

CONFIG = ROOT / "configs" / "fsdp_lm.py"
MODEL = {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "mlp_size": 16, "vocab_multiple": 4}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, devices8):
    """A run of a small language model."""
    del devices8
    return train(tmp_path_factory.mktemp("generation"))


def train(folder, *more):
    text = folder / "text.txt"
    text.write_text("".join(f"the {number} of {number * 7}\n" for number in range(400)))
    flags = [f"--config.model.{name}={value}" for name, value in MODEL.items()]
    flags += [f"--config.training.{name}=4" for name in ("num_steps", "eval_every_steps")]
    flags += [
        "--config.checkpoint.every_steps=4",
        "--config.sample.num_tokens=0",
        "--config.optimizer.warmup_steps=0",
    ]
    flags += [f"--config.data.path={text}", "--config.data.sequence_length=32"]
    flags += ["--config.data.batch_size=8", f"--workdir={folder / 'run'}", *more]
    command = parse_command_line(["fsdp", f"--config={CONFIG}", *flags], default_config=CONFIG)
    assert run_command(command) == 0
    return folder / "run"


@pytest.mark.slow
def test_a_run_answers_and_scores_on_other_devices(workdir, tmp_path, capsys):
    flags = [f"--workdir={workdir}", "--max_tokens=12", "--temperature=0.8", "--seed=3"]
    assert generate_command.main(["generate", *flags, "--prompt=the "]) == 0
    streamed = capsys.readouterr().out
    assert streamed.startswith("the ")
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "the ", "id": 7}\n{"prompt": "x"}\n')
    files = [f"--prompts={prompts}", f"--output={output}"]
    assert generate_command.main(["generate", *flags, *files, "--mesh=data=2,model=4"]) == 0
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer.get("id") for answer in answers] == [7, None]
    assert streamed == f"the {answers[0]['text']}\n"
    check_test_split(workdir, tmp_path / "results.json")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"context": "the ", "completion": answers[0]["text"]}) + "\n")
    assert (
        evaluate_command.main(["evaluate", f"--workdir={workdir}", f"--completions={pairs}"]) == 0
    )
    (score,) = map(json.loads, capsys.readouterr().out.splitlines()[-1:])
    assert score["log_likelihood"] < 0
    assert not np.isnan(score["log_likelihood"])


def check_test_split(workdir, results, rel=1e-5):
    """The test split is as the run has measured it."""
    assert evaluate_command.main(["evaluate", f"--workdir={workdir}", f"--output={results}"]) == 0
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    test = next(line for line in map(json.loads, lines) if line.get("split") == "test")
    found = json.loads(results.read_text())
    assert found["loss"] == pytest.approx(test["loss"], rel=rel)
    assert found["bits_per_byte"] == pytest.approx(test["bits_per_byte"], rel=rel)


@pytest.mark.slow
def test_of_replicas_that_trained_alone_the_anchor_is_scored(tmp_path, devices8):
    mesh = "--config.parallel.mesh={'replica': 2, 'data': 4}"
    options = ("--config.parallel.every=2", "--config.parallel.outer_momentum=0.5")
    workdir = train(tmp_path, "--config.parallel.strategy=diloco", mesh, *options)
    check_test_split(workdir, tmp_path / "results.json")


CODED = {
    "feedback": {
        "strategy": "hsdp",
        "mesh": {"replica": 2, "data": 4},
        "reduce_code": "int4",
        "error_feedback": True,
    },
    "secondary shards": {
        "mesh": {"data": 2, "data_minor": 4},
        "axis_by_axis": True,
        "regather_axes": ("data",),
        "gather_code": "int8",
        "reduce_code": "int8",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CODED)
def test_what_was_trained_with_codes_answers_exactly(tmp_path, devices8, capsys, name):
    flags = [f"--config.parallel.{field}={value}" for field, value in CODED[name].items()]
    workdir = train(tmp_path, *flags)
    # Measured while it was trained, weights are rounded as they travel.
    check_test_split(workdir, tmp_path / "results.json", rel=1e-5 if name == "feedback" else 1e-3)
    capsys.readouterr()
    asked = ["--max-tokens=4", "--prompt=the "]
    assert generate_command.main(["generate", f"--workdir={workdir}", *asked]) == 0
    assert capsys.readouterr().out.startswith("the ")


def start_both(processes, name, flags):
    """Starts two processes of four devices each that answer together."""
    port = free_port()
    command = [sys.executable, "-m", f"experiments.{name}", *flags, "--devices=4"]
    return [
        processes.start(
            command,
            **ENVIRONMENT,
            MANUALPAR_COORDINATOR_ADDRESS=f"127.0.0.1:{port}",
            MANUALPAR_NUM_PROCESSES="2",
            MANUALPAR_PROCESS_ID=str(number),
        )
        for number in (0, 1)
    ]


@pytest.mark.slow
@pytest.mark.long
def test_two_processes_say_what_one_says_and_the_first_prints_it(
    workdir, tmp_path, processes, capsys
):
    drawn = [f"--workdir={workdir}", "--max_tokens=9", "--temperature=0.8"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "the {number}"}}\n' for number in range(11)))
    for name, run, flags in (
        ("generate", generate_command, [*drawn, "--prompt=the "]),
        ("generate", generate_command, [*drawn, f"--prompts={prompts}"]),
        ("evaluate", evaluate_command, [f"--workdir={workdir}"]),
    ):
        assert run.main([name, *flags]) == 0
        expected = capsys.readouterr().out
        first, second = start_both(processes, name, flags)
        assert (first.wait(), second.wait()) == (0, 0), first.err + second.err
        # Gloo writes to standard output too.
        said, silent = (lines_of_ours(process.out) for process in (first, second))
        assert said == [line for line in expected.splitlines() if line.strip()]
        assert silent == []
    first, second = start_both(processes, "generate", [*drawn, f"--prompts={tmp_path / 'none'}"])
    assert first.wait() == 2
    assert second.wait() != 0
    assert "none cannot be read" in first.err


def test_measures_of_texts():
    scores = [Score(-2.0, False, 3), Score(-1.0, True, 1)]
    assert summary(scores, 6) == {
        "tokens": 4,
        "loss": 0.75,
        "perplexity": pytest.approx(2.117, abs=1e-3),
        "bytes": 6,
        "bits_per_byte": pytest.approx(3 / np.log(2) / 6),
    }
    assert "bits_per_byte" not in summary(scores, 0)


def test_lines_and_objects_are_read(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('one\n\n{"prompt": "two", "id": 1}\n')
    assert read_lines(str(path)) == [{"prompt": "one"}, {"prompt": "two", "id": 1}]


def test_every_field_of_a_line_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = {"prompt": "a", "id": 7, "note": "\u00e9 \ud800", "x": [None, {"y": 1.5}]}
    (answer,) = ask(generate_command.main, "prompts", [json.dumps(line)])
    assert answer == {**line, "text": "x", "ending": "stop", "tokens": [1, 2]}
    pair = {"context": "a", "completion": "b", "note": "\ud800"}
    (score,) = ask(evaluate_command.main, "completions", [json.dumps(pair)])
    assert score == {**pair, **Score(-1.0, True, 1)._asdict()}
    assert output_line({"x": "\u00e9"}) == '{"x": "\u00e9"}\n'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workdir=nowhere", "--prompt=a"], "--workdir=nowhere holds no checkpoint"),
        (
            ["--workdir=w", "--prompt=a", "--mesh=model=2"],
            "--mesh=model=2: expected an axis 'data'",
        ),
        (["--workdir=w", "--prompt=a", "--mesh=data"], "--mesh=data: expected axes such as"),
    ],
)
def test_mistakes_are_a_sentence(arguments, message, capsys, devices8):
    del devices8
    assert generate_command.main(["generate", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [generate_command, evaluate_command])
def test_the_commands_say_how_they_are_used(command, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["manualpar x", "--help"])
    assert ended.value.code == 0
    assert "--workdir" in capsys.readouterr().out
    assert jax.device_count()
