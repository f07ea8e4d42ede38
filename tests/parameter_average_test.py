"""The moving average of parameters: what it is, how it lies, and that it goes where states go."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import ema_params, params_ema
from manualpar.training.checkpoints import Checkpoints
from manualpar.training.replicas import ReplicaSentinel
from tests.one_device import slow_unless
from tests.tiny import BATCHES, STRATEGIES, Classifier, build, loss_fn, own_shapes

GLOBS = ("output_dense/*", "*/bias")
DECAY = 0.75


def make(name, devices, **options):
    tx = optax.chain(optax.sgd(0.5, momentum=0.9), params_ema(DECAY))
    return build(name, devices, tx=tx, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", [slow_unless({("zero1, pad",)}, name) for name in STRATEGIES])
def test_it_is_the_average_of_the_parameters_so_far(devices8, name):
    program = make(name, devices8, trainable=GLOBS, nonfinite="skip")
    state = program.init(jax.random.key(0))
    average = own_shapes(program, state.params)
    chex.assert_trees_all_equal(own_shapes(program, ema_params(state).params), average)
    for batch in (*BATCHES[:2], BATCHES[0].replace(inputs=BATCHES[0].inputs * np.nan), BATCHES[2]):
        before = own_shapes(program, state.params)
        state, metrics = program.train_step(state, batch)
        params = own_shapes(program, state.params)
        if metrics["nonfinite"][0]:  # Such a step is not averaged again either.
            chex.assert_trees_all_equal(params, before)
            continue
        average = jax.tree.map(lambda a, p: DECAY * a + (1 - DECAY) * p, average, params)
    averaged = ema_params(state)
    chex.assert_trees_all_close(own_shapes(program, averaged.params), average, rtol=1e-5, atol=1e-7)
    for x, like in zip(jax.tree.leaves(averaged), jax.tree.leaves(state), strict=True):
        assert (x.shape, x.dtype, x.sharding) == (like.shape, like.dtype, like.sharding)
    # Frozen ones have no average of their own.
    assert averaged.params["input_dense"]["kernel"] is state.params["input_dense"]["kernel"]
    ReplicaSentinel(program.mesh, program.layout).check(averaged)
    metrics = program.eval_step(averaged, BATCHES[0])
    expected, _ = loss_fn(average, Classifier().apply, BATCHES[0], jax.random.key(0))
    np.testing.assert_allclose(metrics["loss"][0] / metrics["loss"][1], expected, rtol=1e-5)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state) if isinstance(x, jax.Array))


def test_it_is_in_float32_whatever_is_stored(devices8):
    program = make("fsdp", devices8, param_dtype="bfloat16")
    average = program.abstract_state.opt_state[-1].ema
    params = jax.tree.leaves(program.abstract_state.params)
    for x, param in zip(jax.tree.leaves(average), params, strict=True):
        assert (x.dtype, x.sharding) == (jnp.float32, param.sharding)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "other"), [("fsdp, pad", "zero1"), ("hsdp", "fsdp")])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(devices8, tmp_path, name, other):
    options = {"trainable": GLOBS, "frozen_dtype": "bfloat16"}
    program = make(name, devices8, **options)
    state = program.init(jax.random.key(0))
    for batch in BATCHES[:2]:
        state, _ = program.train_step(state, batch)
    elsewhere = make(other, devices8, **options)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(program, state, step=2, extra={})
        checkpoints.wait()
        moved = checkpoints.restore(elsewhere, report=print).state
    back = program.adopt(moved)
    chex.assert_trees_all_equal(*map(plain, (back, state)))
    whole = jax.tree.leaves(elsewhere.whole(ema_params(moved)))
    chex.assert_trees_all_equal(whole, jax.tree.leaves(program.whole(ema_params(state))))
    for batch in BATCHES[2:4]:
        state, metrics = program.train_step(state, batch)
        back, other_metrics = program.train_step(back, batch)
        chex.assert_trees_all_equal(metrics, other_metrics)
    chex.assert_trees_all_equal(*map(plain, (back, state)))
    made = program.init_from(program.whole(state))
    start = own_shapes(program, ema_params(made).params)
    chex.assert_trees_all_equal(start, own_shapes(program, state.params))


def plain(state):
    """The state with the data of its key, on the host."""
    return jax.device_get(state.replace(rng=jax.random.key_data(state.rng)))
