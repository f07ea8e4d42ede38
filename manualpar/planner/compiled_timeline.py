"""Computes when each instruction and collective runs in a program that XLA compiled for a chip.

A chip runs one computation at a time, and a link carries one collective at a time, in the order in
which they start; chip and links work at the same time. A collective uses all links, unless the
caller names the links that it uses (`manualpar.planner.compiled_plan`). An instruction computes for
as many cycles as the compiler for TPUs estimates, or as the caller estimates for a GPU
(`manualpar.planner.compiled_plan`). A collective is sent as soon as it has started and its
links are free. An instruction that waits for a collective stalls the chip until the collective has
ended: this part of the collective's time is *exposed*, and the rest is hidden. Between the start of
an *asynchronous* collective and the wait for its end, other instructions run, which can hide the
collective. An iteration of a loop begins with free links, because the iteration before has waited
for all of its collectives. So only one iteration is followed, and its times are multiplied by the
number of iterations. A transfer between slices (`manualpar.planner.compiled_timeline`) uses none of
these links: transfers wait only for each other.

The compiler for TPUs estimates no cycles for a collective. If an instruction computes a product and
also a part of a collective, the compiler estimates only the product
(`tests/planner/compiled_timeline_test.py` shows both). So all cycles are compute. The caller gives
the time and the links of a collective, and the time of a kernel.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from manualpar.core.summary import Summarized
from manualpar.inspect.communication import Kind, summed, total_bytes
from manualpar.inspect.compiled import (
    CompiledCollective,
    Groups,
    HloModule,
    Instruction,
    Instructions,
    Reading,
    array_bytes,
    arrays,
    axes_of,
    device_groups,
    parse_module,
    scope_of,
)
from manualpar.inspect.scope_parsing import compiled_scopes, module_of
from manualpar.planner.hardware import kernel_name
from manualpar.planner.timed_collectives import TimedCollective

# Opcodes that take no time, or copy ahead of use between HBM and the chip's own memory.
_FREE_WORDS = """
after-all bitcast constant get-tuple-element iota opt-barrier parameter partition-id replica-id
tuple copy-start copy-done slice-start slice-done
"""
FREE_OPCODES = frozenset(_FREE_WORDS.split())
MIN_NOTED_BYTES = 2**20  # Smaller instructions without an estimate are not noted.
ALL_LINKS = "all links"
SLICES = "between slices"  # The links of a chip's host to other slices, and the network's name.
# XLA:GPU writes a start and a done also for a collective that it runs synchronously.
SYNCHRONOUS = '"is_sync":true'


class KernelRuns(NamedTuple):
    """The runs of a kernel in a step, and their time, which the compiler does not estimate."""

    name: str
    times: int
    seconds: float


@dataclasses.dataclass(frozen=True, repr=False)
class Timeline(Summarized):
    """The times of a scheduled program, for one step.

    Attributes:
      collectives: The collectives with their time, in the order of the program.
      compute_cycles: The cycles of all compute in a step, kernels included.
      compute_seconds: The time of these cycles.
      exposed_seconds: The time that the step waits for collectives, also for links to become free.
      kernels: The kernels of the step, an entry for each.
      unestimated: The number of runs, by opcode, of instructions that work on a MiB or more and
        have no estimate of their cycles. They count as 0 cycles.
      num_carried: The number of collectives that start in one iteration of a loop and are waited
        for in the next. They are assumed to end with the iteration in which they start.
    """

    collectives: tuple[TimedCollective, ...]
    compute_cycles: int
    compute_seconds: float
    exposed_seconds: float
    kernels: tuple[KernelRuns, ...]
    unestimated: Mapping[str, int]
    num_carried: int

    @property
    def hidden_seconds(self) -> float:
        """The time of collectives that is hidden behind compute."""
        return sum(collective.hidden_seconds for collective in self.collectives)

    @property
    def step_seconds(self) -> float:
        """The time of a step."""
        return self.compute_seconds + self.exposed_seconds


WireSeconds = Callable[[CompiledCollective], float]
# Arguments: a collective, the instruction that names its devices, and the groups of devices.
# Results: the links that the collective occupies, and for how many seconds.
SendModel = Callable[[CompiledCollective, Instruction, Groups], tuple[Collection[Hashable], float]]
# Arguments: the module, a computation, and an instruction of the computation.
# Result: the cycles of the instruction; `None` if there is no estimate.
Cycles = Callable[[HloModule, Instructions, Instruction], int | None]
# Arguments: an instruction without cycles, and the computation that contains the instruction.
# Result: the seconds; `None` if the instruction runs no known kernel.
KernelSeconds = Callable[[Instruction, Instructions], float | None]


def on_all_links(wire_seconds: WireSeconds) -> SendModel:
    """Returns a model in which collectives use all links, one after the other."""
    return lambda collective, *_: ((ALL_LINKS,), wire_seconds(collective))


def read_timeline(
    text: str,
    mesh: Mapping[str, int],
    *,
    clock: float,
    wire: SendModel,
    kernel_seconds: KernelSeconds | None = None,
    between_slices: WireSeconds | None = None,
    cycles: Cycles = lambda _module, _computation, instruction: instruction.cycles,
) -> Timeline:
    """Computes the timeline of a program that was compiled for TPUs or GPUs.

    Args:
      text: The `as_text()` of the compiled program.
      mesh: The sizes of the mesh axes, the major one first.
      clock: Cycles per second.
      wire: Returns the links that one run of a collective occupies, and the seconds.
      kernel_seconds: Returns the seconds of a kernel, because the compiler estimates none.
      between_slices: Returns the seconds of a transfer between slices; `None` refuses transfers.
      cycles: Returns the cycles of an instruction; by default the estimate of XLA's compiler for
        TPUs.

    Returns:
      The program's timeline. A conditional takes the branch that computes most (if equal, the
      branch that sends most).
    """
    header = text.partition("\n")[0]
    if not header.startswith("HloModule") or "is_scheduled=true" not in header:
        raise ValueError(
            f"read_timeline: the text begins with {header[:60]!r}, expected a scheduled HloModule. "
            "Pass jax.jit(f).lower(*args).compile().as_text(), compiled for TPUs or GPUs."
        )

    timed: Any = {
        "mesh": mesh,
        "clock": clock,
        "wire": wire,
        "kernel_seconds": kernel_seconds or (lambda _, __: None),
        "between_slices": between_slices,
        "cycles": cycles,
    }
    module = _TimedModule(**vars(parse_module(text)), **timed)
    block = _Block(module, module.entry, 1)
    return Timeline(
        collectives=tuple(block.collectives),
        compute_cycles=block.cycles,
        compute_seconds=block.cycles / clock,
        exposed_seconds=block.exposed_seconds,
        kernels=tuple(_merged(block.kernels)),
        unestimated=dict(block.unestimated),
        num_carried=block.num_carried,
    )


def _merged(kernels: Sequence[KernelRuns]) -> Iterator[KernelRuns]:
    """Merges the runs of each kernel, by its name."""
    times = summed((kernel.name, kernel.times) for kernel in kernels)
    seconds = summed((kernel.name, kernel.seconds) for kernel in kernels)
    return (KernelRuns(name, times[name], seconds[name]) for name in times)


@dataclasses.dataclass(frozen=True)
class _TimedModule(HloModule):
    mesh: Mapping[str, int]
    clock: float
    wire: SendModel
    kernel_seconds: KernelSeconds
    between_slices: WireSeconds | None
    cycles: Cycles


class _Begun(NamedTuple):
    """A collective that is being sent, the time of its end, and each module's cycles before it."""

    collective: TimedCollective
    ends: float
    cycles: Counter[str]


