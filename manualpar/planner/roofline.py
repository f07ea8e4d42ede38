"""Estimates the time of a step from its operations, its memory traffic and its collectives.

Let `C` be the seconds that a device computes, and `S` the seconds of its collectives. Each product
takes the longer of two times: its operations at the chip's peak, and its bytes at the memory's
bandwidth. A product reaches only a share of the peak and of the bandwidth; a fused attention kernel
reaches another share (`manualpar.planner.hardware`). Elementwise operations between products take
one more pass over the bytes that the products read and write. Each collective sends its bytes on a
ring over its mesh axes, which are placed on the topology (`manualpar.planner.topology`), and waits
for the latency of each hop.

Collectives inside the differentiated model, which gather parameters and scatter their gradients,
run while a neighbouring layer computes. The time `max(S - C, S of one layer)` is exposed in each
pass, forward and backward, because no layer hides the collectives of the first layer. Collectives
of activations, in tensor, sequence and expert parallelism, are exposed, because the next product
waits for them. The steps of a ring of permutations are hidden like gathers. So are, on GPUs, the
collectives of split layers that run two halves of a batch: one half computes while the other is
sent. Collectives outside the model are exposed: they reduce complete gradients, gather ZeRO's new
parameters, or sum metrics.

The stages of a pipeline take its ticks together, so a tick lasts as long as its slowest stage
(`manualpar.layers.pipeline.schedules.Table.tick_times`). In each part of a tick, such as the
forward pass of a chunk of layers, collectives are hidden as in a pass. Compute and collectives are
means over the stages, and the rest of the ticks' time is the *bubble*. At the end of a tick, stages
send activations and gradients to their neighbours; this *hop* is exposed.

(Williams et al., "Roofline", https://doi.org/10.1145/1498765.1498785; Austin et al., "How to scale
your model", https://jax-ml.github.io/scaling-book.)
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from manualpar.core.tracing.scopes import (
    HALVES,
    PIPELINE_SCOPE,
    PRODUCTS_COMPUTED,
    PRODUCTS_COUNTED,
    blocks_computed,
)
from manualpar.inspect.communication import grouped, summed
from manualpar.inspect.flops import ROWS, Product, is_narrow
from manualpar.inspect.scope_parsing import module_of
from manualpar.layers.pipeline.schedules import Costs
from manualpar.planner.hardware import (
    BLOCK_PASSES,
    CUDNN,
    ROUNDED_PASSES,
    STACK_PASSES,
    TRANSPOSED,
    TRANSPOSES_FLOAT8,
    Chip,
)
from manualpar.planner.plan import StepEstimate
from manualpar.planner.step_work import PipelineWork, StepWork
from manualpar.planner.timed_collectives import (
    Clock,
    Rings,
    TimedCollective,
    planned_collectives,
)
from manualpar.planner.topology import Topology, describe_axes

# The phases of each pass; their compute hides the pass's collectives.
PASSES = (("forward",), ("backward", "recomputed"))
MENDS = {
    "parameters": "Shard them (fsdp), store them in bfloat16, or use more devices.",
    "optimizer": "Shard it (zero1, fsdp) or use more devices.",
    "gradients": "Shard them (fsdp), or use communicate_every='minibatch'.",
    "gathered": "Use reshard_after_forward and scan_layers, or gather_dtype='bfloat16'.",
    "activations": "Use model.remat, more minibatches, or a smaller batch.",
}


def estimate(
    work: StepWork,
    topology: Topology,
    *,
    rings: Rings | None = None,
    brief: bool = False,
) -> StepEstimate:
    """Estimates a step on a topology.

    Args:
      work: The work of a step, on a mesh with as many devices as the topology.
      topology: The devices.
      rings: A cache of rings by the axes of the work's mesh, to which the function adds rings.
      brief: Whether to leave out the collectives, the assumptions and the notes.

    Raises:
      ValueError: The mesh does not fit into the topology, or no peak is known for the dtype.
    """
    chip = topology.chip
    if not chip.is_tpu:
        work = _measured_on_gpus(work, chip)
    clock = Clock(work, topology, {} if rings is None else rings)
    timed = clock.time(work.collectives)
    part_of = work.pipeline.parts.part_of if work.pipeline else lambda _: ""
    products = [x for x in work.products if not part_of(x.scope)]
    by_part = grouped((part_of(x.collective.scope), x) for x in timed)
    not_in_ticks = by_part.pop("", [])
    inside = [x for x in not_in_ticks if x.is_inside]
    in_passes = 0.0
    for phases in PASSES:
        compute = compute_seconds(products, chip, phases)
        _hide([x for x in inside if x.collective.phase in phases], compute)
        in_passes += compute
    flops_seconds = _flops_seconds(products, chip)
    update = work.update_traffic / (chip.hbm_bandwidth * chip.hbm_efficiency)
    update += compute_seconds(work.products, chip, ("update",))
    outer_steps = _time_outer_steps(work, clock)
    timed += outer_steps
    sent = sum(x.seconds for x in (*not_in_ticks, *outer_steps))
    overlapped = sum(x.hidden_seconds for x in not_in_ticks)
    bubble = None
    if work.pipeline:
        ticks = _in_ticks(work.pipeline, by_part, clock)
        in_passes, bubble = in_passes + ticks.computing, ticks.bubble
        sent, overlapped = sent + ticks.sent, overlapped + ticks.overlapped
        flops_seconds += ticks.flops_seconds
    computing = in_passes + update
    memory, peak_bytes = dataclasses.asdict(work.memory), work.memory.peak
    plan = StepEstimate(
        name=work.name,
        topology=topology.name,
        num_devices=topology.num_devices,
        mesh=work.mesh,
        is_model=True,
        source=work.source,
        hbm_bytes=chip.hbm_bytes,
        memory=memory,
        peak_bytes=peak_bytes,
        fits=peak_bytes <= chip.hbm_bytes,
        collectives=() if brief else planned_collectives(timed),
        compute_seconds=computing,
        hbm_seconds=computing - flops_seconds,
        exposed_seconds=sent - overlapped,
        overlapped_seconds=overlapped,
        bubble_seconds=bubble,
        step_seconds=computing + sent - overlapped + (bubble or 0.0),
    )
    if not brief:
        unhidden = computing + sent + (bubble or 0.0)
        plan = dataclasses.replace(
            plan,
            assumptions=_assumptions(work, topology, unhidden),
            notes=(*work.notes, *_notes(work, plan, timed, in_passes, chip)),
        )
    throughput = dataclasses.replace(
        work.throughput, num_devices=topology.num_devices, peak=chip.peak(work.dtype)
    )
    return plan.with_rates(throughput)


def _time_outer_steps(work: StepWork, clock: Clock) -> list[TimedCollective]:
    """Times the collectives of DiLoCo's outer steps, as the share that counts for one step."""
    share = 1 / work.every
    return [
        dataclasses.replace(
            x, seconds=x.seconds * share, slow_bytes=x.slow_bytes * share, share=share
        )
        for x in clock.time(work.outer_collectives)
    ]


