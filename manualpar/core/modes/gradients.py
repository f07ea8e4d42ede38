"""Gradients of the global loss, from each device's part of a batch.

A loss is a sum of means, `sum_t S_t / C_t`. Each sum and each count is taken over all examples,
however they are split over devices and minibatches, and however many are masked. If part `k` has
the sums `s_tk`, the gradient is `sum_t (sum_k grad(s_tk)) / C_t`. A mean of the parts' means would
be another loss.

With one term the gradients of the parts are added up first, and divided by the count at the end.
With several terms the counts are summed first, from the parts of the loss that compute them, which
are usually the masks. If a count depends on parameters, `C_t` has a gradient too: the gradient of
`S / C` is `(grad S - (S / C) grad C) / C`. Then a forward pass first computes all sums.

Types decide whether autodiff sums gradients over devices. If a parameter is *invariant* over a mesh
axis, autodiff inserts a `psum` over that axis, once for every use and minibatch. Therefore
parameters are cast to *varying* first. Then gradients differ between devices while they are
accumulated, and `sync_gradients` reduces them once. A gradient that is not reduced still varies,
and `shard_map` refuses to return it as replicated. A parameter stays invariant only over the axes
over which the backward pass of its gather takes the mean (`MixedPrecisionPolicy.averaged_axes`).
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from manualpar.core.mesh.axes import AxisName, axis_tuple, check_axes_bound
from manualpar.core.modes.variable_reduction import (
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
from manualpar.core.parameters.placement import combine
from manualpar.core.parameters.sharded_parameter import (
    averaged_axes,
    boxed_axes,
    comm_policy,
    is_box,
    reduction_dtype,
)
from manualpar.core.state.metrics import Metrics, StepSums, mean
from manualpar.core.tracing.jaxprs import without_gradients, without_names
from manualpar.core.tracing.scopes import COUNT_SCOPE, METRICS_SCOPE, REDUCE_SCOPE
from manualpar.core.trees import Batch, Collections, Grads, Params

Sums = TypeVar("Sums")
# (params, collections, minibatch, rng) -> (loss, metrics, updated collections). The loss is a
# `Mean` of `manualpar.core.model.loss_function`, or a dict of terms.
CarryingLossFn = Callable[[Params, Collections, Batch, jax.Array], tuple[Any, Metrics, Collections]]
# Trained and frozen parameters, see `partition`.
ParamPair = tuple[Params, Params]
# The function that is differentiated: (trained, frozen, collections, *part) -> (weighted loss,
# (sums, updated collections)). A part is (minibatch, rng), or (minibatch, rng, weights of terms).
WeightedLoss = Callable[..., tuple[jax.Array, tuple[StepSums, Collections]]]
# Parts of all minibatches, each with a leading dim `M`.
Parts = tuple[Any, ...]
# A linear function that is applied to the gradients of each minibatch before they are summed.
Reduce = Callable[[Grads], Grads]
# Runs the minibatches and adds up their gradients: (loss, params, collections, parts, reduce) ->
# (summed gradients, sums, collections).
Accumulation = Callable[
    [WeightedLoss, ParamPair, Collections, Parts, Reduce],
    tuple[Grads, StepSums, Collections],
]


class _SeveralTermsError(Exception):
    """A loss has several terms, so their counts have to be known before it is differentiated."""


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
    learns_counts: bool = False,
    whole: Callable[[ParamPair], ParamPair] | None = None,
) -> tuple[Grads, StepSums, Collections]:
    """Accumulates gradients over minibatches, and carries collections from one to the next.

    Args:
      loss_fn: `(params, collections, minibatch, rng) -> (loss, metrics, collections)`.
      params: The trained and the frozen parameters, see `partition`; boxes allowed.
      minibatches: A tree whose leaves are `[M, B/M, ...]`, see `split_minibatches`.
      rng: The key; each minibatch gets a key derived from it.
      schedule: How the minibatches run: `unrolled` or `scanned`.
      reduce: Applied to the gradients of each minibatch before they are added up.
      join: Makes the tree of parameters for `loss_fn` from the pair, in each minibatch.
      outer_axes: Mesh axes along which devices take separate steps, see `Mode`.
      learns_counts: Whether counts have gradients.
      whole: Makes the types of all parameters from the pair, if `schedule` splits the layers. Then
        counts must not depend on parameters.

    Returns:
      The gradients of the trained parameters in float32 or wider, the `StepSums` over the
      minibatches, and the collections after the last minibatch. Variables that their gradients
      replace have their new values, see `overwritten`.
    """
    number = len(jax.tree.leaves(minibatches)[0])
    parts: Parts = (minibatches, jax.random.split(rng, number))
    axes = varying_axes(minibatches)
    params = jax.tree.map(
        lambda x: cast_to_varying(x, axes.difference(averaged_axes(x))), params, is_leaf=is_box
    )

    overwritten = collections.get(OVERWRITTEN)
    if overwritten:
        collections = {**collections, OVERWRITTEN: lowest(overwritten)}
        params = (Trained(params[0], cast_to_varying(overwritten, axes)), params[1])

    def weighted_loss(
        trained: Params, frozen: Params, collections: Collections, *part: Any
    ) -> tuple[jax.Array, tuple[StepSums, Collections]]:
        minibatch, key, *weights = part
        if overwritten:
            trained, variables = trained
            maxima = as_maxima(variables)
            collections = {**collections, OVERWRITTEN: maxima}
        loss, metrics, collections = loss_fn(join((trained, frozen)), collections, minibatch, key)
        terms = _terms(loss, axes, learns_counts=learns_counts)
        if weights:
            of_sums, of_counts = weights[0]
            weighted = [total * of_sums[name] for name, (total, _) in terms.items()]
            weighted += [terms[name][1] * x for name, x in of_counts.items()]
            objective = jnp.stack(weighted).sum()
        elif len(terms) > 1:
            raise _SeveralTermsError
        else:
            ((objective, _),) = terms.values()
        if overwritten:
            objective = use_without_examples(objective, variables, maxima)
        rest = None if isinstance(loss, Mapping) else _rest(loss, metrics, axes)
        totals: Any = jax.lax.stop_gradient(terms)
        if rest is not None:  # One scalar takes the place of another.
            totals = {name: (total, None) for name, (total, _) in totals.items()}
        sums = StepSums(totals, metrics, rest)
        return objective, (sums, collections)

    def run(*weights: Any) -> tuple[Grads, StepSums, Collections]:
        return schedule(weighted_loss, params, collections, (*parts, *weights), reduce)

    def sums_first() -> tuple[Grads, StepSums, Collections]:
        def measure(params: ParamPair, collections: Collections, *part: Any) -> Any:
            if overwritten:
                (trained, variables), frozen = params
                params, collections = (trained, frozen), {**collections, OVERWRITTEN: variables}
            loss, _, _ = loss_fn(join(params), collections, *part)
            terms = _terms(loss, axes, learns_counts=True)
            return terms if learns_counts else {name: count for name, (_, count) in terms.items()}

        totals = _sum_over_parts(measure, params, collections, parts, whole)
        return run(_weights(totals, number, outer_axes))

    if learns_counts:
        return sums_first()
    try:
        grads, sums, collections = run()
    except _SeveralTermsError:
        return sums_first()
    ((_, count),) = sums.objective.values()
    count = _mean_count(sums.metrics["loss"][1] if count is None else count, outer_axes)
    return jax.tree.map(lambda g: g / count, grads), sums, collections


def _terms(loss: Any, axes: frozenset[str], *, learns_counts: bool) -> Metrics:
    """Returns the sum and the count of each term in float32, in this device's share."""

    def count_of(x: Any) -> jax.Array:
        x = _at_least_float32(x)
        return cast_to_varying(x, axes) if learns_counts else jax.lax.stop_gradient(x)

    if isinstance(loss, Mapping):
        return {
            name: (cast_to_varying(_at_least_float32(total), axes), count_of(count))
            for name, (total, count) in loss.items()
        }
    # A loss may be the same on all devices, for example a pmean or a ratio of psums. It must still
    # count once for each device. Without the cast autodiff would differentiate the loss once for
    # all devices, and the mean of the gradients would be too small.
    count = count_of(loss.weight)
    return {"loss": (cast_to_varying(_at_least_float32(loss.mean), axes) * count, count)}


