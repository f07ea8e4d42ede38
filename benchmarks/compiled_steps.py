"""Compiles training steps ahead of time; counts their costs, runs them and times them."""

import collections
import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import jax

from manualpar.checks.guarded_step import MAX_STEPS_AHEAD
from manualpar.core.program.program import Program
from manualpar.core.state.metrics import fetch_metrics
from manualpar.core.state.train_state import Batch
from manualpar.inspect import (
    compiled_collectives,
    count_by_kind,
    read_compiled,
    state_bytes,
    total_bytes,
)

INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = ", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Counts:
    """The counts of a step on one device; all but `compile_seconds` are the same in every run.

    Attributes:
      state: Bytes of parameters and optimizer state.
      temporaries: Temporary bytes of the compiled step, without arguments and results.
      sent: Bytes that a device sends in the compiled step.
      collectives: The number of collectives of each kind in the compiled step.
      flops: Floating-point operations as XLA counts them; the body of a loop counts once.
      accessed: Bytes that are read and written; the body of a loop counts once.
      instructions: Instructions in all computations of the optimised HLO.
      lowered: Operations of the program before XLA optimises it.
      compile_seconds: The seconds that XLA took to compile.
    """

    state: int
    temporaries: int
    sent: Fraction
    collectives: Mapping[str, int]
    flops: float
    accessed: float
    instructions: int
    lowered: int
    compile_seconds: float


class CompiledStep:
    """A compiled training step with its state and its batch.

    Attributes:
      counts: The step's memory, collectives and operations.
      compiled: The compiled step.
      held_bytes: The bytes of arguments, of results that are new, and of temporaries.
      state: The state that the last call returned.
    """

    def __init__(
        self, jitted: Any, state: Any, batch: Any, *, parts: Any, read_loss: Callable[[Any], float]
    ) -> None:
        """Compiles `jitted(state, batch) -> (state, metrics)`.

        Args:
          jitted: The jitted step, which may donate its state.
          state: The first state, on the devices.
          batch: The batch of every step, on the devices.
          parts: The parameters and the optimizer's state in `state`.
          read_loss: Reads the loss from the metrics that a step returns.
        """
        lowered = jitted.lower(state, batch)
        started = time.perf_counter()
        self.compiled: Any = lowered.compile()
        self.counts = count(lowered, self.compiled, parts, time.perf_counter() - started)
        self.held_bytes = read_compiled(self.compiled).peak
        self.state = state
        self._batch = batch
        self._read_loss = read_loss

    def losses(self, num_steps: int) -> list[float]:
        """Runs `num_steps` steps; returns the loss of each step."""
        losses = []
        for _ in range(num_steps):
            self.state, metrics = self.compiled(self.state, self._batch)
            losses.append(self._read_loss(metrics))
        return losses

    def block(self, num_steps: int) -> float:
        """Runs `num_steps` steps; returns the seconds that they took."""
        in_flight: collections.deque[Any] = collections.deque()
        jax.block_until_ready(self.state)
        started = time.perf_counter()
        for _ in range(num_steps):
            self.state, metrics = self.compiled(self.state, self._batch)
            in_flight.append(jax.tree.leaves(metrics)[0])
            if len(in_flight) > MAX_STEPS_AHEAD:
                in_flight.popleft().block_until_ready()
        jax.block_until_ready(self.state)
        return time.perf_counter() - started


def of_program(program: Program, batch: Batch, *, seed: int = 0) -> CompiledStep:
    """Compiles a program's step; `seed` gives the initial state, and `batch` is on the host."""
    step, state = program.train_step, program.init(jax.random.key(seed))
    return CompiledStep(
        getattr(step, "jitted", step),
        state,
        jax.device_put(batch, program.batch_sharding),
        parts=(state.params, state.opt_state),
        read_loss=mean_loss,
    )


def mean_loss(metrics: Any) -> float:
    """Returns the mean loss from a step's metrics, whose `loss` is a sum and a count."""
    total, number = fetch_metrics(metrics)["loss"]
    return total / number


def count(lowered: Any, compiled: Any, parts: Any, compile_seconds: float) -> Counts:
    """Makes the `Counts` of a step.

    Args:
      lowered: The lowered step.
      compiled: The compiled step.
      parts: The parameters and the optimizer's state, as arrays or abstract arrays.
      compile_seconds: The seconds that compiling took.

    Returns:
      The counts.

    Raises:
      ValueError: The backend does not report a program's memory.
    """
    memory = compiled.memory_analysis()
    if memory is None:
        raise ValueError("count: this backend does not report memory, expected one that does.")
    sent = compiled_collectives(compiled)
    costs = compiled.cost_analysis()
    return Counts(
        state=state_bytes(parts)[0],
        temporaries=memory.temp_size_in_bytes,
        sent=total_bytes(sent),
        collectives=count_by_kind(sent),
        flops=float(costs["flops"]),
        accessed=float(costs["bytes accessed"]),
        instructions=len(INSTRUCTION.findall(compiled.as_text())),
        lowered=count_lowered(lowered),
        compile_seconds=compile_seconds,
    )


def count_lowered(lowered: Any) -> int:
    """Counts the operations of a lowered program."""
    return sum(" = " in line for line in lowered.as_text().splitlines())
