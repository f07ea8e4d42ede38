"""What a device does in a step: the collectives, products and memory that the roofline adds up.

`read_work` reads them off the traced program, in the walk that the ledger takes too. A sweep also
needs the work of steps that nobody has traced, and gets it from one that was:

- `with_minibatches`: in `m` minibatches a device computes the same in `m` parts. It sends `m` times
  what it sends for parameters in each minibatch, and activations in `m` parts.
- `with_gather_dtype`: with another dtype on the wire shapes stay and bytes change.

Both are exact in what is computed and sent (but the rows of a split embedding are summed in the
other dtype too, which is left out). Memory is estimated: an `m`-th of the activations, and
gathered parameters by the ratio of the dtypes; that weights are read again in each minibatch is not
counted. So a sweep traces those programs that it ranks first.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_collections

from manualpar.core.mesh.compiler_options import Overlap
from manualpar.core.mesh.mesh_order import in_order
from manualpar.core.parameters.trainable import partition
from manualpar.core.program.program import Program
from manualpar.core.tracing.scopes import GATHER_SCOPE, REDUCE_SCOPE, REGATHER, SCATTER_SCOPE
from manualpar.inspect import state_bytes, trace_outer_steps
from manualpar.inspect.communication import Collective, read_stage, summed
from manualpar.inspect.equations import Around
from manualpar.inspect.flops import CountedProduct, TrafficReader
from manualpar.inspect.memory import Memory, step_memory
from manualpar.inspect.scope_parsing import LAYER_SCOPES, phase_of
from manualpar.inspect.tick_parts import TickParts
from manualpar.strategies.diloco.program import DiLoCoProgram
from manualpar.training.monitoring.throughput import Throughput
from manualpar.training.task import CONTEXT_AXIS

MINIBATCH = re.compile(r"\bminibatch(_\d+)?\b")


class Load(NamedTuple):
    """What a step takes of a device for a product, or for a reduction, which has no FLOPs.

    `dtype` is the wider one of its operands, `traffic` the bytes that it reads and writes, and
    `part` that of a pipeline's tick, see `PipelineWork`. `is_fused` says that it is part of a fused
    kernel of attention.
    """

    phase: str
    dtype: str
    flops: float
    traffic: float
    part: str = ""
    is_fused: bool = False


class PartWork(NamedTuple):
    """What a stage of a pipeline does in all its runs of a part of a tick."""

    runs: int
    collectives: tuple[Collective, ...]
    loads: tuple[Load, ...]


class PipelineWork(NamedTuple):
    """What the stages of a pipeline do in its ticks.

    Attributes:
      parts: The parts of its ticks.
      works: What a stage does that runs a part, by the name of that among `Costs`.
    """

    parts: TickParts
    works: Mapping[str, PartWork]


class _Read(NamedTuple):
    """What a stage sends and computes, and how often it runs each part of a tick in which it is."""

    collectives: tuple[Collective, ...]
    loads: tuple[Load, ...]
    runs: Mapping[str, int]
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class StepWork:
    """What a step does on a device.

    Attributes:
      name: The strategy and the mode.
      mesh: The sizes of the mesh axes, the axis on the slowest links first.
      throughput: Turns the time of a step into rates; without devices and their peak.
      update_traffic: Bytes that the update reads and writes.
      overlap: Which compiler options it is planned with, see
      `manualpar.core.mesh.compiler_options`.
      pipeline: What the stages do if the step has a pipeline. `collectives` and `loads` are then
        those of the stage that sends the most.
      meetings: What replicas that train alone send in all their outer steps, each once.
      every: In how many steps they do.
      notes: What was chosen or assumed in reading it.
    """

    name: str
    mesh: Mapping[str, int]
    throughput: Throughput
    num_minibatches: int
    collectives: tuple[Collective, ...]
    loads: tuple[Load, ...]
    update_traffic: int
    memory: Memory
    notes: tuple[str, ...] = ()
    overlap: Overlap = "auto"
    pipeline: PipelineWork | None = None
    meetings: tuple[Collective, ...] = ()
    every: int = 1

    @property
    def flops(self) -> float:
        """The FLOPs of a device in a step."""
        return sum(load.flops for load in self.loads)

    @property
    def dtype(self) -> str:
        """The dtype in which most is computed."""
        totals = summed((load.dtype, load.flops) for load in self.loads)
        return max(totals, key=lambda dtype: totals[dtype], default="float32")


def read_work(
    program: Program,
    throughput: Throughput,
    *,
    order: Sequence[str] = (),
    fused_attention: bool = False,
    overlap: Overlap = "auto",
) -> StepWork:
    """Reads what a program's step does.

    Args:
      program: The program, on any mesh, an abstract one too.
      throughput: The examples of a step, their tokens and their FLOPs.
      order: The axes of the mesh, the one on the slowest links first; see `make_mesh`.
      fused_attention: Whether attention, a causal one, is taken as one kernel, see `has_kernel`
        and `manualpar.inspect.flops`. Memory is the program's own all the same, scores included.
      overlap: That of the config, `parallel.overlap`.

    Raises:
      ValueError: The mode is not `manual`: the compiler decides what is sent.
    """
    if program.mode != "manual":
        raise ValueError(
            f"roofline: the program has mode={program.mode!r}, expected 'manual': in the others "
            "XLA decides what is sent. Set config.parallel.mode to 'manual', or have the program "
            "compiled with --compiler=tpu."
        )
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    jaxpr, around = traced.jaxpr.jaxpr, Around(spread=program.mesh.size)
    run: Any = program.step.pipeline
    parts = TickParts(run.table) if run else None

    def read(stage: int | None) -> _Read:
        data_axes = program.data_axes
        sending, sent = read_stage("roofline", jaxpr, around, stage=stage, data_axes=data_axes)
        computing = TrafficReader("roofline", stage=sending.stage)
        computing.fused_attention = fused_attention
        found = computing.read(jaxpr, around)
        # An unrolled model has many loads that are the same.
        alike = Counter(_load(one, parts.of(one.scope) if parts else "") for one in found)
        loads = (
            load._replace(flops=n * load.flops, traffic=n * load.traffic)
            for load, n in alike.items()
        )
        runs = {}
        for scope in {*(one.scope for one in found), *(one.scope for one in sent)}:
            if parts and (part := parts.of(scope)):
                runs[part] = parts.runs(scope, sending.stage)
        return _Read(sent, tuple(loads), runs, [*sending.notes, *computing.notes])

    collectives, loads, _, notes = read(None)
    # Of replicas that train alone, what one of them has.
    one = program.inner if isinstance(program, DiLoCoProgram) else program
    state = one.abstract_state
    trained, _ = partition(program.step.placements, state.params)
    parameters, optimizer = (state_bytes(x)[0] for x in (trained, state.opt_state))
    return StepWork(
        name=f"{program.strategy.name} {program.mode}",
        mesh=in_order(program.mesh.shape, order),
        throughput=throughput,
        num_minibatches=program.num_minibatches,
        collectives=collectives,
        loads=loads,
        # Both are read and written, and a gradient of the parameters' size is read.
        update_traffic=3 * parameters + 2 * optimizer,
        memory=step_memory(program),
        notes=tuple(dict.fromkeys(notes)),
        overlap=overlap,
        pipeline=PipelineWork(parts, _works(parts, read)) if parts else None,
        **_meetings(program),
    )


def _meetings(program: Program) -> dict[str, Any]:
    if not isinstance(program, DiLoCoProgram):
        return {}
    return {"meetings": trace_outer_steps(program), "every": program.every}


def has_kernel(config: ml_collections.ConfigDict) -> bool:
    """Whether a config has its chips compute attention by a kernel of theirs.

    If it leaves them the choice, it is traced without them as attention in blocks. The ring of
    split sequences, which has a kernel on TPUs only, is taken as it is traced.
    """
    is_kernel = config.model.get("attention") in ("", "splash", "cudnn")
    return is_kernel and CONTEXT_AXIS not in config.parallel.mesh


def _load(product: CountedProduct, part: str) -> Load:
    phase, flops = phase_of(product.scope), float(product.flops)
    return Load(phase, product.dtype, flops, float(product.traffic), part, product.is_fused)


def _works(parts: TickParts, read: Callable[[int], _Read]) -> dict[str, PartWork]:
    """The work in each part, as the first stage or the last one does it: together they do all."""
    works: dict[str, PartWork] = {}
    for stage in dict.fromkeys((0, parts.table.num_stages - 1)):
        found = read(stage)
        for part, runs in found.runs.items():
            sent = tuple(one for one in found.collectives if parts.of(one.scope) == part)
            computed = tuple(load for load in found.loads if load.part == part)
            works[part] = PartWork(runs, sent, computed)
    return works


def with_minibatches(work: StepWork, num_minibatches: int) -> StepWork:
    """The work of a step in one minibatch, in another number of them; its memory is an estimate."""
    assert work.num_minibatches == 1
    assert work.pipeline is None  # Microbatches are in a schedule, which has to be traced.
    if num_minibatches == 1:
        return work
    activations = work.memory.activations // num_minibatches
    return dataclasses.replace(
        work,
        num_minibatches=num_minibatches,
        collectives=tuple(
            _in_minibatches(each, num_minibatches) if MINIBATCH.search(each.scope) else each
            for each in work.collectives
        ),
        memory=dataclasses.replace(work.memory, activations=activations),
    )


def _in_minibatches(one: Collective, num_minibatches: int) -> Collective:
    """A collective of the only minibatch as it is in each of several."""
    shape, divides = one.shape, [size % num_minibatches == 0 for size in one.shape]
    if one.purpose in LAYER_SCOPES and any(divides):  # Of tokens, of which there are fewer.
        dim = divides.index(True)
        shape = (*shape[:dim], shape[dim] // num_minibatches, *shape[dim + 1 :])
    return dataclasses.replace(one, shape=shape, times=one.times * num_minibatches)


def with_gather_dtype(work: StepWork, gather_dtype: str, *, reduce_dtype: str = "") -> StepWork:
    """The work with parameters gathered in another dtype; its memory is an estimate.

    Args:
      work: That of a step that gathers them as they are stored. Codes, which are bytes, stay.
      gather_dtype: A dtype's name; `""` leaves the work as it is.
      reduce_dtype: The dtype in which gradients are summed; `""`: the same.
    """
    if not gather_dtype:
        return work
    on_the_wire = {
        GATHER_SCOPE: jnp.dtype(gather_dtype),
        REGATHER: jnp.dtype(gather_dtype),
        SCATTER_SCOPE: jnp.dtype(reduce_dtype or gather_dtype),
        REDUCE_SCOPE: jnp.dtype(reduce_dtype or gather_dtype),
    }

    def retyped(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
        return tuple(
            each
            if each.dtype == jnp.uint8
            else dataclasses.replace(each, dtype=on_the_wire.get(each.purpose, each.dtype))
            for each in collectives
        )

    pipeline = work.pipeline and work.pipeline._replace(
        works={
            part: of_part._replace(collectives=retyped(of_part.collectives))
            for part, of_part in work.pipeline.works.items()
        }
    )
    gathers = [each for each in work.collectives if each.purpose in (GATHER_SCOPE, REGATHER)]
    memory = work.memory
    if any(each.dtype != jnp.uint8 for each in gathers):
        stored = max(each.dtype.itemsize for each in gathers)
        gathered = memory.gathered * jnp.dtype(gather_dtype).itemsize // stored
        memory = dataclasses.replace(memory, gathered=gathered)
    collectives = retyped(work.collectives)
    return dataclasses.replace(work, collectives=collectives, memory=memory, pipeline=pipeline)
