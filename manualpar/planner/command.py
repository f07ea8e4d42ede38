"""The command of the planner: flags, what they ask for, files and what is printed.

With `--compiler=auto`, the default, a step for TPUs is compiled by XLA's TPU compiler where libtpu
is installed, and its plan stands beside the roofline's; `tpu` insists on it, `none` asks for the
roofline alone. GPU clusters are the roofline's.
"""

import dataclasses
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rich.console
from absl import flags, logging

from manualpar.planner.plan import Plan
from manualpar.planner.plan_picture import draw_plans, draw_sweep
from manualpar.planner.plan_report import print_plans, print_sources, print_sweep, sweep_json
from manualpar.planner.roofline import estimate
from manualpar.planner.step_work import read_work
from manualpar.planner.sweep import (
    Builder,
    Candidate,
    Outcome,
    scaling_curves,
    sweep,
    throughput_of,
)
from manualpar.planner.topology import Topology, parse_topology
from manualpar.planner.tpu_compiler import compile_for_tpu
from manualpar.planner.vocabulary import prepare_planned
from manualpar.strategies import strategy_kinds
from manualpar.training.command_line import (
    FLAGS_HELP,
    CommandLine,
    UsageError,
    load_config,
    parse_command_line,
)
from manualpar.training.config import flatten_config, nearest
from manualpar.training.experiment import Experiment
from manualpar.training.main import (
    INTERRUPTED_EXIT_CODE,
    USAGE_EXIT_CODE,
    ending_parser,
    print_error,
)
from manualpar.watching.screen import make_console, print_line
from manualpar.watching.writers import CONFIG_FILE, check_workdir, create_numbered_folder

COMPILERS = ("auto", "tpu", "none")
PLAN_FLAGS = {
    "topology": "The devices to plan for, such as v5p:8x8x4, 2xv5e:16x16 (two slices) or h100:128.",
    "compiler": "Whether XLA's TPU compiler compiles the step for a TPU topology: auto, where "
    "libtpu is installed; tpu; none.",
    "vocab_size": "How many tokens a language model knows, by default those of its data.",
    "sweep": "Compares strategies, meshes, minibatches, remat and wire dtypes by the roofline.",
}
# What a command that trains has, and that means nothing here.
NO_FLAGS = ("devices", "coordinator_address", "num_processes", "process_id")
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
    """Makes the parser that `absl.app.run` takes.

    Args:
      description: What `--help` shows first.
      default_config: What `--config` is where it is not given.

    Returns:
      A function of the arguments that returns what they ask for, or ends the process: with code 0
      for `--help`, with code 2 and a sentence for a mistake.
    """
    return ending_parser(
        lambda argv: parse_plan_command(
            argv, default_config=default_config, flag_values=flags.FLAGS
        ),
        help_text=lambda: _help_text(description, default_config),
    )


def parse_plan_command(
    argv: list[str], *, default_config: Path, flag_values: flags.FlagValues | None = None
) -> PlanCommand:
    """Understands a command line.

    Args:
      argv: The arguments, the program's name first.
      default_config: What `--config` is where it is not given.
      flag_values: Where to define the flags of a config, by default where nobody else sees them.

    Returns:
      What it asks for.

    Raises:
      UsageError: It cannot be followed; the message is one sentence that says why.
    """
    own = flags.FlagValues()
    for name in ("topology", "compiler"):
        flags.DEFINE_string(name, None, PLAN_FLAGS[name], flag_values=own)
    flags.DEFINE_integer("vocab_size", 0, PLAN_FLAGS["vocab_size"], flag_values=own)
    flags.DEFINE_boolean("sweep", False, PLAN_FLAGS["sweep"], flag_values=own)
    try:
        rest = own(argv, known_only=True)
    except flags.Error as error:
        raise UsageError(f"{str(error).splitlines()[0]}.") from error
    for argument in rest[1:]:
        name = argument.lstrip("-").split("=")[0]
        if argument.startswith("-") and name in NO_FLAGS:
            raise UsageError(f"--{name} means nothing to a plan: --topology says what it is for.")
        if argument.startswith("-") and name.split(".")[0] not in FLAGS_HELP:
            near = nearest(name, {*PLAN_FLAGS, "config", "workdir"})
            raise UsageError(f"--{name} is not a known flag; the nearest one is --{near}.")
    compiler = own.compiler or "auto"
    if compiler not in COMPILERS:
        raise UsageError(
            f"--compiler={compiler}: expected one of {', '.join(COMPILERS)}; the nearest one is "
            f"{nearest(compiler, COMPILERS)}."
        )
    line = parse_command_line(rest, default_config=default_config, flag_values=flag_values)
    try:
        topology = parse_topology(own.topology or DEFAULT_TOPOLOGY)
    except ValueError as error:
        raise UsageError(f"--topology: {error}") from error
    if compiler == "tpu" and not topology.chip.is_tpu:
        raise UsageError(
            f"--compiler=tpu with --topology={topology.name}: expected a TPU topology such as "
            "v5e:16x16; GPU clusters are planned by the roofline, with --compiler=auto or none."
        )
    return PlanCommand(line, topology, compiler, own.vocab_size, own.sweep)


