"""DiLoCo's program, with its inner and outer steps.

Its state is in `manualpar.strategies.diloco.state`, and its steps are in `steps`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self, cast

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from manualpar.core.mesh.axes import axes_size, with_axis_types
from manualpar.core.mesh.mesh_context import OutsideMeshes, no_mesh, on_auto_axes
from manualpar.core.mesh.rng import typed_key
from manualpar.core.parameters.collectives import CommPolicy
from manualpar.core.parameters.placement import with_shardings
from manualpar.core.program.guarded_step import GuardedStep, check_state
from manualpar.core.program.load_state import Missing, StartsFromArrays, check_has_devices
from manualpar.core.program.program import Program
from manualpar.core.state.train_state import TrainState
from manualpar.strategies.diloco.counted_steps import CountedStep, OuterStep, StepFunction
from manualpar.strategies.diloco.state import DiLoCoState
from manualpar.strategies.diloco.steps import ReplicaSteps, replicated_step


@dataclasses.dataclass(frozen=True)
class DiLoCoProgram(Program):
    """A program whose replicas take `every` inner steps between two outer steps.

    `step` is for evaluation: it treats the common parameters as replicated over the replicas.
    `train_step` runs `inner.step`. Each time the state has counted `every` more steps, `train_step`
    takes the outer step too. Several fragments have outer steps at different step numbers.
    `train_step.trace` and `lower` show the inner step.

    Attributes:
      inner: The program of one replica, on a mesh without the replicas' axes. It can be traced.
      replica_axes: The mesh axes of the replicas.
      every: The number of steps between two outer steps of the same fragment.
      fragments: The fragment's number for each of `parameters`; `None` for a frozen parameter.
      outer_steps: For each fragment a jitted `outer_step(state) -> state` that exchanges it. The
        state is donated.
      overlapped_outer_steps: For each fragment, a train step `(state, batch) -> (state, metrics)`
        that also exchanges this fragment while it trains; `()` without overlap.
      outer_wire: The dtype and the quantizer of exchanged differences.
    """

    inner: Program
    replica_axes: tuple[str, ...]
    every: int
    fragments: tuple[int | None, ...]
    outer_steps: tuple[Any, ...]
    overlapped_outer_steps: tuple[Any, ...]
    outer_wire: CommPolicy
    _state: DiLoCoState = dataclasses.field(repr=False)

    @property
    def outer_step(self) -> Any:
        """The outer step of the last fragment; with one fragment, of all parameters.

        `train_step` takes each outer step that is due. Call `outer_step` to exchange at other times
        too. Directly after an outer step it does nothing.
        """
        return self.outer_steps[-1]

    def step_at(self, number: int) -> StepFunction:
        """Returns the function of step `number`, counted from 1, without the state's counter."""
        return cast(CountedStep, self.train_step).at(number)

    def init_from(
        self, params_or_variables: Any, rng: jax.Array | None = None, *, missing: Missing = "error"
    ) -> TrainState:
        """Starts from parameters, as in every program; all replicas start with them."""
        state = super().init_from(params_or_variables, rng, missing=missing)
        return self._on_state(self._state.start_replicas, state)

    def adopt(self, state: TrainState) -> TrainState:
        """Adopts a state, as in every program; it may have another number of replicas."""
        examples = getattr(state, "local", {}).get("examples")
        number = self._num_replicas if examples is None else len(examples)
        if number == self._num_replicas:
            return super().adopt(state)
        return self.regrouped(StartsFromArrays.adopt(self.with_replicas(number), state))

    def with_replicas(self, number: int) -> Self:
        """Returns a program for states of `number` replicas; each replica uses all its devices.

        The program takes no steps. It loads states of other programs for `regrouped`.
        """

        def spread(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding = getattr(x, "sharding", None)
            if sharding is not None:
                sharding = NamedSharding(self.mesh, PartitionSpec(None, *sharding.spec[1:]))
            return jax.ShapeDtypeStruct((number, *x.shape[1:]), x.dtype, sharding=sharding)

        abstract, unpadded = (
            state.replace(local=jax.tree.map(spread, state.local))
            for state in (self.abstract_state, self.whole_state)
        )
        return dataclasses.replace(self, abstract_state=abstract, whole_state=unpadded)

    def regrouped(self, state: TrainState) -> TrainState:
        """Converts a state of `with_replicas` to this program, see `DiLoCoState.regroup`."""
        return self._on_state(self._state.regroup, state)

    @property
    def _num_replicas(self) -> int:
        return axes_size(self.mesh, self.replica_axes)

    def _on_state(self, function: Callable[[TrainState], TrainState], state: TrainState) -> Any:
        """Runs a function of states; donates all arrays except the per-replica arrays."""

        def run(common: TrainState, local: Any) -> TrainState:
            return function(common.replace(local=local))

        on_auto = on_auto_axes(run, mesh=self.mesh, out_specs=self.layout)
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        with no_mesh():  # `local` is not donated: its number of replicas may change.
            jitted = jax.jit(on_auto, out_shardings=shardings, donate_argnums=0)
            return jitted(state.replace(local={}), state.local)


def build_diloco(
    inner: Program,
    batch: Any,
    *,
    mesh: Mesh | AbstractMesh,
    replica_axes: tuple[str, ...],
    every: int,
    outer_tx: optax.GradientTransformation,
    outer_wire: CommPolicy,
    num_fragments: int,
    overlap: bool,
    compiler_options: dict[str, Any] | None,
) -> DiLoCoProgram:
    """Builds DiLoCo around one replica's program `inner`; `batch` is the abstract global batch."""
    name = "diloco"
    typed_mesh, mesh = cast(Mesh, mesh), cast(Mesh, with_axis_types(mesh, AxisType.Auto))
    roles = inner.step.roles
    first, *others = roles.batch_dims.items()
    roles = dataclasses.replace(roles, batch_dims={0: (*replica_axes, *first[1]), **dict(others)})
    step = replicated_step(name, inner, mesh, roles, replica_axes)
    state = DiLoCoState(inner, step.placements, mesh, replica_axes, outer_tx, num_fragments)
    steps = ReplicaSteps(inner, step, replica_axes, state, outer_wire)

    def shard(specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(typed_mesh, spec), specs)

    def jit(function: Callable[..., Any], out_specs: Any, **options: Any) -> Any:
        on_auto = on_auto_axes(function, mesh=typed_mesh, out_specs=out_specs)
        return OutsideMeshes(jax.jit(on_auto, **options))

    with no_mesh():
        padded = jax.eval_shape(state.create, jax.eval_shape(lambda: jax.random.key(0)))
        layout = state.layout(padded)
        shardings = shard(layout)
        abstract = with_shardings(padded, shardings)
        unpadded = state.unpadded_state()
    batch_specs = roles.batch_specs(batch)

    def jit_step(function: Callable[..., Any]) -> Any:
        return jit(
            function,
            (layout, PartitionSpec()),
            in_shardings=(shardings, None),
            out_shardings=(shardings, None),
            donate_argnums=0,
            compiler_options=compiler_options,
        )

    def jit_outer(fragment: int) -> Any:
        jitted = jit(
            functools.partial(steps.outer_step, fragment),
            layout,
            in_shardings=(shardings,),
            out_shardings=shardings,
            donate_argnums=0,
            compiler_options=compiler_options,
        )
        return OuterStep(jitted, functools.partial(check_state, "outer_step", abstract))

    eval_step = jit(
        step.evaluate,
        PartitionSpec(),
        in_shardings=(shardings, None),
        compiler_options=compiler_options,
    )
    has_devices = not isinstance(mesh, AbstractMesh)

    def guard(function: str, jitted: Any) -> Any:
        check = functools.partial(check_state, function, abstract)
        return GuardedStep(function, jitted, mesh, check) if has_devices else jitted

    def init(create: Callable[[jax.Array], TrainState], rng: Any) -> TrainState:
        check_has_devices("init", mesh)
        return create(typed_key("init", rng))

    outer_steps = tuple(map(jit_outer, range(num_fragments)))
    overlapped_outer_steps = tuple(
        guard("train_step", jit_step(functools.partial(steps.overlapped_outer_step, fragment)))
        for fragment in range(num_fragments if overlap else 0)
    )
    due_at = functools.partial(state.fragments.due_at, every=every)
    inner_step = guard("train_step", jit_step(steps.train))
    train_step = CountedStep(inner_step, outer_steps, overlapped_outer_steps, due_at, every)
    infos, placements = [info for info, _ in inner.parameters], jax.tree.leaves(step.placements)
    indices = iter(jax.tree.leaves(state.fragments.index))
    program = DiLoCoProgram(
        strategy=step.strategy,
        mode=inner.mode,
        mesh=typed_mesh,
        data_axes=roles.data_axes,
        num_minibatches=inner.num_minibatches,
        wire=inner.wire,
        layout=layout,
        parameters=tuple(zip(infos, placements, strict=True)),
        abstract_state=abstract,
        whole_state=unpadded,
        abstract_batch=with_shardings(batch, shard(batch_specs)),
        batch_sharding=NamedSharding(typed_mesh, roles.batch_spec),
        create=state.create,
        init=functools.partial(init, jit(state.create, layout, out_shardings=shardings)),
        train_step=cast(Any, train_step),
        eval_step=guard("eval_step", eval_step),
        step=step,
        inner=inner,
        replica_axes=replica_axes,
        every=every,
        fragments=tuple(next(indices) if place.trainable else None for place in placements),
        outer_steps=outer_steps,
        overlapped_outer_steps=overlapped_outer_steps,
        outer_wire=outer_wire,
        _state=state,
    )
    return program
