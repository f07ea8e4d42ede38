"""What codes leave out of gradients comes with the next step, or is right on average by itself."""

import dataclasses
import functools
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from manualpar import Batch, Pipeline, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.inspect import bytes_by_axes, parameter_collectives, step_bytes, trace_collectives
from manualpar.models import Context, Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.flat_fields import nest_fields
from manualpar.quantization.gradient_rounding import StochasticQuantizer
from manualpar.quantization.quantized_collectives import BlockQuantizer
from manualpar.training.checkpoints import Checkpoints
from manualpar.training.replicas import ReplicaSentinel
from tests.core.model.nnx_stacks import Stack
from tests.tiny import BATCHES, Classifier, loss_fn, own_shapes

SHARDED = {"min_weight_size": 16}
BUILDERS = {
    "dp": (data_parallel, {}),
    "zero1": (zero, {"stage": 1, **SHARDED}),
    "zero1, pad": (zero, {"stage": 1, "min_weight_size": 1, "pad": True}),
    "fsdp": (fsdp, {"communicate_every": "step", **SHARDED}),
    "hsdp": (hsdp, SHARDED),
    "hsdp, step": (hsdp, {"communicate_every": "step", **SHARDED}),
}
IN_MINIBATCHES = {  # They reduce in each, which leaves nothing for the next step.
    "fsdp, minibatch": (fsdp, {"communicate_every": "minibatch", **SHARDED}),
    "fsdp, gather-step": (fsdp, {"communicate_every": "gather-step", **SHARDED}),
    "fsdp, one axis after the other": (fsdp, {"axis_by_axis": True, **SHARDED}),
    "fsdp, secondary shards": (fsdp, {"regather_axes": ("data",), **SHARDED}),
    "zero2": (zero, {"stage": 2, **SHARDED}),
}
MESHES = [{"data": 8}, {"data": 4, "model": 2}, {"data": 2, "x": 4}]
REPLICATED = [{"replica": 2, "data": 4}, {"replica": 4, "data": 2}, {"replica": 8, "data": 1}]
FAST = {("hsdp", "{'replica': 2, 'data': 4}")}
CASES = [
    pytest.param(name, mesh, marks=() if (name, str(mesh)) in FAST else pytest.mark.slow)
    for name in BUILDERS
    for mesh in (REPLICATED if "hsdp" in name else MESHES)
]
FEEDBACK = {"reduce_code": "int4", "error_feedback": True}
AT_RANDOM = {"reduce_code": "int4", "stochastic_rounding": True}
KEYS = 1600  # What is rounded to the nearest once is off by 4 to 14 times as much as may be.
SIZES = {"vocab_size": 32, "num_layers": 2, "hidden_size": 32, "mlp_size": 48, "num_heads": 2}


def build(name, mesh, devices, *, tx=None, **options):
    builder, own = (BUILDERS | IN_MINIBATCHES)[name]
    tx = tx or optax.sgd(1e-4)
    axes = {"axis_name": ("data", "x")} if "x" in mesh else {}
    options = {"num_minibatches": 2, **own, **axes, **options}
    return builder(
        Classifier(), tx, loss_fn, mesh=make_mesh(mesh, devices), batch=BATCHES[0], **options
    )


def mean_gradient(program, steps=30):
    """The mean of gradients that hardly change: of steps that are as good as none."""
    state = program.init(jax.random.key(0))
    before = own_shapes(program, state.params)
    for _ in range(steps):
        state, _ = program.train_step(state, BATCHES[0])
    after = own_shapes(program, state.params)
    return state, jax.tree.map(lambda x, y: (x - y) / (steps * 1e-4), before, after)


def language_program(devices, mesh, model, **options):
    """A language model's program, and its batch."""
    tokens = np.random.default_rng(0).integers(0, 32, (8, 16))
    program = fsdp(
        model,
        optax.sgd(1e-3),
        language_model_loss,
        mesh=make_mesh(mesh, devices[: math.prod(mesh.values())]),
        batch=(batch := Batch(tokens, tokens)),
        min_weight_size=64,
        **options,
    )
    return program, batch


def mean_update(devices, mesh, model, **options):
    """The change of a language model in steps that are as good as none."""
    program, batch = language_program(devices, mesh, model, **options)
    state = program.init(jax.random.key(0))
    before = own_shapes(program, jax.device_get(state.params))
    for _ in range(20):
        state, _ = program.train_step(state, batch)
    after = own_shapes(program, jax.device_get(state.params))
    return jax.tree.map(np.subtract, before, after)


