"""Variables outside `params`: running statistics, counters, sown values."""

import itertools
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from manualpar import Batch, data_parallel, fsdp, hsdp, make_mesh
from manualpar.inspect import trace_collectives
from tests.one_device import slow_unless, train_on_one_device, train_program
from tests.tiny import class_loss


def make_batch(seed=0, shape=(32, 16)):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=shape).astype(np.float32)
    return Batch(inputs=inputs, labels=rng.integers(0, 4, shape[0]))


class Convolutional(nn.Module):
    bn_axis: Any = None
    momentum: float = 0.9

    @nn.compact
    def __call__(self, x, train):
        for features in (8, 16):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(
                use_running_average=not train, momentum=self.momentum, axis_name=self.bn_axis
            )(x)
            x = nn.relu(x)
        return nn.Dense(4)(x.mean((1, 2)))


def conv_loss(params, apply_fn, batch, rng):
    del rng
    out = apply_fn({"params": params}, batch.inputs, train=True)
    loss = optax.softmax_cross_entropy_with_integer_labels(out, batch.labels)
    return loss.mean(), {"loss": (loss.sum(), loss.shape[0])}


def conv_program(builder, model, batch, devices, **kwargs):
    if builder is fsdp:
        kwargs["min_weight_size"] = 0
    mesh = make_mesh({"data": -1}, devices)
    return builder(model, optax.sgd(0.1), conv_loss, mesh=mesh, batch=batch, **kwargs)


@pytest.mark.parametrize("builder", [pytest.param(data_parallel, marks=pytest.mark.slow), fsdp])
def test_synchronised_batch_norm_equals_one_device(devices8, builder):
    batches = [make_batch(seed, (32, 6, 6, 3)) for seed in range(3)]
    sgd = optax.sgd(0.1)
    expected = train_on_one_device(Convolutional(), sgd, batches, conv_loss, train=False)
    program = conv_program(builder, Convolutional(bn_axis="data"), batches[0], devices8)
    state, losses = train_program(program, batches)
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    result = jax.device_get((state.params, state.collections))
    chex.assert_trees_all_close(
        result, (expected.params, expected.collections), rtol=2e-4, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("builder", "use_scan"),
    [
        slow_unless({(fsdp, False), (data_parallel, True)}, *pair)
        for pair in itertools.product((data_parallel, fsdp), (False, True))
    ],
)
def test_running_statistics_are_the_mean_over_devices(devices8, builder, use_scan):
    batch = make_batch(0, (32, 6, 6, 3))
    model = Convolutional(momentum=0.0)  # Keeps only the last minibatch's statistics.
    program = conv_program(builder, model, batch, devices8, num_minibatches=2, use_scan=use_scan)
    state = program.init(jax.random.key(0))
    kernel = jax.device_get(state.params["Conv_0"]["kernel"])
    assert set(state.collections) == {"batch_stats"}
    state, _ = program.train_step(state, batch)

    conv = nn.Conv(8, (3, 3), use_bias=False)
    out = conv.apply({"params": {"kernel": kernel}}, batch.inputs)
    last = out.reshape(8, 2, 2, 6, 6, 8)[:, 1]  # [device, minibatch, example, ...]
    stats = state.collections["batch_stats"]["BatchNorm_0"]
    chex.assert_trees_all_close(stats["mean"], last.mean((1, 2, 3)).mean(0), atol=1e-5)
    chex.assert_trees_all_close(stats["var"], last.var((1, 2, 3)).mean(0), atol=1e-5)
    for x in jax.tree.leaves(state.collections):
        copies = [np.asarray(shard.data) for shard in x.addressable_shards]
        assert len(copies) == 8
        assert all(np.array_equal(copies[0], copy) for copy in copies)
    before = jax.device_get(state.collections)
    program.eval_step(state, batch)
    chex.assert_trees_all_equal(jax.device_get(state.collections), before)


@pytest.mark.slow
def test_a_counter_stays_a_counter(devices8):
    class Counting(nn.Module):
        @nn.compact
        def __call__(self, x):
            calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
            if not self.is_initializing():
                calls.value += 1
            return nn.Dense(4)(x)

    for use_scan in (False, True):
        program = fsdp(
            Counting(),
            optax.sgd(0.1),
            class_loss,
            mesh=make_mesh({"data": 8}, devices8),
            batch=make_batch(),
            min_weight_size=0,
            num_minibatches=2,
            use_scan=use_scan,
        )
        state, _ = train_program(program, [make_batch(), make_batch()])
        assert state.collections["counters"]["calls"] == 4


