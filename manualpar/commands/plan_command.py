"""Runs the planner from a command line, prints its estimates and writes its files.

With `--compiler=auto`, the default, XLA's TPU compiler compiles a step for TPUs if libtpu is
installed. Its estimate is shown next to the roofline's estimate. `--compiler=tpu` requires the
compiler, and `--compiler=none` uses only the roofline. GPU clusters have only the roofline.
"""

import functools
import importlib.util
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import rich.console

from manualpar.commands.command_line import (
    TRAINING,
    WORKDIR,
    CommandLine,
    Flag,
    Syntax,
    answer,
    results_folder,
    users_mistakes,
    write_json,
)
from manualpar.core.model.options import CODES
from manualpar.errors import UsageError, require
from manualpar.models import Transformer
from manualpar.planner.closed_form.layout_config import layout_flags, trace_layout
from manualpar.planner.closed_form.layout_report import (
    fastest_of_each_mesh,
    layout_values,
    print_layouts,
    print_traced,
)
from manualpar.planner.closed_form.layout_search import rank_layouts
from manualpar.planner.goodput_report import HOUR, plan_goodput, print_goodput
from manualpar.planner.plan import StepEstimate
from manualpar.planner.plan_picture import draw_plans, draw_sweep
from manualpar.planner.plan_report import (
    print_assumptions,
    print_plans,
    print_sources,
    print_sweep,
    sweep_json,
)
from manualpar.planner.roofline import estimate
from manualpar.planner.step_work import has_kernel, read_work
from manualpar.planner.sweep import Builder, Candidate, scaling_curves, sweep, throughput_of
from manualpar.planner.topology import parse_topology
from manualpar.planner.tpu_compiler import compile_for_tpu
from manualpar.planner.vocabulary import planned_task, prepare_planned
from manualpar.strategies import strategy_kinds
from manualpar.system.reports.tables import print_line
from manualpar.training.config import flatten_config, nearest
from manualpar.training.experiment import Experiment
from manualpar.training.monitoring.run_files import CONFIG_FILE, check_workdir

DEFAULT_TOPOLOGY = "v5e:16x16"
COMPILERS = ("auto", "tpu", "none")
WITHOUT_CLOSED_FORM = (
    *("optimizer.trainable", "optimizer.ema_decay"),
    *("parallel.frozen_dtype", "parallel.regather_axes", "parallel.error_feedback"),
)
# How many of the fastest layouts are traced.
TRACED = 2
FLAGS: Mapping[str, Flag] = {
    "topology": Flag(
        "The devices to plan for, such as v5p:8x8x4, 2xv5e:16x16 (two slices) or h100:128.",
        default=DEFAULT_TOPOLOGY,
    ),
    "compiler": Flag(
        "Whether XLA's TPU compiler compiles the step for a TPU topology: auto (if libtpu is "
        "installed), tpu (always) or none.",
        default="auto",
    ),
    "vocab_size": Flag(
        "The vocabulary size of a language model; by default the size in its data.", int, 0
    ),
    "sweep": Flag(
        "Compares strategies, meshes, split layers, minibatches, remat and communication dtypes by "
        "the roofline.",
        bool,
        False,
    ),
    "layouts": Flag(
        "Ranks all layouts of a transformer over replica, stage, data, context, expert and model "
        "by closed forms, with minibatches, chunks and remat.",
        bool,
        False,
    ),
    "device_mtbf_hours": Flag(
        "Hours between two failures of a device. With it the plan says how often to save, and "
        "which share of the time is spent on training.",
        int,
        0,
    ),
    "restart_seconds": Flag(
        "Seconds from a failure until all processes run again, with --device_mtbf_hours.", int, 600
    ),
    "storage_bandwidth": Flag(
        "GB/s that the file system accepts from all processes together, with --device_mtbf_hours; "
        "0 for no limit.",
        int,
        0,
    ),
    "workdir": WORKDIR,
}


