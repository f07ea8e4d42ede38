"""Layers that reduce over an axis by a name that the mesh does not have."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from manualpar import Batch, data_parallel, fsdp, hsdp, make_mesh, zero
from tests.one_device import name_of, slow, train_on_one_device, train_program


class Norms(nn.Module):
    """BatchNorm with flax's own name for the axis, in a field of the model's and as it stands."""

    axis_name: str | None = "batch"

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, axis_name=self.axis_name)(x)
        x = nn.tanh(nn.Dense(8)(x))
        norm = nn.BatchNorm(not train, axis_name=self.axis_name, name="last")
        return nn.Dense(4)(norm(x))


class NNXNorms(nnx.Module):
    def __init__(self, rngs, axis_name="batch"):
        self.norm = nnx.BatchNorm(8, axis_name=axis_name, rngs=rngs)
        self.dense = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.norm(x))


def loss_fn(params, apply_fn, batch, rng):
    out = apply_fn({"params": params}, batch.inputs, train=True)
    losses = jnp.square(out - batch.labels).mean(-1)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


RNG = np.random.default_rng(0)
BATCH = Batch(
    # Devices' own examples differ from those of others.
    (RNG.normal(size=(16, 8)) + np.arange(16)[:, None]).astype(np.float32),
    RNG.normal(size=(16, 4)).astype(np.float32),
)
ALIASES = {"batch": "data"}


def build(builder, model=None, axes=None, **options):
    if builder is not data_parallel:
        options.setdefault("min_weight_size", 1)
    mesh = make_mesh(axes or {"data": 8})
    options = {"mesh": mesh, "batch": BATCH, "axis_aliases": ALIASES, **options}
    return builder(model or Norms(), optax.sgd(0.5), options.pop("loss", loss_fn), **options)


GROUPS = {"axis_aliases": {"batch": ("replica", "data")}}


@pytest.fixture(scope="module")
def reference():
    return train_on_one_device(Norms(None), optax.sgd(0.5), [BATCH] * 2, loss_fn)


@pytest.mark.parametrize(
    ("builder", "axes", "options"),
    [
        (fsdp, {"data": 8}, {}),
        (data_parallel, {"data": 8}, {"mode": "auto"}),
        slow(hsdp, {"replica": 2, "data": 4}, GROUPS),
        slow(hsdp, {"replica": 2, "data": 4}, {**GROUPS, "mode": "auto"}),
        slow(fsdp, {"data": 4, "model": 2}, {"mode": "explicit"}),
        slow(fsdp, {"data": 2, "model": 4}, {}),
        slow(fsdp, {"data": 1, "model": 8}, {}),
        slow(zero, {"data": 8}, {"stage": 2, "mode": "auto-unconstrained"}),
        slow(fsdp, {"batch": 8}, {"axis_name": "batch", "axis_aliases": {"batch": "batch"}}),
        slow(fsdp, {"batch": 8}, {"axis_name": "batch", "axis_aliases": {}, "mode": "auto"}),
    ],
    ids=name_of,
)
def test_an_alias_gives_the_statistics_of_the_global_batch(
    devices8, reference, builder, axes, options
):
    program = build(builder, axes=axes, **options)
    state, losses = train_program(program, [BATCH] * 2)
    np.testing.assert_allclose(losses, reference.losses, rtol=1e-4)
    for got, expected in (
        (state.params, reference.params),
        (state.collections, reference.collections),
    ):
        chex.assert_trees_all_close(jax.device_get(got), expected, rtol=1e-3, atol=1e-5)
    assert np.isfinite(program.eval_step(state, BATCH)["loss"][0])


@pytest.mark.parametrize("mode", ["manual", pytest.param("auto", marks=pytest.mark.slow)])
def test_nnx_modules_are_renamed_too(devices8, mode):
    def loss(params, apply_fn, batch, rng):
        return loss_fn(params, apply_fn, batch, rng)

    results = []
    for axis_name, options in (("batch", {"mode": mode}), (None, {"mode": "auto"})):
        model = lambda rngs, name=axis_name: NNXNorms(rngs, name)  # noqa: E731
        program = build(fsdp, model, loss=loss, **options)
        results.append(train_program(program, [BATCH] * 2)[0])
    got, expected = (jax.device_get((s.params, s.collections)) for s in results)
    chex.assert_trees_all_close(got, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("mode", ["auto", "explicit", "auto-unconstrained"])
@pytest.mark.parametrize("model", [Norms("data"), lambda rngs: NNXNorms(rngs, "data")])
def test_where_the_batch_is_global_its_own_axes_need_no_alias(devices8, model, mode):
    build(fsdp, model, axis_aliases={}, mode=mode)


def test_errors_of_somebody_elses_stay_what_they_are(devices8):
    def asserts(params, apply_fn, batch, rng):
        raise AssertionError

    with pytest.raises(AssertionError):
        build(data_parallel, loss=asserts)
    with pytest.raises(NameError, match="'nowhere' is not defined"):
        build(data_parallel, loss=lambda *args: nowhere)  # noqa: F821
