"""With flax, `jax.jit` with shardings, optax and Orbax."""

import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.same_job import job


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.gelu(nn.Dense(job.WIDTH, dtype=jnp.bfloat16)(x))
        return nn.Dense(job.CLASSES, dtype=jnp.bfloat16)(x)


model = Classifier()
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(job.LEARNING_RATE))
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
by_rows = NamedSharding(mesh, P("data"))
replicated = NamedSharding(mesh, P())


def create(rng, x):
    params = model.init(rng, x)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def shard(x):
    dims = [dim for dim, size in enumerate(x.shape) if size % 8 == 0]
    if not dims or x.size < 2**10:
        return replicated
    largest = max(dims, key=lambda dim: x.shape[dim])
    return NamedSharding(mesh, P(*("data" if dim == largest else None for dim in range(x.ndim))))


def loss_of(params, batch):
    x, y = batch
    logits = model.apply({"params": params}, x).astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, (logits.argmax(-1) == y).mean()


x, y = job.examples(0)
abstract = jax.eval_shape(create, jax.random.key(0), x[: job.BATCH])
shardings = jax.tree.map(shard, abstract)
init = jax.jit(create, out_shardings=shardings)


def step(state, batch):
    (loss, accuracy), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params, batch)
    return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}


train_step = jax.jit(
    step,
    in_shardings=(shardings, by_rows),
    out_shardings=(shardings, replicated),
    donate_argnums=0,
)
eval_step = jax.jit(loss_of)


def batches(start, end):
    each = len(x) // job.BATCH
    for i in range(start, end):
        order = np.random.default_rng([0, i // each]).permutation(len(x))
        rows = order[i % each * job.BATCH :][: job.BATCH]
        yield i + 1, jax.device_put((x[rows], y[rows]), by_rows)


def show(step, name, metrics):
    values = "  ".join(f"{key} {value:.4f}" for key, value in metrics.items())
    print(f"step {step} {name} {values}", flush=True)


folder, steps = Path(sys.argv[1]).absolute(), int(sys.argv[2])
options = ocp.CheckpointManagerOptions(save_interval_steps=job.SAVE, max_to_keep=2)
with ocp.CheckpointManager(folder, options=options) as checkpoints:
    if checkpoints.latest_step() is None:
        state = init(jax.random.key(0), x[: job.BATCH])
    else:
        like = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            abstract,
            shardings,
        )
        state = checkpoints.restore(checkpoints.latest_step(), args=ocp.args.StandardRestore(like))
    kept = []
    for i, batch in batches(int(state.step), steps):
        state, metrics = train_step(state, batch)
        kept.append(metrics)
        if i % job.LOG == 0 or i == steps:
            show(i, "train", jax.tree.map(lambda *values: np.mean(values), *kept))
            kept = []
        checkpoints.save(i, args=ocp.args.StandardSave(state), force=i == steps)
    loss, accuracy = eval_step(state.params, jax.device_put(job.examples(1), by_rows))
    show(steps, "eval", {"loss": loss, "accuracy": accuracy})
job.show_jax_share((state.params, state.opt_state))  # not counted
