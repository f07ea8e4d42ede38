"""The schedule of a program that XLA has compiled for a TPU, followed with a clock.

A chip computes one thing at a time, and a link carries one collective at a time, in the order in
which they start; the two run at once. A collective has all links, unless the caller knows which
(`manualpar.planner.link_timeline`). An instruction computes for as many cycles as the compiler
estimates. A collective is on the wire as soon as it has started and the links are free. Whoever
waits for one stands still until it has ended: that part of it is *exposed*, the rest is hidden. An
*asynchronous* collective has other instructions between its start and the wait, which can hide it.
A turn of a loop begins with free links, because it has waited for everything that it sends; so one
turn is followed and counts as often as the loop turns.

The compiler estimates no cycles for a collective, and its estimate of a product that carries a part
of one is that of the product alone (`tests/planner/tpu_timeline_test.py` shows both). So cycles are
compute, and the caller says how long a collective is on the wire, on which links, and how long a
kernel computes.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from manualpar.inspect.communication import summed, total_bytes
from manualpar.inspect.compiled import CompiledCollective, Reading
from manualpar.inspect.hlo import (
    Groups,
    HloModule,
    Instruction,
    Instructions,
    array_bytes,
    arrays,
    axes_of,
    device_groups,
    parse_module,
    scope_of,
)
from manualpar.planner.kernels import kernel_name

# These take no time by themselves, or copy ahead of use between HBM and the chip's own memory.
_FREE_WORDS = """
after-all bitcast constant get-tuple-element iota opt-barrier parameter partition-id replica-id
tuple copy-start copy-done slice-start slice-done
"""
FREE_OPCODES = frozenset(_FREE_WORDS.split())
MIN_NOTED_BYTES = 2**20
ALL_LINKS = "all links"


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


class KernelRuns(NamedTuple):
    """How often a step runs a kernel, for which the compiler estimates no cycles, and how long."""

    name: str
    times: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A scheduled program.

    Attributes:
      collectives: What it sends, in the order of the program.
      compute_cycles: The cycles of all compute in a step, with those of kernels.
      compute_seconds: Those in seconds.
      kernels: The kernels among that, each once.
      unestimated: How often a step runs instructions that work on a MiB or more and have no
        estimate of their cycles, by opcode. They count as nothing.
      num_carried: How many collectives start in one turn of a loop and are waited for in the next.
        They are taken to end with the turn in which they start.
    """

    collectives: tuple[ScheduledCollective, ...]
    compute_cycles: int
    compute_seconds: float
    kernels: tuple[KernelRuns, ...]
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


class OnWire(NamedTuple):
    """The links that a collective takes for some seconds."""

    links: Iterable[Hashable]
    seconds: float


WireSeconds = Callable[[ScheduledCollective], float]
# Of a collective, the instruction that says which devices it joins, and their groups.
SendModel = Callable[[ScheduledCollective, Instruction, Groups], OnWire]
# Of an instruction without cycles in its computation; `None` if it is no kernel that is known.
KernelSeconds = Callable[[Instruction, Instructions], float | None]


def on_all_links(wire_seconds: WireSeconds) -> SendModel:
    """Collectives that are on all links, one after the other."""
    return lambda collective, *_: OnWire((ALL_LINKS,), wire_seconds(collective))


