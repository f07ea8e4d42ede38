"""Times blocks of training steps of a config, in the training loop or in a bare loop.

The training loop is the loop of a run, with metrics, files and progress. The bare loop only calls
the step. The time of a block begins when the device queues are empty and its first batch is read,
and ends when its last state is ready. So the time does not include the work that a loop does once
in a run, and no work is left in a queue. Each block continues from the state of the last block.
"""

import collections
import contextlib
import copy
import io
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import jax
import rich.console

from manualpar.checks.guarded_step import MAX_STEPS_AHEAD
from manualpar.core.state.train_state import Batch, TrainState
from manualpar.data import train_batches
from manualpar.inspect import state_bytes
from manualpar.inspect.throughput import Throughput
from manualpar.system.cluster import Cluster
from manualpar.training.checkpoints import Checkpoints
from manualpar.training.config import load_config
from manualpar.training.experiment import prepare
from manualpar.training.monitoring.profiling import StepProfiler
from manualpar.training.monitoring.progress import TrainingProgress
from manualpar.training.monitoring.run_files import RunWriter
from manualpar.training.monitoring.stalls import StallDetector
from manualpar.training.recorder import Recorder
from manualpar.training.trainer import Trainer
from manualpar.training.workdir import START, Position

SAVED_AFTER = 1  # The number of the step after which a block saves.

Source = Literal["one batch", "pipeline"]
Show = Literal["lines", "bar"]


class Batches(Iterator[Batch]):
    """The batches of a block. It reads the first in advance, and records when the loop takes it."""

    copies = 1  # All batches are full.

    def __init__(self, batches: Iterator[Batch]) -> None:
        """Reads the first batch."""
        self._source = batches
        self._batches = itertools.chain([next(batches)], batches)
        self.started: float | None = None

    def __next__(self) -> Batch:
        if self.started is None:
            self.started = time.perf_counter()
        return next(self._batches)

    def close(self) -> None:
        """Stops reading ahead."""
        if callable(close := getattr(self._source, "close", None)):
            close()


class Times(NamedTuple):
    """The times of a block of the training loop.

    Attributes:
      seconds: The seconds from the first batch until the last state is ready and all saved files
        are on disk.
      blocked: The seconds that the loop waited for its save.
      saved_at: The wall-clock time when the loop stopped waiting for its save.
    """

    seconds: float
    blocked: float
    saved_at: float


class FinishError(Exception):
    """Raised after the last step of a block, to end a loop before it evaluates."""


class FinishLine:
    """A hook that the trainer calls after each step: it saves once, and ends the block.

    Attributes:
      finished: The time when the last state was ready and all saved files were on disk.
      state: The state after the last step.
      blocked: The seconds that the loop waited for the save.
      saved_at: The wall-clock time when the loop stopped waiting for the save.
    """

    def __init__(self, num_steps: int, trainer: Trainer, save_as: int | None) -> None:
        """Stores the block's number of steps, and the step number `save_as` of its checkpoint.

        Every block counts its steps from 1, so each checkpoint needs a different number.
        """
        self._num_steps = num_steps
        self._trainer = trainer
        self._save_as = save_as
        self.finished = 0.0
        self.state: TrainState | None = None
        self.blocked = self.saved_at = 0.0

    def __call__(self, state: TrainState, position: Position) -> None:
        """Saves after step `SAVED_AFTER`, and ends the block after its last step."""
        self._trainer.cluster.should_stop(position.step)
        if self._save_as is not None and position.step == SAVED_AFTER:
            started = time.perf_counter()
            self._trainer.save(state, position._replace(step=self._save_as))
            self.blocked, self.saved_at = time.perf_counter() - started, time.time()
        if position.step == self._num_steps:
            self._trainer.recorder.drain()
            jax.block_until_ready(state)
            if self._save_as is not None:
                self._trainer.checkpoints.wait()
            self.finished, self.state = time.perf_counter(), state
            raise FinishError


