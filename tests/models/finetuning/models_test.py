"""Models as people write them, partly trained: shared weights, nested loops, statistics."""

import fnmatch
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import Batch, data_parallel, ema_params, fsdp, lora, make_mesh, params_ema, zero
from manualpar.models.finetuning.lora import ADAPTERS
from tests.models.finetuning.adapted_models import by_path

D8 = {"data": 8}
TOKENS = np.random.default_rng(0).integers(0, 24, (16, 8))
IMAGES = np.random.default_rng(1).normal(size=(16, 8, 8, 3)).astype(np.float32)
LABELS = np.random.default_rng(2).integers(0, 24, (16,))


class Tied(nn.Module):
    """One table below and above, one layer used twice, and flax's attention."""

    @nn.compact
    def __call__(self, tokens_BS: jax.Array, train: bool = False) -> jax.Array:
        embed = nn.Embed(24, 16, name="embed")
        x_BSD = embed(tokens_BS)
        y_BSD = nn.LayerNorm(name="norm")(x_BSD)
        attention = nn.MultiHeadDotProductAttention(4, name="attention")
        x_BSD = x_BSD + attention(y_BSD, mask=nn.make_causal_mask(tokens_BS))
        shared = nn.Dense(16, name="shared")
        x_BSD = x_BSD + shared(nn.gelu(shared(x_BSD)))
        return embed.attend(nn.RMSNorm(name="last")(x_BSD))


class Inner(nn.Module):
    """A layer of the inner loop."""

    @nn.compact
    def __call__(self, x_BSD: jax.Array) -> tuple[jax.Array, None]:
        return x_BSD + nn.Dense(16, name="fc")(nn.gelu(x_BSD)), None


def loop(layer: Any, length: int, name: str) -> nn.Module:
    over = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": length}
    return nn.scan(nn.remat(layer), **over)(name=name)


class Outer(nn.Module):
    """A layer of the outer loop, which has a loop in it."""

    @nn.compact
    def __call__(self, x_BSD: jax.Array) -> tuple[jax.Array, None]:
        x_BSD, _ = loop(Inner, 2, "inner")(x_BSD)
        return x_BSD + nn.Dense(16, name="after")(nn.LayerNorm(name="norm")(x_BSD)), None


class Nested(nn.Module):
    """A loop in a loop, each computed again."""

    @nn.compact
    def __call__(self, tokens_BS: jax.Array, train: bool = False) -> jax.Array:
        x_BSD = nn.Embed(24, 16, name="embed", dtype=jnp.float32)(tokens_BS)
        x_BSD, _ = loop(Outer, 3, "outer")(x_BSD)
        return nn.Dense(24, name="head")(x_BSD)


class Normed(nn.Module):
    """Convolutions, and two kinds of batch statistics."""

    axis: str | None = None

    @nn.compact
    def __call__(self, x_BHWC: jax.Array, train: bool = False) -> jax.Array:
        x_BHWC = nn.Conv(16, (3, 3), name="conv")(x_BHWC)
        x_BHWC = nn.BatchNorm(not train, axis_name=self.axis, name="norm")(x_BHWC)
        x_BHWC = nn.Conv(16, (3, 3), feature_group_count=2, name="grouped")(nn.gelu(x_BHWC))
        x_BD = nn.Dense(32, name="hidden")(nn.gelu(x_BHWC).mean((1, 2)))
        x_BD = nn.gelu(nn.BatchNorm(True, name="still")(x_BD))
        return nn.Dense(24, name="head")(x_BD)


def loss_fn(params: Any, apply_fn: Any, batch: Any, rng: Any) -> Any:
    """The cross entropy of the next tokens, or of classes with statistics that are updated."""
    del rng
    given = {"params": params}, batch.inputs
    if batch.inputs.ndim == 4:
        logits, _ = apply_fn(*given, train=True, mutable=["batch_stats"])
    else:
        logits = apply_fn(*given, train=True)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), batch.labels
    )
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


