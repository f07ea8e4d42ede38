"""What a device holds at the fullest moment of a training step, by what it is for.

What lies there between steps is known from the layout, to the byte. What a step needs besides is
found by walking through the traced step, see `manualpar.inspect.liveness`: nothing is compiled, so
it works as well on an abstract mesh of thousands of devices.

Classes, all of them at the same moment, the fullest:

    parameters   as they are stored between steps: shards
    optimizer    its state, as it is stored
    batch        a device's examples
    gathered     parameters while they are used: whole, cast, or a layer's slice of a stack
    gradients    of parameters, from where they are first whole or partial to the optimizer's update
    activations  whatever else is computed: what is kept for the backward pass, and what is not
    other        the step, the key, the model's other collections, and metrics

In modes `auto` and `explicit` XLA decides what is held. The memory is then that of the same step in
mode `manual`, in which a parameter is whole only where it is used and activations are split over
the data axes as the batch is; that is what XLA is asked for, and it may hold more.

Against XLA's compiler for TPUs (jax 0.10.2, libtpu 0.0.42.1, `v5e:2x4`), for a transformer of eight
scanned layers of 1,024 features and 1,024 positions, the peak is 0.92 of the compiled one with data
parallelism; with FSDP 1.14 with full rematerialisation, 0.99 with that of `dots`, 1.06 with none;
1.18 with four minibatches, and in float32.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from manualpar.core.collectives import OPTIMIZER_SCOPE
from manualpar.core.program import Program
from manualpar.core.step import Step
from manualpar.inspect.communication import KIND_OF_PRIMITIVE
from manualpar.inspect.liveness import FUSIONS, Fusion, Peak, find_peak
from manualpar.inspect.operations import Operation, Operations, Value

# What leaves a parameter a parameter, besides all-gathers.
_SAME_WEIGHT_WORDS = """
broadcast_in_dim convert_element_type dynamic_slice pad reduce_precision sharding_constraint slice
"""
_SAME_WEIGHT = frozenset(_SAME_WEIGHT_WORDS.split())
# What leaves a gradient a gradient, besides reductions over devices.
_SAME_GRADIENT_WORDS = """
add add_any concatenate cond convert_element_type div dynamic_slice mul neg pad reduce_precision
scan scatter-add select_n sharding_constraint slice stack store sub while
"""
_SAME_GRADIENT = frozenset(_SAME_GRADIENT_WORDS.split())


@dataclasses.dataclass(frozen=True)
class Memory:
    """The bytes on a device at the fullest moment of a step, by what they are for.

    Attributes:
      parameters: Of the parameters between steps.
      gradients: Of gradients, and of what the optimizer makes of them.
      optimizer: Of the optimizer's state between steps.
      gathered: Of parameters while they are used.
      activations: Of all else that is computed.
      batch: Of the batch.
      other: Of the rest of the state, and of metrics.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    batch: int
    other: int

    @property
    def peak(self) -> int:
        """All of them together."""
        return sum(dataclasses.astuple(self))

    @property
    def temporaries(self) -> int:
        """Those that are there within a step only: what XLA calls temporaries."""
        return self.gradients + self.gathered + self.activations

    def to_json(self) -> dict[str, int]:
        """The bytes by name, and `peak`."""
        return {**dataclasses.asdict(self), "peak": self.peak}


