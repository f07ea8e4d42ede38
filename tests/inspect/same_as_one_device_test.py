"""The guard that no type gives, held against programs that are right and others that are not."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from optax import sgd

from manualpar import (
    Batch,
    abstract_mesh,
    assert_same_as_one_device,
    data_parallel,
    fsdp,
    gather_examples,
    hsdp,
    make_mesh,
    zero,
)
from manualpar.layers import enter, leave, split

MODEL = nn.Sequential([nn.Dense(9), nn.tanh, nn.Dense(5, use_bias=False)])


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(6, 9, rngs=rngs)
        self.down = nnx.Linear(9, 5, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


class Normed(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)(nn.Dense(8)(x))
        return nn.Dense(5)(jnp.tanh(x))


def make_batch():
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(16, size)).astype(np.float32) for size in (6, 5))
    return Batch(x, y, mask=(rng.random(16) < 0.7).astype(np.float32))


def masked_loss(params, apply_fn, batch, rng):
    del rng
    losses = ((apply_fn({"params": params}, batch.inputs) - batch.labels) ** 2).mean(-1)
    total, count = (losses * batch.mask).sum(), batch.mask.sum()
    return total / jnp.where(count > 0, count, 1), {"loss": (total, count), "one": (1.0, 1)}


def contrastive_loss(params, apply_fn, batch, rng):
    del rng
    z = apply_fn({"params": params}, batch.inputs)
    every = gather_examples(batch.labels)
    losses = jax.nn.logsumexp(z @ every.T, 1) - (z * batch.labels).sum(-1)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


def uncoupled_loss(params, apply_fn, batch, rng):
    z = apply_fn({"params": params}, batch.inputs)
    losses = jax.nn.logsumexp(z @ batch.labels.T, 1) - (z * batch.labels).sum(-1)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


def averaged_loss(params, apply_fn, batch, rng):
    """The same on all devices by its type."""
    losses = ((apply_fn({"params": params}, batch.inputs) - batch.labels) ** 2).mean(-1)
    penalty = sum((x**2).sum() for x in jax.tree.leaves(nn.unbox(params)))
    return jax.lax.pmean(losses.mean() + penalty, "data"), {"loss": (losses.sum(), losses.size)}


def build(builder=data_parallel, model=MODEL, loss=masked_loss, axes=None, **options):
    mesh = make_mesh(axes or {"data": 8})
    return builder(model, sgd(1.0), loss, mesh=mesh, batch=make_batch(), **options)


SHARDED = {"builder": fsdp, "min_weight_size": 0}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="dp", marks=SLOW),
        pytest.param({"builder": zero, "stage": 1, "pad": True}, id="zero1", marks=SLOW),
        pytest.param({"builder": zero, "stage": 2, "num_minibatches": 2}, id="zero2", marks=SLOW),
        pytest.param({**SHARDED, "pad": True, "num_minibatches": 2}, id="fsdp, padded"),
        pytest.param({**SHARDED, "gather_dtype": "bfloat16"}, id="bfloat16", marks=SLOW),
        pytest.param({**SHARDED, "param_dtype": "bfloat16"}, id="in bfloat16", marks=SLOW),
        pytest.param({**SHARDED, "model": NNXModel, "pad": True}, id="NNX", marks=SLOW),
        pytest.param({**SHARDED, "mode": "auto", "pad": True}, id="auto", marks=SLOW),
        pytest.param({**SHARDED, "mode": "explicit", "model": NNXModel}, id="explicit", marks=SLOW),
        pytest.param({**SHARDED, "model": Normed("data")}, id="global statistics", marks=SLOW),
        pytest.param({**SHARDED, "model": Normed(), "mode": "auto"}, id="auto, normed", marks=SLOW),
        pytest.param(
            {"builder": hsdp, "axes": {"replica": 2, "data": 4}, "loss": contrastive_loss},
            id="hsdp, coupled",
        ),
        pytest.param(
            {**SHARDED, "loss": contrastive_loss, "mode": "auto"}, id="auto, coupled", marks=SLOW
        ),
        pytest.param(
            {**SHARDED, "loss": contrastive_loss, "mode": "explicit"},
            id="explicit, coupled",
            marks=SLOW,
        ),
        pytest.param({**SHARDED, "loss": averaged_loss, "pad": True}, id="the same everywhere"),
    ],
)
def test_a_program_is_the_same_as_one_device(devices8, options):
    assert_same_as_one_device(build(**options), make_batch(), jax.random.key(0))


def test_what_couples_examples_and_gathers_none_is_found(devices8):
    program = build(loss=uncoupled_loss, num_minibatches=2)
    with pytest.raises(AssertionError) as caught:
        assert_same_as_one_device(program, make_batch(), jax.random.key(0))
    message = str(caught.value)
    assert message.startswith("data_parallel on 8 devices is not the same as one device (rtol=")
    for words in ("the loss is ", "metrics['loss'] is ", "gather_examples", "num_minibatches=2"):
        assert words in message
    assert "batch_stats" not in message


def test_the_worst_gradient_is_named_with_its_ratio(devices8):
    def loss_fn(params, apply_fn, batch, rng):
        losses = ((apply_fn({"params": params}, batch.inputs) - batch.labels) ** 2).mean(-1)
        # By hand, and forgotten that the program takes the mean over the devices already.
        return losses.sum() / 16, {"loss": (losses.sum(), losses.size)}

    program = build(loss=loss_fn)
    message = (
        r"the loss is .*; the gradient of layers_\d/\w+ is 0.125 of one device's, off by 0.875"
    )
    with pytest.raises(AssertionError, match=message):
        assert_same_as_one_device(program, make_batch(), jax.random.key(0))


def test_statistics_of_a_devices_own_examples_are_named(devices8):
    with pytest.raises(AssertionError, match=r"batch_stats.*nn.BatchNorm\(axis_name=...\)"):
        assert_same_as_one_device(build(model=Normed()), make_batch(), jax.random.key(0))


def test_what_cannot_be_compared_is_refused(devices8):
    def random_loss(params, apply_fn, batch, rng):
        loss, metrics = masked_loss(params, apply_fn, batch, rng)
        return loss * jax.random.uniform(rng), metrics

    with pytest.raises(ValueError, match=r"loss_fn depends on its rng.*Switch dropout"):
        assert_same_as_one_device(build(loss=random_loss), make_batch(), jax.random.key(0))
    program = data_parallel(
        MODEL,
        sgd(1.0),
        masked_loss,
        mesh=abstract_mesh({"data": 8}, num_devices=8),
        batch=make_batch(),
    )
    with pytest.raises(ValueError, match="abstract mesh"):
        assert_same_as_one_device(program, make_batch(), jax.random.key(0))


class SplitMLP(nn.Module):
    """Split over `model`; `centered` takes a mean over those of the features that a device has."""

    centered: bool = False

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.normal(0.3)
        up = self.param("up", split(init, (None, "model")), (6, 8))
        down = self.param("down", split(init, ("model", None)), (8, 5))
        h = jnp.tanh(enter(x, "model") @ up)
        h = h - h.mean(-1, keepdims=True) if self.centered else h
        return leave(h @ down, "model") + self.param("bias", init, (1, 5))


def test_split_features_that_no_type_tells_from_whole_ones(devices8):
    mesh, batch = make_mesh({"data": 4, "model": 2}, devices8), make_batch()
    right, wrong = (
        fsdp(SplitMLP(centered), sgd(0.1), masked_loss, mesh=mesh, batch=batch, min_weight_size=1)
        for centered in (False, True)
    )
    assert_same_as_one_device(right, batch, jax.random.key(0))
    with pytest.raises(AssertionError, match=r"the loss is .*up"):
        assert_same_as_one_device(wrong, batch, jax.random.key(0))
