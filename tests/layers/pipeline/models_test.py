"""Models of both libraries in a pipeline, against the same program without stages."""

import math
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from manualpar import (
    Batch,
    Pipeline,
    assert_same_as_one_device,
    data_parallel,
    fsdp,
    make_mesh,
    zero,
)
from manualpar.layers.attention.unchecked import run_unchecked
from manualpar.models.cross_entropy import (
    classification_loss,
    language_model_loss,
    mixture_of_experts_loss,
)
from manualpar.models.flat_fields import nest_fields
from manualpar.models.transformer import Transformer
from tests.models.transformer_families import GEMMA, QWEN
from tests.one_device import train_program

L, D, V = 4, 16, 16


class Block(nn.Module):
    """A layer with dropout, scaled by what all layers share."""

    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
        y = nn.relu(nn.Dense(2 * D)(nn.LayerNorm()(x)) * scale[None])
        y = nn.Dropout(0.3, deterministic=not self.train)(y)
        return x + nn.Dense(D)(y), None


def named(x: jax.Array) -> jax.Array:
    """What a kernel computes, with a name for what its backward pass reads."""
    return checkpoint_name(jnp.tanh(x), "kernel") * jnp.sin(x)


class KernelBlock(nn.Module):
    """A layer with a kernel that types cannot be checked of."""

    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
        return x + run_unchecked(named, nn.Dense(D)(x)), None


class Stack(nn.Module):
    """Layers in a scan, with a skip around them and a parameter that is used everywhere."""

    layer: Any = Block
    jit: bool = False
    remat: bool = False
    norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Dense(D)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=not train)(x)
        scale = jnp.tanh(self.param("scale", nn.initializers.normal(1.0), (2 * D,)))
        policy = jax.checkpoint_policies.save_only_these_names("kernel")
        layers = nn.scan(
            nn.remat(self.layer, policy=policy) if self.remat else self.layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=L,
        )
        y, _ = (nn.jit(layers) if self.jit else layers)(train, name="layers")(x, scale)
        return nn.Dense(V)(y + x * scale.sum())