def step_memory(program: Program, *, platform: str = "tpu") -> Memory:
    """Finds what a device holds at the fullest moment of a training step.

    Args:
      program: The program; it needs not to have been compiled, nor its devices to exist.
      platform: Whose compiler is to be expected: `"tpu"` or `"cpu"`, see
        `manualpar.inspect.liveness`.

    Returns:
      The bytes by class. `parameters`, `optimizer` and `batch` are exact; of the others
      `benchmarks/planned_memory.py` says how far they are from what XLA allocates.

    Raises:
      ValueError: XLA is free to hold what it likes: the mode is `auto-unconstrained`, or one of the
        others in which it decides on a mesh with axes that do not split the batch.
    """
    state, batch = program.abstract_state, program.abstract_batch
    labels = jax.tree.map(lambda _: "other", state).replace(
        params=jax.tree.map(lambda _: "parameters", state.params),
        opt_state=jax.tree.map(lambda _: "optimizer", state.opt_state),
    )
    names = [*jax.tree.leaves(labels), *("batch" for _ in jax.tree.leaves(batch))]
    operations = Operations()
    arguments = [
        operations.value(x, parts=_parts(x, x.sharding), label=label)
        for x, label in zip(jax.tree.leaves((state, batch)), names, strict=True)
    ]
    written, results = operations.write_out(_trace(program), arguments, label="other")
    values = operations.values
    of_state = len(jax.tree.leaves(state))
    _label_weights(written, values)
    _label_gradients(written, values)
    metrics = [value for value in results[of_state:] if value is not None]
    for value in metrics:
        values[value].label = "other"
    replaced = list(zip(arguments[:of_state], results[:of_state], strict=True))
    peak = find_peak(
        written,
        values,
        results=metrics,
        replaced=[(old, new) for old, new in replaced if new is not None],
        fusion=_fusion("step_memory", platform),
    )
    held = Counter(peak.by_label)
    for argument in arguments:
        held[values[argument].label] += values[argument].size
    held["activations"] += held.pop("", 0)
    return Memory(**{field.name: held[field.name] for field in dataclasses.fields(Memory)})


def peak_memory(
    program: jax.stages.Traced | ClosedJaxpr,
    *,
    donated: Collection[int] = (),
    shardings: Sequence[Any] | None = None,
    platform: str = "tpu",
) -> Peak:
    """Finds what any traced function holds at its fullest moment.

    Args:
      program: What `jax.jit(f).trace(*args)` or `jax.make_jaxpr(f)(*args)` returns.
      donated: Which of its flat arguments are donated; of a `Traced` those that `jax.jit` was told
        of besides. An argument's place is taken by the first result of its shape and dtype.
      shardings: The sharding of each flat argument, `None` for one that is whole; if not given, all
        are.
      platform: As for `step_memory`.

    Returns:
      The bytes on a device by `arguments`, `results` and `temporaries`.

    Raises:
      TypeError: `program` is neither.
      ValueError: There are not as many shardings as arguments.
    """
    closed = program.jaxpr if isinstance(program, jax.stages.Traced) else program
    if not isinstance(closed, ClosedJaxpr):
        raise TypeError(
            f"peak_memory: program is a {type(program).__name__}, expected what "
            "jax.jit(f).trace(*args) or jax.make_jaxpr(f)(*args) returns."
        )
    given = closed.in_avals
    if shardings is not None and len(shardings) != len(given):
        raise ValueError(
            f"peak_memory: shardings has {len(shardings)} elements, expected one for each of the "
            f"{len(given)} flat arguments, None for one that is whole."
        )
    if isinstance(program, jax.stages.Traced):
        infos = jax.tree.leaves(program.args_info, is_leaf=lambda x: hasattr(x, "donated"))
        donated = {*donated, *(i for i, info in enumerate(infos) if info.donated)}
    operations = Operations()
    arguments = [
        operations.value(x, parts=_parts(x, sharding), label="arguments")
        for x, sharding in zip(given, shardings or [None] * len(given), strict=True)
    ]
    written, results = operations.write_out(closed, arguments, label="arguments")
    values = operations.values
    free: dict[Any, list[int]] = {}
    for index in sorted(donated):
        free.setdefault((given[index].shape, given[index].dtype), []).append(arguments[index])
    replaced, new = [], []
    for x, value in zip(closed.out_avals, results, strict=True):
        if value is None or values[value].label == "arguments":
            continue
        values[value].label = "results"
        if places := free.get((x.shape, x.dtype)):
            replaced.append((places.pop(0), value))
        else:
            new.append(value)
    for unlabelled in values:
        unlabelled.label = unlabelled.label or "temporaries"
    peak = find_peak(
        written,
        values,
        results=new,
        replaced=replaced,
        fusion=_fusion("peak_memory", platform),
    )
    held = Counter(peak.by_label)
    held["arguments"] += sum(values[argument].size for argument in arguments)
    return dataclasses.replace(peak, by_label=dict(held))


