import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from manualpar import make_mesh
from manualpar.dispatch import MAX_STEPS_AHEAD, limit_steps_ahead


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

    limited = limit_steps_ahead(step, make_mesh({"data": 8}, devices8))
    for count in range(1, 3 * MAX_STEPS_AHEAD):
        limited(None, None)
        assert waited_for == metrics[: max(count - MAX_STEPS_AHEAD, 0)]


def test_one_device_is_never_waited_for(devices8):
    step = jax.jit(lambda state, batch: (state, batch))
    assert limit_steps_ahead(step, make_mesh({"data": 1}, devices8[:1])) is step


def test_it_is_used_like_the_jitted_function(devices8):
    step = jax.jit(lambda state, batch: (state + batch, {"loss": (batch, 1)}))
    limited = limit_steps_ahead(step, make_mesh({"data": 8}, devices8))
    assert limited(jnp.float32(1), jnp.float32(2))[0] == 3
    assert "add" in limited.lower(jnp.float32(1), jnp.float32(2)).as_text()


def test_a_metric_that_was_donated_does_not_stop_the_run(devices8):
    step = jax.jit(lambda state, batch: (state, {"loss": (batch + 1, 1)}))
    consume = jax.jit(lambda x: x + 1, donate_argnums=0)
    limited = limit_steps_ahead(step, make_mesh({"data": 8}, devices8))
    for _ in range(2 * MAX_STEPS_AHEAD):
        _, metrics = limited(jnp.float32(1), jnp.float32(2))
        consume(metrics["loss"][0])


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
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["300"]
