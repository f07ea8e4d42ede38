"""What the steps of configs send, hold and compute, before one of them runs.

Each config is traced and, unless it is for too many devices to simulate, compiled; nothing is
trained. The ledgers are printed, written as JSON, drawn, compared with older ones, and held against
budgets. The folder of the results has

    <config>.json   the ledger, see `manualpar.inspect.step_ledger`, and the config
    inspect.png     all of them, see `manualpar.training.inspection_picture`

Exit codes: 0 if all went well, 1 if a budget is broken, 2 for a mistake of the user's, 130 for
Ctrl-C.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import rich.console

from manualpar.inspect.budget_writing import budget_text, replace_budget
from manualpar.inspect.budgets import (
    Budget,
    BudgetError,
    budget_for,
    check_budget,
    parse_budgets,
    read_budgets,
)
from manualpar.inspect.ledger_difference import Json, compare_ledgers
from manualpar.inspect.provenance import compiled_scopes, module_of, purpose_in
from manualpar.inspect.step_ledger import ledger
from manualpar.training.command_line import answer, write_json
from manualpar.training.config_files import NamedConfig
from manualpar.training.devices import simulate_devices
from manualpar.training.experiment import prepare
from manualpar.training.inspection_flags import InspectCommand
from manualpar.training.inspection_picture import Bound, draw_ledgers
from manualpar.training.inspection_report import (
    describe_fit,
    print_difference,
    print_ledger,
    print_summary,
    print_verdict,
)
from manualpar.untrusted import read_object
from manualpar.usage import UsageError, print_error
from manualpar.watching.screen import print_line
from manualpar.watching.writers import check_workdir, create_numbered_folder

BROKEN_EXIT_CODE = 1
PICTURE = "inspect.png"
# The keys without which a ledger from a file cannot be compared.
NEEDED = ("mesh", "bytes", "counts", "collectives", "flops", "memory", "compiled")


def inspect_command(command: InspectCommand) -> int:
    """Does what a command line asks for, for `absl.app.run`; returns the exit code."""
    broken: list[str] = []

    def work(console: rich.console.Console) -> Path:
        try:
            output, sentences = _inspect(command, console)
        except BudgetError as error:
            raise UsageError(str(error)) from error
        broken.extend(sentences)
        return output

    code = answer(work)
    for sentence in broken:
        print_error(f"over budget: {sentence}")
    return BROKEN_EXIT_CODE if broken else code


def read_ledger(named: NamedConfig, *, devices: int | None, compile: bool) -> dict[str, Any]:
    """Traces the step of a config, and compiles it if asked to.

    Args:
      named: The config.
      devices: How many devices it is for; `None`: those there are.
      compile: Whether to compile it; its devices must exist then.

    Returns:
      `Ledger.to_json()`, and `config_file`, `config`, `devices`, `jax`, and `predicted_is_bound`:
      whether the closed form is the most that is sent. Compiled collectives have a `purpose` and a
      `module` as far as XLA has kept them, joined with `+` where XLA merged several.

    Raises:
      UsageError: The config contradicts itself or the devices, or the step cannot be read.
    """
    try:
        experiment = prepare(named.config, devices=None if compile else devices)
        found = ledger(experiment.program, compile=compile).to_json()
    except ValueError as error:
        raise UsageError(f"{named.path}: {error}") from error
    root = type(experiment.task.model).__name__
    for collective in found["compiled"]["collectives"] if found["compiled"] else ():
        scopes = compiled_scopes(collective["scope"])
        purposes = dict.fromkeys(purpose_in(scope, ()) for scope in scopes)
        modules = dict.fromkeys(module_of(scope, root) for scope in scopes)
        collective["purpose"] = "+".join(purposes)
        collective["module"] = "+".join(filter(None, modules))
    return {
        "config_file": str(named.path),
        "config": named.config.to_dict(),
        "devices": experiment.program.mesh.size,
        "jax": jax.__version__,
        "predicted_is_bound": experiment.program.strategy.reshard_after_forward,
        **found,
    }


def _inspect(command: InspectCommand, console: rich.console.Console) -> tuple[Path, list[str]]:
    """Returns the folder of the results, and a sentence for each broken limit."""
    names = [named.name for named in command.configs]
    # All files are read first, so that mistakes show at once.
    budgets = _read_budgets(command.budget, names) if not command.write_budget else {}
    earlier = {name: _read_earlier(command.against, name) for name in names if command.against}
    if command.output:
        try:
            check_workdir(command.output)  # What this command wrote there it may write again.
        except ValueError as error:
            raise UsageError(str(error).replace("--workdir", "--output")) from error
    if command.compile or command.devices is None:  # Otherwise no device is needed.
        try:
            simulate_devices(command.devices)
        except RuntimeError as error:
            raise UsageError(f"--devices={command.devices}: {error}.") from error
        except ValueError as error:
            raise UsageError(f"{error} --nocompile needs no devices, however many.") from error
    ledgers: dict[str, Json] = {}
    for named in command.configs:
        found = read_ledger(named, devices=command.devices, compile=command.compile)
        ledgers[named.name] = found
        print_ledger(console, named.name, found)
        if found["memory"] and command.memory is not None:
            words = describe_fit(found["memory"]["peak"], command.memory_name, command.memory)
            print_line(console, f"{named.name}: {words}\n")
    if len(ledgers) > 1:
        print_summary(console, ledgers)
    for name, (path, before) in earlier.items():
        print_difference(console, name, compare_ledgers(before, ledgers[name]), path)
    broken: list[str] = []
    verdicts = {
        name: check_budget(budget, ledgers[name], command.budget)
        for name, budget in budgets.items()
    }
    for name, verdict in verdicts.items():
        print_verdict(console, name, verdict)
        broken += verdict.broken
    output = _write(command, ledgers, budgets)
    if command.write_budget and command.budget:
        _write_budgets(command.budget, ledgers)
        print_line(console, f"budgets: {command.budget}")
    return output, broken


def _read_budgets(path: Path | None, names: list[str]) -> dict[str, Budget]:
    """The budgets of some configs, each of which must have one."""
    if path is None:
        return {}
    try:
        budgets = read_budgets(path)
    except BudgetError as error:
        raise UsageError(f"--budget={path}: {error}") from error
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
    """The ledger to compare with, and its file."""
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


def _write(
    command: InspectCommand, ledgers: Mapping[str, Json], budgets: Mapping[str, Budget]
) -> Path:
    """Writes the ledgers and the picture; returns the folder."""
    bounds: dict[str, list[Bound]] = {name: [] for name in ledgers}
    for name, bound in bounds.items():
        if name in budgets and (allowed := budgets[name].most("peak_memory")) is not None:
            bound.append(Bound("budget", allowed))
        if command.memory is not None:
            bound.append(Bound(command.memory_name, command.memory))
    try:
        output = command.output or create_numbered_folder(Path("runs") / "inspect")
        output.mkdir(parents=True, exist_ok=True)
        for name, found in ledgers.items():
            write_json(output / f"{name}.json", found)
        draw_ledgers(ledgers, output / PICTURE, bounds=bounds)
    except OSError as error:
        raise UsageError(
            f"the results cannot be written: {error}; name another folder with --output."
        ) from error
    return output
