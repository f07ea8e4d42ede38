"""Trains one config under several strategies and modes, and compares their bytes, memory and time.

A config for this command has the fields `pairs`, the strategies and modes to compare, and
`compare.repetitions`. The config must not have `parallel.strategy`, `parallel.mode`, or fields that
only the training loop reads. All other fields are the same as in any config.

The losses are compared with the losses on one device. Steps are timed in rounds: in each round,
every program runs one step. The times of a round are compared as ratios, because other work on the
machine slows down all programs of a round. The results folder contains `config.json`,
`comparison.json`, `comparison.md` and `comparison.png`.
"""

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import jax
import ml_collections
import rich.console

from manualpar.commands.command_line import OUTPUT, TRAINING, CommandLine, Syntax, run_absl
from manualpar.commands.results import (
    answer,
    check_output,
    choose_devices,
    results_folder,
    users_mistakes,
    with_picture,
    write_json,
)
from manualpar.core.mesh.mesh import describe_mesh
from manualpar.core.modes.strategy import MODES
from manualpar.core.program.program import Program
from manualpar.core.state.metrics import fetch_metrics
from manualpar.core.state.train_state import Batch
from manualpar.data import train_batch
from manualpar.errors import suggest
from manualpar.inspect import (
    compiled_collectives,
    count_by_kind,
    outer_step_bytes,
    state_bytes,
    total_bytes,
    total_step_bytes,
    trace_collectives,
    trace_outer_steps,
)
from manualpar.inspect.step_ledger import describe_codes
from manualpar.inspect.tables import (
    UNKNOWN,
    TableColumn,
    describe_bytes,
    markdown_table,
    print_line,
    print_table,
    print_wrapped,
)
from manualpar.models import Transformer
from manualpar.models.transformer_collectives import transformer_sends
from manualpar.strategies import Field, strategy_kinds
from manualpar.strategies.registry import fields_of_manual_mode
from manualpar.system.reports import pictures
from manualpar.system.reports.flags import Flag
from manualpar.system.reports.pictures import Bar
from manualpar.system.storage.untrusted import write_file
from manualpar.training.config_fields import FIELDS
from manualpar.training.experiment import Experiment, prepare
from manualpar.training.memory_check import check_fits
from manualpar.training.monitoring.run_files import CONFIG_FILE

# -------------------------------------------------------------------------------------------------
# Shows a comparison of strategies as a table, as Markdown and as a picture.
#
# A row is a dict with the measurements of a program, see `Trial.row` in `compare_command`. The
# last row is the program on a single device.


Row = dict[str, Any]

PICTURE = "comparison.png"
KINDS = ("all_gather", "reduce_scatter", "all_reduce")
DASHES: dict[str, Any] = {
    "manual": (0, ()),
    "auto": (0, (5, 2)),
    "explicit": (0, (1, 1.4)),
    "auto-unconstrained": (0, (6, 1.5, 1, 1.5)),
}


def name(row: Row) -> str:
    """Returns a row's strategy and mode, such as `fsdp auto`."""
    return f"{row['strategy']} {row['mode']}"


def _counts(row: Row) -> str:
    counts = [row["collectives"].get(kind, 0) for kind in KINDS]
    if others := sum(row["collectives"].values()) - sum(counts):
        counts.append(others)
    return "/".join(map(str, counts))


def _kib(size: float | None) -> str:
    return UNKNOWN if size is None else f"{size / 1024:,.1f}"


COLUMNS: Sequence[TableColumn[Row]] = (
    TableColumn("", name),
    TableColumn("final loss", lambda row: row["losses"][-1], "{:.6f}".format),
    TableColumn("minus one device", "difference", "{:+.1e}".format),
    TableColumn("state KiB", "state_bytes", _kib),
    TableColumn("tempor. KiB", "temporary_bytes", _kib),
    TableColumn("sent KiB", "bytes_sent", _kib),
    TableColumn(
        "formula KiB",
        lambda row: "≤ " * row["formula_is_bound"] + _kib(row["formula_bytes"]),
        str,
    ),
    TableColumn("calls", _counts, str),
    TableColumn("compile s", "compile_seconds", "{:.1f}".format),
    TableColumn("step ratio", "step_ratio", "{:.2f}".format),
)


def print_rows(console: rich.console.Console, rows: Sequence[Row], notes: Sequence[str]) -> None:
    """Prints the table and the footnotes; a line separates the row of the single device."""
    *pairs, reference = rows
    columns = [dataclasses.replace(x, name=x.name.replace(" ", "\n")) for x in COLUMNS]
    print_table(console, columns, pairs, last=reference)
    print_wrapped(console, *notes)


