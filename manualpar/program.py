"""A layout, a model, a loss and an optimizer made into `init`, `train_step`, `eval_step`.

The state is a plain tree of global arrays, initialised in one jitted call whose outputs have the
layout's shardings, so that no device ever holds more than its part. A step is one jitted call too:
see `manualpar.step`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from manualpar.dispatch import limit_steps_ahead
from manualpar.divergence import check_conditions
from manualpar.layout import (
    ParameterInfo,
    PlaceFn,
    Placement,
    describe_parameters,
    like_params,
    param_specs,
    strip_boxes,
)
from manualpar.loss import LossFn
from manualpar.mesh import AxisName, axes_size, axis_tuple, check_mesh_has
from manualpar.model import init_variables
from manualpar.partitioning import is_box
from manualpar.probe import find_carried_collections, find_loop_dims
from manualpar.step import Step, batch_specs, check_batch
from manualpar.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class Program:
    """A model's training under one strategy.

    Attributes:
      strategy: The name of the strategy.
      mesh: The mesh it runs on.
      data_axes: The mesh axes that examples are split over.
      layout: A `TrainState` with a `PartitionSpec` at each leaf.
      parameters: A `(ParameterInfo, Placement)` for each parameter, in the order of the tree; a
        placement's note says why a parameter stays whole.
      abstract_state: A `TrainState` of `jax.ShapeDtypeStruct`s with shardings.
      abstract_batch: The batch that the program was built for, as `jax.ShapeDtypeStruct`s with
        shardings.
      batch_sharding: How a batch's leaves lie on the mesh: the leading dimension split over the
        data axes. Put batches there with `jax.device_put(batch, program.batch_sharding)`; one that
        lies elsewhere is moved in every step.
      init: `init(rng) -> TrainState`. `init_rng, rng = jax.random.split(rng)`, and the parameters
        are those of `model.init({"params": init_rng}, batch.inputs, train=False)`, bit for bit on
        every mesh. Each device only ever holds its own shard.
      train_step: `train_step(state, batch) -> (state, metrics)`, jitted; the state is donated: use
        the one returned. Metrics are `(sum, count)` pairs over the global batch, the same on all
        devices.
      eval_step: `eval_step(state, batch) -> metrics`, jitted; the same loss function with training
        turned off.
    """

    strategy: str
    mesh: Mesh
    data_axes: tuple[str, ...]
    layout: TrainState
    parameters: tuple[tuple[ParameterInfo, Placement], ...]
    abstract_state: TrainState
    abstract_batch: Any
    batch_sharding: NamedSharding
    init: Callable[[jax.Array], TrainState]
    train_step: jax.stages.Wrapped
    eval_step: jax.stages.Wrapped


def build_program(
    strategy: str,
    place: PlaceFn,
    *,
    model: nn.Module,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    mesh: Mesh,
    batch: Any,
    axis_name: AxisName,
    num_minibatches: int,
    use_scan: bool,
) -> Program:
    """Builds a program; see a strategy's builder, such as `manualpar.fsdp`, for the arguments.

    Args:
      strategy: Its name, for messages.
      place: Where each parameter lives.
      model: The Linen model.
      tx: The optimizer.
      loss_fn: The loss.
      mesh: The mesh.
      batch: The global batch or its shapes.
      axis_name: The data axis or axes.
      num_minibatches: Parts that a device takes its share of a batch in.
      use_scan: Whether they run in a scan.

    Returns:
      The program, traced but not compiled.

    Raises:
      ValueError: A field does not fit; nothing has been compiled.
      TypeError: A field is of the wrong kind.
    """
    axes = axis_tuple(axis_name)
    _check_arguments(strategy, model, tx, loss_fn, mesh, axes)
    batch = jax.eval_shape(lambda batch: batch, batch)
    check_batch(f"{strategy}: batch", batch, mesh, axes)

    key = jax.eval_shape(lambda: jax.random.key(0))  # Abstract: building touches no device.
    variables = jax.eval_shape(lambda rng: init_variables(model, rng, batch.inputs), key)
    if not jax.tree.leaves(variables.get("params")):
        raise ValueError(f"{strategy}: model {model!r} has no parameters, expected some to train.")
    collections = find_carried_collections(model, strip_boxes(variables), batch.inputs, mesh, axes)

    step = Step(model, loss_fn, mesh, axes, None, num_minibatches, use_scan)
    infos, placements = _place_parameters(
        strategy, place, step, variables["params"], collections, batch
    )
    step = dataclasses.replace(step, placements=placements)

    def create_state(rng: jax.Array) -> TrainState:
        init_rng, rng = jax.random.split(rng)
        variables = strip_boxes(init_variables(model, init_rng, batch.inputs))
        return TrainState.create(
            apply_fn=model.apply,
            params=variables["params"],
            tx=tx,
            rng=rng,
            collections={name: variables[name] for name in collections},
        )

    abstract = jax.eval_shape(create_state, key)
    specs = param_specs(placements)
    layout = jax.tree.map(lambda _: PartitionSpec(), abstract)
    layout = layout.replace(
        params=specs, opt_state=like_params(abstract.opt_state, abstract.params, specs)
    )
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), layout)
    create_sharded = jax.jit(create_state, out_shardings=shardings)
    train_step = jax.jit(
        step.train,
        in_shardings=(shardings, None),
        out_shardings=(shardings, None),
        donate_argnums=0,
    )
    eval_step = jax.jit(step.evaluate, in_shardings=(shardings, None))
    program = Program(
        strategy=strategy,
        mesh=mesh,
        data_axes=axes,
        layout=layout,
        parameters=tuple(zip(jax.tree.leaves(infos), jax.tree.leaves(placements), strict=True)),
        abstract_state=_with_shardings(abstract, shardings),
        abstract_batch=_with_shardings(
            batch, jax.tree.map(lambda spec: NamedSharding(mesh, spec), batch_specs(batch, axes))
        ),
        batch_sharding=NamedSharding(mesh, PartitionSpec(axes)),
        init=lambda rng: create_sharded(_typed_key(rng)),
        train_step=limit_steps_ahead(train_step, mesh),
        eval_step=limit_steps_ahead(eval_step, mesh),
    )
    for function in (program.train_step, program.eval_step):
        traced = function.trace(program.abstract_state, program.abstract_batch)
        check_conditions(strategy, traced.jaxpr.jaxpr)
    return program


def _place_parameters(
    strategy: str, place: PlaceFn, step: Step, params: Any, collections: dict[str, Any], batch: Any
) -> tuple[Any, Any]:
    """The tree of parameters with a `ParameterInfo` and with a `Placement` at each leaf."""
    axis_size = axes_size(step.mesh, step.data_axes)

    def place_all(params: Any, loop_dims: Mapping[str, frozenset[int]]) -> tuple[Any, Any]:
        infos = describe_parameters(params, loop_dims, step.mesh, step.data_axes)
        return infos, jax.tree.map(lambda info: place(info, step.data_axes, axis_size), infos)

    # Whatever would be sharded if no loop ran over it is looked at, and what is annotated.
    whole = strip_boxes(params)
    boxed = jax.tree.map(
        lambda x, placement: is_box(x) or len(placement.spec) > 0,
        params,
        place_all(whole, {})[1],
        is_leaf=is_box,
    )
    if not any(jax.tree.leaves(boxed)):
        return place_all(params, {})
    loop_dims = find_loop_dims(
        strategy,
        model=step.model,
        loss_fn=step.loss_fn,
        params=whole,
        boxed=boxed,
        collections=collections,
        batch=batch,
        mesh=step.mesh,
        data_axes=step.data_axes,
    )
    return place_all(params, loop_dims)


def _check_arguments(
    strategy: str, model: Any, tx: Any, loss_fn: Any, mesh: Any, axes: tuple[str, ...]
) -> None:
    """Refuses arguments of the wrong kind."""
    loss_form = "a function (params, apply_fn, batch, rng) -> (loss, metrics)"
    is_optimizer = hasattr(tx, "init") and hasattr(tx, "update")
    for name, value, expected, fits in (
        ("model", model, "an instance of a flax.linen.Module", isinstance(model, nn.Module)),
        ("tx", tx, "an optax.GradientTransformation", is_optimizer),
        ("loss_fn", loss_fn, loss_form, callable(loss_fn)),
        ("mesh", mesh, "a jax.sharding.Mesh, see make_mesh", isinstance(mesh, Mesh)),
    ):
        if not fits:
            raise TypeError(f"{strategy}: {name} is {value!r}, expected {expected}.")
    check_mesh_has(strategy, mesh, axes)
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"{strategy}: the mesh has axis types {mesh.axis_types}, expected only AxisType.Auto: "
            "outside shard_map the optimizer is partitioned by the compiler. Build it with "
            "manualpar.make_mesh."
        )


def _with_shardings(tree: Any, shardings: Any) -> Any:
    """Abstract arrays that know where they lie."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


def _typed_key(rng: Any) -> jax.Array:
    """A typed key from a typed or a raw one."""
    dtype = getattr(rng, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and rng.shape == ():
        return rng
    if dtype == jnp.uint32 and rng.ndim == 1:
        return jax.random.wrap_key_data(rng)
    raise TypeError(f"init: rng is {rng!r}, expected one key such as jax.random.key(0).")
