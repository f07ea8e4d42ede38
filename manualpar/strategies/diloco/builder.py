"""DiLoCo: replicas train separately for many steps, and then take an outer step together.

Each replica is a group of devices. It trains with an inner strategy such as `fsdp` and sends no
parameters or gradients to other replicas. After `every` steps the replicas exchange their
differences from the parameters with which they began. An *outer* optimizer takes the mean
difference as a gradient, and all replicas continue from the updated parameters (Douillard et al.,
https://arxiv.org/abs/2311.08105). Use DiLoCo for slow links between groups of devices. DiLoCo's
losses differ from the losses of data parallelism, because DiLoCo is a different optimizer.
"""

from collections.abc import Callable
from typing import Any, Unpack, get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh

from manualpar.core.mesh.axes import AxisName, axes_size, axis_tuple, check_mesh_has
from manualpar.core.mesh.splitting import shapes_of_batch
from manualpar.core.model.interface import Model
from manualpar.core.model.loss_function import LossFn
from manualpar.core.model.option_table import check_choice
from manualpar.core.model.options import ProgramOptions
from manualpar.core.parameters.block_quantization import Quantization
from manualpar.core.parameters.comm_policy import CommPolicy, Format
from manualpar.core.parameters.quantized_collectives import BlockQuantizer
from manualpar.core.program.program import Program
from manualpar.core.tracing.jaxprs import all_equations
from manualpar.core.tracing.scopes import METRICS_SCOPE, purpose_of
from manualpar.strategies.diloco.program import build_diloco
from manualpar.strategies.fsdp import fsdp


def diloco(
    model: Model,
    tx: optax.GradientTransformation,
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
        outer_comm=CommPolicy(
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
