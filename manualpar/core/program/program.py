"""Builds a program from a model, a loss and an optimizer: `init`, `train_step` and `eval_step`.

The state is a plain tree of global arrays. One jitted call initialises it with the layout's
shardings, so that no device ever holds more than its shards. A step is also one jitted call, see
`manualpar.core.program.step`.

`make_program` decides the shardings of the state and the operations of a step (`_design`), and
jits the functions (`_assemble`). This uses no device, so the mesh may be abstract.
"""

import abc
import dataclasses
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, Protocol, cast

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from manualpar.core.mesh.axes import axis_tuple, check_mesh_has, with_axis_types
from manualpar.core.mesh.mesh import platform_of
from manualpar.core.mesh.mesh_context import (
    JittedOutsideMesh,
    cannot_pickle,
    with_auto_axes,
)
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.mesh.splitting import check_batch, shapes_of_batch, typed_key
from manualpar.core.model.interface import Model
from manualpar.core.model.loss_function import LossFn
from manualpar.core.model.options import (
    ProgramOptions,
    choose_formats,
)
from manualpar.core.model.trace_model import OtherModel, TracedModel, trace_model
from manualpar.core.modes.global_arrays import Auto, Explicit, Unconstrained
from manualpar.core.modes.gradients import scanned, unrolled
from manualpar.core.modes.layer_loops import LayerChoice, LayerLoops, Remat, hosts_of, memory_of
from manualpar.core.modes.manual import Manual
from manualpar.core.modes.mode import Mode
from manualpar.core.modes.strategy import (
    ModeName,
    Pipelined,
    Strategy,
    check_strategy,
    place_parameter,
)
from manualpar.core.parameters.annotations import check_rules
from manualpar.core.parameters.collectives import (
    GatherCode,
    GatherQuantizer,
    MixedPrecisionPolicy,
    ReduceCode,
)
from manualpar.core.parameters.placement import (
    ParameterInfo,
    ParameterSharding,
    Placement,
    as_parameter,
    choose_matrices,
    like_params,
    map_padded,
    param_specs,
    parameter_sharding,
    partition,
    state_specs,
    strip_boxes,
    trained,
    with_shardings,
)
from manualpar.core.parameters.sharded_parameter import pad_leaf
from manualpar.core.program.optimizer_update import (
    Optimizer,
    Update,
    explain_optimizer,
    is_optimizer,
    optimizer_for,
)
from manualpar.core.program.state_arrays import Missing, adopt, check_has_devices, init_from, whole
from manualpar.core.program.step import Rounding, Step
from manualpar.core.state.metrics import Metrics
from manualpar.core.state.train_state import TrainState
from manualpar.core.summary import Summarized, describe_shapes, describe_tree
from manualpar.core.trees import Batch, Infos, Placements, Specs, path_keys

# -------------------------------------------------------------------------------------------------
# Makes a program's training state before the first step: its values, padding and shardings.


