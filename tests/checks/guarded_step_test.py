import subprocess
import sys
import textwrap

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import Batch, TrainState, data_parallel, fsdp, make_mesh
from manualpar.checks.guarded_step import MAX_STEPS_AHEAD, GuardedStep
from manualpar.core.program.state_arrays import check_alive
from tests.paths import ROOT
from tests.tiny import mean_loss


class Metric:
    """Stands for an array that is being computed."""

    def __init__(self, waited_for):
        self.waited_for = waited_for

    def block_until_ready(self):
        self.waited_for.append(self)

    def is_deleted(self):
        return False


@pytest.mark.parametrize("with_state", [True, False])
def test_the_step_some_steps_ago_is_waited_for(devices8, with_state):
    waited_for, metrics = [], []

    def step(state, batch):
        metrics.append(Metric(waited_for))
        return (state, {"loss": (metrics[-1], 1)}) if with_state else {"loss": (metrics[-1], 1)}

    limited = GuardedStep("train_step", step, make_mesh({"data": 8}, devices8))
    for count in range(1, 3 * MAX_STEPS_AHEAD):
        limited(None, None)
        assert waited_for == metrics[: max(count - MAX_STEPS_AHEAD, 0)]


@pytest.mark.parametrize("count", [1, 8])
def test_only_simulated_devices_are_waited_for(devices8, count):
    step = jax.jit(lambda state, batch: (state, batch))
    guarded = GuardedStep("train_step", step, make_mesh({"data": count}, devices8[:count]))
    assert guarded.is_limited == (count > 1)


def test_it_is_used_like_the_jitted_function(devices8):
    step = jax.jit(lambda state, batch: (state + batch, {"loss": (batch, 1)}))
    limited = GuardedStep("train_step", step, make_mesh({"data": 8}, devices8))
    assert limited(jnp.float32(1), jnp.float32(2))[0] == 3
    assert "add" in limited.lower(jnp.float32(1), jnp.float32(2)).as_text()


def test_a_batch_of_other_devices_is_moved_and_other_integers_are_refused(devices8):
    step = GuardedStep(
        "eval_step",
        jax.jit(lambda state, batch: {"loss": (state["w"] * batch["x"].sum(), 1)}),
        make_mesh({"data": 4}, devices8[:4]),
    )
    everywhere = jax.sharding.NamedSharding(step._mesh, jax.sharding.PartitionSpec())
    state = {"w": jax.device_put(jnp.float32(2), everywhere)}
    for device in (devices8[0], devices8[7]):
        loss = step(state, {"x": jax.device_put(jnp.arange(8), device)})["loss"][0]
        assert float(loss) == 56
    with pytest.raises(ValueError, match=r"eval_step: batch\['x'\] has the int64 -2147483649, "):
        step(state, {"x": np.array([-(2**31) - 1, 3])})
    assert float(step(state, {"x": np.array([-(2**31), 2**31 - 1])})["loss"][0]) == -2


def test_a_metric_that_was_donated_does_not_stop_the_run(devices8):
    step = jax.jit(lambda state, batch: (state, {"loss": (batch + 1, 1)}))
    consume = jax.jit(lambda x: x + 1, donate_argnums=0)
    limited = GuardedStep("train_step", step, make_mesh({"data": 8}, devices8))
    for _ in range(2 * MAX_STEPS_AHEAD):
        _, metrics = limited(jnp.float32(1), jnp.float32(2))
        consume(metrics["loss"][0])


def test_tracing_leaves_nothing_to_wait_for(devices8):
    step = jax.jit(lambda state, batch: (state, {"loss": (batch + 1, 1)}))
    guarded = GuardedStep("train_step", step, make_mesh({"data": 8}, devices8))
    for _ in range(2 * MAX_STEPS_AHEAD):
        jax.eval_shape(guarded, make_state(), Batch(jnp.ones(2), jnp.ones(2)).inputs)


def make_state():
    return TrainState.create(
        apply_fn=None,
        params={"a": jnp.ones(2), "b": jnp.ones(3)},
        tx=optax.sgd(0.1),
        rng=jax.random.key(0),
    )


@pytest.mark.parametrize("count", [1, 8])
def test_a_state_that_was_donated_is_refused_before_jax_sees_it(devices8, count):
    """Where there are several devices the process used to die."""
    mesh = make_mesh({"data": count}, devices8[:count])
    calls = []

    def train(state, batch):
        calls.append(1)
        state = jax.tree.map(lambda x: x if x.ndim == 0 else x + batch.inputs.sum(), state)
        return state.replace(step=state.step + 1), {"loss": (batch.inputs.sum(), 1)}

    train_step = GuardedStep("train_step", jax.jit(train, donate_argnums=0), mesh)
    eval_step = GuardedStep("eval_step", jax.jit(lambda s, b: train(s, b)[1]), mesh)
    batch = Batch(jnp.ones(4), jnp.ones(4))
    first = make_state()
    eval_step(first, batch)
    second, _ = train_step(first, batch)
    message = r": state.step has been deleted.*Use the returned state"
    with pytest.raises(ValueError, match="train_step" + message):
        train_step(first, batch)
    with pytest.raises(ValueError, match="eval_step" + message):  # It has been there alive.
        eval_step(first, batch)
    with pytest.raises(ValueError, match=r"train_step: state.params\['b'\] has been deleted"):
        train_step(second.replace(params={**second.params, "b": first.params["b"]}), batch)
    eval_step(second, batch)
    third, _ = train_step(second, batch)
    batch.labels.delete()
    with pytest.raises(ValueError, match=r"train_step: batch.labels has been deleted"):
        train_step(third, batch)
    assert int(third.step) == 2  # It is still alive.


