"""Gradients of the global mean loss, from each device's part of a batch.

A step differentiates `sum of the loss over all examples / global number of examples`, however the
examples are split over devices and minibatches, and however many examples are masked. If part `k`
has `n_k` valid examples and the mean loss `l_k`, the gradient is `sum_k n_k grad(l_k) / sum_k n_k`.
So each part is weighted by its count *before* the parts are averaged. A mean of the parts' means
would be another loss.

Types decide whether autodiff sums gradients over devices. If a parameter is *invariant* over a mesh
axis, autodiff inserts a `psum` over that axis, once for every use and minibatch. Therefore
parameters are cast to *varying* first. Then gradients differ between devices while they are
accumulated, and `sync_gradients` reduces them once. A gradient that is not reduced still varies,
and `shard_map` refuses to return it as replicated. A parameter stays invariant only over the axes
over which the backward pass of its gather takes the mean (`CommPolicy.averaged_axes`).
"""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from manualpar.core.mesh.axes import AxisName, axis_tuple, check_axes_bound
from manualpar.core.modes.overwritten import (
    OVERWRITTEN,
    Trained,
    as_maxima,
    lowest,
    use_without_examples,
)
from manualpar.core.parameters.collectives import (
    cast_to_varying,
    is_vma_checked,
    reduce_mean,
    varying_axes,
)
from manualpar.core.parameters.sharded_parameter import (
    averaged_axes,
    boxed_axes,
    comm_policy,
    is_box,
    reduction_dtype,
)
from manualpar.core.parameters.trainable import combine
from manualpar.core.state.metrics import Metrics, StepSums
from manualpar.core.tracing.scopes import COUNT_SCOPE, METRICS_SCOPE, REDUCE_SCOPE
from manualpar.core.trees import Batch, Collections, Grads, Params

Sums = TypeVar("Sums")
# (params, collections, minibatch, rng) -> (loss, metrics, updated collections).
CarryingLossFn = Callable[
    [Params, Collections, Batch, jax.Array], tuple[jax.Array, Metrics, Collections]
]
# Trained and frozen parameters, see `partition`.
ParamPair = tuple[Params, Params]
# The function that is differentiated: (trained, frozen, collections, minibatch, rng) ->
# (loss times count, (sums, updated collections)).
WeightedLoss = Callable[
    [Params, Params, Collections, Batch, jax.Array],
    tuple[jax.Array, tuple[StepSums, Collections]],
]
# A linear function that is applied to the gradients of each minibatch before they are summed.
Reduce = Callable[[Grads], Grads]
# Runs the minibatches and adds up their gradients: (loss, params, collections, (minibatches, keys),
# reduce) -> (summed gradients, sums, collections).
Accumulation = Callable[
    [WeightedLoss, ParamPair, Collections, tuple[Batch, jax.Array], Reduce],
    tuple[Grads, StepSums, Collections],
]


def accumulate(
    loss_fn: CarryingLossFn,
    params: ParamPair,
    collections: Collections,
    minibatches: Batch,
    rng: jax.Array,
    *,
    schedule: Accumulation,
    reduce: Reduce = lambda grads: grads,
    join: Callable[[ParamPair], Params] = combine,
    outer_axes: tuple[str, ...] = (),
) -> tuple[Grads, StepSums, Collections]:
    """Accumulates gradients over minibatches, and carries collections from one to the next.

    Args:
      loss_fn: `(params, collections, minibatch, rng) -> (loss, metrics, collections)`.
      params: The trained and the frozen parameters, see `partition`; boxes allowed.
      collections: The collections before the first minibatch.
      minibatches: A tree whose leaves are `[M, B/M, ...]`, see `split_minibatches`.
      rng: The key; each minibatch gets a key derived from it.
      schedule: How the minibatches run: `unrolled` or `scanned`.
      reduce: Applied to the gradients of each minibatch before they are added up.
      join: Makes the tree of parameters for `loss_fn` from the pair, in each minibatch.
      outer_axes: Mesh axes along which devices take separate steps, see `Mode`.

    Returns:
      The gradients of the trained parameters in float32 or wider, the `StepSums` over the
      minibatches, and the collections after the last minibatch. Variables that their gradients
      replace have their new values, see `overwritten`.
    """
    keys = jax.random.split(rng, len(jax.tree.leaves(minibatches)[0]))
    axes = varying_axes(minibatches)
    params = jax.tree.map(
        lambda x: cast_to_varying(x, axes.difference(averaged_axes(x))), params, is_leaf=is_box
    )

    overwritten = collections.get(OVERWRITTEN)
    if overwritten:
        collections = {**collections, OVERWRITTEN: lowest(overwritten)}
        params = (Trained(params[0], cast_to_varying(overwritten, axes)), params[1])

    def weighted_loss(
        trained: Params, frozen: Params, collections: Collections, minibatch: Batch, key: jax.Array
    ) -> tuple[jax.Array, tuple[StepSums, Collections]]:
        if overwritten:
            trained, variables = trained
            maxima = as_maxima(variables)
            collections = {**collections, OVERWRITTEN: maxima}
        loss, metrics, collections = loss_fn(join((trained, frozen)), collections, minibatch, key)
        weight = jax.lax.stop_gradient(_at_least_float32(metrics["loss"][1]))
        # A loss may be the same on all devices, for example a pmean or a ratio of psums. It must
        # still count once for each device. Without the cast autodiff would differentiate the loss
        # once for all devices, and the mean of the gradients would be too small.
        loss = cast_to_varying(_at_least_float32(loss), axes) * weight
        if overwritten:
            loss = use_without_examples(loss, variables, maxima)
        return loss, (StepSums((jax.lax.stop_gradient(loss), weight), metrics), collections)

    grads, sums, collections = schedule(
        weighted_loss, params, collections, (minibatches, keys), reduce
    )
    count = _mean_count(sums.metrics["loss"][1], outer_axes)
    return jax.tree.map(lambda g: g / count, grads), sums, collections