class InitialState:
    """Makes, pads and shards the training state.

    Attributes:
      unpadded: The abstract state without padding, as on one device.
      padded: The abstract state with the program's padding.
      layout: The state with a `PartitionSpec` at each leaf.
      opt_padding: The padding of each leaf of the optimizer's state.
    """

    def __init__(
        self,
        model: TracedModel,
        tx: optax.GradientTransformation,
        placements: Placements,
        rounding: Rounding,
        place: Callable[[ParameterInfo], Placement],
    ) -> None:
        """Decides the layout; `place` places arrays of the optimizer's state that are like none."""
        placements, replicated = model.own(placements), Placement(())
        infos = {
            path_keys(path): info
            for path, info in jax.tree_util.tree_leaves_with_path(model.own(model.parameters))
        }
        self._model, self._tx, self._placements, self._rounding = model, tx, placements, rounding
        key = jax.eval_shape(lambda: jax.random.key(0))
        self.unpadded = jax.eval_shape(self._state, model.own_variables, key)

        def place_other(keys: tuple[Any, ...], x: Any) -> Placement:
            described = as_parameter(infos[keys], x)
            return replicated if described is None else place(described)

        opt_placements = like_params(
            self.unpadded.opt_state, self.unpadded.params, placements, replicated, place_other
        )
        self.opt_padding = tuple(place.padding for place in jax.tree.leaves(opt_placements))
        self.padded = jax.eval_shape(self._pad, self.unpadded)
        layout = jax.tree.map(lambda _: PartitionSpec(), self.padded)
        self.layout = layout.replace(
            params=param_specs(placements),
            opt_state=state_specs(opt_placements),
            local=rounding.specs(),
        )

    def create(self, rng: jax.Array) -> TrainState:
        """Creates the initial state, with padding."""
        init_rng, rng = jax.random.split(rng)
        return self._pad(self._state(self._model.create_variables(init_rng), rng))

    def _pad(self, state: TrainState) -> TrainState:
        params = jax.tree.map(
            lambda place, x: pad_leaf(x, place.parameter_padding), self._placements, state.params
        )
        opt_state = map_padded(pad_leaf, state.opt_state, self.opt_padding)
        return state.replace(params=params, opt_state=opt_state)

    def _state(self, variables: dict[str, Any], rng: jax.Array) -> TrainState:
        params = variables["params"]
        with explain_optimizer("its init"):
            opt_state = self._tx.init(partition(self._placements, params)[0])
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            apply_fn=self._model.apply_fn,
            params=params,
            tx=self._tx,
            opt_state=opt_state,
            rng=rng,
            collections={name: tree for name, tree in variables.items() if name != "params"},
            local=self._rounding.zeros(),
        )


# -------------------------------------------------------------------------------------------------
# Jits the functions of a program, with the shardings of its state.


class TrainStep(Protocol):
    """A jitted step of training."""

    def __call__(
        self, state: TrainState, batch: Batch, /, **others: Any
    ) -> tuple[TrainState, Metrics]:
        """Makes a training step; the state is donated. `others` are states of `other_models`."""

    def trace(self, *args: Any) -> jax.stages.Traced:
        """Traces the step, as `jax.jit` does."""

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the step, as `jax.jit` does."""


class EvalStep(Protocol):
    """A jitted step of evaluation."""

    def __call__(self, state: TrainState, batch: Batch, /, **others: Any) -> Metrics:
        """Computes the metrics of a batch. `others` are states of `other_models`."""

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
      abstract_others: The variables of other models likewise, by the models' names.
    """

    def __init__(
        self,
        mesh: Mesh | AbstractMesh,
        layout: TrainState,
        state: TrainState,
        compiler_options: dict[str, Any] | None,
        others: tuple[Any, Any] = ({}, {}),
    ) -> None:
        """Decides the shardings.

        Args:
          layout: The state with a `PartitionSpec` at each leaf.
          state: The abstract state, without shardings.
          others: A pair of dicts by the names of `other_models`: the variables with a
            `PartitionSpec` at each leaf, and the abstract variables without shardings.
        """
        is_explicit = AxisType.Explicit in mesh.axis_types
        axis_type = AxisType.Explicit if is_explicit else AxisType.Auto
        self.mesh: Any = with_axis_types(mesh, axis_type)
        self._layout, self._compiler_options = layout, compiler_options
        self.shardings = self.shard(layout)
        self.abstract_state: TrainState = with_shardings(state, self.shardings)
        self._others = self.shard(others[0])
        self.abstract_others: dict[str, Any] = with_shardings(others[1], self._others)

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
            in_shardings=self._of_arguments,
            out_shardings=(self.shardings, None),
            donate_argnums=0,
            compiler_options=self._compiler_options,
        )
        return cast(TrainStep, JittedOutsideMesh(jitted.jitted, self.abstract_others))

    def jit_eval_step(self, function: Callable[..., Any]) -> EvalStep:
        """Jits a `function(state, batch) -> metrics`."""
        jitted = self._jit(
            function,
            PartitionSpec(),
            in_shardings=self._of_arguments,
            compiler_options=self._compiler_options,
        )
        return cast(EvalStep, JittedOutsideMesh(jitted.jitted, self.abstract_others))

    def jit_update(self, function: Callable[[TrainState], TrainState]) -> JittedOutsideMesh:
        """Jits a `function(state) -> state`; its calls donate the state."""
        return self._jit(
            function,
            self._layout,
            in_shardings=(self.shardings,),
            out_shardings=self.shardings,
            donate_argnums=0,
            compiler_options=self._compiler_options,
        )

    @property
    def _of_arguments(self) -> tuple[Any, ...]:
        return (self.shardings, None, *((self._others,) if self._others else ()))

    def _jit(
        self, function: Callable[..., Any], out_specs: Specs, **options: Any
    ) -> JittedOutsideMesh:
        on_auto = with_auto_axes(function, mesh=self.mesh, out_specs=out_specs)
        return JittedOutsideMesh(jax.jit(on_auto, **options))