class Bench:
    """A config's program, its state, and the folder of its blocks; a context manager.

    Attributes:
      experiment: The program, the task and the data that the config describes.
      compiled: The training step, compiled ahead of time.
      jitted: The jitted training step, without this package's code around it.
      batch: A batch on the devices.
      state: The state after all blocks so far.
      state_bytes: The size of the state; a replicated array counts once.
      folder: The folder to write to.
    """

    def __init__(self, config_path: Path, folder: Path) -> None:
        """Compiles the step, and makes the first state and the files of a run."""
        self.config = load_config(config_path)
        self.experiment = prepare(self.config)
        program = self.program = self.experiment.program
        self.folder = folder
        self.writer = RunWriter(folder / "run", config=self.config.to_dict())
        self.jitted = getattr(program.train_step, "jitted", program.train_step)
        lowered = self.jitted.lower(program.abstract_state, program.abstract_batch)
        self.compiled: Any = lowered.compile()
        self.state = program.init(jax.random.key(self.config.seed))
        self.state_bytes = state_bytes(program.abstract_state)[1]
        self._position = 0
        with contextlib.closing(self._read()) as batches:
            self.batch = jax.block_until_ready(next(batches))
        # The first call of each step compiles, or loads a compiled program.
        for step in (self.compiled, program.train_step):
            self.state, _ = jax.block_until_ready(step(self.state, self.batch))

    def bare(self, step: Any, num_steps: int, *, source: Source = "one batch") -> float:
        """Runs a block in a loop that only calls the step.

        Args:
          step: The function to call.
          num_steps: The number of calls.
          source: The source of the batches, see `batches`.

        Returns:
          The seconds that the block took.
        """
        # Simulated devices run only a limited number of computations at once, see `guarded_step`.
        is_limited = getattr(self.program.train_step, "is_limited", False)
        in_flight: collections.deque[Any] = collections.deque()
        metrics: Any = None
        with contextlib.closing(self.batches(source)) as batches:
            jax.block_until_ready(self.state)
            state = self.state
            for _ in range(num_steps):
                state, metrics = step(state, next(batches))
                if is_limited:
                    in_flight.append(metrics["loss"][0])
                    if len(in_flight) > MAX_STEPS_AHEAD:
                        in_flight.popleft().block_until_ready()
            jax.block_until_ready((state, metrics))
            finished = time.perf_counter()
            self.state = state
            assert batches.started is not None
            return finished - batches.started

    def loop(
        self,
        num_steps: int,
        *,
        source: Source = "one batch",
        show: Show = "lines",
        saver: tuple[Checkpoints, int] | None = None,
    ) -> Times:
        """Runs a block in the training loop: with metrics, files, progress and monitoring.

        Args:
          num_steps: The number of steps.
          source: The source of the batches, see `batches`.
          show: How progress is printed: `"lines"` as into a file, `"bar"` as on a terminal.
          saver: The checkpoints to which the block saves after step `SAVED_AFTER`, and the step
            number of the checkpoint; `None` for no save.

        Returns:
          The times of the block.
        """
        terminal = show == "bar"
        console = rich.console.Console(file=io.StringIO(), width=120, force_terminal=terminal)
        config, cluster = self.config, Cluster()
        detector = StallDetector(config.watch.stall_seconds, others=cluster.steps, num_processes=1)
        checkpoints: Any
        checkpoints, save_as = saver or (None, None)
        with TrainingProgress(console, num_steps=num_steps) as progress, detector:
            batches = self.batches(source)

            class Block(Trainer):
                """A trainer that has read its first batch already."""

                def read_from(self, examples: int) -> Any:
                    return batches

            block = copy.deepcopy(config)
            with block.unlocked():
                block.training.num_steps = num_steps
            trainer = Block(
                self.experiment._replace(config=block),
                checkpoints,
                self._recorder(progress),
                self.writer,
                cluster,
                detector,
                StepProfiler(range(0), self.folder, print),
                report=print,
            )
            line = FinishLine(num_steps, trainer, save_as)
            trainer.every(1, line)
            jax.block_until_ready(self.state)
            with contextlib.suppress(FinishError):
                trainer.run(self.state, START)
        assert line.state is not None
        assert batches.started is not None
        self.state = line.state
        return Times(line.finished - batches.started, line.blocked, line.saved_at)

    def batches(self, source: Source) -> Batches:
        """Returns the batches of a data pipeline, as in a run, or one batch again and again."""
        return Batches(itertools.repeat(self.batch) if source == "one batch" else self._read())

    def _read(self) -> Any:
        """Returns a data pipeline that starts one batch after the start of the last pipeline."""
        batch_size = self.config.data.batch_size
        self._position += batch_size
        return train_batches(
            self.experiment.task.dataset.train,
            seed=self.config.seed,
            batch_size=batch_size,
            sharding=self.program.batch_sharding,
            start_position=self._position,
            prefetch=self.config.data.prefetch,
        )

    def _recorder(self, progress: TrainingProgress) -> Recorder:
        """Makes the recorder of metrics, as a run does."""
        task = self.experiment.task
        throughput = Throughput(
            examples_per_step=self.config.data.batch_size,
            tokens_per_example=task.tokens_per_example or None,
            flops_per_example=task.flops_per_example,
            num_devices=self.program.mesh.size,
        )
        return Recorder(
            self.writer,
            progress,
            learning_rate=self.experiment.schedule,
            rates=throughput.rates,
            derive=task.derive,
            skips_nonfinite=self.config.training.on_nonfinite == "skip",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.writer.__exit__(None, None, None)
