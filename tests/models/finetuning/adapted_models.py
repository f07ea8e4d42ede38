"""Models that are trained in part, and plain flax for them."""

import fnmatch
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from manualpar import Batch, Column, Pipeline, Row, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.core.trees import path_name
from manualpar.models import Attention, Context, Latent, Split, Transformer

D8, D24 = {"data": 8}, {"data": 2, "model": 4}
OURS: dict[str, Any] = {"vocab_size": 16, "hidden_size": 16, "num_heads": 4, "mlp_size": 32}
ALL_OF_OURS = {"*/attention/*": 2, "*/mlp/*": 3}
TOKENS = np.random.default_rng(0).integers(0, 16, (16, 8))


class Block(nn.Module):
    """Every kind of layer that can be adapted."""

    @nn.compact
    def __call__(self, x_BSD: jax.Array) -> tuple[jax.Array, None]:
        y_BSNH = nn.DenseGeneral((4, 4), name="heads")(nn.LayerNorm(name="norm")(x_BSD))
        y_BSD = nn.DenseGeneral(16, axis=(-2, -1), name="out")(nn.gelu(y_BSNH))
        y_BSF = nn.remat(nn.Dense)(32, name="up")(x_BSD + y_BSD)
        return x_BSD + nn.Einsum((32, 16), "bsf,fd->bsd", name="down")(nn.gelu(y_BSF)), None