# -------------------------------------------------------------------------------------------------
# The interface of outer steps, in which replicas that train separately exchange parameters.


# (state, batch) -> (state, metrics).
StepFunction = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True, repr=False)
class OuterSteps(Summarized, abc.ABC):
    """The outer steps of a program whose replicas train separately, such as DiLoCo.

    Attributes:
      inner: The program of one replica, on a mesh without the replicas' axes. This program can be
        traced.
      replica_axes: The mesh axes of the replicas.
      every: The number of steps between two exchanges of the same fragment. A fragment is a set of
        parameters that are exchanged in the same outer step.
      fragments: For each of `Program.parameters` the number of its fragment; `None` for a frozen
        parameter.
      steps: For each fragment, a jitted `outer_step(state) -> state` that exchanges the fragment.
        The state is donated.
      overlapped_steps: For each fragment, a train step `(state, batch) -> (state, metrics)` that
        also exchanges the fragment; `()` without overlap.
      comm: The format in which the replicas' differences from the common parameters are sent.
    """

    inner: "Program"
    replica_axes: tuple[str, ...]
    every: int
    fragments: tuple[int | None, ...]
    steps: tuple[Any, ...]
    overlapped_steps: tuple[Any, ...]
    comm: MixedPrecisionPolicy

    @abc.abstractmethod
    def step_at(self, number: int) -> StepFunction:
        """Returns the function that takes step `number`, counted from 1."""

    @abc.abstractmethod
    def start_replicas(self, program: "Program", state: TrainState) -> TrainState:
        """Replaces all replicas in a state by new ones that start with the state's parameters."""

    @abc.abstractmethod
    def for_replicas_of(self, program: "Program", per_device: Mapping[str, Any]) -> "Program":
        """Returns a program that loads states with the number of replicas in `per_device`.

        Args:
          per_device: The arrays of `TrainState.local`, or their shapes.
        """

    @abc.abstractmethod
    def change_replicas(self, program: "Program", state: TrainState) -> TrainState:
        """Converts a state with another number of replicas to a state of `program`."""


# -------------------------------------------------------------------------------------------------


_MODES: dict[str, type[Mode]] = {x.name: x for x in (Manual, Auto, Explicit, Unconstrained)}


