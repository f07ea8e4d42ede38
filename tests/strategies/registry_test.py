"""A strategy is one file and one registration: everything else finds it by its name."""

import ast
import dataclasses
import json
import math
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from manualpar.commands import compare_command
from manualpar.commands import compare_command as comparison_report
from manualpar.commands.command_line import parse_command_line
from manualpar.commands.inspect_command import INSPECTING, inspect_command
from manualpar.commands.plan_command import PLANNING, plan_command
from manualpar.commands.train_command import run_command
from manualpar.inspect import bytes_by_axes, parameter_collectives, step_bytes, trace_collectives
from manualpar.planner.topology import parse_topology
from manualpar.plans import sweep
from manualpar.strategies import Field, register, registry, strategy_kinds
from manualpar.training.config import check_config, find_config, load_config
from manualpar.training.experiment import prepare
from manualpar.training.task import make_task
from tests.paths import ROOT

NAME = "zero_in_16_bits"
CONFIG = """
from configs import {base}
import tests.strategies.throwaway_strategy  # It registers itself.

def get_config():
    config = {base}.get_config()
    with config.unlocked():
        config.parallel.stored_dtype = "bfloat16"
        {more}
    return config
"""
SMALL = (
    "--config.model.hidden_size=16",
    "--config.model.num_layers=1",
    "--config.optimizer.warmup_steps=0",
)

FSDP = strategy_kinds()["fsdp"]


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch, devices8):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_KINDS", strategy_kinds())
    monkeypatch.delitem(sys.modules, "tests.strategies.throwaway_strategy", raising=False)


def _config(name: str, base: str, more: str) -> str:
    Path(name).write_text(CONFIG.format(base=base, more=more))
    return f"--config={name}"


def _own_config(*more: str) -> str:
    lines = [f"config.parallel.strategy = {NAME!r}", *more]
    return _config("own.py", "fsdp", "; ".join(lines))


@pytest.mark.slow
def test_a_config_trains_with_it_and_saves_what_it_stores(capsys):
    arguments = [_own_config(), *SMALL, "--config.training.num_steps=4", "--workdir=run"]
    command = parse_command_line(["program", *arguments], default_config="fsdp")
    assert run_command(command) == 0
    assert "test accuracy: " in capsys.readouterr().out
    assert json.loads(Path("run/config.json").read_text())["parallel"]["strategy"] == NAME


def test_it_is_inspected_and_sends_what_its_formula_says(capsys):
    flags = (*SMALL, "--nocompile", "--devices=8")
    command = parse_command_line(
        ["program", _own_config(), *flags],
        default_config="fsdp",
        syntax=INSPECTING,
    )
    assert inspect_command(command) == 0
    assert f"own: {NAME} manual on data=8; of a device in a step" in capsys.readouterr().out
    program = prepare(load_config(Path("own.py"))).program
    assert {x.dtype for x in program.abstract_state.params["output_dense"].values()} == {
        jnp.dtype("bfloat16")
    }
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    sent = bytes_by_axes(parameter_collectives(trace_collectives(traced)))
    assert sent == step_bytes(program)
    whole = prepare(load_config(find_config("zero"))).program
    assert 2 * sum(sent.values()) == sum(step_bytes(whole).values())


@pytest.mark.slow
def test_it_is_compared_in_its_colour(monkeypatch):
    drawn = []
    color_of = comparison_report._color
    monkeypatch.setattr(
        comparison_report, "_color", lambda row: drawn.append(color_of(row)) or drawn[-1]
    )
    pairs = f"config.pairs = ({(NAME, 'manual')}, ('zero1', 'manual'))"
    arguments = [_config("pairs.py", "compare", pairs), *SMALL, "--config.training.num_steps=2"]
    arguments += ["--config.compare.repetitions=1", "--workdir=compared"]
    command = parse_command_line(
        ["program", *arguments], default_config="compare", syntax=compare_command.COMPARING
    )
    assert compare_command.compare_command(command) == 0
    own, zero1 = json.loads(Path("compared/comparison.json").read_text())["rows"]
    assert own["strategy"] == NAME
    assert own["formula_bytes"] * 2 == zero1["formula_bytes"]
    assert own["collectives"] == zero1["collectives"]
    assert "#999933" in drawn


def test_it_is_planned_and_part_of_a_sweep(capsys):
    config = _own_config()
    arguments = ["program", config, *SMALL, "--topology=h100:8", "--workdir=planned"]
    command = parse_command_line(arguments, default_config="fsdp_lm", syntax=PLANNING)
    assert plan_command(command) == 0
    assert f"{NAME} manual" in capsys.readouterr().out
    config = load_config(Path("own.py"))
    builder = sweep.Builder(config, make_task(config))
    bases = list(sweep._bases(parse_topology("h100:8"), builder))
    assert [base.strategy for base in bases if base.strategy == NAME] == [NAME]


def test_its_own_field_is_checked_and_other_strategies_need_not_have_it():
    path = Path(_own_config("config.parallel.stored_dtype = 'float8'").removeprefix("--config="))
    with pytest.raises(ValueError, match=r"parallel\.stored_dtype is 'float8', expected one of 'b"):
        check_config(load_config(path))
    path = Path(_own_config("del config.parallel.stored_dtype").removeprefix("--config="))
    with pytest.raises(ValueError, match=r"config\.parallel\.stored_dtype is missing, expected"):
        check_config(load_config(path))
    check_config(load_config(find_config("fsdp")))


def forgetful(model, tx, loss_fn, **options):
    """A builder that does not return what it builds."""


def test_the_same_may_be_registered_again():
    register(FSDP)
    assert strategy_kinds()["fsdp"] is FSDP


def test_a_builder_that_returns_no_program_is_named():
    register(dataclasses.replace(FSDP, name="forgetful", builder=forgetful))
    config = load_config(find_config("fsdp"))
    config.parallel.strategy = "forgetful"
    with pytest.raises(TypeError, match="strategy='forgetful' returned None, expected a Program"):
        prepare(config)


def test_nothing_else_knows_strategies_by_name():
    names = set(strategy_kinds())
    found = set()
    for path in (ROOT / "manualpar").rglob("*.py"):
        constants = (
            x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Constant)
        )
        name = path.relative_to(ROOT / "manualpar").as_posix()
        found |= {(name, x.value) for x in constants if x.value in names}
    expected = {
        ("commands/command_line.py", "fsdp"),  # The name of the default config.
        ("commands/new_project/config.py", "fsdp"),  # What a new project begins with.
        ("commands/compare_command.py", "dp"),  # The strategy of the run on one device.
    }
    # The public names, the strategies themselves, and what is written from their tables.
    inside = ("__init__.py", "strategies/", "training/fields.py")
    assert {pair for pair in found if not pair[0].startswith(inside)} == expected


# -------------------------------------------------------------------------------------------------
# The values that a config field allows.


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, True, "1", None])
def test_only_finite_numbers_are_numbers(value):
    assert not Field(float).allows(value)
    assert not Field(float, below=1.0).allows(value)


@pytest.mark.parametrize("value", [0, -1e300, 2.5])
def test_a_number_without_limits_may_be_any_finite_one(value):
    assert Field(float).allows(value)


def test_fields_that_differ_in_their_meaning_are_the_same_field():
    assert Field(int, 1, meaning="One.") == Field(int, 1, meaning="Another.")
