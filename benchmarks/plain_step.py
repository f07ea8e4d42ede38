"""A training step with only jax, flax and optax, for one device.

The step has no mesh and no collectives. The benchmarks compare the steps of this package with this
step; the model and the loss are the same.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from benchmarks.workloads import Workload
from manualpar.core.state.train_state import Batch


def plain_step(workload: Workload) -> tuple[Any, Callable[[], Any]]:
    """Returns a training step with only jax and optax, and the function that makes its state."""
    model: Any = workload.model
    tx = workload.tx

    def init(rng: jax.Array) -> Any:
        params = model.init(rng, workload.batch.inputs[:1], train=False)["params"]
        return params, tx.init(params)

    def loss_fn(params: Any, batch: Batch) -> tuple[jax.Array, Any]:
        return workload.loss_fn(params, model.apply, batch, jax.random.key(0))  # Without dropout.

    def step(state: Any, batch: Batch) -> tuple[Any, Any]:
        params, opt_state = state
        grads, metrics = jax.grad(loss_fn, has_aux=True)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), metrics

    first_key = jax.random.split(jax.random.key(0))[0]  # `Program.init` uses this key.
    return jax.jit(step, donate_argnums=0), lambda: jax.jit(init)(first_key)
