"""A layout, a model, a loss and an optimizer made into `init`, `train_step`, `eval_step`.

The state is a plain tree of global arrays, initialised in one jitted call whose outputs have the
layout's shardings, so that no device ever holds more than its part. A step is one jitted call too:
see `manualpar.core.step`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Unpack, cast

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from manualpar.core.collectives import EXAMPLES_SCOPE, GATHER_SCOPE, Wire
from manualpar.core.step import Step, abstract_batch, batch_specs, check_batch
from manualpar.core.strategy import Mode, Strategy
from manualpar.guards.dispatch import check_state, guard_step
from manualpar.guards.divergence import (
    check_conditions,
    check_constraints,
    check_derivatives,
    check_gathered_order,
)
from manualpar.guards.options import ProgramOptions, check_options, check_wire
from manualpar.modes.modes import on_auto_axes
from manualpar.rng import typed_key
from manualpar.sharding.layout import (
    ParameterInfo,
    Placement,
    like_params,
    pad_leaf,
    param_specs,
    state_specs,
)
from manualpar.sharding.mesh import axes_size, axis_tuple, check_mesh_has, given_and_auto_mesh
from manualpar.sharding.mesh_context import OutsideMeshes, explain_shardings, no_mesh
from manualpar.state_transfer import StartsFromArrays, check_has_devices
from manualpar.train_state import TrainState
from manualpar.update import Update
from manualpar.user_model.adapter import Model
from manualpar.user_model.loss_function import LossFn
from manualpar.user_model.study import study

REPLICATED = Placement(())


@dataclasses.dataclass(frozen=True)
class Program(StartsFromArrays):
    """A model's training under one strategy.

    Beside `init` there are `init_from`, `adopt` and `whole`, see `manualpar.state_transfer`.

    Attributes:
      strategy: The strategy.
      mode: Who writes the collectives.
      mesh: The mesh it runs on; on an abstract one it can be traced and not run.
      data_axes: The mesh axes that examples are split over.
      num_minibatches: How many parts a device takes its share of a batch in.
      wire: The dtypes that travel, and which way.
      layout: A `TrainState` with a `PartitionSpec` at each leaf.
      parameters: A `(ParameterInfo, Placement)` for each parameter, in the order of the tree; a
        placement's note says why a parameter stays whole.
      abstract_state: A `TrainState` of `jax.ShapeDtypeStruct`s with shardings.
      whole_state: The same as one device would hold it: no padding, no shardings.
      abstract_batch: The batch that the program was built for, as `jax.ShapeDtypeStruct`s with
        shardings.
      batch_sharding: How a batch's leaves lie on the mesh: the leading dimension split over the
        data axes. Put batches there with `jax.device_put(batch, program.batch_sharding)`; one that
        lies elsewhere is moved in every step. A batch with scalars in it takes the shardings of
        `abstract_batch`.
      init: `init(rng) -> TrainState`. `init_rng, rng = jax.random.split(rng)`, and the parameters
        are those of `model.init({"params": init_rng}, batch.inputs, train=False)`, or with what the
        option `init_args` returns for arguments, bit for bit on every mesh. Each device only ever
        holds its own shard.
      train_step: `train_step(state, batch) -> (state, metrics)`, jitted; the state is donated: use
        the one returned. Metrics are `(sum, count)` pairs over the global batch, the same on all
        devices. With the option `nonfinite="skip"` a step may leave the state as it is but for
        its step and key, see `ProgramOptions`.
      eval_step: `eval_step(state, batch) -> metrics`, jitted; the same loss function with training
        turned off.
      step: What the two are made of: the model, the loss, and functions to be jitted.
    """

    strategy: Strategy
    mode: Mode
    mesh: Mesh
    data_axes: tuple[str, ...]
    num_minibatches: int
    wire: Wire
    layout: TrainState
    parameters: tuple[tuple[ParameterInfo, Placement], ...]
    abstract_state: TrainState
    whole_state: TrainState
    abstract_batch: Any
    batch_sharding: NamedSharding
    init: Callable[[jax.Array], TrainState]
    train_step: jax.stages.Wrapped
    eval_step: jax.stages.Wrapped
    step: Step = dataclasses.field(repr=False)


def build_program(
    strategy: Strategy,
    model: Model,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    **options: Unpack[ProgramOptions],
) -> Program:
    """Builds a program. Every strategy's builder, such as `manualpar.fsdp`, ends here.

    Args:
      strategy: The strategy.
      model: A Linen or NNX model, written for one device, see `manualpar.nnx.model.NNXModel.wrap`.
      tx: Any optax optimizer.
      loss_fn: `loss_fn(params, apply_fn, batch, rng) -> (loss, metrics)`. It returns the mean over
        the examples that it is given, and pairs `{"loss": (sum, count), ...}`, see
        `accumulate_gradients`. `rng` differs between devices, minibatches and steps.
      **options: `mesh`, `batch` and others, see `ProgramOptions`.

    Returns:
      The program, traced but not compiled. No device has been touched.
      `inspect.layout_table(program)` shows which parameter is sharded how, and why others are not.

    Raises:
      ValueError: A field does not fit, for example because the mesh lacks an axis, the batch does
        not divide or the loss is not a scalar. Nothing has been compiled.
      TypeError: A field is of the wrong kind.
    """
    check_options(strategy.name, options)
    with no_mesh(), explain_shardings(strategy.name, options.get("mode", "manual")):
        return _build(strategy, model, tx, loss_fn, options)


def _build(
    strategy: Strategy,
    model: Model,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    options: ProgramOptions,
) -> Program:
    """Builds a program with no mesh set around it."""
    name, batch = strategy.name, options["batch"]
    has_devices = not isinstance(options["mesh"], AbstractMesh)
    axes = (*strategy.replica_axes, *axis_tuple(options.get("axis_name", "data")))
    mode = options.get("mode", "manual")
    _check_arguments(name, tx, loss_fn, options["mesh"], axes)
    # Building asks for nothing that an abstract mesh lacks. States and batches lie on the mesh that
    # was given, whose axes may be explicit; a step runs on the same one with automatic axes.
    given, mesh = cast("tuple[Mesh, Mesh]", given_and_auto_mesh(options["mesh"]))
    param_dtype, wire = check_wire(name, options)
    batch = abstract_batch(f"{name}: batch", batch)
    check_batch(f"{name}: batch", batch, mesh, axes)

    key = jax.eval_shape(lambda: jax.random.key(0))  # Abstract: building touches no device.
    shard_axes = tuple(axis for axis in axes if axis not in strategy.replica_axes)

    def place(info: ParameterInfo) -> Placement:
        return strategy.place(info, shard_axes, axes_size(mesh, shard_axes))

    def is_gathered(info: ParameterInfo) -> bool:
        placement = place(info)
        return len(placement.spec) > 0 or (wire.casts and not placement.keep)

    user_model = study(
        name,
        model,
        loss_fn,
        batch,
        batch_specs=batch_specs(batch, axes),
        mesh=mesh,
        mode=mode,
        data_axes=axes,
        param_dtype=param_dtype,
        options=options,
        is_gathered=is_gathered,
        gathers_in_loss=mode == "manual" and strategy.gather_every == "minibatch",
    )
    infos = user_model.parameters
    placements = jax.tree.map(place, infos)

    def create_whole_state(rng: jax.Array) -> TrainState:
        init_rng, rng = jax.random.split(rng)
        collections = user_model.create_variables(init_rng)
        return TrainState.create(
            apply_fn=user_model.apply_fn,
            params=collections.pop("params"),
            tx=tx,
            rng=rng,
            collections=collections,
        )

    whole = jax.eval_shape(create_whole_state, key)
    opt_placements = like_params(whole.opt_state, whole.params, placements, REPLICATED)
    opt_padding = tuple(place.padding for place in jax.tree.leaves(opt_placements))
    update = Update(
        mesh=mesh,
        mode=mode,
        data_axes=axes,
        placements=placements,
        opt_padding=opt_padding,
        norm_metrics=options.get("norm_metrics", False),
        wire=wire,
    )
    step = Step(
        strategy=strategy,
        model=user_model,
        mesh=mesh,
        data_axes=axes,
        num_minibatches=options.get("num_minibatches", 1),
        use_scan=options.get("use_scan", False),
        mode=mode,
        wire=wire,
        nonfinite=options.get("nonfinite", "ignore"),
        placements=placements,
        update=update,
    )

    def create_state(rng: jax.Array) -> TrainState:
        state = create_whole_state(rng)
        params = jax.tree.map(
            lambda place, x: pad_leaf(x, place.parameter_padding), placements, state.params
        )
        return state.replace(params=params, opt_state=update.pad_state(state.opt_state))

    abstract = jax.eval_shape(create_state, key)
    layout = jax.tree.map(lambda _: PartitionSpec(), abstract)
    layout = layout.replace(params=param_specs(placements), opt_state=state_specs(opt_placements))
    shardings = jax.tree.map(lambda spec: NamedSharding(given, spec), layout)

    def on_mesh(function: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        return on_auto_axes(function, mesh=given, out_specs=out_specs)

    create_sharded = jax.jit(on_mesh(create_state, layout), out_shardings=shardings)
    compiler_options = dict(options.get("compiler_options", {})) or None
    train_step: jax.stages.Wrapped = OutsideMeshes(
        jax.jit(
            on_mesh(step.train, (layout, PartitionSpec())),
            in_shardings=(shardings, None),
            out_shardings=(shardings, None),
            donate_argnums=0,
            compiler_options=compiler_options,
        )
    )
    eval_step: jax.stages.Wrapped = OutsideMeshes(
        jax.jit(
            on_mesh(step.evaluate, PartitionSpec()),
            in_shardings=(shardings, None),
            compiler_options=compiler_options,
        )
    )
    abstract = _with_shardings(abstract, shardings)

    def guarded(name: str, step: jax.stages.Wrapped) -> jax.stages.Wrapped:
        check = functools.partial(check_state, name, abstract)
        return guard_step(name, step, mesh, check) if has_devices else step

    program = Program(
        strategy=strategy,
        mode=mode,
        mesh=given,
        data_axes=axes,
        num_minibatches=step.num_minibatches,
        wire=wire,
        layout=layout,
        parameters=tuple(zip(jax.tree.leaves(infos), jax.tree.leaves(placements), strict=True)),
        abstract_state=abstract,
        whole_state=whole,
        abstract_batch=_with_shardings(
            batch, jax.tree.map(lambda spec: NamedSharding(given, spec), batch_specs(batch, axes))
        ),
        batch_sharding=NamedSharding(given, PartitionSpec(axes)),
        init=functools.partial(_init, OutsideMeshes(create_sharded), mesh),
        train_step=guarded("train_step", train_step),
        eval_step=guarded("eval_step", eval_step),
        step=step,
    )
    for function in (program.train_step, program.eval_step):
        traced = function.trace(program.abstract_state, program.abstract_batch)
        check_conditions(name, traced.jaxpr.jaxpr)
        check_constraints(name, traced.jaxpr.jaxpr)
        check_gathered_order(name, traced.jaxpr.jaxpr, EXAMPLES_SCOPE, axes)
    check_derivatives(name, traced.jaxpr.jaxpr, GATHER_SCOPE)  # That of the evaluation.
    return program


def _check_arguments(
    strategy: str, tx: Any, loss_fn: Any, mesh: Any, axes: tuple[str, ...]
) -> None:
    """Refuses arguments of the wrong kind."""
    loss_form = "a function (params, apply_fn, batch, rng) -> (loss, metrics)"
    is_optimizer = hasattr(tx, "init") and hasattr(tx, "update")
    for name, value, expected, fits in (
        ("tx", tx, "an optax.GradientTransformation", is_optimizer),
        ("loss_fn", loss_fn, loss_form, callable(loss_fn)),
        ("mesh", mesh, "a jax.sharding.Mesh, see make_mesh", isinstance(mesh, Mesh | AbstractMesh)),
    ):
        if not fits:
            raise TypeError(f"{strategy}: {name} is {value!r}, expected {expected}.")
    check_mesh_has(strategy, mesh, axes)


def _with_shardings(tree: Any, shardings: Any) -> Any:
    """Abstract arrays that know where they lie."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


def _init(create_state: Callable[[jax.Array], TrainState], mesh: Any, rng: Any) -> TrainState:
    """Makes the state, where there are devices to hold it."""
    check_has_devices("init", mesh)
    return create_state(typed_key("init", rng))
