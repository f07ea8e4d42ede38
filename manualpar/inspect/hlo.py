"""Parses the text of an optimised HLO module: its computations, loops and groups of devices.

The text is the only public form of a compiled program. A computation begins in the first column;
each of its instructions is one indented line, `name = shape opcode(operands), attributes`.

XLA:CPU and XLA:GPU write the trip count of a loop next to the loop. XLA:TPU does not, so
`trip_count` derives it from a counter that starts at a constant, grows by a constant, and is
compared with a constant.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

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
    """Parses the text of a module.

    Raises:
      ValueError: The text is not optimised HLO.
    """
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

    Raises:
      ValueError: The groups are missing, or written in a form that this function cannot parse.
    """
    is_permute = collective.opcode.startswith("collective-permute")
    name = "source_target_pairs" if is_permute else "replica_groups"
    groups = collective.attribute(name)
    if not groups:
        raise ValueError(
            f"compiled_collectives: {collective.opcode} has no {name}, expected it in "
            f"{collective.attributes!r}. Teach manualpar/inspect/hlo.py the form."
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
        "{{0,1}}, [1,2]<=[2] or mesh['a'=2] {'a'}. Teach manualpar/inspect/hlo.py the form."
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