def unrolled(
    loss: WeightedLoss,
    params: ParamPair,
    collections: Collections,
    minibatches: tuple[Batch, jax.Array],
    reduce: Reduce,
) -> tuple[Grads, StepSums, Collections]:
    """Runs the minibatches in a Python loop, so each is compiled separately."""
    total = None
    for index in range(len(minibatches[1])):
        with jax.named_scope(f"minibatch_{index}"):
            minibatch = jax.tree.map(lambda x, i=index: x[i], minibatches)
            term, collections = _differentiate(loss, params, collections, minibatch, reduce)
            total = term if total is None else jax.tree.map(jnp.add, total, term)
    assert total is not None  # `check_minibatches` refuses a batch without minibatches.
    return *total, collections


def scanned(
    loss: WeightedLoss,
    params: ParamPair,
    collections: Collections,
    minibatches: tuple[Batch, jax.Array],
    reduce: Reduce,
) -> tuple[Grads, StepSums, Collections]:
    """Runs the minibatches in a `jax.lax.scan`, so the code is compiled once."""

    def differentiate(collections: Collections, minibatch: Batch) -> tuple[Any, Collections]:
        return _differentiate(loss, params, collections, minibatch, reduce)

    first = jax.tree.map(lambda x: x[0], minibatches)
    # The carry of a scan must keep its type, but after a minibatch collections may vary over more
    # axes. So the loop casts collections until their types are stable. Each repetition can only add
    # axes.
    for _ in range(len(jax.sharding.get_abstract_mesh().manual_axes) + 1):
        types, updated = jax.eval_shape(differentiate, collections, first)
        collections = jax.tree.map(
            lambda x, t: cast_to_varying(x, varying_axes(t)), collections, updated
        )

    def zero(t: Any) -> jax.Array:
        x = cast_to_varying(jnp.zeros(t.shape, t.dtype), varying_axes(t))
        # In mode `explicit` the type has a sharding: the sum must have the sharding of its terms.
        return x if t.sharding is None else jax.sharding.reshard(x, t.sharding)

    def body(carry: Any, minibatch: Batch) -> tuple[Any, None]:
        total, collections = carry
        with jax.named_scope("minibatch"):
            term, collections = differentiate(collections, minibatch)
            return (jax.tree.map(jnp.add, total, term), collections), None

    carry = (jax.tree.map(zero, types), collections)
    total, collections = jax.lax.scan(body, carry, minibatches)[0]
    return *total, collections


def _differentiate(
    loss: WeightedLoss,
    params: ParamPair,
    collections: Collections,
    minibatch: tuple[Batch, jax.Array],
    reduce: Reduce,
) -> tuple[Any, Collections]:
    """Returns the reduced gradients and the sums of a minibatch, and the collections after it."""
    grads, (sums, new) = jax.grad(loss, has_aux=True)(*params, collections, *minibatch)
    if isinstance(grads, Trained):
        maxima = jax.tree.map(jnp.maximum, collections[OVERWRITTEN], grads.overwritten)
        grads, new = grads.params, {**new, OVERWRITTEN: maxima}
    return _accumulators(reduce(grads), sums), new


def _accumulators(*terms: Any) -> Any:
    """Casts floating-point numbers to float32 or wider, to sum minibatches in this dtype."""

    def accumulator(x: jax.Array) -> jax.Array:
        return _at_least_float32(x) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(accumulator, terms)


