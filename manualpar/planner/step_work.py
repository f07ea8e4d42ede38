"""The work of a device in a step: the collectives, products and memory that the roofline adds up.

`read_work` reads the work off the traced program, as `manualpar.inspect` does. A sweep also needs
the work of steps that were not traced, and derives it from the work of a traced step:

- `with_minibatches`: with `m` minibatches a device does the same computation in `m` parts. It runs
  the collectives of parameters `m` times, once in each minibatch, and sends activations in `m`
  parts.
- `with_repeats`: a step of `m` equal minibatches does `m` times the work of a step of one of them.
- `with_gather_dtype`: with another dtype arrays of the same shapes are sent, and only their bytes
  change.

The derived FLOPs and collectives are exact, with one exception: another gather dtype also changes
the dtype in which the rows of a split embedding are summed, which is left out. The derived memory
is an estimate: activations are divided by `m`, and gathered parameters scale with the ratio of the
dtypes. Repeated reads of weights in each minibatch are not counted. So a sweep also traces the
programs that it ranks first.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr

from manualpar.core.mesh.compiler_options import Overlap
from manualpar.core.mesh.mesh import in_order, platform_of
from manualpar.core.modes.layer_loops import ATTENDED
from manualpar.core.parameters.placement import partition
from manualpar.core.program.program import Program
from manualpar.core.summary import Summarized
from manualpar.core.tracing.jaxprs import inner_jaxprs, scan_sizes
from manualpar.core.tracing.scopes import GATHER_SCOPE, REDUCE_SCOPE, REGATHER, SCATTER_SCOPE
from manualpar.inspect import state_bytes, trace_outer_steps
from manualpar.inspect.communication import Around, Collective, read_stage, summed
from manualpar.inspect.flops import Product, TickParts, TrafficReader, is_narrow
from manualpar.inspect.memory import Memory, step_memory
from manualpar.inspect.scope_parsing import LAYER_SCOPES, module_of, phase_of
from manualpar.inspect.throughput import Throughput

MINIBATCH = re.compile(r"\bminibatch(_\d+)?\b")


class PartWork(NamedTuple):
    """The work of one part of a tick, such as a forward pass, in all its runs on one stage."""

    runs: int
    collectives: tuple[Collective, ...]
    products: tuple[Product[float], ...]


class PipelineWork(NamedTuple):
    """The work of a pipeline's stages in its ticks.

    Attributes:
      parts: The parts of a tick.
      works: Name of a part, as in `Costs` -> the work of a stage that runs the part.
    """

    parts: TickParts
    works: Mapping[str, PartWork]


class _Read(NamedTuple):
    """The collectives and products of a stage, and how often it runs each part of a tick."""

    collectives: tuple[Collective, ...]
    products: tuple[Product[float], ...]
    runs: Mapping[str, int]
    notes: list[str]


@dataclasses.dataclass(frozen=True, repr=False)
class StepWork(Summarized):
    """The work of a step on a device.

    Attributes:
      name: The strategy and the mode.
      mesh: The sizes of the mesh axes, the axis on the slowest links first.
      throughput: Turns the time of a step into rates; the devices and their peak are added later.
      update_traffic: Bytes that the update reads and writes.
      overlap: The compiler options assumed by the plan, see `manualpar.core.mesh.compiler_options`.
      pipeline: The work of the stages if the step has a pipeline. `collectives` and `products`
        are then those of the stage that sends the most.
      outer_collectives: The collectives of DiLoCo's outer steps; each fragment of the parameters
        is exchanged once.
      every: The number of steps in which all `outer_collectives` run once.
      notes: Sentences about the choices and assumptions made when the program was read.
      attention: For attention that runs in a kernel, the numbers in the queries of all layers, and
        the runs of the kernel's forward pass; `None` if the trace does not say.
      stacked: The bytes that loops over layers keep for the backward pass.
      source: The source of the estimate: `roofline` for a traced program, or `formula`.
    """

    name: str
    mesh: Mapping[str, int]
    throughput: Throughput
    num_minibatches: int
    collectives: tuple[Collective, ...]
    products: tuple[Product[float], ...]
    update_traffic: int
    memory: Memory
    notes: tuple[str, ...] = ()
    overlap: Overlap = "auto"
    pipeline: PipelineWork | None = None
    outer_collectives: tuple[Collective, ...] = ()
    every: int = 1
    attention: tuple[float, float] | None = dataclasses.field(default=None, repr=False)
    stacked: float = dataclasses.field(default=0.0, repr=False)
    source: str = "roofline"
    # Whether a step of several minibatches reduces gradients once, after all of them (data
    # parallelism, ZeRO-1). With one minibatch they may be reduced in the backward pass.
    _reduces_once: bool = False

    @property
    def flops(self) -> float:
        """The FLOPs of a device in a step."""
        return sum(product.flops for product in self.products)

    @property
    def dtype(self) -> str:
        """The dtype in which products compute the most FLOPs, without narrow ones.

        An MFU is relative to the peak of this dtype, so that programs can be compared.
        """
        wide = (x for x in self.products if not is_narrow(x.dtype))
        totals = summed((product.dtype, product.flops) for product in wide)
        return max(totals, key=lambda dtype: totals[dtype], default="float32")


def read_work(
    program: Program,
    throughput: Throughput,
    *,
    order: Sequence[str] = (),
    fused_attention: bool = False,
    overlap: Overlap = "auto",
) -> StepWork:
    """Reads the work of a program's step.

    Args:
      program: The program, on any mesh, even an abstract one. Memory is estimated for the compiler
        of the mesh's platform, see `step_memory`; for TPUs' if the platform is not known.
      throughput: The examples of a step, their tokens and their FLOPs.
      order: The axes of the mesh, the axis on the slowest links first; see `make_mesh`.
      fused_attention: Whether causal attention is timed as one kernel, see
        `manualpar.plans.sweep.has_kernel` and `manualpar.inspect.flops`. Memory is always the
        memory of the traced program, which may store scores.
      overlap: The config's `parallel.overlap`.

    Raises:
      ValueError: The mode is not `manual`, so the compiler writes the collectives.
    """
    if program.mode != "manual":
        raise ValueError(
            f"roofline: the program has mode={program.mode!r}, expected 'manual', because in other "
            "modes XLA chooses the collectives. Build the program with mode='manual' (in a config "
            "config.parallel.mode), or compile it with --compiler=tpu or gpu."
        )
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    jaxpr, around = traced.jaxpr.jaxpr, Around(spread=program.mesh.size)
    run: Any = program.pipeline
    parts = TickParts(run.table) if run else None

    def read(stage: int | None) -> _Read:
        data_axes = program.data_axes
        sending, sent = read_stage("roofline", jaxpr, around, stage=stage, data_axes=data_axes)
        computing = TrafficReader("roofline", stage=sending.stage)
        computing.fused_attention = fused_attention
        products = _merged(computing.read(jaxpr, around), parts)
        runs = {}
        for scope in {*(x.scope for x in products), *(x.scope for x in sent)}:
            if parts and (part := parts.part_of(scope)):
                runs[part] = parts.runs(scope, sending.stage)
        return _Read(sent, products, runs, [*sending.notes, *computing.notes])

    collectives, products, _, notes = read(None)
    memory = step_memory(program, platform=platform_of(program.mesh) or "tpu")
    kept = list(_kept_for_backward(jaxpr))
    attended = [x for x in kept if x.is_attended]
    # With DiLoCo, count the state of one replica.
    inner = program if program.outer is None else program.outer.inner
    state = inner.abstract_state
    trained, _ = partition(program.placements, state.params)
    parameters, optimizer = (state_bytes(x)[0] for x in (trained, state.opt_state))
    return StepWork(
        name=f"{program.strategy.name} {program.mode}",
        mesh=in_order(program.mesh.shape, order),
        throughput=throughput,
        num_minibatches=program.num_minibatches,
        collectives=collectives,
        products=products,
        # Parameters and optimizer state are read and written; a gradient of the parameters' size is
        # read.
        update_traffic=3 * parameters + 2 * optimizer,
        memory=memory,
        attention=(sum(x.times * x.size for x in attended), sum(x.times for x in attended))
        if fused_attention and attended and not parts
        else None,
        stacked=sum(x.times * min(x.size, memory.activations) for x in kept if not x.is_attended),
        notes=tuple(dict.fromkeys(notes)),
        overlap=overlap,
        pipeline=PipelineWork(parts, _works(parts, read)) if parts else None,
        outer_collectives=trace_outer_steps(program),
        every=1 if program.outer is None else program.outer.every,
        _reduces_once=program.strategy.sends(2, False).scatters < 2,
    )


class _Kept(NamedTuple):
    """Values that the forward pass keeps: attention's result, or the stacks of a loop.

    `size` is the numbers of a result, or the bytes of the stacks, in one of `times` runs.
    """

    times: int
    size: int
    is_attended: bool


def _kept_for_backward(jaxpr: Jaxpr, times: int = 1, scope: str = "") -> Iterator[_Kept]:
    for eqn in jaxpr.eqns:
        inside, name = f"{scope}/{eqn.source_info.name_stack}", eqn.primitive.name
        runs = times * (eqn.params["length"] if name == "scan" else 1)
        for _, inner in inner_jaxprs(eqn):
            yield from _kept_for_backward(inner, runs, inside)
        if phase_of(inside) != "forward":
            continue
        results: list[Any] = [x.aval for x in eqn.outvars]
        if name == "name" and eqn.params["name"] == ATTENDED and results[0].ndim == 4:
            yield _Kept(times, results[0].size, True)
        elif name == "scan":
            stacks = results[scan_sizes(eqn.params)[1] :]
            yield _Kept(times, sum(x.size * x.dtype.itemsize for x in stacks), False)


def _merged(
    products: Iterable[Product[Fraction]], parts: TickParts | None
) -> tuple[Product[float], ...]:
    """Adds up products that differ only in their module; an unrolled model has many of these.

    Those in narrow dtypes keep their modules, because plans name the modules that get slower.
    """
    groups: dict[Any, list[Product[Fraction]]] = {}
    for product in products:
        part = parts.part_of(product.scope) if parts else ""
        module = module_of(product.scope) if is_narrow(product.dtype) else ""
        groups.setdefault((product.phase, part, module, *product[1:]), []).append(product)
    return tuple(
        Product(
            x.scope, n * float(x.flops), n * float(x.traffic), x.dtype, x.is_fused, change=x.change
        )
        for x, n in ((alike[0], len(alike)) for alike in groups.values())
    )


def _works(parts: TickParts, read: Callable[[int], _Read]) -> dict[str, PartWork]:
    """Returns the work in each part of a tick, read off the first and the last stage.

    These two stages together run all parts.
    """
    works: dict[str, PartWork] = {}
    for stage in dict.fromkeys((0, parts.table.num_stages - 1)):
        stage_work = read(stage)
        for part, runs in stage_work.runs.items():
            sent = tuple(x for x in stage_work.collectives if parts.part_of(x.scope) == part)
            computed = tuple(x for x in stage_work.products if parts.part_of(x.scope) == part)
            works[part] = PartWork(runs, sent, computed)
    return works


def repeated(product: Product[float], times: float) -> Product[float]:
    """Multiplies the work of a product by `times`."""
    return product._replace(flops=times * product.flops, traffic=times * product.traffic)


def with_minibatches(work: StepWork, num_minibatches: int) -> StepWork:
    """Derives the work of a step in several minibatches from the work in one minibatch."""
    assert work.num_minibatches == 1
    assert work.pipeline is None  # A pipeline's schedule of microbatches has to be traced.
    if num_minibatches == 1:
        return work
    memory = work.memory
    gradients, activations = memory.gradients, memory.activations // num_minibatches
    if work._reduces_once:  # Until then a device holds complete gradients.
        gradients = max(gradients, memory.parameters)

    def is_repeated(x: Collective) -> bool:
        is_once = work._reduces_once and x.purpose in (SCATTER_SCOPE, REDUCE_SCOPE)
        return bool(MINIBATCH.search(x.scope)) and not is_once

    return dataclasses.replace(
        work,
        num_minibatches=num_minibatches,
        collectives=tuple(
            _in_minibatches(x, num_minibatches) if is_repeated(x) else x for x in work.collectives
        ),
        memory=dataclasses.replace(memory, gradients=gradients, activations=activations),
    )


def with_repeats(work: StepWork, times: int) -> StepWork:
    """Derives the work of a step of `times` minibatches from the work of a step of one of these.

    The memory is not changed, so it is still for a step of one minibatch.
    """
    assert work.num_minibatches == 1
    assert work.pipeline is None
    return dataclasses.replace(
        work,
        num_minibatches=times,
        collectives=tuple(
            dataclasses.replace(x, times=x.times * times)
            if MINIBATCH.search(x.scope) or x.purpose in LAYER_SCOPES
            else x
            for x in work.collectives
        ),
        products=tuple(x if x.phase == "update" else repeated(x, times) for x in work.products),
        attention=work.attention and (times * work.attention[0], times * work.attention[1]),
        stacked=times * work.stacked,
    )


def _in_minibatches(collective: Collective, num_minibatches: int) -> Collective:
    """Turns a collective of the only minibatch into a collective of each of several minibatches."""
    shape, divides = collective.shape, [size % num_minibatches == 0 for size in collective.shape]
    if collective.purpose in LAYER_SCOPES and any(divides):  # A minibatch has fewer tokens.
        dim = divides.index(True)
        shape = (*shape[:dim], shape[dim] // num_minibatches, *shape[dim + 1 :])
    return dataclasses.replace(collective, shape=shape, times=collective.times * num_minibatches)


def with_gather_dtype(work: StepWork, gather_dtype: str, *, reduce_dtype: str = "") -> StepWork:
    """Derives the work with parameters gathered in another dtype; the memory is an estimate.

    Args:
      work: The work of a step that gathers parameters in the stored dtype. Quantized arrays (uint8)
        do not change.
      gather_dtype: A dtype's name; `""` leaves the work unchanged.
      reduce_dtype: The dtype in which gradients are summed; `""` for `gather_dtype`.
    """
    if not gather_dtype:
        return work
    dtype_of_purpose = {
        GATHER_SCOPE: jnp.dtype(gather_dtype),
        REGATHER: jnp.dtype(gather_dtype),
        SCATTER_SCOPE: jnp.dtype(reduce_dtype or gather_dtype),
        REDUCE_SCOPE: jnp.dtype(reduce_dtype or gather_dtype),
    }

    def retyped(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
        return tuple(
            x
            if x.dtype == jnp.uint8
            else dataclasses.replace(x, dtype=dtype_of_purpose.get(x.purpose, x.dtype))
            for x in collectives
        )

    pipeline = work.pipeline and work.pipeline._replace(
        works={
            part: of_part._replace(collectives=retyped(of_part.collectives))
            for part, of_part in work.pipeline.works.items()
        }
    )
    gathers = [x for x in work.collectives if x.purpose in (GATHER_SCOPE, REGATHER)]
    memory = work.memory
    if any(x.dtype != jnp.uint8 for x in gathers):
        stored = max(x.dtype.itemsize for x in gathers)
        gathered = memory.gathered * jnp.dtype(gather_dtype).itemsize // stored
        memory = dataclasses.replace(memory, gathered=gathered)
    collectives = retyped(work.collectives)
    return dataclasses.replace(work, collectives=collectives, memory=memory, pipeline=pipeline)
