"""What a compiled program sends, read from its optimised HLO.

Where XLA decides what is sent, as in a plain `jax.jit` over sharded arrays, the collectives stand
in no jaxpr: they appear when the program is compiled. So do the changes XLA makes to those that are
written out: it merges some into one with several operands, moves others out of loops, and drops
what nobody uses. This is therefore what runs, and `manualpar.inspect.communication` what was meant.
Bytes are counted as there.

The text is the only public form of a compiled program, and its backend's own: XLA:CPU turns
collectives of bfloat16 into float32, so on the CPU the dtype on the wire is to be read from the
traced program; a GPU splits collectives into a start and a done, which are one. Kernels that send
by themselves, and what a callback does on the host, are not seen.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

import jax

from manualpar.inspect.communication import Kind, ring_bytes, total_bytes

KIND_OF_OPCODE: Mapping[str, Kind] = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
}

# They send what cannot be told from the text, or by no formula known here.
UNKNOWN_OPCODES = frozenset({"collective-broadcast", "ragged-all-to-all", "send"})


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """A collective of a compiled program.

    Attributes:
      kind: Which one.
      group_size: How many devices take part in each of its groups, in the largest if they differ;
        of a permutation those that pass something on to one another.
      shapes: The shape of each operand on one device.
      dtypes: The dtype of each operand, as HLO writes it: `"f32"`, `"bf16"`, `"pred"`.
      times: How often a step runs it.
      scope: The name stack of what it was made from, "" where XLA has kept none.
    """

    kind: Kind
    group_size: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    times: int
    scope: str

    @property
    def bytes_sent(self) -> Fraction:
        """The bytes that a device sends for it in a step, all operands together."""
        operand_bytes = sum(map(_array_bytes, self.dtypes, self.shapes))
        return self.times * ring_bytes(self.kind, operand_bytes, self.group_size)


def compiled_collectives(compiled: jax.stages.Compiled | str) -> tuple[CompiledCollective, ...]:
    """Lists what a compiled program sends.

    Args:
      compiled: What `jax.jit(f).lower(*args).compile()` returns, or its `as_text()`.

    Returns:
      A `CompiledCollective` for each one, in the order of the program. One in a loop is listed
      once, `times` the loop's trip count. Of a conditional that branch is listed that sends the
      most bytes, the first of equals.

    Raises:
      ValueError: A loop with a collective has no known trip count; a collective's bytes or groups
        are not known here; or the text is not optimised HLO.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    module = _parse(text or "")
    return tuple(_of_computation(module, module.entry, 1))


# name = shape opcode(operands), attributes. A tuple's shape has spaces, none of them before a word
# and a parenthesis.
_INSTRUCTION = r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(([^)]*)\)(.*)"


class _Instruction(NamedTuple):
    """What a line of HLO says, but for its name."""

    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str


class _Module(NamedTuple):
    """Instructions by their name, by the name of their computation."""

    computations: Mapping[str, Mapping[str, _Instruction]]
    entry: str
    num_devices: int


def _of_computation(module: _Module, name: str, times: int) -> Iterator[CompiledCollective]:
    """The collectives of a computation that runs so many times, with those it calls."""
    computation = module.computations[name]
    for instruction in computation.values():
        opcode = instruction.opcode.removesuffix("-start")
        called = _called(instruction)
        if opcode in KIND_OF_OPCODE:
            operands = [computation[operand].shape for operand in instruction.operands]
            yield _read(module, instruction, operands, times)
        elif opcode in UNKNOWN_OPCODES and "is_host_transfer=true" not in instruction.attributes:
            raise ValueError(
                f"compiled_collectives: the program contains {opcode} (scope: "
                f"{_scope(instruction) or 'none'}), expected one of {', '.join(KIND_OF_OPCODE)}: "
                "what others send is not known here. Write the program with those."
            )
        elif opcode == "while":
            yield from _of_loop(module, instruction, times)
        elif opcode == "conditional":
            branches = [tuple(_of_computation(module, branch, times)) for branch in called]
            yield from max(branches, key=total_bytes)
        elif not opcode.endswith(("-update", "-done")):  # The start has called it already.
            for other in called:
                yield from _of_computation(module, other, times)


def _of_loop(module: _Module, loop: _Instruction, times: int) -> Iterator[CompiledCollective]:
    """The collectives of a `while`, whose condition runs once more than its body."""
    run = dict(re.findall(r"\b(body|condition)=%?([\w.\-]+)", loop.attributes))
    trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if trips:
        yield from _of_computation(module, run["body"], times * int(trips[1]))
        yield from _of_computation(module, run["condition"], times * (int(trips[1]) + 1))
        return
    inside = [found for name in run.values() for found in _of_computation(module, name, times)]
    if inside:
        raise ValueError(
            f"compiled_collectives: a while (scope: {_scope(loop) or 'none'}) contains "
            f"{inside[0].kind}, and XLA has written no trip count to it. Write the loop as a "
            "jax.lax.scan, or a fori_loop whose bounds are Python integers, or take the collective "
            "out of it."
        )


