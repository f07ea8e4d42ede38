"""Runs the planner from a command line, prints its estimates and writes its files.

With `--compiler=auto`, the default, XLA's compiler for the topology's devices compiles the step if
it is installed. Its estimate is shown next to the roofline's estimate. `--compiler=tpu` and
`--compiler=gpu` require the compiler, and `--compiler=none` uses only the roofline.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console

from manualpar.commands.command_line import OUTPUT, TRAINING, CommandLine, Syntax, run_absl
from manualpar.commands.results import (
    answer,
    check_output,
    results_folder,
    users_mistakes,
    with_picture,
    write_json,
)
from manualpar.core.modes.layer_loops import planned_memory
from manualpar.errors import UsageError, suggest
from manualpar.inspect.tables import print_line
from manualpar.models import Transformer
from manualpar.planner.compiled_plan import plan_of
from manualpar.planner.plan import StepEstimate
from manualpar.planner.roofline import estimate
from manualpar.planner.step_work import read_work
from manualpar.planner.topology import parse_topology
from manualpar.plans.compiler_process import run_compiler
from manualpar.plans.compiler_worker import installed
from manualpar.plans.gpu_compiler import GPU, compile_for_gpu
from manualpar.plans.layouts.layout import STRATEGIES, check_formulas
from manualpar.plans.layouts.layout_estimate import LayoutEstimator
from manualpar.plans.layouts.layout_search import (
    fastest_of_each_mesh,
    layout_flags,
    rank_layouts,
    trace_layout,
)
from manualpar.plans.overlap_trial import compile_both
from manualpar.plans.plan_report import (
    draw_plans,
    draw_search,
    print_assumptions,
    print_formula,
    print_plans,
    print_search,
    print_sources,
    print_traced,
    search_json,
)
from manualpar.plans.planned_experiment import planned_task, prepare_planned
from manualpar.plans.sweep import (
    Builder,
    Candidate,
    has_kernel,
    scaling_curves,
    sweep,
    throughput_of,
)
from manualpar.plans.tpu_compiler import TPU, compile_for_tpu
from manualpar.strategies import strategy_kinds
from manualpar.system.reports.flags import Flag, parse_flags
from manualpar.training.config import flatten_config
from manualpar.training.experiment import Experiment
from manualpar.training.monitoring.run_files import CONFIG_FILE

DEFAULT_TOPOLOGY = "v5e:16x16"
USAGE = """Estimates a config's communication, memory and time on devices that are not here.

{program} [CONFIG] [--<field>=<value> ...] [--mesh=<axis>=<size>,...]
    [--topology=v5p:8x8x4] [--compiler=auto|tpu|gpu|none] [--search]
    [--output=<folder>]
{program} MODULE:FUNCTION [--topology=v5p:8x8x4] [--output=<folder>]

The second form plans a step that is not of this package; `{program} a:b --help` explains it.
"""
STEP_USAGE = """Estimates any jitted step on devices that are not here, as XLA compiles it for them.

{program} MODULE:FUNCTION [--topology=v5p:8x8x4] [--output=<folder>]

