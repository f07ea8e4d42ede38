"""Small models, losses, batches and programs that many tests train."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from manualpar import Batch, data_parallel, fsdp, hsdp, make_mesh, zero

# The allowed difference after ten steps in float32, because devices add in another order.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


class Classifier(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, train):
        x = nn.LayerNorm()(nn.silu(nn.Dense(32, name="input_dense")(x)))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(5, name="output_dense")(x)


def loss_fn(params, apply_fn, batch, rng):
    logits = apply_fn({"params": params}, batch.inputs, train=True, rngs={"dropout": rng})
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    mask = jnp.ones(loss.shape) if batch.mask is None else batch.mask
    count = mask.sum()
    correct = (logits.argmax(-1) == batch.labels) * mask
    total = (loss * mask).sum()
    return total / jnp.maximum(count, 1), {
        "loss": (total, count),
        "accuracy": (correct.sum(), count),
    }


def square_loss(params, apply_fn, batch, rng):
    """Computes the mean squared error."""
    losses = jnp.square(apply_fn({"params": params}, batch.inputs) - batch.labels).mean(-1)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


def masked_square_loss(params, apply_fn, batch, rng):
    """Computes the mean squared error with the weights in `batch.mask`."""
    losses = jnp.square(apply_fn({"params": params}, batch.inputs) - batch.labels).mean(-1)
    total, count = (losses * batch.mask).sum(), batch.mask.sum()
    return total / jnp.where(count > 0, count, 1), {"loss": (total, count)}


def class_loss(params, apply_fn, batch, rng):
    """Computes the mean cross entropy of a model without dropout."""
    logits = apply_fn({"params": params}, batch.inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


def make_batch(seed=0, size=64, mask=None):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, 12)).astype(np.float32)
    return Batch(inputs=x, labels=rng.integers(0, 5, size, dtype=np.int32), mask=mask)


BATCHES = [make_batch(seed) for seed in range(10)]


SMALL = {"min_weight_size": 16}
STRATEGIES = {
    "dp": (data_parallel, {}),
    "zero1": (zero, {"stage": 1, **SMALL}),
    "zero2": (zero, {"stage": 2, **SMALL}),
    "fsdp": (fsdp, SMALL),
    "fsdp, keep": (fsdp, {"reshard_after_forward": False, **SMALL}),
    "fsdp, step": (fsdp, {"communicate_every": "step", **SMALL}),
    "fsdp, pad": (fsdp, {"pad": True, "min_weight_size": 1}),
    "fsdp, pad, step": (fsdp, {"pad": True, "min_weight_size": 1, "communicate_every": "step"}),
    "zero1, pad": (zero, {"pad": True, "min_weight_size": 1}),
    "hsdp": (hsdp, SMALL),
}


class Linear(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(self.features, use_bias=False)(x)


def make_tx():
    return optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.5, momentum=0.9))


def build(name, devices, *, model=None, tx=None, batch=BATCHES[0], loss=loss_fn, **kwargs):
    builder, options = STRATEGIES[name]
    shape = {"replica": 2, "data": -1} if builder is hsdp else {"data": -1}
    kwargs = {"mesh": make_mesh(shape, devices), **options, **kwargs}
    return builder(model or Classifier(), tx or make_tx(), loss, batch=batch, **kwargs)


def keep_gradients():
    """Returns an optimizer whose state is the last gradient, and whose updates are zero."""
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    return optax.GradientTransformation(zeros, lambda grads, state, params: (zeros(grads), grads))


def own_shapes(program, params):
    """Returns a program's stored parameters on the host, without their padding."""
    shapes = iter(info.shape for info, _ in program.parameters)
    return jax.tree.map(lambda x: x[tuple(map(slice, next(shapes)))], jax.device_get(params))


def mean_loss(params, apply_fn, batch, rng):
    out = apply_fn({"params": params}, batch.inputs)
    return out.mean(), {"loss": (out.sum(), out.size)}
