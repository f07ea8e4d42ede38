"""Programs of which every byte was counted, in a pipeline."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from manualpar import Batch, Pipeline, Program, data_parallel, fsdp, hsdp, make_mesh, zero

LAYERS, WIDTH, VOCABULARY, EXAMPLES = 4, 16, 16, 48


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, shared: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(nn.Dense(WIDTH, use_bias=False)(x) @ shared), None


class Stacked(nn.Module):
    """Layers in a scan that share one kernel, behind a table that is also the head."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        init = nn.initializers.normal(1.0)
        table = self.param("table", init, (VOCABULARY, WIDTH))
        shared = self.param("shared", init, (WIDTH, WIDTH))
        layers = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=LAYERS,
        )
        x, _ = layers(name="layers")((table * table)[tokens], shared)
        return nn.Dense(WIDTH, use_bias=False, name="last")(x) @ table.T


def loss_fn(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
    del rng
    scores = jax.nn.log_softmax(apply_fn({"params": params}, batch.inputs))
    total = -jnp.take_along_axis(scores, batch.labels[:, None], 1).sum()
    return total / len(scores), {"loss": (total, jnp.float32(len(scores)))}


BUILDERS = {
    "dp": data_parallel,
    "zero1": functools.partial(zero, stage=1, min_weight_size=0),
    "keep": functools.partial(fsdp, reshard_after_forward=False, min_weight_size=0),
    "reshard": functools.partial(fsdp, min_weight_size=0),
    "step": functools.partial(fsdp, communicate_every="step", min_weight_size=0),
    "hsdp": functools.partial(hsdp, min_weight_size=0),
}


def build(name: str, mesh: dict[str, int], *, microbatches: int = 4, **fields: Any) -> Program:
    tokens = jax.ShapeDtypeStruct((EXAMPLES,), jnp.int32)
    return BUILDERS[name](
        Stacked(),
        optax.sgd(1.0),
        loss_fn,
        mesh=make_mesh(mesh),
        batch=Batch(tokens, tokens),
        num_minibatches=microbatches,
        gather_dtype=fields.pop("gather_dtype", None),
        trainable=fields.pop("trainable", None),
        pipeline=Pipeline(**fields),
    )