def _rest(loss: Any, metrics: Metrics, axes: frozenset[str]) -> Any:
    """Returns the part of a share's mean that its metrics do not explain.

    The weights of the shares are wrong for this part if it differs between the shares, as their
    counts do. `None` if the loss has terms, or if all shares have the same count.
    """
    differs = varying_axes(loss.weight) if axes else isinstance(loss.weight, jax.core.Tracer)
    if not differs:
        return None
    pair = jax.tree.map(_at_least_float32, metrics["loss"])
    rest = jax.lax.stop_gradient(_at_least_float32(loss.mean)) - mean(pair)
    return cast_to_varying(rest, axes)


def _sum_over_parts(
    measure: Callable[..., Any],
    params: ParamPair,
    collections: Collections,
    parts: Parts,
    whole: Callable[[ParamPair], ParamPair] | None,
) -> Any:
    """Sums the results of `measure(params, collections, *part)` over minibatches.

    Only the operations that the results need run.
    """
    first = jax.tree.map(lambda x: x[0], parts)
    given = whole(params) if whole else params
    closed, shapes = jax.make_jaxpr(measure, return_shape=True)(given, collections, *first)
    jaxpr = closed.jaxpr.replace(
        constvars=(),
        invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars],
        debug_info=without_names(closed.jaxpr),
    )
    jaxpr, are_read = dce_jaxpr(without_gradients(jaxpr), [True] * len(jaxpr.outvars))
    leaves = [*closed.consts, *jax.tree.leaves((params, collections))]
    before = len(closed.consts) + len(jax.tree.leaves(params))
    number = len(parts[1])
    if number > 1 and any(are_read[before : len(leaves)]):
        raise ValueError(
            "loss_fn: the count of a term depends on a collection that changes from minibatch to "
            "minibatch, expected counts of the batch and of parameters. Build the program with "
            "num_minibatches=1, or return the loss as one term."
        )
    if whole and any(are_read[len(closed.consts) : before]):
        raise ValueError(
            "loss_fn: the count of a term depends on parameters, expected counts of the batch "
            "alone, because the layers are split over stages. Compute the count from the batch, "
            "or build a program without stages."
        )

    def call(part: Any) -> Any:
        values = [*leaves, *jax.tree.leaves(part)]
        read = [x for x, is_read in zip(values, are_read, strict=True) if is_read]
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*read)

    with jax.named_scope(COUNT_SCOPE):
        total = call(first) if number == 1 else [x.sum(axis=0) for x in jax.lax.map(call, parts)]
    return jax.tree.unflatten(jax.tree.structure(shapes), total)


