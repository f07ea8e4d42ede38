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
import dataclasses
import heapq
import string
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np

__all__ = [
    "Costs",
    "ScheduleName",
    "Table",
    "describe_place",
    "describe_schedule",
    "make_table",
]

# -------------------------------------------------------------------------------------------------
# A schedule of a pipeline: a table of the passes that each stage computes in each tick.
#
# S stages take M microbatches through v S chunks of layers. Chunk k runs on stage k % S, where it
# is chunk k // S of v. In a *tick* every device runs at most one F (the forward pass of a
# microbatch through a chunk), then at most one B (the backward pass), and then a *hop*:
# activations are sent to the next stage, and gradients to the previous stage. The F of the last
# chunk also computes the loss and its gradient, so that the B of the last chunk may follow in the
# same tick.
#
# A device keeps the inputs of its chunks, and the gradients of the chunks' outputs, in *slots*.


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


# -------------------------------------------------------------------------------------------------
# Checks a schedule's table by a simulation, without using the code that made the table.
#
# `schedule_table` explains the terms F, B, chunk, hop and slot. In the simulation a slot holds the
# name of an array. Every F and B has to find the arrays that it reads, and no array may replace
# one that is still needed.


# The name of an array: a microbatch, and the chunk that reads the array.
_Value: TypeAlias = tuple[int, int]


def check_table(table: Table) -> None:
    """Refuses a table that an executor could not carry out, or that contradicts itself."""
    names = {*FORWARD_ROWS, *BACKWARD_ROWS, *HOP_ROWS}
    if set(table.rows) != names:
        raise ValueError(
            f"{table.name} table: rows are {sorted(table.rows)}, expected {sorted(names)}."
        )
    shape = (table.num_ticks, table.num_stages)
    for name, row in table.rows.items():
        if row.shape != shape or row.dtype != np.int32:
            raise ValueError(
                f"{table.name} table: rows[{name!r}] is {row.dtype}{list(row.shape)}, expected "
                f"int32{list(shape)}."
            )
    run = _Run(table)
    rows = {name: row.tolist() for name, row in table.rows.items()}
    for tick in range(table.num_ticks):
        for phase in (run.compute, run.hop):
            for stage in range(table.num_stages):
                try:
                    phase(tick, stage, {name: row[tick][stage] for name, row in rows.items()})
                except ValueError as error:
                    raise ValueError(
                        f"{table.name} table, tick {tick}, stage {stage}: {error}."
                    ) from None
    try:
        run.finish()
    except ValueError as error:
        raise ValueError(f"{table.name} table: {error}.") from None


class _Slots:
    """The slots of a stage, for inputs or for gradients."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used: dict[int, _Value] = {}
        self.most = 0  # Maximum number of slots in use at one time.

    def put(self, slot: int, value: _Value) -> None:
        if not 0 <= slot < self.size:
            raise ValueError(f"puts {_describe(value)} into slot {slot} of {self.size}")
        if slot in self.used:
            raise ValueError(
                f"puts {_describe(value)} into slot {slot}, where {_describe(self.used[slot])} is "
                "still needed"
            )
        self.used[slot] = value
        self.most = max(self.most, len(self.used))

    def read(self, slot: int, value: _Value, *, ends: bool) -> None:
        """Checks that a slot holds `value`, and frees the slot if this is the last read."""
        if self.used.get(slot) != value:
            found = _describe(self.used[slot]) if slot in self.used else "nothing"
            raise ValueError(f"reads slot {slot} for {_describe(value)}, but it holds {found}")
        if ends:
            del self.used[slot]


class _Run:
    """A simulation of a table: the passes that have run, and the contents of the slots."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.last_chunk = table.num_stages * table.chunks - 1
        self.has_backward = bool((table.rows["backward_microbatch"] != -1).any())
        self.inputs = [_Slots(table.activation_slots) for _ in range(table.num_stages)]
        self.gradients = [_Slots(table.gradient_slots) for _ in range(table.num_stages)]
        self.events: list[Event] = []
        self.done: set[tuple[PassKind, int, int]] = set()
        # Arrays that arrive in this tick's hop, by the receiving stage.
        self.arriving: dict[int, _Value] = {}
        self.arriving_gradients: dict[int, _Value] = {}

    def compute(self, tick: int, stage: int, row: Mapping[str, int]) -> None:
        """Simulates a stage's F and then its B, if there are any."""
        if (m := row["forward_microbatch"]) == -1:
            _expect(row, {name: NOTHING.get(name, -1) for name in FORWARD_ROWS})
        else:
            k = self.note(Event(tick, stage, "F", m, row["forward_chunk"]))
            self.forward(stage, row, m, k)
        if (m := row["backward_microbatch"]) == -1:
            _expect(row, {name: NOTHING.get(name, -1) for name in BACKWARD_ROWS})
        else:
            k = self.note(Event(tick, stage, "B", m, row["backward_chunk"]))
            self.backward(stage, row, m, k)

    def note(self, event: Event) -> int:
        """Records an F or B; returns its chunk, counted over all stages."""
        table, (_, stage, kind, m, stage_chunk) = self.table, event
        if not (0 <= m < table.num_microbatches and 0 <= stage_chunk < table.chunks):
            raise ValueError(
                f"there is no {kind} of microbatch {m}, chunk {stage_chunk} of the stage"
            )
        k = stage_chunk * table.num_stages + stage
        if (kind, m, k) in self.done:
            raise ValueError(f"{kind} of {_describe((m, k))} comes again")
        self.done.add((kind, m, k))
        self.events.append(event._replace(chunk=k))
        return k

    def forward(self, stage: int, row: Mapping[str, int], m: int, k: int) -> None:
        _expect(row, {"is_first": int(k == 0), "is_last": int(k == self.last_chunk)})
        slots, slot = self.inputs[stage], row["forward_slot"]
        if k == 0:
            slots.put(slot, (m, k))
        slots.read(slot, (m, k), ends=not self.has_backward)
        if k < self.last_chunk:
            self.arriving[(stage + 1) % self.table.num_stages] = (m, k + 1)
        if k == self.last_chunk and self.has_backward:
            self.gradients[stage].put(row["last_gradient_slot"], (m, k))
        else:
            _expect(row, {"last_gradient_slot": -1})

    def backward(self, stage: int, row: Mapping[str, int], m: int, k: int) -> None:
        _expect(row, {"backward_is_first": int(k == 0)})
        if ("F", m, k) not in self.done:
            raise ValueError(f"B of {_describe((m, k))} comes before its F")
        self.inputs[stage].read(row["backward_slot"], (m, k), ends=True)
        self.gradients[stage].read(row["gradient_slot"], (m, k), ends=True)
        if k:
            self.arriving_gradients[(stage - 1) % self.table.num_stages] = (m, k - 1)

    def hop(self, tick: int, stage: int, row: Mapping[str, int]) -> None:
        """Puts the arrays that a stage receives in this tick into slots."""
        for name, slots, arriving in (
            ("arriving_slot", self.inputs[stage], self.arriving),
            ("arriving_gradient_slot", self.gradients[stage], self.arriving_gradients),
        ):
            if stage in arriving:
                slots.put(row[name], arriving.pop(stage))
            else:
                _expect(row, {name: -1})

    def finish(self) -> None:
        """Refuses missing passes, and slots or events that disagree with the rows."""
        table = self.table
        passes = 1 + self.has_backward
        expected = passes * (self.last_chunk + 1) * table.num_microbatches
        if len(self.done) != expected:
            raise ValueError(f"{len(self.done)} F and B in all, expected {expected}")
        for name, slots in (("activation_slots", self.inputs), ("gradient_slots", self.gradients)):
            most = max(each.most for each in slots)
            if getattr(table, name) != most:
                raise ValueError(
                    f"{name}={getattr(table, name)}, but {most} slots are used at a time"
                )
        if sorted(self.events) != sorted(table.events):
            odd = sorted(set(self.events) ^ set(table.events)) or [max(table.events)]
            raise ValueError(f"{odd[0]} is not in both the events and the rows, or is there twice")