def error(found, expected):
    norm = lambda tree: np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(tree)))  # noqa: E731
    return norm(jax.tree.map(np.subtract, found, expected)) / norm(expected)


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_what_is_left_out_comes_later(devices8, name, mesh):
    _, expected = mean_gradient(build(name, mesh, devices8))
    state, found = mean_gradient(program := build(name, mesh, devices8, **FEEDBACK))
    assert error(found, expected) < 0.012
    ReplicaSentinel(program.mesh, program.layout).check(state)
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    if program.strategy.gather_every == "step" or not program.strategy.reshard_after_forward:
        assert bytes_by_axes(parameter_collectives(trace_collectives(traced))) == step_bytes(
            program
        )


def bias(means, deviations, exact):
    """How far means over keys are off, in units of how far they may be: about 1 if by chance."""
    norm = lambda tree: np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(tree)))  # noqa: E731
    return norm(jax.tree.map(np.subtract, means, exact)) * KEYS**0.5 / norm(deviations)


def gradient(program, batch, keys):
    """The gradient of a step with each of the keys: its mean, and its standard deviation."""
    state = program.init(jax.random.key(0))
    carried = state.collections, state.local

    def each(keys):
        run = lambda key: program.step.gradients(batch)(state.params, carried, key, batch)[0]  # noqa: E731
        some = jax.vmap(run)(keys)
        return [jax.tree.map(functools.partial(f, axis=0), some) for f in (jnp.mean, jnp.std)]

    return jax.device_get(jax.jit(each)(jax.random.split(jax.random.key(1), keys)))


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("fsdp, minibatch", MESHES[2], {"use_scan": True}),
        *(
            pytest.param(name, mesh, {}, marks=pytest.mark.slow)
            for name, mesh in (
                ("dp", MESHES[2]),
                ("hsdp", REPLICATED[1]),
                ("hsdp, step", REPLICATED[0]),
                ("zero1, pad", MESHES[0]),
                ("zero2", MESHES[1]),
                *((name, MESHES[2]) for name in IN_MINIBATCHES),
            )
        ),
    ],
)
def test_random_rounding_is_right_on_average(devices8, name, mesh, options):
    exact, _ = gradient(build(name, mesh, devices8, **options), BATCHES[0], 1)
    found = gradient(build(name, mesh, devices8, **AT_RANDOM, **options), BATCHES[0], KEYS)
    assert bias(*found, exact) < 1.2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp", "fsdp, minibatch", "zero2"])
def test_random_rounding_differs_between_steps(devices8, name):
    program = build(name, MESHES[0], devices8, **AT_RANDOM)
    state = program.init(jax.random.key(0))
    assert state.local == {}
    seen = []
    for _ in range(2):  # Of a rate of 1e-4 the second gradient is the first.
        before = own_shapes(program, jax.device_get(state.params))
        state, _ = program.train_step(state, BATCHES[0])
        after = own_shapes(program, jax.device_get(state.params))
        seen.append(jax.tree.map(np.subtract, before, after))
    assert error(*seen) > 0.01


def test_what_shares_a_key_rounds_otherwise(devices8):
    """The devices, and the layers of a scan, whose scales differ."""
    x = np.full(512, 0.51, np.float32)
    x[::256] = 7  # The scale is 1.

    def left_out(x, key):
        x = jax.lax.pcast(x, "data", to="varying")
        _, lost = StochasticQuantizer(BlockQuantizer("int4"), key).scatter_sum(x, 0, ("data",))
        return jnp.sign(lost)[None]

    mesh = make_mesh({"data": 2}, devices8[:2])
    run = jax.jit(jax.shard_map(left_out, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("data")))
    key, more = jax.random.key(0), x.copy()
    more[0] = 7.1
    (first, second), (other, _) = run(x, key), run(more, key)
    chex.assert_trees_all_equal(run(x, key)[0], first)
    for one in (second, other, run(x, jax.random.key(1))[0]):
        assert 0.3 < np.mean(one[2:] != first[2:]) < 0.7


