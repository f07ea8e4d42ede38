"""The planner's command, from its arguments to what it leaves behind."""

import functools
import json
import re
import sys
from pathlib import Path

import pytest
from absl import flags

from manualpar.commands import plan_command as planner_command
from manualpar.commands.command_line import flags_parser, parse_command_line
from manualpar.commands.plan_command import PLANNING, plan_command
from manualpar.planner.plan import StepEstimate
from manualpar.plans.layouts.layout import Layout
from manualpar.plans.layouts.layout_search import config_of_layout, layout_flags
from manualpar.plans.sweep import sweep
from manualpar.strategies import strategy_kinds
from manualpar.training.config import check_config

SMALL = (
    "--config.model.hidden_size=32",
    "--config.model.num_heads=2",
    "--config.model.mlp_size=64",
    "--config.model.num_layers=1",
)

CLASSIFIER = "--config=fsdp"  # Its traces are short.


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _command(*arguments):
    return parse_command_line(["program", *arguments], default_config="fsdp_lm", syntax=PLANNING)


def test_flags_of_the_planner_and_of_the_config_are_told_apart():
    command = _command(
        "--config.data.batch_size=64", "--topology=v5p:2x2x2", "--search", "--vocab_size", "1000"
    )
    assert command.flags.topology.name == "v5p:2x2x2"
    assert (command.flags.compiler, command.flags.vocab_size, command.flags.search) == (
        "auto",
        1000,
        True,
    )
    assert command.config.data.batch_size == 64
    assert _command().flags.topology.num_devices == 256


def test_a_plan_for_gpus_is_a_model_and_says_so(capsys):
    mesh = "--config.parallel.mesh={'replica': 2, 'data': 8}"
    order = "--config.parallel.mesh_order=('data', 'replica')"
    gone = "--device-mtbf-hours=50000"
    assert plan_command(_command(*SMALL, mesh, order, "--topology=h100:16", gone)) == 0
    workdir = Path("runs/plan-fsdp_lm/001")
    assert {path.name for path in workdir.iterdir()} == {"config.json", "plan.json", "plan.png"}
    [plan] = json.loads((workdir / "plan.json").read_text())["plans"]
    assert (plan["is_model"], plan["source"], plan["fits"]) == (True, "roofline", True)
    assert list(plan["mesh"].items()) == [("data", 8), ("replica", 2)]
    links = "first: data 2 over InfiniBand and 4 over NVLink, replica 2 over NVLink."
    assert any(links in assumption for assumption in plan["assumptions"])
    assert plan["step_seconds"] == plan["compute_seconds"] + plan["exposed_seconds"]
    assert plan["tokens_per_second"] == pytest.approx(32 * 128 / plan["step_seconds"])
    assert (workdir / "plan.png").read_bytes().startswith(b"\x89PNG")
    output, error = capsys.readouterr()
    assert error == ""
    assert "--device_mtbf_hours does nothing, because plan no longer estimates" in output
    assert "roofline, a model" in output
    assert "The model assumes:" in output
    assert re.search(r"https://\S+h100", output)
    assert output.splitlines()[-1] == "results: runs/plan-fsdp_lm/001"


def test_layouts_over_every_axis_are_ranked_and_written(capsys, monkeypatch):
    monkeypatch.setattr(planner_command, "TRACED", 0)
    more = ("--config.model.num_layers=2", "--config.model.vocab_multiple=2")
    flags = ("--topology=h100:16", "--search", *more)
    assert plan_command(_command(*SMALL, *flags)) == 0
    workdir = Path("runs/plan-fsdp_lm/001")
    assert (workdir / "search.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((workdir / "search.json").read_text())
    assert found["weak_scaling"] == {}
    seconds = [each["plan"]["step_seconds"] for each in found["candidates"]]
    assert seconds == sorted(seconds)
    assert {axis for each in found["candidates"] for axis in each["mesh"]} == {
        *("replica", "stage", "data", "context", "model")
    }
    assert "meshes fit; the fastest, by formula" in capsys.readouterr().out


def test_the_old_names_of_a_search_are_understood(capsys, monkeypatch):
    monkeypatch.setattr(planner_command, "TRACED", 0)
    flags = ("--topology=h100:2", "--layouts")
    assert plan_command(_command(*SMALL, *flags, "--config.data.batch_size=2")) == 0
    output = capsys.readouterr().out
    assert "--layouts will be removed in the next release; use --search." in output
    assert "meshes fit; the fastest, by formula" in output


def test_layouts_are_ranked_with_the_codes_of_the_config(capsys, monkeypatch):
    monkeypatch.setattr(planner_command, "TRACED", 0)
    codes = ("--config.parallel.gather_code=int8", "--config.parallel.reduce_code=int4")
    assert plan_command(_command(*SMALL, "--topology=h100:16", "--search", *codes)) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "gathered parameters as codes of int8, gradients as codes of int4; grad" in output
    found = json.loads(Path("runs/plan-fsdp_lm/001/search.json").read_text())["candidates"]
    sent = {(each["gather_code"], each["reduce_code"]) for each in found}
    assert sent == {("int8", "int4")}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=16),
        Layout(data=16, gather_code="int8", reduce_code="int4"),
        Layout(replica=2, stage=4, data=2, model=2, num_minibatches=8, chunks=3, keep="inputs"),
        Layout(data=4, context=4, remat="none", communicate="step"),
    ],
    ids=lambda layout: layout.name,
)
def test_the_flags_of_a_layout_make_its_config(layout):
    config = _command(*SMALL).config
    made = _command(*SMALL, *layout_flags(config, layout)).config
    assert made.to_dict() == config_of_layout(config, layout).to_dict()
    check_config(made)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (['--config.parallel.rules=(("embed", None),)'], "expected 'transformer' and no rules"),
        (["--config.optimizer.ema_decay=0.9"], "ema_decay is 0.9, expected 0.0"),
        (
            ["--config.parallel.reduce_code=int4", "--config.parallel.error_feedback=True"],
            "parallel.error_feedback is True, expected False",
        ),
        (["--config.parallel.regather_axes=('data',)"], "regather_axes is ('data',), expected"),
        (["--config.parallel.reshard_after_forward=False"], "expected True, because the closed"),
        (["--config.parallel.param_dtype=bfloat16"], "param_dtype is 'bfloat16', expected"),
        (
            ["--config.data.batch_size=1", "--config.data.sequence_length=127"],
            "no layout on h100:16",
        ),
    ],
)
def test_layouts_that_have_no_formula_are_refused(arguments, message, capsys):
    assert plan_command(_command(*arguments, "--topology=h100:16", "--layouts")) == 2
    assert message in capsys.readouterr().err


