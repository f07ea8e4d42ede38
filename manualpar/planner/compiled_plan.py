"""Estimates a step that XLA has compiled for TPUs or GPUs.

The schedule, its collectives and the memory on a chip are read from the compiled program. The time
is an estimate: the compiler estimates the cycles of compute (for GPUs, see
`manualpar.planner.compiled_plan`), and the time of a collective follows from the bandwidth of the
links.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from manualpar.core.mesh.mesh import in_order
from manualpar.core.summary import Summarized
from manualpar.inspect.communication import Collective, summed
from manualpar.inspect.compiled import (
    CompiledCollective,
    Groups,
    HloModule,
    Instruction,
    Instructions,
    array_bytes,
    arrays,
    permuted_pairs,
)
from manualpar.inspect.flops import CUDNN_PRODUCTS, is_narrow
from manualpar.inspect.scope_parsing import compiled_scopes, module_of, phase_of
from manualpar.inspect.throughput import Throughput
from manualpar.planner.compiled_timeline import (
    ALL_LINKS,
    FREE_OPCODES,
    SLICES,
    Cycles,
    SendModel,
    Timeline,
    WireSeconds,
    on_all_links,
    read_timeline,
)
from manualpar.planner.gpu_targets import GPU_TARGETS
from manualpar.planner.hardware import (
    CUDNN,
    TARGETS,
    TRITON_SHARE,
    Chip,
    Kernel,
    cudnn_kernel_seconds,
    kernel_clock,
    kernel_efficiency,
)
from manualpar.planner.plan import StepEstimate
from manualpar.planner.timed_collectives import (
    TimedCollective,
    network_of,
    planned_collectives,
)
from manualpar.planner.topology import Ring, Topology, is_closed, ring_over

NUM_NOTED, NUM_NOTED_HIDDEN = 5, 3
Key = TypeVar("Key")
MODEL = "Transformer"  # Flax begins every scope with the model's name.


@dataclasses.dataclass(frozen=True, repr=False)
class CompiledStep(Summarized):
    """A training step as XLA has compiled it for a topology.

    `facts` is the result of `manualpar.plans.compiler_worker`: name, mesh, sizes, and versions.
    If the step fits, `facts["memory"]` has the bytes on a chip by `arguments`, `outputs`, `aliased`
    (outputs in the place of arguments), `temporaries`, `code` and `peak`, and `text` is the
    program. Otherwise `facts["out_of_memory"]` is the compiler's message, and `text` is "".
    """

    topology: Topology
    options: Mapping[str, str | bool]
    facts: Mapping[str, Any]
    text: str


def plan_of(step: CompiledStep) -> StepEstimate:
    """Makes the `StepEstimate` of a compiled step: its memory and its time."""
    facts, topology, chip = step.facts, step.topology, step.topology.chip
    common: dict[str, Any] = {
        "name": facts["name"],
        "topology": topology.name,
        "num_devices": topology.num_devices,
        "mesh": in_order(facts["mesh"], facts["order"]),
        "is_model": False,
        "source": f"XLA's {'TPU' if chip.is_tpu else 'GPU'} compiler, {facts['compiler']}",
    }
    if "out_of_memory" in facts:
        message = read_out_of_memory(facts["out_of_memory"])
        hbm = message.available or chip.hbm_bytes
        needed = message.needed or hbm
        temporaries = max(0, needed - sum(facts["state"].values()))
        return StepEstimate(
            **common,
            hbm_bytes=hbm,
            memory={**facts["state"], "temporaries": temporaries},
            peak_bytes=needed,
            fits=False,
            notes=message.sentences,
        )
    timeline = schedule_of(step)
    memory = _memory(facts["memory"], facts["state"], holds_all_temporaries=not chip.is_tpu)
    peak_bytes = sum(memory.values())
    plan = StepEstimate(
        **common,
        hbm_bytes=chip.hbm_bytes,
        memory=memory,
        peak_bytes=peak_bytes,
        fits=chip.is_tpu or peak_bytes <= chip.hbm_bytes,
        collectives=planned_collectives(_on_networks(step, x) for x in timeline.collectives),
        compute_seconds=timeline.compute_seconds,
        exposed_seconds=timeline.exposed_seconds,
        overlapped_seconds=timeline.hidden_seconds,
        step_seconds=timeline.step_seconds,
        step_seconds_by_links=schedule_of(step, by_links=True).step_seconds
        if chip.is_tpu
        else None,
        assumptions=(*_assumptions(step), *_of_kernels(timeline, chip)),
        notes=tuple(_notes(timeline)),
    )
    return plan.with_rates(
        Throughput(
            examples_per_step=facts["examples_per_step"],
            tokens_per_example=facts["tokens_per_example"] or None,
            flops_per_example=facts["flops_per_example"],
            num_devices=topology.num_devices,
            peak=chip.flops.get(facts["dtype"]),
        )
    )


def schedule_of(step: CompiledStep, *, by_links: bool = False) -> Timeline:
    """Computes the timeline of a compiled step on the clock and the links of its topology.

    Args:
      step: The step; it must fit into the memory.
      by_links: Whether every link of a torus is a separate resource, see
        `manualpar.planner.compiled_plan`. If not, each collective uses all links.
    """
    topology, chip, facts = step.topology, step.topology.chip, step.facts

    def wire_seconds(collective: CompiledCollective) -> float:
        if collective.group_size < 2:
            return 0.0
        sent = float(collective.bytes_sent) / collective.times
        return _ring_of(step, collective).seconds(sent)

    def between_slices(transfer: CompiledCollective) -> float:
        network = topology.chip.network
        ring = Ring(network, network.bandwidth, inside=1, outside=transfer.group_size, steps=0)
        return ring.seconds(float(transfer.bytes_sent) / transfer.times)

    if not chip.is_tpu:
        return read_timeline(
            step.text,
            facts["mesh"],
            clock=CLOCK,
            wire=on_all_links(wire_seconds),
            kernel_seconds=_kernels_of_gpus((Kernel(*x) for x in facts["kernels"]), chip),
            cycles=gpu_cycles(chip),
        )
    return read_timeline(
        step.text,
        facts["mesh"],
        clock=chip.clock,
        wire=wire_by_links(topology, facts["places"], wire_seconds, apart=by_links),
        kernel_seconds=kernel_clock((Kernel(*x) for x in facts["kernels"]), chip),
        between_slices=between_slices,
    )


def _ring_of(step: CompiledStep, collective: Collective | CompiledCollective) -> Ring:
    mesh = step.facts["mesh"]
    axes = collective.axes or tuple(axis for axis, size in mesh.items() if size > 1)
    return ring_over(step.topology, in_order(mesh, step.facts["order"]), axes)


def _on_networks(step: CompiledStep, timed: TimedCollective) -> TimedCollective:
    """Adds the networks that a collective uses, and its bytes on the slow one."""
    sent = float(timed.collective.bytes_sent)
    if timed.network == SLICES:
        _, slow = step.topology.chip.network.names
        return dataclasses.replace(timed, network=slow, slow_bytes=sent)
    ring = _ring_of(step, timed.collective)
    return dataclasses.replace(
        timed, network=network_of(step.topology, ring), slow_bytes=ring.crossing_bytes(sent)
    )


def _memory(
    memory: Mapping[str, int], state: Mapping[str, int], *, holds_all_temporaries: bool
) -> dict[str, int]:
    """Returns the bytes on a chip at the peak, by class.

    The bytes of the state follow from the layout. The other classes come from the compiler, which
    pads arguments to complete tiles on TPUs. A program for GPUs holds the memory of its temporaries
    during the complete step.
    """
    outputs = memory["outputs"] - memory["aliased"]
    temporaries = max(0, memory["peak"] - memory["arguments"] - outputs)
    return {
        **state,
        "other arguments": memory["arguments"] - sum(state.values()),
        "outputs": outputs,
        "temporaries": memory["temporaries"] if holds_all_temporaries else temporaries,
    }


def purpose_and_module(timed: TimedCollective) -> tuple[str, str]:
    """Returns the purpose and the module of a collective, as far as its scope names them."""
    return timed.collective.purpose, _module(timed.collective.module)


def _module(path: str) -> str:
    return path.removeprefix(f"{MODEL}/")


def _assumptions(step: CompiledStep) -> tuple[str, ...]:
    chip, network = step.topology.chip, step.topology.chip.network
    options = ", ".join(f"{name}={value}" for name, value in step.options.items())
    why = step.facts["why_options"]
    slices = (
        f"Transfers between slices run over {network.names[1]}, also while collectives run within "
        f"a slice, at {network.efficiency:.0%} of {network.slow_bandwidth / 1e9:,.4g} GB/s a chip "
        f"and direction. A transfer takes {network.slow_latency * 1e6:.0f} µs more for each slice "
        "that it crosses.",
    )
    return (
        *(_of_tpus(chip) if chip.is_tpu else of_gpus(chip)),
        f"A collective sends its ring's bytes at {network.efficiency:.0%} of "
        f"{network.bandwidth / 1e9:,.4g} GB/s a {'link' if chip.is_tpu else 'device'} and "
        f"direction. It also takes {network.launch * 1e6:.0f} µs to start and "
        f"{network.latency * 1e6:.0f} µs a hop. Only one collective is sent at a time.",
        "An asynchronous collective runs at the same time as all compute between its start and the "
        "wait for its end, and neither slows the other down.",
        *(slices if step.topology.num_slices > 1 else ()),
        f"Compiled with {options or 'no options but the defaults'}{why and f' ({why})'}; the links "
        f"of the mesh axes: {step.facts['links'] or 'one node or one device'}."
        + (f" Layers: {layers}." if (layers := step.facts.get("layers")) else ""),
    )


def _of_tpus(chip: Chip) -> Iterator[str]:
    yield (
        f"Compute takes the cycles that the compiler estimates, at {chip.clock / 1e9:g} GHz "
        f"({chip.source}). The compiler estimates no cycles for collectives, nor for copies "
        "between HBM and the chip's own memory. These copies count as 0 seconds."
    )
    yield (
        "With each link by itself, a permutation occupies only the links on its way, first along "
        "x, then y, then z. Permutations on different links run at the same time. Any other "
        "collective takes as long as on all links, and occupies the links of the dimensions that "
        "its devices span."
    )


def _of_kernels(schedule: Timeline, chip: Chip) -> Iterator[str]:
    if schedule.kernels and not chip.is_tpu:
        listed = ", ".join(
            f"{kernel.times} x {kernel.name} {kernel.seconds / kernel.times * 1e3:.3g} ms"
            for kernel in schedule.kernels
        )
        yield (
            f"cuDNN's attention reaches {CUDNN.share:.0%} of the peak, and moves "
            f"{CUDNN.number_bytes:.0f} bytes for each number of the queries, as it did on an H200 "
            f"(benchmarks.measured_kernels). The kernel of triton is assumed to reach "
            f"{TRITON_SHARE:.0%}, and to compute all scores that a causal mask leaves; it has not "
            f"been timed. The kernels: {listed}."
        )
    elif schedule.kernels:
        listed = ", ".join(
            f"{kernel.times} x {kernel.name} {kernel.seconds / kernel.times * 1e3:.3g} ms"
            for kernel in schedule.kernels
        )
        yield (
            f"Kernels are assumed to reach {kernel_efficiency(chip):.1%} of the peak in all their "
            "operations, because the compiler estimates no cycles for them. This share is fitted "
            "to published speeds (manualpar.planner.hardware). A kernel takes at least the time to "
            f"read and write its bytes. The kernels: {listed}."
        )


def _longest(seconds: Mapping[Key, float], most: int) -> list[tuple[Key, float]]:
    """Returns the entries with the most seconds, without those with none."""
    some = [(key, value) for key, value in seconds.items() if value > 0]
    return sorted(some, key=lambda item: -item[1])[:most]


def _notes(schedule: Timeline) -> Iterator[str]:
    """Yields sentences about waits, hidden collectives, and missing estimates."""
    exposed = summed(
        ((x.collective.kind, *purpose_and_module(x)), x.seconds - x.hidden_seconds)
        for x in schedule.collectives
    )
    hidden = summed(
        ((x.collective.kind, *purpose_and_module(x), x.behind), x.hidden_seconds)
        for x in schedule.collectives
    )
    for (kind, purpose, module), seconds in _longest(exposed, NUM_NOTED):
        where = module or "no module"
        yield f"{seconds * 1e3:,.3g} ms of {kind} ({purpose}) of {where} are exposed."
    for (kind, purpose, module, behind), seconds in _longest(hidden, NUM_NOTED_HIDDEN):
        where, computing = module or "no module", _module(behind) or "no module"
        yield (
            f"{seconds * 1e3:,.3g} ms of {kind} ({purpose}) of {where} are hidden, mostly behind "
            f"{computing}."
        )
    if schedule.unestimated:
        listed = ", ".join(f"{runs} x {name}" for name, runs in schedule.unestimated.items())
        yield f"The compiler has no estimate for these instructions; they count as 0: {listed}."
    if schedule.num_carried:
        yield (
            f"{schedule.num_carried} collectives start in one iteration of a loop and are waited "
            "for in the next. The estimate waits for them in the iteration in which they start."
        )


# -------------------------------------------------------------------------------------------------
# Times the instructions of a program that XLA compiled for GPUs.
#
# XLA's compiler for GPUs writes its estimate next to most instructions (`reification_cost`). For a
# matrix product this estimate is of no use: without a GPU XLA cannot try tiles, and it prices
# default tiles that no run would use (2.0 ms for a product of 69 GFLOP on H100, which takes 0.1
# ms). So a product takes the time of its operations, or of its bytes if this is longer, at the
# shares of the chip's peaks that products reach (`manualpar.planner.hardware`). An instruction
# without an estimate takes the time of its bytes. So does a fusion of normalizations or a softmax
# whose estimate no arithmetic explains: XLA priced the backward pass of a LayerNorm of 512 rows of
# 256 numbers, which Equinox maps over rows with `vmap`, at 3.3 s. All instructions of a chip take
# the time of their bytes if XLA has no rates of the chip's units (`GpuTarget.has_costs`). A call to
# cuDNN's attention counts as a kernel.


CLOCK = 1e9  # Cycles per second: a cycle is a nanosecond.
_ESTIMATE = re.compile(
    r'\{"end_to_end_cycles":[\d.e+-]+,"exec_time_us":([\d.e+-]+),[^{}]*"name":""\}'
)
_CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
_CUDNN = {
    "__cudnn$fmhaScaleBiasSoftmax": "dot_product_attention_fwd_wrapper",
    "__cudnn$fmhaSoftmax": "dot_product_attention_fwd_wrapper",
    "__cudnn$fmhaScaleBiasSoftmaxBackward": "dot_product_attention_bwd_wrapper",
    "__cudnn$fmhaSoftmaxBackward": "dot_product_attention_bwd_wrapper",
}
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "s8": "int8"}
# From this multiple of the time of its bytes on, and from this time on, an estimate is not used.
UNLIKELY, LONG = 100.0, 1e-4
# Opcodes that read a part of their first operand.
_SLICES = frozenset({"dynamic-slice", "gather", "slice"})


def gpu_cycles(chip: Chip) -> Cycles:
    """Builds a function that returns the nanoseconds of an instruction, without kernels."""

    def cycles(
        module: HloModule, computation: Instructions, instruction: Instruction
    ) -> int | None:
        is_free = instruction.opcode in FREE_OPCODES or instruction.opcode.endswith("-done")
        if is_free or instruction.target in TARGETS:  # XLA cannot estimate a kernel of Pallas.
            return None
        products = list(_products(module, computation, instruction))
        passing = _traffic(module, computation, instruction) / _bandwidth(chip)
        if products:
            computing = sum(flops / _flops_rate(chip, dtype) for flops, dtype in products)
            return round(max(computing, passing) * CLOCK)
        if estimate := instruction.found(_ESTIMATE.pattern):
            seconds = float(estimate) / 1e6
            is_unlikely = "kind=kCustom" in instruction.attributes and (
                seconds > max(UNLIKELY * passing, LONG)
            )
            return round((passing if is_unlikely else seconds) * CLOCK)
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
        scores = examples * heads * pairs
        if window := int(instruction.found(r'"sliding_window_length": ?(\d+)') or 0):
            pairs = min(pairs, queries * window)
        return cudnn_kernel_seconds(
            chip,
            _DTYPES[dtype],
            products=CUDNN_PRODUCTS[_CUDNN[instruction.target]],
            numbers=examples * heads * queries * features,
            pairs=pairs / queries,
            masked=scores if "Bias" in instruction.target else 0,
        )

    return seconds


def _kernels_of_gpus(
    kernels: Iterable[Kernel], chip: Chip
) -> Callable[[Instruction, Instructions], float | None]:
    """Builds a function that returns the seconds of a kernel of cuDNN or of Pallas."""
    of_cudnn, of_pallas = cudnn_seconds(chip), kernel_clock(kernels, chip)

    def seconds(instruction: Instruction, computation: Instructions) -> float | None:
        found = of_cudnn(instruction, computation)
        return of_pallas(instruction, computation) if found is None else found

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
    known = "float8" if dtype.startswith("f8") else _DTYPES.get(dtype, dtype)
    is_known = known in chip.flops or is_narrow(known)
    return chip.product_rate(known if is_known else "bfloat16")


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
        return 2 * _hlo_bytes(instruction.shape)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _hlo_bytes(computation[instruction.operands[1]].shape)
    # Since JAX 0.12 XLA copies the slices of a loop's stacks asynchronously, in a `fusion-start`.
    if instruction.opcode not in ("fusion", "fusion-start"):
        return _whole_traffic(computation, instruction)
    inside = module.computations[instruction.called[0]]
    written = sum(_written(inside, x) for x in inside.values() if x.is_root)
    return written + sum(_read(inside, x) for x in inside.values() if x.opcode == "parameter")


def _whole_traffic(computation: Instructions, instruction: Instruction) -> int:
    operands = sum(
        _hlo_bytes(computation[x].shape) for x in instruction.operands if x in computation
    )
    return operands + _hlo_bytes(instruction.shape)


def _written(inside: Instructions, root: Instruction) -> int:
    """Counts the bytes that the root of a fusion writes; an update in place writes its part."""
    if root.opcode == "tuple":
        return sum(_written(inside, inside[name]) for name in root.operands)
    if root.opcode == "bitcast":
        return _written(inside, inside[root.operands[0]])
    return _hlo_bytes((inside[root.operands[1]] if _updates(root) else root).shape)


def _read(inside: Instructions, parameter: Instruction) -> int:
    """Counts the bytes that a fusion reads of a parameter."""
    sizes = []
    for reader in inside.values():
        if parameter.name not in reader.operands:
            continue
        if reader.opcode == "bitcast":
            sizes.append(_read(inside, reader))
        elif reader.operands[0] == parameter.name and reader.opcode in _SLICES:
            sizes.append(_hlo_bytes(reader.shape))
        elif reader.operands[0] == parameter.name and _updates(reader):
            sizes.append(0)
        else:
            return _hlo_bytes(parameter.shape)
    return min(sum(sizes), _hlo_bytes(parameter.shape))


def _updates(instruction: Instruction) -> bool:
    return instruction.opcode == "dynamic-update-slice"


def _hlo_bytes(shape: str) -> int:
    return sum(array_bytes(*array) for array in arrays(shape))


# -------------------------------------------------------------------------------------------------
# Models every directed link of a torus as a separate resource.
#
# In a permutation, each source sends its data to its target, first along x, then y, then z. In a
# dimension that is closed to a ring, the data go the shorter way around. All links on this way
# carry the data. The permutation takes as long as the link that carries the most bytes, and starts
# when all of its links are free. So permutations in opposite directions run at the same time, and
# a permutation between devices that are not neighbours occupies several links. An all-to-all is a
# permutation of all pairs of its devices. Any other collective takes as long as if it used all
# links, but occupies only the links along the dimensions that its devices span. A collective that
# crosses slices occupies all links.


TorusPlace = tuple[int, ...]  # The slice of a device, then its coordinates in the torus.
Link = tuple[TorusPlace, int, int]  # From a place along a dimension, in a direction: 1 or -1.


def wire_by_links(
    topology: Topology,
    places: Sequence[Sequence[int]],
    wire_seconds: WireSeconds,
    *,
    apart: bool = True,
) -> SendModel:
    """Builds a function that returns which links a collective occupies, and for how long.

    Args:
      places: The slice and the coordinates of each device, in the order of the program.
      apart: Whether each link is a separate resource. If not, every collective occupies all links,
        and a permutation takes `wire_seconds`.
    """
    network, devices = topology.chip.network, [tuple(place) for place in places]
    bandwidth = network.bandwidth * network.efficiency * topology.chip.devices_per_chip
    sizes = [max(at) + 1 for at in zip(*devices, strict=True)]
    closed = [is_closed(topology, size) for size in sizes]

    def links_along(dims: set[int]) -> frozenset[Link]:
        return frozenset((at, dim, step) for at in devices for dim in dims for step in (1, -1))

    @functools.cache
    def load(pairs: tuple[tuple[int, int], ...]) -> tuple[Counter[Link], int]:
        """Counts the pairs whose data each link carries, and the links of the longest way."""
        ways = [list(_way(devices[a], devices[b], sizes, closed)) for a, b in pairs]
        return Counter(link for way in ways for link in way), max(map(len, ways), default=0)

    def wire(
        collective: CompiledCollective, instruction: Instruction, groups: Groups
    ) -> tuple[Collection[Link], float]:
        is_crossing = any(len({devices[i][0] for i in group}) > 1 for group in groups)
        if is_crossing:
            return links_along(set(range(1, len(sizes)))), wire_seconds(collective)
        if collective.kind == "all_to_all":
            loads, hops = load(_all_pairs(groups))
            each = collective.operand_bytes / max(map(len, groups), default=1)
        elif collective.kind == "permute" and apart:
            loads, hops = load(tuple(permuted_pairs(instruction)))
            each = collective.operand_bytes
        else:
            return links_along(_dims_spanned(devices, groups)), wire_seconds(collective)
        sent = max(loads.values(), default=0) * each
        return loads, network.launch + hops * network.latency + sent / bandwidth

    def wire_of_all(*sent: Any) -> tuple[Collection[str], float]:
        return (ALL_LINKS,), wire(*sent)[1]

    return wire if apart else wire_of_all


def _all_pairs(groups: Iterable[Iterable[int]]) -> tuple[tuple[int, int], ...]:
    return tuple(pair for group in groups for pair in itertools.permutations(group, 2))


def _dims_spanned(devices: Sequence[TorusPlace], groups: Groups) -> set[int]:
    """Returns the dimensions in which the devices of some group differ."""
    along = [zip(*(devices[i] for i in group), strict=True) for group in groups]
    return {dim for places in along for dim, at in enumerate(places) if len(set(at)) > 1}


def _way(
    source: TorusPlace, target: TorusPlace, sizes: Sequence[int], closed: Sequence[bool]
) -> Iterator[Link]:
    """Yields the links from a device to another device of its slice, dimension by dimension."""
    at = list(source)
    for dim in range(1, len(sizes)):
        ahead = (target[dim] - at[dim]) % sizes[dim]
        is_ahead = target[dim] > at[dim]
        if closed[dim]:
            is_ahead = ahead <= sizes[dim] / 2
        step = 1 if is_ahead else -1
        while at[dim] != target[dim]:
            yield (tuple(at), dim, step)
            at[dim] = (at[dim] + step) % sizes[dim]


# -------------------------------------------------------------------------------------------------
# Reads the TPU compiler's message about a program that does not fit into HBM.
#
# The message has one of two forms. If the compiler has placed all buffers and they exceed HBM, the
# message lists the largest buffers with their origins. If the compiler finds earlier that no
# placement will fit, the message gives only the needed and the available bytes.


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
NUM_NAMED = 5  # Buffers that the sentences name.
_SIZE = r"([\d.]+)([KMGTP]?)B?"
_PLACED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm. Exceeded hbm capacity by {_SIZE}\.")
_SEEN_BEFORE = re.compile(
    rf"total memory required[^(]*\({_SIZE}\) exceeds available HBM \({_SIZE}\)"
)
# A buffer is a paragraph: its size, then a line for each field, up to a line of `=====`.
_BUFFER = re.compile(rf"^\s*\d+\. Size: {_SIZE}[ \t]*$((?:\n(?!.*=====).*)*)", re.MULTILINE)


class OutOfMemory(NamedTuple):
    """The bytes that a program needs on a chip, and the available bytes; 0 if not known.

    `sentences` says how many bytes are missing, and names the largest buffers.
    """

    needed: int
    available: int
    sentences: tuple[str, ...]


def read_out_of_memory(message: str) -> OutOfMemory:
    """Parses the message of the compiler's `RESOURCE_EXHAUSTED`."""
    needed = available = over = 0
    if placed := _PLACED.search(message):
        needed, available, over = (_size_in_bytes(*placed.group(i, i + 1)) for i in (1, 3, 5))
    elif seen := _SEEN_BEFORE.search(message):
        needed, available = (_size_in_bytes(*seen.group(i, i + 1)) for i in (1, 3))
        over = max(0, needed - available)
    if not needed:
        words = " ".join(message.split())[:200]
        return OutOfMemory(needed, available, (f"Does not fit. The compiler reports: {words}",))
    is_small = over < 10 * UNITS["M"]
    missing = f"{over / UNITS['K']:.0f} KiB" if is_small else _gib(over)
    first = (
        f"Does not fit: a chip needs {_gib(needed)} and has {_gib(available)}, which is {missing} "
        "too little."
    )
    buffers = [
        (_size_in_bytes(*found.group(1, 2)), found[3]) for found in _BUFFER.finditer(message)
    ]
    buffers.sort(key=lambda buffer: -buffer[0])
    named = [_describe(size, fields) for size, fields in buffers[:NUM_NAMED]]
    no_buffers = "The compiler stopped before it placed buffers, so it names none of them."
    return OutOfMemory(needed, available, (first, *(named or [no_buffers])))


def _describe(size: int, paragraph: str) -> str:
    """Describes a buffer: its bytes, its shape, and the module and operation that made it."""
    lines = (line.strip().partition(": ") for line in paragraph.splitlines())
    fields = {name: value for name, _, value in lines}
    label = fields.get("XLA label", "")
    described = f"{_gib(size)} are {fields.get('Shape', '').partition('{')[0] or label}"
    op_name = re.search(r'op_name="([^"]+)"', fields.get("Operator", ""))
    if not op_name:
        return f"{described} ({label.partition(' = ')[0]})."
    scope, primitive = compiled_scopes(op_name[1])[0], op_name[1].rpartition("/")[2]
    module = module_of(scope, root="Transformer") or "no module"
    return f"{described} of {module} ({phase_of(scope)}: {primitive})."


def _size_in_bytes(number: str, unit: str) -> int:
    return round(float(number) * UNITS[unit])


def _gib(size: int) -> str:
    return f"{size / UNITS['G']:.2f} GiB"
