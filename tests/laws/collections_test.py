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

from manualpar import Batch, data_parallel, fsdp, hsdp, make_mesh, zero
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


class SowingLayer(nn.Module):
    """Sows a value of each example, a mean and a perturbation, beside a counter that it keeps."""

    collection: str

    @nn.compact
    def __call__(self, x, _):
        x = nn.tanh(nn.Dense(16)(x))
        calls = self.variable(self.collection, "calls", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            calls.value += 1
        self.sow(self.collection, "mean", (x**2).mean())
        add = {"reduce_fn": jnp.add, "init_fn": lambda: jnp.zeros(())}
        self.sow(self.collection, "of_each", (x**2).mean(-1), **add)
        self.sow(self.collection, "of_each", x[:, 0], **add)
        return self.perturb("seen", x, collection="seen"), None


class Sowing(nn.Module):
    """Sows in each layer of a loop."""

    collection: str

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, self.collection: 0, "seen": 0}
        loop = nn.scan(SowingLayer, variable_axes=axes, split_rngs={"params": True}, length=2)
        return nn.Dense(4)(loop(self.collection, name="layers")(x, None)[0])


def sown_loss(name):
    def loss_fn(params, apply_fn, batch, rng):
        del rng
        out, updated = apply_fn({"params": params}, batch.inputs, mutable=[name])
        ((mean,), of_each) = (updated[name]["layers"][key] for key in ("mean", "of_each"))
        loss = optax.softmax_cross_entropy_with_integer_labels(out, batch.labels)
        loss = (loss + of_each.sum(0)) ** 2 + mean.sum()
        return loss.mean(), {"loss": (loss.sum(), loss.shape[0])}

    return loss_fn


@pytest.mark.parametrize(
    ("builder", "shape", "options", "name"),
    [
        (fsdp, {"data": 8}, {"num_minibatches": 2}, "aux"),
        pytest.param(fsdp, {"data": 4}, {}, "losses", marks=pytest.mark.slow),
        pytest.param(hsdp, {"replica": 2, "data": 4}, {}, "aux", marks=pytest.mark.slow),
        pytest.param(zero, {"data": 8}, {"stage": 2}, "aux", marks=pytest.mark.slow),
        pytest.param(fsdp, {"data": 8}, {"mode": "auto"}, "aux", marks=pytest.mark.slow),
        pytest.param(fsdp, {"data": 8}, {"mode": "explicit"}, "aux", marks=pytest.mark.slow),
        pytest.param(data_parallel, {"data": 8}, {"use_scan": True}, "aux", marks=pytest.mark.slow),
    ],
)
def test_sown_values_begin_anew_in_each_call(devices8, builder, shape, options, name):
    batches, model = [make_batch(seed) for seed in range(3)], Sowing(name)
    expected = train_on_one_device(model, optax.sgd(0.1), batches, sown_loss(name))
    placing = {} if builder is data_parallel else {"min_weight_size": 0}
    program = builder(
        model,
        optax.sgd(0.1),
        sown_loss(name),
        mesh=make_mesh(shape, devices8[: 4 if shape == {"data": 4} else 8]),
        batch=batches[0],
        **placing,
        **options,
    )
    state, losses = train_program(program, batches)
    kept = (
        {} if name == "losses" else {name: {"layers": {"calls": (2,)}}}
    )  # A name for sown values only.
    assert jax.tree.map(jnp.shape, state.collections) == kept
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    chex.assert_trees_all_close(jax.device_get(state.params), expected.params, rtol=2e-4, atol=1e-5)
    # What `init` sows is no part of a state.
    program.init_from(model.init(jax.random.key(0), batches[0].inputs))


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


# Variables that a model computes from its parameters.


class Averaging(nn.Module):
    """A layer of a loop, with a teacher: an average of the layer's parameters."""

    @nn.compact
    def __call__(self, x, _):
        student = nn.Dense(6, name="student")
        y = nn.tanh(student(x))
        variables = student.variables["params"]
        teacher = {
            name: self.variable("teacher", name, lambda name=name: jnp.asarray(variables[name]))
            for name in ("kernel", "bias")
        }
        target = x @ teacher["kernel"].value + teacher["bias"].value[None]
        if not self.is_initializing():
            for name, average in teacher.items():
                average.value = 0.5 * average.value + 0.5 * jnp.asarray(variables[name])
        return y + jax.lax.stop_gradient(nn.tanh(target)), None