def test_a_batch_that_does_not_divide_is_one_line(capsys):
    assert plan_command(_command("--topology=v5e:16x16")) == 2
    _output, error = capsys.readouterr()
    assert error.startswith("error: config.data.batch_size is 32, expected a multiple of 256")
    assert not Path("runs").exists()


@pytest.mark.parametrize(("topology", "extra"), [("v5e:2x4", "tpu"), ("h100:8", "gpu")])
def test_without_the_compiler_there_is_the_model_and_a_hint(topology, extra, capsys, monkeypatch):
    monkeypatch.setattr(planner_command, "installed", lambda packages: "")
    assert plan_command(_command(CLASSIFIER, f"--topology={topology}")) == 0
    assert f"pip install 'manualpar[{extra}-compiler]'" in capsys.readouterr().out


@pytest.mark.parametrize(("compiler", "topology"), [("tpu", "v5e:2x4"), ("gpu", "h100:2x4")])
def test_what_the_compiler_says_stands_beside_the_model(compiler, topology, monkeypatch):
    asked = {}

    def compile_for_it(config, planned, *, vocab_size):
        asked.update(topology=planned.name, vocab_size=vocab_size)
        return StepEstimate(
            name="fsdp manual",
            topology=planned.name,
            num_devices=8,
            mesh={"data": 8},
            is_model=False,
            source="XLA",
            hbm_bytes=2**30,
            memory={"arguments": 2**20},
            peak_bytes=2**20,
            fits=True,
        )

    monkeypatch.setattr(planner_command, f"compile_for_{compiler}", compile_for_it)
    arguments = (f"--topology={topology}", f"--compiler={compiler}", "--vocab_size=300")
    assert plan_command(_command(*SMALL, *arguments, "--workdir=here")) == 0
    assert asked == {"topology": topology, "vocab_size": 300}
    first, second = json.loads(Path("here/plan.json").read_text())["plans"]
    assert (first["source"], second["source"]) == ("XLA", "roofline")
    assert first["step_seconds"] is None


def test_without_matplotlib_a_sentence_takes_the_place_of_the_picture(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plan_command(_command(CLASSIFIER, "--topology=h100:8", "--output=here")) == 0
    assert "needs matplotlib, which is not installed: pip" in capsys.readouterr().out
    assert sorted(path.name for path in Path("here").iterdir()) == ["config.json", "plan.json"]


def test_results_that_the_disk_does_not_take_are_one_sentence(capsys, monkeypatch):
    def draw(plans, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(planner_command, "draw_plans", draw)
    assert plan_command(_command(CLASSIFIER, "--topology=h100:8", "--workdir=full")) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the results cannot be written: full: No space left on device;")
    assert error.endswith("; name another folder with --output.\n")


def test_another_mode_is_only_the_compilers(capsys):
    arguments = (CLASSIFIER, "--config.parallel.mode=auto", "--topology=h100:8")
    assert plan_command(_command(*arguments)) == 2
    assert "mode='auto', expected 'manual'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_search_without_formula_traces_and_leaves_a_table_and_a_picture(capsys, monkeypatch):
    kinds = {name: strategy_kinds()[name] for name in ("dp", "fsdp")}
    monkeypatch.setattr("manualpar.plans.sweep.strategy_kinds", lambda: kinds)
    monkeypatch.setattr("manualpar.plans.sweep.CHIP_COUNTS", (8,))
    monkeypatch.setattr(planner_command, "sweep", functools.partial(sweep, traced=1))
    command = _command(CLASSIFIER, "--topology=h100:8", "--search", "--workdir=here")
    assert plan_command(command) == 0
    written = json.loads(Path("here/search.json").read_text())
    assert {each["strategy"] for each in written["candidates"]} == {"dp", "fsdp"}
    assert [point["devices"] for point in written["weak_scaling"]["fsdp"]] == [8]
    assert Path("here/search.png").read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr().out
    assert "so programs are traced: config.model.name is 'classifier'" in output
    assert "fit; the fastest, by a model" in output
    command.flags.search = False
    assert plan_command(command) == 2  # The folder is taken.


def test_help_lists_flags_and_fields(capsys):
    with pytest.raises(SystemExit) as raised:
        flags_parser("About.", "fsdp_lm", PLANNING)(["program", "--help"])
    assert raised.value.code == 0
    output = capsys.readouterr().out
    assert "--topology" in output
    assert "data.batch_size" in output


def test_the_parser_ends_with_code_2_and_a_sentence(capsys, monkeypatch):
    monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())
    with pytest.raises(SystemExit) as raised:
        flags_parser("", "fsdp_lm", PLANNING)(["program", "--topology=x"])
    assert raised.value.code == 2
    assert capsys.readouterr().err.startswith("error: --topology: ")
