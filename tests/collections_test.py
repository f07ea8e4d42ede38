"""Variables outside `params`: running statistics, counters, sown values."""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import Batch, data_parallel, fsdp, make_mesh
from manualpar.inspect import trace_collectives
from tests.one_device import train_on_one_device, train_program


def make_batch(seed=0, shape=(32, 16)):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=shape).astype(np.float32)
    return Batch(inputs=inputs, labels=rng.integers(0, 4, shape[0]))


def loss_fn(params, apply_fn, batch, rng):
    del rng
    out = apply_fn({"params": params}, batch.inputs)
    loss = optax.softmax_cross_entropy_with_integer_labels(out, batch.labels)
    return loss.mean(), {"loss": (loss.sum(), loss.shape[0])}


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


@pytest.mark.parametrize("builder", [data_parallel, fsdp])
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


@pytest.mark.parametrize("use_scan", [False, True], ids=["loop", "scan"])
@pytest.mark.parametrize("builder", [data_parallel, fsdp])
def test_running_statistics_are_the_mean_over_devices(devices8, builder, use_scan):
    batch = make_batch(0, (32, 6, 6, 3))
    model = Convolutional(momentum=0.0)  # So that they are those of the last minibatch.
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
            loss_fn,
            mesh=make_mesh({"data": 8}, devices8),
            batch=make_batch(),
            min_weight_size=0,
            num_minibatches=2,
            use_scan=use_scan,
        )
        state, _ = train_program(program, [make_batch(), make_batch()])
        assert state.collections["counters"]["calls"] == 4


class Sowing(nn.Module):
    """Sows a penalty, into a tuple that grows or into a sum."""

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


@pytest.mark.parametrize("into_sum", [False, True], ids=["tuple", "sum"])
@pytest.mark.parametrize("builder", [data_parallel, fsdp])
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
    # Nothing is reduced twice, which would change no number.
    assert sorted(purposes) == [
        "count_examples",
        "sync_collections",
        "sync_collections",
        "sync_gradients",
        "sync_gradients",
        "sync_metrics",
    ]