class _InTicks(NamedTuple):
    """The seconds of a stage in all ticks, as a mean over the stages."""

    computing: float
    flops_seconds: float
    sent: float
    overlapped: float
    bubble: float


def _in_ticks(
    pipeline: PipelineWork, timed: Mapping[str, Sequence[TimedCollective]], clock: Clock
) -> _InTicks:
    """Times a stage's ticks; sets `hidden_seconds` of the collectives in `timed`, by part."""
    table, chip = pipeline.parts.table, clock.topology.chip
    costs: dict[str, float] = {}
    seconds = np.zeros(4)
    for part, of_part in pipeline.works.items():
        compute = compute_seconds(of_part.products, chip, (*PASSES[0], *PASSES[1]))
        collectives = clock.time(of_part.collectives)
        share = _hide([x for x in collectives if x.is_inside], compute, runs=of_part.runs)
        for x in timed.get(part, ()):
            if x.is_inside:
                x.hidden_seconds = share * x.seconds
        sent = sum(x.seconds for x in collectives)
        hidden = sum(x.hidden_seconds for x in collectives)
        costs[part] = (compute + sent - hidden) / of_part.runs
        runs_per_stage = table.is_run(ROWS[part]).sum() / table.num_stages / of_part.runs
        seconds += runs_per_stage * np.array(
            [compute, _flops_seconds(of_part.products, chip), sent, hidden]
        )
    # Work outside of all parts is no idle time, because all stages do it.
    all_costs: Any = {"forward": 0.0, "backward": 0.0} | costs
    of_ticks = table.tick_times(Costs(**all_costs)).sum()
    idle = of_ticks - table.busy(Costs(**all_costs)).sum() / table.num_stages
    return _InTicks(*map(float, (*seconds, idle)))


