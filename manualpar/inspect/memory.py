"""Estimates the memory of a device at the fullest moment of a training step, by class.

The shardings of the state and of the batch give the exact bytes held between steps. A model of the
compiler (`manualpar.inspect.peak_memory`) estimates the temporaries of the traced step. Nothing is
compiled, so the mesh may be an abstract mesh of thousands of devices.

The classes, all at the fullest moment:

    parameters   as they are stored between steps: shards
    optimizer    the optimizer's state, as it is stored
    batch        the examples of a device
    gathered     parameters while they are used: gathered, cast, or a layer's slice of a stack
    gradients    of parameters, from the first partial sums to the update
    activations  every other array that is computed, kept for the backward pass or not
    other        the step, the key, the model's other collections, and metrics

In modes `auto` and `explicit` XLA decides which arrays are held. The estimate is then the memory of
the same step in mode `manual`: a parameter is gathered only where it is used, and activations are
split over the data axes like the batch. The program's sharding constraints ask XLA for the same,
but XLA may hold more.

We measured the ratio of the estimated peak to the peak that XLA's compiler for TPUs reports, with
jax 0.10.2 and libtpu 0.0.42.1. On `v5e:2x4`, for a transformer of eight scanned layers of 1,024
features and 1,024 positions, the ratio is 0.92 with data parallelism. With FSDP it is 1.14 with
full rematerialisation, 0.99 with the policy `dots`, 1.06 without rematerialisation, and 1.18 with
four minibatches and in float32. For a transformer of 2,048 features and 2,048 positions on
`v5e:4x4`, with layers split over four chips, it is 1.01, and 0.99 with sequence parallelism.

For GPUs we compared with XLA's compiler for `h100:8` (jax-cuda12-pjrt 0.10.2), in bfloat16 with a
vocabulary of 32,000 and with scanned layers. For eight layers of 2,048 features and 2,048 positions
with full rematerialisation the ratio is 0.92. XLA's fullest moment is the loss, and not the loop
over layers: before the loss ends, XLA has gathered the last layer, computed it again, and made the
zeros to which the loop adds gradients. For four layers of 1,024 features and 1,024 positions the
ratio is 0.77, because XLA holds the head's gradient several times, padded and not. With data
parallelism it is 1.02.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from manualpar.core.modes.manual import Manual
from manualpar.core.program.program import Program
from manualpar.core.tracing.scopes import (
    DECODE_SCOPE,
    GATHER_SCOPE,
    OPTIMIZER_SCOPE,
    REDUCE_SCOPE,
    SCATTER_SCOPE,
    scope_names,
)
from manualpar.inspect.communication import KIND_OF_PRIMITIVE
from manualpar.inspect.peak_memory import FUSIONS, FlatProgram, FlatValue, Operation, find_peak
from manualpar.inspect.state_layout import state_bytes

# Primitives, apart from all-gathers, whose result is a parameter if their operand is a parameter.
_SAME_WEIGHT_WORDS = """
broadcast_in_dim convert_element_type dynamic_slice pad reduce_precision sharding_constraint slice
"""
_SAME_WEIGHT = frozenset(_SAME_WEIGHT_WORDS.split())
# Primitives, apart from collectives, whose operands are gradients if the result is a gradient.
_SAME_GRADIENT_WORDS = """
add add_any concatenate cond convert_element_type div dynamic_slice mul neg pad reduce_precision
scan scatter-add select_n sharding_constraint slice stack store sub while
"""
_SAME_GRADIENT = frozenset(_SAME_GRADIENT_WORDS.split())


@dataclasses.dataclass(frozen=True)
class Memory:
    """The bytes on a device at the fullest moment of a step, by the module's classes."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    batch: int
    other: int

    @property
    def peak(self) -> int:
        """The sum of all classes."""
        return sum(vars(self).values())

    @property
    def temporaries(self) -> int:
        """The classes that exist only within a step; XLA calls them temporaries."""
        return self.gradients + self.gathered + self.activations

    def to_json(self) -> dict[str, int]:
        """Returns the bytes of each class by name, and `peak`."""
        return {**dataclasses.asdict(self), "peak": self.peak}


