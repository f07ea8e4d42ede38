"""Builds DiLoCo's program, with its inner and outer steps.

The module `state` makes DiLoCo's state, and the module `steps` has the step functions.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from manualpar.core.mesh.axes import axes_size, with_axis_types
from manualpar.core.mesh.mesh_context import no_mesh, on_auto_axes
from manualpar.core.parameters.comm_policy import CommPolicy
from manualpar.core.parameters.placement import with_shardings
from manualpar.core.program.jitted_steps import JittedSteps
from manualpar.core.program.outer_steps import OuterSteps, StepFunction
from manualpar.core.program.program import Program
from manualpar.core.state.train_state import TrainState
from manualpar.strategies.diloco.counted_steps import CountedStep, OuterStep
from manualpar.strategies.diloco.state import DiLoCoState
from manualpar.strategies.diloco.steps import ReplicaSteps, replicated_step


@dataclasses.dataclass(frozen=True, repr=False)
class DiLoCo(OuterSteps):
    """DiLoCo's outer steps, as a program uses them.

    Attributes:
      train_step: The program's train step, which also takes the outer steps that are due.
      state: Makes and regroups the state.
    """

    train_step: CountedStep
    state: DiLoCoState

    def step_at(self, number: int) -> StepFunction:
        """Returns the function that takes step `number`, counted from 1."""
        return self.train_step.at(number)

    def start_replicas(self, program: Program, state: TrainState) -> TrainState:
        """Replaces all replicas by new ones that start with the state's common parameters."""
        return _on_state(program, self.state.start_replicas, state)

    def for_replicas_of(self, program: Program, per_device: Mapping[str, Any]) -> Program:
        """Returns a program that loads states with the number of replicas in `per_device`.

        Each device loads its part of every replica. The program is only for loading, and takes no
        steps.
        """
        shape = getattr(per_device.get("examples"), "shape", ())
        if not shape or shape[0] == axes_size(program.mesh, self.replica_axes):
            return program

        def spread(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding = getattr(x, "sharding", None)
            if sharding is not None:
                sharding = NamedSharding(program.mesh, PartitionSpec(None, *sharding.spec[1:]))
            return jax.ShapeDtypeStruct((shape[0], *x.shape[1:]), x.dtype, sharding=sharding)

        abstract, unpadded = (
            state.replace(local=jax.tree.map(spread, state.local))
            for state in (program.abstract_state, program.unpadded_state)
        )
        return dataclasses.replace(program, abstract_state=abstract, unpadded_state=unpadded)

    def regroup(self, program: Program, state: TrainState) -> TrainState:
        """Converts a state with another number of replicas, see `DiLoCoState.regroup`."""
        if state.local["examples"].shape == program.abstract_state.local["examples"].shape:
            return state
        return _on_state(program, self.state.regroup, state)


def _on_state(
    program: Program, function: Callable[[TrainState], TrainState], state: TrainState
) -> TrainState:
    """Jits and runs `function(state)`; donates all arrays except the per-replica arrays."""

    def run(common: TrainState, local: Any) -> TrainState:
        return function(common.replace(local=local))

    on_auto = on_auto_axes(run, mesh=program.mesh, out_specs=program.layout)
    shardings = jax.tree.map(lambda x: x.sharding, program.abstract_state)
    with no_mesh():  # `local` is not donated, because its number of replicas may change.
        jitted = jax.jit(on_auto, out_shardings=shardings, donate_argnums=0)
        return cast(TrainState, jitted(state.replace(local={}), state.local))


def build_diloco(
    inner: Program,
    batch: Any,
    *,
    mesh: Mesh | AbstractMesh,
    replica_axes: tuple[str, ...],
    every: int,
    outer_tx: optax.GradientTransformation,
    outer_comm: CommPolicy,
    num_fragments: int,
    overlap: bool,
    compiler_options: dict[str, Any] | None,
) -> Program:
    """Builds DiLoCo around one replica's program `inner`; `batch` is the abstract global batch."""
    name = "diloco"
    typed_mesh, mesh = cast(Mesh, mesh), cast(Mesh, with_axis_types(mesh, AxisType.Auto))
    roles = inner.roles
    first, *others = roles.batch_dims.items()
    roles = dataclasses.replace(roles, batch_dims={0: (*replica_axes, *first[1]), **dict(others)})
    step = replicated_step(name, inner, mesh, roles, replica_axes)
    state = DiLoCoState(inner, step.placements, mesh, replica_axes, outer_tx, num_fragments)
    steps = ReplicaSteps(inner, step, replica_axes, state, outer_comm)

    with no_mesh():
        padded = jax.eval_shape(state.create, jax.eval_shape(lambda: jax.random.key(0)))
        layout = state.layout(padded)
        jitted = JittedSteps(typed_mesh, layout, padded, compiler_options)
        unpadded = state.unpadded_state()

    def jit_outer(fragment: int) -> OuterStep:
        update = jitted.jit_update(functools.partial(steps.outer_step, fragment))
        return OuterStep(update, jitted.check("outer_step"))

    outer_steps = tuple(map(jit_outer, range(num_fragments)))
    overlapped_steps = tuple(
        jitted.jit_train_step(functools.partial(steps.overlapped_outer_step, fragment))
        for fragment in range(num_fragments if overlap else 0)
    )
    due_at = functools.partial(state.fragments.due_at, every=every)
    inner_step = jitted.jit_train_step(steps.train)
    train_step = CountedStep(inner_step, outer_steps, overlapped_steps, due_at, every)
    infos, placements = [info for info, _ in inner.parameters], jax.tree.leaves(step.placements)
    indices = iter(jax.tree.leaves(state.fragments.index))
    outer = DiLoCo(
        inner=inner,
        replica_axes=replica_axes,
        every=every,
        fragments=tuple(next(indices) if place.trainable else None for place in placements),
        steps=outer_steps,
        overlapped_steps=overlapped_steps,
        comm=outer_comm,
        train_step=train_step,
        state=state,
    )
    return Program(
        strategy=step.strategy,
        mode=inner.mode,
        mesh=jitted.mesh,
        data_axes=roles.data_axes,
        num_minibatches=inner.num_minibatches,
        comm=inner.comm,
        layout=layout,
        parameters=tuple(zip(infos, placements, strict=True)),
        abstract_state=jitted.abstract_state,
        unpadded_state=unpadded,
        abstract_batch=with_shardings(batch, jitted.shard(roles.batch_specs(batch))),
        batch_sharding=jitted.shard(roles.batch_spec),
        create=state.create,
        init=jitted.jit_init(state.create),
        train_step=cast(Any, train_step),
        eval_step=jitted.jit_eval_step(step.evaluate),
        step=step,
        outer=outer,
    )
