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
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from manualpar.core.program import Program
from manualpar.inspect import state_bytes
from manualpar.inspect.communication import Collective, CollectiveReader, summed
from manualpar.inspect.equations import Around
from manualpar.inspect.memory import Memory, step_memory
from manualpar.inspect.products import TrafficReader
from manualpar.inspect.provenance import LAYER_SCOPES, phase_of
from manualpar.purposes import GATHER_SCOPE, REDUCE_SCOPE, REGATHER, SCATTER_SCOPE
from manualpar.sharding.mesh_order import in_order
from manualpar.watching.throughput import Throughput

MINIBATCH = re.compile(r"\bminibatch(_\d+)?\b")


class Load(NamedTuple):
    """What a step takes of a device for a product, or for a reduction, which has no FLOPs.

    `dtype` is the wider one of its operands, `traffic` the bytes that it reads and writes.
    """

    phase: str
    dtype: str
    flops: float
    traffic: float


@dataclasses.dataclass(frozen=True)
class StepWork:
    """What a step does on a device.

    Attributes:
      name: The strategy and the mode.
      mesh: The sizes of the mesh axes, the axis on the slowest links first.
      throughput: Turns the time of a step into rates; without devices and their peak.
      update_traffic: Bytes that the update reads and writes.
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
) -> StepWork:
    """Reads what a program's step does.

    Args:
      program: The program, on any mesh, an abstract one too.
      throughput: The examples of a step, their tokens and their FLOPs.
      order: The axes of the mesh, the one on the slowest links first; see `make_mesh`.
      fused_attention: Whether attention, a causal one, is taken as one kernel, see
        `manualpar.inspect.products`. Memory is the program's own all the same, scores included.

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
    sending = CollectiveReader("roofline", data_axes=program.data_axes)
    computing = TrafficReader("roofline")
    computing.fused_attention = fused_attention
    around = Around(spread=program.mesh.size)
    collectives = sending.read(traced.jaxpr.jaxpr, around)
    loads = [
        Load(phase_of(one.scope), one.dtype, float(one.flops), float(one.traffic))
        for one in computing.read(traced.jaxpr.jaxpr, around)
    ]
    state = program.abstract_state
    parameters, optimizer = (state_bytes(x)[0] for x in (state.params, state.opt_state))
    alike = Counter(loads)  # An unrolled model has many loads that are the same.
    return StepWork(
        name=f"{program.strategy.name} {program.mode}",
        mesh=in_order(program.mesh.shape, order),
        throughput=throughput,
        num_minibatches=program.num_minibatches,
        collectives=collectives,
        loads=tuple(
            load._replace(flops=n * load.flops, traffic=n * load.traffic)
            for load, n in alike.items()
        ),
        # Both are read and written, and a gradient of the parameters' size is read.
        update_traffic=3 * parameters + 2 * optimizer,
        memory=step_memory(program),
        notes=tuple(dict.fromkeys([*sending.notes, *computing.notes])),
    )


def with_minibatches(work: StepWork, num_minibatches: int) -> StepWork:
    """The work of a step in one minibatch, in another number of them; its memory is an estimate."""
    assert work.num_minibatches == 1
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
      work: That of a step that gathers them as they are stored.
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
    collectives = tuple(
        dataclasses.replace(each, dtype=on_the_wire.get(each.purpose, each.dtype))
        for each in work.collectives
    )
    gathers = [each for each in work.collectives if each.purpose in (GATHER_SCOPE, REGATHER)]
    memory = work.memory
    if gathers:
        stored = max(each.dtype.itemsize for each in gathers)
        gathered = memory.gathered * jnp.dtype(gather_dtype).itemsize // stored
        memory = dataclasses.replace(memory, gathered=gathered)
    return dataclasses.replace(work, collectives=collectives, memory=memory)
