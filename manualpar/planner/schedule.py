"""The schedule of a program that XLA has compiled for a TPU, followed with a clock.

A chip computes one thing at a time, and its links carry one collective at a time, in the order in
which they start; the two run at once. An instruction computes for as many cycles as the compiler
estimates. A collective is on the wire as soon as it has started and the links are free. Whoever
waits for one stands still until it has ended: that part of it is *exposed*, the rest is hidden. An
*asynchronous* collective has other instructions between its start and the wait, which can hide it.
A turn of a loop begins with free links, because it has waited for everything that it sends; so one
turn is followed and counts as often as the loop turns.

Asynchronous collectives have two forms in the text. One is a pair of instructions, such as
`collective-permute-start` and `-done`. The other is *fused* with compute: a fusion that ends in the
custom call `AsyncCollectiveStart`, then products that each carry a part of the collective and hold
a copy of its instruction, then a fusion with `AsyncCollectiveDone`. All of them name one channel.

The compiler estimates no cycles for a collective in either form, and its estimate of a product that
carries a part of one is that of the product alone (`tests/planner_schedule_test.py` shows both). So
cycles are compute, and the caller says how long a collective is on the wire.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

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
# These take no time by themselves, or copy ahead of use between HBM and the chip's own memory.
_FREE_WORDS = """
after-all bitcast constant get-tuple-element iota opt-barrier parameter partition-id replica-id
tuple copy-start copy-done slice-start slice-done
"""
FREE_OPCODES = frozenset(_FREE_WORDS.split())
# These may call a computation that holds a collective.
CALLING_OPCODES = frozenset({"fusion", "async-start", "call-start"})
MIN_NOTED_BYTES = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduledCollective(CompiledCollective):
    """A collective of a scheduled program, by the name of the instruction that starts it.

    Attributes:
      axes: The mesh axes it goes over; none where its groups of devices lie along no axes.
      cycles_between: The cycles of compute between its start and the wait for it, each time.
      wire_seconds: The time of all its runs on the wire.
      exposed_seconds: The time that the step waits for all its runs.
    """

    name: str
    axes: tuple[str, ...]
    cycles_between: int = 0
    wire_seconds: float = 0.0
    exposed_seconds: float = 0.0

    @property
    def is_async(self) -> bool:
        """Whether anything computes between its start and the wait for it."""
        return self.cycles_between > 0

    @property
    def hidden_seconds(self) -> float:
        """The time on the wire for which nobody waits; a rounding error does not count."""
        is_exposed = self.exposed_seconds > self.wire_seconds * (1 - 1e-9)
        return 0.0 if is_exposed else self.wire_seconds - self.exposed_seconds


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A scheduled program.

    Attributes:
      collectives: What it sends, in the order of the program.
      compute_cycles: The cycles of all compute in a step.
      compute_seconds: Those in seconds.
      unestimated: How often a step runs instructions that work on a MiB or more and have no
        estimate of their cycles, by opcode. They count as nothing.
      num_carried: How many collectives start in one turn of a loop and are waited for in the next.
        They are taken to end with the turn in which they start.
    """

    collectives: tuple[ScheduledCollective, ...]
    compute_cycles: int
    compute_seconds: float
    unestimated: Mapping[str, int]
    num_carried: int

    @property
    def exposed_seconds(self) -> float:
        """The time that the step waits for collectives."""
        return sum(one.exposed_seconds for one in self.collectives)

    @property
    def hidden_seconds(self) -> float:
        """The time of collectives while something computes."""
        return sum(one.hidden_seconds for one in self.collectives)

    @property
    def step_seconds(self) -> float:
        """The time of a step."""
        return self.compute_seconds + self.exposed_seconds


WireSeconds = Callable[[ScheduledCollective], float]


