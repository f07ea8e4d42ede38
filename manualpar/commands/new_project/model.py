"""The model, and its loss."""

import flax.linen as nn
import jax.numpy as jnp
import optax

from manualpar import Batch, Column, Row


class Model(nn.Module):
    """A residual network that classifies points."""

    width: int
    depth: int
    num_classes: int = 3

    @nn.compact
    def __call__(self, points):
        """Returns the logits `float32[B, num_classes]` of points `float32[B, 2]`."""
        x = nn.Dense(self.width, name="embed")(points)
        for i in range(self.depth):
            hidden = nn.gelu(nn.Dense(4 * self.width, name=f"up_{i}")(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width, name=f"down_{i}")(hidden)
        return nn.Dense(self.num_classes, name="head")(nn.LayerNorm()(x))


# How the layers are split if the mesh has the axis "model": each device computes some of the hidden
# features. On other meshes this changes nothing.
SPLIT = {"up_*": Column(), "down_*": Row()}


def loss_fn(params, apply_fn, batch: Batch, rng):
    """Returns the mean loss of a device's examples, and the sum and count of each metric."""
    logits = apply_fn({"params": params}, batch.inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels) * batch.mask
    hits = (logits.argmax(-1) == batch.labels) * batch.mask
    count = batch.mask.sum()  # The mask is 0 for the padding of the last batch of an evaluation.
    loss = losses.sum() / jnp.maximum(count, 1)
    return loss, {"loss": (losses.sum(), count), "accuracy": (hits.sum(), count)}
