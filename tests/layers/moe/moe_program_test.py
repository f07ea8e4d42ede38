"""A model with experts trains on every mesh as on one device, whatever the strategy."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict

from manualpar import Batch, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.inspect import trace_collectives
from manualpar.layers import MoE, auxiliary_loss
from tests.one_device import train_on_one_device, train_program

VOCAB, B, S, D = 16, 16, 8, 8
BOTH = ("data", "expert")
DATA_EXPERT, ALL = {"data": 2, "expert": 4}, {"data": 2, "expert": 2, "model": 2}


class Block(nn.Module):
    """A layer of the scanned model."""

    moe: FrozenDict

    @nn.compact
    def __call__(self, x, _):
        """`x` and what a scan wants."""
        x = x + nn.Dense(D, name="mix")(nn.RMSNorm(name="mix_norm")(x))
        return x + MoE(**self.moe, name="moe")(nn.RMSNorm(name="moe_norm")(x)), None


class Model(nn.Module):
    """A language model without attention."""

    moe: FrozenDict

    @nn.compact
    def __call__(self, tokens):
        """The logits."""
        x = nn.Embed(VOCAB, D, name="embed")(tokens)
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0, "losses": 0, "intermediates": 0, "router": 0},
            split_rngs={"params": True},
            length=2,
            in_axes=nn.broadcast,
        )
        x, _ = layers(self.moe, name="layers")(x, None)
        return nn.Dense(VOCAB, name="head")(x)


def loss_fn(params, apply_fn, batch, rng):
    del rng
    logits, sown = apply_fn({"params": params}, batch.inputs, mutable=["losses", "intermediates"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    total, count = (loss * batch.mask).sum(), batch.mask.sum()
    auxiliary, metrics = auxiliary_loss(sown, batch.mask.sum(-1), load_balance=0.3, router_z=0.1)
    value = total / jnp.maximum(count, 1) + auxiliary
    return value, {"loss": (value * count, count), **metrics}


def make_batch(seed=0):
    tokens = jax.random.randint(jax.random.key(seed), (B, S + 1), 0, VOCAB)
    valid = jnp.array([8, 1, 3, 0, 8, 2, 7, 5] * (B // 8))  # Tokens of a sequence: very unequal.
    return Batch(tokens[:, :-1], tokens[:, 1:], jnp.arange(S)[None] < valid[:, None])


def model(**fields):
    return Model(FrozenDict({"num_experts": 8, "mlp_size": 16, "capacity_factor": 0.7} | fields))


@functools.cache
def _one_device(model):
    trained = train_on_one_device(model, optax.sgd(1.0), [make_batch()], loss_fn)
    return nn.meta.unbox(trained)


def _program(build, model, sizes, tx=None, **options):
    options = options if build is data_parallel else {"min_weight_size": 1} | options
    mesh, tx = make_mesh(sizes), tx or optax.sgd(1.0)
    return build(model, tx, loss_fn, mesh=mesh, batch=make_batch(), **options)


ALL_IN = {"model_axis": "model", "num_shared": 1, "bias_rate": 0.25, "gates": "sigmoid"}
CASES = [
    (fsdp, ALL_IN, ALL, {"axis_name": BOTH}),
    (fsdp, {}, DATA_EXPERT, {"axis_name": BOTH, "num_minibatches": 2}),
    (fsdp, {"capacity_factor": None}, DATA_EXPERT, {"axis_name": BOTH, "num_minibatches": 2}),
    (fsdp, {}, {"expert": 8}, {"axis_name": "expert", "reshard_after_forward": False}),
    (fsdp, {}, DATA_EXPERT, {"axis_name": "data"}),
    (fsdp, {"capacity_factor": None}, DATA_EXPERT, {"axis_name": "data"}),
    (fsdp, {"axis": BOTH}, DATA_EXPERT, {"axis_name": BOTH}),
    (fsdp, {"axis": "data"}, {"data": 8}, {}),
    (fsdp, ALL_IN, ALL, {"axis_name": "data"}),
    (fsdp, {}, {"data": 4, "expert": 2}, {"axis_name": BOTH, "communicate_every": "step"}),
    (zero, {}, DATA_EXPERT, {"axis_name": BOTH, "stage": 1}),
    (zero, {}, DATA_EXPERT, {"axis_name": BOTH, "stage": 2, "num_minibatches": 2}),
    (data_parallel, {"axis": BOTH}, DATA_EXPERT, {"axis_name": BOTH}),
    (hsdp, {}, {"replica": 2, "data": 2, "expert": 2}, {"axis_name": ("data", "expert")}),
    (hsdp, {"axis": "replica"}, {"replica": 2, "data": 4}, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda c: f"{c[0].__name__}-{'-'.join(c[1])}-{dict(c[2])}",
)
def test_every_gradient_is_that_of_one_device(case, devices8):
    del devices8
    build, fields, sizes, options = case
    expected = _one_device(model(**fields))
    program = _program(build, model(**fields), sizes, **options)
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    assert all(collective.purpose for collective in trace_collectives(traced))
    state, losses = train_program(program, [make_batch()])
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-6)

    def difference(got, want, before):  # SGD(1.0) has subtracted the gradient.
        got, want = np.asarray(got) - before, np.asarray(want) - before
        return np.abs(got - want).max() / np.abs(want).max()

    differences = jax.tree.map(difference, state.params, expected.params, expected.initial)
    assert max(jax.tree.leaves(differences)) < 5e-6, differences
    chex.assert_trees_all_equal(
        jax.device_get(state.collections),
        {k: v for k, v in expected.collections.items() if k == "router"},
    )


@pytest.mark.parametrize(
    ("build", "sizes", "options"),
    [
        pytest.param(
            *(hsdp, {"replica": 2, "expert": 2}, {"axis_name": "expert"}), marks=pytest.mark.slow
        ),
        (zero, {"data": 2, "expert": 2}, {"axis_name": BOTH, "stage": 1}),
    ],
)
def test_what_codes_send_and_what_they_leave_out_is_the_gradient(devices8, build, sizes, options):
    """A residual is in units of the mean, as it is on any other mesh that a run may go on with."""
    x = np.random.default_rng(0).normal(size=(8, 4, D)).astype(np.float32)
    layer, batch = MoE(num_experts=2, mlp_size=16, top_k=1, gates="sigmoid"), Batch(x, x)

    def loss_fn(params, apply_fn, batch, rng):
        losses = jnp.square(apply_fn({"params": params}, batch.inputs) - 1).mean((1, 2))
        return losses.mean(), {"loss": (losses.sum(), losses.size)}

    codes = {"reduce_code": "int4", "error_feedback": True, "min_weight_size": 16}
    options = {"mesh": make_mesh(sizes, devices8[:4]), "batch": batch, **codes, **options}
    program = build(layer, optax.sgd(1.0), loss_fn, **options)
    state = program.init(jax.random.key(0))
    before = jax.device_get(state.params)
    grad = jax.grad(lambda params: loss_fn(params, layer.apply, batch, None)[0])
    expected = jax.jit(grad)(before)
    state, _ = jax.device_get(program.train_step(state, batch))
    for name in ("gate", "up", "down"):
        sent = before[name] - state.params[name]
        assert np.abs(sent - expected[name]).max() > 1e-3
        left_out = state.local["residuals"][name].mean(0)
        np.testing.assert_allclose(sent + left_out, expected[name], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("axis_name", [BOTH, "data"])
def test_the_bias_follows_the_load_of_all_devices_and_evaluation_leaves_it(axis_name, devices8):
    del devices8
    biased, tx = model(bias_rate=0.1, capacity_factor=None), optax.sgd(0.1)
    batches = [make_batch(seed) for seed in range(4)]
    expected = train_on_one_device(biased, tx, batches, loss_fn)
    program = _program(fsdp, biased, DATA_EXPERT, tx, axis_name=axis_name)
    state, losses = train_program(program, batches)
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    got = jax.device_get(state.collections["router"])
    chex.assert_trees_all_close(got, expected.collections["router"], atol=1e-6)
    (bias,) = jax.tree.leaves(got)
    assert bias.shape == (2, 8)
    assert np.abs(bias).max() > 0.1
    program.eval_step(state, batches[0])
    chex.assert_trees_all_equal(jax.device_get(state.collections["router"]), got)