def _read(
    module: _Module, instruction: _Instruction, operands: list[str], times: int
) -> CompiledCollective:
    """An instruction that is a collective of operands of these shapes."""
    kind = KIND_OF_OPCODE[instruction.opcode.removesuffix("-start")]
    size = _num_passing(instruction) if kind == "permute" else _group_size(module, instruction)
    arrays = [array for operand in operands for array in _arrays(operand)]
    dtypes, shapes = zip(*arrays, strict=True)
    return CompiledCollective(kind, size, shapes, dtypes, times, _scope(instruction))


def _group_size(module: _Module, instruction: _Instruction) -> int:
    """How many devices a collective's largest group has, in each form that XLA writes groups in."""
    groups = _attribute(instruction, "replica_groups")
    if groups.startswith("{}"):
        return module.num_devices
    if groups.startswith("{{"):  # {{0,1},{2,3}}
        listed = groups[1 : groups.index("}}") + 1]
        return max(len(group.split(",")) for group in re.findall(r"\{([\d,]+)\}", listed))
    if iota := re.match(r"\[\d+,(\d+)\]<=", groups):  # [2,4]<=[4,2]T(1,0): two groups of four
        return int(iota[1])
    if mesh := re.match(r"mesh\[([^\]]*)\][^{]*\{([^}]*)\}", groups):
        # mesh['a'=4,'b'=2] {'a'}, or, for a part of an axis, {'a':(1)2}: 2 of its 4.
        sizes = dict(re.findall(r"'?([^',=]+)'?=(\d+)", mesh[1]))
        axes = re.findall(r"'?([^',:]+)'?(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    raise ValueError(
        f"compiled_collectives: {instruction.opcode} has replica_groups={groups[:60]}, expected "
        "{{0,1}}, [1,2]<=[2] or mesh['a'=2] {'a'}. Teach manualpar/inspect/compiled.py the form."
    )


def _num_passing(permute: _Instruction) -> int:
    """How many devices the longest chain or ring of a permutation has."""
    pairs = _attribute(permute, "source_target_pairs").partition(", ")[0]
    connected: dict[str, frozenset[str]] = {}
    for source, target in re.findall(r"(\d+),(\d+)", pairs):
        both = connected.get(source, {source}) | connected.get(target, {target})
        connected |= dict.fromkeys(both, frozenset(both))
    return max(map(len, connected.values()), default=1)


def _parse(text: str) -> _Module:
    """Reads a module: computations begin in the first column and instructions further in."""
    computations: dict[str, dict[str, _Instruction]] = {}
    entries, current = [], ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            current = header[2]
            computations[current] = {}
            entries += [current] if header[1] else []
        elif current and (parts := re.match(_INSTRUCTION, line)):
            name, shape, opcode, operands, attributes = parts.groups()
            names = re.findall(r"[\w.\-]+", re.sub(r"/\*.*?\*/", "", operands))
            computations[current][name] = _Instruction(shape, opcode, tuple(names), attributes)
    if len(entries) != 1:
        raise ValueError(
            f"compiled_collectives: the text has {len(entries)} ENTRY computations, expected the "
            "one of optimised HLO. Pass jax.jit(f).lower(*args).compile(), which a Lowered is not "
            "yet."
        )
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.splitlines()[0])
    return _Module(computations, entries[0], math.prod(map(int, counts)))


def _called(instruction: _Instruction) -> list[str]:
    """The computations that an instruction runs, but for a loop's."""
    one = r"\b(?:to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
    several = r"\b(?:branch_computations|called_computations)=\{([^}]*)\}"
    listed = ",".join(re.findall(several, instruction.attributes))
    return re.findall(one, instruction.attributes) + re.findall(r"[\w.\-]+", listed)


def _arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """The dtypes and shapes of the arrays in a shape, `f32[8,16]{1,0}` or a tuple of such."""
    found = re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", shape)
    return [(dtype, tuple(map(int, re.findall(r"\d+", dims)))) for dtype, dims in found]


def _array_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """The bytes of an array: HLO's dtypes carry their bits in their names, but for `pred`."""
    bits = re.match(r"[a-z]+(\d+)", dtype.replace("pred", "pred8"))
    return -(-math.prod(shape) * int(bits[1]) // 8) if bits else 0


def _attribute(instruction: _Instruction, name: str) -> str:
    """The attributes of an instruction from the value of one that it must have."""
    found = re.search(rf"\b{name}=(.*)", instruction.attributes)
    if not found:
        raise ValueError(
            f"compiled_collectives: {instruction.opcode} has no {name}, expected it in "
            f"{instruction.attributes!r}. Teach manualpar/inspect/compiled.py the form."
        )
    return found[1]


def _scope(instruction: _Instruction) -> str:
    """The name stack that an instruction comes from, as far as XLA knows it."""
    found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.attributes)
    return found[1] if found else ""