class Sowing(nn.Module):
    """Sows a penalty with each call: appends it to a tuple, or adds it to a sum."""

    into_sum: bool

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16)(x)
        kwargs = {"reduce_fn": jnp.add, "init_fn": lambda: jnp.zeros(())} if self.into_sum else {}
        self.sow("losses", "activity", (x**2).mean(), **kwargs)
        return nn.Dense(4)(x)


def sown_loss(params, apply_fn, batch, rng):
    del rng
    out, sown = apply_fn({"params": params}, batch.inputs, mutable=["losses"])
    penalty = sum(jax.tree.leaves(sown["losses"]))
    loss = optax.softmax_cross_entropy_with_integer_labels(out, batch.labels) + penalty
    return loss.mean(), {"loss": (loss.sum(), loss.shape[0])}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("builder", "into_sum"),
    [
        slow_unless({(fsdp, False), (fsdp, True)}, *pair)
        for pair in itertools.product((data_parallel, fsdp), (False, True))
    ],
)
def test_a_loss_that_the_model_sows_is_that_of_one_step(devices8, builder, into_sum):
    batches = [make_batch(seed) for seed in range(3)]
    expected = train_on_one_device(Sowing(into_sum), optax.sgd(0.1), batches, sown_loss)
    kwargs = {"min_weight_size": 0} if builder is fsdp else {}
    mesh = make_mesh({"data": 8}, devices8)
    program = builder(
        Sowing(into_sum),
        optax.sgd(0.1),
        sown_loss,
        mesh=mesh,
        batch=batches[0],
        num_minibatches=2,
        **kwargs,
    )
    state, losses = train_program(program, batches)
    assert state.collections == {}
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)


