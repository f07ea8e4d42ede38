"""Collectives with their seconds, and a clock that times them on the rings of a topology.

The roofline times the collectives of a traced program or a formula with `Clock`. A collective
runs on one ring over its mesh axes (`manualpar.planner.topology`). The purpose and the scope of a
collective decide whether compute can hide it. For a compiled program,
`manualpar.planner.compiled_timeline` makes the `TimedCollective`s without `Clock`.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from manualpar.core.mesh.compiler_options import KEEPING_SCATTERS, Overlap, choose_options
from manualpar.core.tracing.scopes import (
    HALVES,
    PIPELINE_SCOPE,
    SEQUENCE_SCOPE,
    TENSOR_SCOPE,
    innermost_ticks,
)
from manualpar.inspect.communication import Collective
from manualpar.inspect.compiled import CompiledCollective
from manualpar.inspect.scope_parsing import LAYER_SCOPES
from manualpar.planner.plan import PlannedCollective
from manualpar.planner.step_work import MINIBATCH, StepWork
from manualpar.planner.topology import Ring, Topology, ring_over


class Links(NamedTuple):
    """The ring over some mesh axes, and the links that it runs on.

    Attributes:
      network: The names of the links.
      doubles_scatters: Whether a reduce-scatter sends twice its bytes, see `is_made_an_all_reduce`.
    """

    ring: Ring
    network: str
    doubles_scatters: bool


Rings = dict[tuple[str, ...], Links]  # The axes of a ring -> the ring.


@dataclasses.dataclass
class TimedCollective:
    """A collective, traced or compiled, with the seconds of all its runs in a step.

    Attributes:
      collective: The collective.
      seconds: The time to send it, without overlap.
      network: The names of the links that it runs on.
      slow_bytes: See `PlannedCollective`.
      hidden_seconds: The part of `seconds` that is hidden behind compute.
      cycles_between: The cycles of compute between the start of the collective and the wait for its
        end, in each run; `None` if the collective is not compiled.
      behind: The module that computes longest in this time; "" if none does.
      is_doubled: Whether the collective sends twice its bytes, see `is_made_an_all_reduce`.
      is_of_half: Whether the collective sends a half of a batch while the other half computes.
      share: The share of the collective's bytes that counts for one step; less than 1 in DiLoCo's
        outer steps. `seconds` and `slow_bytes` are this share already.
    """

    collective: Collective | CompiledCollective
    seconds: float
    network: str = ""
    slow_bytes: float = 0.0
    hidden_seconds: float = 0.0
    cycles_between: int | None = None
    behind: str = ""
    is_doubled: bool = False
    is_of_half: bool = False
    share: float = 1.0

    @property
    def is_async(self) -> bool | None:
        """Whether there is compute between start and wait; `None` if not compiled."""
        return None if self.cycles_between is None else self.cycles_between > 0

    @property
    def is_awaited(self) -> bool:
        """Whether the collective sends activations, for which the layer waits."""
        is_of_layer = self.collective.purpose in LAYER_SCOPES and not self.is_of_half
        return is_of_layer and self.collective.kind != "permute"

    @property
    def is_inside(self) -> bool:
        """Whether the collective is in the differentiated model, where layers can hide it."""
        return _is_in_model(self.collective.scope) and not self.is_awaited

    @property
    def is_hop(self) -> bool:
        """Whether the collective sends arrays from one pipeline stage to another."""
        return self.collective.purpose == PIPELINE_SCOPE

    @property
    def layer(self) -> tuple[str, ...]:
        """An identifier of a layer: minibatch, and the first two names of the module's path."""
        return _layer_of(self.collective.scope, self.collective.module)


# These functions are cached, because a search times many collectives with the same scope.
@functools.lru_cache(maxsize=4096)
def _is_in_model(scope: str) -> bool:
    return "jvp(" in scope or bool(innermost_ticks(scope))


@functools.lru_cache(maxsize=4096)
def _layer_of(scope: str, module: str) -> tuple[str, ...]:
    found = MINIBATCH.search(scope)
    names = [name for name in module.split("/") if name][:2]
    return (found.group() if found else "", *names)


