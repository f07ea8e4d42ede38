"""DiLoCo: replicas train separately for many steps, and then take an outer step together.

Each replica is a group of devices. It trains with an inner strategy such as `fsdp` and sends no
parameters or gradients to other replicas. After `every` steps the replicas exchange their
differences from the parameters with which they began. An *outer* optimizer takes the mean
difference as a gradient, and all replicas continue from the updated parameters (Douillard et al.,
https://arxiv.org/abs/2311.08105). Use DiLoCo for slow links between groups of devices. DiLoCo's
losses differ from the losses of data parallelism, because DiLoCo is a different optimizer.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, Unpack, cast, get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from manualpar.checks.guarded_step import check_state, guard
from manualpar.core.mesh.axes import (
    AxisName,
    axes_size,
    axis_tuple,
    check_mesh_has,
    with_axis_types,
)
from manualpar.core.mesh.mesh_context import no_mesh, with_auto_axes
from manualpar.core.mesh.splitting import shapes_of_batch
from manualpar.core.model.interface import Model
from manualpar.core.model.loss_function import LossFn, Metrics
from manualpar.core.model.options import PROGRAM_OPTIONS, ProgramOptions, first_sentences
from manualpar.core.parameters.collectives import Format, MixedPrecisionPolicy, Quantization
from manualpar.core.parameters.placement import with_shardings
from manualpar.core.program.optimizer_update import Optimizer
from manualpar.core.program.program import JittedSteps, OuterSteps, Program, StepFunction
from manualpar.core.program.state_arrays import check_alive, is_deleted
from manualpar.core.state.train_state import TrainState
from manualpar.core.tracing.jaxprs import all_equations
from manualpar.core.tracing.scopes import METRICS_SCOPE, purpose_of
from manualpar.errors import check_choice
from manualpar.quantization.quantized_collectives import BlockQuantizer
from manualpar.strategies.diloco.state import DiLoCoState
from manualpar.strategies.diloco.steps import ReplicaSteps, replicated_step
from manualpar.strategies.fsdp import fsdp
from manualpar.strategies.registry import Field, strategy_kinds, with_meanings

# -------------------------------------------------------------------------------------------------
# Decides from a state's step number whether an outer step follows the inner step.
#
# A state counts its steps, so a restored or adopted state continues at the right step. If the host
# read this counter in each step, it would wait for the device each time. So the host also counts
# the steps of the state that the latest call returned, and reads the counter only from other
# states.


class OuterStep:
    """Runs a jitted outer step, and refuses donated states and states of another program.

    Directly after an outer step there is nothing to exchange, so a second call returns the state
    unchanged. `train_step` takes each outer step that is due. A training loop may take additional
    outer steps.

    Attributes:
      jitted: The jitted outer step without checks.
    """

    def __init__(self, jitted: Any, check: Callable[[Any], None]) -> None:
        """Wraps an outer step; `check` raises an error for a state that does not fit."""
        self.jitted, self._check = jitted, check
        self._latest: Any = lambda: None  # A weak reference, so that the user can free the state.

    def __call__(self, state: TrainState) -> TrainState:
        """Takes the outer step."""
        check_alive("outer_step", state=state)
        if state is self._latest():
            return state
        self._check(state)
        new: TrainState = self.jitted(state)
        self.remember(new)
        return new

    def remember(self, state: TrainState) -> None:
        """Records that an outer step has just returned `state`."""
        self._latest = weakref.ref(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)


class CountedStep:
    """A train step that also takes each outer step that is due.

    Attributes:
      inner_step: The step that each replica takes separately. Attributes such as `lower` and
        `trace` come from it.
    """

    def __init__(
        self,
        inner_step: Any,
        outer_steps: tuple[OuterStep, ...],
        overlapped_outer_steps: tuple[Any, ...],
        due_at: Callable[[int], int | None],
        every: int,
    ) -> None:
        """Combines the steps of DiLoCo.

        `due_at(number)` returns the fragment that step `number` exchanges, or `None`.
        """
        self.inner_step, self._due_at, self._every = inner_step, due_at, every
        self._outer_steps, self._overlapped_outer_steps = outer_steps, overlapped_outer_steps
        self._number, self._latest = 0, cast(Any, lambda: None)
        # Made once, so that a caller recognises a step that it has called before.
        self._combined_steps = [
            functools.partial(self._with_outer_step, fragment)
            for fragment in range(len(outer_steps))
        ]

    def step_at(self, number: int) -> StepFunction:
        """Returns the function that takes step `number`, counted from 1."""
        fragment = self._due_at(number)
        if fragment is None:
            return cast(StepFunction, self.inner_step)
        return self._combined_steps[fragment]

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Takes the next step of a state: the step after the number in its step counter."""
        number = self._number
        if state is not self._latest():
            step = getattr(state, "step", None)
            if isinstance(step, jax.core.Tracer):
                return self._in_trace(state, batch)
            if is_deleted(step) or not hasattr(step, "__int__"):
                return cast(StepFunction, self.inner_step)(state, batch)  # This call raises.
            number = int(cast(Any, step))
        new, metrics = self.step_at(number + 1)(state, batch)
        self._number, self._latest = number + 1, weakref.ref(new)
        return new, metrics

    def _with_outer_step(
        self, fragment: int, state: TrainState, batch: Any
    ) -> tuple[TrainState, Metrics]:
        if self._overlapped_outer_steps:
            state, metrics = self._overlapped_outer_steps[fragment](state, batch)
            self._outer_steps[fragment].remember(state)
            return state, metrics
        state, metrics = self.inner_step(state, batch)
        return self._outer_steps[fragment](state), metrics

    def _in_trace(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Takes a step inside a traced function, where the step number is not known yet."""
        fragments = [self._due_at(number) for number in range(1, self._every + 1)]
        branches = jnp.asarray([0 if f is None else f + 1 for f in fragments])
        result: tuple[TrainState, Metrics] = jax.lax.switch(
            branches[state.step % self._every],
            [self.inner_step, *self._combined_steps],
            state,
            batch,
        )
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner_step, name)


# -------------------------------------------------------------------------------------------------
# Builds DiLoCo's program, with its inner and outer steps.
#
# The module `state` makes DiLoCo's state, and the module `steps` has the step functions.


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
        return self.train_step.step_at(number)

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

    def change_replicas(self, program: Program, state: TrainState) -> TrainState:
        """Converts a state with another number of replicas, see `DiLoCoState.change_replicas`."""
        if state.local["examples"].shape == program.abstract_state.local["examples"].shape:
            return state
        return _on_state(program, self.state.change_replicas, state)


def _on_state(
    program: Program, function: Callable[[TrainState], TrainState], state: TrainState
) -> TrainState:
    """Jits and runs `function(state)`; donates all arrays except the per-replica arrays."""

    def run(common: TrainState, local: Any) -> TrainState:
        return function(common.replace(local=local))

    on_auto = with_auto_axes(run, mesh=program.mesh, out_specs=program.layout)
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
    outer_comm: MixedPrecisionPolicy,
    num_fragments: int,
    overlap: bool,
    compiler_options: dict[str, Any] | None,
) -> Program:
    """Builds DiLoCo around one replica's program `inner`; `batch` is the abstract global batch."""
    name = "diloco"
    if inner.abstract_others:
        raise ValueError(
            f"{name}: other_models={sorted(inner.abstract_others)}, expected none, because each "
            "replica would need its own copy of the other model. Use data_parallel, zero, fsdp or "
            "hsdp."
        )
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
        check = functools.partial(check_state, "outer_step", jitted.abstract_state)
        return OuterStep(update, check)

    outer_steps = tuple(map(jit_outer, range(num_fragments)))
    overlapping = (
        functools.partial(steps.overlapped_outer_step, fragment)
        for fragment in range(num_fragments if overlap else 0)
    )
    overlapped_steps = tuple(
        guard("train_step", jitted.jit_train_step(each), jitted) for each in overlapping
    )
    due_at = functools.partial(state.fragments.due_at, every=every)
    inner_step = guard("train_step", jitted.jit_train_step(steps.train), jitted)
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
        eval_step=guard("eval_step", jitted.jit_eval_step(step.evaluate), jitted),
        step=step,
        outer=outer,
    )