def _refine(line: CommandLine) -> None:
    """Turns the name in `--topology` into a `Topology`, and checks the other flags."""
    flags = line.flags
    if flags.compiler not in COMPILERS:
        raise UsageError(
            f"--compiler={flags.compiler}: expected one of {', '.join(COMPILERS)}; the nearest one "
            f"is {nearest(flags.compiler, COMPILERS)}."
        )
    for name in ("device_mtbf_hours", "restart_seconds", "storage_bandwidth"):
        if getattr(flags, name) < 0:
            raise UsageError(f"--{name}={getattr(flags, name)}: expected 0 or more.")
    alone = [name for name in ("sweep", "layouts", "device_mtbf_hours") if getattr(flags, name)]
    if len(alone) > 1:
        raise UsageError(
            f"--{alone[1]} with --{alone[0]}: expected only one of these flags; to use another "
            "one, plan the best mesh in a second call."
        )
    with users_mistakes("--topology: "):
        flags.topology = parse_topology(flags.topology)
    if flags.compiler == "tpu" and not flags.topology.chip.is_tpu:
        raise UsageError(
            f"--compiler=tpu with --topology={flags.topology.name}: expected a TPU topology such "
            "as v5e:16x16; GPU clusters are planned by the roofline, with --compiler=auto or none."
        )


PLANNING = Syntax(
    FLAGS,
    refused=dict.fromkeys(TRAINING.flags.keys() - FLAGS, "--topology gives the devices"),
    refine=_refine,
)


def plan_command(command: CommandLine) -> int:
    """Plans the config of a command line; returns the exit code for `absl.app.run`."""

    def work(console: rich.console.Console) -> Path:
        with users_mistakes():
            require("the picture of a plan", "matplotlib")
            if command.flags.workdir:
                check_workdir(command.flags.workdir)
            # Writes nothing before all estimates exist.
            flags = command.flags
            work = _sweep if flags.sweep else _layouts if flags.layouts else _plan
            write = work(command, console)
        parent = Path("runs") / f"plan-{command.configs[0].name}"
        with results_folder(command.flags.workdir, parent) as workdir:
            write_json(workdir / CONFIG_FILE, command.config.to_dict())
            write(workdir)
        return workdir

    return answer(work)


def _plan(command: CommandLine, console: rich.console.Console) -> Callable[[Path], None]:
    """Estimates the config, prints the estimates, and returns a function that writes them."""
    config, topology = command.config, command.flags.topology
    plans: list[StepEstimate] = []
    experiment = _prepare(command)
    wants_compiler = _wants_compiler(command, console)
    if experiment.program.mode == "manual" or not wants_compiler:
        throughput, order = throughput_of(config, experiment.task), config.parallel.mesh_order
        work = read_work(
            experiment.program,
            throughput,
            order=order,
            fused_attention=has_kernel(config),
            overlap=config.parallel.overlap,
        )
        plans.append(estimate(work, topology))
    if wants_compiler:
        print_line(console, f"compiling for {topology.name}")
        plans.insert(0, compile_for_tpu(config, topology, vocab_size=command.flags.vocab_size))
    print_plans(console, plans)
    print_sources(console, topology.chip)
    results: dict[str, Any] = {"plans": [plan.to_json() for plan in plans]}
    flags = command.flags
    if flags.device_mtbf_hours:
        planned = plan_goodput(
            experiment.program,
            topology,
            device_mtbf=flags.device_mtbf_hours * HOUR,
            restart_seconds=flags.restart_seconds,
            storage_bandwidth=flags.storage_bandwidth * 1e9 or math.inf,
        )
        print_goodput(console, planned)
        results["goodput"] = planned.to_json()

    def write(workdir: Path) -> None:
        write_json(workdir / "plan.json", results)
        draw_plans(plans, workdir / "plan.png")

    return write


