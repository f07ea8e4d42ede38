"""A comparison from its command line to what it leaves behind."""

import contextlib
import itertools
import json
import re
import struct
import zlib
from pathlib import Path

import jax
import pytest

from configs import compare as compare_config
from manualpar.commands import compare_command as experiment
from manualpar.commands.command_line import CommandLine, flags_parser, parse_command_line
from manualpar.core.mesh.compiler_options import ChosenOptions
from manualpar.data import train_batches
from manualpar.inspect import total_bytes, total_step_bytes, trace_collectives
from manualpar.inspect.step_ledger import describe_codes
from manualpar.strategies import strategy_kinds
from manualpar.training import experiment as training

SMALL = (
    "--config.model.hidden_size=16",
    "--config.model.num_layers=1",
    "--config.optimizer.warmup_steps=0",
    "--config.training.num_steps=3",
    "--config.compare.repetitions=2",
)
TWO_PAIRS = "--config.pairs=(('fsdp', 'manual'), ('hsdp', 'auto'))"


def _command(*arguments: str) -> CommandLine:
    return parse_command_line(
        ["program", *arguments], default_config="compare", syntax=experiment.COMPARING
    )


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch, devices8):
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_two_pairs_side_by_side(capsys, monkeypatch):
    chosen = ChosenOptions({"xla_cpu_enable_fast_math": False}, "for cpus")
    monkeypatch.setattr(training, "choose_options", lambda *_, **by: chosen)
    command = _command(*SMALL, TWO_PAIRS)
    assert experiment.compare_command(command) == 0
    workdir = Path("runs/compare/001")
    assert {path.name for path in workdir.iterdir()} == {
        "config.json",
        "comparison.json",
        "comparison.md",
        "comparison.png",
    }
    stored = json.loads((workdir / "config.json").read_text())
    assert stored["pairs"] == [["fsdp", "manual"], ["hsdp", "auto"]]
    check_json(json.loads((workdir / "comparison.json").read_text()))
    check_markdown((workdir / "comparison.md").read_text())
    check_png((workdir / "comparison.png").read_bytes())

    output, error = capsys.readouterr()
    assert error == ""
    lines = output.splitlines()
    assert lines[0] == "mesh: replica=2, data=4 on 8 simulated cpu devices"
    assert lines[1] == f"compiler options: {chosen}"
    assert re.fullmatch(r"fsdp manual +compiled in \d+\.\d s", lines[2])
    assert lines[-1] == "results: runs/compare/001"
    table = [line.split() for line in lines]
    [row] = [cells for cells in table if cells[:2] == ["fsdp", "manual"] and len(cells) > 6]
    assert row[7] == "≤"
    assert row[-1] == "1.00"  # The first row, in parts of itself.


@pytest.mark.slow
def test_codes_are_those_of_the_pairs_and_not_of_one_device():
    codes = ("--config.parallel.gather_code=int8", "--config.parallel.reduce_code=int4")
    pair = "--config.pairs=(('hsdp', 'manual'),)"
    (_, hsdp), (_, one) = experiment.prepare_pairs(_command(*SMALL, pair, *codes).config)
    assert describe_codes(hsdp.program.comm) == (
        "gathered parameters as codes of int8, gradients over replica as codes of int4"
    )
    assert describe_codes(one.program.comm) == ""


@pytest.mark.slow
def test_replicas_exchange_every_fragment_when_it_is_due():
    fields = {"every": 2, "outer_fragments": 2, "outer_overlap": True}
    flags = [f"--config.parallel.{name}={value}" for name, value in fields.items()]
    flags += ["--config.pairs=(('diloco', 'manual'),)", "--config.training.num_steps=4"]
    command = _command(*SMALL, *flags)
    (_, prepared), _ = experiment.prepare_pairs(command.config)
    program, size = prepared.program, prepared.config.data.batch_size
    trial = experiment.Trial("diloco", program)
    train = prepared.task.dataset.train
    stream = train_batches(train, seed=0, batch_size=size, sharding=program.batch_sharding)
    with contextlib.closing(stream):
        batches = list(itertools.islice(stream, 4))
    trial.train(batches, seed=0)
    state = program.init(jax.random.key(0))
    for number, batch in enumerate(batches, 1):
        state, metrics = program.step_at(number)(state, batch)
    total, count = metrics["loss"]
    assert trial.losses[-1] == float(total) / float(count)
    trial.time_step(batches[0])
    row = trial.row(reference=trial, first=trial)
    # A device has a fourth of 1,200 parameters and 10 that are whole, and every other step it sends
    # twice the half of their four bytes; and so of the number of examples, once for each fragment.
    outer = (300 + 10) * 4 / 2
    assert row["formula_bytes"] == total_step_bytes(program) + outer
    assert row["bytes_sent"] == total_bytes(trace_collectives(trial.traced)) + outer + 2 * 4 / 2


