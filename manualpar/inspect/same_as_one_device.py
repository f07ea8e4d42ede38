"""Compares a program's step with the step of plain flax on one device.

JAX's types say whether an array differs between devices, but not whether its numbers are right. The
loss changes with the number of devices if the loss function couples examples, if the model uses
statistics of one device's examples, or if the loss is not a mean over examples. No type shows this.
So this module compares the loss, the metrics and the gradient of every parameter with the numbers
that the same model and loss function give on one device with the whole batch. The compared
gradients are those that the program gives its optimizer.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from manualpar.core.mesh.axes import axis_tuple, names_to_spec
from manualpar.core.mesh.mesh_context import no_mesh, with_auto_axes
from manualpar.core.mesh.splitting import check_batch
from manualpar.core.model.loss_function import Mean
from manualpar.core.parameters.placement import (
    ParameterInfo,
    ParameterSharding,
    combine,
    partition,
    split_names,
    state_specs,
    trained,
)
from manualpar.core.parameters.sharded_parameter import cast_floating
from manualpar.core.program.program import Program
from manualpar.core.state.metrics import StepSums, mean, sum_of_means
from manualpar.core.state.train_state import TrainState
from manualpar.core.trees import path_name
from manualpar.errors import list_some


def assert_same_as_one_device(
    program: Program,
    batch: Any,
    rng: jax.Array,
    *,
    rtol: float | None = None,
    atol: float = 1e-6,
) -> None:
    """Asserts that a training step has the same loss, metrics and gradients as one device.

    The one device has the whole batch, and runs plain flax: the model's `apply` on plain arrays,
    `jax.grad`, and no code of the strategy. Mesh axes that the model or the loss names have size 1
    there. Parameters come from `program.init(rng)`. If the program casts them to `gather_dtype`
    where they are used, so does the one device.

    Args:
      program: The program, on devices of this process. Its optimizer does not matter.
      batch: A batch for `train_step`, of float32 or integers `[B, ...]`.
      rng: The key for the program's `init`.
      rtol: The largest error of the loss, of each metric's mean and of each gradient, as a fraction
        of the value on one device. For a gradient, the norm of the difference is compared with the
        norm of the gradient. By default 1e-4, or 0.05 if parameters are stored, gathered or reduced
        in bfloat16. A model that computes in bfloat16 also needs a larger value.
      atol: An additional error that is allowed: absolute for the loss and the metrics; for a
        gradient, a fraction of the norm of all gradients together. It is for gradients that are
        zero except for rounding, such as the gradient of a bias before a softmax.

    Raises:
      AssertionError: Something differs. The message names the loss and the metrics that differ, and
        the worst gradients with their ratios to one device's gradients. It also names known causes
        of such a difference in the model or the loss.
      ValueError: The loss depends on its key, as with dropout, so there is nothing to compare; or
        the program cannot be run here.

    Communication:
      The communication of one training step of the program, up to the optimizer.
    """
    mesh: Any = program.mesh
    if isinstance(mesh, AbstractMesh) or jax.process_count() > 1:
        raise ValueError(
            "assert_same_as_one_device: the program is on an abstract mesh or on devices of "
            "several processes, expected devices of this process. Build it on make_mesh in one "
            "process."
        )
    if program.abstract_others:
        raise ValueError(
            f"assert_same_as_one_device: the loss calls other models "
            f"({', '.join(program.abstract_others)}), expected a program without other_models. "
            "Compare a step of the program with jax.grad of the loss on one device."
        )
    check_batch("assert_same_as_one_device: batch", batch, program.mesh, program.roles)
    state = program.init(rng)
    if rtol is None:
        dtypes = {program.comm.gather.dtype, program.comm.reduce.dtype}
        dtypes |= {str(x.dtype) for x in jax.tree.leaves(state.params)}
        rtol = 0.05 if "bfloat16" in dtypes else 1e-4
    compare = functools.partial(_differences, rtol=rtol, atol=atol)
    with no_mesh():
        keys = jax.random.split(state.rng)
        specs = (state_specs(trained(program.placements)), PartitionSpec(), PartitionSpec())
        gradients = program.step.gradients(batch)
        run = jax.jit(with_auto_axes(gradients, mesh=mesh, out_specs=specs))
        carried = state.collections, state.local
        grads, sums, _ = jax.device_get(run(state.params, carried, keys[1], batch))
        one, one_again = map(_on_one_device(program, state, batch), keys)
    if any(compare(one_again, one)):
        raise ValueError(
            "assert_same_as_one_device: loss_fn depends on its rng, expected the same result with "
            "every key. Switch dropout and other randomness off (a rate of 0, or a model made with "
            "deterministic=True)."
        )
    unpadded_params, _ = partition(program.placements, program.unpadded_state.params)
    grads = jax.tree.map(_unpadded, grads, unpadded_params)
    differences = sorted(compare(jax.device_get((grads, _means(sums))), one), reverse=True)
    if differences:
        words = "; ".join(list_some(words for _, _, words in differences))
        raise AssertionError(
            f"{program.strategy.name} on {program.mesh.size} devices is not the same as one "
            f"device (rtol={rtol}, atol={atol}): {words}.{_known_reasons(program)}"
        )


# A difference: whether it is of a mean (else of a gradient), its ratio to the allowed difference,
# and a clause for the message.
_Difference = tuple[bool, float, str]


def _on_one_device(
    program: Program, state: TrainState, batch: Any
) -> Callable[[jax.Array], tuple[Any, dict[str, Any]]]:
    """Builds the step on one device: it maps a key to the gradients and the means of metrics."""
    mesh = program.mesh
    is_manual = program.step.mode.writes_collectives
    # If no `shard_map` binds the axis of a split layer, the layer computes with complete weights.
    split = frozenset[str]().union(*(place.split_axes for _, place in program.parameters))
    unbound = split - set(program.data_axes) if is_manual else frozenset()
    axes = [axis for axis in mesh.axis_names if axis not in unbound]
    one_device = Mesh(mesh.devices.flatten()[:1].reshape([1] * len(axes)), axes)
    mode = dataclasses.replace(program.step.mode, mesh=one_device)
    model = dataclasses.replace(program.model, mode=mode, learns_counts=True)
    step = dataclasses.replace(program.step, model=model, mode=mode)

    def cast(place: ParameterSharding, x: jax.Array) -> jax.Array:
        comm = program.comm.for_parameter(
            x.dtype, trainable=place.trainable, is_float8=place.is_float8
        )
        return cast_floating(x, comm.gather.dtype)

    def gradients(params: Any, collections: Any, rng: jax.Array, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            params = jax.tree.map(cast, step.placements, combine((params, frozen)))
            loss, metrics, _ = model.train_loss(params, collections, batch, rng)
            if isinstance(loss, Mean):
                count = jnp.asarray(loss.weight, jnp.float32)
                return loss.mean, StepSums({"loss": (loss.mean * count, count)}, metrics)
            return sum_of_means(loss), StepSums(loss, metrics)

        params, frozen = partition(step.placements, params)
        grads, sums = jax.grad(loss_fn, has_aux=True)(params)
        # By type some of the results vary over mesh axes, so stack them along a new leading dim.
        return jax.tree.map(lambda x: x[None], (grads, _means(sums)))

    def spec(info: ParameterInfo) -> PartitionSpec:
        names = [[a for a in axis_tuple(name) if a in axes] for name in split_names(info)]
        return names_to_spec(tuple(tuple(of_dim) or None for of_dim in names))

    replicated, stacked = PartitionSpec(), PartitionSpec(tuple(axes))
    params_spec = jax.tree.map(spec, model.parameters) if is_manual else replicated
    run = mode.run(
        gradients,
        in_specs=(params_spec, replicated, replicated, step.roles.batch_specs(batch)),
        out_specs=stacked if is_manual else replicated,
    )
    put = functools.partial(jax.device_put, device=NamedSharding(one_device, PartitionSpec()))
    params = jax.tree.map(_unpadded, put(state.params), program.unpadded_state.params)
    run = jax.jit(functools.partial(run, params, put(state.collections)))
    return lambda key: jax.tree.map(lambda x: x[0], jax.device_get(run(put(key), put(batch))))


def _differences(found: Any, expected: Any, rtol: float, atol: float) -> Iterator[_Difference]:
    """Yields the gradients and the means of metrics that differ by more than is allowed."""
    (grads, means), (expected_grads, expected_means) = found, expected
    for name, value in expected_means.items():
        off, allowed = abs(means[name] - value), rtol * abs(value) + atol
        if not off <= allowed:
            words = f"{name} is {means[name]:.7g}, one device's {value:.7g}"
            yield True, float(off / allowed), words
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(expected_grads), strict=True)
    ours, theirs = (
        [np.asarray(g, np.result_type(g.dtype.type, np.float64)).ravel() for g in each]
        for each in (jax.tree.leaves(grads), leaves)
    )
    total = np.linalg.norm([np.linalg.norm(g) for g in theirs])
    for path, g, e in zip(paths, ours, theirs, strict=True):
        off, norm = np.linalg.norm(g - e), np.linalg.norm(e)
        allowed = rtol * norm + atol * total
        if not off <= allowed:
            ratio = f"{np.vdot(e, g).real / norm**2:.6g} of" if norm else "not zero, as is"
            words = f"the gradient of {path_name(path)} is {ratio} one device's"
            words += f", off by {off / norm:.3g} of its norm" if norm else ""
            yield False, float(off / allowed) if allowed else math.inf, words


def _means(sums: StepSums) -> dict[str, jax.Array]:
    """Returns the means of the loss and of the metrics by their names in a message."""
    metrics = {f"metrics[{name!r}]": mean(pair) for name, pair in sums.metrics.items()}
    return {"the loss": sums.loss, **metrics}


def _unpadded(x: Any, like: Any) -> Any:
    return x[tuple(map(slice, like.shape))]


def _known_reasons(program: Program) -> str:
    """Returns sentences about known causes of a difference that may apply to the program."""
    reasons = " A loss that couples examples must gather them with manualpar.gather_examples."
    if program.num_minibatches > 1:
        reasons += (
            " A loss that couples examples sees only one minibatch at a time, and this program has "
            f"num_minibatches={program.num_minibatches}."
        )
    if "batch_stats" in program.unpadded_state.collections:
        reasons += (
            " The model has batch_stats, which each device computes from its own examples. "
            "nn.BatchNorm(axis_name=...) makes them global; use_running_average=True excludes "
            "them from the comparison."
        )
    if any(place.split_axes for _, place in program.parameters):
        reasons += (
            " Layers compute with parts of their parameters. JAX's types do not detect a bias that "
            "is added before leave(), a mean in place of the sum of leave(), a product of terms "
            "that are not summed yet, or a norm over split features."
        )
    return reasons
