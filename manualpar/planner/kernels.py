"""Times Mosaic kernels, for which XLA's compiler for TPUs estimates no cycles.

The traced program gives the number of operations in one run of a kernel
(`manualpar.inspect.flops`), and the compiled program gives the number of runs. A kernel is
identified in both programs by its name, the shapes of its operands, and the number of blocks of
attention scores that it computes. A kernel reaches a share of the chip's peak, unless reading and
writing its bytes takes longer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr

from manualpar.core.tracing.attention_blocks import (
    PRODUCTS_COMPUTED,
    PRODUCTS_COUNTED,
    blocks_computed,
)
from manualpar.core.tracing.jaxprs import inner_jaxprs
from manualpar.inspect.flops import flops_of, product_dtype
from manualpar.inspect.hlo import Instruction, Instructions, array_bytes, arrays
from manualpar.planner.hardware import Chip

TARGET = "tpu_custom_call"


class Kernel(NamedTuple):
    """A kernel of a traced program.

    Attributes:
      shapes: The shapes of the kernel's operands on one device.
      blocks: The number of blocks of attention scores that the kernel computes; `None` if the scope
        does not give this number.
      flops: The number of operations in one run.
      dtype: The dtype in which the kernel multiplies.
    """

    name: str
    shapes: Sequence[Sequence[int]]
    blocks: int | None
    flops: int
    dtype: str

    @property
    def key(self) -> tuple[Any, ...]:
        """The properties that identify the compiled instruction of the kernel."""
        return self.name, tuple(map(tuple, self.shapes)), self.blocks


def kernels_in(jaxpr: Jaxpr, scope: str = "") -> Iterator[Kernel]:
    """Yields the kernels of a traced program, except those with an unknown number of operations."""
    for eqn in jaxpr.eqns:
        inside = f"{scope}/{eqn.source_info.name_stack}"
        if eqn.primitive.name != "pallas_call":
            for _, inner in inner_jaxprs(eqn):
                yield from kernels_in(inner, inside)
        elif flops := flops_of(eqn, inside):
            operands: Any = [x.aval for x in eqn.invars]
            shapes = [operand.shape for operand in operands]
            name, blocks = eqn.params["name"], blocks_computed(inside)
            yield Kernel(name, shapes, blocks, flops, product_dtype(eqn))


def kernel_name(instruction: Instruction) -> str:
    """Returns the name of the kernel that an instruction runs."""
    return instruction.op_name.removesuffix("/pallas_call").rpartition("/")[2]


def kernel_efficiency(chip: Chip) -> float:
    """Returns the share of the peak that a kernel reaches, counting all its operations."""
    return min(1.0, chip.attention_efficiency * PRODUCTS_COMPUTED / PRODUCTS_COUNTED)


def kernel_clock(
    kernels: Iterable[Kernel], chip: Chip
) -> Callable[[Instruction, Instructions], float | None]:
    """Builds a function that returns the seconds of an instruction if it runs one of `kernels`."""
    kernels_by_key = {kernel.key: kernel for kernel in kernels}

    def seconds(instruction: Instruction, computation: Instructions) -> float | None:
        if instruction.target != TARGET:
            return None
        shapes_of_operands = (computation[name].shape for name in instruction.operands)
        operands = [array for shape in shapes_of_operands for array in arrays(shape)]
        shapes = tuple(shape for _, shape in operands)
        blocks = blocks_computed(instruction.op_name)
        kernel = kernels_by_key.get((kernel_name(instruction), shapes, blocks))
        if kernel is None:
            return None
        in_memory = sum(array_bytes(*x) for x in (*operands, *arrays(instruction.shape)))
        return max(
            kernel.flops / (chip.peak(kernel.dtype) * kernel_efficiency(chip)),
            in_memory / (chip.hbm_bandwidth * chip.hbm_efficiency),
        )

    return seconds