class _Block(Reading):
    """The timeline of one computation, from the time `now` on.

    `links_free` gives, for each link, the time at which its last collective ends.
    """

    module: _TimedModule
    reader = "read_timeline"
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
        self.now, self.num_carried, self.exposed_seconds = now, 0, 0.0
        self.cycles_of: Counter[str] = Counter()  # By module.
        self.links_free = dict(links_free or {})
        self.kernels: list[KernelRuns] = []
        self.unestimated: Counter[str] = Counter()
        super().__init__(module, name, times, **ticks)
        self.num_carried += len(self.begun)
        for key in list(self.begun):
            self.wait(key)

    @property
    def cycles(self) -> int:
        """The cycles of all compute."""
        return self.cycles_of.total()

    @property
    def cost(self) -> tuple[int, Fraction]:
        return self.cycles, total_bytes(timed.collective for timed in self.collectives)

    def called(self, name: str) -> "_Block":
        return _Block(self.module, name, self.times, self.now, self.links_free, runs=self.runs)

    def add(self, inner: "_Block", turns: int | Fraction | None = None) -> None:
        super().add(inner)
        # A call ends when all of its collectives have ended.
        self.now = inner.now if turns is None else self.now + float(turns) * inner.now
        for module, cycles in inner.cycles_of.items():
            self.cycles_of[module] += cycles if turns is None else round(turns * cycles)
        self.exposed_seconds += inner.exposed_seconds
        self.kernels += inner.kernels
        self.unestimated += inner.unestimated
        self.num_carried += inner.num_carried

    def refuse_loop(self, loop: Instruction) -> None:
        raise ValueError(
            f"read_timeline: the loop {loop.name} (scope: {loop.op_name or 'none'}) does not "
            "count in equal steps from a constant to a constant, so it is not known how often it "
            "runs. Write it as a jax.lax.scan, or a fori_loop with fixed bounds."
        )

    def begin(
        self, key: str, by: Instruction, inner: Instruction, found: CompiledCollective
    ) -> None:
        scope = inner.op_name or scope_of(self.module, self.computation, by)
        links: Collection[Hashable]
        if inner.opcode == "send":
            assert self.module.between_slices is not None  # `_follow` has asked.
            groups, network = slice_groups(inner, self.module.num_devices), SLICES
            collective = dataclasses.replace(found, scope=scope, axes=self._axes(groups))
            links, seconds = (SLICES,), self.module.between_slices(collective)
        else:
            groups, network = device_groups(self.module, inner), ""
            collective = dataclasses.replace(found, scope=scope, axes=self._axes(groups))
            links, seconds = self.module.wire(collective, inner, groups)
        starts = max([self.now, *(self.links_free.get(link, 0.0) for link in links)])
        self.links_free |= dict.fromkeys(links, starts + seconds)
        timed = TimedCollective(collective, seconds * self.times, network, cycles_between=0)
        self.begun[key] = _Begun(timed, starts + seconds, self.cycles_of.copy())
        self.collectives.append(timed)
        if SYNCHRONOUS in by.attributes:
            self.wait(key)

    def _axes(self, groups: Groups) -> tuple[str, ...]:
        return axes_of(groups, self.module.mesh)

    def _follow(self, instruction: Instruction) -> None:
        if self.module.between_slices is None or not is_between_slices(instruction):
            super()._follow(instruction)
        elif instruction.opcode == "send":
            groups = slice_groups(instruction, self.module.num_devices)
            dtype, shape = arrays(instruction.shape)[0]
            kind, size = kind_of_transfer(instruction), max(map(len, groups))
            of_step: Any = {"times": self.times, "scope": "", "name": instruction.name}
            found = CompiledCollective(kind, size, (shape,), (dtype,), **of_step)
            self.begin(rendezvous_of(instruction), instruction, instruction, found)
        elif instruction.opcode == "recv-done":
            begun = self.computation[instruction.operands[0]]
            self.wait(rendezvous_of(begun))

    def wait(self, key: str) -> None:
        if begun := self.begun.pop(key, None):
            late = max(0.0, begun.ends - self.now)
            self.now += late
            exposed, timed = self.times * late, begun.collective
            self.exposed_seconds += exposed
            between = self.cycles_of - begun.cycles
            timed.cycles_between = between.total()
            timed.behind = max(between, key=lambda module: between[module], default="")
            is_hidden = exposed <= timed.seconds * (1 - 1e-9)  # Rounding hides nothing.
            timed.hidden_seconds = timed.seconds - exposed if is_hidden else 0.0

    def compute(self, instruction: Instruction, *, sends: bool = False) -> None:
        """Advances the clock by an instruction, or by the kernels that it is fused with.

        Notes an instruction whose time is unknown. `sends` says that it is fused with a collective.
        """
        cycles = self.module.cycles(self.module, self.computation, instruction)
        if cycles is not None:
            self.pass_cycles(cycles, instruction)
        elif not self._run_kernels(instruction, self.computation) and not sends:
            size = sum(array_bytes(*array) for array in arrays(instruction.shape))
            if size >= MIN_NOTED_BYTES and instruction.opcode not in FREE_OPCODES:
                self.unestimated[f"{instruction.opcode} {instruction.target}".strip()] += self.times

    def _run_kernels(self, instruction: Instruction, computation: Instructions) -> bool:
        """Runs an instruction's kernel, and those in a fusion; returns whether there is one."""
        seconds = self.module.kernel_seconds(instruction, computation)
        if seconds is not None:
            kernel = KernelRuns(kernel_name(instruction), self.times, self.times * seconds)
            self.kernels.append(kernel)
            self.pass_cycles(round(seconds * self.module.clock), instruction)
            return True
        called = instruction.called if instruction.opcode == "fusion" else ()
        fused = [self.module.computations[name] for name in called]
        return True in [self._run_kernels(x, inner) for inner in fused for x in inner.values()]

    def pass_cycles(self, cycles: int, instruction: Instruction) -> None:
        """Advances the clock by an instruction's cycles of compute."""
        scope = next(iter(compiled_scopes(instruction.op_name)), "")
        self.cycles_of[module_of(scope)] += cycles
        self.now += cycles / self.module.clock


