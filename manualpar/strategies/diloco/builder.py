"""DiLoCo: replicas train alone for many steps, and then take a step together.

Each replica is a group of devices that trains under a strategy of its own, and sends the others
nothing. After `every` steps they send each other how far they have come from the parameters that
they began with. An *outer* optimizer takes the mean of that for a gradient, and all go on from what
it makes of it (Douillard et al., https://arxiv.org/abs/2311.08105). It is for slow links between
groups of devices. It is another optimizer than that of data parallelism, and no free one.
"""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh

from manualpar.core.mesh.axes import AxisName, axes_size, axis_tuple, check_mesh_has
from manualpar.core.mesh.splitting import shapes_of_batch
from manualpar.core.model.interface import Model
from manualpar.core.model.loss_function import LossFn
from manualpar.core.model.options import CODES, ProgramOptions, check_choice
from manualpar.core.parameters.block_quantization import Quantization
from manualpar.core.parameters.collectives import CommPolicy
from manualpar.core.parameters.quantized_collectives import BlockQuantizer
from manualpar.core.program.program import Program
from manualpar.core.tracing.jaxprs import all_equations
from manualpar.core.tracing.scopes import METRICS_SCOPE, purpose_of
from manualpar.strategies.diloco.program import DiLoCoProgram, build_diloco
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
) -> DiLoCoProgram:
    """Builds training whose replicas take `every` steps alone between two outer steps.

    ```python
    outer_tx = optax.sgd(0.7, momentum=0.9, nesterov=True)
    program = diloco(model, tx, loss_fn, every=50, outer_tx=outer_tx, mesh=mesh, batch=batch)
    for batch in batches:
        state, metrics = program.train_step(state, batch)
    ```

    `train_step` takes the outer step too when it is due: after every `every` steps that the state
    has counted. `state.params` are the parameters that the replicas last agreed on. `eval_step`,
    checkpoints and exports see these.

    Args:
      model: As for every builder, as are the other arguments that are not explained here.
      tx: The optimizer of each replica.
      loss_fn: The loss.
      every: How many steps replicas take alone.
      outer_tx: The optimizer of the outer step. Its gradient is the mean over replicas of the
        common parameters minus a replica's own, weighted by the examples that the replica has seen
        since the last outer step; its parameters are the common ones. `optax.sgd(1)` takes the
        mean of the replicas' parameters. It is offered no loss.
      inner: The builder of each replica's program: `fsdp`, `data_parallel`, `zero`, or
        `functools.partial(hsdp, replica_axis="group")` with another axis than `replica_axis`.
      outer_code: `"int8"` or `"int4"`: the differences travel in so many bits a number, where that
        is fewer bytes. If not given, in `reduce_dtype`, or else that of the parameters.
      outer_fragments: In how many parts of about equal bytes parameters are exchanged, each at
        steps of its own, so that the most that is sent at once falls by as much. With more than 1
        the replicas never agree on all parameters at once.
      outer_overlap: Whether an exchange runs beside a step of training: it is of the parameters
        before the step, and what a replica does in that step stays its own until the next one.
      replica_axis: The mesh axis, or tuple of axes, of the replicas. The batch is split over it
        and over `axis_name`.
      **options: `mesh`, `batch` and others, see `ProgramOptions`, and those of `inner`. For mode
        `"manual"`. With `nonfinite="skip"` each replica leaves out steps of its own.

    Returns:
      The program. Inside a function of your own that is traced, `train_step` has both kinds of step
      in a conditional. `train_step.lower` and `trace` are of the step that replicas take alone.

    Raises:
      ValueError: An option does not fit, as for every builder; or the model or the loss sends
        something between all devices that have other examples, whatever the axes.
      TypeError: An option is of the wrong kind.

    Communication:
      In a step that of `inner` on its part of the mesh, and one all-reduce of the sums of metrics
      over the replicas. In an outer step one all-reduce over `R` replicas of what each device has
      of the differences, sharded as the optimizer's state is: `2 b (P / S) (R - 1) / R` bytes for
      `P` parameters of `b` bytes, sharded over `S` devices; of a fragment
      its part of this. Where parameters are whole and their state is sharded, one all-gather of the
      new parameters in each replica.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"diloco: every={every!r}, expected a number of steps, 1 or more.")
    is_number = isinstance(outer_fragments, int) and not isinstance(outer_fragments, bool)
    if not is_number or not 1 <= outer_fragments <= every:
        raise ValueError(
            f"diloco: outer_fragments={outer_fragments!r}, expected a number from 1 to every="
            f"{every}, because each fragment is exchanged at a step of its own."
        )
    check_choice("diloco", "outer_overlap", outer_overlap, (True, False))
    mesh, batch, axes = _check(outer_tx, outer_code, replica_axis, options)
    size = axes_size(mesh, axes)
    own = {name: mesh.shape[name] for name in mesh.axis_names if name not in axes}
    own_mesh = AbstractMesh(tuple(own.values()), tuple(own), axis_types=(AxisType.Auto,) * len(own))
    part = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct((x.shape[0] // size, *x.shape[1:]), x.dtype) if x.ndim else x
        ),
        batch,
    )
    inner_options: Any = options | {"mesh": own_mesh, "batch": part}
    one = inner(model, tx, loss_fn, **inner_options)
    for info, _ in one.parameters:
        if split := sorted(info.absent_axes & {*axes}):
            raise ValueError(
                f"diloco: model: parameter {info.path!r} of shape {info.shape} is split over "
                f"{split}, the replicas' own axis, expected another axis of the mesh "
                f"{dict(mesh.shape)}: each replica has a whole model. Name one of {list(own)} in "
                "the model, or build the mesh with one more axis inside each replica."
            )
    program = build_diloco(
        one,
        batch,
        mesh=mesh,
        replica_axes=axes,
        every=every,
        outer_tx=outer_tx,
        outer_wire=CommPolicy(
            reduce_dtype=one.wire.reduce_dtype,
            reduce_code=BlockQuantizer(outer_code) if outer_code else None,
        ),
        num_fragments=outer_fragments,
        overlap=outer_overlap,
        compiler_options=dict(options.get("compiler_options", {})) or None,
    )
    _check_alone(program)
    return program


def _check(
    outer_tx: Any, outer_code: Quantization | None, replica_axis: AxisName, options: Any
) -> tuple[Mesh | AbstractMesh, Any, tuple[str, ...]]:
    """Refuses what cannot be built; returns the mesh, the abstract batch and the replicas' axes."""
    if not (hasattr(outer_tx, "init") and hasattr(outer_tx, "update")):
        raise TypeError(
            f"diloco: outer_tx is {outer_tx!r}, expected an optax.GradientTransformation such as "
            "optax.sgd(0.7, momentum=0.9, nesterov=True)."
        )
    check_choice("diloco", "outer_code", outer_code, CODES["reduce_code"])
    if options.get("mode", "manual") != "manual":
        raise ValueError(
            f"diloco: mode={options['mode']!r}, expected 'manual': where XLA writes the "
            "collectives, replicas do not train alone."
        )
    if options.get("error_feedback"):
        raise ValueError(
            "diloco: error_feedback=True, expected False: replicas go on from common parameters, "
            "and residuals of their own would be lost there."
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


def _check_alone(program: DiLoCoProgram) -> None:
    """Refuses outer steps that cannot be taken, and steps that send more than sums of metrics."""
    try:
        for outer_step in program.outer_steps:
            outer_step.trace(program.abstract_state)
    except TypeError as error:
        raise TypeError(
            f"diloco: outer_tx does not take an outer step ({error}), expected an optimizer of "
            "gradients and parameters: between replicas there is no loss."
        ) from error
    try:
        traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    except AssertionError as error:  # JAX types no zeros like what `jax.eval_shape` returned.
        raise ValueError(
            "diloco: tx cannot be traced where values differ between replicas (JAX fails an "
            f"assertion, {error}), expected an optimizer that asks for no abstract values there, "
            "as optax.MultiSteps does. Use num_minibatches= to accumulate gradients."
        ) from error
    for eqn in all_equations(traced.jaxpr.jaxpr):
        named = (eqn.params.get("axis_name"), *(eqn.params.get("axes") or ()))
        scope = str(eqn.source_info.name_stack)
        is_silent = eqn.primitive.name in ("axis_index", "pvary", "shard_map")
        crosses = {*program.replica_axes} & {
            x for x in jax.tree.leaves(named) if isinstance(x, str)
        }
        if crosses and not is_silent and purpose_of(scope) != METRICS_SCOPE:
            raise ValueError(
                f"diloco: the model or the loss runs a {eqn.primitive.name} over all axes that its "
                f"values vary over ({scope or 'no scope'}), among them {sorted(crosses)}, expected "
                "none of the replicas' axes in a step, which they take alone. (Experts' balance "
                "and losses that couple all examples do that.) Use hsdp."
            )
