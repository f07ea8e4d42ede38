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
from typing import Any

import jax

from manualpar.inspect.communication import (
    Kind,
    as_number,
    count_by_kind,
    ring_bytes,
    total_bytes,
)
from manualpar.inspect.hlo import (
    Computation,
    Instruction,
    Module,
    array_bytes,
    arrays,
    parse_module,
    trip_count,
)

KIND_OF_OPCODE: Mapping[str, Kind] = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
}

# They send what cannot be told from the text, or by no formula known here.
UNKNOWN_OPCODES = frozenset({"collective-broadcast", "ragged-all-to-all", "send"})

# How XLA:TPU writes a reduce-scatter, and the start of a collective that is fused with compute.
SCATTER_FUSION = "all-reduce-scatter"
ASYNC_START = 'custom_call_target="AsyncCollectiveStart"'


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
        operand_bytes = sum(map(array_bytes, self.dtypes, self.shapes))
        return self.times * ring_bytes(self.kind, operand_bytes, self.group_size)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What XLA has made of a program, all figures a device's.

    Attributes:
      collectives: What it sends.
      arguments: The bytes of its arguments.
      outputs: The bytes of its results.
      aliased: Those of the results that lie where arguments were, for the arguments are donated.
      temporaries: The bytes of all else that it holds at once.
      peak: Arguments, results that are not aliased, and temporaries together.
      flops: The floating point operations by XLA's own count, elementwise ones too, in which the
        body of a loop counts once; `None` where the backend does not count.
    """

    collectives: tuple[CompiledCollective, ...]
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    flops: int | None

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and names."""
        return {
            "bytes": as_number(total_bytes(self.collectives)),
            "counts": count_by_kind(self.collectives),
            "collectives": [
                {
                    "kind": one.kind,
                    "group_size": one.group_size,
                    "shapes": [list(shape) for shape in one.shapes],
                    "dtypes": list(one.dtypes),
                    "times": one.times,
                    "bytes": as_number(one.bytes_sent),
                    "scope": one.scope,
                }
                for one in self.collectives
            ],
            "arguments": self.arguments,
            "outputs": self.outputs,
            "aliased": self.aliased,
            "temporaries": self.temporaries,
            "peak": self.peak,
            "flops": self.flops,
        }


def read_compiled(compiled: jax.stages.Compiled) -> Compiled:
    """Reads what XLA has made of a program: what it sends, and what it holds.

    Args:
      compiled: What `jax.jit(f).lower(*args).compile()` returns.

    Returns:
      The figures of one device.

    Raises:
      ValueError: See `compiled_collectives`; or the backend does not say what a program holds.
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
        collectives=compiled_collectives(compiled),
        arguments=arguments,
        outputs=outputs,
        aliased=aliased,
        temporaries=temporaries,
        peak=arguments + outputs - aliased + temporaries,
        flops=int(costs["flops"]) if "flops" in costs else None,
    )


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
    module = parse_module(text or "")
    return tuple(_of_computation(module, module.entry, 1))


def _of_computation(module: Module, name: str, times: int) -> Iterator[CompiledCollective]:
    """The collectives of a computation that runs so many times, with those it calls."""
    computation = module.computations[name]
    for instruction in computation.values():
        opcode = instruction.opcode.removesuffix("-start")
        called = instruction.called
        if opcode in KIND_OF_OPCODE:
            if not _is_part(computation, instruction):
                operands = [computation[operand].shape for operand in instruction.operands]
                yield _read(module, instruction, operands, times)
        elif opcode in UNKNOWN_OPCODES and "is_host_transfer=true" not in instruction.attributes:
            raise ValueError(
                f"compiled_collectives: the program contains {opcode} (scope: "
                f"{instruction.op_name or 'none'}), expected one of {', '.join(KIND_OF_OPCODE)}: "
                "what others send is not known here. Write the program with those."
            )
        elif opcode == "while":
            yield from _of_loop(module, computation, instruction, times)
        elif opcode == "conditional":
            branches = [tuple(_of_computation(module, branch, times)) for branch in called]
            yield from max(branches, key=total_bytes)
        elif opcode == "fusion" and called[0].startswith(SCATTER_FUSION):
            for found in _of_computation(module, called[0], times):
                is_sum = found.kind == "all_reduce"
                yield dataclasses.replace(found, kind="reduce_scatter") if is_sum else found
        elif not opcode.endswith(("-update", "-done")):  # The start has called it already.
            for other in called:
                yield from _of_computation(module, other, times)


def _is_part(computation: Computation, instruction: Instruction) -> bool:
    """Whether an instruction stands for a collective that runs while others compute, again.

    XLA:TPU starts such a collective in one fusion, carries it on in others and ends it in a last
    one, each of which has a copy of the instruction with the number of the same chain.
    """
    return "chain_id=" in instruction.attributes and not any(
        ASYNC_START in other.attributes for other in computation.values()
    )


def _of_loop(
    module: Module, computation: Computation, loop: Instruction, times: int
) -> Iterator[CompiledCollective]:
    """The collectives of a `while`, whose condition runs once more than its body."""
    condition, body = loop.loop
    trips = trip_count(module, computation, loop)
    if trips is not None:
        yield from _of_computation(module, body, times * trips)
        yield from _of_computation(module, condition, times * (trips + 1))
        return
    inside = [found for name in loop.loop for found in _of_computation(module, name, times)]
    if inside:
        raise ValueError(
            f"compiled_collectives: a while (scope: {loop.op_name or 'none'}) contains "
            f"{inside[0].kind}, and XLA has written no trip count to it. Write the loop as a "
            "jax.lax.scan, or a fori_loop whose bounds are Python integers, or take the collective "
            "out of it."
        )


def _read(
    module: Module, instruction: Instruction, operands: list[str], times: int
) -> CompiledCollective:
    """An instruction that is a collective of operands of these shapes."""
    kind = KIND_OF_OPCODE[instruction.opcode.removesuffix("-start")]
    size = _num_passing(instruction) if kind == "permute" else _group_size(module, instruction)
    found = [array for operand in operands for array in arrays(operand)]
    dtypes, shapes = zip(*found, strict=True)
    return CompiledCollective(kind, size, shapes, dtypes, times, instruction.op_name)


def _group_size(module: Module, instruction: Instruction) -> int:
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


def _num_passing(permute: Instruction) -> int:
    """How many devices the longest chain or ring of a permutation has."""
    pairs = _attribute(permute, "source_target_pairs").partition(", ")[0]
    connected: dict[str, frozenset[str]] = {}
    for source, target in re.findall(r"(\d+),(\d+)", pairs):
        both = connected.get(source, {source}) | connected.get(target, {target})
        connected |= dict.fromkeys(both, frozenset(both))
    return max(map(len, connected.values()), default=1)


def _attribute(instruction: Instruction, name: str) -> str:
    """The attributes of an instruction from the value of one that it must have."""
    found = re.search(rf"\b{name}=(.*)", instruction.attributes)
    if not found:
        raise ValueError(
            f"compiled_collectives: {instruction.opcode} has no {name}, expected it in "
            f"{instruction.attributes!r}. Teach manualpar/inspect/compiled.py the form."
        )
    return found[1]
