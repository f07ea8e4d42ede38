"""Optimizers that multiply matrices take one device's steps, on whole matrices of their owners."""

import functools
import math
from fractions import Fraction

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import Batch, data_parallel, diloco, fsdp, hsdp, make_mesh, zero
from manualpar.core.tracing.scopes import MATRICES_SCOPE
from manualpar.inspect import bytes_by_axes, ledger, of_parameters, step_bytes
from manualpar.inspect.expected_bytes import matrix_functions
from manualpar.models import Split, Transformer
from manualpar.models.cross_entropy import language_model_loss, mixture_of_experts_loss
from manualpar.models.flat_fields import with_fields
from tests.one_device import slow_unless, train_on_one_device, train_program

Dims = optax.contrib.MuonDimensionNumbers


def noise(key, shape, dtype=jnp.float32):
    """Returns numbers that give matrices full rank, and compile faster than random bits."""
    return 0.4 * jnp.sin(jnp.arange(math.prod(shape), dtype=dtype) ** 2).reshape(shape)


class Mixed(nn.Module):
    """Has wide and tall matrices, a stack of matrices, and kernels with heads."""

    hidden: int = 24

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.DenseGeneral, use_bias=False, kernel_init=noise)
        x = x + dense(12, name="down")(jnp.tanh(dense(self.hidden, name="up")(x)))
        for matrix in self.param("stack", noise, (3, 12, 16)):
            x = x + jnp.tanh(x @ matrix) @ matrix.T
        heads = jnp.tanh(dense((2, 8), name="query")(x))
        x = x + dense(12, axis=(-2, -1), name="out")(heads)
        return nn.Dense(4, kernel_init=noise, name="head")(x)


def mixed_dims(params):
    """Returns the dims of the matrices of `Mixed`; Adam updates the head."""
    kernels = {"up": Dims(), "down": Dims(), "query": Dims(0, (1, 2)), "out": Dims((0, 1), 2)}
    named = {name: {"kernel": dims} for name, dims in kernels.items()}
    return {**named, "stack": Dims(-2, -1), "head": None}


def square_loss(params, apply_fn, batch, rng):
    losses = jnp.square(apply_fn({"params": params}, batch.inputs) - batch.labels).mean(-1)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


def make_batch(seed):
    x = np.random.default_rng(seed).normal(size=(16, 12)).astype(np.float32)
    return Batch(x, np.sin(x[:, :4]) + 1)


BATCHES = tuple(map(make_batch, range(3)))


def muon(**options):
    return optax.contrib.muon(0.02, muon_weight_dimension_numbers=mixed_dims, **options)


def decayed():
    rate = optax.linear_schedule(0.0, 0.02, 3)
    options = {"weight_decay": 0.1, "consistent_rms": 0.2, "adaptive": True, "nesterov": False}
    dims = {"muon_weight_dimension_numbers": mixed_dims}
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.contrib.muon(rate, **options, **dims), optax.ema(0.9)
    )


def several():
    return optax.MultiSteps(muon(), 2).gradient_transformation()


