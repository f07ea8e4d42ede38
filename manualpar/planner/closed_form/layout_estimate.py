"""Estimates a step on a layout that has not been traced: the roofline's model, in closed form.

Products, memory, rings and the overlap of communication with compute are modelled as in
`manualpar.planner.roofline`. For a layout that can be traced, the roofline gives nearly the same
time. The closed form adds:

- With `S` stages of `v` chunks and `M` microbatches the layers of a device wait for `(S - 1) / (v
  M)` of their own time. The ticks of all stages have the same length, so all stages spend the time
  of the loss, which the last stage computes. Activations and gradients are sent to the next stage
  after each tick, and nothing hides these hops.
- Along `context` keys and values are sent around a ring: in `C - 1` steps forward and `C - 1` steps
  backward, and their gradients in `C` steps. Attention hides these steps. Remat keeps the output of
  attention.
- The bytes of a quantized number are its bytes in a long row. Quantizing and dequantizing take no
  time, and save no memory.
"""

import dataclasses
import functools
from collections.abc import Iterable

from manualpar.core.parameters.block_quantization import ROW_BLOCK, quantized_bytes
from manualpar.inspect.communication import Kind, ring_bytes
from manualpar.inspect.memory import Memory
from manualpar.models import Transformer
from manualpar.models.transformer_fields import flops_per_token
from manualpar.planner.closed_form.layout import (
    AnyCode,
    DeviceSizes,
    Layout,
    check_closed_form,
    find_obstacle,
    sizes_on_device,
)
from manualpar.planner.closed_form.layout_work import (
    HALF,
    SINGLE,
    STATE,
    Product,
    head_products,
    layer_products,
    state_elements,
    step_memory_of,
)
from manualpar.planner.hardware import Chip
from manualpar.planner.roofline import is_made_an_all_reduce
from manualpar.planner.topology import Ring, Topology, ring_over


@dataclasses.dataclass(frozen=True)
class LayoutEstimate:
    """A step on a layout, in seconds and bytes per device.

    Attributes:
      computing: The time of products and memory, with the update and recomputations.
      parameters: The exposed time to send parameters and gradients.
      activations: The exposed time to send activations of layers.
      hops: The time of hops between stages.
      bubble: The time in which a stage waits for other stages.
      mfu: Model FLOPs divided by the peak FLOPs of the devices.
    """

    layout: Layout
    topology: str
    memory: Memory
    hbm_bytes: int
    computing: float
    parameters: float
    activations: float
    hops: float
    bubble: float
    mfu: float
    tokens_per_second: float

    @property
    def seconds(self) -> float:
        """The estimated step time."""
        return self.computing + self.parameters + self.activations + self.hops + self.bubble

    @property
    def fits(self) -> bool:
        """Whether the step fits into a device's memory."""
        return self.memory.peak <= self.hbm_bytes


def estimate_layout(
    model: Transformer,
    layout: Layout,
    topology: Topology,
    *,
    examples: int,
    positions: int,
    even: bool = True,
    rings: dict[tuple[str, ...], Ring] | None = None,
) -> LayoutEstimate:
    """Estimates a step.

    Args:
      model: The model on one device, computed in bfloat16 and stored in float32.
      layout: The layout, with as many devices as the topology.
      topology: The devices.
      examples: Examples of a step on all devices.
      positions: Positions of each example.
      even: Whether all stages must have equally many layers; otherwise the fullest stage counts.
      rings: Known rings over axes of the layout's mesh; new ones are added.

    Raises:
      ValueError: Model or batch do not divide, or the mesh does not fit into the topology.
    """
    check_closed_form(model)
    if problem := find_obstacle(model, layout, examples=examples, positions=positions, even=even):
        raise ValueError(f"{layout.name}: {problem}.")
    x = sizes_on_device(model, layout, examples=examples, positions=positions)
    step = _Step(model, layout, topology, x, {} if rings is None else rings)
    return step.estimate(examples * positions)


@functools.cache
def _operands(kind: Kind, devices: int) -> float:
    """Returns how many of its operands a device sends, see `ring_bytes`."""
    return float(ring_bytes(kind, 1, devices))


def _number_bytes(code: AnyCode, exact: int) -> float:
    """Returns the bytes of a number sent in a long row; `exact` if it is not quantized."""
    return quantized_bytes(ROW_BLOCK, code) / ROW_BLOCK if code else exact


