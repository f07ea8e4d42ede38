"""A program that sends for every purpose, and traces of it."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax

from manualpar import Batch
from tests.tiny import build


class Model(nn.Module):
    """With a collection, a scan over layers, and a parameter too small to be sharded."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16, name="first")(x))
        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = layers(name="layers")(x, None)
        return nn.Dense(5, name="last")(x)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(16)(x)), None


def loss_fn(params, apply_fn, batch, rng):
    """The count of a mask differs between devices, so that it is communicated too."""
    out = apply_fn({"params": params}, batch.inputs, train=True)
    total = (jnp.square(out - batch.labels).sum(-1) * batch.mask).sum()
    count = batch.mask.sum()
    return total / jnp.maximum(count, 1), {"loss": (total, count)}


BATCH = Batch(
    inputs=np.ones((32, 8), np.float32),
    labels=np.ones((32, 5), np.float32),
    mask=np.ones(32, np.float32),
)


def make(name, devices, **kwargs):
    arguments = {"model": Model(), "tx": optax.adam(1e-2), "batch": BATCH, "loss": loss_fn}
    return build(name, devices, **{**arguments, **kwargs})


def trace(program):
    return program.train_step.trace(program.abstract_state, program.abstract_batch)
