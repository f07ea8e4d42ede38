"""A loss or a gradient that is not finite is told, and the step that has one can be skipped."""

import itertools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import Batch, make_mesh
from manualpar.core.modes.strategy import MODES
from manualpar.core.program.step import find_nonfinite
from manualpar.inspect.communication import count_by_kind, total_bytes, trace_collectives
from manualpar.training.replicas import ReplicaSentinel
from tests.one_device import slow_unless
from tests.tiny import STRATEGIES, build

ROWS = 64
ROW = 37  # Of eight devices it is the fifth's, and in the last of its two minibatches.


class Model(nn.Module):
    """With a collection, and with a root whose gradient at an input of zeros is not finite."""

    @nn.compact
    def __call__(self, x, train):
        root = jnp.sqrt(jnp.square(nn.Dense(8, use_bias=False, name="root")(x)).sum(-1))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        return nn.Dense(5)(jnp.tanh(nn.Dense(24)(x))), root


def loss_fn(params, apply_fn, batch, rng):
    out, root = apply_fn({"params": params}, batch.inputs, train=True)
    total = ((jnp.square(out - batch.labels).sum(-1) + root) * batch.mask).sum()
    count = batch.mask.sum()
    return total / jnp.maximum(count, 1), {"loss": (total, count)}


def make_batch(seed):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(ROWS, 12)).astype(np.float32)
    labels = rng.normal(size=(ROWS, 5)).astype(np.float32)
    return Batch(inputs=inputs, labels=labels, mask=np.ones(ROWS, np.float32))


def poison(*, batch=None, **values):
    """A batch with other values in one example."""
    batch = jax.tree.map(np.copy, batch or make_batch(9))
    for field, value in values.items():
        getattr(batch, field)[ROW] = value
    return batch


GOOD = tuple(make_batch(seed) for seed in range(3))
POISONED = {
    "a nan among the inputs": poison(inputs=np.nan),
    "an infinite input": poison(inputs=np.inf),
    "an infinite label, so an infinite loss": poison(labels=np.inf),
    "a gradient at the root of 0, of a finite loss": poison(inputs=0),
    "a finite input whose square overflows": poison(inputs=1e30),
    "a nan in an example that is masked by a product": poison(inputs=np.nan, mask=0),
}


def make_tx():
    """A clip, moments and a schedule with a counter of its own."""
    schedule = optax.exponential_decay(1e-2, 1, 0.5)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def make(name, devices, **kwargs):
    kwargs = {"model": Model(), "tx": make_tx(), "batch": GOOD[0], "loss": loss_fn, **kwargs}
    return build(name, devices, **kwargs)


