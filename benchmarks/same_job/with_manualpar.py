"""With `manualpar.training.fit`."""

import sys

import flax.linen as nn
import optax

from benchmarks.same_job import job
from manualpar.training import fit


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.gelu(nn.Dense(job.WIDTH, dtype="bfloat16")(x))
        return nn.Dense(job.CLASSES, dtype="bfloat16")(x)


def loss_fn(params, apply_fn, batch, rng):
    x, y = batch
    logits = apply_fn({"params": params}, x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), y)
    hits = (logits.argmax(-1) == y).sum()
    return losses.mean(), {"loss": (losses.sum(), losses.size), "accuracy": (hits, losses.size)}


folder, steps = sys.argv[1:]
done = fit(
    Classifier(),
    loss_fn,
    {"train": job.examples(0), "eval": job.examples(1)},
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(job.LEARNING_RATE)),
    {
        "parallel.gather_dtype": "bfloat16",
        "parallel.min_weight_size": 2**10,
        "training.log_every_steps": job.LOG,
        "checkpoint.every_steps": job.SAVE,
    },
    strategy="fsdp",
    mesh={"data": 8},
    batch_size=job.BATCH,
    steps=int(steps),
    workdir=folder,
)
job.show_jax_share((done.state.params, done.state.opt_state))  # not counted
