import functools
import math
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import (
    Batch,
    ShardedParameter,
    accumulate_gradients,
    fold_rng_over_axis,
    gather_examples,
    make_mesh,
    shard_params,
    sync_gradients,
    sync_metrics,
)
from manualpar.core.mesh.axes import axes_size
from manualpar.core.modes.variable_reduction import sync_collections
from manualpar.core.parameters.placement import strip_boxes

PARAMS = {
    "w": jax.random.normal(jax.random.key(0), (4, 8)),
    "b": jax.random.normal(jax.random.key(1), (3,)),
}


def model(variables, x):
    """A model with a parameter that can be sharded and one that cannot."""
    w, b = variables["params"]["w"], variables["params"]["b"]
    w = w.unbox() if isinstance(w, ShardedParameter) else w
    return jnp.tanh(x @ w).sum(-1) * b[0] + b[1] * b[2]


def masked_loss(params, apply_fn, batch, rng):
    del rng
    error = (apply_fn({"params": params}, batch.inputs) - batch.labels) ** 2
    total, count = (error * batch.mask).sum(), batch.mask.sum()
    return total / jnp.maximum(count, 1e-9), {"loss": (total, count), "max": (error.max(), 1)}


def plain_loss(params, apply_fn, batch, rng):
    del rng
    error = (apply_fn({"params": params}, batch.inputs) - batch.labels) ** 2
    return error.mean(), {"loss": (error.sum(), error.shape[0])}


def state_of(params):
    return types.SimpleNamespace(params=params, apply_fn=model)


def make_batch(size, mask="weights"):
    x, y, m = (jax.random.normal(jax.random.key(i), (size, 4)) for i in range(3))
    masks = {
        "weights": jnp.abs(m[:, 0]),
        "ragged": (jnp.arange(size) % 5 < 2).astype(jnp.float32),
        # Whole devices and whole minibatches without an example.
        "head": (jnp.arange(size) < 3).astype(jnp.float32),
        "none": jnp.zeros(size),
    }
    return Batch(inputs=x, labels=y[:, 0], mask=masks[mask])


@jax.jit
def mean_gradient(batch):
    """The gradient of the global mean, on one device and without this package."""

    def loss(params):
        error = (model({"params": params}, batch.inputs) - batch.labels) ** 2
        return (error * batch.mask).sum() / jnp.maximum(batch.mask.sum(), 1e-9)

    return jax.grad(loss)(PARAMS)


def parallel_gradient(
    mesh, batch, loss_fn, axes=("data",), *, check_vma=True, sharded=True, **kwargs
):
    """The gradient and the metrics of a step put together from the utilities."""
    spec = {"w": P(None, axes), "b": P()} if sharded else P()

    def on_device(batch):
        params = shard_params(PARAMS, axes, min_weight_size=16) if sharded else PARAMS
        grads, metrics = accumulate_gradients(
            state_of(params), batch, jax.random.key(0), loss_fn=loss_fn, **kwargs
        )
        grads = sync_gradients(grads, axes)
        return strip_boxes(grads), sync_metrics(metrics, axes)

    run = jax.shard_map(
        on_device, mesh=mesh, in_specs=P(axes), out_specs=(spec, P()), check_vma=check_vma
    )
    return jax.jit(run)(batch)