@pytest.mark.parametrize("axis_name", [("a", "data"), ("data", "a")], ids=str)
def test_statistics_are_averaged_over_all_data_axes_in_one_reduction(devices8, axis_name):
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.BatchNorm(use_running_average=not train, momentum=0.0)(x)

    def loss_fn(params, apply_fn, batch, rng):
        out = apply_fn({"params": params}, batch.inputs, train=True).mean(-1)
        count = batch.mask.sum()
        return (out * batch.mask).sum() / count, {"loss": ((out * batch.mask).sum(), count)}

    x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    batch = Batch(inputs=x, labels=np.zeros(32), mask=np.arange(1, 33, dtype=np.float32))
    mesh = make_mesh({"a": 2, "b": 2, "data": 2}, devices8)
    program = data_parallel(
        Normed(), optax.sgd(0.1), loss_fn, mesh=mesh, batch=batch, axis_name=axis_name
    )
    state, _ = program.train_step(program.init(jax.random.key(0)), batch)
    stats = state.collections["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose(stats["mean"], x.mean(0), rtol=1e-4, atol=1e-6)
    parts = x.reshape(4, 8, 4)
    np.testing.assert_allclose(stats["var"], parts.var(1).mean(0), rtol=1e-4)
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    purposes = [c.purpose for c in trace_collectives(traced)]
    # A second reduction would change no number, so the reductions are counted.
    assert sorted(purposes) == [
        "count_examples",
        "sync_collections",
        "sync_collections",
        "sync_gradients",
        "sync_gradients",
        "sync_metrics",
    ]


# Variables that differ between devices, and for which a mean over devices would be wrong.


class Statistics(nn.Module):
    """A model with kinds of variables that users have: counts, extremes, an average of sums."""

    axes: Any = ()

    @nn.compact
    def __call__(self, x):
        zero = lambda: jnp.zeros(())  # noqa: E731
        seen, high = self.variable("stats", "seen", zero), self.variable("stats", "high", zero)
        low = self.variable("stats", "low", zero)
        positive = self.variable("counts", "positive", lambda: jnp.zeros((), jnp.int32))
        calls = self.variable("calls", "calls", lambda: jnp.zeros((), jnp.int32))
        codes = self.variable("codes", "ema", lambda: jnp.zeros(x.shape[-1]))
        if not self.is_initializing():
            seen.value += x.shape[0]  # `check_vma` knows: the same on all devices.
            high.value = jnp.maximum(high.value, x.max())
            low.value = jnp.minimum(low.value, x.min())
            positive.value += (x > 0).sum()
            calls.value += 1
            total = jax.lax.psum(x.sum(0), self.axes) if self.axes else x.sum(0)
            codes.value = 0.5 * codes.value + 0.5 * total
        return nn.Dense(4)(x)


SYNCS = {"stats": "sum", "stats/high": "max", "stats/low": "min", "counts": "sum"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("builder", "shape", "options"),
    [
        (data_parallel, {"data": 4, "model": 2}, {"use_scan": True}),
        pytest.param(fsdp, {"data": 8}, {"min_weight_size": 0}, marks=pytest.mark.slow),
        (hsdp, {"replica": 2, "data": 4}, {"min_weight_size": 0}),
        pytest.param(fsdp, {"data": 8}, {"mode": "auto"}, marks=pytest.mark.slow),
        pytest.param(fsdp, {"data": 8}, {"mode": "explicit"}, marks=pytest.mark.slow),
    ],
)
def test_what_is_summed_or_extreme_equals_one_device(devices8, builder, shape, options):
    batches, axes = [make_batch(seed) for seed in range(2)], tuple(set(shape) - {"model"})
    model = Statistics(axes if "mode" not in options else ())
    mesh = make_mesh(shape, devices8)
    program = builder(
        model,
        optax.sgd(0.1),
        class_loss,
        mesh=mesh,
        batch=batches[0],
        num_minibatches=2,
        sync_collections=SYNCS,
        **options,
    )
    state, _ = train_program(program, batches)
    x = np.concatenate([batch.inputs for batch in batches])
    ema = np.zeros(16)
    devices = mesh.size // mesh.shape.get("model", 1)
    for batch in batches:
        parts = batch.inputs.reshape(devices, 2, -1, 16)
        for minibatch in (0, 1):
            ema = 0.5 * ema + 0.5 * parts[:, minibatch].sum((0, 1))
    found = jax.device_get(state.collections)
    assert found["stats"]["seen"] == len(x)
    assert found["stats"]["high"] == x.max()
    assert found["stats"]["low"] == x.min()
    assert found["counts"]["positive"] == (x > 0).sum()
    assert found["calls"]["calls"] == 4
    np.testing.assert_allclose(found["codes"]["ema"], ema, rtol=1e-4, atol=1e-5)


def build_statistics(devices, sync, model=None):
    mesh = make_mesh({"data": 8}, devices)
    model = model or Statistics(("data",))
    return data_parallel(
        model, optax.sgd(0.1), class_loss, mesh=mesh, batch=make_batch(), sync_collections=sync
    )


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        ({}, r"collections\['counts'\]\['positive'\] has dtype int32, differs .*\('data',\)"),
        ({"counts": "sum"}, r"collections\['stats'\]\['high'\] .*=\{'stats/high': ...\}, where"),
        ({"counts": "mean"}, r"\['positive'\] has dtype int32, which has no 'mean'"),
        ({**SYNCS, "stat": "sum"}, r"names 'stat', which the model does not.*you mean 'stats'\?"),
        ({**SYNCS, "params": "sum"}, r"names 'params', which the model does not carry"),
        ({"stats": "add"}, r"sync_collections\['stats'\]='add', expected one of 'mean', 'sum'"),
    ],
)
def test_what_differs_and_nobody_speaks_of_is_refused(devices8, sync, message):
    with pytest.raises(ValueError, match=message):
        build_statistics(devices8, sync)


def test_the_rules_are_a_dict(devices8):
    with pytest.raises(TypeError, match="sync_collections='sum', expected a dict"):
        build_statistics(devices8, "sum")


class Seen(nnx.Variable):
    pass


def test_variables_of_an_nnx_model_go_by_their_type(devices8):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(16, 4, rngs=rngs)
            self.seen = Seen(jnp.zeros(()))
            self.mean = nnx.BatchStat(jnp.zeros(16))

        def __call__(self, x):
            self.seen[...] += (x[:, 0] > 0).sum()
            self.mean[...] = x.mean(0)
            return self.dense(x)

    with pytest.raises(
        ValueError, match=r"collections\['Seen'\]\['seen'\] has dtype float32, differs"
    ):
        build_statistics(devices8, {}, Model)
    program = build_statistics(devices8, {"Seen": "sum"}, Model)
    batches = [make_batch(seed) for seed in range(2)]
    state, _ = train_program(program, batches)
    seen = sum((batch.inputs[:, 0] > 0).sum() for batch in batches)
    assert state.collections["Seen"]["seen"] == seen
    means = state.collections["batch_stats"]["mean"]
    np.testing.assert_allclose(means, batches[1].inputs.mean(0), atol=1e-6)