class _Step:
    """Times the parts of a step on a device, in seconds."""

    def __init__(
        self,
        model: Transformer,
        layout: Layout,
        topology: Topology,
        x: DeviceSizes,
        rings: dict[tuple[str, ...], Ring],
    ) -> None:
        self.model, self.layout, self.topology, self.x = model, layout, topology, x
        self.chip: Chip = topology.chip
        peak = self.chip.peak("bfloat16")
        self.rate = peak * self.chip.flops_efficiency
        self.attention_rate = peak * self.chip.attention_efficiency
        self.hbm = self.chip.hbm_bandwidth * self.chip.hbm_efficiency
        self.gathered_bytes = _number_bytes(layout.gather_code, HALF)
        self.reduced_bytes = _number_bytes(layout.reduce_code, SINGLE)
        self.sharded = tuple(a for a in ("data", "context", "expert") if a in layout.mesh)
        self.rings = rings

    def estimate(self, tokens: int) -> LayoutEstimate:
        layout, x, chip = self.layout, self.x, self.chip
        m, layers = layout.num_minibatches, layout.num_minibatches * x.L
        products = tuple(layer_products(x, layout))
        shares_again = layout.recomputed
        forward = layers * self.products(products)
        recomputed = layers * sum(
            shares_again.get(p.part, 0.0) * self.products([p]) for p in products
        )
        recomputed += forward * layout.runs_chunks_again
        backward = 2 * forward
        head_forward, head_backward = (m * self.products(p) for p in head_products(x, layout))
        stored = state_elements(x, layout)
        # Parameters and averages are read and written, and a gradient is read.
        update = SINGLE * (3 + 2 * STATE) * stored / self.hbm

        passes_again = bool(shares_again) + layout.runs_chunks_again
        awaited = layers * self.awaited_by_layer(passes_again)
        ring_forward, ring_backward = (layers * s for s in self.ring_of_layer())
        awaited += m * self.awaited_outside()
        # A neighbouring layer hides gathers and scatters; the same layer hides the ring.
        to_hide = self.inside(forward=True) + ring_forward
        parameters = max(to_hide - forward - head_forward, self.first_layer(forward=True))
        to_hide = self.inside(forward=False) + ring_backward
        compute = backward + recomputed + head_backward
        parameters += max(to_hide - compute, self.first_layer(forward=False))
        exposed_inside = parameters
        parameters += self.outside(stored)

        busy = forward + recomputed + backward + awaited + exposed_inside
        bubble = busy * (layout.stage - 1) / (layout.chunks * m)
        computing = forward + recomputed + backward + head_forward + head_backward + update
        estimated = LayoutEstimate(
            layout=layout,
            topology=self.topology.name,
            memory=step_memory_of(x, layout),
            hbm_bytes=chip.hbm_bytes,
            computing=computing,
            parameters=parameters,
            activations=awaited,
            hops=self.hops(),
            bubble=bubble,
            mfu=0.0,
            tokens_per_second=0.0,
        )
        flops = flops_per_token(self.model, x.positions) * tokens
        peak = chip.peak("bfloat16") * self.topology.num_devices
        mfu, speed = flops / (estimated.seconds * peak), tokens / estimated.seconds
        return dataclasses.replace(estimated, mfu=mfu, tokens_per_second=speed)

    def products(self, products: Iterable[Product]) -> float:
        """Returns the time of products and reductions, elementwise operations included."""
        seconds = 0.0
        for p in products:
            rate = self.attention_rate if p.part == "scores" else self.rate
            passing = p.traffic / self.hbm
            seconds += max(p.flops / rate, passing) + (passing if p.flops else 0.0)
        return seconds

    def send(self, kind: Kind, axes: tuple[str, ...], size: float, times: int = 1) -> float:
        """Returns the time of `times` collectives; their complete operands have `size` bytes.

        The complete operand of an all-gather is its result.
        """
        axes = tuple(axis for axis in axes if self.layout.mesh.get(axis, 1) > 1)
        if not axes or not times:
            return 0.0
        ring = self.rings.get(axes)
        if ring is None:
            ring = self.rings[axes] = ring_over(self.topology, self.layout.mesh, axes)
        devices = ring.inside * ring.outside
        share = 1 / devices if kind == "all_gather" else 1.0
        sent = _operands(kind, devices) * share * size
        if kind == "reduce_scatter" and is_made_an_all_reduce(self.topology, ring):
            sent *= 2
        return ring.seconds(sent, times)

    def awaited_by_layer(self, again: int) -> float:
        """Returns the seconds that a layer waits for activations; `again` counts recomputations."""
        x = self.x
        tokens = HALF * x.tokens * x.D
        gathers, scatters = 4 + 2 * again, 4 + again
        seconds = self.send("all_gather", ("model",), tokens * gathers, gathers)
        seconds += self.send("reduce_scatter", ("model",), tokens * scatters, scatters)
        if x.experts_per_device:
            times = 4 + 2 * again
            seconds += self.send("all_to_all", ("expert",), times * HALF * x.R * x.D, times)
        return seconds

    def awaited_outside(self) -> float:
        """Returns the seconds that the lookup, the head and the loss wait in a minibatch."""
        x = self.x
        tokens, labels = HALF * x.tokens * x.D, SINGLE * x.tokens
        seconds = self.send("all_gather", ("model",), 2 * tokens, 2)
        seconds += self.send("reduce_scatter", ("model",), 2 * tokens, 2)
        return seconds + self.send("all_reduce", ("model",), 3 * labels, 2)

    def ring_of_layer(self) -> tuple[float, float]:
        """Returns the seconds of a layer's ring of keys and values: (forward, backward)."""
        x, size = self.x, self.layout.context
        elements = 2 * x.tokens * x.K * x.H
        values = (size - 1) * self.send("permute", ("context",), HALF * elements)
        gradients = size * self.send("permute", ("context",), SINGLE * elements)
        return values, (1 + self.layout.runs_chunks_again) * values + gradients

    def gathered(self, times: int, *, stacked: bool) -> tuple[float, float]:
        """Returns the seconds to gather, and to scatter, all parameters `times` times.

        With `stacked` all layers are sent at once.
        """
        x = self.x
        dense = times * (x.L * x.dense_weights + x.outer_weights)
        experts = times * x.L * x.expert_weights
        loops = times * (1 if stacked else x.L)
        of_experts = 3 * loops if experts else 0
        count = x.tensors * loops + 3 * times - of_experts
        axes_of_experts = tuple(axis for axis in self.sharded if axis != "expert")
        size = self.gathered_bytes
        gathers = self.send("all_gather", self.sharded, size * dense, count)
        gathers += self.send("all_gather", axes_of_experts, size * experts, of_experts)
        # Quantized numbers cannot be summed, so devices exchange them. With replicas these sums
        # are exact.
        kind: Kind = "reduce_scatter"
        size = SINGLE
        if self.layout.reduce_code and self.layout.replica == 1:
            kind, size = "all_to_all", self.reduced_bytes
        scatters = self.send(kind, self.sharded, size * dense, count)
        scatters += self.send(kind, axes_of_experts, size * experts, of_experts)
        return gathers, scatters

    def inside(self, *, forward: bool) -> float:
        """Returns the seconds of gathers and scatters inside the passes."""
        if self.layout.communicate != "minibatch":
            return 0.0
        gathers, scatters = self.gathered(self.layout.num_minibatches, stacked=False)
        return gathers if forward else (1 + self.layout.runs_chunks_again) * gathers + scatters

    def first_layer(self, *, forward: bool) -> float:
        """Returns the seconds of one layer's collectives, which nothing hides."""
        m = self.layout.num_minibatches
        gathers_of_layer = self.inside(forward=forward) / (m * self.x.L)
        return gathers_of_layer + self.ring_of_layer()[0 if forward else 1]

    def outside(self, stored: float) -> float:
        """Returns the seconds of collectives before and after the passes, which nothing hides."""
        layout, x = self.layout, self.x
        size, count = self.reduced_bytes * stored, x.tensors + 3
        if layout.reduce_code:
            seconds = self.send("all_to_all", ("replica",), size, count)
            seconds += self.send("all_gather", ("replica",), size, count)
        else:
            seconds = self.send("all_reduce", ("replica",), size, count)
        if layout.communicate != "minibatch":
            times = layout.num_minibatches if layout.communicate == "gather-step" else 1
            seconds += self.gathered(1, stacked=True)[0] + self.gathered(times, stacked=True)[1]
        # Embedding, head and last norm are on all stages.
        shards = layout.data * layout.context * layout.expert
        seconds += self.send("all_reduce", ("stage",), SINGLE * x.outer_weights / shards, 3)
        if layout.chunks > 1:  # Stages exchange shards of chunks, and back.
            moved = 2 * SINGLE * (stored - x.outer_weights / shards)
            times = 2 * layout.chunks * x.tensors
            seconds += self.send("permute", ("stage",), moved, times)
        return seconds

    def hops(self) -> float:
        """Returns the seconds of activations and gradients that move from stage to stage."""
        layout, x = self.layout, self.x
        if layout.stage == 1:
            return 0.0
        v, stages = layout.chunks, layout.stage
        ticks = v * layout.num_minibatches + (v + 1) * stages - 2
        part = HALF * x.tokens * x.D / layout.model
        return self.send("permute", ("stage",), 2 * ticks * part, 2 * ticks)