@pytest.mark.parametrize(
    ("num_minibatches", "use_scan"), [pytest.param(1, False, marks=pytest.mark.slow), (4, True)]
)
def test_gradient_is_that_of_the_global_mean(mesh8, num_minibatches, use_scan):
    batch = make_batch(64)
    grads, metrics = parallel_gradient(
        mesh8, batch, masked_loss, num_minibatches=num_minibatches, use_scan=use_scan
    )
    chex.assert_trees_all_close(grads, mean_gradient(batch), rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"][1], batch.mask.sum(), rtol=1e-6)
    assert metrics["max"][1] == mesh8.shape["data"] * num_minibatches


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicated"])
@pytest.mark.parametrize(("check_vma", "use_scan"), [(True, False), (True, True), (False, True)])
def test_gradient_whatever_is_masked(devices8, sharded, check_vma, use_scan):
    step = jax.jit(
        lambda batch: parallel_gradient(
            make_mesh({"data": 8}, devices8),
            batch,
            masked_loss,
            num_minibatches=4,
            use_scan=use_scan,
            sharded=sharded,
            check_vma=check_vma,
        )
    )
    for mask in ("ragged", "head", "none"):
        batch = make_batch(64, mask)
        grads, _ = step(batch)
        chex.assert_trees_all_close(grads, mean_gradient(batch), rtol=2e-5, atol=1e-6)
        if mask == "none":
            chex.assert_trees_all_equal(grads, jax.tree.map(jnp.zeros_like, PARAMS))


@pytest.mark.parametrize("axes", [("data", "model"), ("model", "data")])
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_over_a_tuple_of_axes(devices8, axes, check_vma):
    batch = make_batch(64)
    mesh = make_mesh({"data": 4, "model": 2}, devices8)
    grads, _ = parallel_gradient(
        mesh, batch, masked_loss, axes, num_minibatches=2, check_vma=check_vma
    )
    chex.assert_trees_all_close(grads, mean_gradient(batch), rtol=2e-5, atol=1e-6)


def test_gradient_of_boxes_over_two_axes_of_which_one_shards(devices8):
    """Sharded over `data`, split over `data` and `replica`: the mean over `replica` is left to
    sync_gradients.
    """
    batch = make_batch(64)
    mesh = make_mesh({"replica": 2, "data": 4}, devices8)
    axes = ("replica", "data")

    def on_device(batch):
        params = shard_params(PARAMS, "data", min_weight_size=16)
        grads, _ = accumulate_gradients(
            state_of(params), batch, jax.random.key(0), 2, loss_fn=masked_loss
        )
        return strip_boxes(sync_gradients(grads, axes))

    run = jax.shard_map(
        on_device, mesh=mesh, in_specs=P(axes), out_specs={"w": P(None, "data"), "b": P()}
    )
    grads = jax.jit(run)(batch)
    chex.assert_trees_all_close(grads, mean_gradient(batch), rtol=2e-5, atol=1e-6)


def test_constant_counts_cost_no_collective(devices8):
    mesh = make_mesh({"data": 8}, devices8)
    batch = make_batch(64)

    def collectives(loss_fn):
        def on_device(batch):
            grads, _ = accumulate_gradients(
                state_of(PARAMS), batch, jax.random.key(0), 2, loss_fn=loss_fn
            )
            return sync_gradients(grads, "data")

        run = jax.shard_map(on_device, mesh=mesh, in_specs=P("data"), out_specs=P())
        return jax.jit(run).lower(batch).as_text().count('"stablehlo.all_reduce"')

    assert collectives(plain_loss) == 2  # One for each parameter, none for each minibatch.
    assert collectives(masked_loss) == 3


@pytest.mark.parametrize("use_scan", [False, True], ids=["loop", "scan"])
def test_minibatches_are_accumulated_in_float32(use_scan):
    n = 264  # In bfloat16 a sum of ones stops at 256.
    params = {"w": jnp.ones((), jnp.bfloat16)}

    def loss_fn(params, apply_fn, batch, rng):
        loss = params["w"] * batch.inputs.mean()
        return loss, {"loss": (loss, 1), "seen": (batch.inputs.sum().astype(jnp.bfloat16), 1)}

    batch = Batch(inputs=jnp.ones(n, jnp.bfloat16), labels=jnp.zeros(n))
    grads, metrics = jax.jit(
        lambda: accumulate_gradients(
            state_of(params), batch, jax.random.key(0), n, loss_fn, use_scan=use_scan
        )
    )()
    assert grads["w"].dtype == jnp.bfloat16
    assert grads["w"] == 1
    assert metrics["seen"][0] == n
    assert metrics["seen"][0].dtype == jnp.float32
    assert metrics["loss"][1] == n


@pytest.mark.parametrize("use_scan", [False, True], ids=["loop", "scan"])
def test_every_device_and_minibatch_has_its_own_key(devices8, use_scan):
    mesh = make_mesh({"data": 8}, devices8)

    def loss_fn(params, apply_fn, batch, rng):
        draw = jax.random.uniform(rng)
        return params["w"][batch.inputs[0]] * draw, {"loss": (draw, 1)}

    def on_device(inputs):
        rng = fold_rng_over_axis(jax.random.key(0), "data")
        params = {"w": jnp.zeros(4)}
        batch = Batch(inputs=inputs, labels=inputs)
        grads, _ = accumulate_gradients(state_of(params), batch, rng, 4, loss_fn, use_scan)
        return grads["w"][None]  # The draw of each minibatch in its own place.

    run = jax.shard_map(on_device, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    draws = np.asarray(jax.jit(run)(jnp.tile(jnp.arange(4), 8)))
    assert draws.shape == (8, 4)
    assert len(np.unique(draws)) == 32


def test_minibatches_are_consecutive_and_complete():
    def loss_fn(params, apply_fn, batch, rng):
        code = (batch.inputs * 10 ** jnp.arange(2.0)).sum()
        return params["w"][batch.labels[0]] * code, {"loss": (code, 1)}

    batch = Batch(inputs=jnp.arange(6.0), labels=jnp.array([0, 0, 1, 1, 2, 2]))
    params = {"w": jnp.zeros(3)}
    grads, _ = accumulate_gradients(state_of(params), batch, jax.random.key(0), 3, loss_fn)
    np.testing.assert_allclose(grads["w"] * 3, [10, 32, 54])


# sync_gradients.


def test_without_types_autodiff_sums_nothing(devices8):
    mesh = make_mesh({"data": 8}, devices8)

    def on_device(x):
        grads = jax.grad(lambda p: jnp.sum(p["w"] * x))({"w": jnp.ones(())})
        return sync_gradients(grads, ("data",))

    # With types the same is refused, because autodiff has summed the gradient.
    unchecked = jax.shard_map(
        on_device, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False
    )
    assert jax.jit(unchecked)(jnp.arange(8.0))["w"] == np.arange(8.0).mean()


def test_an_unsynchronised_gradient_does_not_leave_shard_map(devices8):
    mesh = make_mesh({"data": 8}, devices8)

    def on_device(batch):
        return accumulate_gradients(
            state_of(PARAMS), batch, jax.random.key(0), 1, loss_fn=masked_loss
        )[0]

    run = jax.shard_map(on_device, mesh=mesh, in_specs=P("data"), out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(run, make_batch(64))


def test_sync_reduces_a_box_over_the_other_axes_only(devices8):
    mesh = make_mesh({"data": 4, "model": 2}, devices8)
    x = jnp.arange(8.0)

    def on_device(x):
        boxes = {
            "over data": ShardedParameter(x, ("data",)),
            "over both": ShardedParameter(x, (("data", "model"),)),
            "not boxed": x,
        }
        return strip_boxes(sync_gradients(boxes, ("data", "model")))

    out_specs = {"over data": P("data"), "over both": P(("data", "model")), "not boxed": P()}
    run = jax.shard_map(on_device, mesh=mesh, in_specs=P(("data", "model")), out_specs=out_specs)
    out = jax.jit(run)(x)
    np.testing.assert_array_equal(out["over data"], [0.5, 2.5, 4.5, 6.5])
    np.testing.assert_array_equal(out["over both"], x)
    np.testing.assert_array_equal(out["not boxed"], [3.5])


def test_metrics_are_summed_over_all_devices(devices8):
    mesh = make_mesh({"data": 8}, devices8)

    def on_device(x):
        return sync_metrics({"loss": (x.sum(), jnp.int32(2))}, "data")

    run = jax.shard_map(on_device, mesh=mesh, in_specs=P("data"), out_specs=P())
    total, count = jax.jit(run)(jnp.arange(16.0))["loss"]
    assert (total, count) == (120, 16)
    assert axes_size(mesh, ("data",)) == 8


def sync_as_mean(tree, axes):
    return sync_collections(tree, axes, before=tree, rules={"mean": "mean"})


def test_collections_become_the_mean_of_what_differs(devices8):
    mesh = make_mesh({"data": 8}, devices8)

    def on_device(x):
        tree = {"mean": x.sum(), "steps": jnp.int32(3)}
        return sync_as_mean(tree, "data")

    run = jax.shard_map(on_device, mesh=mesh, in_specs=P("data"), out_specs=P())
    assert jax.jit(run)(jnp.arange(8.0)) == {"mean": 3.5, "steps": 3}


def test_metrics_that_vary_over_some_of_the_axes_are_summed_over_all(devices8):
    mesh = make_mesh({"data": 4, "model": 2}, devices8)

    def on_device(x):
        return sync_metrics({"loss": (x.sum(), jnp.int32(1))}, ("data", "model"))

    run = jax.shard_map(on_device, mesh=mesh, in_specs=P("data"), out_specs=P())
    assert jax.jit(run)(jnp.arange(4.0))["loss"] == (12, 8)


def test_counts_are_averaged_once_without_types_too(devices8):
    mesh = make_mesh({"data": 8}, devices8)

    def on_device(batch):
        grads, _ = accumulate_gradients(
            state_of(PARAMS), batch, jax.random.key(0), 2, loss_fn=masked_loss
        )
        return sync_gradients(grads, "data")

    run = jax.shard_map(on_device, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    text = jax.jit(run).lower(make_batch(64)).as_text()
    assert text.count('"stablehlo.all_reduce"') == 3


def test_a_count_is_not_averaged_over_one_device(devices8):
    def on_device(batch):
        batch = jax.lax.pcast(batch, "data", to="varying")
        return accumulate_gradients(
            state_of(PARAMS), batch, jax.random.key(0), 1, loss_fn=masked_loss
        )[0]

    def run(mesh, spec):
        return jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=P(), out_specs=spec))

    batch = make_batch(8)
    one = run(make_mesh({"data": 1}, devices8[:1]), P("data"))
    assert "all_reduce" not in one.lower(batch).as_text()
    expected = jax.grad(lambda p: masked_loss(p, model, batch, None)[0])(PARAMS)
    chex.assert_trees_all_close(one(batch), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("axes", "split"),
    [("data", "data"), (("data", "model"), ("data", "model")), (("data", "model"), "data")],
    ids=str,
)
@pytest.mark.parametrize("rule", ["mean", "sum", "max", "min"])
def test_a_collection_is_reduced_once_over_the_axes_of_a_larger_mesh(devices8, rule, axes, split):
    mesh = make_mesh({"data": 4, "model": 2}, devices8)

    def on_device(x):
        tree = {"value": x.sum(), "steps": jnp.int32(3)}
        before = {"value": jnp.zeros(()), "steps": jnp.int32(2)}
        return sync_collections(tree, axes, before=before, rules={"value": rule})

    run = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=P(split), out_specs=P()))
    x = jnp.arange(8.0) ** 2
    on_devices = np.asarray(x).reshape(4 if split == "data" else 8, -1).sum(1)
    if rule == "sum" and split != axes:  # Devices along `model` add the same, and each counts.
        on_devices = np.repeat(on_devices, 2)
    assert run(x) == {"value": getattr(on_devices, rule)(), "steps": 3}
    assert run.lower(x).as_text().count('"stablehlo.all_reduce"') == 1


