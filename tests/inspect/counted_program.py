"""Programs of which every byte was counted, without stages."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from manualpar import Batch, Program, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.inspect import parameter_collectives, trace_collectives

SIZES = (16, 32, 64, 8)  # Of the inputs and of each layer's outputs.
KERNELS = [math.prod(pair) for pair in itertools.pairwise(SIZES)]
BATCH = 64


class BiasFree(nn.Module):
    """Layers each of whose kernels is used once, and but for the first needed twice."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for size in SIZES[1:]:
            x = jnp.tanh(nn.Dense(size, use_bias=False)(x))
        return x


def squares(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
    del rng
    y_BD = apply_fn({"params": params}, batch.inputs)
    total, count = jnp.sum(y_BD**2), jnp.float32(len(y_BD))
    return total / count, {"loss": (total, count)}


Builder = Callable[..., Program]
BUILDERS: dict[str, Builder] = {
    "dp": data_parallel,
    "zero1": functools.partial(zero, stage=1, min_weight_size=0),
    "zero2": functools.partial(zero, stage=2, min_weight_size=0),
    "fsdp-keep": functools.partial(fsdp, reshard_after_forward=False, min_weight_size=0),
    "fsdp-reshard": functools.partial(fsdp, min_weight_size=0),
    "fsdp-step": functools.partial(fsdp, communicate_every="step", min_weight_size=0),
    "fsdp-gather-step": functools.partial(fsdp, communicate_every="gather-step", min_weight_size=0),
    "hsdp-keep": functools.partial(hsdp, reshard_after_forward=False, min_weight_size=0),
    "hsdp-reshard": functools.partial(hsdp, min_weight_size=0),
    "hsdp-step": functools.partial(hsdp, communicate_every="step", min_weight_size=0),
    "hsdp-gather-step": functools.partial(hsdp, communicate_every="gather-step", min_weight_size=0),
}


def build(name: str, model: nn.Module | None = None, **options: Any) -> Program:
    mesh = {"replica": 2, "data": 4} if name.startswith("hsdp") else {"data": 8}
    arguments: dict[str, Any] = {
        "mesh": make_mesh(mesh),
        "batch": Batch(jax.ShapeDtypeStruct((BATCH, SIZES[0]), jnp.float32), None),
        **options,
    }
    return BUILDERS[name](model or BiasFree(), optax.adam(1e-3), squares, **arguments)


def read(program: Program) -> Any:
    """The collectives of parameters and gradients in the traced program."""
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    return parameter_collectives(trace_collectives(traced))