# -------------------------------------------------------------------------------------------------
# Reads the transfers between slices in a program that XLA compiled for several slices of TPUs.
#
# XLA divides a collective that crosses slices into collectives within each slice and transfers
# between slices. The compiled program is that of one slice. In it a transfer is a pair of a `send`
# and a `recv`, by which a chip hands an array to its host and takes the result. The hosts run the
# collective over the data center's network. The pair has the same rendezvous and names the chips
# of each group: `"{1,2}x{0:3}"` groups each of the chips 0 to 3 of slice 1 with the same chip of
# slice 2, and `{{100000,200000},...}` lists the groups, a chip as its slice times 100,000 plus its
# number.


HANDLER = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
KIND_OF_TRANSFER: dict[str, Kind] = {
    "ALL_GATHER": "all_gather",
    "ALL_REDUCE": "all_reduce",
    "ALL_TO_ALL": "all_to_all",
    "ONE_TO_ONE": "permute",
    "REDUCE_SCATTER": "reduce_scatter",
}
SLICE = 100_000  # The number of a chip is its slice, counted from 1, times this, plus its number.


def is_between_slices(instruction: Instruction) -> bool:
    """Returns whether an instruction starts or ends a transfer between slices."""
    return HANDLER in instruction.attributes


def rendezvous_of(instruction: Instruction) -> str:
    """Returns the name that the `send` and the `recv` of a transfer share."""
    return instruction.found(r'_xla_host_transfer_rendezvous="([^"]*)"')