# -------------------------------------------------------------------------------------------------


def diloco(
    model: Model,
    tx: Optimizer,
    loss_fn: LossFn,
    *,
    every: int,
    outer_tx: optax.GradientTransformation,
    inner: Callable[..., Program] = fsdp,
    outer_code: Quantization | None = None,
    outer_fragments: int = 1,
    outer_overlap: bool = False,
    replica_axis: AxisName = "replica",
    **options: Unpack[ProgramOptions],
) -> Program:
    """Builds training whose replicas take `every` inner steps between two outer steps.

    ```python
    outer_tx = optax.sgd(0.7, momentum=0.9, nesterov=True)
    program = diloco(model, tx, loss_fn, every=50, outer_tx=outer_tx, mesh=mesh, batch=batch)
    for batch in batches:
        state, metrics = program.train_step(state, batch)
    ```

    `train_step` also takes an outer step in each step whose number is a multiple of `every`, and
    with several fragments in further steps. `state.params` are the parameters that the replicas
    last agreed on. `eval_step`, checkpoints and exports use these parameters.

    Args:
      model: The model, as in every builder.
      tx: The optimizer of each replica.
      loss_fn: The loss.
      every: The number of inner steps between two outer steps.
      outer_tx: The optimizer of the outer step. It updates the common parameters. Its gradient is
        the mean over replicas of `common - replica`: the common parameters minus the replica's
        parameters. Each replica is weighted by the number of examples that it has seen since the
        last outer step. With `optax.sgd(1)` the mean of the replicas' parameters becomes the common
        parameters. The outer optimizer gets no loss.
      inner: The builder of each replica's program: `fsdp`, `data_parallel`, `zero`, or
        `functools.partial(hsdp, replica_axis="group")` with another axis than `replica_axis`.
      outer_code: `"int8"` or `"int4"` quantizes the differences to 8 or 4 bits if that saves bytes.
        By default differences are sent in `reduce_dtype`, or without that option in the parameters'
        dtype.
      outer_fragments: The number of fragments, of about equal bytes, into which the parameters are
        divided. Fragments are exchanged at different steps, so fewer bytes are sent at a time. With
        several fragments the replicas never agree on all parameters at once.
      outer_overlap: Whether an exchange runs at the same time as an inner step. The exchange sends
        parameters from before the step. The next exchange sends the change that a replica makes in
        this step.
      replica_axis: The mesh axis, or tuple of axes, of the replicas. The batch is split over
        `replica_axis` and `axis_name`.
      **options: The options of every builder, such as `mesh` and `batch` (see `ProgramOptions`),
        and the options of `inner`. The mode must be `"manual"`. With `nonfinite="skip"` each
        replica decides which of its steps to skip.

    Returns:
      The program. Inside a function that you trace, `train_step` has the inner and the outer step
      in a conditional. `train_step.lower` and `trace` show the inner step.

    Raises:
      ValueError: An option does not fit, as in every builder; or the model or the loss sends values
        over all axes that split the examples, and so also between replicas.
      TypeError: An option is of the wrong kind.

    Communication:
      In a step: the communication of `inner` within each replica, and one all-reduce of the sums of
      metrics over the replicas. In an outer step: one all-reduce over `R` replicas of each device's
      differences, which are sharded like the optimizer's state. A device sends
      `2 b (P / S) (R - 1) / R` bytes for `P` parameters of `b` bytes, sharded over `S` devices. For
      one fragment a device sends only the fragment's part of these bytes. If parameters are
      replicated and the optimizer's state is sharded, each replica gathers the new parameters with
      one all-gather.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"diloco: every={every!r}, expected a number of steps, 1 or more.")
    is_number = isinstance(outer_fragments, int) and not isinstance(outer_fragments, bool)
    if not is_number or not 1 <= outer_fragments <= every:
        raise ValueError(
            f"diloco: outer_fragments={outer_fragments!r}, expected a number from 1 to "
            f"every={every}, because each fragment is exchanged at a different step."
        )
    check_choice("diloco", "outer_overlap", outer_overlap, (True, False))
    mesh, batch, axes = _check(outer_tx, outer_code, replica_axis, options)
    size = axes_size(mesh, axes)
    sizes = {name: mesh.shape[name] for name in mesh.axis_names if name not in axes}
    types = (AxisType.Auto,) * len(sizes)
    replica_mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
    replica_batch = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct((x.shape[0] // size, *x.shape[1:]), x.dtype) if x.ndim else x
        ),
        batch,
    )
    inner_options: Any = options | {"mesh": replica_mesh, "batch": replica_batch}
    inner_program = inner(model, tx, loss_fn, **inner_options)
    for info, _ in inner_program.parameters:
        if split := sorted(info.absent_axes & {*axes}):
            raise ValueError(
                f"diloco: model: parameter {info.path!r} of shape {info.shape} is split over "
                f"{split}, an axis of the replicas; expected another axis of the mesh "
                f"{dict(mesh.shape)}, because each replica has a complete model. Name one of "
                f"{list(sizes)} in the model, or build the mesh with one more axis inside each "
                "replica."
            )
    program = build_diloco(
        inner_program,
        batch,
        mesh=mesh,
        replica_axes=axes,
        every=every,
        outer_tx=outer_tx,
        outer_comm=MixedPrecisionPolicy(
            reduce=Format(
                inner_program.comm.reduce.dtype,
                BlockQuantizer(outer_code) if outer_code else None,
            )
        ),
        num_fragments=outer_fragments,
        overlap=outer_overlap,
        compiler_options=dict(options.get("compiler_options", {})) or None,
    )
    _check_steps(program)
    return program


def _check(
    outer_tx: Any, outer_code: Quantization | None, replica_axis: AxisName, options: Any
) -> tuple[Mesh | AbstractMesh, Any, tuple[str, ...]]:
    """Refuses options that do not fit; returns the mesh, abstract batch and replicas' axes."""
    if not (hasattr(outer_tx, "init") and hasattr(outer_tx, "update")):
        raise TypeError(
            f"diloco: outer_tx is {outer_tx!r}, expected an optax.GradientTransformation such as "
            "optax.sgd(0.7, momentum=0.9, nesterov=True)."
        )
    check_choice("diloco", "outer_code", outer_code, (None, *get_args(Quantization)))
    if options.get("mode", "manual") != "manual":
        raise ValueError(
            f"diloco: mode={options['mode']!r}, expected 'manual', because replicas do not train "
            "separately if XLA writes the collectives."
        )
    if options.get("error_feedback"):
        raise ValueError(
            "diloco: error_feedback=True, expected False: in an outer step all replicas take the "
            "common parameters, and the residuals of each replica would be lost."
        )
    for name in ("mesh", "batch"):
        if name not in options:
            raise TypeError(f"diloco: {name}= is missing, expected it as a keyword argument.")
    mesh, axes = options["mesh"], axis_tuple(replica_axis)
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"diloco: mesh is {mesh!r}, expected a jax.sharding.Mesh, see make_mesh.")
    check_mesh_has("diloco: replica_axis", mesh, axes)
    if not set(mesh.axis_names) - set(axes):
        raise ValueError(
            f"diloco: the mesh has the axes {list(mesh.shape)} and replica_axis={replica_axis!r}, "
            "expected another axis, of size 1 if a replica is one device: "
            f"make_mesh({dict(mesh.shape) | {'data': 1}})."
        )
    batch = shapes_of_batch("diloco: batch", options["batch"])
    size = axes_size(mesh, axes)
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        if jnp.ndim(x) and (not x.shape[0] or x.shape[0] % size):
            raise ValueError(
                f"diloco: batch{jax.tree_util.keystr(path)} has {x.shape[0]} examples, expected a "
                f"positive multiple of the {size} replicas along {axes}: change the batch size or "
                "the number of replicas, or pad the batch and mask the padding."
            )
    return mesh, batch, axes


