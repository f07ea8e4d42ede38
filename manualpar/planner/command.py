"""The command of the planner: flags, what they ask for, files and what is printed.

With `--compiler=auto`, the default, a step for TPUs is compiled by XLA's TPU compiler where libtpu
is installed, and its plan stands beside the roofline's; `tpu` insists on it, `none` asks for the
roofline alone. GPU clusters are the roofline's.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import rich.console
from absl import flags as absl_flags

from manualpar.planner.plan import Plan
from manualpar.planner.plan_picture import draw_plans, draw_sweep
from manualpar.planner.plan_report import (
    print_assumptions,
    print_plans,
    print_sources,
    print_sweep,
    sweep_json,
)
from manualpar.planner.roofline import estimate
from manualpar.planner.step_work import read_work
from manualpar.planner.sweep import Builder, Candidate, scaling_curves, sweep, throughput_of
from manualpar.planner.topology import Topology, parse_topology
from manualpar.planner.tpu_compiler import compile_for_tpu
from manualpar.planner.vocabulary import prepare_planned
from manualpar.strategies import strategy_kinds
from manualpar.training.command_line import (
    TRAIN_FLAGS,
    WORKDIR,
    CommandLine,
    Flag,
    answer,
    flags_parser,
    open_results,
    parse_command_line,
    users_mistakes,
    write_json,
)
from manualpar.training.config import nearest
from manualpar.training.experiment import Experiment
from manualpar.usage import UsageError
from manualpar.watching.screen import print_line
from manualpar.watching.writers import check_workdir

COMPILERS = ("auto", "tpu", "none")
PLAN_FLAGS: Mapping[str, Flag] = {
    "topology": Flag(
        "The devices to plan for, such as v5p:8x8x4, 2xv5e:16x16 (two slices) or h100:128."
    ),
    "compiler": Flag(
        "Whether XLA's TPU compiler compiles the step for a TPU topology: auto, where libtpu is "
        "installed; tpu; none.",
        default="auto",
    ),
    "vocab_size": Flag(
        "How many tokens a language model knows, by default those of its data.", int, 0
    ),
    "sweep": Flag(
        "Compares strategies, meshes, minibatches, remat and wire dtypes by the roofline.",
        bool,
        False,
    ),
    "workdir": WORKDIR,
}
# Flags of a command that trains, which mean nothing here.
NO_FLAGS = TRAIN_FLAGS.keys() - PLAN_FLAGS.keys()
DEFAULT_TOPOLOGY = "v5e:16x16"


@dataclasses.dataclass(frozen=True)
class PlanCommand:
    """What a command line asks for.

    Attributes:
      line: The config, and where results go.
      topology: The devices.
      compiler: One of `COMPILERS`.
      vocab_size: How many tokens a language model knows; 0 for those of its data.
      sweep: Whether to compare.
    """

    line: CommandLine
    topology: Topology
    compiler: str
    vocab_size: int
    sweep: bool


def plan_flags_parser(description: str, default_config: Path) -> Callable[[list[str]], PlanCommand]:
    """Makes the parser that `absl.app.run` takes, see `command_line.flags_parser`."""
    return flags_parser(description, default_config, flags=PLAN_FLAGS, parse=parse_plan_command)


def parse_plan_command(
    argv: Sequence[str],
    *,
    default_config: Path,
    flag_values: absl_flags.FlagValues | None = None,
) -> PlanCommand:
    """Parses a command line, see `parse_command_line`.

    Raises:
      UsageError: It cannot be followed; the message is one sentence that says why.
    """
    for argument in argv:
        name = argument.lstrip("-").split("=")[0]
        if argument.startswith("-") and name in NO_FLAGS:
            raise UsageError(f"--{name} means nothing to a plan: --topology says what it is for.")
    line = parse_command_line(
        argv, default_config=default_config, flags=PLAN_FLAGS, flag_values=flag_values
    )
    given = line.flags
    if given.compiler not in COMPILERS:
        raise UsageError(
            f"--compiler={given.compiler}: expected one of {', '.join(COMPILERS)}; the nearest one "
            f"is {nearest(given.compiler, COMPILERS)}."
        )
    try:
        topology = parse_topology(given.topology or DEFAULT_TOPOLOGY)
    except ValueError as error:
        raise UsageError(f"--topology: {error}") from error
    if given.compiler == "tpu" and not topology.chip.is_tpu:
        raise UsageError(
            f"--compiler=tpu with --topology={topology.name}: expected a TPU topology such as "
            "v5e:16x16; GPU clusters are planned by the roofline, with --compiler=auto or none."
        )
    return PlanCommand(line, topology, given.compiler, given.vocab_size, given.sweep)


def plan_command(command: PlanCommand) -> int:
    """Does what a command line asks for, for `absl.app.run`; returns the exit code."""

    def work(console: rich.console.Console) -> Path:
        with users_mistakes():
            if command.line.flags.workdir:
                check_workdir(command.line.flags.workdir)
            # Nothing is written before everything is known.
            write = _sweep(command, console) if command.sweep else _plan(command, console)
        workdir = open_results(command.line, Path("runs") / f"plan-{command.line.configs[0].name}")
        write(workdir)
        return workdir

    return answer(work)


def _plan(command: PlanCommand, console: rich.console.Console) -> Callable[[Path], None]:
    """Plans the config as it is, prints that, and returns what writes it into a folder."""
    config, topology = command.line.config, command.topology
    plans: list[Plan] = []
    experiment = _prepare(command)
    wants_compiler = _wants_compiler(command, console)
    if experiment.program.mode == "manual" or not wants_compiler:
        work = read_work(experiment.program, throughput_of(config, experiment.task))
        plans.append(estimate(work, topology))
    if wants_compiler:
        print_line(console, f"compiling for {topology.name}")
        plans.insert(0, compile_for_tpu(config, topology, vocab_size=command.vocab_size))
    print_plans(console, plans)
    print_sources(console, topology.chip)

    def write(workdir: Path) -> None:
        write_json(workdir / "plan.json", {"plans": [plan.to_json() for plan in plans]})
        draw_plans(plans, workdir / "plan.png")

    return write


def _prepare(command: PlanCommand) -> Experiment:
    """Builds what the config describes, on as many devices as the topology has."""
    devices = command.topology.num_devices
    return prepare_planned(command.line.config, devices=devices, vocab_size=command.vocab_size)


def _wants_compiler(command: PlanCommand, console: rich.console.Console) -> bool:
    if command.compiler != "auto" or not command.topology.chip.is_tpu:
        return command.compiler == "tpu"
    if importlib.util.find_spec("libtpu"):
        return True
    print_line(
        console,
        "libtpu is not installed: this is the roofline's model, and no compiler's word; "
        "pip install 'manualpar[tpu-compiler]' adds it.",
    )
    return False


def _sweep(command: PlanCommand, console: rich.console.Console) -> Callable[[Path], None]:
    """Compares candidates and how some of them scale, prints that, and returns what writes it."""
    config, topology = command.line.config, command.topology
    builder = Builder(config, _prepare(command).task)  # Refuses what no candidate could mend.
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
    title = f"{command.line.config_path.stem} on {topology.name}: a model's estimates"

    def write(workdir: Path) -> None:
        write_json(workdir / "sweep.json", sweep_json(outcomes, curves))
        per_device = f"{examples} example{'s' * (examples != 1)}"
        draw_sweep(outcomes, curves, workdir / "sweep.png", title=title, per_device=per_device)

    return write