class Student(nn.Module):
    @nn.compact
    def __call__(self, x):
        calls = self.variable("teacher", "calls", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            calls.value += 1
        axes = {"variable_axes": {"params": 0, "teacher": 0}, "split_rngs": {"params": True}}
        layers = nn.scan(Averaging, length=2, **axes)(name="layers")
        return nn.Dense(4)(layers(x, None)[0])


SHARDED = {"min_weight_size": 0, "pad": True}


@pytest.mark.parametrize(
    ("builder", "shape", "options"),
    [
        (data_parallel, {"data": 8}, {}),
        (fsdp, {"data": 4}, SHARDED),
        pytest.param(zero, {"data": 8}, {"stage": 2, **SHARDED}, marks=pytest.mark.slow),
        pytest.param(hsdp, {"replica": 2, "data": 4}, SHARDED, marks=pytest.mark.slow),
        pytest.param(fsdp, {"data": 8}, {"mode": "auto"}, marks=pytest.mark.slow),
        pytest.param(fsdp, {"data": 8}, {"nonfinite": "skip", **SHARDED}, marks=pytest.mark.slow),
    ],
)
def test_an_average_of_parameters_equals_one_device(devices8, builder, shape, options):
    batches = [make_batch(seed, (32, 6)) for seed in range(3)]
    expected = train_on_one_device(Student(), optax.sgd(0.5), batches, class_loss)
    mesh = make_mesh(shape, devices8[: 4 if shape == {"data": 4} else 8])
    program = builder(Student(), optax.sgd(0.5), class_loss, mesh=mesh, batch=batches[0], **options)
    state, losses = train_program(program, batches)
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    whole = jax.device_get(program.whole(state))
    params = whole.pop("params")
    chex.assert_trees_all_close(params, expected.params, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(whole, expected.collections, rtol=1e-4, atol=1e-6)
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    assert "sync_collections" not in [c.purpose for c in trace_collectives(traced)]


@pytest.mark.slow
@pytest.mark.parametrize("use_scan", [False, True])
def test_an_average_of_parameters_is_updated_in_each_minibatch(devices8, use_scan):
    program = fsdp(
        Student(),
        optax.sgd(0.5),
        class_loss,
        mesh=make_mesh({"data": 8}, devices8),
        batch=make_batch(shape=(32, 6)),
        num_minibatches=4,
        use_scan=use_scan,
        **SHARDED,
    )
    state = program.init(jax.random.key(0))
    before = jax.device_get(program.whole(state)["params"]["layers"]["student"]["kernel"])
    zeros = jax.tree.map(jnp.zeros_like, state.collections)
    state, _ = program.train_step(state.replace(collections=zeros), make_batch(shape=(32, 6)))
    teacher = state.collections["teacher"]
    np.testing.assert_allclose(teacher["layers"]["kernel"], before * (1 - 0.5**4), rtol=1e-5)
    assert teacher["calls"] == 4


class Teacher(nnx.Variable):
    pass


def test_an_average_of_parameters_of_an_nnx_model(devices8):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(16, 4, rngs=rngs)
            self.teacher, self.noise = Teacher(jnp.zeros((16, 4))), Teacher(jnp.zeros(()))

        def __call__(self, x):
            y = self.dense(x) + x @ self.teacher[...]
            self.teacher[...] = 0.5 * self.teacher[...] + 0.5 * self.dense.kernel[...]
            self.noise[...] += self.teacher[...].mean() * (x.mean() if noisy else 1)
            return y

    noisy = True
    with pytest.raises(ValueError, match=r"\['Teacher'\]\['noise'\] .* differs between"):
        build_statistics(devices8, {}, Model)
    noisy = False
    program = build_statistics(devices8, {}, Model)
    state = program.init(jax.random.key(0))
    expected = np.zeros((16, 4))
    for _ in range(2):
        expected = 0.5 * expected + 0.5 * np.asarray(state.params["dense"]["kernel"])
        state, _ = program.train_step(state, make_batch())
    np.testing.assert_allclose(state.collections["Teacher"]["teacher"], expected, rtol=1e-5)


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


class Remembering(nn.Module):
    """Keeps a variable with an entry for each example."""

    @nn.compact
    def __call__(self, x):
        memory = self.variable("memory", "means", lambda: jnp.zeros(x.shape[0]))
        if not self.is_initializing():
            memory.value = 0.9 * memory.value + x.mean(-1)
        return nn.Dense(4)(x)


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


def test_a_variable_of_each_example_and_a_rule_for_sown_values_are_refused(devices8):
    of_each = r"'memory/means' of the model is float32\[32\] .* and float32\[4\] for .*sow it"
    with pytest.raises(ValueError, match=of_each):
        build_statistics(devices8, {}, Remembering())
    with pytest.raises(
        ValueError, match="'aux/layers/mean', which the model sows; expected no rule"
    ):
        build_statistics(devices8, {"aux/layers/mean": "mean"}, Sowing("aux"))


class Seen(nnx.Variable):
    pass


class SowingNNX(nnx.Module):
    """Sows into the type of a variable that it has, and over the path of another one."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
        self.calls, self.mean = Seen(jnp.zeros(())), Seen(jnp.ones(()))
        self.last = nnx.Intermediate(jnp.ones(32))

    def __call__(self, x):
        x = nnx.tanh(self.up(x))
        self.calls[...] += 1
        self.last.set_value(x[:, 0])
        add = {"init_fn": lambda: 0.0, "reduce_fn": lambda a, b: a + b}
        self.sow(Seen, "mean", (x**2).mean(), **add)
        self.sow(Seen, "of_each", (x**2).mean(-1), **add)
        return self.down(x)


def nnx_loss(out, sown, last, labels):
    loss = optax.softmax_cross_entropy_with_integer_labels(out, labels) + last
    return (loss + sown["of_each"]) ** 2 + sown["mean"]


@pytest.mark.parametrize(
    ("builder", "options"),
    [
        (fsdp, {"min_weight_size": 0, "num_minibatches": 2}),
        pytest.param(data_parallel, {}, marks=pytest.mark.slow),
        pytest.param(fsdp, {"mode": "auto"}, marks=pytest.mark.slow),
    ],
)
def test_what_an_nnx_model_sows_begins_anew_in_each_call(devices8, builder, options):
    def loss_fn(params, apply_fn, batch, rng):
        names = ["Seen", "intermediates"]
        out, updated = apply_fn({"params": params}, batch.inputs, mutable=names)
        loss = nnx_loss(out, updated["Seen"], updated["intermediates"]["last"], batch.labels)
        return loss.mean(), {"loss": (loss.sum(), loss.size)}

    def expected_loss(model):
        out, sown = nnx.capture(model, Seen)(batch.inputs)
        return nnx_loss(out, nnx.to_pure_dict(sown), model.last[...], batch.labels).mean()

    batch, model = make_batch(), SowingNNX(nnx.Rngs(0))
    program = builder(
        model,
        optax.sgd(0.1),
        loss_fn,
        mesh=make_mesh({"data": 8}, devices8),
        batch=batch,
        **options,
    )
    state, losses = train_program(program, [batch, batch])
    for step in (0, 1):
        value, grads = nnx.value_and_grad(expected_loss)(model)
        np.testing.assert_allclose(losses[step], value, rtol=1e-5)
        nnx.update(
            model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads)
        )
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    chex.assert_trees_all_close(jax.device_get(state.params), params, rtol=1e-4, atol=1e-6)
    calls = 2 * options.get("num_minibatches", 1)
    # What an instance holds at the path of a sown value may be what an earlier call has left.
    assert state.collections["Seen"] == {"calls": calls}
    np.testing.assert_array_equal(state.collections["intermediates"]["last"], np.ones(32))


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
