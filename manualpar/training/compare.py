"""Trains one config under a list of strategies and modes, side by side.

A config to compare has the fields of the others but for those that are compared,
`parallel.strategy` and `parallel.mode`, and for those that only the training loop reads. It also
has `pairs`, which are compared, and `compare.repetitions`.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_collections
import rich.console
from absl import logging

from manualpar.core.strategy import MODES
from manualpar.data import train_batch
from manualpar.strategies import Field, strategy_kinds
from manualpar.training.command_line import CommandLine, UsageError
from manualpar.training.comparison import Row, Trial, run_trials
from manualpar.training.comparison_picture import draw_comparison
from manualpar.training.comparison_report import (
    comparison_json,
    comparison_markdown,
    print_comparison,
)
from manualpar.training.config import nearest
from manualpar.training.devices import describe_mesh, simulate_devices
from manualpar.training.experiment import Experiment, prepare
from manualpar.training.fit import check_fits
from manualpar.training.main import INTERRUPTED_EXIT_CODE, USAGE_EXIT_CODE, print_error
from manualpar.watching.screen import make_console, print_line
from manualpar.watching.writers import CONFIG_FILE, check_workdir, create_numbered_folder

ONE_DEVICE = "one device"
REPETITIONS = Field(int, 1)
# What the training loop reads and this does not.
UNUSED: Mapping[str, Any] = {
    "profile": "",
    "data.prefetch": 1,
    "training.eval_every_steps": 0,
    "training.eval_batches": 0,
    "training.log_every_steps": 1,
    "training.on_nonfinite": "ignore",
    "checkpoint.every_steps": 0,
    "checkpoint.keep": 1,
    "checkpoint.keep_every_steps": 0,
    "checkpoint.best_metric": "",
    "checkpoint.on_corruption": "stop",
    "watch.lost_seconds": 10.0,
    "watch.stall_seconds": 0.0,
    "debug.check_replicas_every": 0,
    "debug.draw_sharding": "",
}

Pair = tuple[str, str]


def compare_command(command: CommandLine) -> int:
    """Does what a command line asks for, for `absl.app.run`.

    Args:
      command: The command line.

    Returns:
      The exit code, see `manualpar.training.main`.
    """
    started = time.perf_counter()
    logging.set_verbosity(logging.WARNING)  # At its default absl shows jax's notes on backends.
    console = make_console()
    remains = "nothing was written"
    try:
        try:
            pair_experiments = _prepare(command)
            workdir = _open_workdir(command)
        except (UsageError, ValueError) as error:
            print_error(error)
            return USAGE_EXIT_CODE
        remains = f"of the results only the config is in {workdir}"
        rows = compare(command.config, pair_experiments, console=console)
        write_comparison(rows, workdir, repetitions=command.config.compare.repetitions)
        print_comparison(console, rows, repetitions=command.config.compare.repetitions)
    except KeyboardInterrupt:
        print_error(f"interrupted; {remains}")
        return INTERRUPTED_EXIT_CODE
    print_line(console, f"time: {time.perf_counter() - started:.1f} s")
    print_line(console, f"results: {workdir}")
    return 0


def prepare_pairs(config: ml_collections.ConfigDict) -> list[tuple[str, Experiment]]:
    """Checks a config and builds a program for each pair, and one for a single device.

    Args:
      config: The config, see `configs/compare.py`.

    Returns:
      The names of the strategies with their experiments, the single device's last.

    Raises:
      ValueError: The config does not fit itself or the devices; the message names the field.
    """
    pairs, config = _check(config)
    reference = _with(config, "dp", "auto")
    reference.parallel.mesh = ml_collections.ConfigDict({"data": 1})
    reference.parallel.reduce_dtype = ""  # Nothing is reduced.
    configs = [(strategy, _with(config, strategy, mode)) for strategy, mode in pairs]
    return [(name, prepare(each)) for name, each in [*configs, (ONE_DEVICE, reference)]]


def compare(
    config: ml_collections.ConfigDict,
    experiments: list[tuple[str, Experiment]],
    *,
    console: rich.console.Console,
) -> list[Row]:
    """Trains and times programs side by side.

    Args:
      config: The config that was compared.
      experiments: See `prepare_pairs`.
      console: Where to show how far it is.

    Returns:
      A row for each pair, and one for the single device, the last.
    """
    meshes = {describe_mesh(experiment.program.mesh): None for _, experiment in experiments[:-1]}
    print_line(console, f"mesh: {'; '.join(meshes)}")
    trials = []
    for strategy, experiment in experiments:
        trials.append(Trial(strategy, experiment.program))
        seconds = trials[-1].compile_seconds
        name = f"{strategy} {experiment.program.mode}"
        print_line(console, f"{name:24s} compiled in {seconds:.1f} s")
    size = config.data.batch_size
    batches = [
        train_batch(
            experiments[0][1].task.dataset.train, step * size, batch_size=size, seed=config.seed
        )
        for step in range(config.training.num_steps)
    ]

    def report(trial: Trial) -> None:
        name = f"{trial.strategy} {trial.program.mode}"
        print_line(console, f"{name:24s} loss {trial.losses[-1]:.6f}")

    return run_trials(
        trials,
        batches,
        seed=config.seed,
        repetitions=config.compare.repetitions,
        report=report,
    )


def write_comparison(rows: list[Row], workdir: Path, *, repetitions: int) -> None:
    """Writes `comparison.json`, `comparison.md` and `comparison.png` into a folder."""
    text = json.dumps(comparison_json(rows), indent=2, allow_nan=False)
    (workdir / "comparison.json").write_text(text + "\n", encoding="utf-8")
    text = comparison_markdown(rows, repetitions=repetitions)
    (workdir / "comparison.md").write_text(text, encoding="utf-8")
    draw_comparison(rows, workdir / "comparison.png")


def _prepare(command: CommandLine) -> list[tuple[str, Experiment]]:
    """Checks everything that can be checked before something compiles."""
    if command.workdir:
        check_workdir(command.workdir)
    simulate_devices(command.devices, force=command.force)
    experiments = prepare_pairs(command.config)
    for _, experiment in () if command.force else experiments:
        check_fits(experiment)
    return experiments


def _open_workdir(command: CommandLine) -> Path:
    """Creates the folder of the results and stores the config there."""
    try:
        workdir = command.workdir or create_numbered_folder(Path("runs") / command.config_path.stem)
        workdir.mkdir(parents=True, exist_ok=True)
        text = json.dumps(command.config.to_dict(), indent=2, allow_nan=False)
        (workdir / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"the results cannot be written: {error}; name another folder with --workdir."
        ) from error
    return workdir


def _check(
    config: ml_collections.ConfigDict,
) -> tuple[list[Pair], ml_collections.ConfigDict]:
    """The pairs, and the rest of the config as an experiment's but for strategy and mode."""
    if not isinstance(config, ml_collections.ConfigDict):
        raise ValueError(
            f"config is a {type(config).__name__}, expected an ml_collections.ConfigDict."
        )
    rest = config.to_dict()
    for name in ("pairs", "compare", "parallel", "model"):
        if name not in rest:
            raise ValueError(f"config.{name} is missing, expected it as in configs/compare.py.")
    for name, value in UNUSED.items():
        *groups, field = name.split(".")
        group = rest.setdefault(groups[0], {}) if groups else rest
        group.setdefault(field, value)
    pairs, compare = rest.pop("pairs"), rest.pop("compare")
    for field in compare:
        if field != "repetitions":
            raise ValueError(
                f"config.compare.{field} is not a known field; the nearest one is "
                "config.compare.repetitions."
            )
    repetitions = compare.get("repetitions")
    if not REPETITIONS.allows(repetitions):
        raise ValueError(
            f"config.compare.repetitions is {repetitions!r}, expected {REPETITIONS.expectation()}."
        )
    rate = rest["model"].get("dropout_rate", 0)
    if isinstance(rate, int | float) and rate > 0:
        raise ValueError(
            f"config.model.dropout_rate is {rate}, expected 0: every device draws a mask of its "
            "own, so that losses would not be those of one device."
        )
    return _check_pairs(pairs), ml_collections.ConfigDict(rest)


def _check_pairs(pairs: Any) -> list[Pair]:
    """The pairs of a strategy and a mode."""
    example = "expected pairs of a strategy and a mode such as (('fsdp', 'manual'),)"
    if not isinstance(pairs, tuple | list) or not pairs:
        raise ValueError(f"config.pairs is {pairs!r}, {example}.")
    checked: list[Pair] = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"config.pairs contains {pair!r}, {example}.")
        choices = (("strategy", tuple(strategy_kinds())), ("mode", MODES))
        for part, (what, known) in zip(pair, choices, strict=True):
            if part not in known:
                raise ValueError(
                    f"config.pairs contains {pair!r}, expected a {what} that is one of "
                    f"{', '.join(map(repr, known))}; the nearest one is "
                    f"{nearest(str(part), known)!r}."
                )
        if tuple(pair) in checked:
            raise ValueError(f"config.pairs contains {pair!r} twice, expected each pair once.")
        checked.append((pair[0], pair[1]))
    return checked


def _with(config: ml_collections.ConfigDict, strategy: str, mode: str) -> ml_collections.ConfigDict:
    """An experiment's config."""
    config = ml_collections.ConfigDict(config.to_dict())
    config.parallel.strategy = strategy
    config.parallel.mode = mode
    return config
