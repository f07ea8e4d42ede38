"""Blocks of training steps of a config, by its training loop or by a bare one, timed.

A block begins with nothing on the devices' queues and its first batch read, and ends when its last
state is there. So neither what a loop does once in a run counts, nor what a shorter queue puts off.
All blocks go on with the same state, and all batches are those of the run.
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

from manualpar.core.program.guarded_step import MAX_STEPS_AHEAD
from manualpar.core.state.train_state import Batch, TrainState
from manualpar.data import train_batches
from manualpar.inspect import state_bytes
from manualpar.system.cluster import Cluster
from manualpar.training.checkpoints import Checkpoints
from manualpar.training.config import load_config
from manualpar.training.experiment import prepare
from manualpar.training.monitoring.profiling import StepProfiler
from manualpar.training.monitoring.progress import TrainingProgress
from manualpar.training.monitoring.run_files import RunWriter
from manualpar.training.monitoring.stalls import StallDetector
from manualpar.training.monitoring.throughput import Throughput
from manualpar.training.recorder import Recorder
from manualpar.training.trainer import Trainer
from manualpar.training.workdir import START, Position

SAVED_AFTER = 1  # Of the steps of a block that saves.

Source = Literal["one batch", "pipeline"]
Show = Literal["lines", "bar"]


class Batches(Iterator[Batch]):
    """Batches for a block, the first of them read; it says when that was asked for."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        """Reads the first one."""
        self._source = batches
        self._batches = itertools.chain([next(batches)], batches)
        self.started: float | None = None

    def __next__(self) -> Batch:
        if self.started is None:
            self.started = time.perf_counter()
        return next(self._batches)

    def close(self) -> None:
        """Ends the reading ahead."""
        if callable(close := getattr(self._source, "close", None)):
            close()


class Times(NamedTuple):
    """A block of the training loop.

    Attributes:
      seconds: What it took, until all that was saved was on disk.
      blocked: How many of them the loop waited for its saver to let it go on.
      saved_at: When it did, by the clock on the wall.
    """

    seconds: float
    blocked: float
    saved_at: float


class FinishError(Exception):
    """The last step of a block is done: ends a loop before it tests what it has trained."""


class FinishLine:
    """A hook in the place of the one that saves: it saves one step, and ends a block.

    Attributes:
      finished: When the last state was there and all that was saved was on disk.
      state: That state.
      blocked: How many seconds the loop waited for the save.
      saved_at: When it did, by the clock on the wall.
    """

    def __init__(self, num_steps: int, trainer: Trainer, save_as: int | None) -> None:
        """Takes the number of steps, and as which step to save the state after `SAVED_AFTER`.

        Blocks have the same steps, so a checkpoint needs a number of its own.
        """
        self._num_steps = num_steps
        self._trainer = trainer
        self._save_as = save_as
        self.finished = 0.0
        self.state: TrainState | None = None
        self.blocked = self.saved_at = 0.0

    def __call__(self, state: TrainState, position: Position) -> None:
        """Saves, or ends the block."""
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
    """A config's program with a state, and where blocks of it write. Use it as a context manager.

    Attributes:
      experiment: What the config describes.
      compiled: The training step, compiled ahead of time.
      jitted: The training step as it is jitted, with nothing of ours around it.
      batch: A batch on the devices.
      state: The state after all blocks so far.
      state_bytes: Its size, counted once.
      folder: Where to write.
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
        # The first step of each compiles, or loads what was compiled.
        for step in (self.compiled, program.train_step):
            self.state, _ = jax.block_until_ready(step(self.state, self.batch))

    def bare(self, step: Any, num_steps: int, *, source: Source = "one batch") -> float:
        """Takes steps with nothing around them.

        Args:
          step: What to call.
          num_steps: How often.
          source: Where its batches come from.

        Returns:
          How many seconds it took.
        """
        # As many computations at once as there may be on simulated devices, see `dispatch`.
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
        """Takes steps as a run takes them: recorded, written down, shown and watched.

        Args:
          num_steps: How many.
          source: Where its batches come from.
          show: Whether as in a file or as in a terminal.
          saver: The checkpoints that the state after `SAVED_AFTER` goes to, and as which step.

        Returns:
          How long it took.
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
                """Has read its first batch already."""

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
        """Batches from the pipeline, as a run reads them, or the same one without end."""
        return Batches(itertools.repeat(self.batch) if source == "one batch" else self._read())

    def _read(self) -> Any:
        """The pipeline, from where no block has begun."""
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
        """What takes the metrics in, as a run has it."""
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
