"""What a program that XLA has compiled for a TPU does, in order: compute, send, wait.

A schedule is a list of events. An instruction computes for as many cycles as the compiler
estimates. A collective starts; if it is *asynchronous*, other instructions run before something
waits for it, and those can hide it. A loop repeats events.

Asynchronous collectives have two forms in the text. One is a pair of instructions, such as
`collective-permute-start` and `-done`. The other is *fused* with compute: a fusion that ends in the
custom call `AsyncCollectiveStart`, then products that each carry a part of the collective and hold
a copy of its instruction, then a fusion with `AsyncCollectiveDone`. All of them name one channel.

The compiler estimates no cycles for a collective in either form, and its estimate of a product that
carries a part of one is that of the product alone (`tests/planner_schedule_test.py` shows both). So
cycles are compute, and `manualpar.planner.schedule_time` adds the time on the wire.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from manualpar.inspect.communication import total_bytes
from manualpar.inspect.compiled import (
    FUSED_START,
    KIND_OF_OPCODE,
    SCATTER_FUSION,
    UNKNOWN_OPCODES,
    CompiledCollective,
    as_scatter,
    read_collective,
    refuse_unknown,
)
from manualpar.inspect.hlo import (
    HloModule,
    Instruction,
    Instructions,
    array_bytes,
    arrays,
    axes_of,
    device_groups,
    parse_module,
    scope_of,
    trip_count,
)

FUSED_DONE = "AsyncCollectiveDone"
# These take no time by themselves, or wait for something that costs nothing here.
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
# Copies between HBM and the chip's own memory, made ahead of their use.
PREFETCH_OPCODES = frozenset({"copy-start", "copy-done", "slice-start", "slice-done"})
# These may call a computation that holds a collective.
CALLING_OPCODES = frozenset({"fusion", "async-start", "call-start"})
MIN_NOTED_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Compute:
    """An instruction computes for as many cycles as the compiler estimates."""

    cycles: int
    scope: str


@dataclasses.dataclass(frozen=True)
class Start:
    """A collective starts: the one at this position of `Schedule.collectives`."""

    collective: int


@dataclasses.dataclass(frozen=True)
class Wait:
    """Nothing goes on until a collective has ended; its position, as in `Start`."""

    collective: int


@dataclasses.dataclass(frozen=True)
class Repeat:
    """A loop runs its events again and again."""

    times: int
    events: tuple["Event", ...]


Event = Compute | Start | Wait | Repeat


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduledCollective(CompiledCollective):
    """A collective of a scheduled program.

    Attributes:
      name: The name of its instruction, or of the one that starts it.
      axes: The mesh axes it goes over; none where its groups of devices lie along no axes.
      is_async: Whether other instructions can run between its start and the wait for it.
      cycles_between: The cycles of those instructions, each time.
      between: Their scopes, without repetitions.
    """

    name: str
    axes: tuple[str, ...]
    is_async: bool = False
    cycles_between: int = 0
    between: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A scheduled program.

    Attributes:
      events: What it does, in order.
      collectives: What it sends, in the order of the program.
      unestimated: How often a step runs instructions that work on a MiB or more and have no
        estimate of their cycles, by opcode. They count as nothing.
      num_carried: How many collectives start in one turn of a loop and are waited for in the next.
        They are taken to end with the turn in which they start.
    """

    events: tuple[Event, ...]
    collectives: tuple[ScheduledCollective, ...]
    unestimated: Mapping[str, int]
    num_carried: int

    @property
    def compute_cycles(self) -> int:
        """The cycles of all compute in a step."""
        return total_cycles(self.events)


def total_cycles(events: Sequence[Event]) -> int:
    """The cycles of compute in events."""
    cycles = 0
    for event in events:
        if isinstance(event, Repeat):
            cycles += event.times * total_cycles(event.events)
        elif isinstance(event, Compute):
            cycles += event.cycles
    return cycles


