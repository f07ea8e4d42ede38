"""Jits the functions of a program, with the shardings of its state."""

import functools
from collections.abc import Callable
from typing import Any, Protocol, cast

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from manualpar.core.mesh.axes import with_axis_types
from manualpar.core.mesh.mesh_context import OutsideMeshes, on_auto_axes
from manualpar.core.mesh.rng import typed_key
from manualpar.core.parameters.placement import with_shardings
from manualpar.core.program.guarded_step import GuardedStep, check_state
from manualpar.core.program.load_state import check_has_devices
from manualpar.core.state.metrics import Metrics
from manualpar.core.state.train_state import TrainState
from manualpar.core.trees import Batch, Specs


class TrainStep(Protocol):
    """A jitted step of training."""

    def __call__(self, state: TrainState, batch: Batch, /) -> tuple[TrainState, Metrics]:
        """Makes a training step; the state is donated."""

    def trace(self, *args: Any) -> jax.stages.Traced:
        """Traces the step, as `jax.jit` does."""

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the step, as `jax.jit` does."""


class EvalStep(Protocol):
    """A jitted step of evaluation."""

    def __call__(self, state: TrainState, batch: Batch, /) -> Metrics:
        """Computes the metrics of a batch."""

    def trace(self, *args: Any) -> jax.stages.Traced:
        """Traces the step, as `jax.jit` does."""

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the step, as `jax.jit` does."""


class JittedSteps:
    """Jits functions of a training state on a mesh.

    A step runs on a mesh with automatic axes. States and batches are sharded over the same mesh,
    but its axes are explicit if any axis of the user's mesh is explicit.

    Attributes:
      mesh: The mesh over which states and batches are sharded.
      shardings: The state with a sharding at each leaf.
      abstract_state: The state as `jax.ShapeDtypeStruct`s with shardings.
    """

    def __init__(
        self,
        mesh: Mesh | AbstractMesh,
        layout: TrainState,
        state: TrainState,
        compiler_options: dict[str, Any] | None,
    ) -> None:
        """Decides the shardings.

        Args:
          mesh: The user's mesh.
          layout: The state with a `PartitionSpec` at each leaf.
          state: The abstract state, without shardings.
          compiler_options: XLA's options for steps.
        """
        is_explicit = AxisType.Explicit in mesh.axis_types
        axis_type = AxisType.Explicit if is_explicit else AxisType.Auto
        self.mesh: Any = with_axis_types(mesh, axis_type)
        self._layout, self._compiler_options = layout, compiler_options
        self.shardings = self.shard(layout)
        self.abstract_state: TrainState = with_shardings(state, self.shardings)

    def shard(self, specs: Specs) -> Any:
        """Returns a sharding for each `PartitionSpec` of a tree."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def jit_init(self, create: Callable[[jax.Array], TrainState]) -> Callable[..., TrainState]:
        """Jits `create`, which makes a state from a key. The result also takes raw keys."""
        jitted = self._jit(create, self._layout, out_shardings=self.shardings)

        def init(rng: Any) -> TrainState:
            check_has_devices("init", self.mesh)
            return cast(TrainState, jitted(typed_key("init", rng)))

        return init

    def jit_train_step(self, function: Callable[..., Any]) -> TrainStep:
        """Jits a `function(state, batch) -> (state, metrics)`; its calls donate the state."""
        jitted = self._jit(
            function,
            (self._layout, PartitionSpec()),
            in_shardings=(self.shardings, None),
            out_shardings=(self.shardings, None),
            donate_argnums=0,
            compiler_options=self._compiler_options,
        )
        return cast(TrainStep, self._guarded("train_step", jitted))

    def jit_eval_step(self, function: Callable[..., Any]) -> EvalStep:
        """Jits a `function(state, batch) -> metrics`."""
        jitted = self._jit(
            function,
            PartitionSpec(),
            in_shardings=(self.shardings, None),
            compiler_options=self._compiler_options,
        )
        return cast(EvalStep, self._guarded("eval_step", jitted))

    def jit_update(self, function: Callable[[TrainState], TrainState]) -> OutsideMeshes:
        """Jits a `function(state) -> state`; its calls donate the state."""
        return self._jit(
            function,
            self._layout,
            in_shardings=(self.shardings,),
            out_shardings=self.shardings,
            donate_argnums=0,
            compiler_options=self._compiler_options,
        )

    def check(self, name: str) -> Callable[[Any], None]:
        """Returns a function that refuses a state that does not fit; errors begin with `name`."""
        return functools.partial(check_state, name, self.abstract_state)

    def _jit(self, function: Callable[..., Any], out_specs: Specs, **options: Any) -> OutsideMeshes:
        on_auto = on_auto_axes(function, mesh=self.mesh, out_specs=out_specs)
        return OutsideMeshes(jax.jit(on_auto, **options))

    def _guarded(self, name: str, step: OutsideMeshes) -> Any:
        if isinstance(self.mesh, AbstractMesh):  # Such a step can only be traced.
            return step
        return GuardedStep(name, step.jitted, self.mesh, self.check(name))
