"""What a compiled program sends and holds, read from its optimised HLO.

Where XLA decides what is sent, as in a plain `jax.jit` over sharded arrays, no jaxpr contains the
collectives: they appear when the program is compiled. XLA also changes those that are written out:
it merges several into one with several operands, moves others out of loops, and drops those whose
result nobody uses. So this module reads what runs, and `manualpar.inspect.communication` reads what
was written. Both count bytes in the same way.

The text is specific to the backend. XLA:CPU turns collectives of bfloat16 into float32, so on the
CPU read the dtype on the wire from the traced program. A GPU splits a collective into a start and a
done, which count as one. Kernels that send by themselves, and callbacks on the host, are not seen.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import jax

from manualpar.inspect.communication import Kind, as_number, count_by_kind, ring_bytes, total_bytes
from manualpar.inspect.hlo import (
    HloModule,
    Instruction,
    Instructions,
    array_bytes,
    arrays,
    device_groups,
    parse_module,
    trip_count,
)
from manualpar.inspect.provenance import compiled_scopes, module_of, purpose_in

KIND_OF_OPCODE: Mapping[str, Kind] = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
}

# The text does not say how much these send, or there is no formula for it here.
UNKNOWN_OPCODES = frozenset({"collective-broadcast", "ragged-all-to-all", "recv", "send"})

# The beginning of the name of a fusion that is XLA:TPU's reduce-scatter: an all-reduce and a slice.
SCATTER_FUSION = "all-reduce-scatter"
# The custom call that starts a collective which XLA:TPU has fused with compute.
FUSED_START = "AsyncCollectiveStart"


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """A collective of a compiled program.

    Attributes:
      group_size: The number of devices in its largest group; of a permutation the devices that pass
        something on to one another.
      shapes: The shape of each operand on one device.
      dtypes: The dtype of each operand, as HLO writes it: `"f32"`, `"bf16"`, `"pred"`.
      times: How often a step runs it.
      scope: The name stack of the operation that it was made from, "" where XLA has kept none.
    """

    kind: Kind
    group_size: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    times: int
    scope: str

    @property
    def operand_bytes(self) -> int:
        """The bytes of all operands on one device, with XLA's padding."""
        return sum(map(array_bytes, self.dtypes, self.shapes))

    @property
    def bytes_sent(self) -> Fraction:
        """The bytes that a device sends for it in a step, all operands together."""
        return self.times * ring_bytes(self.kind, self.operand_bytes, self.group_size)

    def names(self, root: str) -> list[tuple[str, str]]:
        """Purpose and module of each operation that it was made from, in a model named `root`."""
        scopes = compiled_scopes(self.scope) if self.scope else ()
        return [(purpose_in(scope, ()), module_of(scope, root)) for scope in scopes]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and names."""
        return {
            "kind": self.kind,
            "group_size": self.group_size,
            "shapes": [list(shape) for shape in self.shapes],
            "dtypes": list(self.dtypes),
            "times": self.times,
            "bytes": as_number(self.bytes_sent),
            "scope": self.scope,
        }


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What XLA has made of a program: what a device sends, and the bytes that it holds.

    Attributes:
      aliased: The bytes of the results that reuse the memory of donated arguments.
      temporaries: The bytes of everything else that it holds at once.
      peak: Arguments, results that are not aliased, and temporaries together.
      flops: XLA's count of floating point operations, which includes elementwise ones and counts
        the body of a loop once; `None` where the backend does not count.
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
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            "bytes": as_number(total_bytes(self.collectives)),
            "counts": count_by_kind(self.collectives),
            **plain,
            "collectives": [one.to_json() for one in self.collectives],
        }


def read_compiled(compiled: jax.stages.Compiled) -> Compiled:
    """Reads what a device sends and holds in what `jax.jit(f).lower(*args).compile()` returns.

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
      once, `times` the loop's trip count. Of the branches of a conditional, only the one that sends
      the most bytes is listed, the first of equals.

    Raises:
      ValueError: A loop with a collective has no known trip count; a collective's bytes or groups
        are not known here; or the text is not optimised HLO.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    module = parse_module(text or "")
    return tuple(_of_computation(module, module.entry, 1))


def _of_computation(module: HloModule, name: str, times: int) -> Iterator[CompiledCollective]:
    """The collectives of a computation that runs so many times, and of those that it calls."""
    computation = module.computations[name]
    for instruction in computation.values():
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in KIND_OF_OPCODE:
            if not _is_part(computation, instruction):
                yield read_collective(module, computation, instruction, times)
        elif opcode in UNKNOWN_OPCODES and "is_host_transfer=true" not in instruction.attributes:
            refuse_unknown("compiled_collectives", instruction)
        elif opcode == "while":
            yield from _of_loop(module, computation, instruction, times)
        elif opcode == "conditional":
            branches = [tuple(_of_computation(module, x, times)) for x in instruction.called]
            yield from max(branches, key=total_bytes)
        elif not opcode.endswith(("-update", "-done")):  # Their start has called it already.
            for called in instruction.called:
                for found in _of_computation(module, called, times):
                    yield as_scatter(found) if called.startswith(SCATTER_FUSION) else found


def _is_part(computation: Instructions, instruction: Instruction) -> bool:
    """Whether an instruction repeats a collective that was started elsewhere.

    XLA:TPU starts a collective in one fusion, carries it on in others, and ends it in a last one.
    Each of them has a copy of the instruction, with the number of the same chain.
    """
    return "chain_id=" in instruction.attributes and not any(
        other.target == FUSED_START for other in computation.values()
    )


def _of_loop(
    module: HloModule, computation: Instructions, loop: Instruction, times: int
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


def read_collective(
    module: HloModule, computation: Instructions, instruction: Instruction, times: int
) -> CompiledCollective:
    """Reads one collective of a computation that runs so many times."""
    kind = KIND_OF_OPCODE[instruction.opcode.removesuffix("-start")]
    size = max(map(len, device_groups(module, instruction)), default=1)
    found = [array for name in instruction.operands for array in arrays(computation[name].shape)]
    dtypes, shapes = zip(*found, strict=True)
    return CompiledCollective(kind, size, shapes, dtypes, times, instruction.op_name)


def as_scatter(found: CompiledCollective) -> CompiledCollective:
    """A collective inside a `SCATTER_FUSION`: an all-reduce there is a reduce-scatter."""
    is_sum = found.kind == "all_reduce"
    return dataclasses.replace(found, kind="reduce_scatter") if is_sum else found


def refuse_unknown(reader: str, instruction: Instruction) -> None:
    """Raises a `ValueError` that says that nobody knows how much an instruction sends."""
    raise ValueError(
        f"{reader}: the program contains {instruction.opcode} (scope: "
        f"{instruction.op_name or 'none'}), expected one of {', '.join(KIND_OF_OPCODE)}: what "
        "others send is not known here. Write the program with those."
    )
