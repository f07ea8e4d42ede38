"""A schedule of a pipeline: a table of the passes that each stage computes in each tick.

S stages take M microbatches through v S chunks of layers. Chunk k runs on stage k % S, where it is
chunk k // S of v. In a *tick* every device runs at most one F (the forward pass of a microbatch
through a chunk), then at most one B (the backward pass), and then a *hop*: activations are sent to
the next stage, and gradients to the previous stage. The F of the last chunk also computes the loss
and its gradient, so that the B of the last chunk may follow in the same tick.

A device keeps the inputs of its chunks, and the gradients of the chunks' outputs, in *slots*.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

FORWARD_ROWS = (
    "forward_microbatch",
    "forward_chunk",
    "forward_slot",
    "is_first",
    "is_last",
    "last_gradient_slot",
)
BACKWARD_ROWS = (
    "backward_microbatch",
    "backward_chunk",
    "backward_slot",
    "gradient_slot",
    "backward_is_first",
)
HOP_ROWS = ("arriving_slot", "arriving_gradient_slot")
# Row -> the number that means "no entry". In rows that are not listed, -1 means it.
NOTHING = {"is_first": 0, "is_last": 0, "backward_is_first": 0}

TableRows: TypeAlias = Mapping[str, np.ndarray]
PassKind: TypeAlias = Literal["F", "B"]


class Event(NamedTuple):
    """A stage's F or B of a microbatch; `chunk` is the number among the chunks of all stages."""

    tick: int
    stage: int
    kind: PassKind
    microbatch: int
    chunk: int


class Costs(NamedTuple):
    """The times that the parts of a tick take, in any unit.

    Attributes:
      forward: The forward pass of a chunk.
      backward: The backward pass of a chunk, and the forward pass if it is computed again.
      before: The part of the model before its layers, forward, in the F of the first chunk.
      before_backward: The same part backward, in the B of the first chunk.
      after: The part of the model after its layers, forward and backward, in the last chunk's F.
    """

    forward: float = 1.0
    backward: float = 2.0
    before: float = 0.0
    before_backward: float = 0.0
    after: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A schedule of S stages, M microbatches, v chunks on each stage and T ticks.

    Attributes:
      name: The name of the schedule, `gpipe` or `1f1b`.
      num_stages: S.
      num_microbatches: M.
      chunks: v.
      events: Every F and B, ordered by tick.
      rows: The arrays that an executor reads, each int32[T, S]. -1 means that there is no entry.
        `is_first`, `is_last` and `backward_is_first` have 0 for no and 1 for yes instead. For an F:
        `forward_microbatch`, `forward_chunk` (of v) and `forward_slot` (the slot of the chunk's
        input); `is_first` and `is_last` (whether the chunk is the first or last of all stages);
        `last_gradient_slot` (the slot into which the F of the last chunk puts its gradient). For a
        B: `backward_microbatch`, `backward_chunk`, `backward_slot` (the slot of the chunk's input),
        `gradient_slot` (the slot of the gradient of the chunk's output), `backward_is_first`. For
        the hop: `arriving_slot` and `arriving_gradient_slot`, the slots into which the hop puts the
        arriving values.
      activation_slots: The number of slots that a device needs for inputs of chunks.
      gradient_slots: The number of slots that a device needs for gradients; 0 without backward
        passes.
    """

    name: str
    num_stages: int
    num_microbatches: int
    chunks: int
    events: tuple[Event, ...]
    rows: TableRows = dataclasses.field(repr=False, compare=False)  # Computed from events.
    activation_slots: int
    gradient_slots: int

    @property
    def num_ticks(self) -> int:
        """The number of ticks, T."""
        return len(self.rows["forward_microbatch"])

    @property
    def has_backward(self) -> bool:
        """Whether there are backward passes."""
        return self.gradient_slots > 0

    def is_run(self, row: str, *, together: bool = False) -> np.ndarray:
        """Returns in which ticks each stage has an entry in a row, `bool[T, S]`.

        With `together`, a stage also counts in ticks in which only other stages have an entry.
        """
        is_run = self.rows[row] > NOTHING.get(row, -1)
        return is_run | (together & is_run.any(axis=1, keepdims=True))

    @property
    def kept(self) -> np.ndarray:
        """The number of chunk inputs that each stage keeps in each tick: `[T, S]`.

        An input counts from its F to its B, or only in its F without backward passes.
        """
        started = np.cumsum(self.rows["forward_microbatch"] >= 0, axis=0)
        ends = "backward_microbatch" if self.has_backward else "forward_microbatch"
        ended = np.cumsum(self.rows[ends] >= 0, axis=0)
        return started - np.pad(ended, ((1, 0), (0, 0)))[:-1]

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The maximum of `kept` for each stage."""
        return tuple(self.kept.max(axis=0).tolist())

    @property
    def bubble(self) -> float:
        """The share of time in which a device is idle, if only chunks take time."""
        return self.idle_share(Costs())

    def busy(self, costs: Costs) -> np.ndarray:
        """Returns the time of each F and B for each tick and stage: `[2, T, S]`."""
        rows = self.rows
        forward = (
            costs.forward * (rows["forward_microbatch"] >= 0)
            + costs.before * rows["is_first"]
            + costs.after * rows["is_last"]
        )
        backward = (
            costs.backward * (rows["backward_microbatch"] >= 0)
            + costs.before_backward * rows["backward_is_first"]
        )
        return np.stack([forward, backward])

    def tick_times(self, costs: Costs) -> np.ndarray:
        """Returns how long each tick lasts, `[T]`.

        A tick lasts as long as its slowest stage, because in the hop stages wait for each other.
        """
        return np.asarray(self.busy(costs).sum(axis=0).max(axis=1))

    def idle_share(self, costs: Costs) -> float:
        """Returns the share of time in which a device is idle, on average over the stages."""
        computing = self.busy(costs).sum() / self.num_stages
        return float(1 - computing / self.tick_times(costs).sum())