def check_json(found):
    assert found["compiler_options"] == ["xla_cpu_enable_fast_math=False (for cpus)"]
    fsdp, hsdp = found["rows"]
    one = found["one_device"]
    assert [row["strategy"] for row in (fsdp, hsdp, one)] == ["fsdp", "hsdp", "one device"]
    assert [row["mode"] for row in (fsdp, hsdp, one)] == ["manual", "auto", "auto"]
    for row in (fsdp, hsdp):
        assert row["mesh"] == {"replica": 2, "data": 4}
        assert row["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert row["difference"] == row["final_loss"] - one["final_loss"]
        assert abs(row["difference"]) <= row["largest_difference"] < 1e-5
        assert row["compile_seconds"] > 0
        assert row["step_seconds"] > 0
        assert row["temporary_bytes"] > 0
    assert len(one["losses"]) == 3
    assert one["losses"][0] > one["losses"][-1]
    assert (one["mesh"], one["bytes_sent"], one["formula_bytes"]) == ({"data": 1}, 0, 0)
    assert (fsdp["read_from"], hsdp["read_from"]) == ("traced", "compiled")
    assert fsdp["step_ratio"] == 1

    # Parameters: 64 x 16 and 16 sharded, 16 x 10 likewise, 10 whole; as many moments twice.
    sharded, whole = 64 * 16 + 16 + 16 * 10, 10
    counters = 2 * 4
    assert one["state_bytes"] == 3 * 4 * (sharded + whole) + counters
    assert fsdp["state_bytes"] == 3 * 4 * (sharded // 8 + whole) + counters
    assert hsdp["state_bytes"] == 3 * 4 * (sharded // 4 + whole) + counters

    # Two minibatches: 2 x 2 gathers and 2 scatters, of which the first kernel's and the bias's
    # second gathers are not needed; metrics are four numbers more.
    assert fsdp["formula_is_bound"]
    assert fsdp["formula_bytes"] == 6 * 4 * sharded * 7 / 8 + 2 * 4 * whole * 7 / 8
    spared = 2 * 4 * (64 * 16 + 16) * 7 / 8
    metrics = fsdp["bytes_sent"] - (fsdp["formula_bytes"] - spared)
    assert 0 < metrics < 100
    assert fsdp["collectives"]["reduce_scatter"] == 2 * 3
    assert fsdp["collectives"]["all_gather"] == 2 * 3 + 2 * 1


def check_markdown(text):
    table, notes = text.split("\n\n")
    header, alignment, *rows = table.splitlines()
    assert len(rows) == 3
    assert {line.count("|") for line in (header, alignment, *rows)} == {header.count("|")}
    assert rows[0].startswith("| fsdp manual | ")
    assert "formula KiB" in header
    assert "as a median over 2 rounds" in notes


def check_png(data):
    """A PNG whose image data is all there and not of one colour."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    position, chunks = 8, []
    while position < len(data):
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        chunks.append((kind, data[position + 8 : position + 8 + length]))
        position += 12 + length
    width, height, depth = struct.unpack(">IIB", chunks[0][1][:9])
    assert width > 1000
    assert height > 500
    assert depth == 8
    pixels = zlib.decompress(b"".join(body for kind, body in chunks if kind == b"IDAT"))
    assert len(pixels) == height * (1 + 4 * width)
    assert len(set(pixels)) > 50
    assert chunks[-1][0] == b"IEND"


@pytest.mark.slow
def test_a_mode_without_a_formula_and_an_unsharded_strategy(capsys):
    pairs = "--config.pairs=(('dp', 'manual'), ('fsdp', 'auto-unconstrained'))"
    assert experiment.compare_command(_command(*SMALL, pairs, "--workdir=run")) == 0
    dp, fsdp = json.loads(Path("run/comparison.json").read_text())["rows"]
    assert not dp["formula_is_bound"]
    assert 0 < dp["bytes_sent"] - dp["formula_bytes"] < 100
    assert fsdp["formula_bytes"] is None
    assert "| - |" in Path("run/comparison.md").read_text()
    assert capsys.readouterr().out.endswith("results: run\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--config.pairs=(('fsdp', 'manaul'),)"],
            "config.pairs contains ('fsdp', 'manaul'), expected a mode that is one of 'manual', "
            "'auto', 'explicit', 'auto-unconstrained'; the nearest one is 'manual'.",
        ),
        (["--config.pairs=(('zero', 'auto'),)"], "expected a strategy that is one of 'dp', "),
        (["--config.pairs=('fsdp', 'auto')"], "config.pairs contains 'fsdp', expected pairs of"),
        (["--config.pairs=()"], "config.pairs is (), expected pairs of a strategy and a mode"),
        (
            ["--config.pairs=(('dp', 'auto'), ('dp', 'auto'))"],
            "config.pairs contains ('dp', 'auto') twice, expected each pair once.",
        ),
        (
            ["--config.model.dropout_rate=0.1"],
            "config.model.dropout_rate is 0.1, expected 0: every device draws its own mask",
        ),
        (["--config.compare.repetitions=0"], "config.compare.repetitions is 0, expected an int"),
        (["--config.data.batch_size=100"], "config.data.batch_size is 100, expected a multiple of"),
        (["--config.parallel.mesh={'data': -1}"], "expected 'replica' too"),
        (["--config.parallel.reduce_dtype=float32"], "config.parallel.mode is 'auto', expected ''"),
        (["--workdir=old"], "--output=old holds an earlier run (config.json)"),
        (["--workdir=old/config.json/new"], "the results cannot be written to old/config.json/new"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_ends_in_one_sentence(arguments, message, capsys):
    Path("old").mkdir()
    Path("old/config.json").write_text("{}\n")
    pairs = [] if "pairs" in arguments[0] else [TWO_PAIRS]
    assert experiment.compare_command(_command(*SMALL, *pairs, *arguments)) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not Path("runs").exists()


def test_a_config_of_another_experiment_lacks_the_pairs(capsys):
    assert experiment.compare_command(_command("fsdp")) == 2
    assert "config.pairs is missing, expected it as in configs/compare" in capsys.readouterr().err


def test_a_field_that_a_file_adds_is_refused(capsys):
    Path("more.py").write_text(
        "from configs import compare\n\ndef get_config():\n    config = compare.get_config()\n"
        "    config.compare.unlock()\n    config.compare.repetition = 3\n    return config\n"
    )
    assert experiment.compare_command(_command("--config=more.py")) == 2
    assert "config.compare.repetition is not a known field" in capsys.readouterr().err


def test_the_default_pairs_are_every_strategy_in_every_mode():
    config = compare_config.get_config()
    exact = [name for name, kind in strategy_kinds().items() if kind.is_exact]
    expected = {(name, mode) for name in exact for mode in ("manual", "auto", "explicit")}
    assert set(config.pairs) == expected | {("fsdp", "auto-unconstrained")}
    assert config.is_locked


def test_ctrl_c_is_not_a_traceback(monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("manualpar.commands.compare_command.prepare", interrupt)
    assert experiment.compare_command(_command(*SMALL, TWO_PAIRS)) == 130
    assert capsys.readouterr().err == "error: interrupted; nothing was written\n"


def test_help_lists_flags_and_fields(capsys):
    parse = flags_parser(experiment.USAGE, "compare", experiment.COMPARING)
    with pytest.raises(SystemExit) as ended:
        parse(["program", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for text in ("{program} [CONFIG]", "pairs", "compare.repetitions", "--output"):
        assert text in shown