def _check_steps(program: Program) -> None:
    """Refuses outer steps that fail, and inner steps whose replicas exchange more than metrics."""
    assert program.outer is not None
    try:
        for outer_step in program.outer.steps:
            outer_step.trace(program.abstract_state)
    except TypeError as error:
        raise TypeError(
            f"diloco: outer_tx fails in an outer step ({error}), expected an optimizer that needs "
            "only gradients and parameters, because an outer step has no loss."
        ) from error
    try:
        traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    except AssertionError as error:  # JAX cannot make typed zeros from `eval_shape`'s results.
        raise ValueError(
            "diloco: tx cannot be traced where values differ between replicas (JAX fails an "
            f"assertion, {error}), expected an optimizer that can be traced there; "
            "optax.MultiSteps cannot. Use num_minibatches= to accumulate gradients."
        ) from error
    for eqn in all_equations(traced.jaxpr.jaxpr):
        named = (eqn.params.get("axis_name"), *(eqn.params.get("axes") or ()))
        scope = str(eqn.source_info.name_stack)
        is_silent = eqn.primitive.name in ("axis_index", "pvary", "shard_map")
        crosses = {*program.outer.replica_axes} & {
            x for x in jax.tree.leaves(named) if isinstance(x, str)
        }
        if crosses and not is_silent and purpose_of(scope) != METRICS_SCOPE:
            raise ValueError(
                f"diloco: the model or the loss runs a {eqn.primitive.name} over all axes that its "
                f"values vary over ({scope or 'no scope'}), among them {sorted(crosses)}; expected "
                "no collective over the replicas' axes, because each replica takes its steps by "
                "itself. (The balance of experts and losses that couple all examples have such "
                "collectives.) Use hsdp."
            )


