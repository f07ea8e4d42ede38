"""Shows the communication, memory and FLOPs of configs' steps, without running a step.

Each config's step is traced, and compiled unless it needs too many devices to simulate. The result
is a *ledger*: the step's collectives, memory and FLOPs. The ledgers are printed, written as JSON,
drawn, and compared with older ledgers and with budgets. The folder of the results contains

    <config>.json   the ledger, see `manualpar.inspect.step_ledger`, and the config
    inspect.png     all ledgers, see `manualpar.commands.inspection_picture`
    <config>.schedule.png   with --schedule, the schedule of the config's pipeline

The exit code is 1 if a budget is broken.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import rich.console

from manualpar.commands.command_line import (
    DEFAULT_CONFIG,
    CommandLine,
    Flag,
    NamedConfig,
    Syntax,
    run_absl,
)
from manualpar.commands.inspection_picture import Bound, draw_ledgers
from manualpar.commands.inspection_report import (
    describe_fit,
    print_difference,
    print_ledger,
    print_summary,
    print_verdict,
)
from manualpar.commands.inspection_schedule import (
    print_schedule,
    read_schedule,
    table_and_costs,
)
from manualpar.commands.results import (
    answer,
    check_output,
    choose_devices,
    results_folder,
    users_mistakes,
    with_picture,
    write_json,
)
from manualpar.commands.schedule_picture import draw_schedule
from manualpar.core.mesh.mesh_order import describe_links
from manualpar.errors import UsageError, print_error
from manualpar.inspect.budget_writing import budget_text, replace_budget
from manualpar.inspect.budgets import (
    Budget,
    budget_for,
    check_budget,
    parse_budgets,
    parse_size,
    read_budgets,
)
from manualpar.inspect.communication import as_number, bytes_by_axes, total_bytes
from manualpar.inspect.ledger_difference import Json, compare_ledgers
from manualpar.inspect.scope_parsing import OTHER
from manualpar.inspect.state_layout import trained_parts
from manualpar.inspect.step_ledger import ledger
from manualpar.models import Transformer
from manualpar.models.transformer_collectives import transformer_sends
from manualpar.planner.hardware import chip_named
from manualpar.system.reports.tables import print_line
from manualpar.system.storage.untrusted import read_object
from manualpar.training.experiment import Experiment, prepare

USAGE = """Shows the communication, memory and FLOPs of each config's step, before any step runs.

{program} [CONFIG ...] [--<field>=<value> ...]
    [--mesh=<axis>=<size>,...] [--devices=<number>] [--compile | --no-compile]
    [--output=<folder>] [--against=<ledger.json or folder>]
    [--budget=configs/budgets.toml [--write-budget]]
    [--memory=<16GiB or v5p>] [--schedule]

Nothing is trained. With --no-compile nothing is compiled either, so that --devices=4096 needs no
devices. Exit codes: 0; 1 if a budget is broken; 2 for a mistake on the command line, in a config or
in a budget.
"""
BROKEN_EXIT_CODE = 1
FOLDER = Path("runs/inspect")
PICTURE = "inspect.png"
# The keys that a ledger from a file must have to be compared.
NEEDED = ("mesh", "bytes", "counts", "collectives", "flops", "memory", "compiled")
MOST_COMPILED = 64
INSPECT_FLAGS: Mapping[str, Flag] = {
    "devices": Flag(
        "The number of devices that a step is for; by default all existing devices, or 8 simulated "
        "devices if there is only a CPU.",
        int,
    ),
    "compile": Flag(
        "Whether to compile the steps too (for simulated CPU devices if --devices is given); by "
        f"default up to {MOST_COMPILED} devices. --no-compile needs no devices.",
        bool,
    ),
    "output": Flag("Folder of the results, by default a new runs/inspect/<next number>.", Path),
    "against": Flag("An earlier ledger, or a folder of earlier ledgers, to compare with.", Path),
    "budget": Flag("A TOML file with each config's limits on bytes, memory and FLOPs.", Path),
    "write_budget": Flag("Writes the measured numbers into the file of --budget.", bool, False),
    "schedule": Flag("Also prints and draws the schedule of each config's pipeline.", bool, False),
    "memory": Flag(
        "The memory of a device, such as 16GiB, or the name of a chip, such as v5p; the picture "
        "marks this memory."
    ),
}


def _refine(line: CommandLine) -> None:
    """Decides whether to compile, and turns the text of `--memory` into a `Bound`."""
    flags = line.flags
    if flags.write_budget and not flags.budget:
        raise UsageError(
            "--write-budget needs the name of the file, as in --budget=configs/budgets.toml "
            "--write-budget."
        )
    if flags.compile is None:
        flags.compile = (flags.devices or 1) <= MOST_COMPILED
    if flags.memory is not None:
        flags.memory = _read_memory(flags.memory)


INSPECTING = Syntax(INSPECT_FLAGS, takes_several=True, refine=_refine)


def main(argv: Sequence[str]) -> NoReturn:
    """Runs the command line `argv` and ends the process."""
    run_absl(inspect_command, argv, USAGE, DEFAULT_CONFIG, INSPECTING)


def _read_memory(text: str) -> Bound:
    """Parses the memory of a device: a size, or a chip's name."""
    if size := parse_size(text):
        return Bound("device", size)
    with users_mistakes(f"--memory={text}: expected a size such as 16GiB, or a chip: "):
        return Bound(text, chip_named(text).hbm_bytes)