def step_memory(program: Program, *, platform: str = "tpu") -> Memory:
    """Estimates the memory of a device at the fullest moment of a training step.

    Args:
      program: The program; it need not be compiled, and its devices need not exist.
      platform: The platform of the compiler: `"tpu"`, `"gpu"` or `"cpu"`, see
        `manualpar.inspect.peak_memory`.

    Returns:
      The bytes by class. `parameters`, `optimizer` and `batch` are exact;
      `benchmarks/planned_memory.py` measures the error of the other classes against XLA's
      allocations.

    Raises:
      ValueError: The platform is unknown; or XLA is free to choose the arrays that a device holds:
        the mode is `auto-unconstrained`, or it is `auto` or `explicit` on a mesh with axes that do
        not split the batch.
    """
    if platform not in FUSIONS:
        raise ValueError(
            f"step_memory: platform={platform!r}, expected one of "
            f"{', '.join(map(repr, FUSIONS))}, because it is not known which operations other "
            "compilers fuse. Use the more similar platform."
        )
    if program.outer is not None:  # One replica's step, plus the state that replicas share.
        state = program.abstract_state
        common, _ = state_bytes((state.params, state.opt_state, state.collections))
        inner = step_memory(program.outer.inner, platform=platform)
        return dataclasses.replace(inner, other=inner.other + common)
    state, batch = program.abstract_state, program.abstract_batch
    labels = jax.tree.map(lambda _: "other", state).replace(
        params=jax.tree.map(lambda _: "parameters", state.params),
        opt_state=jax.tree.map(lambda _: "optimizer", state.opt_state),
    )
    others = program.abstract_others  # They are stored as the program's own parameters are.
    names = [*jax.tree.leaves(labels), *("batch" for _ in jax.tree.leaves(batch))]
    names += ["parameters" for _ in jax.tree.leaves(others)]
    flat = FlatProgram()
    values = flat.values
    arguments = [
        flat.add_value(x, parts=_parts(x), label=label)
        for x, label in zip(jax.tree.leaves((state, batch, others)), names, strict=True)
    ]
    step = flat.flatten(_trace(program), arguments, label="other")
    of_state = len(jax.tree.leaves(state))
    _label_weights(step.operations, values)
    _label_gradients(step.operations, values)
    metrics = [value for value in step.results[of_state:] if value is not None]
    for value in metrics:
        values[value].label = "other"
    replaced = zip(arguments[:of_state], step.results[:of_state], strict=True)
    held_by_label = find_peak(
        step.operations,
        values,
        kept=metrics,
        replaced=[(old, new) for old, new in replaced if new is not None],
        fusion=FUSIONS[platform],
    )
    for argument in arguments:
        held_by_label[values[argument].label] += values[argument].size
    held_by_label["activations"] += held_by_label.pop("", 0)
    return Memory(**{field.name: held_by_label[field.name] for field in dataclasses.fields(Memory)})


def _trace(program: Program) -> ClosedJaxpr:
    """Traces the step in mode `manual`."""
    step = program.train_step
    if program.mode != "manual":
        others = [axis for axis in program.mesh.axis_names if axis not in program.data_axes]
        if program.mode == "auto-unconstrained" or others:
            raise ValueError(
                f"step_memory: program has mode={program.mode!r}"
                f"{f' on a mesh with the axes {others} besides {program.data_axes}' * bool(others)}"
                ", expected mode 'manual', or 'auto' or 'explicit' with data axes only. In this "
                "program the compiler decides how activations are sharded: compile the step and "
                "read its memory_analysis()."
            )
        asked = program.step
        mode = Manual(asked.mode.mesh, asked.mode.data_axes, asked.mode.comm)
        update = dataclasses.replace(asked.update, mode=mode)
        model = dataclasses.replace(asked.model, mode=mode)
        step = jax.jit(dataclasses.replace(asked, mode=mode, model=model, update=update).train)
    more = (program.abstract_others,) if program.abstract_others else ()
    return step.trace(program.abstract_state, program.abstract_batch, *more).jaxpr


def _parts(x: Any) -> int:
    """Returns the number of parts into which an array is split."""
    if x.sharding is None or not x.size:
        return 1
    return int(x.size) // math.prod(x.sharding.shard_shape(x.shape))


def _label_weights(operations: Sequence[Operation], values: Sequence[FlatValue]) -> None:
    """Labels the values that are copies of parameters as `gathered`."""
    for op in operations:
        for body in op.bodies:
            _label_weights(body.operations, values)
        is_gather = KIND_OF_PRIMITIVE.get(op.name) == "all_gather"
        in_update = OPTIMIZER_SCOPE in op.scope.split("/")
        # Quantized parameters, and the values decoded from them.
        is_quantized = not {GATHER_SCOPE, DECODE_SCOPE}.isdisjoint(scope_names(op.scope))
        if is_gather or ((op.name in _SAME_WEIGHT or is_quantized) and not in_update):
            of = {values[value].label for value in op.inputs[: None if is_quantized else 1]}
            if of & {"parameters", "gathered"} or (is_gather and in_update):
                for value in op.outputs:
                    values[value].label = "gathered"
        elif in_update:
            for value in op.outputs:
                values[value].label = "gradients"


def _label_gradients(operations: Sequence[Operation], values: Sequence[FlatValue]) -> None:
    """Labels the gradients that the optimizer reads, and all gradients summed into them."""
    made = {value for op in operations for value in op.outputs}
    read: set[int] = set()
    for op in operations:
        if OPTIMIZER_SCOPE in op.scope.split("/"):
            read |= {value for value in op.inputs if value in made and not values[value].label}
    _trace_back(operations, values, read)


def _trace_back(
    operations: Sequence[Operation], values: Sequence[FlatValue], gradients_found: set[int]
) -> None:
    """Labels the values `gradients_found` as gradients, and the gradients summed into them."""
    for op in reversed(operations):
        gradients = [value for value in op.outputs if value in gradients_found]
        if not gradients:
            continue
        for value in gradients:
            values[value].label = "gradients"
        for body in op.bodies:
            inner = zip(op.outputs, body.results, strict=True)
            _trace_back(
                body.operations,
                values,
                {y for x, y in inner if x in gradients_found and y is not None},
            )
        is_quantized = not {SCATTER_SCOPE, REDUCE_SCOPE}.isdisjoint(scope_names(op.scope))
        if op.bodies:
            gradients_found |= {old for old, new in op.written_over if new in gradients_found}
        elif is_quantized:  # Quantized gradients, and the values that were quantized.
            gradients_found |= {value for value in op.inputs if not values[value].label}
        elif op.name in _SAME_GRADIENT or op.name in KIND_OF_PRIMITIVE:
            size = min(values[value].elements for value in gradients)
            gradients_found |= {
                value
                for value in op.inputs
                if values[value].elements >= size and not values[value].label
            }
