"""What the steps of configs send, hold and compute, before one of them runs.

Each config is traced, and compiled unless there are more devices than one would simulate; nothing
is trained. What is found out is printed, written as JSON, drawn, compared with what was found
before, and held against budgets. The results folder has

    <config>.json   the ledger, see `manualpar.inspect.ledger`, with the config that it is of
    inspect.png     all of them, see `manualpar.training.inspection_picture`

Exit codes: 0 if all went well, 1 if a budget is broken, 2 for a mistake of the user's, 130 for
Ctrl-C.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import rich.console
from absl import logging

from manualpar.inspect.budget import Verdict, check_budget
from manualpar.inspect.budget_file import (
    Budget,
    BudgetError,
    budget_for,
    parse_budgets,
    read_budgets,
)
from manualpar.inspect.budget_writing import budget_text, replace_budget
from manualpar.inspect.difference import difference
from manualpar.inspect.ledger import ledger
from manualpar.inspect.scopes import compiled_scopes, module_of, purpose_in
from manualpar.training.command_line import UsageError
from manualpar.training.devices import simulate_devices
from manualpar.training.experiment import Experiment, prepare
from manualpar.training.inspection_difference import print_difference
from manualpar.training.inspection_flags import InspectCommand, Named
from manualpar.training.inspection_picture import Bound, draw_ledgers
from manualpar.training.inspection_report import (
    describe_fit,
    print_ledger,
    print_summary,
    print_verdict,
)
from manualpar.training.main import INTERRUPTED_EXIT_CODE, USAGE_EXIT_CODE, print_error
from manualpar.untrusted import read_object
from manualpar.watching.progress import make_console, print_line
from manualpar.watching.writers import check_workdir, create_numbered_folder

BROKEN_EXIT_CODE = 1
PICTURE = "inspect.png"
# What a file needs to be compared with.
NEEDED = ("mesh", "bytes", "counts", "collectives", "flops", "memory", "compiled")

Json = Mapping[str, Any]


def inspect_command(command: InspectCommand) -> int:
    """Does what a command line asks for, for `absl.app.run`.

    Args:
      command: The command line.

    Returns:
      The exit code, see the module.
    """
    started = time.perf_counter()
    logging.set_verbosity(logging.WARNING)  # At its default absl shows jax's notes on backends.
    console = make_console()
    try:
        return _inspect(command, console, started=started)
    except (UsageError, BudgetError) as error:
        print_error(error)
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:
        print_error("interrupted")
        return INTERRUPTED_EXIT_CODE


def read_ledger(named: Named, *, devices: int | None, compile: bool) -> dict[str, Any]:
    """Traces the step of a config, compiles it if asked to, and says what is in it.

    Args:
      named: The config.
      devices: How many devices it is for; `None`: those there are.
      compile: Whether to compile it, for devices that there must be.

    Returns:
      `Ledger.to_json()`, and `config_file`, `config`, `devices`, `jax`, and `predicted_is_bound`:
      whether the closed form is the most that is sent. Compiled collectives have their `purpose`
      and `module` as far as XLA has kept them.

    Raises:
      UsageError: The config does not fit itself or the devices, or the step cannot be read.
    """
    try:
        experiment = prepare(named.config, devices=None if compile else devices)
        found = ledger(experiment.program, compile=compile)
    except ValueError as error:
        raise UsageError(f"{named.path}: {error}") from error
    plain = found.to_json()
    if plain["compiled"] is not None:
        _name_compiled(plain["compiled"]["collectives"], experiment)
    return {
        "config_file": str(named.path),
        "config": named.config.to_dict(),
        "devices": experiment.program.mesh.size,
        "jax": jax.__version__,
        "predicted_is_bound": experiment.program.strategy.reshard_after_forward,
        **plain,
    }


def _inspect(command: InspectCommand, console: rich.console.Console, *, started: float) -> int:
    """Reads all files that are named, so that mistakes show at once; then does the work."""
    budgets = _read_budgets(command)
    earlier = {named.name: _read_earlier(command.against, named.name) for named in command.configs}
    if command.output:
        _refuse_run(command.output)
    if command.compile or command.devices is None:  # Else nobody asks for a device.
        try:
            simulate_devices(command.devices)
        except RuntimeError as error:
            raise UsageError(f"--devices={command.devices}: {error}.") from error
        except ValueError as error:
            raise UsageError(f"{error} --nocompile needs no devices, however many.") from error
    ledgers: dict[str, dict[str, Any]] = {}
    for named in command.configs:
        ledgers[named.name] = read_ledger(named, devices=command.devices, compile=command.compile)
        print_ledger(console, named.name, ledgers[named.name])
        memory = ledgers[named.name]["memory"]
        if memory and command.memory is not None:
            words = describe_fit(memory["peak"], command.memory_name, command.memory)
            print_line(console, f"{named.name}: {words}\n")
    if len(ledgers) > 1:
        print_summary(console, ledgers)
    for name, (path, before) in _given(earlier):
        print_difference(console, name, difference(before, ledgers[name]), path)
    verdicts = {
        name: check_budget(budget, ledgers[name], command.budget)
        for name, budget in budgets.items()
    }
    for name, verdict in verdicts.items():
        print_verdict(console, name, verdict)
    output = _write(command, ledgers, budgets)
    if command.write_budget and command.budget:
        _write_budgets(command.budget, ledgers)
        print_line(console, f"budgets: {command.budget}")
    print_line(console, f"time: {time.perf_counter() - started:.1f} s")
    print_line(console, f"results: {output}")
    return _report_broken(verdicts)


def _report_broken(verdicts: Mapping[str, Verdict]) -> int:
    """Says which limits are broken, each in a sentence, and which exit code that is."""
    broken = [finding for verdict in verdicts.values() for finding in verdict.broken]
    for finding in broken:
        print_error(f"over budget: {finding.sentence()}")
    return BROKEN_EXIT_CODE if broken else 0


def _read_budgets(command: InspectCommand) -> dict[str, Budget]:
    """The budgets that the configs are held against; each must have one."""
    if command.budget is None or command.write_budget:
        return {}
    try:
        budgets = read_budgets(command.budget)
    except BudgetError as error:
        raise UsageError(f"--budget={command.budget}: {error}") from error
    return {
        named.name: budget_for(budgets, named.name, command.budget) for named in command.configs
    }


def _write_budgets(path: Path, ledgers: Mapping[str, Json]) -> None:
    """Puts what was measured into a file of budgets."""
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        earlier = parse_budgets(text, path)
        for name, found in ledgers.items():
            text = replace_budget(text, name, budget_text(name, found, earlier.get(name)))
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--budget={path} cannot be written: {error}.") from error


def _read_earlier(against: Path | None, name: str) -> tuple[Path, Json] | None:
    """The ledger to compare with, and where it is from; `None` if there is nothing to compare."""
    if against is None:
        return None
    path = against / f"{name}.json" if against.is_dir() else against
    try:
        found = read_object(path, follow_links=True)
    except OSError as error:
        raise UsageError(
            f"--against={against}: {path} cannot be read ({error.strerror or error}); name a "
            "ledger that this command has written, or a folder of them."
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


def _given(earlier: Mapping[str, tuple[Path, Json] | None]) -> list[tuple[str, tuple[Path, Json]]]:
    """Those that there are."""
    return [(name, found) for name, found in earlier.items() if found is not None]


def _refuse_run(output: Path) -> None:
    """Refuses the folder of a training run; what this command wrote there it may write again."""
    try:
        check_workdir(output)
    except ValueError as error:
        raise UsageError(str(error).replace("--workdir", "--output")) from error


def _write(
    command: InspectCommand, ledgers: Mapping[str, Json], budgets: Mapping[str, Budget]
) -> Path:
    """Writes the ledgers and the picture; returns the folder."""
    bounds = {}
    for name in ledgers:
        allowed = budgets[name].most("peak_memory") if name in budgets else None
        bounds[name] = [] if allowed is None else [Bound("budget", allowed)]
        if command.memory is not None:
            bounds[name].append(Bound(command.memory_name, command.memory))
    try:
        output = command.output or create_numbered_folder(Path("runs") / "inspect")
        output.mkdir(parents=True, exist_ok=True)
        for name, found in ledgers.items():
            text = json.dumps(found, indent=2, allow_nan=False)
            (output / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        draw_ledgers(ledgers, output / PICTURE, bounds=bounds)
    except OSError as error:
        raise UsageError(
            f"the results cannot be written: {error}; name another folder with --output."
        ) from error
    return output


def _name_compiled(collectives: list[dict[str, Any]], experiment: Experiment) -> None:
    """Adds to compiled collectives what they are for and whose; several of each if XLA merged."""
    root = type(experiment.task.model).__name__
    for found in collectives:
        scopes = compiled_scopes(found["scope"])
        purposes = dict.fromkeys(purpose_in(scope, ()) for scope in scopes)
        modules = dict.fromkeys(module_of(scope, root) for scope in scopes)
        found["purpose"] = "+".join(purposes)
        found["module"] = "+".join(filter(None, modules))