def inspect_command(line: CommandLine) -> int:
    """Inspects the configs of a command line; returns the exit code for `absl.app.run`."""
    broken: list[str] = []
    code = answer(lambda console: _inspect(line, console, broken))
    for sentence in broken:
        print_error(f"over budget: {sentence}")
    return BROKEN_EXIT_CODE if broken else code


def read_ledger(
    named: NamedConfig, *, devices: int | None, compile: bool, needs_pipeline: bool = False
) -> dict[str, Any]:
    """Traces the step of a config, and compiles it if `compile` is set.

    The step is for `devices` devices, or for all existing devices if `devices` is `None`.

    Returns:
      `Ledger.to_json()` and these keys: `config_file`, `config`, `devices`, `links`, `jax` and
      `compiler_options`; `predicted_is_bound`, whether the closed form is an upper bound;
      `predicted_layers`, the closed form for the collectives of split layers, or `None`;
      `schedule`, see `read_schedule`; and `parts`, see `trained_parts`. A compiled collective also
      has a `purpose` and a `module`, as far as XLA has kept these names. If XLA merged several
      collectives, their names are joined with `+`.

    Raises:
      UsageError: The config contradicts itself or does not fit the devices, the step cannot be
        read, or `needs_pipeline` is set and the step has no pipeline.
    """
    with users_mistakes(f"{named.path}: "):
        experiment = prepare(named.config, devices=None if compile else devices)
        mesh = experiment.program.mesh
        if needs_pipeline and experiment.program.pipeline is None:
            raise UsageError(
                f"--schedule: {named.path} has no pipeline on the mesh {dict(mesh.shape)}; "
                "expected a mesh with an axis for stages, as in "
                """--config.parallel.mesh="{'data': -1, 'stage': 2}"."""
            )
        schedule = read_schedule(experiment.program)
        read = ledger(experiment.program, compile=compile)
    found, root = read.to_json(), type(experiment.task.model).__name__
    if read.compiled:
        shown = found["compiled"]["collectives"]
        for each, values in zip(read.compiled.collectives, shown, strict=True):
            names = each.names(root)
            values["purpose"] = "+".join(dict.fromkeys(name for name, _ in names)) or OTHER
            values["module"] = "+".join(dict.fromkeys(name for _, name in names if name))
    return {
        "config_file": str(named.path),
        "config": named.config.to_dict(),
        "devices": mesh.size,
        "links": describe_links(mesh) if isinstance(mesh, jax.sharding.Mesh) else "",
        "jax": jax.__version__,
        "compiler_options": str(experiment.chosen),
        "predicted_is_bound": experiment.program.strategy.reshard_after_forward,
        "predicted_layers": _predict_layers(experiment, read.stage or 0),
        "schedule": schedule,
        "parts": trained_parts(experiment.program, read.collectives),
        **found,
    }


def _predict_layers(experiment: Experiment, stage: int) -> Json | None:
    program, model = experiment.program, experiment.task.model
    if program.mode != "manual" or not isinstance(model, Transformer):
        return None
    if experiment.config.model.lora:  # LoRA adapters of row-parallel layers also communicate.
        return None
    try:
        sends = transformer_sends(program, model, stage=stage)
    except ValueError:  # These layers have no closed form.
        return None
    by_axes = {",".join(axes): as_number(sent) for axes, sent in bytes_by_axes(sends).items()}
    return {"total": as_number(total_bytes(sends)), "by_axes": by_axes}


