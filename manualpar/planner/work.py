"""What a step does, counted: the input of the roofline.

Read off the traced program in the walk that the ledger takes: collectives with their purposes, and
products with their operations and the bytes that they read and write. Of memory only the operands
and results of products and the operands of reductions count: elementwise operations read and write
them, fused to chains. With `fused_attention` the largest array
of a product with a batch dimension, the scores of attention, is taken as never leaving the chip and
the half that a causal mask hides as not computed, as in a flash attention kernel
(https://arxiv.org/abs/2205.14135).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from manualpar.core.program import Program
from manualpar.inspect.communication import Collective, CollectiveReader
from manualpar.inspect.equations import Around, EquationReader
from manualpar.inspect.layout import state_bytes
from manualpar.inspect.memory import Memory, step_memory
from manualpar.inspect.products import flops_of
from manualpar.inspect.scopes import phase_of

REDUCTIONS = frozenset(
    {"argmax", "cumlogsumexp", "cumsum", "reduce_max", "reduce_min", "reduce_sum"}
)


class Task(NamedTuple):
    """What a step is for, to turn its time into rates.

    Attributes:
      examples_per_step: Examples of a step, on all devices.
      tokens_per_example: Tokens of an example, 0 if it has none.
      flops_per_example: FLOPs that the model asks for, forward and backward, nothing recomputed.
    """

    examples_per_step: int
    tokens_per_example: int
    flops_per_example: float


class Load(NamedTuple):
    """What an operation takes of a device: a product, or a reduction, which has no operations.

    Attributes:
      phase: `forward`, `backward`, `recomputed` or `update`.
      dtype: Of its operands, the wider of two.
      flops: Operations of a step.
      traffic: Bytes that a step reads and writes for it.
    """

    phase: str
    dtype: str
    flops: float
    traffic: float


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step does on a device.

    Attributes:
      name: The strategy and the mode.
      mesh: The sizes of the mesh axes.
      task: What it is for.
      num_minibatches: In how many parts.
      collectives: What it sends.
      loads: What it computes.
      update_traffic: Bytes that the update reads and writes.
      memory: What it holds.
      notes: What was chosen or assumed in reading it.
    """

    name: str
    mesh: Mapping[str, int]
    task: Task
    num_minibatches: int
    collectives: tuple[Collective, ...]
    loads: tuple[Load, ...]
    update_traffic: int
    memory: Memory
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        """The operations of a device in a step."""
        return sum(load.flops for load in self.loads)

    @property
    def dtype(self) -> str:
        """The dtype in which most is computed."""
        totals: dict[str, float] = {}
        for load in self.loads:
            totals[load.dtype] = totals.get(load.dtype, 0) + load.flops
        return max(totals, key=lambda dtype: totals[dtype], default="float32")


def read_work(program: Program, task: Task, *, fused_attention: bool = False) -> Work:
    """Reads what a program's step does.

    Args:
      program: The program, on any mesh, an abstract one too.
      task: What it is for.
      fused_attention: Whether attention, a causal one, is taken as one kernel; what the step holds
        is the program's own all the same, scores included.

    Returns:
      The work of a device.

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
    computing = _LoadReader("roofline", fused_attention=fused_attention)
    around = Around(sizes={}, times=1, scope="", spread=program.mesh.size)
    collectives = sending.read(traced.jaxpr.jaxpr, around)
    loads = computing.read(traced.jaxpr.jaxpr, around)
    state = program.abstract_state
    parameters, optimizer = (state_bytes(x)[0] for x in (state.params, state.opt_state))
    return Work(
        name=f"{program.strategy.name} {program.mode}",
        mesh=dict(program.mesh.shape),
        task=task,
        num_minibatches=program.num_minibatches,
        collectives=collectives,
        loads=_added_up(loads),
        # Both are read and written, and a gradient of the parameters' size is read.
        update_traffic=3 * parameters + 2 * optimizer,
        memory=step_memory(program),
        notes=tuple(dict.fromkeys([*sending.notes, *computing.notes])),
    )


class _LoadReader(EquationReader[Load]):
    """Collects products and reductions."""

    verb = "computes"
    refuses_several = False

    def __init__(self, caller: str, *, fused_attention: bool) -> None:
        super().__init__(caller)
        self.fused_attention = fused_attention

    def find(self, eqn: Any, around: Around) -> tuple[Load, ...] | None:
        flops: float | None = flops_of(eqn)
        name = eqn.primitive.name
        if flops is None and name not in REDUCTIONS:
            return () if name == "pallas_call" else None
        arrays = [*eqn.invars, *eqn.outvars] if flops is not None else eqn.invars[:1]
        sizes = [math.prod(x.aval.shape) * x.aval.dtype.itemsize for x in arrays]
        if self.fused_attention and _is_of_scores(eqn, flops is not None):
            sizes.remove(max(sizes))
            flops = flops and flops / 2
        dtype = max((x.aval.dtype for x in eqn.invars), key=lambda dtype: dtype.itemsize)
        share = around.times / around.spread
        load = Load(phase_of(around.scope), str(dtype), (flops or 0) * share, sum(sizes) * share)
        return (load,)

    def cost(self, findings: tuple[Load, ...]) -> float:
        return sum(load.flops for load in findings)

    def describe(self, findings: tuple[Load, ...]) -> str:
        return f"computes {findings[0].flops:.0f} operations"


def _is_of_scores(eqn: Any, is_product: bool) -> bool:
    """Whether an operation makes or takes scores: a product with batch dims, or what reduces 4D."""
    if not is_product:
        return len(eqn.invars[0].aval.shape) >= 4
    if eqn.primitive.name != "dot_general":
        return False
    (_, _), (batch, _) = eqn.params["dimension_numbers"]
    return bool(batch)


def _added_up(loads: tuple[Load, ...]) -> tuple[Load, ...]:
    """Loads that are alike but for how often they run, which a unrolled model has many of."""
    totals: dict[Load, int] = {}
    for load in loads:
        totals[load] = totals.get(load, 0) + 1
    return tuple(
        load._replace(flops=n * load.flops, traffic=n * load.traffic) for load, n in totals.items()
    )