def plan_command(command: PlanCommand) -> int:
    """Does what a command line asks for, for `absl.app.run`.

    Args:
      command: The command line.

    Returns:
      The exit code, see `manualpar.training.main`.
    """
    started = time.perf_counter()
    logging.set_verbosity(logging.WARNING)  # At its default absl shows jax's notes on backends.
    console = make_console()
    try:
        if command.line.workdir:
            check_workdir(command.line.workdir)
        results = _sweep(command, console) if command.sweep else _plan(command, console)
        workdir = _open_workdir(command)
        for write in results:
            write(workdir)
    except (UsageError, ValueError) as error:
        print_error(error)
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:
        print_error("interrupted; nothing was written")
        return INTERRUPTED_EXIT_CODE
    print_line(console, f"time: {time.perf_counter() - started:.1f} s")
    print_line(console, f"results: {workdir}")
    return 0


Write = Callable[[Path], None]


def _plan(command: PlanCommand, console: rich.console.Console) -> list[Write]:
    """Plans the config as it is."""
    config, topology = command.line.config, command.topology
    plans: list[Plan] = []
    experiment = _prepare(command)
    is_manual = experiment.program.mode == "manual"
    wants_compiler = _wants_compiler(command, console)
    if is_manual or not wants_compiler:
        work = read_work(experiment.program, throughput_of(config, experiment.task))
        plans.append(estimate(work, topology))
    if wants_compiler:
        print_line(console, f"compiling for {topology.name}")
        plans.insert(0, compile_for_tpu(config, topology, vocab_size=command.vocab_size))
    print_plans(console, plans)
    print_sources(console, topology.chip)

    def write(workdir: Path) -> None:
        _write_json(workdir / "plan.json", {"plans": [plan.to_json() for plan in plans]})
        draw_plans(plans, workdir / "plan.png")

    return [write]


def _prepare(command: PlanCommand) -> Experiment:
    """Builds what the config describes, on as many devices as the topology has."""
    devices = command.topology.num_devices
    return prepare_planned(command.line.config, devices=devices, vocab_size=command.vocab_size)


def _wants_compiler(command: PlanCommand, console: rich.console.Console) -> bool:
    """Whether to compile; says why not where one might expect it."""
    topology = command.topology
    if command.compiler != "auto":
        return command.compiler == "tpu"
    if not topology.chip.is_tpu:
        return False
    if importlib.util.find_spec("libtpu") is None:
        print_line(
            console,
            "libtpu is not installed: this is the roofline's model, and no compiler's word; "
            "pip install 'manualpar[tpu-compiler]' adds it.",
        )
        return False
    return True


def _sweep(command: PlanCommand, console: rich.console.Console) -> list[Write]:
    """Compares candidates, and draws how some of them scale."""
    config, topology = command.line.config, command.topology
    builder = Builder(config, _prepare(command).task)  # Refuses what no candidate could mend.

    def report(line: str) -> None:
        print_line(console, line)

    outcomes = sweep(builder, topology, report=report)
    candidates = _curves_of(outcomes)
    curves = scaling_curves(builder, topology, candidates, report=report)
    print_sweep(console, outcomes)
    if outcomes[0].plan:
        for assumption in outcomes[0].plan.assumptions:
            console.print(f"- {assumption}", markup=False, highlight=False)
    print_sources(console, topology.chip)
    examples = config.data.batch_size // topology.num_devices
    title = f"{command.line.config_path.stem} on {topology.name}: a model's estimates"

    def write(workdir: Path) -> None:
        _write_json(workdir / "sweep.json", sweep_json(outcomes, curves))
        per_device = f"{examples} example{'s' * (examples != 1)}"
        draw_sweep(outcomes, curves, workdir / "sweep.png", title=title, per_device=per_device)

    return [write]


def _curves_of(outcomes: list[Outcome]) -> dict[str, Candidate]:
    """What to draw against the number of devices: the fastest candidate of some strategies."""
    curves: dict[str, Candidate] = {}
    for strategy in (name for name, kind in strategy_kinds().items() if kind.has_curve):
        found = [each for each in outcomes if each.candidate.strategy == strategy and each.plan]
        if found:
            curves[strategy] = found[0].candidate
    return curves


def _open_workdir(command: PlanCommand) -> Path:
    """Creates the folder of the results and stores the config there."""
    line = command.line
    try:
        parent = Path("runs") / f"plan-{line.config_path.stem}"
        workdir = line.workdir or create_numbered_folder(parent)
        workdir.mkdir(parents=True, exist_ok=True)
        _write_json(workdir / CONFIG_FILE, line.config.to_dict())
    except OSError as error:
        raise UsageError(
            f"the results cannot be written: {error}; name another folder with --workdir."
        ) from error
    return workdir


def _write_json(path: Path, value: Any) -> None:
    """Writes a JSON file."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _help_text(description: str, default_config: Path) -> str:
    """What `--help` prints: the flags, and the fields of the default config."""
    lines = [description.strip(), "", "Flags:"]
    kept = {name: FLAGS_HELP[name] for name in ("config", "workdir")}
    lines += [f"  --{name:20s}  {text}" for name, text in (PLAN_FLAGS | kept).items()]
    lines += ["", f"Fields of {default_config.name}, each a flag --config.<field>=<value>:"]
    fields = flatten_config(load_config(default_config))
    lines += [f"  {name:31s}  {value or repr(value)}" for name, value in fields.items()]
    return "\n".join(lines)
