"""Reads the collectives and the memory of a compiled program from its optimised HLO.

In a plain `jax.jit` over sharded arrays XLA inserts the collectives. No jaxpr contains them: they
appear when the program is compiled. XLA also changes collectives that the program calls itself: it
merges several collectives into one with several operands, moves collectives out of loops, and drops
a collective whose result is not used. This module reads the compiled program;
`manualpar.inspect.communication` reads the jaxpr. Both count bytes in the same way.

The HLO is specific to the backend. XLA:CPU turns collectives of bfloat16 into float32, so on the
CPU take the dtype of a collective from the traced program. On a GPU a collective is a pair of
instructions, a start and a done. The pair counts as one collective. This module does not see the
bytes that kernels send themselves, or callbacks on the host.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from manualpar.core.summary import Summarized
from manualpar.core.tracing.scopes import TickRuns, ticks_run
from manualpar.inspect.communication import Kind, as_number, count_by_kind, ring_bytes, total_bytes
from manualpar.inspect.scope_parsing import (
    OTHER,
    Phase,
    compiled_scopes,
    module_of,
    phase_of,
    purpose_in,
)

# -------------------------------------------------------------------------------------------------
# Parses the text of an optimised HLO module: its computations, loops and groups of devices.
#
# The text is the only public form of a compiled program. A computation begins in the first column;
# each of its instructions is one indented line, `name = shape opcode(operands), attributes`.
#
# XLA:CPU and XLA:GPU write the trip count of a loop next to the loop. XLA:TPU does not, so
# `trip_count` derives it from a counter that starts at a constant, grows by a constant, and is
# compared with a constant.


Groups = tuple[tuple[int, ...], ...]

# A tuple's shape contains spaces, but no space in it comes before a word and a parenthesis.
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(([^)]*)\)(.*)")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
# Pallas writes a kernel's metadata as JSON with line breaks, in the middle of a line.
_METADATA = re.compile(r"(?<=\bkernel_metadata=\{)\n.*?\n(?=\}(\}|,[^\n]))", re.DOTALL)
# Opcodes that do not change the value of a loop counter.
_COPIES = frozenset({"bitcast", "convert", "copy", "copy-done", "copy-start", "opt-barrier"})
MAX_SCOPE_STEPS = 64  # `scope_of` looks at no more instructions than this.
NO_CYCLES = 2**63 - 1  # XLA:TPU writes this number if its estimate of cycles has overflowed.


class Instruction(NamedTuple):
    """One instruction, a line of a computation: the name and shape of its result, and its opcode.

    `operands` are names (a constant's operand is its value), and `attributes` is the rest of the
    line. The result of the root instruction is the result of the computation.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool = False

    @property
    def op_name(self) -> str:
        """The scope and primitive of the JAX operation behind the instruction; "" if unknown."""
        return self.found(r'op_name="((?:[^"\\]|\\.)*)"')

    @property
    def called(self) -> list[str]:
        """The computations that the instruction calls, without a loop's condition and body."""
        one = r"\b(?:to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
        several = r"\b(?:branch_computations|called_computations)=\{([^}]*)\}"
        listed = ",".join(re.findall(several, self.attributes))
        return re.findall(one, self.attributes) + re.findall(r"[\w.\-]+", listed)

    @property
    def loop(self) -> tuple[str, str]:
        """The condition and the body of a `while`."""
        return self.found(r"\bcondition=%?([\w.\-]+)"), self.found(r"\bbody=%?([\w.\-]+)")

    @property
    def target(self) -> str:
        """The target of a custom call, "" for every other instruction."""
        return self.attribute("custom_call_target").strip('"').partition('"')[0]

    @property
    def cycles(self) -> int | None:
        """The cycles that XLA:TPU estimates for the instruction, `None` without an estimate."""
        found = self.found(r'"estimated_cycles":"(\d+)"')
        return int(found) if found and int(found) < NO_CYCLES else None

    def attribute(self, name: str) -> str:
        """Returns the rest of the line after `name=`, "" if the line does not contain `name=`."""
        return self.found(rf"\b{name}=(.*)")

    def found(self, pattern: str) -> str:
        """Returns group 1 of a pattern's first match in the attributes, "" without a match."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else ""


# The instructions of one computation, by name, in the order of the text.
Instructions = Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True)
class HloModule:
    """A program: its computations by name, the name of the `entry`, and the number of devices."""

    computations: Mapping[str, Instructions]
    entry: str
    num_devices: int


def parse_module(text: str) -> HloModule:
    """Parses the text of a module."""
    computations: dict[str, dict[str, Instruction]] = {}
    entries, current = [], ""
    for line in _METADATA.sub("", text).splitlines():
        if header := _COMPUTATION.match(line):
            current = header[2]
            computations[current] = {}
            entries += [current] if header[1] else []
        elif current and (parts := _INSTRUCTION.match(line)):
            root, name, shape, opcode, operands, attributes = parts.groups()
            names = tuple(re.findall(r"[\w.\-]+", re.sub(r"/\*.*?\*/", "", operands)))
            instruction = Instruction(name, shape, opcode, names, attributes, bool(root))
            computations[current][name] = instruction
    if len(entries) != 1:
        raise ValueError(
            f"compiled_collectives: the text has {len(entries)} ENTRY computations, expected one, "
            "as in optimised HLO. Pass jax.jit(f).lower(*args).compile(), not a Lowered."
        )
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.splitlines()[0])
    return HloModule(computations, entries[0], math.prod(map(int, counts)))


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape of each array in an HLO shape: `f32[8,16]{1,0}`, or a tuple."""
    found = re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", shape)
    return [(dtype, tuple(map(int, re.findall(r"\d+", dims)))) for dtype, dims in found]


def array_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the bytes of an array.

    HLO's dtypes, except `pred`, have their number of bits in the name.
    """
    bits = re.match(r"[a-z]+(\d+)", dtype.replace("pred", "pred8"))
    return -(-math.prod(shape) * int(bits[1]) // 8) if bits else 0


def sent_arrays(
    computation: Instructions, collective: Instruction
) -> list[tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape of each array that a device sends in a collective.

    A ragged all-to-all has six operands. The first two are the rows and a buffer for the result,
    and one of them is as large as the most rows that could arrive. The other one is returned, which
    has the rows of a device. Data decide how many of the rows stay on the device; on average as
    many as in an all-to-all.
    """
    operands = [arrays(computation[name].shape) for name in collective.operands]
    if collective.opcode.startswith("ragged-all-to-all"):
        return min(operands[:2], key=lambda operand: array_bytes(*operand[0]))
    return [array for operand in operands for array in operand]


def trip_count(module: HloModule, around: Instructions, loop: Instruction) -> int | None:
    """Returns how often the body of a `while` in the computation `around` runs.

    The result is `None` if it is unknown: XLA has written no trip count, and the loop does not
    count from a constant to a constant in steps of a constant.
    """
    if known := loop.found(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(known)
    condition, body = (module.computations[name] for name in loop.loop)
    test = _root(condition)
    if test is None or test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    counter, end = (_origin(condition, name) for name in test.operands)
    if counter is None or counter.opcode != "get-tuple-element":
        return None
    index = _index(counter)
    begin = _element(around, _origin(around, loop.operands[0]), index)
    step = _increment(body, _element(body, _root(body), index), index)
    first, last = _integer(begin), _integer(end)
    if first is None or last is None or step is None or step < 1:
        return None
    return max(0, -((first - last) // step))


def _root(computation: Instructions) -> Instruction | None:
    return next((x for x in computation.values() if x.is_root), None)


def _origin(computation: Instructions, name: str) -> Instruction | None:
    """Returns the instruction called `name`, or the instruction whose result it copies."""
    found = computation.get(name)
    while found and found.opcode in _COPIES:
        found = computation.get(found.operands[0])
    return found


def _element(
    computation: Instructions, instruction: Instruction | None, index: int
) -> Instruction | None:
    """Returns the origin of a tuple's element; `None` if `instruction` makes no tuple."""
    is_tuple = instruction is not None and instruction.opcode == "tuple"
    return _origin(computation, instruction.operands[index]) if instruction and is_tuple else None


def _index(element: Instruction) -> int:
    return int(element.found(r"\bindex=(\d+)") or -1)


def _integer(constant: Instruction | None) -> int | None:
    if constant is None or constant.opcode != "constant" or len(constant.operands) != 1:
        return None
    return int(constant.operands[0]) if re.fullmatch(r"-?\d+", constant.operands[0]) else None


def _increment(body: Instructions, step: Instruction | None, index: int) -> int | None:
    """Returns the constant that `step` adds to the loop's counter; `None` if it does not."""
    if step is None or step.opcode != "add":
        return None
    terms = [term for name in step.operands if (term := _origin(body, name)) is not None]
    numbers = [number for term in terms if (number := _integer(term)) is not None]
    counters = [
        term for term in terms if term.opcode == "get-tuple-element" and _index(term) == index
    ]
    return numbers[0] if len(numbers) == len(counters) == 1 else None


def device_groups(module: HloModule, collective: Instruction) -> Groups:
    """Returns a collective's groups of devices; a device's number is its place in the program.

    A group of a permutation is a set of devices connected by sends, so a permutation without pairs
    has no groups.
    """
    is_permute = collective.opcode.startswith("collective-permute")
    name = "source_target_pairs" if is_permute else "replica_groups"
    groups = collective.attribute(name)
    if not groups:
        raise ValueError(
            f"compiled_collectives: {collective.opcode} has no {name}, expected it in "
            f"{collective.attributes!r}. Teach manualpar/inspect/compiled.py the form."
        )
    if is_permute:
        return _connected(permuted_pairs(collective))
    if groups.startswith("{}"):
        return (tuple(range(module.num_devices)),)
    if groups.startswith("{{"):  # {{0,1},{2,3}}
        listed = re.findall(r"\{([\d,]+)\}", groups[1 : groups.index("}}") + 1])
        return tuple(tuple(map(int, group.split(","))) for group in listed)
    if iota := re.match(r"\[\d+,(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", groups):
        return _rows(_listed(iota[2]), int(iota[1]))  # [2,4]<=[4,2]T(1,0)
    if mesh := re.match(r"mesh\[([^\]]*)\](?:, device_ids=\((\S*)\))? \{([^}]*)\}", groups):
        return _groups_on_mesh(sizes=mesh[1], device_ids=mesh[2], axes=mesh[3])
    raise ValueError(
        f"compiled_collectives: {collective.opcode} has replica_groups={groups[:60]}, expected "
        "{{0,1}}, [1,2]<=[2] or mesh['a'=2] {'a'}. Teach manualpar/inspect/compiled.py the form."
    )


def _rows(ids: np.ndarray, size: int) -> Groups:
    return tuple(map(tuple, ids.reshape(-1, size).tolist()))


def _listed(text: str) -> np.ndarray:
    """Parses devices in order: `0,2,1,3`, or as the transpose of an array, `[2,2]T(1,0)`."""
    numbers, *order = (list(map(int, re.findall(r"\d+", part))) for part in text.split("T"))
    if not text.startswith("["):
        return np.array(numbers)
    ids = np.arange(math.prod(numbers)).reshape(numbers)
    return ids.transpose(order[0] if order else None).ravel()


def _groups_on_mesh(*, sizes: str, device_ids: str | None, axes: str) -> Groups:
    """Returns the groups along the axes `axes` (`'a'`) of a mesh with `sizes` (`'a'=4,'b'=2`).

    In `axes`, `'a':(2)2` stands for the inner half of the axis `'a'` of size 4.
    """
    wanted = {
        name: (int(outer_size or 0), int(inner_size or 0))
        for name, outer_size, inner_size in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?", axes)
    }
    dims: list[int] = []
    joined: list[int] = []
    for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", sizes):
        outer_size, inner_size = wanted.get(name, (0, 0))
        outer, inner = (outer_size, inner_size) if inner_size else (1, int(size))
        joined += [len(dims) + 1] if name in wanted else []
        dims += [outer, inner, int(size) // (outer * inner)]
    rest = [dim for dim in range(len(dims)) if dim not in joined]
    ids = _listed(device_ids) if device_ids else np.arange(math.prod(dims))
    along = ids.reshape(dims).transpose(rest + joined)
    return _rows(along, math.prod(dims[dim] for dim in joined))


def permuted_pairs(permute: Instruction) -> list[tuple[int, int]]:
    """Returns pairs (sender, receiver) of devices, by the devices' places in the program."""
    listed = permute.attribute("source_target_pairs").partition(", ")[0]
    return [(int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", listed)]


def _connected(pairs: list[tuple[int, int]]) -> Groups:
    """Returns the sets of devices that are connected by pairs (sender, receiver)."""
    joined: dict[int, frozenset[int]] = {}
    for source, target in pairs:
        both = joined.get(source, frozenset({source})) | joined.get(target, frozenset({target}))
        joined |= dict.fromkeys(both, both)
    return tuple(tuple(sorted(group)) for group in dict.fromkeys(joined.values()))


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the smallest set of mesh axes along which the devices of the largest group lie.

    It is `()` if the largest group has one device.
    """
    largest = max(groups, key=len, default=())
    if len(largest) < 2:
        return ()
    axes = [axis for axis, size in mesh.items() if size > 1]
    ids = np.arange(math.prod(mesh.values())).reshape([mesh[axis] for axis in axes])
    [first] = np.argwhere(ids == largest[0]).tolist()
    for count in range(1, len(axes) + 1):
        for chosen in itertools.combinations(axes, count):
            where = tuple(
                slice(None) if axis in chosen else index
                for axis, index in zip(axes, first, strict=True)
            )
            if set(largest) <= set(ids[where].ravel().tolist()):
                return chosen
    return ()


def scope_of(module: HloModule, computation: Instructions, instruction: Instruction) -> str:
    """Returns the `op_name` of an instruction, or the nearest one if it has none.

    The computations that the instruction calls come first, and then its operands. For example,
    padding that the compiler adds has no `op_name`, so it gets that of its operand.
    """
    waiting, seen = [instruction], {instruction.name}
    for _ in range(MAX_SCOPE_STEPS):
        if not waiting:
            return ""
        current = waiting.pop(0)
        names = itertools.chain([current.op_name], _called_scopes(module, current))
        if found := next(filter(None, names), ""):
            return found
        for name in current.operands:
            if name in computation and name not in seen:
                seen.add(name)
                waiting.append(computation[name])
    return ""


def _called_scopes(module: HloModule, instruction: Instruction) -> Iterator[str]:
    for name in instruction.called:
        for inner in module.computations[name].values():
            yield inner.op_name
            yield from _called_scopes(module, inner)


# -------------------------------------------------------------------------------------------------


KIND_OF_OPCODE: Mapping[str, Kind] = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
}

# Collectives whose bytes are unknown: HLO does not contain them, or this module has no formula.
UNKNOWN_OPCODES = frozenset({"collective-broadcast", "recv", "send"})

# XLA:TPU's reduce-scatter is a fusion of an all-reduce and a slice. Its name has this prefix.
SCATTER_FUSION = "all-reduce-scatter"
# The custom calls around a collective that XLA:TPU has fused with compute.
FUSED_START, FUSED_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """A collective instruction of a compiled program, or a pair of a start and a done.

    A `Collective` is one operand in the jaxpr. XLA may merge several of them into one instruction
    with several operands and source operations, and HLO has groups of devices instead of mesh axes.
    `manualpar.inspect.xla_changes` pairs `Collective`s with the operands of instructions.

    Attributes:
      group_size: The number of devices in the collective's largest group; a group of a permutation
        is a set of devices connected by sends.
      shapes: The shape of each operand on one device.
      dtypes: The dtype of each operand, as HLO writes it: `"f32"`, `"bf16"`, `"pred"`.
      times: How many times a step runs the collective.
      scope: The scopes and primitives of its source operations (`op_name`), "" if XLA kept none.
      name: The name of the instruction that starts the collective.
      axes: The mesh axes that the collective runs over; empty if the reader has no mesh, or if the
        groups of devices follow no axes.
    """

    kind: Kind
    group_size: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    times: int
    scope: str
    name: str = dataclasses.field(default="", repr=False)
    axes: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    @property
    def operand_bytes(self) -> int:
        """The bytes of all operands on one device, with XLA's padding."""
        return sum(map(array_bytes, self.dtypes, self.shapes))

    @property
    def bytes_sent(self) -> Fraction:
        """The bytes that a device sends for all operands in a step."""
        return self.times * ring_bytes(self.kind, self.operand_bytes, self.group_size)

    @property
    def purpose(self) -> str:
        """The purpose of the first source operation, see `purpose_in`."""
        return next((purpose for purpose, _ in self.names("")), OTHER)

    @property
    def module(self) -> str:
        """The module path of the first source operation; it begins with the name of the model."""
        return next((module for _, module in self.names("")), "")

    @property
    def phase(self) -> Phase:
        """The part of a step in which the collective runs, see `phase_of`."""
        return phase_of(self.scope)

    def names(self, root: str) -> list[tuple[str, str]]:
        """Returns (purpose, module) of each source operation; `root` names the top module."""
        scopes = compiled_scopes(self.scope) if self.scope else ()
        return [(purpose_in(scope, ()), module_of(scope, root)) for scope in scopes]

    def to_json(self) -> dict[str, Any]:
        """Returns the fields for JSON, as plain numbers and names."""
        return {
            "kind": self.kind,
            "group_size": self.group_size,
            "shapes": [list(shape) for shape in self.shapes],
            "dtypes": list(self.dtypes),
            "times": self.times,
            "bytes": as_number(self.bytes_sent),
            "scope": self.scope,
        }


@dataclasses.dataclass(frozen=True, repr=False)
class Compiled(Summarized):
    """The collectives of a compiled program, and the bytes that one device holds while it runs.

    Attributes:
      aliased: The bytes of the results that reuse the memory of donated arguments.
      temporaries: The bytes of arrays other than arguments and results, at the fullest moment.
      peak: The sum of arguments, results that are not aliased, and temporaries.
      flops: XLA's count of floating point operations. It includes elementwise operations, and
        counts the body of a loop once. `None` if the backend does not count.
    """

    collectives: tuple[CompiledCollective, ...]
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    flops: int | None

    def to_json(self) -> dict[str, Any]:
        """Returns the fields for JSON, as plain numbers and names."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            "bytes": as_number(total_bytes(self.collectives)),
            "counts": count_by_kind(self.collectives),
            **plain,
            "collectives": [collective.to_json() for collective in self.collectives],
        }


def read_compiled(compiled: jax.stages.Compiled, *, stage: int | None = None) -> Compiled:
    """Reads the collectives and the memory of the result of `jax.jit(f).lower(*args).compile()`.

    `stage` is the stage of a pipeline to read; `None` for the stage that sends the most.

    Raises:
      ValueError: `compiled_collectives` raises; or the backend has no memory analysis.
    """
    memory = compiled.memory_analysis()
    if memory is None:
        raise ValueError(
            "read_compiled: the backend's memory_analysis() is None, expected the bytes that the "
            "program holds. Compile for another backend, such as the CPU."
        )
    arguments, outputs = memory.argument_size_in_bytes, memory.output_size_in_bytes
    aliased, temporaries = memory.alias_size_in_bytes, memory.temp_size_in_bytes
    costs = compiled.cost_analysis() or {}
    return Compiled(
        collectives=compiled_collectives(compiled, stage=stage),
        arguments=arguments,
        outputs=outputs,
        aliased=aliased,
        temporaries=temporaries,
        peak=arguments + outputs - aliased + temporaries,
        flops=int(costs["flops"]) if "flops" in costs else None,
    )


def compiled_collectives(
    compiled: jax.stages.Compiled | str, *, stage: int | None = None
) -> tuple[CompiledCollective, ...]:
    """Returns the collectives of a compiled program.

    Args:
      compiled: The result of `jax.jit(f).lower(*args).compile()`, or its `as_text()`.
      stage: The stage of a pipeline to read; `None` for the stage that sends the most.

    Returns:
      The collectives in the order of the program. A collective in a loop is listed once, with the
      loop's trip count as `times`. For a conditional, only the collectives of the branch that sends
      the most bytes are listed (if equal, of the first branch). In the ticks of a pipeline `times`
      is the number of ticks in which the stage runs the collective.

    Raises:
      ValueError: A loop with a collective has no known trip count; this module cannot read a
        collective's bytes or groups; or the text is not optimised HLO.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    module = parse_module(text or "")
    conditionals = (ticks_of(x) for named in module.computations.values() for x in named.values())
    num_stages = max((len(ticks.runs) for ticks in conditionals if ticks), default=1)
    stages = range(num_stages) if stage is None else [stage]
    readings = [tuple(Reading(module, module.entry, 1, stage=s).collectives) for s in stages]
    return max(readings, key=total_bytes)


def ticks_of(instruction: Instruction) -> TickRuns | None:
    """Returns in how many ticks of a pipeline a conditional runs; `None` outside of a pipeline."""
    if instruction.opcode != "conditional":
        return None
    return ticks_run(instruction.op_name.rpartition("/")[0])


class Reading:
    """Collects the collectives of the computation `name`, and of the computations that it calls.

    The computation runs `times` times in a step. In HLO a collective is one instruction, or a pair
    such as `all-gather-start` and `all-gather-done`, or XLA:TPU has *fused* it with compute. A
    fused collective consists of several fusions, which name the same channel. The first one ends in
    the custom call `AsyncCollectiveStart`. The next ones are products; each runs a part of the
    collective, and contains a copy of its instruction. The last one has `AsyncCollectiveDone`.

    In a pipeline a conditional counts once for each tick in which `stage` runs it. If `stage` is
    `None`, it counts once for each tick in which any stage runs it. `runs` is the number of ticks
    in which the computation itself runs.

    A subclass in the planner computes times from the same instructions
    (`manualpar.planner.compiled_timeline`). It follows all stages together, with `stage=None`.
    """

    reader = "compiled_collectives"  # The caller's name, for error messages.
    passes_over_hosts = True  # Whether to skip transfers between a device and its host.

    def __init__(
        self,
        module: HloModule,
        name: str,
        times: int,
        *,
        stage: int | None = None,
        runs: int | None = None,
    ) -> None:
        self.module, self.times, self.stage, self.runs = module, times, stage, runs
        self.computation = module.computations[name]
        self.collectives: list[Any] = []
        # Name or channel -> a collective that has begun and has not been waited for.
        self.begun: dict[str, Any] = {}
        for instruction in self.computation.values():
            self._follow(instruction)

    @property
    def cost(self) -> Any:
        """The bytes that the computation sends; the branch with the highest cost is counted."""
        return total_bytes(self.collectives)

    def turn(self, name: str, turns: int | Fraction, runs: int | None = None) -> Self:
        """Reads `name`: the body of a loop of `turns` iterations, or a branch of `runs` ticks."""
        times, runs = int(self.times * turns), self.runs if runs is None else runs
        return type(self)(self.module, name, times, stage=self.stage, runs=runs)

    def called(self, name: str) -> Self:
        """Reads a computation that is called once."""
        return self.turn(name, 1)

    def add(self, inner: Self, turns: int | Fraction | None = None) -> None:
        """Adds the collectives of a called computation, or of a loop of `turns` iterations."""
        self.collectives += inner.collectives

    def begin(
        self, key: str, by: Instruction, inner: Instruction, found: CompiledCollective
    ) -> None:
        """Notes that the instruction `by` starts the collective `found`, read from `inner`."""
        self.collectives.append(found)
        self.begun[key] = found

    def wait(self, key: str) -> None:
        """Notes that a collective ends; the previous iteration of a loop may have started it."""
        self.begun.pop(key, None)

    def compute(self, instruction: Instruction, *, sends: bool = False) -> None:
        """Does nothing; a subclass adds the time of what an instruction computes."""

    def refuse_loop(self, loop: Instruction) -> None:
        """Refuses a loop of unknown length if it sends something."""
        if inside := [x for name in loop.loop for x in self.turn(name, 1).collectives]:
            raise ValueError(
                f"compiled_collectives: a while (scope: {loop.op_name or 'none'}) contains "
                f"{inside[0].kind}, but XLA gives no trip count for it. Write the loop as a "
                "jax.lax.scan, or a fori_loop whose bounds are Python integers, or take the "
                "collective out of it."
            )

    def _follow(self, instruction: Instruction) -> None:
        opcode, name = instruction.opcode, instruction.name
        base = opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")
        is_later = opcode.endswith(("-done", "-update"))
        if opcode == "while":
            self._loop(instruction)
        elif ticks := ticks_of(instruction):
            self._in_ticks(instruction, ticks)
        elif opcode in ("call", "conditional"):
            self.add(max(map(self.called, instruction.called), key=lambda called: called.cost))
        elif is_later and (base in KIND_OF_OPCODE or instruction.operands[0] in self.begun):
            started = instruction.operands[0]
            if opcode.endswith("-done"):
                self.wait(started)
            elif started in self.begun:
                self.begun[name] = self.begun.pop(started)
        elif self._sends(instruction):
            self._begin(name, instruction, self.computation, instruction)
            if opcode == base:
                self.wait(name)
        elif not is_later and (inside := self._inside(instruction)):
            self._follow_fused(instruction, inside)
        else:
            self.compute(instruction)

    def _loop(self, loop: Instruction) -> None:
        turns = trip_count(self.module, self.computation, loop)
        if turns is None:
            self.refuse_loop(loop)
            return
        condition, body = loop.loop
        self.add(self.turn(body, turns), turns)
        self.collectives += self.turn(condition, turns + 1).collectives

    def _in_ticks(self, conditional: Instruction, ticks: TickRuns) -> None:
        runs = ticks.together if self.stage is None else ticks.runs[self.stage]
        share = Fraction(runs, ticks.ticks if self.runs is None else self.runs)
        if share:
            branches = [self.turn(name, share, runs) for name in conditional.called]
            self.add(max(branches, key=lambda branch: branch.cost), share)

    def _inside(self, instruction: Instruction) -> list[tuple[Instructions, Instruction]]:
        """Returns (computation, instruction) of each collective in the called computations."""
        found = []
        for computation in (self.module.computations[name] for name in instruction.called):
            for inner in computation.values():
                found += [(computation, inner)] if self._sends(inner) else self._inside(inner)
        return found

    def _follow_fused(
        self, fusion: Instruction, inside: list[tuple[Instructions, Instruction]]
    ) -> None:
        """Follows a fusion that contains a collective, or only its start, a part, or its end."""
        called = [self.module.computations[name] for name in fusion.called]
        targets = {inner.target for computation in called for inner in computation.values()}
        channels = [f"channel {x.attribute('channel_id').partition(',')[0]}" for _, x in inside]
        is_carried = any(channel in self.begun for channel in channels)
        is_carried |= any("chain_id=" in inner.attributes for _, inner in inside)
        is_pair = fusion.opcode.endswith("-start")
        if FUSED_START in targets:
            for channel, found in zip(channels, inside, strict=True):
                self._begin(channel, fusion, *found)
        self.compute(fusion, sends=True)
        if FUSED_DONE in targets:
            for channel in channels:
                self.wait(channel)
        elif is_pair or (FUSED_START not in targets and not is_carried):
            for channel, found in zip(channels, inside, strict=True):
                self._begin(fusion.name if is_pair else channel, fusion, *found)
                if not is_pair:  # The fusion is the complete collective.
                    self.wait(channel)

    def _sends(self, instruction: Instruction) -> bool:
        """Returns whether an instruction is a collective; refuses `UNKNOWN_OPCODES`."""
        opcode = instruction.opcode.removesuffix("-start")
        is_to_host = "is_host_transfer=true" in instruction.attributes
        if opcode in UNKNOWN_OPCODES and not (is_to_host and self.passes_over_hosts):
            raise ValueError(
                f"{self.reader}: the program contains {instruction.opcode} (scope: "
                f"{instruction.op_name or 'none'}), expected one of {', '.join(KIND_OF_OPCODE)}: "
                "the bytes of other opcodes are unknown. Write the program with these opcodes."
            )
        return opcode in KIND_OF_OPCODE

    def _begin(self, key: str, by: Instruction, where: Instructions, inner: Instruction) -> None:
        kind = KIND_OF_OPCODE[inner.opcode.removesuffix("-start")]
        if kind == "all_reduce" and any(name.startswith(SCATTER_FUSION) for name in by.called):
            kind = "reduce_scatter"
        size = max(map(len, device_groups(self.module, inner)), default=1)
        dtypes, shapes = zip(*sent_arrays(where, inner), strict=True)
        of_step: Any = {"times": self.times, "scope": inner.op_name, "name": by.name}
        found = CompiledCollective(kind, size, shapes, dtypes, **of_step)
        self.begin(key, by, inner, found)
