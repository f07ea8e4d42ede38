"""Makes the table of a pipeline's schedule by a simulation of the stages.

An F is the forward pass of a microbatch through a chunk of layers, and a B is the backward pass.
`schedule_table` explains this and the table. There are two schedules:

- `gpipe` (https://arxiv.org/abs/1811.06965): a stage computes all its F before its first B.
- `1f1b` (https://arxiv.org/abs/2104.04473): a stage computes each B as soon as possible. With v > 1
  chunks on a stage, microbatches go through the chunks in groups of at least S, so that no stage
  waits until the first microbatch of a group returns to the first stage.

With both schedules a stage is idle for (S - 1) / (v M + S - 1) of the time if M >= S. If S divides
M, `1f1b` keeps (v + 1) S - 1 inputs for any number of microbatches. `gpipe` keeps v M inputs.

A tick has an F *and* a B, although 1F1B is usually drawn with an F or a B in a tick. All devices
run one program, so a tick lasts as long as its slowest device. If a tick had one F or one B, some
stage would run a B in almost every tick, and all ticks would last as long as a B. If a B takes as
long as two F, that would lose a quarter of the time.
"""

import collections
import heapq
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np

from manualpar.layers.pipeline.schedule_check import check_table
from manualpar.layers.pipeline.schedule_table import (
    BACKWARD_ROWS,
    FORWARD_ROWS,
    HOP_ROWS,
    NOTHING,
    Event,
    PassKind,
    Table,
)

ScheduleName: TypeAlias = Literal["gpipe", "1f1b"]
# A microbatch and a chunk.
_Place: TypeAlias = tuple[int, int]
# The phases of a tick.
_F, _B, _HOP = 0, 1, 2


def make_table(
    schedule: ScheduleName,
    num_stages: int,
    num_microbatches: int,
    chunks: int = 1,
    *,
    backward: bool = True,
) -> Table:
    """Makes the table of a schedule and checks it.

    Args:
      schedule: `gpipe` or `1f1b`.
      num_stages: S, at least 1.
      num_microbatches: M, at least 1; it may be less than S, or no multiple of S.
      chunks: v, the number of chunks of layers on a stage, at least 1.
      backward: Whether there are backward passes; without them both schedules are the same.

    Raises:
      ValueError: The schedule is not known, or a number is less than 1.
    """
    if schedule not in get_args(ScheduleName):
        known = " or ".join(map(repr, get_args(ScheduleName)))
        raise ValueError(f"make_table: schedule={schedule!r}, expected {known}.")
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches, "chunks": chunks}
    for field, size in sizes.items():
        if size < 1:
            raise ValueError(f"make_table: {field}={size}, expected at least 1.")
    events = _simulate(schedule, num_stages, _orders(num_stages, num_microbatches, chunks))
    if not backward:
        events = [event for event in events if event.kind == "F"]
    return _table_of_events(schedule, events, num_stages, num_microbatches, chunks)


def _table_of_events(
    name: str, events: Sequence[Event], num_stages: int, num_microbatches: int, chunks: int
) -> Table:
    """Finds slots for the events, writes the rows, and checks the table."""
    slots, activation_slots, gradient_slots = _allocate(events, num_stages, chunks)
    table = Table(
        name=name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        chunks=chunks,
        events=tuple(events),
        rows=_rows(events, slots, num_stages, chunks),
        activation_slots=activation_slots,
        gradient_slots=gradient_slots,
    )
    check_table(table)
    return table


