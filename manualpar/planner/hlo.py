"""The text of a scheduled HLO module, as XLA's TPU compiler writes it: what runs, in its order.

A module is a list of computations, each a list of instructions; on a TPU they stand in the order in
which they run. Nothing is interpreted here but what every reader of such a text needs: what an
instruction calls, how often a loop runs, which devices a collective joins.

A TPU program carries no trip counts. A loop of `jax.lax.scan` is one whose counter begins with a
constant, goes on in equal steps and is compared with a constant, as its operands, its body and its
condition say: `trip_count` reads it from there.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

Groups = tuple[tuple[int, ...], ...]

# name = shape opcode(operands), attributes. A tuple's shape has spaces, none of them before a word
# and a parenthesis.
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(([^)]*)\)(.*)")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
    r"|\b(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")
# What hands a value on without changing it.
_COPIES = frozenset({"copy", "copy-start", "copy-done", "bitcast", "convert", "opt-barrier"})
MAX_SCOPE_STEPS = 64


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a computation.

    Attributes:
      name: Its name, unlike any other in its computation.
      shape: The shape of its result, as HLO writes it.
      opcode: What it does.
      operands: The names of what it does that to; the text between the parentheses of a constant.
      attributes: The rest of the line.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def op_name(self) -> str:
        """The scope and primitive that it was made from, "" where XLA has kept none."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""

    @functools.cached_property
    def cycles(self) -> int | None:
        """The compiler's own estimate of the cycles it takes, `None` where it gives none."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found[1]) if found else None

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs, but for a loop's."""
        found = _CALLED.findall(self.attributes)
        return tuple(name for one, many in found for name in [one, *_names(many)] if name)

    def attribute(self, name: str) -> str:
        """What stands behind `name=`, up to the end of the line; "" if it is not there."""
        found = re.search(rf"\b{name}=(.*)", self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order in which they run, and the name of the last one's."""

    instructions: Mapping[str, Instruction]
    root: str


@dataclasses.dataclass(frozen=True)
class Module:
    """A program.

    Attributes:
      computations: Its computations by name.
      entry: The name of the one that is run.
      num_devices: How many devices run it.
    """

    computations: Mapping[str, Computation]
    entry: str
    num_devices: int


def parse_module(text: str) -> Module:
    """Reads a scheduled module.

    Args:
      text: `compiled.as_text()` of a program that the TPU compiler has made.

    Returns:
      The module.

    Raises:
      ValueError: It is no module, or one that has not been scheduled.
    """
    header = text.partition("\n")[0]
    if not header.startswith("HloModule") or "is_scheduled=true" not in header:
        raise ValueError(
            f"parse_module: the text begins with {header[:60]!r}, expected an HloModule that is "
            "scheduled: jax.jit(f).lower(*args).compile().as_text() with the devices of a TPU."
        )
    computations: dict[str, Computation] = {}
    entry, current, root = "", "", ""
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
        if begins := _COMPUTATION.match(line):
            current, instructions, root = begins[2], {}, ""
            entry = current if begins[1] else entry
        elif line.startswith("}") and current:
            computations[current] = Computation(instructions, root)
            current = ""
        elif current and (parts := _INSTRUCTION.match(line)):
            is_root, name, shape, opcode, operands, attributes = parts.groups()
            literal = opcode in ("constant", "parameter")
            given = (operands,) if literal else tuple(_names(operands))
            instructions[name] = Instruction(name, shape, opcode, given, attributes)
            root = name if is_root else root
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
    return Module(computations, entry, math.prod(map(int, counts)))


def _names(operands: str) -> list[str]:
    """The names in a list of operands, whose positions are noted in comments."""
    return re.findall(r"[\w.\-]+", re.sub(r"/\*.*?\*/", "", operands))


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int:
    """How often a loop's body runs.

    Args:
      module: The module.
      computation: The computation that the loop is in.
      loop: A `while`.

    Returns:
      The number of times.

    Raises:
      ValueError: It cannot be told.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known[1])
    condition, body = (module.computations[name] for name in loop_computations(loop))
    test = condition.instructions[condition.root]
    if test.opcode == "compare" and "direction=LT" in test.attributes:
        counter, end = (_source(condition, name) for name in test.operands)
        given = _source(computation, loop.operands[0])
        start = _source(computation, _element(given, counter))
        step = _source(body, _element(body.instructions[body.root], counter))
        first, last, by = _integer(start), _integer(end), _increment(body, step, counter)
        if first is not None and last is not None and by:
            return max(0, -((first - last) // by))
    raise ValueError(
        f"trip_count: the loop {loop.name} (scope: {loop.op_name or 'none'}) does not count in "
        f"equal steps from a constant to a constant (its condition is {test.opcode}), so nobody "
        "knows how often it runs. Write it as a jax.lax.scan, or a fori_loop with fixed bounds."
    )


def loop_computations(loop: Instruction) -> tuple[str, str]:
    """The names of a loop's condition and of its body."""
    found = dict(re.findall(r"\b(condition|body)=%?([\w.\-]+)", loop.attributes))
    return found["condition"], found["body"]


def _source(computation: Computation, name: str) -> Instruction | None:
    """The instruction of a name, or what it is a copy of."""
    instruction = computation.instructions.get(name)
    while instruction and instruction.opcode in _COPIES:
        instruction = computation.instructions.get(instruction.operands[0])
    return instruction


def _element(given: Instruction | None, counter: Instruction | None) -> str:
    """The name of what stands in a tuple where `counter` is taken from; "" if that is not told."""
    index = _index(counter)
    return given.operands[index] if given and given.opcode == "tuple" and index >= 0 else ""


def _index(instruction: Instruction | None) -> int:
    """Which element of a tuple an instruction takes, -1 if it takes none."""
    is_element = instruction and instruction.opcode == "get-tuple-element"
    return (
        int(instruction.attribute("index").partition(",")[0]) if instruction and is_element else -1
    )


def _integer(instruction: Instruction | None) -> int | None:
    """The integer that an instruction is, `None` if it is none."""
    if not instruction or instruction.opcode != "constant":
        return None
    return int(instruction.operands[0]) if re.fullmatch(r"-?\d+", instruction.operands[0]) else None


def _increment(body: Computation, step: Instruction | None, counter: Instruction | None) -> int:
    """What an instruction of a body adds to its counter, 0 if it does something else."""
    if not step or step.opcode != "add":
        return 0
    operands = [_source(body, name) for name in step.operands]
    added = next(filter(None, map(_integer, operands)), 0)
    return max(added, 0) if _index(counter) in map(_index, operands) else 0


def array_bytes(shape: str) -> int:
    """The bytes of the arrays in a shape, `f32[8,16]{1,0}` or a tuple of such, without padding."""
    total = 0
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", shape):
        bits = re.match(r"[a-z]+(\d+)", dtype.replace("pred", "pred8"))
        size = math.prod(map(int, re.findall(r"\d+", dims)))
        total += -(-size * int(bits[1]) // 8) if bits else 0
    return total


def scope_of(module: Module, computation: Computation, instruction: Instruction) -> str:
    """Where an instruction comes from: its scope, else that of what it calls, else its operands'.

    What the compiler adds by itself, to pad and to shift what it has padded, has no scope: it is
    there for that which it is made from.
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
            operand = computation.instructions.get(name)
            if operand and name not in seen:
                seen.add(name)
                waiting.append(operand)
    return ""


def _called_scopes(module: Module, instruction: Instruction) -> Iterator[str]:
    """The scopes in the computations that an instruction calls, those of reductions too."""
    for name in instruction.called:
        for inner in module.computations[name].instructions.values():
            yield inner.op_name
            yield from _called_scopes(module, inner)


def device_groups(module: Module, collective: Instruction) -> Groups:
    """Which devices a collective joins, by their positions on the mesh.

    Args:
      module: The module.
      collective: A collective; of a permutation devices are joined that pass something on to one
        another.

    Returns:
      The groups.

    Raises:
      ValueError: They are written in a form that is not known here.
    """
    if pairs := collective.attribute("source_target_pairs"):
        return _connected(re.findall(r"(\d+),(\d+)", pairs.partition("}}")[0]))
    groups = collective.attribute("replica_groups")
    if groups.startswith("{}"):
        return (tuple(range(module.num_devices)),)
    if groups.startswith("{{"):  # {{0,1},{2,3}}
        listed = re.findall(r"\{([\d,]+)\}", groups[1 : groups.index("}}") + 1])
        return tuple(tuple(map(int, group.split(","))) for group in listed)
    iota = re.match(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", groups)
    if iota:  # [2,4]<=[4,2]T(1,0): the numbers of a [4, 2] array, transposed, in two rows of four
        sizes = tuple(map(int, iota[3].split(",")))
        order = tuple(map(int, iota[4].split(","))) if iota[4] else tuple(range(len(sizes)))
        ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(order)
        return tuple(map(tuple, ids.reshape(int(iota[1]), int(iota[2])).tolist()))
    mesh = re.match(r"mesh\[([^\]]*)\] \{([^}]*)\}", groups)
    if mesh:
        return _groups_on_mesh(mesh[1], mesh[2])
    raise ValueError(
        f"device_groups: {collective.opcode} {collective.name} has replica_groups={groups[:60]!r}, "
        "expected {{0,1}}, [1,2]<=[2] or mesh['a'=2] {'a'}. Teach manualpar/planner/hlo.py more."
    )


def _groups_on_mesh(sizes: str, axes: str) -> Groups:
    """The groups along axes, `'a'`, of a mesh, `'a'=4,'b'=2`; `'a':(2)2` is the inner half."""
    dims: list[int] = []
    joined: list[int] = []
    wanted = {name: (pre, part) for name, pre, part in _AXIS.findall(axes)}
    for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", sizes):
        pre, part = (int(text or 0) for text in wanted.get(name, ("", "")))
        outer, inner = (pre, part) if part else (1, int(size))
        joined += [len(dims) + 1] if name in wanted else []
        dims += [outer, inner, int(size) // (outer * inner)]
    rest = [dim for dim in range(len(dims)) if dim not in joined]
    ids = np.arange(math.prod(dims)).reshape(dims).transpose(rest + joined)
    return tuple(map(tuple, ids.reshape(-1, math.prod(dims[dim] for dim in joined)).tolist()))


def _connected(pairs: list[tuple[str, str]]) -> Groups:
    """The sets of devices that pairs connect."""
    joined: dict[int, frozenset[int]] = {}
    for source, target in ((int(a), int(b)) for a, b in pairs):
        both = joined.get(source, frozenset({source})) | joined.get(target, frozenset({target}))
        joined |= dict.fromkeys(both, both)
    return tuple(tuple(sorted(group)) for group in dict.fromkeys(joined.values()))


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which groups of devices lie.

    Args:
      groups: The groups, see `device_groups`.
      mesh: The sizes of the axes.

    Returns:
      The fewest axes whose devices contain the groups; none if a group is of one device.
    """
    largest = max(groups, key=len, default=())
    if len(largest) < 2:
        return ()
    axes = [axis for axis, size in mesh.items() if size > 1]
    ids = np.arange(math.prod(mesh.values())).reshape([mesh[axis] for axis in axes])
    for count in range(1, len(axes) + 1):
        for chosen in itertools.combinations(axes, count):
            whole = tuple(
                slice(None) if axis in chosen else int(place)
                for axis, place in zip(axes, np.argwhere(ids == largest[0])[0], strict=True)
            )
            if set(largest) <= set(ids[whole].ravel().tolist()):
                return chosen
    return ()
