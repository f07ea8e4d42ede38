"""A model that says what it was told of training."""

import flax.linen as nn
import jax.numpy as jnp


class Switched(nn.Module):
    """Says what it was told; counts its calls."""

    @nn.compact
    def __call__(self, x, train, scale=1.0, *, deterministic=False):
        calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            calls.value += 1
        said = jnp.array([train, deterministic], jnp.float32)
        self.sow("losses", "said", said.sum())
        return self.param("w", nn.initializers.ones, ()) * x.sum() * scale, said

    def other(self, x, train=True):
        return self(x, train)