def _orders(stages: int, microbatches: int, chunks: int) -> dict[PassKind, list[_Place]]:
    """Returns the order of F, and of B, which is the same on every stage.

    Chunks are counted within the stage.
    """
    groups = np.array_split(range(microbatches), max(microbatches // stages, 1))
    return {
        "F": [(int(m), c) for group in groups for c in range(chunks) for m in group],
        "B": [(int(m), c) for group in groups for c in reversed(range(chunks)) for m in group],
    }


def _simulate(schedule: str, stages: int, orders: Mapping[PassKind, list[_Place]]) -> list[Event]:
    """Simulates stages that run their next F, and their next B, as soon as they can."""
    last = max(chunk for _, chunk in orders["F"]) * stages + stages - 1
    left = [{kind: collections.deque(orders[kind]) for kind in orders} for _ in range(stages)]
    done: dict[tuple[PassKind, int, int], int] = {}
    events = []
    tick = 0
    while len(done) < stages * (len(orders["F"]) + len(orders["B"])):
        for stage, queues in enumerate(left):
            for kind, queue in queues.items():
                if not queue or (kind == "B" and schedule == "gpipe" and queues["F"]):
                    continue
                microbatch, chunk = queue[0][0], queue[0][1] * stages + stage
                # A pass waits for a neighbour's pass in an earlier tick, or for this stage's own F.
                if kind == "F":
                    ready = chunk == 0 or done.get(("F", microbatch, chunk - 1), tick) < tick
                elif chunk == last:
                    ready = ("F", microbatch, chunk) in done
                else:
                    ready = done.get(("B", microbatch, chunk + 1), tick) < tick
                if ready:
                    queue.popleft()
                    done[kind, microbatch, chunk] = tick
                    events.append(Event(tick, stage, kind, microbatch, chunk))
        tick += 1
    return events


def _allocate(
    events: Sequence[Event], stages: int, chunks: int
) -> tuple[dict[tuple[PassKind, int, int], int], int, int]:
    """Allocates a slot to each array that an F or B reads.

    Returns the slots, the number of slots for inputs, and the number for gradients. An F reads the
    input of its chunk. A B reads the input of its chunk and the output's gradient.
    """
    tick = {(event.kind, event.microbatch, event.chunk): event.tick for event in events}
    last = stages * chunks - 1
    lives = collections.defaultdict(list)
    for kind, m, k in tick:
        if kind == "F":
            start = (tick["F", m, k - 1], _HOP) if k else (tick["F", m, k], _F)
            end = (tick["B", m, k], _B) if ("B", m, k) in tick else (tick["F", m, k], _F)
        else:
            start = (tick["B", m, k + 1], _HOP) if k < last else (tick["F", m, k], _F)
            end = (tick["B", m, k], _B)
        lives[kind, k % stages].append((start, end, (kind, m, k)))
    slots: dict[tuple[PassKind, int, int], int] = {}
    most: dict[PassKind, int] = {"F": 0, "B": 0}
    for (kind, _), intervals in lives.items():
        used: list[tuple[tuple[int, int], int]] = []  # The end of the last lifetime in each slot.
        free: list[int] = []
        for start, end, value in sorted(intervals):
            while used and used[0][0] < start:
                heapq.heappush(free, heapq.heappop(used)[1])
            slots[value] = heapq.heappop(free) if free else len(used)
            heapq.heappush(used, (end, slots[value]))
            most[kind] = max(most[kind], len(used))
    return slots, most["F"], most["B"]


def _rows(
    events: Sequence[Event],
    slots: Mapping[tuple[PassKind, int, int], int],
    stages: int,
    chunks: int,
) -> dict[str, np.ndarray]:
    """Writes the rows that an executor reads, see `Table`."""
    ticks, last = 1 + max(event.tick for event in events), stages * chunks - 1
    rows = {
        name: np.full((ticks, stages), NOTHING.get(name, -1), np.int32)
        for name in (*FORWARD_ROWS, *BACKWARD_ROWS, *HOP_ROWS)
    }
    for tick, stage, kind, m, k in events:
        here, there = (tick, stage), (tick, (stage + (1 if kind == "F" else -1)) % stages)
        if kind == "F":
            gradient_slot = slots.get(("B", m, k), -1) if k == last else -1
            written = (m, k // stages, slots["F", m, k], k == 0, k == last, gradient_slot)
            for name, value in zip(FORWARD_ROWS, written, strict=True):
                rows[name][here] = value
            if k < last:
                rows["arriving_slot"][there] = slots["F", m, k + 1]
        else:
            read = (m, k // stages, slots["F", m, k], slots["B", m, k], k == 0)
            for name, value in zip(BACKWARD_ROWS, read, strict=True):
                rows[name][here] = value
            if k:
                rows["arriving_gradient_slot"][there] = slots["B", m, k - 1]
    return rows
