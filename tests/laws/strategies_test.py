"""Every strategy in every mode trains the same; only stored and sent bytes differ."""

import itertools

import chex
import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import abstract_mesh
from manualpar.core.modes.strategy import MODES
from manualpar.inspect import state_bytes, trace_collectives
from manualpar.training.replicas import ReplicaSentinel
from tests.one_device import slow_unless, train_on_one_device, train_program
from tests.tiny import (
    BATCHES,
    STRATEGIES,
    TOLERANCE,
    Classifier,
    Linear,
    build,
    loss_fn,
    make_batch,
    make_tx,
    own_shapes,
)


@pytest.fixture(scope="module")
def reference():
    return train_on_one_device(Classifier(), make_tx(), BATCHES, loss_fn, train=False)


# The pairs that are tested fast; the tests of all other pairs are slow.
FAST = {("hsdp", "manual"), ("fsdp", "explicit")}


@pytest.mark.parametrize(
    ("name", "mode"), [slow_unless(FAST, *pair) for pair in itertools.product(STRATEGIES, MODES)]
)
def test_ten_steps_equal_the_single_device(devices8, reference, name, mode):
    program = build(name, devices8, mode=mode, num_minibatches=2, use_scan=True)
    state, losses = train_program(program, BATCHES)
    np.testing.assert_allclose(losses, reference.losses, **TOLERANCE)
    params = own_shapes(program, state.params)
    chex.assert_trees_all_close(params, reference.params, **TOLERANCE)
    ReplicaSentinel(program.mesh, program.layout).check(state)
    for x, abstract in zip(
        jax.tree.leaves(state), jax.tree.leaves(program.abstract_state), strict=True
    ):
        assert (x.shape, x.dtype) == (abstract.shape, abstract.dtype)
        assert x.sharding.is_equivalent_to(abstract.sharding, x.ndim)
    metrics = program.eval_step(state, BATCHES[0])
    model = Classifier()
    expected, _ = loss_fn(reference.params, model.apply, BATCHES[0], jax.random.key(0))
    np.testing.assert_allclose(metrics["loss"][0] / 64, expected, **TOLERANCE)


# What is stored.


@pytest.mark.parametrize(
    ("name", "parameters", "moments"),
    [
        ("dp", 1, 1),
        ("zero1", 1, 8),
        ("zero2", 1, 8),
        ("fsdp", 8, 8),
        ("fsdp, step", 8, 8),
        ("hsdp", 4, 4),
    ],
)
def test_bytes_of_the_state(devices8, name, parameters, moments):
    program = build(name, devices8, tx=optax.adam(1e-2), model=Linear(64))
    size = 12 * 64 * 4
    assert state_bytes(program.abstract_state.params) == (size // parameters, size)
    count = 4
    assert state_bytes(program.abstract_state.opt_state) == (
        2 * size // moments + count,
        2 * size + count,
    )


def test_a_padded_state_counts_its_padding(devices8):
    model = Linear(15)  # [12, 15]: the 15 are padded to 16.
    batch = make_batch()
    program = build("fsdp, pad", devices8, tx=optax.adam(1e-2), model=model, batch=batch)
    assert state_bytes(program.abstract_state.params) == (12 * 2 * 4, 12 * 16 * 4)
    kernel = program.init(jax.random.key(0)).params["Dense_0"]["kernel"]
    assert kernel.sharding.spec == P(None, "data")
    whole = model.init({"params": jax.random.split(jax.random.key(0))[0]}, batch.inputs, False)
    np.testing.assert_array_equal(kernel[:, :15], whole["params"]["Dense_0"]["kernel"])
    np.testing.assert_array_equal(kernel[:, 15:], 0)
    assert program.parameters[0][1].note == "padded from 15 to 16"


NORMED = {
    "lamb": optax.lamb(0.1, weight_decay=0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.5)),
    "muon": optax.contrib.muon(0.1),
}
FAST_NORMED = {("fsdp, pad", "lamb"), ("zero1, pad", "adafactor")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        slow_unless(FAST_NORMED, *pair)
        for pair in itertools.product(("fsdp, pad", "zero1, pad"), NORMED)
    ],
)
def test_no_optimizer_sees_the_padding(devices8, name, optimizer):
    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.Dense(5)(nn.silu(nn.Dense(27)(x)))

    tx = NORMED[optimizer]
    expected = train_on_one_device(Odd(), tx, BATCHES[:3], loss_fn, train=False)
    program = build(name, devices8, model=Odd(), tx=tx)
    state, losses = train_program(program, BATCHES[:3])
    np.testing.assert_allclose(losses, expected.losses, **TOLERANCE)
    params = own_shapes(program, state.params)
    chex.assert_trees_all_close(params, expected.params, **TOLERANCE)


# Options.


@pytest.mark.slow
def test_norms_are_the_global_ones(devices8):
    batch = BATCHES[0]
    tx = optax.sgd(0.25)
    expected = train_on_one_device(Classifier(), tx, [batch], loss_fn, train=False)
    difference = jax.tree.map(lambda a, b: a - b, expected.params, expected.initial)
    for name, mode in [("fsdp, pad", "manual"), ("zero1", "manual"), ("hsdp", "auto")]:
        program = build(name, devices8, tx=tx, mode=mode, norm_metrics=True)
        _, metrics = program.train_step(program.init(jax.random.key(0)), batch)
        means = {key: total / count for key, (total, count) in metrics.items()}
        update = optax.tree.norm(difference)
        np.testing.assert_allclose(means["update_norm"], update, rtol=1e-4)
        np.testing.assert_allclose(means["gradient_norm"], update / 0.25, rtol=1e-4)
        parameter = optax.tree.norm(expected.params)
        np.testing.assert_allclose(means["parameter_norm"], parameter, rtol=1e-5)
        assert set(metrics) == {
            "loss",
            "accuracy",
            "gradient_norm",
            "update_norm",
            "parameter_norm",
        }


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("dp", "manual"),
        ("zero2", "manual"),
        ("hsdp", "manual"),
        *(("fsdp", mode) for mode in MODES),
    ],
)
def test_on_devices_that_nobody_has_a_program_reads_the_same(devices8, name, mode):
    real = build(name, devices8, mode=mode)
    unreal = build(name, devices8, mode=mode, mesh=abstract_mesh(real.mesh.shape, 8))

    def read(program):
        traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
        return trace_collectives(traced), program.parameters, jax.tree.leaves(program.layout)

    assert read(unreal) == read(real)
    with pytest.raises(ValueError, match=r"init: the program is on an abstract mesh"):
        unreal.init(jax.random.key(0))