FUNCTION gets the list of devices. It returns the step and the tuple of its arguments: arrays or
jax.ShapeDtypeStructs, with NamedShardings on a mesh of these devices. It needs XLA's compiler: pip
install 'manualpar[tpu-compiler]' or 'manualpar[gpu-compiler]'.
"""
STEP = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
COMPILERS = ("auto", "tpu", "gpu", "none")
Curves = Mapping[str, Sequence[tuple[int, StepEstimate]]]
# Config field -> the value that the formula of layouts assumes. A field may also be "".
FORMULA: Mapping[str, Any] = {
    "optimizer.name": "adamw",
    "optimizer.arguments": {},
    "optimizer.trainable": (),
    "optimizer.ema_decay": 0.0,
    "parallel.param_dtype": "float32",
    "parallel.frozen_dtype": "",
    "parallel.regather_axes": (),
    "parallel.error_feedback": False,
    "parallel.stochastic_rounding": False,
    "parallel.reshard_after_forward": True,
    "parallel.keep_gathered": (),
    "parallel.replicate": (),
    "parallel.pad": False,
    "parallel.axis_by_axis": False,
    "parallel.mesh_order": (),
    "parallel.mode": "manual",
    "parallel.context_attention": "auto",
    "model.lora": (),
}
# How many of the fastest layouts are traced.
TRACED = 1
SEARCHES = ("search", "sweep", "layouts")
# Flags of release 0.2 for an estimate that is gone. They are understood, and do nothing.
GONE = ("device_mtbf_hours", "restart_seconds", "storage_bandwidth")
FLAGS: Mapping[str, Flag] = {
    "topology": Flag(
        "The devices to plan for, such as v5p:8x8x4, 2xv5e:16x16 (two slices), h100:128 or "
        "h100:2x4 (two nodes of four).",
        default=DEFAULT_TOPOLOGY,
    ),
    "compiler": Flag(
        "Whether XLA's compiler compiles the step for the topology: auto (if it is installed), tpu "
        "or gpu (always) or none.",
        default="auto",
    ),
    "vocab_size": Flag(
        "The vocabulary size of a language model; by default the size in its data.", int, 0
    ),
    "search": Flag(
        "Ranks ways to run the config on the devices. For a transformer with sharded parameters, "
        "estimates all layouts over replica, stage, data, context, expert and model in closed "
        "form. For another config, traces strategies and meshes.",
        bool,
        False,
    ),
    "sweep": Flag("Deprecated, use --search: ranks traced programs.", bool, False),
    "layouts": Flag("Deprecated, use --search: ranks layouts by formula.", bool, False),
    **{
        name: Flag("Deprecated, does nothing: a plan has no estimate of saves.", int)
        for name in GONE
    },
    "output": OUTPUT,
}

STEP_FLAGS: Mapping[str, Flag] = {
    "step": Flag(
        "module:function, found in the current folder too.", is_argument=True, is_required=True
    ),
    "topology": FLAGS["topology"],
    "output": OUTPUT,
}


def _refine(line: CommandLine) -> None:
    """Turns the name in `--topology` into a `Topology`, and checks the other flags."""
    flags = line.flags
    if flags.compiler not in COMPILERS:
        raise UsageError(
            f"--compiler={flags.compiler}: expected one of {', '.join(COMPILERS)}"
            f"{suggest(flags.compiler, COMPILERS, show=str)}."
        )
    alone = [name for name in SEARCHES if getattr(flags, name)]
    if len(alone) > 1:
        raise UsageError(
            f"--{alone[1]} with --{alone[0]}: expected only one of these flags; to use another "
            "one, plan the best mesh in a second call."
        )
    with users_mistakes("--topology: "):
        flags.topology = parse_topology(flags.topology)
    kind = "tpu" if flags.topology.chip.is_tpu else "gpu"
    if flags.compiler in ("tpu", "gpu") and flags.compiler != kind:
        expected = "v5e:16x16" if flags.compiler == "tpu" else "h100:8"
        raise UsageError(
            f"--compiler={flags.compiler} with --topology={flags.topology.name}: expected a "
            f"{flags.compiler.upper()} topology such as {expected}, or --compiler={kind}."
        )


PLANNING = Syntax(
    FLAGS,
    refused=dict.fromkeys(TRAINING.flags.keys() - FLAGS, "--topology gives the devices"),
    renamed={"workdir": "output"},
    refine=_refine,
)


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`; returns the exit code, or ends the process."""
    if len(argv) > 1 and STEP.fullmatch(argv[1]):
        return _plan_step(argv)
    run_absl(plan_command, argv, USAGE, "fsdp_lm", PLANNING)