def polar(rate=0.02):
    """Makes an optimizer that is not of optax: each 2D gradient becomes its polar factor."""

    def update(grads, state, params=None):
        def factor(g):
            if g.ndim != 2:
                return -rate * g
            u, _, v = jnp.linalg.svd(g, full_matrices=False)
            return -rate * u @ v

        return jax.tree.map(factor, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


OPTIMIZERS = {
    "muon": muon,
    "chain": decayed,
    "dion": lambda: muon(ns_coeffs="dion"),
    "aol": lambda: muon(preconditioning="aol"),
    "schatten": lambda: muon(preconditioning="schatten"),
    "MultiSteps": several,
    "finite": lambda: optax.apply_if_finite(muon(), 2),
    "polar": polar,
    "galore": lambda: optax.contrib.galore(0.01, rank=2, update_proj_gap=2),
}
LAYOUTS = {
    "dp": (data_parallel, {"data": 8}, {}),
    "zero1": (zero, {"data": 8}, {}),
    "fsdp": (fsdp, {"data": 8}, {}),
    "fsdp, two axes": (fsdp, {"data": 4, "more": 2}, {"axis_name": ("data", "more")}),
    "fsdp, some replicated": (fsdp, {"data": 4}, {"min_weight_size": 300}),
    "fsdp, padded": (fsdp, {"data": 8}, {"pad": True}),
    "fsdp, skips": (fsdp, {"data": 8}, {"nonfinite": "skip", "norm_metrics": True}),
    "fsdp, minibatches": (fsdp, {"data": 4}, {"num_minibatches": 2}),
    "hsdp": (hsdp, {"replica": 2, "data": 4}, {}),
}


def build(layout, tx, hidden=24, **options):
    builder, sizes, given = LAYOUTS[layout]
    given = {} if builder is data_parallel else {"min_weight_size": 16, **given}
    mesh = make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
    return builder(
        Mixed(hidden), tx, square_loss, mesh=mesh, batch=BATCHES[0], **given, **options
    )


@functools.cache
def one_device(name, hidden=24):
    return train_on_one_device(Mixed(hidden), OPTIMIZERS[name](), BATCHES, square_loss)


def assert_equal(program, batches, expected):
    """Compares losses and parameters with one device's, which rounds sums in another order."""
    state, losses = train_program(program, batches)
    np.testing.assert_allclose(losses, expected.losses, rtol=2e-6)
    found = jax.tree_util.tree_leaves_with_path(program.whole(state)["params"])
    for (path, x), y in zip(found, jax.tree.leaves(expected.params), strict=True):
        scale = np.abs(y).max()
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6 * scale, err_msg=str(path))


CASES = [("muon", layout) for layout in LAYOUTS]
CASES += [(name, "fsdp") for name in OPTIMIZERS if name != "muon"]
CASES += [("chain", "hsdp"), ("chain", "fsdp, padded"), ("MultiSteps", "dp")]
FAST = [("muon", "hsdp"), ("chain", "fsdp, padded")]


@pytest.mark.parametrize(("name", "layout"), [slow_unless(FAST, *case) for case in CASES])
def test_three_steps_equal_one_device(devices8, name, layout):
    del devices8
    hidden = 28 if "pad" in layout else 24
    program = build(layout, OPTIMIZERS[name](), hidden)
    assert_equal(program, BATCHES, one_device(name, hidden))


# Bytes, and what XLA adds.


def updates_of(program):
    """Returns the collectives of the update as written and as compiled, without sums to a number."""
    found = ledger(program, compile=True)
    written = [x for x in found.collectives if x.phase == "update"]
    compiled = [
        x
        for x in found.compiled.collectives
        if any("optimizer" in scope for scope in x.scopes)
        and not (x.kind == "all_reduce" and set(x.shapes) == {()})
    ]
    return found, written, compiled


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("name", "layout"),
    [slow_unless([("chain", "hsdp")], "chain", layout) for layout in LAYOUTS]
    if False
    else [
        slow_unless([("chain", "hsdp")], name, layout)
        for name, layout in [
            ("chain", "hsdp"),
            *((name, layout) for layout in LAYOUTS for name in ("muon", "chain") if layout != "hsdp"),
            ("MultiSteps", "fsdp"),
            ("polar", "fsdp"),
        ]
    ],
)
def test_xla_adds_no_collective_to_the_update_but_sums_to_a_number(devices8, name, layout):
    del devices8
    program = build(layout, OPTIMIZERS[name](), 28 if "pad" in layout else 24)
    found, written, compiled = updates_of(program)
    assert found.bytes_by_purpose()[MATRICES_SCOPE]
    assert sum(x.bytes_sent for x in compiled) == sum(x.bytes_sent for x in written)
    assert not [note for note in found.notes if "left to XLA" in note]
    sent = bytes_by_axes(x for x in of_parameters(found.collectives) if x.phase == "update")
    assert sum(sent.values()) <= sum(step_bytes(program).values())