def sync_gradients(grads: Grads, axis_names: AxisName) -> Any:
    """Takes the mean of the devices' gradients over the mesh axes that split the batch.

    Args:
      grads: A tree of each device's gradients. A boxed gradient has already been reduced over the
        axes of its shards, and over its `averaged_axes`, by the backward pass of the gather. So it
        is reduced only over the other axes.
      axis_names: The mesh axis, or tuple of axes, over which examples are split.

    Returns:
      The same tree; unboxed gradients are equal on all devices along `axis_names`.

    Raises:
      ValueError: An axis is not bound, or a gradient does not vary over an axis. In the second case
        autodiff has already summed the gradient over the axis, so the mean would be too large by
        the size of the axis. (With `check_vma=False` autodiff does not sum, and this is not
        checked.)

    Communication:
      One all-reduce for each gradient that is replicated over some of the axes: a device sends
      `2 (N - 1) / N` of the gradient's bytes in the dtype of `reduction_dtype`. A quantizer uses an
      all-to-all and an all-gather instead, see `Quantizer`.
    """
    axes = axis_tuple(axis_names)
    check_axes_bound("sync_gradients", axes)

    def sync(path: Any, g: Any) -> Any:
        reduced = {*boxed_axes(g), *averaged_axes(g)}
        reduce_axes = tuple(axis for axis in axes if axis not in reduced)
        if not reduce_axes:
            return g
        value = g.value if is_box(g) else g
        if is_vma_checked(reduce_axes[0]):
            summed = [axis for axis in reduce_axes if axis not in varying_axes(value)]
            if summed:
                raise ValueError(
                    f"sync_gradients: grads{jax.tree_util.keystr(path)} is already summed over "
                    f"{summed}, expected each device's gradient, not yet summed. It was taken with "
                    "respect to a replicated parameter. Cast the parameters with "
                    f"jax.lax.pcast(params, {tuple(summed)}, to='varying') before jax.grad, or use "
                    "accumulate_gradients."
                )
        scope = jax.tree_util.keystr(path, simple=True, separator="/")
        with jax.named_scope(scope) if scope else contextlib.nullcontext():
            value = reduce_mean(value, reduce_axes, comm=comm_policy(g), dtype=reduction_dtype(g))
        return g.replace(value=value) if is_box(g) else value

    return jax.tree_util.tree_map_with_path(sync, grads, is_leaf=is_box)


def reduce_gradient(
    g: Any, dtype: Any, *, mean_axes: tuple[str, ...], sum_axes: tuple[str, ...]
) -> Any:
    """Reduces the gradient of a parameter over the axes of the parameter's placement.

    Communication:
      One all-reduce in `dtype` over the axes of `mean_axes` that the gradient has not been
      scattered over, and one over `sum_axes` if there are any.
    """
    is_exact = (
        comm_policy(g).reduce.quantizer is None
    )  # A quantizer must get the gradient before it is rounded to `dtype`.
    left = {*mean_axes}.difference(boxed_axes(g), averaged_axes(g))
    if (left and is_exact) or sum_axes:
        g = jax.tree.map(lambda x: x.astype(dtype), g)
    if sum_axes:
        with jax.named_scope(REDUCE_SCOPE):
            g = jax.tree.map(lambda x: jax.lax.psum(x, sum_axes), g)
    # If a parameter is split over all data axes, there is no axis to take the mean over.
    return sync_gradients(g, mean_axes) if mean_axes else g


def sync_metrics(metrics: Sums, axis_names: AxisName) -> Sums:
    """Sums `(sum, count)` metrics over mesh axes.

    Args:
      metrics: A dict from each metric's name to this device's pair `(sum, count)`, or any other
        tree of scalars.
      axis_names: The mesh axis, or tuple of axes, over which examples are split.

    Returns:
      The tree with each scalar summed over all devices, the same on all of them.

    Communication:
      One all-reduce for each dtype, of all scalars of that dtype.
    """
    axes = axis_tuple(axis_names)
    check_axes_bound("sync_metrics", axes)
    leaves, structure = jax.tree.flatten(metrics)
    leaves = [jnp.asarray(x) for x in leaves]
    with jax.named_scope(METRICS_SCOPE):
        for dtype in dict.fromkeys(x.dtype for x in leaves):
            same = [i for i, x in enumerate(leaves) if x.dtype == dtype]
            total = jax.lax.psum(cast_to_varying(jnp.stack([leaves[i] for i in same]), axes), axes)
            for i, x in zip(same, total, strict=True):
                leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


def _mean_count(count: jax.Array, outer_axes: tuple[str, ...]) -> jax.Array:
    """Returns the mean number of examples per device; 1 if there are none, to avoid 0 / 0."""
    axes = tuple(sorted(varying_axes(count) - set(outer_axes)))
    manual_axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if manual_axes and not is_vma_checked(manual_axes[0]):
        axes = manual_axes  # A mean over axes with equal counts changes nothing.
    # Leaves out axes of size 1: their all-reduce would hide from XLA that a count is a constant.
    axes = tuple(axis for axis in axes if jax.lax.axis_size(axis) > 1)
    with jax.named_scope(COUNT_SCOPE):
        count = jax.lax.pmean(_at_least_float32(count), axes) if axes else _at_least_float32(count)
    return jnp.where(count == 0, jnp.ones_like(count), count)


def _at_least_float32(x: jax.Array) -> jax.Array:
    """Casts integers and narrower floating types to float32."""
    return jnp.asarray(x).astype(jnp.promote_types(jnp.result_type(x), jnp.float32))