def bits(tree):
    """The leaves of a tree, and what tells 0 from -0 and one nan from another."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    keys = jax.dtypes.prng_key
    arrays = {
        jax.tree_util.keystr(path): jax.random.key_data(x) if jnp.issubdtype(x.dtype, keys) else x
        for path, x in leaves
    }
    return {path: np.asarray(x).tobytes() for path, x in arrays.items()}


def learned(state):
    """The bits of all that a step learns."""
    return bits({"p": state.params, "o": state.opt_state, "c": state.collections})


def train(program, batches):
    state = program.init(jax.random.key(0))
    for batch in batches:
        state, metrics = program.train_step(state, batch)
    return state, metrics


def check_skips(program, poisoned):
    """Every poisoned batch leaves what is learned as it was, and training goes on from there."""
    expected, metrics = train(program, GOOD)
    assert metrics["nonfinite"] == (0, 1)
    state, _ = train(program, GOOD[:1])
    before = learned(state)
    assert before != learned(expected)
    for kind, batch in poisoned.items():
        step, key = int(state.step), bits(state.rng)
        state, metrics = program.train_step(state, batch)
        assert metrics["nonfinite"] == (1, 1), kind
        assert learned(state) == before, kind
        assert (state.step, bits(state.rng) == key) == (step + 1, False), kind
    for batch in GOOD[1:]:
        state, metrics = program.train_step(state, batch)
        assert metrics["nonfinite"] == (0, 1)
    assert learned(state) == learned(expected)
    chex.assert_tree_all_finite((state.params, state.collections))
    ReplicaSentinel(program.mesh, program.layout).check(state)


FAST = {("fsdp, pad", "manual")}


@pytest.mark.parametrize(
    ("name", "mode"), [slow_unless(FAST, *pair) for pair in itertools.product(STRATEGIES, MODES)]
)
def test_a_step_that_is_skipped_leaves_no_trace(devices8, name, mode):
    program = make(name, devices8, mode=mode, nonfinite="skip", num_minibatches=2, use_scan=True)
    check_skips(program, POISONED)


@pytest.mark.parametrize(
    ("row", "use_scan"), [(63, False), pytest.param(0, True, marks=pytest.mark.slow)]
)
def test_it_is_told_whichever_device_and_minibatch_has_it(devices8, row, use_scan, monkeypatch):
    monkeypatch.setattr("tests.core.program.step_test.ROW", row)
    program = make("dp", devices8[:4], nonfinite="report", num_minibatches=4, use_scan=use_scan)
    _, metrics = train(program, [poison(inputs=0)])
    assert metrics["nonfinite"] == (1, 1)
    assert np.isfinite(metrics["loss"][0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param("fsdp", {"data": 4, "model": 2}, marks=pytest.mark.slow),
        ("fsdp", {"replica": 2, "data": 2, "model": 2}),
        pytest.param("fsdp", {"data": 1, "model": 8}, marks=pytest.mark.slow),
        pytest.param("hsdp", {"replica": 4, "data": 2}, marks=pytest.mark.slow),
        pytest.param("hsdp", {"replica": 8, "data": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_on_other_meshes(devices8, name, shape):
    program = make(name, devices8, mesh=make_mesh(shape, devices8), nonfinite="skip")
    check_skips(program, POISONED)


# What is told and what is not.


class Linear(nn.Module):
    """Whose gradient is its input, while the loss is 0."""

    @nn.compact
    def __call__(self, x, train):
        return x @ self.param("w", nn.initializers.zeros, (16,))


def linear_loss(params, apply_fn, batch, rng):
    loss = apply_fn({"params": params}, batch.inputs, train=True)
    return loss.mean(), {"loss": (loss.sum(), loss.shape[0])}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("hsdp", "manual"),
        ("fsdp", "auto"),
        *(pytest.param(name, "manual", marks=pytest.mark.slow) for name in ("dp", "zero2")),
    ],
)
@pytest.mark.parametrize(
    ("gradient", "nonfinite"),
    [(1e30, 0), (2e38, 1)],
    ids=["its square overflows", "the sum over devices overflows"],
)
def test_large_gradients_are_finite_until_they_overflow(devices8, name, mode, gradient, nonfinite):
    batch = Batch(inputs=np.full((8, 16), gradient, np.float32), labels=np.zeros(8))
    arguments = {"model": Linear(), "tx": optax.sgd(0.0), "batch": batch, "loss": linear_loss}
    program = build(name, devices8, mode=mode, nonfinite="report", **arguments)
    _, metrics = train(program, [batch])
    assert metrics["nonfinite"] == (nonfinite, 1)


def test_an_overflow_by_the_cast_to_the_parameters_dtype_is_told(devices8):
    largest = float(np.finfo(np.float32).max)  # In bfloat16 it is infinite.
    batch = Batch(inputs=np.full((1, 16), largest, np.float32), labels=np.zeros(1))
    arguments = {"model": Linear(), "tx": optax.sgd(0.0), "batch": batch, "loss": linear_loss}
    for param_dtype, nonfinite in (("float32", 0), ("bfloat16", 1)):
        options = {"param_dtype": param_dtype, "gather_dtype": "float32", "nonfinite": "report"}
        _, metrics = train(build("dp", devices8[:1], **options, **arguments), [batch])
        assert metrics["nonfinite"] == (nonfinite, 1)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["taken the gradient of", "reported"])
def test_a_loss_that_is_not_finite_is_told_though_its_gradient_is(devices8, which):
    def loss(params, apply_fn, batch, rng):
        value, metrics = loss_fn(params, apply_fn, batch, rng)
        total, count = metrics["loss"]
        added = jnp.where(batch.mask.min() == 0, jnp.inf, 0.0)
        if which == "reported":
            return value, {"loss": (total + added, count)}
        return value + added, {"loss": (total, count)}

    program = make("dp", devices8, loss=loss, nonfinite="report")
    assert train(program, GOOD[:1])[1]["nonfinite"] == (0, 1)
    assert train(program, [poison(mask=0)])[1]["nonfinite"] == (1, 1)


class Roots(nn.Module):
    """With a gradient that is not finite in those columns in which the input is 0."""

    @nn.compact
    def __call__(self, x, train):
        sharded = nn.with_partitioning(nn.initializers.ones, ("model",))
        return jnp.sqrt(x * self.param("w", sharded, (8,))[None]).sum(-1)


@pytest.mark.parametrize(
    ("name", "mode"), [("dp", "manual"), *(("fsdp", mode) for mode in MODES[:3])]
)
def test_it_is_told_by_the_only_shard_along_another_axis_that_has_it(devices8, name, mode):
    mesh = make_mesh({"data": 2, "model": 4}, devices8)
    inputs = np.ones((4, 8), np.float32)
    batch = Batch(inputs=inputs, labels=np.zeros(4))
    arguments = {"model": Roots(), "tx": optax.adam(0.1), "batch": batch, "loss": linear_loss}
    program = build(name, devices8, mesh=mesh, mode=mode, nonfinite="skip", **arguments)
    state, metrics = train(program, [batch])
    assert metrics["nonfinite"] == (0, 1)
    before = learned(state)
    inputs = np.copy(inputs)
    inputs[3, 5] = 0
    state, metrics = program.train_step(state, batch.replace(inputs=inputs))
    assert metrics["nonfinite"] == (1, 1)
    assert np.isfinite(metrics["loss"][0])
    assert learned(state) == before
    if mode == "manual":
        sent = trace_collectives(trace(program))
        assert [found.axes for found in sent if found.purpose == "find_nonfinite"] == [("model",)]


def test_the_flag_is_1_along_all_other_axes(devices8):
    mesh = make_mesh({"data": 2, "model": 2, "expert": 2}, devices8)
    gradient = np.ones((2, 2, 2), np.float32)
    gradient[1, 0, 1] = np.nan
    find = jax.shard_map(
        lambda g: find_nonfinite(g, "data")[None],
        mesh=mesh,
        in_specs=P("data", "model", "expert"),
        out_specs=P("data"),
    )
    np.testing.assert_array_equal(find(gradient), [0, 1])


def test_what_cannot_be_infinite_is_finite():
    tree = {
        "empty": jnp.zeros((0, 3)),
        "integer": jnp.ones(3, jnp.int32),
        "no tangent": np.zeros(3, jax.dtypes.float0),
        "number": jnp.float32(3e38),
    }
    assert find_nonfinite({}, "data") == 0
    assert find_nonfinite(tree, "data") == 0
    assert find_nonfinite({**tree, "complex": jnp.complex64(complex(1, np.nan))}, "data") == 1
    for dtype in ("bfloat16", "float16"):
        assert find_nonfinite([jnp.array([0.0, -jnp.inf], dtype)], "data") == 1


# Optimizers.

OPTIMIZERS = {
    "multi steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "apply if finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 2),
    "a value": optax.polyak_sgd,
    "a line search": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8)),
    "another": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(4)),
    "a key": lambda: optax.chain(optax.add_noise(0.01, 0.55, key=0), optax.scale(-1e-2)),
    "plateau": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
}


FAST_OPTIMIZERS = {("zero1, pad", tx) for tx in ("a line search",)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tx"),
    [
        slow_unless(FAST_OPTIMIZERS, *pair)
        for pair in itertools.product(("zero1, pad", "fsdp"), OPTIMIZERS)
    ],
)
def test_every_kind_of_optimizer_keeps_its_state(devices8, name, tx):
    tx = OPTIMIZERS[tx]()
    tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    check_skips(make(name, devices8, tx=tx, nonfinite="skip"), POISONED)


@pytest.mark.slow
def test_norms_are_those_of_the_parameters_that_are_kept(devices8):
    program = make("zero1", devices8, nonfinite="skip", norm_metrics=True)
    state, metrics = train(program, [*GOOD[:1], POISONED["an infinite input"]])
    assert not np.isfinite(metrics["gradient_norm"][0])
    np.testing.assert_allclose(
        metrics["parameter_norm"][0], optax.tree.norm(jax.device_get(state.params)), rtol=1e-5
    )


# What it costs.


def trace(program, step="train_step"):
    return getattr(program, step).trace(program.abstract_state, program.abstract_batch)


@pytest.mark.parametrize("mode", [slow_unless({("manual",)}, mode) for mode in MODES])
def test_a_program_that_ignores_it_computes_nothing_for_it(devices8, mode):
    plain = make("fsdp", devices8, mode=mode)
    ignores = make("fsdp", devices8, mode=mode, nonfinite="ignore")
    assert str(trace(plain).jaxpr) == str(trace(ignores).jaxpr)
    assert "is_finite" not in str(trace(ignores).jaxpr)
    assert "nonfinite" not in trace(ignores).out_info[1]
    skips = make("fsdp", devices8, mode=mode, nonfinite="skip")
    assert "is_finite" in str(trace(skips).jaxpr)
    assert str(trace(skips, "eval_step").jaxpr) == str(trace(plain, "eval_step").jaxpr)


@pytest.mark.parametrize(
    ("name", "nonfinite"),
    [("dp", "report"), ("zero2", "skip"), ("fsdp", "report"), ("fsdp", "skip"), ("hsdp", "skip")],
)
def test_it_costs_eight_bytes_in_the_collective_of_the_metrics(devices8, name, nonfinite):
    plain = trace_collectives(trace(make(name, devices8)))
    found = trace_collectives(trace(make(name, devices8, nonfinite=nonfinite)))
    assert count_by_kind(found) == count_by_kind(plain)
    assert total_bytes(found) - total_bytes(plain) == 2 * 8 * 7 / 8


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize(
    "name", ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dp", "zero1"))]
)
def test_a_selection_holds_no_more_than_what_it_selects_from(devices8, name):
    """XLA:CPU fuses less than others: it holds a shard of the moments twice, but no more."""
    width, layers = 512, 4
    model = nn.Sequential([nn.Dense(width, use_bias=False) for _ in range(layers)])
    batch = Batch(inputs=np.ones((8, width), np.float32), labels=np.ones((8, width), np.float32))

    def loss(params, apply_fn, batch, rng):
        loss = jnp.square(apply_fn({"params": params}, batch.inputs) - batch.labels).sum(-1)
        return loss.mean(), {"loss": (loss.sum(), loss.shape[0])}

    def memory(nonfinite):
        arguments = {"model": model, "tx": optax.adam(1e-3), "batch": batch, "loss": loss}
        program = build(name, devices8, nonfinite=nonfinite, **arguments)
        step = program.train_step.lower(program.abstract_state, program.abstract_batch)
        return step.compile().memory_analysis()

    plain, skips = memory("ignore"), memory("skip")
    assert skips.alias_size_in_bytes == plain.alias_size_in_bytes > 0
    shards = layers * width * width * 4 // (1 if name == "dp" else 8)
    assert skips.temp_size_in_bytes - plain.temp_size_in_bytes < 2.5 * shards


def test_the_state_is_donated(devices8):
    program = make("fsdp", devices8, nonfinite="skip")
    state = program.init(jax.random.key(0))
    program.train_step(state, POISONED["an infinite input"])
    assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state)))


# What does not fit.


@pytest.mark.slow
def test_a_report_changes_nothing_else(devices8):
    batches = [*GOOD, POISONED["an infinite label, so an infinite loss"]]
    plain, _ = train(make("fsdp", devices8), batches[:3])
    program = make("fsdp", devices8, nonfinite="report")
    state, metrics = train(program, batches[:3])
    assert metrics["nonfinite"] == (0, 1)
    assert bits(state) == bits(plain)
    state, metrics = train(program, batches)
    assert metrics["nonfinite"] == (1, 1)
    assert not all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