class NNXBlock(nnx.Module):
    """A layer with dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.linear = nnx.Linear(D, D, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(nnx.relu(self.linear(self.norm(x))))


class NNXStack(nnx.Module):
    """Layers in a scan."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        make = nnx.split_rngs(splits=L)(nnx.vmap(NNXBlock))
        self.layers = make(rngs)
        self.first = nnx.Linear(D, D, rngs=rngs)
        self.last = nnx.Linear(D, V, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        run = nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(lambda x, layer: layer(x))
        return self.last(run(self.first(x), self.layers))


def make_classes() -> Batch:
    return Batch(
        jax.random.normal(jax.random.key(1), (24, D)),
        jax.random.randint(jax.random.key(2), (24,), 0, V),
    )


def make_sequences() -> Batch:
    tokens = jax.random.randint(jax.random.key(3), (24, 9), 0, V)
    mask = jax.random.uniform(jax.random.key(4), (24, 8)) < 0.7
    return Batch(tokens[:, :-1], tokens[:, 1:], mask.astype(jnp.float32))


def transformer(**fields: Any) -> Transformer:
    sizes = {"vocab_size": V, "num_layers": L, "hidden_size": D, "num_heads": 2, "mlp_size": 2 * D}
    return Transformer(**nest_fields({**sizes, **fields}))


def train(model: Any, loss: Any, batch: Batch, mesh: dict[str, int], **options: Any) -> Any:
    """What a step of SGD changes, its loss, and the loss of an evaluation before it."""
    program = fsdp(
        model,
        optax.sgd(1.0),
        loss,
        batch=batch,
        mesh=make_mesh(mesh, jax.devices()[: math.prod(mesh.values())]),
        num_minibatches=3,
        min_weight_size=64,
        **options,
    )
    before = program.init(jax.random.key(0))
    params = jax.device_get(before.params)
    evaluated = jax.device_get(program.eval_step(before, batch)["loss"])
    state, losses = train_program(program, [batch])
    changes = jax.tree.map(lambda new, old: new - old, jax.device_get(state.params), params)
    return changes, losses, evaluated


@pytest.mark.slow
@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize(
    ("model", "loss", "mesh", "pipeline"),
    [
        (Stack(), classification_loss, {"stage": 4}, Pipeline(schedule="gpipe")),
        (Stack(jit=True, remat=True), classification_loss, {"stage": 2}, Pipeline(chunks=2)),
        (Stack(KernelBlock, remat=True), classification_loss, {"stage": 2}, Pipeline()),
        (NNXStack, classification_loss, {"stage": 4}, Pipeline(keep="inputs")),
        (
            transformer(num_experts=2, expert_axis="expert", remat="full", tied_head=True),
            mixture_of_experts_loss,
            {"expert": 2, "stage": 2},
            Pipeline(),
        ),
        (
            transformer(split_axis="model", sequence_parallel=True, overlap="ring", bos_token=1),
            language_model_loss,
            {"model": 2, "stage": 2},
            Pipeline(),
        ),
        (
            transformer(**GEMMA | QWEN | {"num_layers": 9, "split_axis": "model"}, remat="dots"),
            language_model_loss,
            {"model": 2, "stage": 2},
            Pipeline(chunks=2, keep="inputs"),
        ),
    ],
    ids=["linen", "interleaved", "kernel", "nnx", "experts", "ring", "gemma"],
)
def test_models_train_as_without_stages(
    model: Any, loss: Any, mesh: dict[str, int], pipeline: Pipeline
) -> None:
    batch = make_sequences() if isinstance(model, Transformer) else make_classes()
    options: dict[str, Any] = {"axis_name": ("data", "expert")} if "expert" in mesh else {}
    others = {axis: size for axis, size in mesh.items() if axis != "stage"}
    expected = train(model, loss, batch, {"data": 2} | others, **options)
    got = train(model, loss, batch, {"data": 2} | mesh, pipeline=pipeline, **options)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        # Without stages, other sizes of the mesh differ by a third of this.
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


def still(rngs: nnx.Rngs) -> NNXStack:
    """The layers of NNX without dropout."""
    model = NNXStack(rngs)
    model.eval()
    return model


def still_loss(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
    logits = apply_fn({"params": params}, batch.inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


@pytest.mark.slow
@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize(
    ("build", "options"),
    [
        (data_parallel, {}),
        (zero, {"stage": 1}),
        (fsdp, {"pipeline": Pipeline(chunks=2), "reduce_dtype": "float32"}),
        (fsdp, {}),  # No parameter is large enough to shard.
    ],
)
def test_layers_that_are_not_sharded_are_spread_all_the_same(build: Any, options: Any) -> None:
    batch = make_classes()
    mesh = make_mesh({"data": 2, "stage": 2}, jax.devices()[:4])
    options = {"pipeline": Pipeline(), "num_minibatches": 3, "mesh": mesh, **options}
    program = build(still, optax.sgd(1.0), still_loss, batch=batch, **options)
    assert program.layout.params["layers"]["linear"]["kernel"][0] == "stage"
    assert_same_as_one_device(program, batch, jax.random.key(0))


@pytest.mark.usefixtures("devices8")
def test_collections_that_change_are_refused() -> None:
    with pytest.raises(ValueError, match=r"changes collection \['batch_stats'\].*GroupNorm"):
        fsdp(
            Stack(norm=True),
            optax.sgd(1.0),
            classification_loss,
            batch=make_classes(),
            mesh=make_mesh({"data": 2, "stage": 2}, jax.devices()[:4]),
            num_minibatches=2,
            pipeline=Pipeline(),
        )


@pytest.mark.usefixtures("devices8")
def test_collections_that_stay_are_taken() -> None:
    def loss_fn(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
        del rng
        scores = apply_fn({"params": params}, batch.inputs)  # Its norm takes the running averages.
        return scores.mean(), {"loss": (scores.sum(), jnp.float32(scores.size))}

    mesh = make_mesh({"data": 2, "stage": 2}, jax.devices()[:4])
    options = {"batch": make_classes(), "mesh": mesh, "num_minibatches": 2}
    fsdp(Stack(norm=True), optax.sgd(1.0), loss_fn, pipeline=Pipeline(), **options)


@pytest.mark.usefixtures("devices8")
def test_parameters_of_layers_that_are_to_be_kept_are_refused() -> None:
    with pytest.raises(ValueError, match=r"keep_gathered, which names 'layers/.*', a parameter of"):
        fsdp(
            Stack(),
            optax.sgd(1.0),
            classification_loss,
            batch=make_classes(),
            mesh=make_mesh({"data": 2, "stage": 2}, jax.devices()[:4]),
            num_minibatches=2,
            pipeline=Pipeline(),
            min_weight_size=16,
            keep_gathered=("layers",),
        )


def test_schedules_that_take_minutes_to_lay_out_are_refused() -> None:
    strategy: Any = SimpleNamespace(name="fsdp", reshard_after_forward=True)
    mesh: Any = SimpleNamespace(shape={"stage": 2})
    assert Pipeline(chunks=512).on_mesh(mesh, strategy, {}, 256).chunks == 512
    message = r"fsdp: pipeline= with chunks=512 .* 2 stages and num_minibatches=257, .* 262144"
    with pytest.raises(ValueError, match=message):
        Pipeline(chunks=512).on_mesh(mesh, strategy, {}, 257)