def _fusion(function: str, platform: str) -> Fusion:
    """What the compiler for a platform fuses."""
    if platform not in FUSIONS:
        raise ValueError(
            f"{function}: platform={platform!r}, expected one of {', '.join(map(repr, FUSIONS))}: "
            "how others fuse has not been measured. Take the one that is nearer."
        )
    return FUSIONS[platform]


def _trace(program: Program) -> ClosedJaxpr:
    """The step in mode `manual`."""
    step = program.train_step
    if program.mode != "manual":
        others = [axis for axis in program.mesh.axis_names if axis not in program.data_axes]
        if program.mode == "auto-unconstrained" or others:
            raise ValueError(
                f"step_memory: program has mode={program.mode!r}"
                f"{f' on a mesh with the axes {others} besides {program.data_axes}' * bool(others)}"
                ", expected mode 'manual', or 'auto' or 'explicit' on data axes alone: the "
                "compiler is free to hold what it likes. Compile it and ask its memory_analysis()."
            )
        jitted: Any = step
        written: Step = jitted.__wrapped__.__self__  # What was jitted is its method.
        assert written.update is not None
        update = dataclasses.replace(written.update, mode="manual")
        model = written.model.with_setting(mode="manual")
        manual = dataclasses.replace(written, mode="manual", model=model, update=update)
        step = jax.jit(manual.train)
    return step.trace(program.abstract_state, program.abstract_batch).jaxpr


def _parts(x: Any, sharding: Any) -> int:
    """How many parts an array is in."""
    if sharding is None or not math.prod(x.shape):
        return 1
    return math.prod(x.shape) // math.prod(sharding.shard_shape(x.shape))


def _label_weights(operations: Iterable[Operation], values: Sequence[Value]) -> None:
    """Labels what is made of parameters and still is one."""
    for op in operations:
        for body in op.bodies:
            _label_weights(body.operations, values)
        is_gather = KIND_OF_PRIMITIVE.get(op.name) == "all_gather"
        in_update = OPTIMIZER_SCOPE in op.scope.split("/")
        if is_gather or (op.name in _SAME_WEIGHT and not in_update):
            of = {values[value].label for value in op.inputs[:1]}
            if of & {"parameters", "gathered"} or (is_gather and in_update):
                for value in op.outputs:
                    values[value].label = "gathered"
        elif in_update:
            for value in op.outputs:
                values[value].label = "gradients"


def _label_gradients(operations: Sequence[Operation], values: Sequence[Value]) -> None:
    """Labels what the optimizer reads that is no argument, and what that was made of."""
    made = {value for op in operations for value in op.outputs}
    read: set[int] = set()
    for op in operations:
        if OPTIMIZER_SCOPE in op.scope.split("/"):
            read |= {value for value in op.inputs if value in made and not values[value].label}
    _trace_back(operations, values, read)


def _trace_back(operations: Sequence[Operation], values: Sequence[Value], found: set[int]) -> None:
    """Labels values, and in operations those they were made of, as far as they are gradients."""
    for op in reversed(operations):
        gradients = [value for value in op.outputs if value in found]
        if not gradients:
            continue
        for value in gradients:
            values[value].label = "gradients"
        for body in op.bodies:
            inner = zip(op.outputs, body.results, strict=True)
            _trace_back(
                body.operations, values, {y for x, y in inner if x in found and y is not None}
            )
        if op.bodies:
            found |= {old for old, new in op.written_over if new in found}
        elif op.name in _SAME_GRADIENT or op.name in KIND_OF_PRIMITIVE:
            size = min(values[value].elements for value in gradients)
            found |= {
                value
                for value in op.inputs
                if values[value].elements >= size and not values[value].label
            }