# Losses that are the same on all devices along some axes already, and losses that couple examples.


def overlap_parts(params, x, y):
    p, t = jax.nn.sigmoid(model({"params": params}, x)), (y > 0).astype(jnp.float32)
    return (p * t).sum(), (p + t).sum()


def overlap(params, x, y):
    """A ratio of sums, of which no mean over parts is the whole."""
    total, count = overlap_parts(params, x, y)
    return 1 - 2 * total / count


def overlap_loss(axes):
    def loss_fn(params, apply_fn, batch, rng):
        parts = overlap_parts(params, batch.inputs, batch.labels)
        total, count = jax.lax.psum(parts, axes)
        return 1 - 2 * total / count, {"loss": (1 - 2 * total / count, 1)}

    return loss_fn


def contrast(z, y, every_z, every_y):
    """Each example against all others, both ways."""
    of_z = jax.nn.logsumexp(-((z[:, None] - every_y[None]) ** 2), 1)
    of_y = jax.nn.logsumexp(-((y[:, None] - every_z[None]) ** 2), 1)
    return (of_z + of_y + 2 * (z - y) ** 2).mean()


def contrastive_loss(form):
    def loss_fn(params, apply_fn, batch, rng):
        z, y = apply_fn({"params": params}, batch.inputs), batch.labels
        every = gather_examples((z, y))
        loss = contrast(*every, *every) if form == "whole" else contrast(z, y, *every)
        return loss, {"loss": (loss, 1)}

    return loss_fn