@dataclasses.dataclass(frozen=True, repr=False)
class Program(Summarized):
    """A model's training under one strategy.

    Attributes:
      strategy: The strategy.
      mode: The name of the mode, which decides whether this package or XLA writes the collectives.
      mesh: The program's mesh. With an abstract mesh it can be traced but not run.
      data_axes: The mesh axes that split the examples.
      num_minibatches: The number of minibatches into which a device splits its part of a batch.
      comm: The formats in which values are sent, and whether collectives run axis by axis.
      layout: A `TrainState` with a `PartitionSpec` at each leaf.
      parameters: A `(ParameterInfo, ParameterSharding)` for each parameter, in the order of the
        tree. The sharding's note gives the reason why a parameter is replicated.
      abstract_state: A `TrainState` of `jax.ShapeDtypeStruct`s with shardings.
      unpadded_state: The abstract state without padding and shardings, as on one device.
      abstract_batch: The batch that the program was built for, as `jax.ShapeDtypeStruct`s with
        shardings.
      abstract_others: The variables of `other_models`, by name, as `jax.ShapeDtypeStruct`s with
        shardings; `{}` if there are none.
      batch_sharding: The sharding of a batch's leaves: the leading dimension is split over the
        data axes. `jax.device_put(batch, program.batch_sharding)` shards a batch. A batch with
        another sharding is copied to other devices in every step. A batch that has scalars needs
        the shardings of `abstract_batch`.
      create: The function that `init` jits. It makes a state from a key, without shardings.
      init: `init(rng) -> TrainState`. It splits the key: `init_rng, rng = jax.random.split(rng)`.
        On every mesh the parameters equal, bit for bit, the result of a jitted
        `model.init({"params": init_rng}, batch.inputs, train=False)`. The option `init_args`
        replaces the arguments of this call. (Without `jit` the last bit may be rounded
        differently.) No device ever holds more than its shards.
      train_step: `train_step(state, batch) -> (state, metrics)`, jitted. The state is donated, so
        use the returned state. With `other_models` a step also takes their states by name,
        `train_step(state, batch, critic=its_state)`, which are not donated. Metrics are `(sum,
        count)` pairs over the global batch, the same on all devices. With the option
        `nonfinite="skip"`, a step that is skipped changes only the state's step number and key, see
        `ProgramOptions`.
      eval_step: `eval_step(state, batch) -> metrics`, jitted. The step calls the same loss function
        with training turned off.
      step: The functions that `train_step` and `eval_step` jit, with the model, the loss and the
        placements.
      outer: The outer steps if replicas train separately, see `manualpar.diloco`; otherwise `None`.
        With outer steps, `step` is only for evaluation: it treats the common parameters as
        replicated. `train_step` runs `outer.inner.step`, and also takes the outer steps that are
        due at the state's step number. `train_step.trace` and `lower` show the inner step.
    """

    strategy: Strategy
    mode: ModeName
    mesh: Mesh
    data_axes: tuple[str, ...]
    num_minibatches: int
    comm: MixedPrecisionPolicy
    layout: TrainState
    parameters: tuple[tuple[ParameterInfo, ParameterSharding], ...]
    abstract_state: TrainState
    unpadded_state: TrainState
    abstract_batch: Any
    batch_sharding: NamedSharding
    create: Callable[[jax.Array], TrainState]
    init: Callable[[jax.Array], TrainState]
    train_step: TrainStep
    eval_step: EvalStep
    step: Step
    outer: OuterSteps | None = None
    abstract_others: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def whole_state(self) -> TrainState:
        """The old name of `unpadded_state`; it warns, and goes with the next release."""
        now = "Program.whole_state is Program.unpadded_state now; the old name goes with the next"
        warnings.warn(f"{now} release.", DeprecationWarning, stacklevel=2)
        return self.unpadded_state

    def _summary(self) -> tuple[str, dict[str, str]]:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        sharded = sum(any(spec) for spec in jax.tree.leaves(self.layout.params))
        return f"Program({self.strategy.name}, mode {self.mode}, mesh {mesh})", {
            "parameters": f"{describe_tree(self.unpadded_state.params)}; {sharded} sharded",
            "optimizer state": describe_tree(self.unpadded_state.opt_state),
            "batch": f"{describe_shapes(self.abstract_batch)}; "
            f"over {' and '.join(self.data_axes) or 'no axis'}, "
            f"minibatches on a device: {self.num_minibatches}",
        }

    def __reduce__(self) -> NoReturn:
        raise cannot_pickle("a Program")

    @property
    def layer_choice(self) -> LayerChoice | None:
        """How layers run if the program chose it, see `manualpar.core.modes.layer_loops`."""
        return self.step.loops.choice

    @property
    def model(self) -> TracedModel:
        """The model and its loss, as the program calls them."""
        return self.step.model

    @property
    def roles(self) -> AxisRoles:
        """The role of each mesh axis."""
        return self.step.roles

    @property
    def placements(self) -> Any:
        """The tree of parameters with a `ParameterSharding` at each leaf."""
        return self.model.own(self.step.placements)

    @property
    def pipeline(self) -> Pipelined | None:
        """The pipeline that runs the minibatches; `None` without stages."""
        return self.step.pipeline

    def step_at(self, number: int) -> StepFunction:
        """Returns the function that takes step `number`, counted from 1.

        Without outer steps this is `train_step`. With outer steps, the function takes an outer step
        only if one is due at step `number`. So the step counter in the state is not read.
        """
        return self.train_step if self.outer is None else self.outer.step_at(number)

    def init_from(
        self, params_or_variables: Any, rng: jax.Array | None = None, *, missing: Missing = "error"
    ) -> TrainState:
        """Makes a state at step 0 from existing parameters.

        ```python
        state = program.init_from(model.init(key, x))            # from plain flax
        state = program.init_from(numpy_params, rng)             # bare parameters
        state = program.init_from({"encoder": pretrained}, rng, missing="init")
        ```

        Args:
          params_or_variables: A tree of global arrays with the model's names. The tree contains
            either parameters, or variables by collection (`{"params": ..., "batch_stats": ...}`).
            Leaves are NumPy arrays, arrays on any devices, another program's parameters, or flax's
            boxes. For an NNX model, an `nnx.State` or the module is accepted too, without its
            random streams. Floats are cast to the dtype that the program stores, with a warning if
            the cast loses precision. With several processes, each process passes the same tree.
          rng: The key for missing arrays and for the state's key, as in `init`. By default
            `jax.random.key(0)`.
          missing: `"error"` refuses missing arrays. `"init"` makes missing arrays like `init(rng)`,
            bit for bit.

        Returns:
          The state, on the program's devices. The optimizer's state is initialised from these
          parameters. All replicas of outer steps start with them.

        Raises:
          ValueError: Arrays are missing, unknown to the program, of another shape or kind, or
            deleted, and the message names each; or the program is on an abstract mesh.
          TypeError: An argument is of the wrong kind.

        Communication:
          None, except for arrays that are sharded over several processes, see
          `state_arrays.to_host`. Each device receives its own shards from the host.
        """
        state = init_from(self, params_or_variables, rng, missing=missing)
        return state if self.outer is None else self.outer.start_replicas(self, state)

    def adopt(self, state: TrainState) -> TrainState:
        """Converts the state of another program; mesh, strategy, padding and replicas may differ.

        Args:
          state: A state of the same model, optimizer and dtypes, on any devices or on the host. The
            state is not donated.

        Returns:
          The state with this program's shardings and padding. All values keep their bits, including
          the step and the key. Residuals of error feedback start at zero if their shapes differ.

        Raises:
          ValueError: The state is of another model or optimizer, and the message names each
            difference; the state has been donated; or the program is on an abstract mesh.
          TypeError: The argument is not a `TrainState`.

        Communication:
          The same as for `init_from`.
        """
        program = self.for_replicas_of(getattr(state, "local", {}))
        return self.change_replicas(adopt(program, state))

    def whole(self, state: TrainState) -> dict[str, Any]:
        """Returns the variables of a state without sharding and padding, for flax on one device.

        ```python
        logits = model.apply(program.whole(state), inputs)
        ```

        Args:
          state: A state of this program, or a state that `adopt` accepts.

        Returns:
          The variables by collection, `{"params": ..., "batch_stats": ...}`, as NumPy arrays. The
          arrays share no memory with the state, so the state may be donated.

        Raises:
          ValueError: The state does not fit or has been donated.
          TypeError: The argument is not a `TrainState`.

        Communication:
          The same as for `init_from`, but no array is copied to a device.
        """
        return whole(self, state)

    def for_replicas_of(self, per_device: Mapping[str, Any]) -> "Program":
        """Returns a program that loads states with another number of replicas.

        `per_device` is the `TrainState.local` of such a state; the number of replicas follows from
        the shapes of its arrays, see `OuterSteps`.
        """
        return self if self.outer is None else self.outer.for_replicas_of(self, per_device)

    def change_replicas(self, state: TrainState) -> TrainState:
        """Converts a state with another number of replicas to this program's number."""
        return state if self.outer is None else self.outer.change_replicas(self, state)


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How a program sends numbers in fewer bits, see `manualpar.quantization`.

    Attributes:
      make_quantizer: Makes the quantizer of an option `gather_code` or `reduce_code`.
      make_rounding: Makes the rounding of quantized gradients from the strategy, the trained
        parameters, their placements, the mode and the options.
    """

    make_quantizer: Callable[[ReduceCode | GatherCode | None], GatherQuantizer | None]
    make_rounding: Callable[..., Rounding]


def make_program(
    strategy: Strategy,
    model: Model,
    tx: Optimizer,
    loss_fn: LossFn,
    options: ProgramOptions,
    quantization: Quantization,
) -> Program:
    """Makes a program without checks and guards, which `manualpar.strategies.build` adds.

    `options` are complete. The steps have not been traced.
    """
    batch, step, states = _design(strategy, model, tx, loss_fn, options, quantization)
    return _assemble(batch, step, states, options)


def _design(
    strategy: Strategy,
    model: Model,
    tx: Optimizer,
    loss_fn: LossFn,
    options: ProgramOptions,
    quantization: Quantization,
) -> tuple[Any, Step, InitialState]:
    """Decides the shardings of the state and the operations of a step.

    Returns:
      The abstract batch, the functions of a step, and the maker of the initial state.
    """
    name = strategy.name
    check_strategy(strategy, options["num_minibatches"])
    shard_axes = axis_tuple(options["axis_name"])
    context, pipeline = options["context_axis"], options["pipeline"]
    batch_dims = {0: (*strategy.replica_axes, *shard_axes)} | ({1: (context,)} if context else {})
    roles = AxisRoles(batch_dims, {pipeline.axis: "stage"} if pipeline else {})
    shard_axes = (*shard_axes, *batch_dims.get(1, ()))
    _check_arguments(name, tx, loss_fn, options["mesh"], (*roles.data_axes, *roles.stage_axes))
    if pipeline:
        pipeline.check(strategy, options)
    options = {**options, "other_models": _other_models(name, options)}
    mesh = cast(Mesh, with_axis_types(options["mesh"], AxisType.Auto))
    batch = shapes_of_batch(f"{name}: batch", options["batch"])
    check_batch(f"{name}: batch", batch, mesh, roles)
    stored_dtypes, comm = choose_formats(name, options, quantization.make_quantizer)
    # If there are replica axes, only reductions over them are quantized.
    if comm.reduce.quantizer and strategy.replica_axes:
        comm = dataclasses.replace(comm, quantized_axes=strategy.replica_axes)
    if strategy.averages_in_backward:
        several = tuple(axis for axis in strategy.replica_axes if mesh.shape[axis] > 1)
        comm = dataclasses.replace(comm, averaged_axes=several)
    rules = check_rules(name, options["rules"], mesh)
    mode = _MODES[options["mode"]](mesh, roles.data_axes, comm, rules)

    def place(info: ParameterInfo) -> Placement:
        return place_parameter(strategy, info, shard_axes, mesh)

    def sharding_of(info: ParameterInfo) -> ParameterSharding:
        return parameter_sharding(place(info), info, roles, mesh)

    def is_gathered(info: ParameterInfo) -> bool:
        placement = place(info)
        return len(placement.spec) > 0 or (comm.changes_values and not placement.keep)

    traced_model = trace_model(
        name,
        model,
        loss_fn,
        batch,
        batch_specs=roles.batch_specs(batch),
        mode=mode,
        stored_dtypes=stored_dtypes,
        options=options,
        is_gathered=is_gathered,
        is_reduced=lambda info: not pipeline and strategy.reduces_where_used(place(info)),
        gathers_in_loss=strategy.gather_every == "minibatch",
    )
    # If initialisers make parameters with explicit shardings, the model computes with the shards.
    # So these parameters are not gathered over axes that do not split the batch.
    if traced_model.keeps_types:
        roles = dataclasses.replace(roles, others=dict.fromkeys(mesh.axis_names, "model"))
    placements = jax.tree.map(sharding_of, traced_model.parameters)
    for key, other in traced_model.others.items():
        if other.placements is not None:
            placements[key] = other.placements
    num_minibatches = options["num_minibatches"]
    leaves = trained(traced_model.parameters), trained(placements)
    rounding = quantization.make_rounding(strategy, *leaves, mode=mode, options=options)
    tx = optimizer_for(tx, traced_model.own(traced_model.parameters))
    states = InitialState(traced_model, tx, placements, rounding, place)
    step = Step(
        strategy=strategy,
        model=traced_model,
        mode=mode,
        roles=roles,
        placements=placements,
        update=Update(
            mode,
            trained(traced_model.own(placements)),
            states.opt_padding,
            options["norm_metrics"],
        ),
        num_minibatches=num_minibatches,
        schedule=scanned if options["use_scan"] else unrolled,
        pipeline=pipeline.on_mesh(mesh, strategy, placements, num_minibatches)
        if pipeline
        else None,
        nonfinite=options["nonfinite"],
        rounding=rounding,
    )
    return batch, step, states


def _assemble(batch: Batch, step: Step, states: InitialState, options: ProgramOptions) -> Program:
    """Jits the functions of a step and makes a program of them."""
    compiler_options = dict(options["compiler_options"]) or None
    others = _layout_of_others(step)
    jitted = JittedSteps(options["mesh"], states.layout, states.padded, compiler_options, others)
    loops = _layer_loops(step, jitted, options["remat"], compiler_options or ())
    step = dataclasses.replace(step, loops=loops)
    trees = map(step.model.own, (step.model.parameters, step.placements))
    infos, placements = map(jax.tree.leaves, trees)
    return Program(
        strategy=step.strategy,
        mode=step.mode.name,
        mesh=jitted.mesh,
        data_axes=step.roles.data_axes,
        num_minibatches=step.num_minibatches,
        comm=step.mode.comm,
        layout=states.layout,
        parameters=tuple(zip(infos, placements, strict=True)),
        abstract_state=jitted.abstract_state,
        unpadded_state=states.unpadded,
        abstract_batch=with_shardings(batch, jitted.shard(step.roles.batch_specs(batch))),
        batch_sharding=jitted.shard(step.roles.batch_spec),
        create=states.create,
        init=jitted.jit_init(states.create),
        train_step=jitted.jit_train_step(step.train),
        eval_step=jitted.jit_eval_step(step.evaluate),
        step=step,
        abstract_others=jitted.abstract_others,
    )


def muon_dims(parameters: Program | Infos, matrices: Sequence[str] = ()) -> Any:
    """Returns the `muon_weight_dimension_numbers` of `optax.contrib.muon` for a model.

    They say which dims of each parameter are a matrix. The modules that make the parameters know
    this, also for heads, experts, convolutions and stacked layers, where the number of dims does
    not tell. A builder such as `manualpar.fsdp` takes a function in place of an optimizer, and
    calls it with the parameters:

    ```python
    def tx(parameters):
        dims = manualpar.muon_dims(parameters)
        return optax.contrib.muon(0.02, muon_weight_dimension_numbers=dims)

    program = manualpar.fsdp(model, tx, loss_fn, mesh=mesh, batch=batch)
    ```

    Args:
      parameters: A program, or the tree with a `ParameterInfo` at each leaf that a builder gives to
        its argument `tx`.
      matrices: Globs on the parameters' paths. Parameters that match are matrices, and no others.
        `"!head/*"` excludes parameters. By default all kernels of layers are matrices, and so are
        arrays of two dims of modules that do not say which dims are inputs and outputs. Embeddings,
        heads and routers of this package's models are none, nor are norms and biases.

    Returns:
      A tree like the parameters: an `optax.contrib.MuonDimensionNumbers` at a matrix, and `None` at
      a parameter that Muon leaves to Adam.

    Raises:
      ValueError: A glob matches no parameter, or names a parameter whose dims as a matrix are not
        known. The message names both.

    Communication:
      None.
    """
    if isinstance(parameters, Program):
        parameters = parameters.model.own(parameters.model.parameters)
    chosen = choose_matrices(parameters, matrices)
    make: Any = optax.contrib.MuonDimensionNumbers
    return jax.tree.map(
        lambda info, is_chosen: make(*info.matrix[:2]) if is_chosen else None, parameters, chosen
    )


def _other_models(name: str, options: ProgramOptions) -> dict[str, Any]:
    """Returns the option `other_models`, with programs replaced by their models and placements."""
    given = options["other_models"]
    if given and options["pipeline"]:
        raise ValueError(
            f"{name}: other_models={sorted(given)} with a pipeline, expected none of both, because "
            "a stage has only some layers of the loss. Build the program without pipeline=, or "
            "compute the other model's part in a step before, and put the result into the batch."
        )
    models = {}
    for key, value in given.items():
        if not isinstance(value, Program):
            models[key] = value
            continue
        said = f"{name}: other_models[{key!r}] is a program"
        if value.outer is not None or value.pipeline is not None:
            kind = "with outer steps" if value.outer is not None else "with a pipeline"
            raise ValueError(
                f"{said} {kind}, expected one without, because its parameters are not in one "
                "place. Give the model instead, and call adopt of a plain program."
            )
        is_same = (value.mesh, value.mode) == (
            with_axis_types(options["mesh"], value.mesh.axis_types[0]),
            options["mode"],
        )
        if not is_same:
            raise ValueError(
                f"{said} on the mesh {dict(value.mesh.shape)} in mode {value.mode!r}, expected the "
                f"mesh {dict(options['mesh'].shape)} with the same devices and mode "
                f"{options['mode']!r}: both compute in one step. Build both with the same mesh and "
                "mode."
            )
        models[key] = _as_other_model(key, value)
    return models


def _as_other_model(name: str, program: Program) -> OtherModel:
    """Returns the model of a program with its placements, frozen."""
    unpadded = program.unpadded_state

    def describe(info: ParameterInfo) -> ParameterInfo:
        return dataclasses.replace(info, path=f"{name}/{info.path}", trainable=False)

    def freeze(place: ParameterSharding) -> ParameterSharding:
        return dataclasses.replace(place, trainable=False)

    return OtherModel(
        dataclasses.replace(program.model.interface, loop_dims=None),
        {"params": unpadded.params, **unpadded.collections},
        jax.tree.map(describe, program.model.own(program.model.parameters)),
        jax.tree.map(freeze, program.placements),
        program.strategy.sends,
    )


def _layout_of_others(step: Step) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the specs and the abstract variables of the other models of a step, by name."""

    def pad(place: Placement, x: Any) -> Any:
        return jax.eval_shape(lambda x: pad_leaf(x, place.parameter_padding), x)

    layouts, variables = {}, {}
    for name, other in step.model.others.items():
        places, tree = step.placements[name], strip_boxes(dict(other.variables))
        variables[name] = tree | {"params": jax.tree.map(pad, places, tree["params"])}
        layout = jax.tree.map(lambda _: PartitionSpec(), variables[name])
        layouts[name] = layout | {"params": param_specs(places)}
    return layouts, variables