def markdown(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """Formats the table in Markdown, with the footnotes below it."""
    return "\n".join([markdown_table(COLUMNS, rows), "", *(f"- {note}" for note in notes), ""])


def footnotes(rows: Sequence[Row], *, repetitions: int) -> list[str]:
    """Returns footnotes that explain the columns of the table."""
    device = jax.devices()[0]
    cpu = " Simulated devices share the cores of one machine, so this shows no speed-up."
    return [
        f"jax {jax.__version__}, {device.device_kind}. Loss: the loss of the last of "
        f"{len(rows[0]['losses'])} steps, and its difference from the loss on one device. State: "
        "parameters and optimizer state on a device. Temporaries: the memory that the compiled "
        "step needs in addition.",
        "Sent, and calls of collectives (all-gathers/reduce-scatters/all-reduces/others): per "
        "device and step. In mode manual they are read from the traced program, including metrics. "
        "In the other modes they are read from the program that XLA compiled for this backend.",
        "Formula: the predicted bytes for parameters and gradients, and in mode manual also for "
        "split layers. ≤: an upper bound, because weights are gathered again only if the backward "
        "pass needs them. -: no formula, because XLA may send activations.",
        f"Step: the time of a step divided by the first row's time, as a median over {repetitions} "
        f"rounds. In a round every row makes one step.{cpu if device.platform == 'cpu' else ''}",
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws the losses, and bars for a device's memory and sent bytes, into a PNG file."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in rows[0]["mesh"].items())
    title = f"One config under {len(rows) - 1} strategies and modes ({mesh})"
    size = (15, max(6.4, 2.6 + 0.34 * len(rows)))
    with pictures.saved_figure(path, size, title=title) as figure:
        grid = figure.add_gridspec(2, 3, width_ratios=(1.35, 1, 1), height_ratios=(2.2, 1))
        losses = figure.add_subplot(grid[0, 0])
        _draw_losses(losses, figure.add_subplot(grid[1, 0], sharex=losses), rows)
        _draw_memory(figure.add_subplot(grid[:, 1]), rows)
        _draw_bytes(figure.add_subplot(grid[:, 2]), rows)


def _draw_losses(losses: Any, differences: Any, rows: Sequence[Row]) -> None:
    *pairs, reference = rows
    steps = range(1, len(reference["losses"]) + 1)
    for index, row in enumerate(pairs):
        style = {"color": _color(row), "linestyle": DASHES[row["mode"]]}
        # Earlier lines are wider, so that they stay visible under the later lines.
        width = 1.2 + 4.0 * (len(pairs) - 1 - index) / max(len(pairs) - 1, 1)
        losses.plot(steps, row["losses"], linewidth=width, label=name(row), **style)
        apart = [x - y for x, y in zip(row["losses"], reference["losses"], strict=True)]
        differences.plot(steps, apart, linewidth=1.1, **style)
    losses.plot(steps, reference["losses"], color=pictures.INK, linewidth=0.8, label="one device")
    differences.axhline(0, color=pictures.INK, linewidth=0.8)
    distance = max(row["largest_difference"] for row in pairs)
    losses.set_title(f"Training loss, at most {distance:.1e} from the loss on one device")
    losses.tick_params(labelbottom=False)
    losses.legend(fontsize=8, ncols=2, handlelength=3.2)
    differences.set_title("Loss minus the loss on one device")
    pictures.count_steps(differences)
    differences.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    for axes in (losses, differences):
        axes.set_ylabel("nats")


def _draw_memory(axes: Any, rows: Sequence[Row]) -> None:
    bars = []
    for row in rows:
        state, temporaries = row["state_bytes"], row["temporary_bytes"] or 0
        label = name(row) if row is not rows[-1] else row["strategy"]
        text = f"{describe_bytes(state)} + {describe_bytes(temporaries)}"
        bars.append(Bar(label, [(state, _color(row)), (temporaries, pictures.GREY)], text))
    pictures.draw_bars_of_bytes(axes, bars, title="Memory of a device: state + temporaries")


def _draw_bytes(axes: Any, rows: Sequence[Row]) -> None:
    bars = []
    for y, row in enumerate(rows):
        sent, formula = row["bytes_sent"], row["formula_bytes"] or 0
        color = _color(row) if row["read_from"] == "traced" else _pale(_color(row))
        # An invisible part of the bar, up to the formula's value, puts the text to the right of
        # the line that marks this value.
        parts = [(sent, color), (max(formula - sent, 0), "none")]
        bars.append(Bar("", parts, describe_bytes(sent)))
        if formula:
            mark = {"marker": "|", "markersize": 13, "markeredgewidth": 2.2}
            axes.plot(formula, y, color=pictures.INK, **mark)
    title = "Bytes that a device sends in a step (|: the formula)"
    pictures.draw_bars_of_bytes(axes, bars, title=title)
    pictures.add_legend(axes, {"as traced": pictures.DARK, "as compiled": _pale(pictures.DARK)})


def _color(row: Row) -> str:
    kind = strategy_kinds().get(row["strategy"])
    return kind.color if kind else pictures.INK  # The row of the single device has no strategy.


def _pale(color: str) -> str:
    """Returns the colour halfway between `#RRGGBB` and white."""
    return "#" + "".join(f"{(int(color[i : i + 2], 16) + 255) // 2:02X}" for i in (1, 3, 5))


# -------------------------------------------------------------------------------------------------


USAGE = """Trains one config under several strategies and modes, and compares them.

{program} [CONFIG] [--<field>=<value> ...]
    [--pairs="(('fsdp', 'manual'), ('fsdp', 'auto'))"] [--output=<folder>]
    [--mesh=<axis>=<size>,...] [--devices=<number>]

The comparison covers losses, bytes, memory and time. A config for this command has the fields
`pairs`, the strategies and modes to compare, and `compare.repetitions`.
"""
FLAGS: Mapping[str, Flag] = {
    "output": OUTPUT,
    **{name: flag for name, flag in TRAINING.flags.items() if name != "workdir"},
}
REPETITIONS = Field(int, 1, meaning="The number of steps of each pair that are timed.")
COMPARING = Syntax(
    FLAGS,
    renamed={"workdir": "output"},
    fields={
        "pairs": Field(
            tuple,
            expected="a tuple of pairs such as (('fsdp', 'manual'), ('zero1', 'auto'))",
            meaning="The strategies and modes to compare.",
        ),
        "compare.repetitions": REPETITIONS,
    },
)
ONE_DEVICE = "one device"
# Prefixes of the fields that a comparison's config does not have, because only the training loop
# reads them.
UNUSED = (
    *("profile", "data.prefetch", "training.eval_", "training.log_", "training.on_"),
    *("checkpoint.", "watch.", "debug."),
)


class Trial:
    """A program of the comparison, with its state and its measurements."""

    def __init__(self, strategy: str, program: Program) -> None:
        """Compiles the program's step."""
        self.strategy, self.program = strategy, program
        self.name = f"{strategy} {program.mode}"
        self.losses: list[float] = []
        self.seconds: list[float] = []
        started = time.perf_counter()
        self.traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
        self.compiled = self.traced.lower().compile()
        self.compile_seconds = time.perf_counter() - started
        self._state: Any = None
        self._number = 0

    def train(self, batches: Sequence[Batch], *, seed: int) -> None:
        """Trains from the initial state and records the losses."""
        self._state, self._number = self.program.init(jax.random.key(seed)), 0
        for batch in batches:
            self._step(batch)
            total, count = fetch_metrics(self._metrics)["loss"]
            self.losses.append(total / count)

    def time_step(self, batch: Batch) -> None:
        """Runs one more step and records its time."""
        batch = jax.block_until_ready(jax.device_put(batch, self.program.batch_sharding))
        started = time.perf_counter()
        self._step(batch)
        jax.block_until_ready((self._state, self._metrics))
        self.seconds.append(time.perf_counter() - started)

    def _step(self, batch: Batch) -> None:
        batch = jax.device_put(batch, self.program.batch_sharding)
        self._number += 1
        # With DiLoCo some steps are followed by an outer step.
        is_local = self.program.outer is not None
        step: Any = self.program.step_at(self._number) if is_local else self.compiled
        self._state, self._metrics = step(self._state, batch)

    def row(self, *, reference: "Trial", first: "Trial") -> Row:
        """Returns the row of the program in the comparison: all measurements, in bytes and seconds.

        `reference` is the trial on one device. `first` is the trial whose step time is the unit of
        `step_ratio`.

        `state_bytes` is the size of parameters and optimizer state on the fullest device.
        `temporary_bytes` is the memory that the compiled step needs in addition. `bytes_sent` and
        `collectives` are counted for one device in one step. `formula_bytes` is the predicted
        `bytes_sent` for parameters and gradients, and in mode manual also for split layers. If
        `formula_is_bound`, it is only an upper bound. With DiLoCo, `bytes_sent` and `formula_bytes`
        include a step's share of the outer step. `step_ratio` is the median over the rounds of the
        program's step time, divided by the step time of `first` in the same round.
        """
        program, state = self.program, self.program.abstract_state
        found: Sequence[Any]
        if program.mode == "manual":
            found, read_from = trace_collectives(self.traced), "traced"
        else:
            # XLA may leave collectives over a single device in the program.
            found = [c for c in compiled_collectives(self.compiled) if c.group_size > 1]
            read_from = "compiled"
        sent = total_bytes(found)
        if program.outer is not None:
            sent += total_bytes(trace_outer_steps(program)) / program.outer.every
        memory = self.compiled.memory_analysis()
        differences = [x - y for x, y in zip(self.losses, reference.losses, strict=True)]
        ratios = [x / y for x, y in zip(self.seconds, first.seconds, strict=True)]
        is_predicted = program.mode != "auto-unconstrained"
        return {
            "strategy": self.strategy,
            "mode": program.mode,
            "mesh": dict(program.mesh.shape),
            "losses": self.losses,
            "final_loss": self.losses[-1],
            "difference": differences[-1],
            "largest_difference": max(map(abs, differences)),
            "state_bytes": state_bytes((state.params, state.opt_state, state.local))[0],
            "temporary_bytes": None if memory is None else memory.temp_size_in_bytes,
            "bytes_sent": float(sent),
            "formula_bytes": float(_predicted_bytes(program)) if is_predicted else None,
            "formula_is_bound": is_predicted and program.strategy.reshard_after_forward,
            "collectives": count_by_kind(found),
            "read_from": read_from,
            "compile_seconds": self.compile_seconds,
            "step_seconds": statistics.median(self.seconds),
            "step_ratio": statistics.median(ratios),
        }


def _predicted_bytes(program: Program) -> Fraction:
    model = getattr(program.abstract_state.apply_fn, "__self__", None)
    predicted = total_step_bytes(program)
    if program.outer is not None:
        predicted += sum(outer_step_bytes(program).values(), Fraction(0)) / program.outer.every
    if program.mode == "manual" and isinstance(model, Transformer):
        predicted += total_bytes(transformer_sends(program, model))
    return predicted


def compare(
    config: ml_collections.ConfigDict,
    experiments: Sequence[tuple[str, Experiment]],
    *,
    console: rich.console.Console,
) -> list[Row]:
    """Trains the programs of `prepare_pairs` on the same batches, then times them in rounds.

    Returns a row for each program, see `Trial.row`.
    """
    meshes = {describe_mesh(experiment.program.mesh): None for _, experiment in experiments[:-1]}
    print_line(console, f"mesh: {'; '.join(meshes)}")
    for chosen in _compiler_options(experiments):
        print_line(console, f"compiler options: {chosen}")
    trials = []
    for strategy, experiment in experiments:
        trials.append(Trial(strategy, experiment.program))
        seconds = trials[-1].compile_seconds
        print_line(console, f"{trials[-1].name:24s} compiled in {seconds:.1f} s")
    size, split = config.data.batch_size, experiments[0][1].task.dataset.train
    batches = [
        train_batch(split, step * size, batch_size=size, seed=config.seed)
        for step in range(config.training.num_steps)
    ]
    for trial in trials:
        trial.train(batches, seed=config.seed)
        print_line(console, f"{trial.name:24s} loss {trial.losses[-1]:.6f}")
    for batch in itertools.islice(itertools.cycle(batches), config.compare.repetitions):
        for trial in trials:
            trial.time_step(batch)
    return [trial.row(reference=trials[-1], first=trials[0]) for trial in trials]


def _compiler_options(experiments: Sequence[tuple[str, Experiment]]) -> list[str]:
    """Describes each set of compiler options that was chosen for any pair."""
    chosen = dict.fromkeys(str(experiment.chosen) for _, experiment in experiments[:-1])
    return [each for each in chosen if each]


def prepare_pairs(config: Any) -> list[tuple[str, Experiment]]:
    """Checks a config, builds the program of each pair, and lastly a program for one device."""
    for field in ("pairs", "compare", "parallel", "model"):
        if field not in config:
            raise ValueError(f"config.{field} is missing, expected it as in configs/compare.py.")
    rest = config.to_dict()
    pairs = _check_pairs(rest.pop("pairs"))
    group = {"repetitions": None} | rest.pop("compare")
    for field, value in group.items():
        if field != "repetitions":
            raise ValueError(f"config.compare.{field} is not a known field, expected repetitions.")
        if not REPETITIONS.allows(value):
            expected = REPETITIONS.expectation()
            raise ValueError(f"config.compare.{field} is {value!r}, expected {expected}.")
    rate = rest["model"].get("dropout_rate", 0)
    if isinstance(rate, int | float) and rate > 0:
        raise ValueError(
            f"config.model.dropout_rate is {rate}, expected 0: every device draws its own mask, so "
            "the losses would differ from the losses on one device."
        )
    for path, unused in FIELDS.items():
        if path.startswith(UNUSED):
            smallest = unused.kind() if unused.minimum is None else unused.kind(unused.minimum)
            group, _, field = path.rpartition(".")
            fields = rest.setdefault(group, {}) if group else rest
            fields.setdefault(field, unused.choices[0] if unused.choices else smallest)

    def build(strategy: str, mode: str, **changes: Any) -> Experiment:
        parallel = rest["parallel"] | {"strategy": strategy, "mode": mode} | changes
        return prepare(ml_collections.ConfigDict(rest | {"parallel": parallel}))

    experiments = [(strategy, build(strategy, mode)) for strategy, mode in pairs]
    # On one device nothing is sent or sharded, so these options are turned off.
    parts = {"sequence": False, "layer_overlap": "none"} if "sequence" in rest["parallel"] else {}
    parts |= {"mesh": {"data": 1}, "mesh_order": ()}
    parts |= {name.removeprefix("parallel."): x for name, x in fields_of_manual_mode().items()}
    single = build("dp", "auto", **parts)
    return [*experiments, (ONE_DEVICE, single)]


def _check_pairs(pairs: Any) -> list[tuple[str, str]]:
    example = "expected pairs of a strategy and a mode such as (('fsdp', 'manual'),)"
    if not isinstance(pairs, tuple | list) or not pairs:
        raise ValueError(f"config.pairs is {pairs!r}, {example}.")
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"config.pairs contains {pair!r}, {example}.")
        choices = (("strategy", tuple(strategy_kinds())), ("mode", MODES))
        for part, (what, known) in zip(pair, choices, strict=True):
            if part not in known:
                raise ValueError(
                    f"config.pairs contains {pair!r}, expected a {what} that is one of "
                    f"{', '.join(map(repr, known))}{suggest(str(part), known)}."
                )
        if pairs.count(pair) > 1:
            raise ValueError(f"config.pairs contains {pair!r} twice, expected each pair once.")
    return [(strategy, mode) for strategy, mode in pairs]


def compare_command(line: CommandLine) -> int:
    """Compares the pairs of a command line's config; returns the exit code for `absl.app.run`."""
    return answer(lambda console: _compare(line, console))


def _compare(line: CommandLine, console: rich.console.Console) -> Path:
    config, flags = line.config, line.flags
    parent = Path("runs") / line.config_path.stem
    with users_mistakes():  # Checks everything that can be checked before compilation.
        check_output(flags.output, parent)
        choose_devices(flags.devices, force=flags.force)
        experiments = prepare_pairs(config)
        for _, experiment in () if flags.force else experiments:
            check_fits(experiment)
    with results_folder(flags.output, parent) as workdir:
        write_json(workdir / CONFIG_FILE, config.to_dict())
    try:
        rows = compare(config, experiments, console=console)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"only the config was written to {workdir}") from None
    notes = footnotes(rows, repetitions=config.compare.repetitions)
    for name, each in experiments:
        if outer := each.program.outer:
            notes.append(
                f"In {name} an outer step follows every {outer.every} steps. Sent and formula "
                "include its share; collectives and temporaries do not include the outer step."
            )
    told = {name: describe_codes(each.program.comm) for name, each in experiments}
    notes += [f"Formats sent in {name}: {codes}." for name, codes in told.items() if codes]
    *pairs, reference = rows
    about: dict[str, Any] = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    about["compiler_options"] = _compiler_options(experiments)
    # JSON has no NaN or infinity, so they become null.
    text = json.dumps(about | {"rows": pairs, "one_device": reference})
    with results_folder(workdir, workdir):
        write_json(workdir / "comparison.json", json.loads(text, parse_constant=lambda _: None))
        write_file(workdir / "comparison.md", markdown(rows, notes))
        with with_picture(console):
            draw(rows, workdir / PICTURE)
    print_rows(console, rows, notes)
    return workdir


def main(argv: Sequence[str]) -> NoReturn:
    """Runs the command line `argv` and ends the process."""
    run_absl(compare_command, argv, USAGE, "compare", COMPARING)