def kind_of_transfer(send: Instruction) -> Kind:
    """Returns the kind of the collective that the hosts run."""
    name = send.found(r'_xla_megascale_transfer_type="(\w*)"')
    if name not in KIND_OF_TRANSFER:
        raise ValueError(
            f"read_timeline: {send.name} is a transfer between slices of type {name!r}, expected "
            f"one of {', '.join(KIND_OF_TRANSFER)}: the bytes of other types are unknown. Teach "
            "manualpar/planner/compiled_timeline.py the type."
        )
    return KIND_OF_TRANSFER[name]


def slice_groups(send: Instruction, chips_per_slice: int) -> Groups:
    """Returns the groups of devices of a transfer, by their places on a mesh of all slices.

    The slices are the major part of the mesh. Only which slices a group has is exact: chips of one
    slice may be in another order on the mesh.
    """
    target = send.attribute("_xla_megascale_target").partition("_xla_")[0]
    if square := re.match(r'"\{([\d,]+)\}x', target):
        slices = [int(number) - 1 for number in square[1].split(",")]
        chips = range(chips_per_slice)
        return tuple(tuple(s * chips_per_slice + chip for s in slices) for chip in chips)
    groups = tuple(
        tuple(
            (int(number) // SLICE - 1) * chips_per_slice + int(number) % SLICE
            for number in re.split(",|->", group)
        )
        for group in re.findall(r"\{(\d+(?:(?:,|->)\d+)*)\}", target)
    )
    if not groups:
        raise ValueError(
            f"read_timeline: {send.name} has the target {target[:60]}, expected "
            '"{1,2}x{0:3}" or {{100000,200000}}. Teach manualpar/planner/compiled_timeline.py the '
            "form."
        )
    return groups
