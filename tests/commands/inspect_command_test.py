"""The inspection of configs from its command line to what it leaves behind."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import rich.console
from absl import flags
from matplotlib.axes import Axes

from manualpar.commands import inspect_command as inspection
from manualpar.commands.command_line import flags_parser, parse_command_line
from manualpar.commands.inspect_command import (
    INSPECTING,
    describe_fit,
    draw_schedule,
    inspect_command,
    print_schedule,
)
from manualpar.core.mesh.compiler_options import ChosenOptions
from manualpar.inspect.budgets import read_budgets
from manualpar.layers.pipeline.schedules import Costs, make_table
from manualpar.planner.hardware import chip_named
from manualpar.training.experiment import prepare
from tests.paths import ROOT

CONFIGS = ROOT / "configs"
FSDP, DP, HSDP, LM = (f"--config={CONFIGS / name}.py" for name in ("fsdp", "dp", "hsdp", "fsdp_lm"))
SMALL = ("--config.model.hidden_size=16", "--config.model.num_layers=1")
WHOLE = (*SMALL, "--config.optimizer.num_minibatches=1")  # Traced in a quarter of the time.
ABSTRACT = ("--nocompile", "--devices=8")


def _parse(*arguments: str):
    return parse_command_line(["program", *arguments], default_config="fsdp", syntax=INSPECTING)


def _run(*arguments: str) -> int:
    return inspect_command(_parse(*arguments))


def _rows(output: str) -> list[list[str]]:
    """The lines of tables as cells."""
    return [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch, devices8):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _no_picture(monkeypatch):
    monkeypatch.setattr(inspection, "draw_ledgers", lambda ledgers, path, **bounds: path.touch())


@pytest.mark.slow
def test_two_configs_side_by_side(capsys):
    assert _run(FSDP, HSDP, *SMALL, *ABSTRACT, "--config.optimizer.num_minibatches=2") == 0
    folder = Path("runs/inspect/001")
    assert {path.name for path in folder.iterdir()} == {"fsdp.json", "hsdp.json", "inspect.png"}
    output, error = capsys.readouterr()
    assert error == ""
    assert "fsdp: fsdp manual on data=8; of a device in a step" in output
    assert "hsdp: hsdp manual on replica=2, data=4; of a device in a step" in output
    assert output.endswith("results: runs/inspect/001\n")
    assert "\x1b" not in output  # Plain lines where there is no terminal.

    # Parameters: 64 x 16 and 16 and 16 x 10 sharded over 8, 10 whole, of 4 bytes; 2 minibatches.
    # Each is gathered twice, and once more for backward only the kernel behind the first layer.
    sharded, last, whole = 64 * 16 + 16 + 16 * 10, 16 * 10, 10
    gathered = 2 * 4 * sharded * 7 // 8
    found = json.loads((folder / "fsdp.json").read_text())
    by_purpose = found["bytes"]["by_purpose"]
    assert by_purpose["gather_params"] == gathered
    assert by_purpose["scatter_gradients"] == gathered
    assert by_purpose["regather_params"] == 2 * 4 * last * 7 // 8
    assert by_purpose["sync_gradients"] == 2 * 4 * whole * 7 / 8
    rows = _rows(output)
    total = 2 * gathered + 2 * 4 * last * 7 // 8 + 2 * 4 * whole * 7 / 8 + 7 + 7 * 8
    assert found["bytes"]["total"] == total
    assert ["gather_params", "data", "6", "8.2 KiB", f"{gathered / total:.1%}"] in rows
    forward = 2 * 16 * (64 * 16 + 16 * 10)  # 16 examples a device.
    assert found["flops"]["by_phase"]["forward"] == forward

    # What the formula says of it, and why it is not what is sent.
    formula = 3 * gathered + 2 * 4 * whole * 7 / 8
    assert found["predicted_bytes"] == {"total": formula, "by_axes": {"data": formula}}
    assert found["predicted_is_bound"]
    less = gathered - 2 * 4 * last * 7 // 8
    assert f"({less:,} less, because parameters that the backward pass does not need" in output
    assert [row[0] for row in rows if row[0] in ("formula", "jaxpr", "compiled")] == [
        "formula",
        "jaxpr",
    ] * 2
    assert found["devices"] == 8
    assert found["config"]["model"]["hidden_size"] == 16
    assert found["compiled"] is None

    # The table of both.
    table = rows[rows.index(["side by side"]) :]
    assert [row[:2] for row in table if row[0] in ("fsdp", "hsdp")] == [
        ["fsdp", str(sum(found["counts"].values()))],
        ["hsdp", str(sum(json.loads((folder / "hsdp.json").read_text())["counts"].values()))],
    ]
    check_png((folder / "inspect.png").read_bytes())


def check_png(content: bytes):
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert (width, height) > (1000, 300)


def test_all_three_readings_and_what_the_compiler_did(capsys):
    assert _run(FSDP, *WHOLE, "--output=out") == 0
    output = capsys.readouterr().out
    found = json.loads(Path("out/fsdp.json").read_text())
    rows = _rows(output)
    [compiled] = [row for row in rows if row[0] == "compiled"]
    assert compiled[-1].endswith("temporaries")
    assert found["compiled"]["temporaries"] > 0
    assert {one["purpose"] for one in found["compiled"]["collectives"]} >= {"gather_params"}
    assert {one["module"] for one in found["compiled"]["collectives"]} >= {"output_dense"}
    for change in found["changes"]:
        assert f"  {change['kind']}: {change['words']}" in output
    assert "FLOPs compiled: XLA's count" in output


@pytest.mark.slow
def test_where_the_compiler_writes_the_collectives_its_own_are_shown(capsys):
    assert _run(FSDP, *SMALL, "--config.parallel.mode=auto", "--output=out") == 0
    found = json.loads(Path("out/fsdp.json").read_text())
    output = capsys.readouterr().out
    assert found["collectives"] == []
    assert any(row[:2] == ["gather_params", "8 devices"] for row in _rows(output))
    assert "the compiler writes the collectives" in output


@pytest.mark.usefixtures("_no_picture")
def test_modules_that_are_alike_share_a_line(capsys):
    assert _run(FSDP, *WHOLE, *ABSTRACT, "--config.model.num_layers=4") == 0
    rows = _rows(capsys.readouterr().out)
    found = json.loads(Path("runs/inspect/001/fsdp.json").read_text())
    each = [x for x in found["collectives"] if x["module"].startswith("hidden_dense_")]
    [row] = [row for row in rows if row[0] == "hidden_dense_* (3)"]
    assert row[1] == str(sum(x["times"] for x in each))
    assert row[4] == "73.7 kFLOP"  # 3 phases of 3 layers on 16 examples: 9 x 2 x 16 x 16 x 16.
    assert not [row for row in rows if row[0] == "hidden_dense_1"]


@pytest.mark.usefixtures("_no_picture")
def test_compiler_options_are_shown_where_there_was_something_to_choose(capsys, monkeypatch):
    chosen = ChosenOptions({"xla_some": "true"}, "for some chips")
    monkeypatch.setattr(
        inspection,
        "prepare",
        lambda *of, **options: prepare(*of, **options)._replace(chosen=chosen),
    )
    assert _run(FSDP, *WHOLE, *ABSTRACT) == 0
    assert "compiler options: xla_some=true (for some chips)" in capsys.readouterr().out
    found = json.loads(Path("runs/inspect/001/fsdp.json").read_text())
    assert found["compiler_options"] == str(chosen)


@pytest.mark.usefixtures("_no_picture")
def test_the_links_of_the_axes_are_shown_where_they_differ(capsys, monkeypatch):
    monkeypatch.setattr(inspection, "describe_links", lambda mesh: f"data: around {mesh.size}")
    assert _run(FSDP, *WHOLE, "--nocompile") == 0
    assert "fsdp manual on data=8 (data: around 8); of a device" in capsys.readouterr().out
    assert _run(FSDP, *WHOLE, *ABSTRACT) == 0  # Of devices that are not there nobody knows.
    assert "fsdp manual on data=8; of a device" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("_no_picture")
def test_split_layers_send_what_their_formula_says(capsys):
    sizes = ("--config.model.hidden_size=16", "--config.model.mlp_size=32")
    assert _run(f"--config={CONFIGS / 'tp_lm'}.py", *sizes, *ABSTRACT) == 0
    output = capsys.readouterr().out
    layers = re.search(r"formula for layers gives ([\d,]+) bytes; the step sends ([\d,]+)", output)
    assert layers[1] == layers[2]
    found = json.loads(Path("runs/inspect/001/tp_lm.json").read_text())
    assert f"{found['predicted_layers']['total']:,}" == layers[1]
    assert list(found["predicted_layers"]["by_axes"]) == ["model"]
    # All over the axis, but for a bool and a few counts of numbers that are not finite.
    [row] = [row for row in _rows(output) if row[0] == "model" and row[1] == "4"]
    predicted = found["predicted_layers"]["total"] + found["predicted_bytes"]["by_axes"]["model"]
    assert 0 <= found["bytes"]["by_axes"]["model"] - predicted < 100
    assert row[4].removeprefix("≤ ") == row[2]


def test_devices_that_nobody_has(capsys):
    many = ("--devices=4096", "--config.data.batch_size=16384", "--memory=1 KiB")
    assert _run(FSDP, *WHOLE, *many) == 0
    found = json.loads(Path("runs/inspect/001/fsdp.json").read_text())
    assert (found["devices"], found["mesh"]) == (4096, {"data": 4096})
    assert found["compiled"] is None  # So many are not simulated unless somebody asks for it.
    output = capsys.readouterr().out
    assert "on data=4096" in output
    assert re.search(r"\nfsdp: memory: does not fit the device's 1 KiB, by [\d.]+ KiB\n", output)


@pytest.mark.usefixtures("_no_picture")
def test_the_difference_to_what_was_found_before(capsys):
    assert _run(FSDP, *WHOLE, *ABSTRACT, "--output=old") == 0
    assert _run(FSDP, *WHOLE, *ABSTRACT, "--output=new", "--against=old") == 0
    assert "fsdp: no difference to old/fsdp.json" in capsys.readouterr().out
    changes = ("--config.model.num_layers=2", "--config.parallel.gather_dtype=bfloat16")
    arguments = (FSDP, *WHOLE, *ABSTRACT, *changes, "--output=new", "--against=old/fsdp.json")
    assert _run(*arguments) == 0
    rows = _rows(capsys.readouterr().out)
    assert ["added", "gather_params", "hidden_dense_1", "all_gather", "data", "-"] in [
        row[:6] for row in rows
    ]
    [changed] = [row for row in rows if row[:3] == ["changed", "gather_params", "output_dense"]]
    # Half of 7 x 20 x 4 bytes.
    assert changed[5:] == ["1 x float32", "1 x bfloat16", "-280 B"]
    old, new = (json.loads(Path(f"{name}/fsdp.json").read_text()) for name in ("old", "new"))
    more = new["counts"]["all_gather"] - old["counts"]["all_gather"]
    assert more > 0
    assert [row for row in rows if row[0] == "collectives" and len(row) == 4]


@pytest.mark.usefixtures("_no_picture")
def test_a_budget_is_written_kept_and_broken(capsys):
    budget = "--budget=budgets.toml"
    assert _run(FSDP, DP, *WHOLE, *ABSTRACT, budget, "--write_budget") == 0
    assert "budgets: budgets.toml\n" in capsys.readouterr().out
    budgets = read_budgets(Path("budgets.toml"))
    assert set(budgets) == {"fsdp", "dp"}
    assert _run(FSDP, *WHOLE, *ABSTRACT, budget) == 0
    output, error = capsys.readouterr()
    assert error == ""
    assert "fsdp: the budget is kept" in output
    assert "slack" not in output

    # A limit that half of the bytes keep is pointed out, no more.
    assert _run(FSDP, *WHOLE, *ABSTRACT, budget, "--config.parallel.gather_dtype=bfloat16") == 0
    assert "  slack: fsdp: bytes allows " in capsys.readouterr().out
    # One layer more: it is named, and whoever did not change is not.
    broken = (FSDP, *WHOLE, *ABSTRACT, budget, "--config.model.num_layers=2", "--output=out")
    assert _run(*broken) == 1
    output, error = capsys.readouterr()
    assert "the budget is kept" not in output
    lines = error.splitlines()
    assert all(line.startswith("error: over budget: ") for line in lines)
    [total] = [line for line in lines if line.startswith("error: over budget: fsdp: bytes is ")]
    assert "look at hidden_dense_1" in total
    assert "(without a limit of its own)" in total
    assert "input_dense" not in total
    assert Path("out/inspect.png").exists()  # What it looks like is wanted then above all.


@pytest.mark.usefixtures("_no_picture")
def test_what_is_compiled_is_not_checked_where_nothing_is(capsys):
    Path("b.toml").write_text("[fsdp]\ntemporaries = 1\n")
    assert _run(FSDP, *WHOLE, *ABSTRACT, "--budget=b.toml") == 0
    assert "not checked, because nothing was compiled or the number is not known: temporaries" in (
        capsys.readouterr().out
    )


def test_values_are_set_in_every_config_wherever_they_stand():
    before = _parse("--config.seed=7", FSDP, "--config", str(CONFIGS / "dp.py"), "--devices=4")
    assert [named.name for named in before.configs] == ["fsdp", "dp"]
    assert [named.config.seed for named in before.configs] == [7, 7]
    after = _parse(FSDP, "--config.training.num_steps", "9", "--devices=4")
    assert after.configs[0].config.training.num_steps == 9
    assert (before.flags.devices, after.flags.devices) == (4, 4)
    assert _parse().configs[0].path == CONFIGS / "fsdp.py"


def test_what_is_compiled_depends_on_the_number_of_devices():
    assert _parse().flags.compile
    assert _parse("--devices=64").flags.compile
    assert not _parse("--devices=65").flags.compile
    assert _parse("--devices=65", "--compile").flags.compile
    assert not _parse("--nocompile").flags.compile


def test_files_of_one_name_are_told_apart_by_their_folders():
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(f"{folder}/lm.py").write_text(Path(CONFIGS / "fsdp.py").read_text())
    names = [named.name for named in _parse("--config=a/lm.py", "--config=b/lm.py", DP).configs]
    assert names == ["a-lm", "b-lm", "dp"]


def test_memory_is_a_size_or_a_chip():
    assert _parse("--memory=16GiB").flags.memory == ("device", 2**34)
    assert _parse().flags.memory is None
    assert _parse("--memory=v5p").flags.memory == ("v5p", chip_named("v5p").hbm_bytes)
    assert describe_fit(2**20, "v5p", 2**22) == "25.0% of the v5p's 4 MiB"
    assert describe_fit(2**20, "v5p", 2**34) == "less than 0.1% of the v5p's 16 GiB"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.data.batch_size=100"], "fsdp.py: config.data.batch_size is 100, expected a m"),
        (["--against=none.json"], "--against=none.json: none.json cannot be read (No such file"),
        (["--against=old"], "--against=old: old/fsdp.json cannot be read (No such file"),
        (["--against=text.json"], "--against=text.json: text.json is not JSON ("),
        (["--against=deep.json"], "--against=deep.json: deep.json is nested deeper than 64 lev"),
        (["--against=other.json"], "other.json lacks mesh, bytes, counts, collectives, flops, mem"),
        (["--budget=none.toml"], "none.toml: No such file or directory."),
        (["--budget=b.toml"], "b.toml has no budget [fsdp]; the nearest one is [fsdp_lm]. Write "),
        (["--budget=c.toml"], "c.toml: [fsdp] is for devices=4, but the step is for 8; i"),
        (["--output=old"], "--output=old holds an earlier run (config.json), which is not overwri"),
        (["--output=text.json/new"], "the results cannot be written to text.json/new: "),
    ],
)  # fmt: skip
def test_what_cannot_be_done_ends_in_one_sentence(arguments, message, capsys):
    Path("old").mkdir()
    Path("old/config.json").write_text("{}\n")
    Path("text.json").write_text("text\n")
    Path("other.json").write_text("{}\n")
    Path("deep.json").write_text("[" * 100_000)
    Path("b.toml").write_text("[fsdp_lm]\nbytes = 1\n")
    Path("c.toml").write_text("[fsdp]\ndevices = 4\n")
    assert _run(*SMALL, *ABSTRACT, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_without_matplotlib_a_sentence_takes_the_place_of_the_picture(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert _run(*SMALL, *ABSTRACT, "--output=here") == 0
    assert "inspect.png needs matplotlib, which is not installed: pip" in capsys.readouterr().out
    [path] = Path("here").iterdir()
    assert path.suffix == ".json"


def test_ctrl_c_is_not_a_traceback(monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(inspection, "prepare", interrupt)
    assert _run(*SMALL, *ABSTRACT) == 130
    assert capsys.readouterr().err == "error: interrupted; nothing was written\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "code", "message"),
    [
        (10**9, 0, ""),
        (1, 1, "error: over budget: fsdp: bytes is "),
        (-1, 2, "error: --budget=b.toml: b.toml: [fsdp]"),
    ],
)
def test_the_process_ends_with_the_exit_code(most, code, message):
    Path("b.toml").write_text(f"[fsdp]\nbytes = {most}\n")
    ended = subprocess.run(
        [sys.executable, "-m", "experiments.inspect", FSDP, *SMALL, *ABSTRACT, "--budget=b.toml"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(CONFIGS.parent)},
        check=False,
    )
    assert ended.returncode == code
    assert ended.stderr.startswith(message)
    assert ended.stderr.count("\n") == bool(message)


@pytest.mark.slow
def test_the_devices_there_are_are_eight_simulated_ones_where_there_is_a_cpu():
    ours = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    subprocess.run(
        [sys.executable, "-m", "experiments.inspect", FSDP, *SMALL, "--nocompile", "--output=out"],
        env=environment | {"PYTHONPATH": str(CONFIGS.parent), "JAX_PLATFORMS": "cpu"},
        check=True,
    )
    assert json.loads(Path("out/fsdp.json").read_text())["devices"] == 8


def test_help_and_mistakes_end_the_process(capsys, monkeypatch):
    # Other commands define flags of the same names, each in a process of its own.
    monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
    parse = flags_parser(inspection.USAGE, "fsdp", INSPECTING)
    with pytest.raises(SystemExit) as ended:
        parse(["program", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for text in ("{program} [CONFIG ...]", "--against", "--write-budget", "Exit codes"):
        assert text in shown
    with pytest.raises(SystemExit) as ended:
        parse(["program", "--devises=8"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: --devises is not a known flag")


# -------------------------------------------------------------------------------------------------
# `inspect --schedule`: the schedule of a config's pipeline, printed, written and drawn.


SMALL_PIPELINE = (
    "--config.model.hidden_size=16",
    "--config.model.num_heads=2",
    "--config.model.num_kv_heads=2",
    "--config.model.mlp_size=32",
    "--config.data.sequence_length=8",
    "--config.data.batch_size=16",
)


@pytest.fixture(autouse=True)
def _inside_schedule(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _run_schedule(name: str, *arguments: str) -> int:
    flags = [f"--config={name}", "--nocompile", "--devices=8", "--output=out"]
    line = ["program", *flags, "--schedule", *arguments]
    return inspect_command(parse_command_line(line, default_config="fsdp", syntax=INSPECTING))


@pytest.mark.slow
def test_the_schedule_is_printed_written_and_drawn(capsys):
    assert _run_schedule("pp_lm", *SMALL_PIPELINE) == 0
    output = capsys.readouterr().out
    assert "pp_lm: 1f1b: 4 stages, 8 microbatches, 14 ticks, bubble 27.3%" in output
    assert "\nstage 3 F  .  .  .  0  1  2  3  4  5  6  7  .  .  .\n" in output
    found = json.loads(Path("out/pp_lm.json").read_text())["schedule"]
    # One example of 8 tokens: attention's q, k, v and out, its two products, and SwiGLU's three.
    layer = 2 * 8 * (4 * 16 * 16 + 2 * 8 * 16 + 3 * 16 * 32)
    assert found["flops"]["forward"] == layer
    assert found["flops"]["backward"] == 2 * layer + 2 * 8 * 8 * 16  # The scores again.
    assert found["flops"]["after"] > 0
    assert found["idle_share"] > found["bubble"] == pytest.approx(3 / 11)
    assert Path("out/pp_lm.schedule.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_a_config_without_a_pipeline_is_refused_before_it_is_traced(capsys):
    assert _run_schedule("fsdp") == 2
    error = capsys.readouterr().err
    assert "--schedule: " in error
    assert (
        "has no pipeline on the mesh {'data': 8}; expected a mesh with an axis for stages" in error
    )


def test_a_long_schedule_is_left_to_the_picture(capsys):
    flops = {"forward": 1e9, "backward": 2e9, "before": 0.0, "before_backward": 0.0, "after": 1e9}
    sizes = {"num_stages": 2, "num_microbatches": 100, "chunks": 1}
    shares = {"bubble": 0.0099, "idle_share": 0.13}
    found = {"schedule": "1f1b", **sizes, **shares, "flops": flops}
    print_schedule(rich.console.Console(width=100), "long", found)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("long: 1f1b: 2 stages, 100 microbatches, 102 ticks, bubble 1.0%")
    assert lines[2] == "102 ticks are too many for text; see the picture."
    rows = [line.split() for line in lines]
    # The step takes 1 + 100 (1 + 2 + 1) + 2 GFLOP of time.
    assert ["0", "0", "101", "3", "300", "GFLOP", "74.4%"] in rows
    assert ["1", "1", "100", "1", "400", "GFLOP", "99.3%"] in rows
    assert "A device idles for 13.0% of the time. It would be 1.0%" in " ".join(lines)


# -------------------------------------------------------------------------------------------------
# Schedules as pictures.


def test_a_block_for_each_pass_as_long_as_it_takes(tmp_path, monkeypatch):
    blocks, texts = [], []
    monkeypatch.setattr(
        Axes,
        "barh",
        lambda axes, stages, lengths, left, **style: blocks.extend(
            zip(stages.tolist(), left.tolist(), lengths.tolist(), strict=True)
        ),
    )
    monkeypatch.setattr(Axes, "text", lambda axes, x, y, text, **style: texts.append((y, x, text)))
    path = tmp_path / "schedule.png"
    costs = Costs(forward=1, backward=3, after=2)
    draw_schedule(make_table("1f1b", 2, 2), path, title="two", costs=costs)
    forward = [(0, 0.0, 1.0), (0, 1.0, 1.0), (1, 1.0, 3.0), (1, 7.0, 3.0)]
    # A B begins when the stage's F has ended, and a tick when the slowest stage has.
    backward = [(1, 4.0, 3.0), (0, 7.0, 3.0), (1, 10.0, 3.0), (0, 13.0, 3.0)]
    assert blocks == forward + backward
    assert texts[:2] == [(0, 0.5, "0"), (0, 1.5, "1")]
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", content[16:20])[0] > 1000