def _weights(totals: Any, number: int, outer_axes: tuple[str, ...]) -> Any:
    """Returns the weights of sums and counts in the gradient, for each of `number` minibatches.

    Args:
      totals: This device's count of each term, or its pair (sum, count) if counts have gradients.
      outer_axes: As in `accumulate`.

    Communication:
      One all-reduce of all scalars.
    """
    has_sums = any(isinstance(x, tuple) for x in totals.values())
    names = list(totals)
    counts = jnp.stack([totals[n][1] if has_sums else totals[n] for n in names])
    if has_sums:
        sums = jnp.stack([totals[name][0] for name in names])
        stacked = jnp.stack([sums, counts])
    else:
        stacked = counts[None]
    stacked = _mean_over_devices(stacked, outer_axes)
    counts = jnp.where(stacked[-1] == 0, 1, stacked[-1])
    of_sums = 1 / counts
    of_counts = -stacked[0] / counts**2 if has_sums else None

    def by_name(x: Any) -> dict[str, jax.Array]:
        repeated = jnp.broadcast_to(x, (number, len(names)))
        return {name: repeated[:, i] for i, name in enumerate(names)}

    return by_name(of_sums), by_name(of_counts) if has_sums else {}


def unrolled(
    loss: WeightedLoss,
    params: ParamPair,
    collections: Collections,
    parts: Parts,
    reduce: Reduce,
) -> tuple[Grads, StepSums, Collections]:
    """Runs the minibatches in a Python loop, so each is compiled separately."""
    total = None
    for index in range(len(parts[1])):
        with jax.named_scope(f"minibatch_{index}"):
            part = jax.tree.map(lambda x, i=index: x[i], parts)
            term, collections = _differentiate(loss, params, collections, part, reduce)
            total = term if total is None else jax.tree.map(jnp.add, total, term)
    assert total is not None  # `check_minibatches` refuses a batch without minibatches.
    return *total, collections


def scanned(
    loss: WeightedLoss,
    params: ParamPair,
    collections: Collections,
    parts: Parts,
    reduce: Reduce,
) -> tuple[Grads, StepSums, Collections]:
    """Runs the minibatches in a `jax.lax.scan`, so the code is compiled once."""

    def differentiate(collections: Collections, part: Any) -> tuple[Any, Collections]:
        return _differentiate(loss, params, collections, part, reduce)

    first = jax.tree.map(lambda x: x[0], parts)
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

    def body(carry: Any, part: Any) -> tuple[Any, None]:
        total, collections = carry
        with jax.named_scope("minibatch"):
            term, collections = differentiate(collections, part)
            return (jax.tree.map(jnp.add, total, term), collections), None

    carry = (jax.tree.map(zero, types), collections)
    total, collections = jax.lax.scan(body, carry, parts)[0]
    return *total, collections


def _differentiate(
    loss: WeightedLoss,
    params: ParamPair,
    collections: Collections,
    part: Any,
    reduce: Reduce,
) -> tuple[Any, Collections]:
    """Returns the reduced gradients and the sums of a minibatch, and the collections after it."""
    grads, (sums, new) = jax.grad(loss, has_aux=True)(*params, collections, *part)
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
    count = _mean_over_devices(count, outer_axes)
    return jnp.where(count == 0, jnp.ones_like(count), count)


def _mean_over_devices(x: jax.Array, outer_axes: tuple[str, ...]) -> jax.Array:
    """Takes the mean over the axes that `x` varies over, in float32 or wider."""
    axes = tuple(sorted(varying_axes(x) - set(outer_axes)))
    manual_axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if manual_axes and not is_vma_checked(manual_axes[0]):
        axes = manual_axes  # A mean over axes with equal counts changes nothing.
    # Leaves out axes of size 1: their all-reduce would hide from XLA that a count is a constant.
    axes = tuple(axis for axis in axes if jax.lax.axis_size(axis) > 1)
    with jax.named_scope(COUNT_SCOPE):
        return jax.lax.pmean(_at_least_float32(x), axes) if axes else _at_least_float32(x)


def _at_least_float32(x: jax.Array) -> jax.Array:
    """Casts integers and narrower floating types to float32."""
    return jnp.asarray(x).astype(jnp.promote_types(jnp.result_type(x), jnp.float32))