def _describe(value: _Value) -> str:
    return f"microbatch {value[0]} of chunk {value[1]}"


def _expect(row: Mapping[str, int], expected: Mapping[str, int]) -> None:
    for name, value in expected.items():
        if row[name] != value:
            raise ValueError(f"{name} is {row[name]}, expected {value}")


# -------------------------------------------------------------------------------------------------


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


# -------------------------------------------------------------------------------------------------
# A schedule as text: a line of F and a line of B for each stage, and a column for each tick.


def describe_schedule(table: Table, *, width: int = 100) -> str:
    """Draws a table, below a summary of the table's bubble and slots.

    A number is a microbatch. If a stage has several chunks, a letter after the number is the chunk.
    `a` is the chunk nearest to the input of the model.

    Args:
      table: The table of the schedule, as `make_table` returns it.
      width: The maximum number of characters in a line. Ticks that do not fit follow below.
    """
    rows = {}
    for stage in range(table.num_stages):
        for kind in ("forward", "backward") if table.has_backward else ("forward",):
            places = zip(
                table.rows[f"{kind}_microbatch"][:, stage].tolist(),
                table.rows[f"{kind}_chunk"][:, stage].tolist(),
                strict=True,
            )
            name = f"stage {stage} F" if kind == "forward" else " B"
            rows[stage, name] = ["." if m < 0 else describe_place(table, m, c) for m, c in places]
    ticks = list(map(str, range(table.num_ticks)))
    size = 1 + max(len(text) for row in (ticks, *rows.values()) for text in row)
    start = max(len(name) for _, name in rows)
    lines = [*_summary(table)]
    step = max((width - start) // size, 1)
    for first in range(0, table.num_ticks, step):
        lines.append("")
        for name, row in (("tick", ticks), *((name, row) for (_, name), row in rows.items())):
            shown = "".join(text.rjust(size) for text in row[first : first + step])
            lines.append((name.rjust if name == " B" else name.ljust)(start) + shown)
    return "\n".join(lines)


def describe_place(table: Table, microbatch: int, chunk: int) -> str:
    """Writes a microbatch in a chunk as `3`, or `3b` if a stage has several chunks."""
    if table.chunks == 1:
        return str(microbatch)
    letters = string.ascii_lowercase
    return f"{microbatch}{letters[chunk] if table.chunks <= len(letters) else f'.{chunk}'}"


def _summary(table: Table) -> tuple[str, ...]:
    chunks = "" if table.chunks == 1 else f" of {table.chunks} chunks"
    in_flight = " ".join(map(str, table.in_flight))
    return (
        f"{table.name}: {table.num_stages} stages{chunks}, {table.num_microbatches} microbatches, "
        f"{table.num_ticks} ticks, bubble {table.bubble:.1%}",
        f"slots: {table.activation_slots} for inputs, {table.gradient_slots} for gradients; "
        f"inputs in flight by stage: {in_flight}",
    )
