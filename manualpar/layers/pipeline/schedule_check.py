"""Checks a schedule's table by a simulation, without using the code that made the table.

`schedule_table` explains the terms F, B, chunk, hop and slot. In the simulation a slot holds the
name of an array. Every F and B has to find the arrays that it reads, and no array may replace one
that is still needed.
"""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from manualpar.layers.pipeline.schedule_table import (
    BACKWARD_ROWS,
    FORWARD_ROWS,
    HOP_ROWS,
    NOTHING,
    Event,
    PassKind,
    Table,
)

# The name of an array: a microbatch, and the chunk that reads the array.
_Value: TypeAlias = tuple[int, int]


def check_table(table: Table) -> None:
    """Refuses a table that an executor could not carry out, or that contradicts itself.

    Raises:
      ValueError: An F or B is missing, comes twice or comes before a pass that it depends on. An
        array is put where no pass reads it, or replaces one that is still needed. The table has
        more or fewer slots than are used. Rows have an entry where there is no pass, or disagree
        with the events.
    """
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