def _prepare(command: CommandLine) -> Experiment:
    """Builds the config's experiment for the topology's number of devices."""
    devices = command.flags.topology.num_devices
    return prepare_planned(command.config, devices=devices, vocab_size=command.flags.vocab_size)


def _wants_compiler(command: CommandLine, console: rich.console.Console) -> bool:
    if command.flags.compiler != "auto" or not command.flags.topology.chip.is_tpu:
        return command.flags.compiler == "tpu"
    if importlib.util.find_spec("libtpu"):
        return True
    print_line(
        console,
        "libtpu is not installed, so this is the roofline's estimate, without a compiler; "
        "pip install 'manualpar[tpu-compiler]' adds it.",
    )
    return False


def _sweep(command: CommandLine, console: rich.console.Console) -> Callable[[Path], None]:
    """Compares candidates, scales some of them, and returns a function that writes the results."""
    config, topology = command.config, command.flags.topology
    # `_prepare` refuses a config that is wrong for every candidate.
    builder = Builder(config, _prepare(command).task)
    report = functools.partial(print_line, console)
    outcomes = sweep(builder, topology, report=report)
    fastest: dict[str, Candidate] = {}
    for strategy in (name for name, kind in strategy_kinds().items() if kind.has_curve):
        found = [each for each in outcomes if each.candidate.strategy == strategy and each.plan]
        if found:
            fastest[strategy] = found[0].candidate
    curves = scaling_curves(builder, topology, fastest, report=report)
    print_sweep(console, outcomes)
    if outcomes[0].plan:
        print_assumptions(console, outcomes[0].plan)
    print_sources(console, topology.chip)
    examples = config.data.batch_size // topology.num_devices
    title = f"{command.config_path.stem} on {topology.name}: a model's estimates"

    def write(workdir: Path) -> None:
        write_json(workdir / "sweep.json", sweep_json(outcomes, curves))
        per_device = f"{examples} example{'s' * (examples != 1)}"
        draw_sweep(outcomes, curves, workdir / "sweep.png", title=title, per_device=per_device)

    return write


def _layouts(command: CommandLine, console: rich.console.Console) -> Callable[[Path], None]:
    """Ranks all layouts, prints the fastest, and returns a function that writes them."""
    config, topology = command.config, command.flags.topology
    model = planned_task(config, command.flags.vocab_size).model
    if not isinstance(model, Transformer) or config.parallel.rules:
        raise ValueError(
            f"--layouts: config.model.name is {config.model.name!r} and config.parallel.rules is "
            f"{config.parallel.rules}, expected 'transformer' and no rules, because other configs "
            "have no closed form; use --sweep."
        )
    fields = flatten_config(config)
    for field in WITHOUT_CLOSED_FORM:
        if fields[field]:
            raise ValueError(
                f"--layouts: config.{field} is {fields[field]!r}, expected none, because the "
                "closed form is for AdamW on all parameters; use --sweep."
            )
    sizes = {"examples": config.data.batch_size, "positions": config.data.sequence_length}
    codes = {name: fields[f"parallel.{name}"] for name in CODES}
    plans = rank_layouts(model, topology, **sizes, **codes)
    if not plans:
        raise ValueError(
            f"--layouts: no layout on {topology.name} divides config.data.batch_size="
            f"{config.data.batch_size} and fits into memory; use more devices, or a batch size "
            "that they divide."
        )
    print_layouts(console, plans)
    for plan in fastest_of_each_mesh(plans)[:TRACED]:
        try:
            traced: StepEstimate | str = trace_layout(
                config, plan.layout, topology, vocab_size=command.flags.vocab_size
            )
        except ValueError as error:
            traced = str(error)
        print_traced(console, plan, traced, layout_flags(config, plan.layout))
    print_sources(console, topology.chip)

    def write(workdir: Path) -> None:
        shown = fastest_of_each_mesh(plans)
        write_json(workdir / "layouts.json", {"layouts": [layout_values(plan) for plan in shown]})

    return write