def test_all_devices_of_two_axes_round_differently(devices8):
    x = np.full(8 * 256, 0.51, np.float32)
    x[::256] = 7  # The scale is 1.
    axes, mesh = ("data", "x"), make_mesh(MESHES[2], devices8)

    def left_out(x):
        quantizer = StochasticQuantizer(BlockQuantizer("int4"), jax.random.key(0))
        _, lost = quantizer.scatter_sum(jax.lax.pcast(x, axes, to="varying"), 0, axes)
        return jnp.sign(lost)[None]

    run = jax.jit(jax.shard_map(left_out, mesh=mesh, in_specs=P(), out_specs=P(axes)))
    signs = np.asarray(run(x))
    assert len(signs) == 8
    for first, second in itertools.combinations(signs, 2):
        assert 0.3 < np.mean(first != second) < 0.7


@pytest.mark.parametrize("function", ["scatter", "mean"])
def test_a_second_rounding_knows_nothing_of_the_first(devices8, function):
    """Where the same scales come again, so that equal keys would make equal noise."""
    x = np.zeros((2, 2, 2, 64), np.float32)  # Device, device, shard of the first sum, number.
    x[0, 0, 0], x[0, 0, 0, ::32], x[0, 0, 1, 0] = 0.51, 7, 14  # Scales of 1 and 2.
    x[1, 0, 0, 0] = 7  # Of the halves of the sum, 2 and 1.
    x = x.reshape(2, 2, -1)

    def reduce(key, x):
        code = StochasticQuantizer(BlockQuantizer("int4"), key)
        if function == "mean":
            return code.mean(x, ("data", "x"))[0]
        for axes in (("data",), ("x",)):
            x, _ = code.scatter_sum(x, 0, axes)
        return x / 4

    @functools.partial(
        jax.shard_map,
        mesh=make_mesh({"data": 2, "x": 2}, devices8[:4]),
        in_specs=(P(), P("data", "x")),
        out_specs=P() if function == "mean" else P(("data", "x")),
    )
    def run(keys, x):
        each = jax.vmap(lambda key: reduce(key, x[0, 0]))(keys)
        return each.mean(0), each.std(0)

    found = jax.device_get(jax.jit(run)(jax.random.split(jax.random.key(0), KEYS), x))
    assert bias(*found, x.mean((0, 1))) < 1.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "mesh", "options"),
    [
        ({}, {"data": 8}, {}),
        ({"remat": "full", "tied_head": True}, {"data": 4, "model": 2}, {}),
        ({"scan_layers": False}, {"data": 4}, {"num_minibatches": 2, "gather_code": "int8"}),
        ({"context_axis": "context"}, {"data": 4, "context": 2}, {"context_axis": "context"}),
        ({}, {"data": 4, "stage": 2}, {"pipeline": Pipeline("stage"), "num_minibatches": 2}),
    ],
)
def test_random_rounding_goes_through_scans_and_stages(devices8, sizes, mesh, options):
    build_one = functools.partial(
        language_program, devices8, mesh, Transformer(**SIZES, **nest_fields(sizes)), **options
    )
    exact, _ = gradient(*build_one(), 1)
    assert bias(*gradient(*build_one(**AT_RANDOM), KEYS), exact) < 1.2


@pytest.mark.slow
def test_random_rounding_goes_through_nnx_scans(devices8):
    exact, at_random = (
        fsdp(
            Stack(nnx.Rngs(0)),
            optax.sgd(1e-4),
            loss_fn,
            mesh=make_mesh({"data": 8}, devices8),
            batch=BATCHES[0],
            min_weight_size=16,
            **codes,
        )
        for codes in ({}, AT_RANDOM)
    )
    expected, _ = gradient(exact, BATCHES[0], 1)
    assert bias(*gradient(at_random, BATCHES[0], KEYS), expected) < 1.2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [("zero1", MESHES[2]), ("hsdp", REPLICATED[0])])
def test_what_random_rounding_leaves_out_comes_later_too(devices8, name, mesh):
    _, expected = mean_gradient(build(name, mesh, devices8))
    _, found = mean_gradient(build(name, mesh, devices8, **(FEEDBACK | AT_RANDOM)))
    assert error(found, expected) < 0.012