def read_schedule(
    text: str, mesh: Mapping[str, int], *, clock: float, wire_seconds: WireSeconds
) -> Schedule:
    """Follows a program that was compiled for a TPU.

    Args:
      text: The `as_text()` of the compiled program.
      mesh: The sizes of the mesh axes, the major one first.
      clock: Cycles a second.
      wire_seconds: How long one run of a collective is on the wire, by itself.

    Returns:
      Its schedule, with only that branch of a conditional that computes the most; of equals the one
      that sends the most.

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
    block = _Block(_Program(module, mesh, clock, wire_seconds), module.entry, times=1)
    seconds, unestimated = block.cycles / clock, dict(block.unestimated)
    collectives = tuple(block.collectives)
    return Schedule(collectives, block.cycles, seconds, unestimated, block.num_carried)


class _Program(NamedTuple):
    module: HloModule
    mesh: Mapping[str, int]
    clock: float
    wire_seconds: WireSeconds


class _Begun(NamedTuple):
    """A collective that is on the wire: its position, its end, and the cycles at its start."""

    position: int
    ends: float
    cycles: int


class _Block:
    """Follows a computation that runs `times` times, from a time at which the links are taken."""

    def __init__(
        self, program: _Program, name: str, *, times: int, now: float = 0, links_free: float = 0
    ) -> None:
        self.program, self.module, self.times = program, program.module, times
        self.now, self.links_free, self.cycles = now, links_free, 0
        self.computation = self.module.computations[name]
        self.collectives: list[ScheduledCollective] = []
        self.unestimated: Counter[str] = Counter()
        self.num_carried = 0
        self.begun: dict[str, _Begun] = {}  # By name or channel, until something waits for it.
        for instruction in self.computation.values():
            self._follow(instruction)
        for key in list(self.begun):
            self.num_carried += 1
            self._wait(key)

    def _follow(self, instruction: Instruction) -> None:
        opcode, name = instruction.opcode, instruction.name
        base = opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")
        calls = self._inside(instruction) if opcode in CALLING_OPCODES else ()
        inside = [found for found in calls if found[1].opcode in KIND_OF_OPCODE]
        is_collective = base in KIND_OF_OPCODE
        if opcode == "while":
            self._loop(instruction)
        elif opcode in ("call", "conditional"):
            self._call(instruction.called)
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
            self._follow_fused(instruction, inside)
        else:
            self._compute(instruction)

    def _loop(self, loop: Instruction) -> None:
        turns = trip_count(self.module, self.computation, loop)
        if turns is None:
            raise ValueError(
                f"read_schedule: the loop {loop.name} (scope: {loop.op_name or 'none'}) does not "
                "count in equal steps from a constant to a constant, so nobody knows how often it "
                "runs. Write it as a jax.lax.scan, or a fori_loop with fixed bounds."
            )
        body = _Block(self.program, loop.loop[1], times=self.times * turns)
        self._add(body, self.now + turns * body.now, turns)

    def _call(self, names: Sequence[str]) -> None:
        """Follows the computation that takes longest, until all that it has sent has arrived."""
        links, now = self.links_free, self.now
        called = [
            _Block(self.program, name, times=self.times, now=now, links_free=links)
            for name in names
        ]
        longest = max(called, key=lambda one: (one.cycles, total_bytes(one.collectives)))
        self._add(longest, longest.now)

    def _add(self, called: "_Block", now: float, turns: int = 1) -> None:
        self.now = now
        self.cycles += turns * called.cycles
        self.collectives += called.collectives
        self.unestimated += called.unestimated
        self.num_carried += called.num_carried

    def _inside(self, instruction: Instruction) -> Iterator[tuple[Instructions, Instruction]]:
        """The instructions in the computations that an instruction calls, and where each is."""
        for name in instruction.called:
            computation = self.module.computations[name]
            yield from ((computation, inner) for inner in computation.values())

    def _follow_fused(
        self, fusion: Instruction, inside: list[tuple[Instructions, Instruction]]
    ) -> None:
        """Follows the start of a fused collective, a product that carries it, its end, or all."""
        targets = {inner.target for _, inner in self._inside(fusion)}
        channels = [f"channel {x.attribute('channel_id').partition(',')[0]}" for _, x in inside]
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
        axes = axes_of(device_groups(self.module, inner), self.program.mesh)
        fields = vars(found) | {"scope": scope, "name": instruction.name, "axes": axes}
        collective = ScheduledCollective(**fields)
        seconds = self.program.wire_seconds(collective)
        self.links_free = max(self.now, self.links_free) + seconds
        self.begun[key] = _Begun(len(self.collectives), self.links_free, self.cycles)
        wire_seconds = seconds * self.times
        self.collectives.append(dataclasses.replace(collective, wire_seconds=wire_seconds))

    def _wait(self, key: str) -> None:
        """Waits for a collective; one from the turn before has been waited for there."""
        if begun := self.begun.pop(key, None):
            late = max(0.0, begun.ends - self.now)
            self.now += late
            self.collectives[begun.position] = dataclasses.replace(
                self.collectives[begun.position],
                cycles_between=self.cycles - begun.cycles,
                exposed_seconds=self.times * late,
            )

    def _compute(self, instruction: Instruction) -> None:
        """Passes the time of an instruction, or notes that the compiler does not estimate it."""
        if instruction.cycles is not None:
            self.cycles += instruction.cycles
            self.now += instruction.cycles / self.program.clock
        elif instruction.opcode not in FREE_OPCODES:
            size = sum(array_bytes(*array) for array in arrays(instruction.shape))
            if size >= MIN_NOTED_BYTES:
                self.unestimated[f"{instruction.opcode} {instruction.target}".strip()] += self.times