@pytest.mark.slow
def test_a_loop_that_fetches_nothing_reaches_its_end():
    """Without the limit the process is aborted in a minute; so it is a process of its own."""
    program = """
        import jax
        jax.config.update("jax_num_cpu_devices", 8)
        import jax.numpy as jnp, optax, flax.linen as nn
        from manualpar import Batch, fsdp, make_mesh

        def loss_fn(params, apply_fn, batch, rng):
            out = apply_fn({"params": params}, batch.inputs) ** 2
            return out.mean(), {"loss": (out.sum(), out.size)}

        batch = Batch(jnp.ones((512, 256)), jnp.ones(512))
        model = nn.Sequential([nn.Dense(512), nn.relu, nn.Dense(512)])
        program = fsdp(model, optax.adam(1e-3), loss_fn, mesh=make_mesh({"data": -1}), batch=batch,
                       min_weight_size=16)
        state = program.init(jax.random.key(0))
        batch = jax.device_put(batch, program.batch_sharding)
        for _ in range(300):
            state, _ = program.train_step(state, batch)
        for _ in range(300):
            program.eval_step(state, batch)
        print(int(state.step))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["300"]


def test_what_is_no_state_of_the_program_is_refused_in_words(devices8):
    def loss_fn(params, apply_fn, batch, rng):
        out = apply_fn({"params": params}, batch.inputs)
        return out.mean(), {"loss": (out.sum(), out.size)}

    x = jnp.ones((8, 2))
    batch, mesh = Batch(x, x), make_mesh({"data": 8}, devices8)
    program, other = (
        data_parallel(nn.Dense(size), optax.sgd(0.1), loss_fn, mesh=mesh, batch=batch)
        for size in (2, 3)
    )
    state = program.init(jax.random.key(0))
    for name in ("train_step", "eval_step"):
        with pytest.raises(
            ValueError, match=rf"{name}: the state is from another .* program.adopt"
        ):
            getattr(other, name)(state, batch)
        with pytest.raises(TypeError, match=rf"{name}: state is a dict, expected a state of this"):
            getattr(program, name)(state.params, batch)
        with pytest.raises(
            TypeError, match=rf"{name}: batch.labels\[0\] is a str, expected an arr"
        ):
            getattr(program, name)(state, Batch(x, ["a", 1]))
    same = data_parallel(nn.Dense(2), optax.sgd(0.1), loss_fn, mesh=mesh, batch=batch)
    with pytest.raises(ValueError, match=r"train_step: .* another model or optimizer.*adopt"):
        same.train_step(state, batch)


@pytest.mark.parametrize("mode", ["manual", pytest.param("explicit", marks=pytest.mark.slow)])
def test_a_leaf_that_is_set_by_hand_compiles_nothing(devices8, mode):
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    batch, mesh = Batch(jnp.ones((8, 2)), jnp.ones((8, 2))), make_mesh({"data": 8}, devices8)
    program = fsdp(nn.Dense(8), tx, mean_loss, mesh=mesh, batch=batch, min_weight_size=1, mode=mode)
    state, _ = program.train_step(program.init(jax.random.key(0)), batch)
    program.eval_step(state, batch)
    compiled = []

    def note(event, seconds, **more):
        if "backend_compile" in event:
            compiled.append(more.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for rate in (jnp.float32(0.5), jnp.asarray(0.25), 1, 0.25, np.float64(0.5), np.float32(0)):
            opt_state = optax.tree_utils.tree_set(state.opt_state, learning_rate=rate)
            state = state.replace(opt_state=opt_state, step=jnp.int32(7))
            program.eval_step(state, batch)
            before = np.asarray(state.params["kernel"])
            state, _ = program.train_step(state, batch)
            moved = before - np.asarray(state.params["kernel"])
            np.testing.assert_allclose(moved, np.full_like(moved, float(rate) / 8), atol=1e-6)
            assert state.step == 8
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    # To place a leaf may be a computation too.
    assert not [name for name in compiled if "train" in name or "eval" in name]


def test_what_is_gone_is_named():
    state = {"params": {"kernel": jnp.ones(3), "rng": jax.random.key(0)}, "step": np.zeros(2)}
    check_alive("train_step", state=state, batch=None)
    state["params"]["kernel"].delete()
    with pytest.raises(
        ValueError,
        match=r"train_step: state\['params'\]\['kernel'\] .*Use the returned state.*cells",
    ):
        check_alive("train_step", state=state)
    with pytest.raises(ValueError, match=r"eval_step: batch.* Make the batch again"):
        check_alive("eval_step", batch=state)


def test_what_is_being_traced_is_alive():
    jax.eval_shape(lambda x: check_alive("train_step", state=x), jnp.ones(3))
