"""What is printed of layouts: the fastest of each mesh, and the flags for one."""

import dataclasses
import io
import shlex

import rich.console
from manualpar.planner.closed_form.layout_report import (
    fastest_of_each_mesh,
    print_layouts,
    print_traced,
)

from manualpar.inspect.memory import Memory
from manualpar.planner.closed_form.layout import Layout
from manualpar.planner.closed_form.layout_config import layout_fields
from manualpar.planner.closed_form.layout_estimate import LayoutEstimate

PLAN = LayoutEstimate(
    layout=Layout(stage=2, data=4, num_minibatches=8, chunks=3, communicate="step"),
    topology="h100:8",
    memory=Memory(1, 2, 3, 4, 5, 6, 7),
    hbm_bytes=100,
    computing=2.0,
    parameters=0.5,
    activations=0.25,
    hops=0.25,
    bubble=1.0,
    mfu=0.5,
    tokens_per_second=1000.0,
)
OTHER = dataclasses.replace(PLAN, layout=Layout(data=8), computing=9.0)


def _shown(print_it, *args) -> str:
    console = rich.console.Console(file=io.StringIO(), width=120)
    print_it(console, *args)
    return " ".join(console.file.getvalue().split())


def test_a_table_has_the_fastest_of_each_mesh_and_its_parts():
    slower = dataclasses.replace(PLAN, computing=3.0)
    assert fastest_of_each_mesh([PLAN, slower, OTHER]) == [PLAN, OTHER]
    text = _shown(print_layouts, [PLAN, slower, OTHER])
    assert "3 layouts on 2 meshes fit" in text
    row = "stage=2 x data=4 8 minibatches, 3 chunks, remat full, by step 4 s 2 s 1 s 1 s 50.0% 28 B"
    assert row in text


def test_flags_are_as_a_shell_takes_them():
    flags = ["--config.parallel.mesh={'stage': 2, 'data': 4}", "--config.model.remat=none"]
    text = _shown(print_traced, PLAN, "the builder says no.", flags)
    assert "stage=2 x data=4: 4 s by the closed form, no program: the builder says no." in text
    assert shlex.split(text)[-2:] == flags


def test_a_layout_is_a_strategy_whose_steps_are_those_of_one_device():
    assert layout_fields(Layout(data=8))["parallel.strategy"] == "fsdp"
    assert layout_fields(Layout(replica=2, data=4))["parallel.strategy"] == "hsdp"