def _layer_loops(
    step: Step, jitted: JittedSteps, option: Remat, compiler_options: Collection[str]
) -> LayerLoops:
    """Returns what the choice of how layers run depends on."""
    state = jitted.abstract_state

    def shards(tree: Any) -> int:
        return sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(tree)
            if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
        )

    held = shards(state)
    strategy, dtype = step.strategy, step.mode.comm.gather.dtype
    if strategy.gather_every == "step" or not strategy.reshard_after_forward:
        sizes = ((math.prod(x.shape), x.dtype) for x in jax.tree.leaves(state.params))
        held += sum(size * jnp.dtype(dtype or own).itemsize for size, own in sizes)
    return LayerLoops(
        option=option,
        platform=platform_of(jitted.mesh),
        memory_bytes=memory_of(jitted.mesh),
        held_bytes=held,
        gradient_bytes=shards(state.params),  # As large as the parameters.
        parts=1 if step.mode.writes_collectives else jitted.mesh.size,
        hosts=hosts_of(jitted.mesh, compiler_options) if step.mode.writes_collectives else 1,
    )


def _check_arguments(
    strategy: str, tx: Any, loss_fn: Any, mesh: Any, axes: tuple[str, ...]
) -> None:
    """Refuses arguments of the wrong kind, and a mesh that lacks one of `axes`."""
    loss_form = "a function (params, apply_fn, batch, rng) -> (loss, metrics)"
    fits = is_optimizer(tx) or callable(tx)
    for name, value, expected, is_right in (
        ("tx", tx, "an optax.GradientTransformation, or a function that makes one", fits),
        ("loss_fn", loss_fn, loss_form, callable(loss_fn)),
        ("mesh", mesh, "a jax.sharding.Mesh, see make_mesh", isinstance(mesh, Mesh | AbstractMesh)),
    ):
        if not is_right:
            raise TypeError(f"{strategy}: {name} is {value!r}, expected {expected}.")
    check_mesh_has(strategy, mesh, axes)