def read_schedule(text: str, mesh: Mapping[str, int]) -> Schedule:
    """Reads the schedule of a program that was compiled for a TPU.

    Args:
      text: The `as_text()` of the compiled program.
      mesh: The sizes of the mesh axes, the major one first.

    Returns:
      Its schedule. Of the branches of a conditional, only the one that computes the most is in it;
      of equals the one that sends the most.

    Raises:
      ValueError: The text is no scheduled module; a loop has no known number of turns; or a
        collective is of a kind whose bytes are not known here.
    """
    header = text.partition("\n")[0]
    if not header.startswith("HloModule") or "is_scheduled=true" not in header:
        raise ValueError(
            f"read_schedule: the text begins with {header[:60]!r}, expected an HloModule that is "
            "scheduled: jax.jit(f).lower(*args).compile().as_text() with the devices of a TPU."
        )
    module = parse_module(text)
    block = _Block(module, mesh, module.entry, times=1, first=0)
    return Schedule(
        tuple(block.events), tuple(block.collectives), dict(block.unestimated), block.num_carried
    )


class _Block:
    """Reads a computation that runs `times` times; its collectives are numbered from `first`."""

    def __init__(
        self, module: HloModule, mesh: Mapping[str, int], name: str, *, times: int, first: int
    ) -> None:
        self.module, self.mesh, self.times, self.first = module, mesh, times, first
        self.computation = module.computations[name]
        self.events: list[Event] = []
        self.collectives: list[ScheduledCollective] = []
        self.unestimated: Counter[str] = Counter()
        self.num_carried = 0
        # The collectives that have started and are not waited for yet, by name or channel.
        self.begun: dict[str, int] = {}
        for instruction in self.computation.values():
            self._read(instruction)
        for key in list(self.begun):
            self.num_carried += 1
            self._wait(key)

    def _read(self, instruction: Instruction) -> None:
        opcode, name = instruction.opcode, instruction.name
        base = opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")
        inside = self._collectives_inside(instruction)
        is_collective = base in KIND_OF_OPCODE
        if opcode == "while":
            turns = self._turns(instruction)
            body = self._take(self._called(instruction.loop[1], turns))
            self.events.append(Repeat(turns, tuple(body)))
        elif opcode == "conditional":
            branches = [self._called(branch) for branch in instruction.called]
            self.events += self._take(max(branches, key=_cost))
        elif opcode == "call":
            for called in instruction.called:
                self.events += self._take(self._called(called))
        elif base in UNKNOWN_OPCODES:
            refuse_unknown("read_schedule", instruction)
        elif opcode.endswith(("-done", "-update")) and (
            is_collective or instruction.operands[0] in self.begun
        ):
            started = instruction.operands[0]
            if opcode.endswith("-done"):
                self._wait(started)
            elif started in self.begun:
                self.begun[name] = self.begun.pop(started)
        elif is_collective:
            self._start(name, instruction, self.computation, instruction)
            if opcode == base:
                self._wait(name)
        elif inside:
            self._read_fused(instruction, inside)
        else:
            self._compute(instruction)

    def _called(self, name: str, turns: int = 1) -> "_Block":
        first = self.first + len(self.collectives)
        return _Block(self.module, self.mesh, name, times=self.times * turns, first=first)

    def _take(self, called: "_Block") -> list[Event]:
        """Adds what a called computation sends, and returns its events."""
        self.collectives += called.collectives
        self.unestimated += called.unestimated
        self.num_carried += called.num_carried
        return called.events

    def _turns(self, loop: Instruction) -> int:
        turns = trip_count(self.module, self.computation, loop)
        if turns is None:
            raise ValueError(
                f"read_schedule: the loop {loop.name} (scope: {loop.op_name or 'none'}) does not "
                "count in equal steps from a constant to a constant, so nobody knows how often it "
                "runs. Write it as a jax.lax.scan, or a fori_loop with fixed bounds."
            )
        return turns

    def _collectives_inside(
        self, instruction: Instruction
    ) -> list[tuple[Instructions, Instruction]]:
        """The collectives in what a fusion or an asynchronous instruction calls, and where."""
        if instruction.opcode not in CALLING_OPCODES:
            return []
        called = [self.module.computations[name] for name in instruction.called]
        return [
            (computation, inner)
            for computation in called
            for inner in computation.values()
            if inner.opcode in KIND_OF_OPCODE
        ]

    def _read_fused(
        self, fusion: Instruction, inside: list[tuple[Instructions, Instruction]]
    ) -> None:
        """Reads the start of a fused collective, a product that carries it, its end, or all."""
        targets = {
            inner.target
            for name in fusion.called
            for inner in self.module.computations[name].values()
        }
        channels = [
            f"channel {inner.attribute('channel_id').partition(',')[0]}" for _, inner in inside
        ]
        is_carried = any(channel in self.begun for channel in channels)
        if FUSED_START in targets:
            for channel, found in zip(channels, inside, strict=True):
                self._start(channel, fusion, *found)
        if fusion.cycles is not None:
            self._compute(fusion)
        if fusion.opcode != "fusion":  # The start of a pair.
            self._start(fusion.name, fusion, *inside[0])
        elif FUSED_DONE in targets:
            for channel in channels:
                self._wait(channel)
        elif FUSED_START not in targets and not is_carried:  # Nothing but the collective.
            for channel, found in zip(channels, inside, strict=True):
                self._start(channel, fusion, *found)
                self._wait(channel)

    def _start(
        self, key: str, instruction: Instruction, where: Instructions, inner: Instruction
    ) -> None:
        """Notes that `instruction` starts the collective `inner`."""
        found = read_collective(self.module, where, inner, self.times)
        if any(name.startswith(SCATTER_FUSION) for name in instruction.called):
            found = as_scatter(found)
        scope = inner.op_name or scope_of(self.module, self.computation, instruction)
        axes = axes_of(device_groups(self.module, inner), self.mesh)
        fields = vars(found) | {"scope": scope, "name": instruction.name, "axes": axes}
        self.begun[key] = self.first + len(self.collectives)
        self.collectives.append(ScheduledCollective(**fields))
        self.events.append(Start(self.begun[key]))

    def _wait(self, key: str) -> None:
        """Notes that a collective is waited for, and what has been computed since it started."""
        index = self.begun.pop(key, None)
        if index is None:
            return  # It started in the turn before, which has waited for it already.
        between = self.events[self.events.index(Start(index)) + 1 :]
        cycles = total_cycles(between)
        collective = self.collectives[index - self.first]
        self.collectives[index - self.first] = dataclasses.replace(
            collective,
            is_async=bool(cycles),
            cycles_between=cycles,
            between=tuple(dict.fromkeys(_scopes(between))),
        )
        self.events.append(Wait(index))

    def _compute(self, instruction: Instruction) -> None:
        """Notes what an instruction computes, or that the compiler does not say how long."""
        if instruction.cycles is not None:
            scope = scope_of(self.module, self.computation, instruction)
            self.events.append(Compute(instruction.cycles, scope))
        elif instruction.opcode not in FREE_OPCODES | PREFETCH_OPCODES:
            size = sum(array_bytes(*array) for array in arrays(instruction.shape))
            if size >= MIN_NOTED_BYTES:
                self.unestimated[f"{instruction.opcode} {instruction.target}".strip()] += self.times


def _cost(branch: _Block) -> tuple[int, object]:
    return total_cycles(branch.events), total_bytes(branch.collectives)


def _scopes(events: Sequence[Event]) -> Iterator[str]:
    for event in events:
        if isinstance(event, Repeat):
            yield from _scopes(event.events)
        elif isinstance(event, Compute) and event.cycles:
            yield event.scope