def _flops_seconds(products: Iterable[Product[float]], chip: Chip) -> float:
    """Returns the time of the products if they were compute-bound."""
    return sum(product.flops / _flops_rate(chip, product) for product in products)


def compute_seconds(
    products: Iterable[Product[float]],
    chip: Chip,
    phases: Iterable[str],
    *,
    block_passes: float = BLOCK_PASSES,
) -> float:
    """Returns the compute time of the products of some phases.

    A product takes the longer of two times: for its operations, and for its bytes. Attention in
    blocks of plain JAX moves its bytes `block_passes` times on GPUs, and so do roundings to narrow
    dtypes and transpositions of their results, each with its own number.
    """
    phases, hbm = set(phases), chip.hbm_bandwidth * chip.hbm_efficiency
    total = 0.0
    for product in products:
        if product.phase in phases:
            passing = product.traffic / hbm * _passes(product, chip, block_passes)
            total += max(product.flops / _flops_rate(chip, product), passing)
            # Adds the elementwise operations around a product; around a reduction there are none.
            total += passing if product.flops else 0.0
    return total


def _passes(product: Product[float], chip: Chip, block_passes: float) -> float:
    """Returns how often the bytes of a product, a reduction or a change of an operand are moved."""
    if product.change == "transposed":
        transposes = chip.compute_capability in TRANSPOSES_FLOAT8
        return chip.hbm_bandwidth * chip.hbm_efficiency / TRANSPOSED if transposes else 0.0
    if chip.is_tpu:
        return 1.0
    if product.change == "rounded":
        return ROUNDED_PASSES
    return block_passes if _is_in_blocks(product) else 1.0


def _is_in_blocks(product: Product[float]) -> bool:
    """Returns whether a product belongs to attention in blocks of plain JAX."""
    return not product.is_fused and blocks_computed(product.scope) is not None


def _measured_on_gpus(work: StepWork, chip: Chip) -> StepWork:
    """Replaces attention kernels, and adds the stacks of loops over layers, as they were timed.

    The products of a kernel get no traffic, and as many operations as take the time that cuDNN's
    kernel takes.
    """
    fused = [product for product in work.products if product.is_fused]
    flops = sum(product.flops for product in fused)
    products = [product for product in work.products if not product.is_fused]
    if work.attention and flops:
        numbers, calls = work.attention
        seconds = numbers * CUDNN.number_bytes / chip.hbm_bandwidth + calls * CUDNN.start
        for product in fused:
            rate = _flops_rate(chip, product)
            share = product.flops / flops
            computing = product.flops * PRODUCTS_COMPUTED / PRODUCTS_COUNTED
            took = computing / (rate / chip.attention_efficiency * CUDNN.share) + share * seconds
            products.append(product._replace(flops=took * rate, traffic=0.0))
    else:
        products += fused
    if work.stacked:
        moved = STACK_PASSES * work.stacked / 2
        products += [Product(pass_, 0.0, moved, work.dtype) for pass_ in ("jvp", "transpose")]
    return dataclasses.replace(work, products=tuple(products))


def _flops_rate(chip: Chip, product: Product[float]) -> float:
    """Returns the FLOP/s that a product reaches; products of wide integers count as float32."""
    is_known = product.dtype in chip.flops or "float" in product.dtype or is_narrow(product.dtype)
    dtype = product.dtype if is_known else "float32"
    if product.is_fused:
        return chip.peak(dtype) * chip.attention_efficiency
    return chip.product_rate(dtype)