# The model, what it is among programs, its inputs, what is trained of it, and what is adapted.
MODELS: dict[str, Any] = {
    "tied": (Tied(), Tied(), TOKENS, ("embed/*", "*/bias"), {"attention/*": 2, "shared": 3}),
    "nested": (Nested(), Nested(), TOKENS, ("*/inner/*",), {"*/fc": 2, "*/after": 3}),
    "normed": (Normed(), Normed("data"), IMAGES, ("norm/*", "head/*"), {"hidden": 2, "head": 2}),
}
STRATEGIES: dict[str, Any] = {
    "dp": data_parallel,
    "fsdp": functools.partial(fsdp, min_weight_size=0),
    "reshard": functools.partial(
        fsdp, min_weight_size=0, pad=True, reshard_after_forward=True, num_minibatches=2
    ),
    "zero": functools.partial(zero, stage=2, min_weight_size=0),
}


def begun(path: Any, x: jax.Array) -> jax.Array:
    """An initial value; where that is zero or one it is as if it had been trained."""
    key = jax.random.fold_in(jax.random.key(1), len(jax.tree_util.keystr(path)))
    is_constant = path[-1].key in ("lora_b", "bias", "scale")
    return jax.random.normal(key, x.shape) / 4 if is_constant else x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy", "adapted", "frozen_dtype"),
    [
        ("tied", "zero", False, None),
        ("tied", "fsdp", True, "bfloat16"),
        ("nested", "reshard", True, None),
        ("nested", "fsdp", False, "bfloat16"),
        ("normed", "fsdp", False, "bfloat16"),
        ("normed", "dp", True, None),
    ],
)
def test_what_is_trained_and_its_average_are_as_on_one_device(
    name, strategy, adapted, frozen_dtype, devices8
):
    del devices8
    plain, ours, inputs, globs, targets = MODELS[name]
    options: dict[str, Any] = {"frozen_dtype": frozen_dtype} if frozen_dtype else {}
    if adapted:
        plain, ours = (lora(model, targets, alpha=4) for model in (plain, ours))
        globs = ADAPTERS
    else:
        options["trainable"] = globs

    def is_trained(path: str) -> bool:
        return any(fnmatch.fnmatchcase(path, glob) for glob in globs)

    variables = jax.jit(lambda: nn.meta.unbox(plain.init(jax.random.key(0), inputs)))()
    params = jax.tree.map_with_path(begun, variables.pop("params"))
    if frozen_dtype:
        params = jax.tree.map_with_path(
            lambda path, x: (
                x
                if is_trained(jax.tree_util.keystr(path, simple=True, separator="/"))
                else x.astype(frozen_dtype)
            ),
            params,
        )
    batch = Batch(inputs, np.roll(inputs, -1, 1) if inputs.ndim == 2 else LABELS)
    tx = optax.chain(optax.sgd(1.0), params_ema(0.5))
    build = STRATEGIES[strategy]
    program = build(ours, tx, loss_fn, mesh=make_mesh(D8), batch=batch, **options)
    state, metrics = program.train_step(program.init_from({"params": params, **variables}), batch)

    @jax.jit
    def on_one_device(params: Any) -> Any:
        def loss(params: Any) -> Any:
            def apply_fn(own: Any, *args: Any, **kwargs: Any) -> Any:
                return plain.apply({**variables, **own}, *args, **kwargs)

            return loss_fn(params, apply_fn, batch, None)[0]

        return jax.value_and_grad(loss)(params)

    loss, grads = on_one_device(params)
    np.testing.assert_allclose(metrics["loss"][0] / metrics["loss"][1], loss, rtol=2e-5)
    before, grads = by_path(params), by_path(grads)
    after, average = (by_path(program.whole(each)["params"]) for each in (state, ema_params(state)))
    assert before.keys() == after.keys() == average.keys()
    assert any(map(is_trained, before))
    for path, x in before.items():
        assert after[path].dtype == x.dtype
        if is_trained(path):
            np.testing.assert_allclose(after[path], x - grads[path], rtol=1e-4, atol=3e-6)
            mean = (x + after[path]) / 2
            np.testing.assert_allclose(average[path], mean, rtol=1e-5, atol=1e-6, err_msg=path)
            # The bias of keys changes no softmax.
            assert np.abs(grads[path]).max() > 1e-5 or path == "attention/key/bias"
        else:
            assert after[path].tobytes() == average[path].tobytes() == x.tobytes(), path