class Somebodys(nn.Module):
    """A model that was written for one device."""

    scan: bool = True

    @nn.compact
    def __call__(self, tokens_BS: jax.Array, train: bool = False) -> jax.Array:
        x_BSD = nn.Embed(16, 16, name="embed")(tokens_BS)
        if self.scan:
            stack = nn.scan(
                nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            x_BSD, _ = stack(name="layers")(x_BSD)
        else:
            for index in range(2):
                x_BSD, _ = Block(name=f"layer_{index}")(x_BSD)
        return nn.Dense(16, name="head")(x_BSD)


SOMEBODYS = {"*/heads": 2, "*/out": 3, "*/up": 4, "*/down": 2, "head/kernel": 4}


def loss_of_logits(params: Any, apply_fn: Any, batch: Any, rng: Any) -> Any:
    del rng
    logits = apply_fn({"params": params}, batch.inputs, train=True).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


BATCH = Batch(TOKENS, np.roll(TOKENS, -1, 1))


def is_adapter(path: str) -> bool:
    return path.endswith(("lora_a", "lora_b", "lora_magnitude"))


def by_path(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves_with_path(nn.meta.unbox(tree))
    return {path_name(path): np.asarray(x) for path, x in leaves}


def parameters(model: Any) -> Any:
    """Initial ones, with what makes products zero as if it had been trained."""

    def trained(path: Any, x: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(1), len(path_name(path)))
        if path_name(path).endswith("lora_magnitude"):
            return x * 1.3
        is_zero = path_name(path).endswith(("lora_b", "embedding_lora_a"))
        return jax.random.normal(key, x.shape) / 4 if is_zero else x

    variables = jax.jit(lambda: nn.meta.unbox(model.init(jax.random.key(0), BATCH.inputs)))()
    return jax.tree.map_with_path(trained, variables["params"])


def check(model: Any, build: Any, loss_fn: Any = loss_of_logits, given: Any = None) -> Any:
    """A step of SGD changes what is trained as one on one device does, and nothing else.

    On one device it is a step of `given`, another model with its parameters, if there is one.
    """
    params = parameters(model)
    one, its_params = given(params) if given else (model, params)
    program = build(model, optax.sgd(1.0), loss_fn, batch=BATCH)
    state, metrics = program.train_step(program.init_from(params), BATCH)

    @jax.jit
    def on_one_device(params: Any) -> Any:
        return jax.value_and_grad(
            lambda params: loss_fn(params, one.apply, BATCH, jax.random.key(0))[0]
        )(params)

    loss, grads = on_one_device(its_params)
    np.testing.assert_allclose(metrics["loss"][0] / metrics["loss"][1], loss, rtol=1e-5)
    trainable = program.model.interface.trainable
    before, after, grads = by_path(params), by_path(program.whole(state)["params"]), by_path(grads)
    assert before.keys() == after.keys()
    for path, x in before.items():
        if any(fnmatch.fnmatchcase(path, glob) for glob in trainable):
            assert np.abs(grads[path]).max() > 1e-4, path
            np.testing.assert_allclose(after[path], x - grads[path], rtol=1e-4, atol=2e-6)
        else:
            np.testing.assert_array_equal(after[path], x, err_msg=path)
    return program


def on(strategy: Any, mesh: dict[str, int], **options: Any) -> Any:
    if strategy is not data_parallel:
        options = {"min_weight_size": 0, **options}
    return functools.partial(strategy, mesh=make_mesh(mesh), **options)


STRATEGIES = {
    "fsdp": on(fsdp, D8, num_minibatches=2),
    "dp": on(data_parallel, D8),
    "zero": on(zero, D8, stage=2),
    "reshard": on(fsdp, D8, reshard_after_forward=True, pad=True),
    "gathered": on(fsdp, D8, reshard_after_forward=False),
    "keep": on(fsdp, D8, keep_gathered=("head",)),
    "hsdp": on(hsdp, {"replica": 2, "data": 4}, num_minibatches=2, use_scan=True),
    "auto": on(fsdp, D8, mode="auto"),
}
OF_LATENTS = OURS | {"head_size": 10, "attention": Attention(latent=Latent(6, 10, 4, 4))}
TRANSFORMERS = {
    "fsdp": (Transformer(**OURS), on(fsdp, D8)),
    "split": (Transformer(**OURS, num_kv_heads=2, split=Split("model")), on(fsdp, D24)),
    "sequence": (
        Transformer(**OURS, remat="full", split=Split("model", sequence_parallel=True)),
        on(fsdp, D24, num_minibatches=2),
    ),
    "ring": (
        Transformer(**OURS, split=Split("model", sequence_parallel=True, overlap="ring")),
        on(fsdp, D24),
    ),
    "unscanned": (
        Transformer(
            **OURS, scan_layers=False, split=Split("model"), attention=Attention(qkv_bias=True)
        ),
        on(zero, D24, stage=1),
    ),
    "annotated": (
        Transformer(**OURS, annotate=True),
        on(
            fsdp,
            D24,
            mode="auto",
            rules=[
                ("heads", "model"),
                ("mlp", "model"),
                *((name, None) for name in ("embed", "kv_heads", "vocab")),
            ],
        ),
    ),
    "explicit": (Transformer(**OURS, split=Split("model")), on(fsdp, D24, mode="explicit")),
    "context": (
        Transformer(**OURS, context=Context("context")),
        on(fsdp, {"data": 4, "context": 2}, context_axis="context"),
    ),
    "stages": (
        Transformer(**OURS),
        on(fsdp, {"data": 4, "stage": 2}, num_minibatches=2, pipeline=Pipeline("stage")),
    ),
    "latents": (Transformer(**OF_LATENTS, split=Split("model")), on(fsdp, D24)),
    "latents, sequence": (
        Transformer(**OF_LATENTS, remat="full", split=Split("model", sequence_parallel=True)),
        on(fsdp, D24, num_minibatches=2),
    ),
    "latents, context": (
        Transformer(**OF_LATENTS, context=Context("context"), split=Split("model")),
        on(fsdp, {"data": 2, "context": 2, "model": 2}, context_axis="context"),
    ),
    "latents, stages": (
        Transformer(**OF_LATENTS, split=Split("model")),
        on(
            fsdp,
            {"data": 2, "stage": 2, "model": 2},
            num_minibatches=2,
            pipeline=Pipeline("stage"),
        ),
    ),
    "latents, explicit": (
        Transformer(**OF_LATENTS, split=Split("model")),
        on(fsdp, D24, mode="explicit"),
    ),
}
PLAN: Any = {"*/heads": Column(-2), "*/out": Row(-3), "*/up": Column(), "*/down": Row()}