def _hide(inside: Sequence[TimedCollective], compute: float, *, runs: int = 1) -> float:
    """Hides the collectives of a pass behind compute, and returns the share that is hidden.

    `inside` are the collectives of `runs` runs of the pass, and `compute` is the seconds of compute
    in all runs. In each run, the collectives of one layer stay exposed.
    """
    total = sum(x.seconds for x in inside)
    layers = summed((x.layer, x.seconds / x.collective.times) for x in inside)
    exposed = max(total - compute, runs * max(layers.values(), default=0.0))
    share = max(total - exposed, 0.0) / total if total else 0.0
    for x in inside:
        x.hidden_seconds = share * x.seconds
    return share


def _assumptions(work: StepWork, topology: Topology, unhidden: float) -> tuple[str, ...]:
    chip, network = topology.chip, topology.chip.network
    fast, slow = network.names
    permutes = (x for x in work.collectives if x.kind == "permute")
    has_ring = any(x.purpose != PIPELINE_SCOPE for x in permutes)
    ring = ", and permutations," if has_ring else ""
    has_halves = any(not set(HALVES).isdisjoint(x.scope.split("/")) for x in work.collectives)
    ring += ", and what a half of a batch sends," if has_halves and not chip.is_tpu else ""
    return (
        f"Products reach {chip.flops_efficiency:.0%} of {chip.peak(work.dtype) / 1e12:,.1f} "
        f"TFLOP/s in {work.dtype}{_of_kernels(work, chip)}, memory {chip.hbm_efficiency:.0%} of "
        f"{chip.hbm_bandwidth / 1e9:,.0f} GB/s; elementwise operations pass once over what "
        "products read and write.",
        f"Collectives run on rings at {network.efficiency:.0%} of {fast} "
        f"{network.bandwidth / 1e9:,.4g} GB/s "
        f"{'a link' if network.kind == 'torus' else 'a device'} and {slow} "
        f"{network.slow_bandwidth / 1e9:,.4g} GB/s a device, one direction, one after another; "
        f"each starts in {network.launch * 1e6:.0f} µs and waits {network.latency * 1e6:.0f} µs a "
        f"hop, {network.slow_latency * 1e6:.0f} µs between hosts.",
        f"Gathers of parameters and scattering of their gradients{ring} run behind a neighbouring "
        "layer, everything else is exposed; if nothing overlapped a step would take "
        f"{unhidden:.4g} s.",
        *_of_narrow(work, chip),
        *_of_pipeline(work),
        *_of_outer_steps(work),
        f"Mesh axes, those on the slowest links first: {describe_axes(topology, work.mesh)}.",
        f"{chip.hbm_bytes / 2**30:.2f} GiB of a device's memory can be used.",
    )


def _all_products(work: StepWork) -> tuple[Product[float], ...]:
    parts = work.pipeline.works.values() if work.pipeline else ()
    return (*work.products, *(product for part in parts for product in part.products))


def _of_narrow(work: StepWork, chip: Chip) -> Iterator[str]:
    """Says how fast products in narrow dtypes are, and what makes their operands."""
    dtypes = sorted({x.dtype for x in _all_products(work) if x.flops and is_narrow(x.dtype)})
    rates = ", ".join(
        f"{chip.product_rate(dtype) / 1e12:,.0f} TFLOP/s in {dtype}"
        + ("" if chip.multiplies_in(dtype) else f" (as bfloat16: {chip.name} has no such products)")
        for dtype in dtypes
    )
    if not rates:
        return
    moved = chip.hbm_bandwidth * chip.hbm_efficiency / 1e12
    if not chip.is_tpu:
        moved /= ROUNDED_PASSES
    sentence = f"Products reach {rates}. Operands are rounded at {moved:.2g} TB/s"
    if chip.compute_capability in TRANSPOSES_FLOAT8:
        sentence += f", and weights in float8 transposed at {TRANSPOSED / 1e12:.2g} TB/s"
    yield f"{sentence}."


def _of_kernels(work: StepWork, chip: Chip) -> str:
    if not any(product.is_fused for product in _all_products(work)):
        return ""
    if work.attention and not chip.is_tpu:
        return f", cuDNN's attention {CUDNN.share:.0%} and {CUDNN.number_bytes:.0f} bytes a number"
    return f", a kernel of attention {chip.attention_efficiency:.0%}"


