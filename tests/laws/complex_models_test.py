"""Models with complex parameters and activations train under every strategy as on one device.

`jax.grad` returns the conjugate of the direction of steepest ascent as the gradient of a complex
parameter. The tests only require that a program trains with this gradient as one device does.
"""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import Batch, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.inspect import count_by_kind, trace_collectives
from tests.core.modes.traced_equations import equations
from tests.one_device import name_of, slow, train_on_one_device, train_program
from tests.tiny import square_loss

WIDTH = 16


def complex_normal(key, shape):
    return jax.random.normal(key, shape, jnp.complex64) / 4


class Fourier(nn.Module):
    """A layer of a neural operator: multiplies the Fourier transform by complex weights."""

    @nn.compact
    def __call__(self, x, _):
        h = jnp.fft.rfft(nn.Dense(WIDTH, name="dense")(x))
        weight = self.param("weight", complex_normal, (9, 8))
        back = self.param("back", complex_normal, (8, 9))
        bias = self.param("bias", complex_normal, (8,))
        h = h @ weight + bias[None]
        h = h / (1 + (h * h.conj()).real)
        return x + jnp.fft.irfft(h @ back), None


class Operator(nn.Module):
    scan: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Fourier, prevent_cse=False) if self.remat else Fourier
        if self.scan:
            loop = nn.scan(
                layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )
            x, _ = loop(name="layers")(x, None)
        else:
            x, _ = layer(name="layer")(x, None)

        def rotate(carry, angle):  # For a loop of the model with a complex carry.
            return carry * jnp.exp(1j * angle), jnp.abs(carry)

        turned, sizes = jax.lax.scan(rotate, jnp.fft.rfft(x), jnp.array([0.5, 1.0]))
        return nn.Dense(4)(jnp.concatenate([turned.real * x[:, :9], sizes.sum(0)], 1))


RNG = np.random.default_rng(0)
BATCH = Batch(
    RNG.normal(size=(16, WIDTH)).astype(np.float32), RNG.normal(size=(16, 4)).astype(np.float32)
)
SMALL = {"min_weight_size": 8}
PLAIN, SCANNED = Operator(), Operator(scan=True)


def build(builder, model=PLAIN, axes=None, tx=None, **options):
    if builder is not data_parallel:
        options = SMALL | options
    mesh = make_mesh(axes or {"data": 8})
    return builder(model, tx or optax.sgd(0.05), square_loss, mesh=mesh, batch=BATCH, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("builder", "model", "axes", "options"),
    [
        slow(fsdp, SCANNED, {"data": 8}, {"num_minibatches": 2, "use_scan": True}),
        (hsdp, PLAIN, {"replica": 2, "data": 4}, {"gather_dtype": "float32", "pad": True}),
        slow(fsdp, PLAIN, {"data": 4, "model": 2}, {}),
        slow(fsdp, PLAIN, {"data": 2, "model": 4}, {"num_minibatches": 2}),
        slow(fsdp, PLAIN, {"data": 8}, {"reshard_after_forward": False}),
        slow(fsdp, PLAIN, {"data": 8}, {"communicate_every": "step"}),
        slow(fsdp, SCANNED, {"data": 8}, {"reduce_dtype": "float32"}),
        slow(fsdp, Operator(scan=True, remat=True), {"data": 8}, {}),
        slow(fsdp, Operator(remat=True), {"data": 8}, {}),
        slow(fsdp, PLAIN, {"data": 8}, {"mode": "auto"}),
        slow(fsdp, SCANNED, {"data": 8}, {"mode": "auto", "gather_dtype": "float32"}),
        slow(data_parallel, SCANNED, {"data": 8}, {"num_minibatches": 2}),
        slow(zero, PLAIN, {"data": 8}, {"stage": 1, "reduce_dtype": "float32"}),
        slow(zero, PLAIN, {"data": 8}, {"stage": 2, "num_minibatches": 2}),
        slow(hsdp, SCANNED, {"replica": 4, "data": 2}, {"reshard_after_forward": False}),
        slow(fsdp, PLAIN, {"data": 8}, {"nonfinite": "skip", "keep_gathered": ("layer",)}),
    ],
    ids=name_of,
)
def test_complex_models_train_as_on_one_device(devices8, builder, model, axes, options):
    expected = train_on_one_device(model, optax.sgd(0.05), [BATCH] * 2, square_loss)
    program = build(builder, model, axes, **options)
    state, losses = train_program(program, [BATCH] * 2)
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-4)
    shapes = iter(info.shape for info, _ in program.parameters)
    params = jax.tree.map(
        lambda x: x[tuple(map(slice, next(shapes)))], jax.device_get(state.params)
    )
    chex.assert_trees_all_close(params, expected.params, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_complex_weights_are_gathered_again_and_nothing_else(devices8):
    def gathers(**options):
        program = build(fsdp, **options)
        traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
        counts = count_by_kind(trace_collectives(traced))
        return counts["all_gather"], counts["reduce_scatter"]

    kept = gathers(reshard_after_forward=False)
    # Five parameters are sharded: a kernel, a bias, and three complex parameters. The backward pass
    # needs neither the bias nor the kernel, because it is the kernel of the first layer.
    assert kept == (5, 5)
    assert gathers() == (5 + 2, 5)


def test_the_parts_of_complex_activations_are_kept(devices8):
    """Tests that the backward pass does not compute a Fourier transform of an activation again."""

    def transforms(**options):
        return sum(eqn.primitive.name == "fft" for eqn in equations(build(fsdp, **options)))

    assert transforms() == transforms(reshard_after_forward=False)


@pytest.mark.slow
def test_norms_and_clipping_of_complex_gradients(devices8):
    tx = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.5))
    expected = train_on_one_device(PLAIN, tx, [BATCH], square_loss)
    program = build(fsdp, tx=tx, norm_metrics=True, nonfinite="report", gather_dtype="bfloat16")
    state = program.init(jax.random.key(0))
    state, metrics = program.train_step(state, BATCH)
    # The real parameters are gathered in bfloat16, so the tolerance is large. A wrong conjugate
    # would still be noticed.
    chex.assert_trees_all_close(jax.device_get(state.params), expected.params, atol=5e-3)
    np.testing.assert_allclose(metrics["update_norm"][0], 0.5 * 0.05, rtol=1e-3)
    norm = optax.tree.norm(jax.device_get(state.params))
    np.testing.assert_allclose(metrics["parameter_norm"][0], norm, rtol=1e-5)
    assert metrics["nonfinite"][0] == 0
    nan = Batch(BATCH.inputs * np.nan, BATCH.labels)
    _, metrics = program.train_step(state, nan)
    assert metrics["nonfinite"][0] == 1
