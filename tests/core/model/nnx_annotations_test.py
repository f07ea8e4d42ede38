"""What `nnx.with_partitioning` says is understood: mesh axes, logical names, all kinds of rules."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from manualpar import Batch, data_parallel, fsdp, make_mesh
from tests.core.model.nnx_training import in_modes, sent, train
from tests.tiny import TOLERANCE

DEPTH, LAYERS = 16, 3
LECUN = nnx.initializers.lecun_normal()


class DotReluDot(nnx.Module):
    def __init__(self, rngs, names=("data", "model"), **metadata):
        up, down = (None, names[1]), (names[1], None)
        self.dot1 = nnx.Linear(
            DEPTH,
            DEPTH,
            use_bias=False,
            rngs=rngs,
            kernel_init=nnx.with_partitioning(LECUN, up, **metadata),
        )
        self.w2 = nnx.Param(
            LECUN(rngs.params(), (DEPTH, DEPTH)),
            out_sharding=down,
            eager_sharding=False,
            **metadata,
        )

    def __call__(self, x):
        return jax.nn.relu(self.dot1(x)) @ self.w2[...]


class Stack(nnx.Module):
    def __init__(self, rngs, **metadata):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def make(rngs):
            return DotReluDot(rngs, **metadata)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: None},
        )
        def run(x, layer):
            return layer(x)

        return run(x, self.layers)


class LinenDotReluDot(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel_init = nn.with_partitioning(LECUN, (None, "model"))
        x = jax.nn.relu(nn.Dense(DEPTH, use_bias=False, kernel_init=kernel_init, name="dot1")(x))
        return x @ self.param("w2", nn.with_partitioning(LECUN, ("model", None)), (DEPTH, DEPTH))


def loss_fn(params, apply_fn, batch, rng):
    del rng
    loss = (apply_fn({"params": params}, batch.inputs) - batch.labels) ** 2
    return loss.mean(), {"loss": (loss.sum(), jnp.float32(loss.size))}


def make_batch(seed):
    rng = np.random.default_rng(seed)
    return Batch(*(rng.normal(size=(8, DEPTH)).astype(np.float32) for _ in range(2)))


BATCHES = [make_batch(seed) for seed in range(3)]


def build(model, devices, shape=None, builder=fsdp, **options):
    mesh = make_mesh(shape or {"data": 2, "model": 4}, devices)
    if builder is fsdp:
        options.setdefault("min_weight_size", 16)
    return builder(model, optax.sgd(0.1), loss_fn, mesh=mesh, batch=BATCHES[0], **options)


def names(program):
    return {info.path: place.names for info, place in program.parameters}


@pytest.mark.slow
@pytest.mark.parametrize("builder", [fsdp, pytest.param(data_parallel, marks=pytest.mark.slow)])
@in_modes("manual", "explicit")
@pytest.mark.parametrize("model", [DotReluDot, pytest.param(Stack, marks=pytest.mark.slow)])
def test_the_guides_network_on_a_mesh_of_2_by_4(devices8, model, mode, builder):
    program = build(model, devices8, mode=mode, builder=builder)
    data = "data" if builder is fsdp else None
    stack = (None,) if model is Stack else ()
    layer = "layers/" if stack else ""
    assert names(program) == {
        f"{layer}dot1/kernel": (*stack, data, "model"),
        f"{layer}w2": (*stack, "model", data),
    }
    one = build(model, devices8[:1], {"data": 1, "model": 1})
    _, expected = train(one, one.init(jax.random.key(0)), BATCHES)
    _, losses = train(program, program.init(jax.random.key(0)), BATCHES)
    np.testing.assert_allclose(losses, expected, **TOLERANCE)


@pytest.mark.parametrize("mode", ["manual", "auto"])
def test_an_annotated_network_sends_what_linen_does(devices8, mode):
    linen, program = (build(m, devices8, mode=mode) for m in (LinenDotReluDot(), DotReluDot))
    assert names(program) == names(linen)
    assert sent(program) == sent(linen)


RULES = (("embed", None), ("hidden", "model"))
LOGICAL = functools.partial(DotReluDot, names=("embed", "hidden"))


def test_logical_names_with_rules_of_all_kinds(devices8):
    expected = names(build(DotReluDot, devices8))
    assert names(build(LOGICAL, devices8, rules=RULES)) == expected
    own = functools.partial(LOGICAL, sharding_rules=RULES)
    assert names(build(own, devices8)) == expected
    with nnx.logical_axis_rules(RULES):
        assert names(build(LOGICAL, devices8)) == expected
    stack = functools.partial(Stack, names=("embed", "hidden"))
    assert names(build(stack, devices8, rules=RULES)) == names(build(Stack, devices8))


def test_logical_names_under_a_mesh_that_is_set(devices8):
    expected = names(build(DotReluDot, devices8))
    with jax.set_mesh(make_mesh({"data": 2, "model": 4}, devices8)):
        for mode in ("auto", "manual"):
            assert names(build(LOGICAL, devices8, rules=RULES, mode=mode)) == expected
        with pytest.raises(
            ValueError, match=r"If they are logical names, write rules=\(\('hidden'"
        ):
            build(LOGICAL, devices8)


def test_axes_and_logical_names_may_be_mixed(devices8):
    shape = {"data": 2, "model": 2, "expert": 2}
    axes = ("model", "expert")
    mixed = functools.partial(DotReluDot, names=("embed", axes))
    expected = {"dot1/kernel": ("data", axes), "w2": (axes, "data")}
    assert names(build(mixed, devices8, shape)) == expected
    assert names(build(LOGICAL, devices8, shape, rules=(("hidden", axes),))) == expected
    # One name has a rule, the other is an axis.
    init = nnx.with_partitioning(LECUN, ("embed", "model"))
    one = functools.partial(nnx.Linear, DEPTH, DEPTH, use_bias=False, kernel_init=init)
    assert names(build(one, devices8, rules=(("embed", None),))) == {"kernel": ("data", "model")}
    # No name has a rule: all are axes.
    other = {"rules": (("vocabulary", "data"),)}
    assert names(build(DotReluDot, devices8, **other)) == names(build(DotReluDot, devices8))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["manual", pytest.param("auto", marks=pytest.mark.slow)])
def test_penalties_on_boxed_parameters(devices8, mode):
    def penalised(params, apply_fn, batch, rng):
        loss, metrics = loss_fn(params, apply_fn, batch, rng)
        return loss + 0.1 * sum((x**2).sum() for x in jax.tree.leaves(nn.unbox(params))), metrics

    def run(devices, shape, **options):
        mesh = make_mesh(shape, devices)
        options = {"min_weight_size": 16, "mesh": mesh, "batch": BATCHES[0], **options}
        program = fsdp(DotReluDot, optax.sgd(0.1), penalised, **options)
        return train(program, program.init(jax.random.key(0)), BATCHES)[1]

    expected = run(devices8[:1], {"data": 1, "model": 1})
    losses = run(devices8, {"data": 2, "model": 4}, mode=mode)
    np.testing.assert_allclose(losses, expected, **TOLERANCE)


class Constrained(DotReluDot):
    """With the constraint that flax's guide to scaling up has."""

    def __call__(self, x):
        y = jax.lax.with_sharding_constraint(jax.nn.relu(self.dot1(x)), P("data", "model"))
        return y @ self.w2[...]


@pytest.mark.slow
def test_activations_may_be_constrained_in_auto_mode_under_a_mesh(devices8):
    def loss_fn(params, apply_fn, batch, rng):
        out = apply_fn({"params": params}, batch.inputs)
        losses = jnp.square(out - batch.labels).mean(-1)
        return losses.mean(), {"loss": (losses.sum(), losses.size)}

    inputs = np.random.default_rng(0).normal(size=(8, DEPTH)).astype(np.float32)
    batch, losses = Batch(inputs=inputs, labels=np.roll(inputs, 1, axis=1)), {}
    options = {"batch": batch, "mode": "auto", "min_weight_size": 1}
    for size in (8, 1):
        mesh = make_mesh({"data": min(size, 2), "model": -1}, devices8[:size])
        with jax.set_mesh(mesh):
            program = fsdp(Constrained, optax.sgd(0.1), loss_fn, mesh=mesh, **options)
            state, losses[size] = program.init(jax.random.key(0)), []
            for _ in range(3):
                state, metrics = program.train_step(state, batch)
                losses[size].append(float(metrics["loss"][0]))
    np.testing.assert_allclose(losses[8], losses[1], rtol=1e-5)
    assert losses[8][-1] < losses[8][0]