def test_a_step_that_is_skipped_leaves_residuals(devices8):
    tx = optax.adam(1e-2)
    program = build("zero1", MESHES[0], devices8, tx=tx, nonfinite="skip", **FEEDBACK)
    state, _ = program.train_step(program.init(jax.random.key(0)), BATCHES[0])
    before = jax.device_get(state.local)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(before))
    bad = dataclasses.replace(BATCHES[1], inputs=BATCHES[1].inputs.copy())
    bad.inputs[3] = np.inf
    state, metrics = program.train_step(state, bad)
    assert metrics["nonfinite"][0] == 1
    chex.assert_trees_all_equal(jax.device_get(state.local), before)
    state, metrics = program.train_step(state, BATCHES[1])
    assert metrics["nonfinite"][0] == 0
    assert np.isfinite(metrics["loss"][0])


def take(program, state, batches):
    for batch in batches:
        state, _ = program.train_step(state, batch)
    return state


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hsdp", "zero1"])
def test_a_run_goes_on_bit_for_bit_and_elsewhere_with_zeros(devices8, tmp_path, name):
    meshes = REPLICATED if name == "hsdp" else MESHES
    program = build(name, meshes[0], devices8, tx=optax.adam(1e-2), **FEEDBACK)
    half = take(program, program.init(jax.random.key(0)), BATCHES[:2])
    said = []
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(program, half, step=2, extra={})
        checkpoints.wait()
        expected = take(program, half, BATCHES[2:4])
        restored = checkpoints.restore(program, report=said.append)
        assert not said
        state = take(program, restored.state, BATCHES[2:4])
        chex.assert_trees_all_equal(*map(jax.device_get, (state.local, expected.local)))
        chex.assert_trees_all_equal(*map(jax.device_get, (state.params, expected.params)))
        other = build(name, meshes[1], devices8, tx=optax.adam(1e-2), **FEEDBACK)
        elsewhere = checkpoints.restore(other, report=said.append).state
        zeros = "Residuals of gradients begin with zeros: the checkpoint has none that fit."
        assert said == [zeros]
        assert all(not np.asarray(x).any() for x in jax.tree.leaves(elsewhere.local))
        take(other, elsewhere, BATCHES[2:3])
        exact = build(name, meshes[1], devices8, tx=optax.adam(1e-2))
        assert checkpoints.restore(exact, report=said.append).state.local == {}
        assert len(said) == 1


@pytest.mark.slow
def test_a_state_is_adopted_with_residuals_or_without(devices8):
    exact, coded = (build("zero1", MESHES[0], devices8, **more) for more in ({}, FEEDBACK))
    elsewhere = build("zero1", MESHES[1], devices8, **FEEDBACK)
    state = take(coded, coded.init(jax.random.key(0)), BATCHES[:1])
    params, residuals = jax.device_get((state.params, state.local))
    assert exact.adopt(state).local == {}
    chex.assert_trees_all_equal(jax.device_get(coded.adopt(state).local), residuals)
    for other, given in ((elsewhere, state), (coded, exact.adopt(state))):
        adopted = other.adopt(given)
        assert all(not np.asarray(x).any() for x in jax.tree.leaves(adopted.local))
        chex.assert_trees_all_equal(own_shapes(other, adopted.params), own_shapes(coded, params))
        take(other, adopted, BATCHES[1:2])


@pytest.mark.slow
def test_what_contexts_leave_out_comes_later_too(devices8):
    mesh, model = (
        {"data": 4, "context": 2},
        Transformer(**SIZES, num_kv_heads=1, context=Context("context")),
    )
    mean = functools.partial(
        mean_update, devices8, mesh, model, context_axis="context", communicate_every="step"
    )

    exact, coded, fed = (mean(**codes) for codes in ({}, {"reduce_code": "int4"}, FEEDBACK))
    assert error(fed, exact) < 0.1 * error(coded, exact)
    with pytest.raises(ValueError, match=r"axis_by_axis=True over \('data', 'context'\), expected"):
        mean(axis_by_axis=True, **FEEDBACK)


def test_what_does_not_pay_has_no_residual(devices8):
    program = build("dp", MESHES[0], devices8, reduce_code="int8", error_feedback=True)
    residuals = program.abstract_state.local["residuals"]
    assert residuals["input_dense"].keys() == {"kernel", "bias"}
    assert "bias" not in residuals["output_dense"]  # 5 numbers for 8 devices.
    assert {x.dtype for x in jax.tree.leaves(residuals)} == {jnp.dtype("float32")}
