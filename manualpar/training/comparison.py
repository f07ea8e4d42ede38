"""Programs trained on the same batches, and what each of them holds, sends and takes.

Losses are compared with those of one device. Steps are timed in turn, one of each program after the
other, and what is kept is the ratio within a round: whatever else the machine does slows down a
round and not a program.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

import jax

from manualpar.core.program import Program
from manualpar.inspect import (
    compiled_collectives,
    count_by_kind,
    state_bytes,
    total_bytes,
    total_step_bytes,
    trace_collectives,
)
from manualpar.metrics import fetch_metrics
from manualpar.train_state import Batch

Reading = Literal["traced", "compiled"]


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found out about one program.

    Attributes:
      strategy: Its strategy, as configs name it; `"one device"` for what the others are held
        against.
      mode: Its mode.
      mesh: The sizes of the mesh's axes.
      losses: The loss of every step.
      difference: The last loss less that of one device.
      largest_difference: The largest distance of a loss from that of one device at the same step.
      state_bytes: Parameters and optimizer state on the fullest device.
      temporary_bytes: What the compiled step holds besides on a device; `None` where the backend
        does not say.
      bytes_sent: By a device in a step.
      formula_bytes: What `step_bytes` predicts of these for parameters and gradients; `None` where
        it does not.
      is_bound: Whether the prediction is the most that is sent, and not what is sent.
      collectives: How many of each kind a step runs.
      reading: What `bytes_sent` and `collectives` are read from: the program as written, or as
        compiled.
      compile_seconds: To lower and compile the step.
      step_seconds: The median of a step.
      step_ratio: The median of a step's time in parts of the first row's in the same round.
    """

    strategy: str
    mode: str
    mesh: Mapping[str, int]
    losses: tuple[float, ...]
    difference: float
    largest_difference: float
    state_bytes: int
    temporary_bytes: int | None
    bytes_sent: Fraction
    formula_bytes: Fraction | None
    is_bound: bool
    collectives: Mapping[str, int]
    reading: Reading
    compile_seconds: float
    step_seconds: float
    step_ratio: float

    @property
    def name(self) -> str:
        """The pair in words."""
        return f"{self.strategy} {self.mode}"


class Trial:
    """A program that is compiled, trained and timed, and holds its state meanwhile."""

    def __init__(self, strategy: str, program: Program) -> None:
        """Compiles the step."""
        self.strategy = strategy
        self.program = program
        self.losses: list[float] = []
        self.seconds: list[float] = []
        started = time.perf_counter()
        lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
        self.compiled = lowered.compile()
        self.compile_seconds = time.perf_counter() - started
        self._state: Any = None

    def train(self, batches: Sequence[Batch], *, seed: int) -> None:
        """Trains from the beginning and keeps the losses."""
        self._state = self.program.init(jax.random.key(seed))
        for batch in batches:
            batch = jax.device_put(batch, self.program.batch_sharding)
            self._state, metrics = self.compiled(self._state, batch)
            total, count = fetch_metrics(metrics)["loss"]
            self.losses.append(total / count)

    def time_step(self, batch: Batch) -> None:
        """Takes one more step and keeps how long it took."""
        batch = jax.block_until_ready(jax.device_put(batch, self.program.batch_sharding))
        started = time.perf_counter()
        self._state, metrics = self.compiled(self._state, batch)
        jax.block_until_ready((self._state, metrics))
        self.seconds.append(time.perf_counter() - started)

    def row(self, *, reference: "Trial", first: "Trial") -> Row:
        """All that was found out, held against one device and against the first row."""
        program = self.program
        state = program.abstract_state
        memory = self.compiled.memory_analysis()
        differences = [x - y for x, y in zip(self.losses, reference.losses, strict=True)]
        ratios = [x / y for x, y in zip(self.seconds, first.seconds, strict=True)]
        bytes_sent, collectives, reading = self._read_collectives()
        is_predicted = program.mode != "auto-unconstrained"
        return Row(
            strategy=self.strategy,
            mode=program.mode,
            mesh=dict(program.mesh.shape),
            losses=tuple(self.losses),
            difference=differences[-1],
            largest_difference=max(map(abs, differences)),
            state_bytes=state_bytes((state.params, state.opt_state))[0],
            temporary_bytes=None if memory is None else memory.temp_size_in_bytes,
            bytes_sent=bytes_sent,
            formula_bytes=total_step_bytes(program) if is_predicted else None,
            is_bound=is_predicted and program.strategy.reshard_after_forward,
            collectives=collectives,
            reading=reading,
            compile_seconds=self.compile_seconds,
            step_seconds=statistics.median(self.seconds),
            step_ratio=statistics.median(ratios),
        )

    def _read_collectives(self) -> tuple[Fraction, dict[str, int], Reading]:
        """What a step sends: as it is written, where it is, or else as XLA has it."""
        if self.program.mode == "manual":
            traced = self.program.train_step.trace(
                self.program.abstract_state, self.program.abstract_batch
            )
            written = trace_collectives(traced)
            return total_bytes(written), count_by_kind(written), "traced"
        # On one device XLA writes collectives of nobody else.
        found = [c for c in compiled_collectives(self.compiled) if c.group_size > 1]
        return total_bytes(found), count_by_kind(found), "compiled"


def run_trials(
    trials: Sequence[Trial],
    batches: Sequence[Batch],
    *,
    seed: int,
    repetitions: int,
    report: Callable[[Trial], None],
) -> list[Row]:
    """Trains programs on the same batches, then times them in turn.

    Args:
      trials: The programs: first the one whose times the others are held against, last the one on
        one device whose losses are.
      batches: What each is trained on; they are used again for timing.
      seed: What parameters are drawn from.
      repetitions: How many steps of each are timed.
      report: Told of each program once it is trained.

    Returns:
      A row for each.
    """
    for trial in trials:
        trial.train(batches, seed=seed)
        report(trial)
    for batch in itertools.islice(itertools.cycle(batches), repetitions):
        for trial in trials:
            trial.time_step(batch)
    return [trial.row(reference=trials[-1], first=trials[0]) for trial in trials]
