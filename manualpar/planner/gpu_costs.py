"""Times the instructions of a program that XLA compiled for GPUs.

XLA's compiler for GPUs writes its estimate next to most instructions (`reification_cost`). For a
matrix product this estimate is of no use: without a GPU XLA cannot try tiles, and it prices default
tiles that no run would use (2.0 ms for a product of 69 GFLOP on H100, which takes 0.1 ms). So a
product takes the time of its operations, or of its bytes if this is longer, at the shares of the
chip's peaks that products reach (`manualpar.planner.hardware`). An instruction without an estimate
takes the time of its bytes. All instructions of a chip take this time if XLA has no rates of the
chip's units (`GpuTarget.has_costs`). A call to cuDNN's attention counts as a kernel.
"""

import math
import re
from collections.abc import Callable, Iterator

from manualpar.inspect.flops import CUDNN_PRODUCTS
from manualpar.inspect.hlo import HloModule, Instruction, Instructions, array_bytes, arrays
from manualpar.planner.compiled_timeline import FREE_OPCODES, Cycles
from manualpar.planner.gpu_targets import GPU_TARGETS
from manualpar.planner.hardware import Chip
from manualpar.planner.kernels import kernel_efficiency

CLOCK = 1e9  # Cycles per second: a cycle is a nanosecond.
_ESTIMATE = re.compile(
    r'\{"end_to_end_cycles":[\d.e+-]+,"exec_time_us":([\d.e+-]+),[^{}]*"name":""\}'
)
_CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul")
_CUDNN = {
    "__cudnn$fmhaScaleBiasSoftmax": "dot_product_attention_fwd_wrapper",
    "__cudnn$fmhaSoftmax": "dot_product_attention_fwd_wrapper",
    "__cudnn$fmhaScaleBiasSoftmaxBackward": "dot_product_attention_bwd_wrapper",
    "__cudnn$fmhaSoftmaxBackward": "dot_product_attention_bwd_wrapper",
}
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
# Opcodes that read a part of their first operand.
_SLICES = frozenset({"dynamic-slice", "gather", "slice"})


def gpu_cycles(chip: Chip) -> Cycles:
    """Builds a function that returns the nanoseconds of an instruction, without kernels."""

    def cycles(
        module: HloModule, computation: Instructions, instruction: Instruction
    ) -> int | None:
        if instruction.opcode in FREE_OPCODES or instruction.opcode.endswith("-done"):
            return None
        products = list(_products(module, computation, instruction))
        passing = _traffic(module, computation, instruction) / _bandwidth(chip)
        if products:
            computing = sum(flops / _flops_rate(chip, dtype) for flops, dtype in products)
            return round(max(computing, passing) * CLOCK)
        if estimate := instruction.found(_ESTIMATE.pattern):
            return round(float(estimate) * CLOCK / 1e6)
        return None if instruction.opcode == "custom-call" else round(passing * CLOCK)

    return cycles


def cudnn_seconds(chip: Chip) -> Callable[[Instruction, Instructions], float | None]:
    """Builds a function that returns the seconds of a call to cuDNN's attention, else `None`."""

    def seconds(instruction: Instruction, computation: Instructions) -> float | None:
        if instruction.target not in _CUDNN:
            return None
        sizes = instruction.found(r'"intermediate_tensor_shape":.*?"dimensions": ?\[([^]]*)\]')
        examples, heads, queries, keys = map(int, re.findall(r"\d+", sizes))
        dtype, query = arrays(computation[instruction.operands[0]].shape)[0]
        features = math.prod(query) // (examples * heads * queries)
        pairs = queries * keys
        if "CAUSAL" in instruction.found(r'"mask_type": ?"(\w+)"'):
            pairs //= 2
        if window := int(instruction.found(r'"sliding_window_length": ?(\d+)') or 0):
            pairs = min(pairs, queries * window)
        products = CUDNN_PRODUCTS[_CUDNN[instruction.target]]
        flops = products * 2 * examples * heads * features * pairs
        return max(
            flops / (chip.peak(_DTYPES[dtype]) * kernel_efficiency(chip)),
            _whole_traffic(computation, instruction) / _bandwidth(chip),
        )

    return seconds


