"""Reads the schedule of a program from the text that XLA's TPU compiler has written.

Asynchronous collectives come in two forms. One is a pair of instructions, such as
`collective-permute-start` and `-done`. The other is *fused* with compute: a fusion that ends in the
custom call `AsyncCollectiveStart`, then products that each carry a part of the collective and hold
a copy of its instruction, then a fusion with `AsyncCollectiveDone`; all of them name the same
channel. A reduce-scatter may be a fusion of an all-reduce and a slice, named `all-reduce-scatter`.

The compiler estimates no cycles for any collective, in neither form, and its estimate of a product
that carries a part of one is that of the product alone (`tests/planner_schedule_reader_test.py` has
both). So cycles are of compute, and how long a collective is on the wire is to be added, see
`manualpar.planner.timeline`.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

from manualpar.inspect.compiled import KIND_OF_OPCODE
from manualpar.planner.hlo import (
    Computation,
    Instruction,
    Module,
    array_bytes,
    axes_of,
    device_groups,
    loop_computations,
    parse_module,
    scope_of,
    trip_count,
)
from manualpar.planner.schedule import (
    Compute,
    Event,
    Loop,
    Schedule,
    ScheduledCollective,
    Start,
    Wait,
    total_cycles,
)

FUSED_START, FUSED_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
REDUCE_SCATTER_FUSION = "all-reduce-scatter"
UNKNOWN_OPCODES = frozenset({"collective-broadcast", "ragged-all-to-all", "send", "recv"})
# They do nothing by themselves, or wait for what costs nothing to wait for here.
FREE_OPCODES = frozenset(
    {
        "after-all",
        "bitcast",
        "constant",
        "get-tuple-element",
        "iota",
        "opt-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
    }
)
# Copies between HBM and the chip's own memory, made ahead of what needs them.
PREFETCH_OPCODES = frozenset({"copy-start", "copy-done", "slice-start", "slice-done"})
# What may hold a collective in what it calls.
CALLING_OPCODES = frozenset({"fusion", "async-start", "call-start"})
MIN_NOTED_BYTES = 2**20


def read_schedule(text: str, mesh: Mapping[str, int]) -> Schedule:
    """Reads a program that was compiled for a TPU.

    Args:
      text: The `as_text()` of the compiled program.
      mesh: The sizes of the mesh axes, the major one first.

    Returns:
      Its schedule. Of a conditional the branch that computes the most stands in it, of equals the
      one that sends the most.

    Raises:
      ValueError: The text is no scheduled module; a loop has no known number of turns; or a
        collective is of a kind whose bytes are not known here.
    """
    reader = _Reader(parse_module(text), mesh)
    events = reader.read(reader.module.entry, 1)
    return Schedule(
        tuple(events), tuple(reader.collectives), dict(reader.unestimated), reader.num_carried
    )


class _Reader:
    """Reads computations and gathers the collectives in them."""

    def __init__(self, module: Module, mesh: Mapping[str, int]) -> None:
        self.module = module
        self.mesh = mesh
        self.collectives: list[ScheduledCollective] = []
        self.unestimated: Counter[str] = Counter()
        self.num_carried = 0

    def read(self, name: str, times: int) -> list[Event]:
        """The events of a computation that runs so many times."""
        computation = self.module.computations[name]
        events: list[Event] = []
        begun: dict[str, int] = {}  # What has been started and not waited for, by name or channel.
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            base = opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")
            inside = self._collectives_inside(instruction)
            if opcode == "while":
                turns = trip_count(self.module, computation, instruction)
                body = self.read(loop_computations(instruction)[1], times * turns)
                events.append(Loop(turns, tuple(body)))
            elif opcode == "conditional":
                events += self._worst_branch(instruction, times)
            elif opcode == "call":
                events += [event for each in instruction.called for event in self.read(each, times)]
            elif base in UNKNOWN_OPCODES:
                self._refuse(instruction)
            elif opcode.endswith(("-done", "-update")) and instruction.operands[0] in begun:
                if opcode.endswith("-done"):
                    self._wait(events, begun, instruction.operands[0])
                else:
                    begun[instruction.name] = begun.pop(instruction.operands[0])
            elif base in KIND_OF_OPCODE:
                self._start(events, computation, instruction, computation, instruction, times)
                begun[instruction.name] = len(self.collectives) - 1
                if opcode == base:
                    self._wait(events, begun, instruction.name)
            elif inside:
                self._read_fused(events, begun, computation, instruction, inside, times)
            else:
                self._compute(events, computation, instruction, times)
        for key in list(begun):
            self.num_carried += 1
            self._wait(events, begun, key)
        return events

    def _collectives_inside(
        self, instruction: Instruction
    ) -> list[tuple[Computation, Instruction]]:
        """The collectives in what a fusion or an asynchronous instruction calls."""
        if instruction.opcode not in CALLING_OPCODES:
            return []
        called = [self.module.computations[name] for name in instruction.called]
        return [
            (computation, inner)
            for computation in called
            for inner in computation.instructions.values()
            if inner.opcode in KIND_OF_OPCODE
        ]

    def _read_fused(
        self,
        events: list[Event],
        begun: dict[str, int],
        computation: Computation,
        fusion: Instruction,
        inside: list[tuple[Computation, Instruction]],
        times: int,
    ) -> None:
        """A fusion with a collective: its start, a product that carries it, its end, or all."""
        targets = {
            inner.attribute("custom_call_target").strip('"').partition('"')[0]
            for name in fusion.called
            for inner in self.module.computations[name].instructions.values()
            if inner.opcode == "custom-call"
        }
        carried = [(where, inner, f"channel {_channel(inner)}") for where, inner in inside]
        if FUSED_START in targets:
            for where, inner, key in carried:
                self._start(events, computation, fusion, where, inner, times)
                begun[key] = len(self.collectives) - 1
        self._compute(events, computation, fusion, times)
        if FUSED_DONE in targets:
            for _, _, key in carried:
                self._wait(events, begun, key)
        if fusion.opcode != "fusion":  # The start of a pair.
            self._start(events, computation, fusion, *inside[0], times)
            begun[fusion.name] = len(self.collectives) - 1
        elif not targets & {FUSED_START, FUSED_DONE} and not any(
            key in begun for *_, key in carried
        ):
            for where, inner, key in carried:  # One instruction that is nothing but the collective.
                self._start(events, computation, fusion, where, inner, times)
                begun[key] = len(self.collectives) - 1
                self._wait(events, begun, key)

    def _start(
        self,
        events: list[Event],
        computation: Computation,
        instruction: Instruction,
        inner_computation: Computation,
        inner: Instruction,
        times: int,
    ) -> None:
        """Notes a collective `inner`, which `instruction` begins."""
        kind = KIND_OF_OPCODE[inner.opcode.removesuffix("-start")]
        if kind == "all_reduce" and any(
            name.startswith(REDUCE_SCATTER_FUSION) for name in instruction.called
        ):
            kind = "reduce_scatter"
        groups = device_groups(self.module, inner)
        shapes = [inner_computation.instructions[name].shape for name in inner.operands]
        self.collectives.append(
            ScheduledCollective(
                name=instruction.name,
                kind=kind,
                axes=axes_of(groups, self.mesh),
                group_size=max(map(len, groups), default=1),
                operand_bytes=sum(map(array_bytes, shapes)),
                dtypes=tuple(shape.lstrip("(").partition("[")[0] for shape in shapes),
                times=times,
                scope=inner.op_name or scope_of(self.module, computation, instruction),
            )
        )
        events.append(Start(len(self.collectives) - 1))

    def _wait(self, events: list[Event], begun: dict[str, int], key: str) -> None:
        """Notes that a collective is waited for, and what has been computed since it began."""
        index = begun.pop(key, None)
        if index is None:
            return  # It began in the turn before, where it has been waited for already.
        start = max(i for i, event in enumerate(events) if event == Start(index))
        between = events[start + 1 :]
        cycles = sum(map(total_cycles, between))
        collective = self.collectives[index]
        self.collectives[index] = dataclasses.replace(
            collective,
            is_async=collective.is_async or bool(cycles),
            cycles_between=cycles,
            between=tuple(dict.fromkeys(_scopes(between))),
        )
        events.append(Wait(index))

    def _compute(
        self, events: list[Event], computation: Computation, instruction: Instruction, times: int
    ) -> None:
        """Notes what an instruction computes."""
        if instruction.cycles is not None:
            events.append(
                Compute(instruction.cycles, scope_of(self.module, computation, instruction))
            )
        elif instruction.opcode not in FREE_OPCODES | PREFETCH_OPCODES:
            is_fused_send = bool(self._collectives_inside(instruction))
            if not is_fused_send and array_bytes(instruction.shape) >= MIN_NOTED_BYTES:
                self.unestimated[_kind_of_work(instruction)] += times

    def _worst_branch(self, instruction: Instruction, times: int) -> list[Event]:
        """The events of the branch that computes the most; of the others nothing is kept."""
        kept = (list(self.collectives), Counter(self.unestimated), self.num_carried)
        best: tuple[int, Fraction] = (-1, Fraction(-1))
        outcome: tuple[list[Event], list[ScheduledCollective], Counter[str], int] = ([], *kept)
        for name in instruction.called:
            self.collectives, self.unestimated, self.num_carried = (
                list(kept[0]),
                Counter(kept[1]),
                kept[2],
            )
            events = self.read(name, times)
            sent = sum((each.bytes_sent for each in self.collectives), Fraction(0))
            if (cost := (sum(map(total_cycles, events)), sent)) > best:
                best = cost
                outcome = (events, self.collectives, self.unestimated, self.num_carried)
        events, self.collectives, self.unestimated, self.num_carried = outcome
        return events

    def _refuse(self, instruction: Instruction) -> None:
        """Raises for what sends an amount that is not known."""
        raise ValueError(
            f"read_schedule: the program contains {instruction.opcode} (scope: "
            f"{instruction.op_name or 'none'}), expected one of {', '.join(KIND_OF_OPCODE)}: what "
            "others send is not known here."
        )


def _kind_of_work(instruction: Instruction) -> str:
    """What an instruction is, in a word: of a custom call its target."""
    target = instruction.attribute("custom_call_target").strip('"').partition('"')[0]
    return f"{instruction.opcode} {target}".strip()


def _channel(collective: Instruction) -> str:
    """The number of the channel of a collective, the same in all copies of a fused one."""
    return collective.attribute("channel_id").partition(",")[0]


def _scopes(events: list[Event]) -> list[str]:
    """The scopes of compute in events."""
    found: list[str] = []
    for event in events:
        if isinstance(event, Loop):
            found += _scopes(list(event.events))
        elif isinstance(event, Compute) and event.cycles:
            found.append(event.scope)
    return found
