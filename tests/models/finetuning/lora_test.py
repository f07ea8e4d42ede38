"""Adapters of low rank on models that know nothing of them, against the same on one device."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from manualpar import (
    Batch,
    Column,
    Pipeline,
    Row,
    data_parallel,
    fsdp,
    hsdp,
    lora,
    make_mesh,
    tensor_parallel,
    zero,
)
from manualpar.core.parameters.placement import path_name
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss
from tests.one_device import slow_unless

D8, D24 = {"data": 8}, {"data": 2, "model": 4}
OURS: dict[str, Any] = {"vocab_size": 16, "hidden_size": 16, "num_heads": 4, "mlp_size": 32}
OURS |= {"num_layers": 2}
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
    return path.endswith(("/lora_a", "/lora_b"))


def by_path(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves_with_path(nn.meta.unbox(tree))
    return {path_name(path): np.asarray(x) for path, x in leaves}


def parameters(model: Any) -> Any:
    """Initial ones, with `lora_b` as if it had been trained."""

    def trained(path: Any, x: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(1), len(path_name(path)))
        return jax.random.normal(key, x.shape) / 4 if path_name(path).endswith("lora_b") else x

    variables = jax.jit(lambda: nn.meta.unbox(model.init(jax.random.key(0), BATCH.inputs)))()
    return jax.tree.map_with_path(trained, variables["params"])


def check(model: Any, build: Any, loss_fn: Any = loss_of_logits, given: Any = None) -> Any:
    """A step of SGD changes adapters as one on one device does, and nothing else.

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
    before, after, grads = by_path(params), by_path(program.whole(state)["params"]), by_path(grads)
    assert before.keys() == after.keys()
    for path, x in before.items():
        if is_adapter(path):
            assert np.abs(grads[path]).max() > 1e-4, path
            np.testing.assert_allclose(after[path], x - grads[path], rtol=1e-4, atol=2e-6)
        else:
            np.testing.assert_array_equal(after[path], x, err_msg=path)
    return program


def on(strategy: Any, mesh: dict[str, int], **options: Any) -> Any:
    if strategy is not data_parallel:
        options = {"min_weight_size": 0, **options}
    return functools.partial(strategy, mesh=make_mesh(mesh), **options)


@pytest.mark.slow
def test_the_base_and_what_it_computes_are_as_without_adapters():
    base = Somebodys()
    model = lora(base, SOMEBODYS, alpha=4)
    expected, found = (m.init(jax.random.key(3), BATCH.inputs) for m in (base, model))
    expected_by_path, found_by_path = by_path(expected), by_path(found)
    for path, x in expected_by_path.items():
        np.testing.assert_array_equal(found_by_path.pop(path), x, err_msg=path)
    assert {path.removeprefix("params/"): x.shape for path, x in found_by_path.items()} == {
        "head/lora_a": (16, 4),
        "head/lora_b": (4, 16),
        "layers/down/lora_a": (3, 32, 2),
        "layers/down/lora_b": (3, 2, 16),
        "layers/heads/lora_a": (3, 16, 2),
        "layers/heads/lora_b": (3, 2, 4, 4),
        "layers/out/lora_a": (3, 4, 4, 3),
        "layers/out/lora_b": (3, 3, 16),
        "layers/up/lora_a": (3, 16, 4),
        "layers/up/lora_b": (3, 4, 32),
    }
    a = found_by_path["params/layers/out/lora_a"]
    assert np.abs(a).max() <= 1 / 4  # 1/sqrt(4 * 4).
    assert np.abs(a[0] - a[1]).max() > 0.01
    np.testing.assert_array_equal(
        base.apply(expected, BATCH.inputs), model.apply(found, BATCH.inputs)
    )


@pytest.mark.slow
def test_an_adapter_is_a_product_of_low_rank_added_to_the_kernel():
    model = lora(Somebodys(scan=False), SOMEBODYS, alpha=3)
    params = parameters(model)
    logits = model.apply({"params": params}, BATCH.inputs)
    for block in (params["layer_0"], params["layer_1"]):
        for name, inputs in (("heads", 1), ("out", 2), ("up", 1), ("down", 1)):
            layer = block[name]
            a, b = layer.pop("lora_a"), layer.pop("lora_b")
            assert a.ndim == inputs + 1
            layer["kernel"] += 3 / b.shape[0] * jnp.tensordot(a, b, 1)
    head = params["head"]
    head["kernel"] += 3 / 4 * head.pop("lora_a") @ head.pop("lora_b")
    expected = Somebodys(scan=False).apply({"params": params}, BATCH.inputs)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("name", [slow_unless([("fsdp",)], name) for name in STRATEGIES])