def _plan_step(argv: Sequence[str]) -> int:
    """Plans a step that is not of this package, as XLA compiles it; returns the exit code."""
    flags = parse_flags(argv, STEP_USAGE, STEP_FLAGS)
    parent = Path("runs") / f"plan-{flags.step.partition(':')[2]}"

    def work(console: rich.console.Console) -> Path:
        with users_mistakes():
            check_output(flags.output, parent)
        with users_mistakes("--topology: "):
            topology = parse_topology(flags.topology)
        compiler = TPU if topology.chip.is_tpu else GPU
        print_line(console, f"compiling for {topology.name}")
        with users_mistakes(f"{flags.step}: "):
            plan = plan_of(run_compiler(compiler, flags.step, topology))
        plans = [dataclasses.replace(plan, examples_per_second=None)]  # One "example" is a step.
        print_plans(console, plans)
        print_sources(console, topology.chip)
        with results_folder(flags.output, parent) as workdir:
            _write_plans(plans, workdir, console)
        return workdir

    return answer(work)


def _write_plans(
    plans: Sequence[StepEstimate], workdir: Path, console: rich.console.Console
) -> None:
    """Writes estimates as JSON, and draws them."""
    write_json(workdir / "plan.json", {"plans": [plan.to_json() for plan in plans]})
    with with_picture(console):
        draw_plans(plans, workdir / "plan.png")


def plan_command(command: CommandLine) -> int:
    """Plans the config of a command line; returns the exit code for `absl.app.run`."""
    parent = Path("runs") / f"plan-{command.configs[0].name}"

    def work(console: rich.console.Console) -> Path:
        with users_mistakes():
            check_output(command.flags.output, parent)
            # Writes nothing before all estimates exist.
            flags = command.flags
            for name in GONE:
                if getattr(flags, name) is not None:
                    print_line(
                        console,
                        f"--{name} does nothing, because plan no longer estimates what failures "
                        "cost: times.jsonl says what a run really lost. The flag will be removed "
                        "in the next release.",
                    )
            work = _search if any(getattr(flags, name) for name in SEARCHES) else _plan
            write = work(command, console)
        with results_folder(command.flags.output, parent) as workdir:
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
            fused_attention=has_kernel(experiment.task.model, experiment.program, topology.chip),
            overlap=config.parallel.overlap,
        )
        plans.append(estimate(work, topology))
    if wants_compiler:
        print_line(console, f"compiling for {topology.name}")
        compile_for = compile_for_tpu if topology.chip.is_tpu else compile_for_gpu
        vocab_size = command.flags.vocab_size
        plans = [*compile_both(compile_for, config, topology, vocab_size=vocab_size), *plans]
    print_plans(console, plans)
    print_sources(console, topology.chip)
    return functools.partial(_write_plans, plans, console=console)


def _prepare(command: CommandLine) -> Experiment:
    """Builds the config's experiment for the devices of the topology."""
    topology = command.flags.topology
    devices: Any = {"devices": topology.abstract_devices}
    with planned_memory(topology.chip.hbm_bytes):
        return prepare_planned(command.config, **devices, vocab_size=command.flags.vocab_size)


def _wants_compiler(command: CommandLine, console: rich.console.Console) -> bool:
    flags = command.flags
    if flags.compiler != "auto":
        return flags.compiler != "none"
    compiler = TPU if flags.topology.chip.is_tpu else GPU
    if compiler.refuse(flags.topology):
        return False
    if installed(compiler.packages):
        return True
    print_line(
        console,
        f"{compiler.packages[0]} is not installed, so this is the roofline's estimate, without a "
        f"compiler; pip install 'manualpar[{compiler.name.lower()}-compiler]' adds it.",
    )
    return False


def _search(command: CommandLine, console: rich.console.Console) -> Callable[[Path], None]:
    """Ranks candidates, prints the fastest, and returns a function that writes the results."""
    flags = command.flags
    for name in ("sweep", "layouts"):
        if getattr(flags, name):
            print_line(console, f"--{name} will be removed in the next release; use --search.")
    obstacle = _find_no_formula(command)
    if flags.layouts and obstacle:
        raise ValueError(
            f"--layouts: {obstacle}; use --search, which traces programs if there is no closed "
            "form."
        )
    if obstacle and flags.search:
        print_line(console, f"There is no formula, so programs are traced: {obstacle}.")
    outcomes, curves = (_rank_traced if flags.sweep or obstacle else _rank_layouts)(
        command, console
    )
    print_sources(console, flags.topology.chip)
    examples = command.config.data.batch_size // flags.topology.num_devices
    title = f"{command.config_path.stem} on {flags.topology.name}: a model's estimates"

    def write(workdir: Path) -> None:
        write_json(workdir / "search.json", search_json(outcomes, curves))
        per_device = f"{examples} example{'s' * (examples != 1)}"
        with with_picture(console):
            draw_search(
                outcomes, curves, workdir / "search.png", title=title, per_device=per_device
            )

    return write


