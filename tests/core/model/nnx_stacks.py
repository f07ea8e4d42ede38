"""Stacks of NNX layers."""

import functools

import flax.linen as nn
import jax
from flax import nnx

from tests.tiny import make_batch

LAYERS, BATCHES = 3, [make_batch(seed) for seed in range(2)]


class Block(nnx.Module):
    def __init__(self, rngs, width=12, bias=False):
        self.up = nnx.Linear(width, 32, rngs=rngs)
        self.out = nnx.Linear(32, width, use_bias=bias, rngs=rngs)

    def __call__(self, x):
        return x + self.out(nn.silu(self.up(x)))


class Stack(nnx.Module):
    def __init__(self, rngs, loop="nnx.scan", layers=LAYERS, width=12, bias=False):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Block(rngs, width, bias)

        self.loop = loop
        self.layers = make(rngs)
        self.head = nnx.Linear(width, 5, rngs=rngs)

    def __call__(self, x):
        if self.loop == "jax.lax.scan":
            run = jax.checkpoint(lambda x, layer: (layer(x), None), prevent_cse=False)
            x, _ = jax.lax.scan(run, x, self.layers)
        else:

            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            @functools.partial(nnx.remat, prevent_cse=False)
            def run(x, layer):
                return layer(x)

            x = run(x, self.layers)
        return self.head(x)