def planned_collectives(timed: Iterable[TimedCollective]) -> tuple[PlannedCollective, ...]:
    """Sums collectives with equal kind, axes, purpose, phase and network; the slowest comes first.

    Asynchronous and synchronous collectives are summed separately.
    """
    groups: dict[Any, list[TimedCollective]] = {}
    for x in timed:
        sent = x.collective
        names = (sent.kind, sent.axes, sent.purpose, sent.phase, x.network, x.is_async)
        groups.setdefault(names, []).append(x)
    sums = [
        PlannedCollective(
            kind=kind,
            axes=axes,
            purpose=purpose,
            phase=phase,
            times=sum(x.collective.times for x in alike),
            bytes_sent=sum(float(x.collective.bytes_sent) * x.share for x in alike),
            seconds=sum(x.seconds for x in alike),
            hidden_seconds=sum(x.hidden_seconds for x in alike),
            is_async=is_async,
            network=network,
            slow_bytes=sum(x.slow_bytes for x in alike),
        )
        for (kind, axes, purpose, phase, network, is_async), alike in groups.items()
    ]
    return tuple(sorted(sums, key=lambda x: -(x.seconds or 0.0)))


class Clock(NamedTuple):
    """Times the collectives of a step."""

    work: StepWork
    topology: Topology
    rings: Rings

    def time(self, collectives: Iterable[Collective]) -> list[TimedCollective]:
        """Returns the collectives with their seconds; nothing is hidden yet."""
        return [self._timed(x) for x in collectives]

    def _timed(self, collective: Collective) -> TimedCollective:
        links = self.rings.get(collective.axes)
        if links is None:
            links = self.rings[collective.axes] = self._links(collective.axes)
        ring, network, doubles_scatters = links
        is_doubled = doubles_scatters and collective.kind == "reduce_scatter"
        sent = collective.float_bytes_sent * (2 if is_doubled else 1)
        seconds = ring.seconds(sent, collective.times)
        return TimedCollective(
            collective,
            seconds,
            network,
            ring.crossing_bytes(sent),
            is_doubled=is_doubled,
            is_of_half=not self.topology.chip.is_tpu and _is_of_half(collective),
        )

    def _links(self, axes: tuple[str, ...]) -> Links:
        topology = self.topology
        ring = ring_over(topology, self.work.mesh, axes)
        network = network_of(topology, ring)
        is_doubled = is_made_an_all_reduce(topology, ring)
        doubles_scatters = is_doubled and not _keeps_scatters(topology, ring, self.work.overlap)
        return Links(ring, network, doubles_scatters)


def _is_of_half(collective: Collective) -> bool:
    """Returns whether a collective over split layers sends a half of a batch.

    Collectives of experts and over a context axis are too many for the other half to hide them.
    """
    is_split = collective.purpose in (TENSOR_SCOPE, SEQUENCE_SCOPE)
    return is_split and not set(HALVES).isdisjoint(collective.scope.split("/"))


def network_of(topology: Topology, ring: Ring) -> str:
    """Returns the names of the networks that a ring runs on."""
    fast, slow = topology.chip.network.names
    if not ring.is_slow:
        return fast
    return slow if ring.inside == 1 else f"{fast}+{slow}"


def is_made_an_all_reduce(topology: Topology, ring: Ring) -> bool:
    """Returns whether XLA for TPU turns a reduce-scatter on this ring into an all-reduce.

    XLA (libtpu 0.0.42) does this for a ring that fills a torus of 4x4, 8x8, 16x16 or 4x4x8 chips,
    but not for 8, 4x8 or 8x16 chips. Other tori of three dimensions are assumed to be like 4x4x8.
    The options that `parallel.overlap` chooses may prevent the all-reduce.
    """
    if not topology.chip.is_tpu or ring.outside > 1:
        return False
    shape = tuple(size for size in topology.shape if size > 1)
    fills = sorted(ring.torus_dims) == sorted(shape) and len(shape) > 1
    return fills and (len(shape) > 2 or len(set(shape)) == 1) and min(shape) > 2


def _keeps_scatters(topology: Topology, ring: Ring, overlap: Overlap) -> bool:
    chosen = choose_options(topology.chip.device_kind, [ring.inside], overlap=overlap)
    return not KEEPING_SCATTERS.isdisjoint(chosen.options)