# -------------------------------------------------------------------------------------------------
# Builds a `diloco` program from a config, whose fields are names and numbers.


def diloco_of_config(
    model: Model,
    tx: Optimizer,
    loss_fn: LossFn,
    *,
    inner: str,
    outer_learning_rate: float,
    outer_momentum: float,
    outer_code: Quantization | Literal[""],
    **options: Any,
) -> Program:
    """Builds a `diloco` program from the fields of a config.

    Args:
      model: The model, see `diloco`.
      tx: The optimizer of each replica.
      inner: The name of each replica's strategy. Options that this strategy lacks are ignored.
      outer_learning_rate: The learning rate of the outer optimizer. Without momentum the optimizer
        is plain gradient descent. A rate of 1 then takes the mean of the replicas' parameters.
      outer_momentum: Nesterov momentum of the outer optimizer; 0 for none.
      outer_code: The quantizer of exchanged differences; `""` for none.
      **options: The options of `diloco`.
    """
    kind = strategy_kinds()[inner]
    known = {*PROGRAM_OPTIONS, *kind.fields, *FIELDS}
    known_options = {name: value for name, value in options.items() if name in known}

    def build(*args: Any, **inner_options: Any) -> Any:
        return kind.builder(*args, **inner_options, **kind.constants)

    momentum = outer_momentum or None
    return diloco(
        model,
        tx,
        loss_fn,
        inner=build,
        outer_tx=optax.sgd(outer_learning_rate, momentum=momentum, nesterov=momentum is not None),
        outer_code=outer_code or None,
        **known_options,
    )


FIELDS: Mapping[str, Field] = with_meanings(
    {
        "inner": Field(str, choices=("dp", "zero1", "zero2", "fsdp"), default="fsdp"),
        "every": Field(int, 1, default=10),
        "outer_learning_rate": Field(float, 0, below=1e38, default=1.0),
        "outer_momentum": Field(float, 0, below=1, default=0.0),
        "outer_code": Field(str, choices=("", *get_args(Quantization)), default=""),
        "outer_fragments": Field(int, 1, default=1),
        "outer_overlap": Field(bool, default=False),
    },
    first_sentences(diloco) | first_sentences(diloco_of_config),
)