def _of_pipeline(work: StepWork) -> Iterator[str]:
    if work.pipeline:
        table = work.pipeline.parts.table
        yield (
            f"All {table.num_stages} stages run the same {table.num_ticks} ticks. A tick lasts as "
            "long as its slowest stage, and a hop to the neighbouring stages follows it. Computing "
            "and sending are means over the stages."
        )


def _of_outer_steps(work: StepWork) -> Iterator[str]:
    if work.outer_collectives:
        yield (
            f"An outer step follows every {work.every} steps. The estimate of a step includes its "
            "share of the outer step's collectives, and no compute hides them."
        )


def _notes(
    work: StepWork,
    plan: StepEstimate,
    timed: Sequence[TimedCollective],
    computing: float,
    chip: Chip,
) -> Iterator[str]:
    if not plan.fits:
        largest = max(plan.memory, key=lambda name: plan.memory[name])
        mend = MENDS.get(largest, "Use more devices or a smaller batch.")
        yield (
            f"Does not fit: {-plan.spare_bytes / 2**30:.2f} GiB a device too much. The largest "
            f"part is {largest}, {plan.memory[largest] / 2**30:.2f} GiB. {mend}"
        )
    yield from _slower_layers(work, chip)
    inside = sum(x.seconds for x in timed if x.is_inside)
    if computing and inside > computing:
        tokens = work.throughput.tokens_per_example
        per_device = work.throughput.examples_per_step * (tokens or 1) // plan.num_devices
        yield (
            f"Communication-bound: gathering and scattering take {_ms(inside)}, and computing "
            f"takes {_ms(computing)}, with {per_device:,} {'tokens' if tokens else 'examples'} a "
            f"device and step. With about {per_device * inside / computing:,.0f}, both would take "
            "equally long. A larger batch, fewer minibatches, a narrower gather_dtype, hsdp, or "
            "fewer devices would help."
        )
    awaited = sum(x.seconds for x in timed if x.is_awaited)
    if awaited > 0.2 * (plan.step_seconds or 1):
        yield (
            f"Split layers wait {_ms(awaited)} of a step for activations. Fewer devices along the "
            "axis that splits layers, faster links for this axis, or a ring of permutations would "
            "help."
        )
    hops = sum(x.seconds for x in timed if x.is_hop)
    bubble = plan.bubble_seconds
    if bubble is not None and bubble + hops > 0.2 * (plan.step_seconds or 1):
        yield (
            f"Stages wait {_ms(bubble)} of a step for each other, and "
            f"{_ms(hops)} for activations and gradients from their neighbours. More minibatches, "
            "fewer stages, or more chunks of layers on a stage would help."
        )
    reductions = (x for x in timed if not (x.is_inside or x.is_awaited or x.is_hop))
    outside = sum(x.seconds for x in reductions)
    if outside > 0.2 * (plan.step_seconds or 1) and outside > 0.5 * (plan.exposed_seconds or 0.0):
        yield (
            f"Reductions after the backward pass take {_ms(outside)} of a step, and no compute "
            "hides them."
        )
    if any(x.is_doubled for x in timed):
        yield (
            "Reduce-scatters over an axis that fills a torus count twice, because XLA for TPU "
            "turns them into all-reduces. To avoid this, use hsdp, or a mesh of two axes, data and "
            "data_minor, with config.parallel.axis_by_axis."
        )


def _slower_layers(work: StepWork, chip: Chip) -> Iterator[str]:
    """Names the layers that narrow dtypes make slower, with what makes the operands."""
    narrow: dict[str, float] = {}
    wide: dict[str, float] = {}
    for product in _all_products(work):
        module = module_of(product.scope)
        if is_narrow(product.dtype):
            took = compute_seconds([product], chip, [product.phase])
            narrow[module] = narrow.get(module, 0.0) + took
            if product.flops:
                as_wide = product._replace(dtype="bfloat16")
                took = compute_seconds([as_wide], chip, [product.phase])
                wide[module] = wide.get(module, 0.0) + took
    slower = [name for name, took in wide.items() if narrow[name] > took]
    if slower:
        shown = ", ".join(f"{name} ({narrow[name] / wide[name]:.2f})" for name in slower)
        yield (
            f"These layers take longer than with products in bfloat16, in parentheses how many "
            f"times as long: {shown}. Their products are small, and rounding or transposing "
            "operands takes more than the products save."
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"