def _rank_traced(command: CommandLine, console: rich.console.Console) -> tuple[Any, Curves]:
    """Ranks strategies and meshes by traced programs, and plans how the fastest ones scale."""
    # `_prepare` refuses a config that is wrong for every candidate.
    builder, topology = Builder(command.config, _prepare(command).task), command.flags.topology
    report = functools.partial(print_line, console)
    outcomes = sweep(builder, topology, report=report)
    fastest: dict[str, Candidate] = {}
    for strategy in (name for name, kind in strategy_kinds().items() if kind.has_curve):
        found = [each for each in outcomes if each.candidate.strategy == strategy and each.plan]
        if found:
            fastest[strategy] = found[0].candidate
    curves = scaling_curves(builder, topology, fastest, report=report)
    print_search(console, outcomes)
    if outcomes[0].plan:
        print_assumptions(console, outcomes[0].plan)
    return outcomes, curves


def _find_no_formula(command: CommandLine) -> str:
    """Returns why the formula of layouts does not cover a config; "" if it covers it."""
    config = command.config
    model = planned_task(config, command.flags.vocab_size).model
    if not isinstance(model, Transformer) or config.parallel.rules:
        return (
            f"config.model.name is {config.model.name!r} and config.parallel.rules are "
            f"{config.parallel.rules}, expected 'transformer' and no rules"
        )
    fields = flatten_config(config)
    if (strategy := config.parallel.strategy) not in STRATEGIES.values():
        return (
            f"config.parallel.strategy is {strategy!r}, expected one of "
            f"{', '.join(map(repr, STRATEGIES.values()))}, which have a formula"
        )
    for field, expected in FORMULA.items():
        if (value := fields.get(field, expected)) not in (expected, ""):
            return (
                f"config.{field} is {value!r}, expected {expected!r}, because the formula "
                "assumes AdamW on all parameters and the default sharding"
            )
    try:
        check_formulas(model)
    except ValueError as error:
        return str(error)
    return ""


def _rank_layouts(command: CommandLine, console: rich.console.Console) -> tuple[Any, Curves]:
    """Ranks all layouts by formula, and traces the fastest."""
    config, topology = command.config, command.flags.topology
    model: Any = planned_task(config, command.flags.vocab_size).model
    fields = flatten_config(config)
    estimator = LayoutEstimator(
        model,
        topology,
        examples=config.data.batch_size,
        positions=config.data.sequence_length,
        min_weight_size=fields["parallel.min_weight_size"],
        overlap=config.parallel.overlap,
    )
    codes: Any = {name: fields[f"parallel.{name}"] for name in ("gather_code", "reduce_code")}
    outcomes = rank_layouts(estimator, **codes)
    if not outcomes:
        raise ValueError(
            f"--search: no layout on {topology.name} divides the model and the batch "
            f"(batch_size={config.data.batch_size}) and fits into memory; expected more devices, "
            "or a batch size that the number of devices divides."
        )
    fastest = fastest_of_each_mesh(outcomes)
    title = f"{len(outcomes):,} layouts on {len(fastest):,} meshes fit; the fastest, by formula"
    print_search(console, fastest, title=title)
    print_formula(console, **codes)
    for outcome in fastest[:TRACED]:
        try:
            traced: StepEstimate | str = trace_layout(
                config, outcome.candidate, topology, vocab_size=command.flags.vocab_size
            )
        except ValueError as error:
            traced = str(error)
        print_traced(console, outcome, traced, layout_flags(config, outcome.candidate))
    return fastest, {}