def of_gpus(chip: Chip) -> Iterator[str]:
    """Yields the assumptions of these times, and what a compiler without a GPU cannot see."""
    rest = (
        f"Everything else takes the time that XLA estimates from its description of {chip.name} "
        "(openxla/xla, xla/backends/gpu/target_config/specs)"
    )
    if not GPU_TARGETS[chip.name].has_costs:
        rest = (
            f"XLA has no rates of the units of {chip.name}, so it estimates no times; everything "
            "else takes the time to read and write its bytes"
        )
    yield (
        f"Matrix products take the time of their operations at {chip.flops_efficiency:.0%} of the "
        f"peak, or of their bytes at {chip.hbm_efficiency:.0%} of the memory's bandwidth. XLA's "
        "estimates are not used for them, because without a GPU XLA prices tiles that no run would "
        f"use. {rest}."
    )
    yield (
        "A compiler without a GPU does not see: autotuning, which may put a product of cuBLAS, "
        "with a workspace in memory, in the place of a fusion; the buffers of NCCL and of the "
        "driver, for which 2 GiB are set aside; how much collectives slow down products when both "
        "need the GPU's multiprocessors; the time to launch kernels."
    )


def _bandwidth(chip: Chip) -> float:
    return chip.hbm_bandwidth * chip.hbm_efficiency


def _flops_rate(chip: Chip, dtype: str) -> float:
    """Returns the FLOP/s of products; dtypes without a known peak count as bfloat16."""
    known = _DTYPES.get(dtype, dtype)
    return chip.peak(known if known in chip.flops else "bfloat16") * chip.flops_efficiency


def _products(
    module: HloModule, computation: Instructions, instruction: Instruction
) -> Iterator[tuple[int, str]]:
    """Yields operations and dtype of each matrix product in an instruction."""
    contracted = ""
    if instruction.opcode == "dot":
        contracted = instruction.found(r"lhs_contracting_dims=\{([\d,]*)\}")
    elif instruction.target in _CUBLAS:
        contracted = instruction.found(r'"lhs_contracting_dimensions": ?\[([^]]*)\]')
    else:
        for name in instruction.called:
            inside = module.computations[name]
            for inner in inside.values():
                yield from _products(module, inside, inner)
        return
    dtype, left = arrays(computation[instruction.operands[0]].shape)[0]
    result = math.prod(arrays(instruction.shape)[0][1])
    inner_size = math.prod(left[int(dim)] for dim in re.findall(r"\d+", contracted))
    yield 2 * result * inner_size, dtype


def _traffic(module: HloModule, computation: Instructions, instruction: Instruction) -> int:
    """Counts the bytes that an instruction reads and writes; a slice counts as much as it reads."""
    if instruction.opcode in _SLICES:
        return 2 * _bytes(instruction.shape)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _bytes(computation[instruction.operands[1]].shape)
    if instruction.opcode != "fusion":
        return _whole_traffic(computation, instruction)
    inside = module.computations[instruction.called[0]]
    written = sum(_written(inside, x) for x in inside.values() if x.is_root)
    return written + sum(_read(inside, x) for x in inside.values() if x.opcode == "parameter")


def _whole_traffic(computation: Instructions, instruction: Instruction) -> int:
    operands = sum(_bytes(computation[x].shape) for x in instruction.operands if x in computation)
    return operands + _bytes(instruction.shape)


def _written(inside: Instructions, root: Instruction) -> int:
    """Counts the bytes that the root of a fusion writes; an update in place writes its part."""
    if root.opcode == "tuple":
        return sum(_written(inside, inside[name]) for name in root.operands)
    if root.opcode == "bitcast":
        return _written(inside, inside[root.operands[0]])
    return _bytes((inside[root.operands[1]] if _updates(root) else root).shape)


def _read(inside: Instructions, parameter: Instruction) -> int:
    """Counts the bytes that a fusion reads of a parameter."""
    sizes = []
    for reader in inside.values():
        if parameter.name not in reader.operands:
            continue
        if reader.opcode == "bitcast":
            sizes.append(_read(inside, reader))
        elif reader.operands[0] == parameter.name and reader.opcode in _SLICES:
            sizes.append(_bytes(reader.shape))
        elif reader.operands[0] == parameter.name and _updates(reader):
            sizes.append(0)
        else:
            return _bytes(parameter.shape)
    return min(sum(sizes), _bytes(parameter.shape))


def _updates(instruction: Instruction) -> bool:
    return instruction.opcode == "dynamic-update-slice"


def _bytes(shape: str) -> int:
    return sum(array_bytes(*array) for array in arrays(shape))