def test_a_step_of_somebodys_model_is_that_of_one_device(name):
    check(lora(Somebodys(), SOMEBODYS, alpha=4), STRATEGIES[name])


TRANSFORMERS = {
    "fsdp": (Transformer(**OURS), on(fsdp, D8)),
    "split": (Transformer(**OURS, split_axis="model", num_kv_heads=2), on(fsdp, D24)),
    "sequence": (
        Transformer(**OURS, split_axis="model", sequence_parallel=True, remat="full"),
        on(fsdp, D24, num_minibatches=2),
    ),
    "ring": (
        Transformer(**OURS, split_axis="model", sequence_parallel=True, overlap="ring"),
        on(fsdp, D24),
    ),
    "unscanned": (
        Transformer(**OURS, split_axis="model", scan_layers=False, qkv_bias=True),
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
    "explicit": (Transformer(**OURS, split_axis="model"), on(fsdp, D24, mode="explicit")),
    "context": (
        Transformer(**OURS, context_axis="context"),
        on(fsdp, {"data": 4, "context": 2}, context_axis="context"),
    ),
    "stages": (
        Transformer(**OURS),
        on(fsdp, {"data": 4, "stage": 2}, num_minibatches=2, pipeline=Pipeline("stage")),
    ),
}


@pytest.mark.parametrize("name", [slow_unless((), name) for name in TRANSFORMERS])
def test_a_step_of_our_transformer_is_that_of_one_device(name):
    model, build = TRANSFORMERS[name]
    check(lora(model, ALL_OF_OURS, alpha=4), build, language_model_loss)


PLAN: Any = {"*/heads": Column(-2), "*/out": Row(-3), "*/up": Column(), "*/down": Row()}


@pytest.mark.slow
def test_a_step_of_a_model_with_a_plan_is_that_of_one_device():
    model = tensor_parallel(Somebodys(), PLAN)
    check(lora(model, SOMEBODYS, alpha=4), on(fsdp, D24))


class Batched(nn.Module):
    """Layers that cannot be adapted."""

    @nn.compact
    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        x_BSD = nn.Embed(16, 16, name="embed")(tokens_BS)
        x_BSD = nn.Einsum((16, 16), "bsd,fd->bsf", use_bias=False, name="backwards")(x_BSD)
        each = nn.vmap(
            nn.Dense,
            in_axes=None,
            out_axes=-1,
            variable_axes={"params": 1},
            split_rngs={"params": True},
            axis_size=3,
        )
        x_BSD = each(16, name="each")(x_BSD).sum(-1)
        return nn.DenseGeneral(4, batch_dims=(0,), name="batched")(x_BSD)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"embed": 2}, "'embed' is a Embed, expected one of SplitDense, nn.Dense"),
        ({"backwards": 2}, "'bsd,fd->bsf', expected a kernel whose first dims"),
        ({"each": 2}, "loop that stacks kernels .16, 16. as .16, 3, 16."),
        ({"batched": 2}, "batch_dims=.0,., expected none"),
        ({"*embedding": 2}, "matches no module that has parameters of its own.*'embed'"),
        ({"*": 2}, "'backwards' computes|'batched' has batch_dims"),
        ({"*s*": 2, "backwards": 1}, "'backwards' has more than one rank"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(targets, message):
    with pytest.raises(ValueError, match=message):
        lora(Batched(), targets, alpha=1).init(jax.random.key(0), BATCH.inputs)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((nnx.Linear(2, 2, rngs=nnx.Rngs(0)), {"*": 2}), TypeError, "nnx.Module Linear.*nnx.LoRA"),
        (("model", {"*": 2}), TypeError, "model is 'model'"),
        ((Somebodys(), {}), TypeError, "targets is {}, expected ranks by globs"),
        ((Somebodys(), {"head": 0}), ValueError, "'head': 0, expected a rank of at least 1"),
        ((Somebodys(), {"head": True}), TypeError, "'head': True, expected a glob and a rank"),
        ((Somebodys(), {"head": 1}, "2"), TypeError, "alpha is '2', expected a number"),
        ((Somebodys(), {"head": 1}, -1), ValueError, "alpha is -1, expected a finite number"),
        (
            (tensor_parallel(Somebodys(), PLAN, sequence=True, overlap="ring"), {"head": 1}),
            ValueError,
            "overlap='ring', expected 'none'",
        ),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(arguments, error, message):
    model, targets, *alpha = arguments
    with pytest.raises(error, match=message):
        lora(model, targets, alpha=alpha[0] if alpha else 1.0)