def one_contrast(params, x, y):
    z = model({"params": params}, x)
    return contrast(z, y, z, y)


def grouped_gradient(mean_loss, batch, mesh, axes, num_minibatches):
    """On one device: of the mean over minibatches and what collectives over `axes` leave apart."""
    shape = (*mesh.axis_sizes, num_minibatches)
    coupled = [dim for dim, name in enumerate(mesh.axis_names) if name in axes]
    apart = [dim for dim in range(len(shape)) if dim not in coupled]
    count = math.prod(shape[dim] for dim in apart)

    def group(x):
        x = x.reshape(*shape, -1, *x.shape[1:])
        order = (*apart, *coupled, *range(len(shape), x.ndim))
        return x.transpose(order).reshape(count, -1, *x.shape[len(shape) + 1 :])

    def loss(params):
        each = jax.vmap(functools.partial(mean_loss, params))
        return each(group(batch.inputs), group(batch.labels)).mean()

    return jax.jit(jax.grad(loss))(PARAMS)


# The gradient of the global mean is tested on every mesh. What a loss couples depends on the axes.
on_two_meshes = pytest.mark.parametrize(
    "mesh8",
    [{"data": 4, "model": 2}, {"replica": 2, "data": 2, "model": 2}],
    ids=["two axes", "three axes"],
    indirect=True,
)


@on_two_meshes
def test_a_loss_that_is_the_same_on_all_devices_has_its_whole_gradient(mesh8):
    batch, names = make_batch(64), mesh8.axis_names
    for axes in {names, names[:1]}:
        expected = grouped_gradient(overlap, batch, mesh8, axes, 4)
        grads, _ = parallel_gradient(
            mesh8, batch, overlap_loss(axes), names, num_minibatches=4, use_scan=True
        )
        chex.assert_trees_all_close(grads, expected, rtol=5e-5, atol=1e-6)


@on_two_meshes
@pytest.mark.parametrize("form", ["own", pytest.param("whole", marks=pytest.mark.slow)])
def test_a_loss_that_couples_examples_couples_those_of_a_minibatch(mesh8, form):
    batch, names, loss_fn = make_batch(32), mesh8.axis_names, contrastive_loss(form)
    expected = grouped_gradient(one_contrast, batch, mesh8, names, 2)
    grads, _ = parallel_gradient(mesh8, batch, loss_fn, names, num_minibatches=2)
    chex.assert_trees_all_close(grads, expected, rtol=5e-5, atol=1e-6)