def _inspect(line: CommandLine, console: rich.console.Console, broken: list[str]) -> Path:
    """Inspects the configs, writes the results, and returns the folder of the results.

    Adds a sentence to `broken` for each limit of a budget that a step exceeds.
    """
    flags, names = line.flags, [named.name for named in line.configs]
    with users_mistakes():  # Checks and reads everything that is possible before tracing.
        budgets = {} if flags.write_budget else _read_budgets(flags.budget, names)
        earlier = {name: _read_earlier(flags.against, name) for name in names if flags.against}
        # Refuses a training's folder. An earlier inspection may be overwritten.
        check_output(flags.output, FOLDER)
    ledgers = _read_ledgers(line, console)
    if len(ledgers) > 1:
        print_summary(console, ledgers)
    for name, (path, before) in earlier.items():
        print_difference(console, name, compare_ledgers(before, ledgers[name]), path)
    verdicts = {
        name: check_budget(budget, ledgers[name], flags.budget) for name, budget in budgets.items()
    }
    bounds = {name: [flags.memory] if flags.memory else [] for name in names}
    for name, verdict in verdicts.items():
        print_verdict(console, name, verdict)
        broken += verdict.broken
        if (allowed := budgets[name].most("peak_memory")) is not None:
            bounds[name].insert(0, Bound("budget", allowed))
    with results_folder(flags.output, FOLDER) as output:
        for name, found in ledgers.items():
            write_json(output / f"{name}.json", found)
        with with_picture(console):
            draw_ledgers(ledgers, output / PICTURE, bounds=bounds)
            for name in ledgers if flags.schedule else ():
                table, costs = table_and_costs(ledgers[name]["schedule"])
                draw_schedule(table, output / f"{name}.schedule.png", title=name, costs=costs)
    if flags.write_budget:
        _write_budgets(flags.budget, ledgers)
        print_line(console, f"budgets: {flags.budget}")
    return output


def _read_ledgers(line: CommandLine, console: rich.console.Console) -> dict[str, Json]:
    """Reads and prints the ledger of each config."""
    flags = line.flags
    if flags.compile or flags.devices is None:  # In other cases tracing needs no device.
        try:
            choose_devices(flags.devices)
        except RuntimeError as error:
            raise UsageError(f"--devices={flags.devices}: {error}.") from error
        except ValueError as error:
            raise UsageError(f"{error} With --nocompile no devices are needed.") from error
    ledgers: dict[str, Json] = {}
    for named in line.configs:
        options = {"compile": flags.compile, "needs_pipeline": flags.schedule}
        found = read_ledger(named, devices=flags.devices, **options)
        ledgers[named.name] = found
        print_ledger(console, named.name, found)
        if flags.schedule:
            print_schedule(console, named.name, found["schedule"])
        if found["memory"] and flags.memory is not None:
            bound: Bound = flags.memory
            words = describe_fit(found["memory"]["peak"], bound.name, bound.size)
            print_line(console, f"{named.name}: memory: {words}\n")
    return ledgers


def _read_budgets(path: Path | None, names: list[str]) -> dict[str, Budget]:
    if path is None:
        return {}
    with users_mistakes(f"--budget={path}: "):
        budgets = read_budgets(path)
    return {name: budget_for(budgets, name, path) for name in names}


def _write_budgets(path: Path, ledgers: Mapping[str, Json]) -> None:
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        earlier = parse_budgets(text, path)
        for name, found in ledgers.items():
            text = replace_budget(text, name, budget_text(name, found, earlier.get(name)))
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--budget={path} cannot be written: {error}.") from error


def _read_earlier(against: Path, name: str) -> tuple[Path, Json]:
    """Reads the ledger to compare with; returns its file and its content."""
    path = against / f"{name}.json" if against.is_dir() else against
    try:
        found = read_object(path, follow_links=True)
    except OSError as error:
        raise UsageError(
            f"--against={against}: {path} cannot be read ({error.strerror or error}); name a "
            "ledger that this command has written, or a folder of such ledgers."
        ) from error
    except ValueError as error:
        raise UsageError(f"--against={against}: {path} {error}.") from error
    missing = [key for key in NEEDED if key not in found]
    if missing:
        raise UsageError(
            f"--against={against}: {path} lacks {', '.join(missing)}; expected a ledger that this "
            "command has written."
        )
    return path, found