def read_timeline(
    text: str,
    mesh: Mapping[str, int],
    *,
    clock: float,
    wire: SendModel,
    kernel_seconds: KernelSeconds | None = None,
) -> Timeline:
    """Follows a program that was compiled for a TPU.

    Args:
      text: The `as_text()` of the compiled program.
      mesh: The sizes of the mesh axes, the major one first.
      clock: Cycles a second.
      wire: How long one run of a collective is on the wire, by itself, and on which links.
      kernel_seconds: How long a kernel computes, of which the compiler estimates no cycles.

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

    timed: Any = {
        "mesh": mesh,
        "clock": clock,
        "wire": wire,
        "kernel_seconds": kernel_seconds or (lambda _, __: None),
    }
    module = _TimedModule(**vars(parse_module(text)), **timed)
    block = _Block(module, module.entry, 1)
    return Timeline(
        collectives=tuple(block.collectives),
        compute_cycles=block.cycles,
        compute_seconds=block.cycles / clock,
        kernels=tuple(_merged(block.kernels)),
        unestimated=dict(block.unestimated),
        num_carried=block.num_carried,
    )


def _merged(kernels: Sequence[KernelRuns]) -> Iterator[KernelRuns]:
    """Those of one name together."""
    times = summed((kernel.name, kernel.times) for kernel in kernels)
    seconds = summed((kernel.name, kernel.seconds) for kernel in kernels)
    return (KernelRuns(name, times[name], seconds[name]) for name in times)


@dataclasses.dataclass(frozen=True)
class _TimedModule(HloModule):
    mesh: Mapping[str, int]
    clock: float
    wire: SendModel
    kernel_seconds: KernelSeconds


class _Begun(NamedTuple):
    """A collective that is on the wire: its position, its end, and the cycles at its start."""

    position: int
    ends: float
    cycles: int


class _Block(Reading):
    """Follows a computation from a time on, with links that are taken until other times."""

    module: _TimedModule
    reader = "read_schedule"
    passes_over_hosts = False

    def __init__(
        self,
        module: HloModule,
        name: str,
        times: int,
        now: float = 0,
        links_free: Mapping[Hashable, float] | None = None,
        **ticks: Any,
    ) -> None:
        self.now, self.cycles, self.num_carried = now, 0, 0
        self.links_free = dict(links_free or {})
        self.kernels: list[KernelRuns] = []
        self.unestimated: Counter[str] = Counter()
        super().__init__(module, name, times, **ticks)
        self.num_carried += len(self.begun)
        for key in list(self.begun):
            self.wait(key)

    @property
    def cost(self) -> tuple[int, Fraction]:
        return self.cycles, total_bytes(self.collectives)

    def called(self, name: str) -> "_Block":
        return _Block(self.module, name, self.times, self.now, self.links_free, runs=self.runs)

    def add(self, inner: "_Block", turns: int | Fraction | None = None) -> None:
        super().add(inner)
        # A call ends when all that it has sent has arrived.
        self.now = inner.now if turns is None else self.now + float(turns) * inner.now
        self.cycles += inner.cycles if turns is None else round(turns * inner.cycles)
        self.kernels += inner.kernels
        self.unestimated += inner.unestimated
        self.num_carried += inner.num_carried

    def refuse_loop(self, loop: Instruction) -> None:
        raise ValueError(
            f"read_schedule: the loop {loop.name} (scope: {loop.op_name or 'none'}) does not "
            "count in equal steps from a constant to a constant, so nobody knows how often it "
            "runs. Write it as a jax.lax.scan, or a fori_loop with fixed bounds."
        )

    def begin(
        self, key: str, by: Instruction, inner: Instruction, found: CompiledCollective
    ) -> None:
        scope = inner.op_name or scope_of(self.module, self.computation, by)
        groups = device_groups(self.module, inner)
        axes = axes_of(groups, self.module.mesh)
        fields = vars(found) | {"scope": scope, "name": by.name, "axes": axes}
        collective = ScheduledCollective(**fields)
        links, seconds = self.module.wire(collective, inner, groups)
        starts = max([self.now, *(self.links_free.get(link, 0.0) for link in links)])
        self.links_free |= dict.fromkeys(links, starts + seconds)
        self.begun[key] = _Begun(len(self.collectives), starts + seconds, self.cycles)
        wire_seconds = seconds * self.times
        self.collectives.append(dataclasses.replace(collective, wire_seconds=wire_seconds))

    def wait(self, key: str) -> None:
        if begun := self.begun.pop(key, None):
            late = max(0.0, begun.ends - self.now)
            self.now += late
            self.collectives[begun.position] = dataclasses.replace(
                self.collectives[begun.position],
                cycles_between=self.cycles - begun.cycles,
                exposed_seconds=self.times * late,
            )

    def compute(self, instruction: Instruction) -> None:
        """Passes the time of an instruction, or notes that the compiler does not estimate it."""
        if instruction.cycles is not None:
            self.pass_cycles(instruction.cycles)
        elif (seconds := self.module.kernel_seconds(instruction, self.computation)) is not None:
            self.kernels.append(
                KernelRuns(kernel_name(instruction), self.times, self.times * seconds)
            )
            self.pass_cycles(round(seconds * self.module.clock))
        elif instruction.opcode not in FREE_OPCODES:
            size = sum(array_bytes(*array) for array in arrays(instruction.shape))
            if size >= MIN_NOTED_BYTES:
                self.unestimated[f"{instruction.opcode} {instruction.target}".strip()] += self.times

    def pass_cycles(self, cycles: int) -> None:
        """Computes for so long."""
        self.cycles += cycles
        self.now += cycles / self.module.clock
