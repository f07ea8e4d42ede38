import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from manualpar import Batch, Pipeline, fsdp, hsdp, make_mesh, shard_params, zero
from manualpar.core.mesh.axes import axis_tuple
from manualpar.core.parameters.placement import (
    ParameterInfo,
    Placement,
    describe_parameters,
    like_params,
    replicate,
    shard_one_dim,
    shard_state_only,
)
from manualpar.core.parameters.sharded_parameter import pad_leaf, unpad_leaf


def box(shape, names):
    return nn.Partitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)


def describe(box, loop_dims=()):
    mesh = make_mesh({"data": 4, "model": 2})
    infos = describe_parameters({"p": box}, {"p": frozenset(loop_dims)}, mesh, ())
    return infos["p"]


@pytest.mark.parametrize(
    ("names", "loop_dims", "expected"),
    [
        ((None, "data"), (), (None, "data")),
        (("data",), (), ("data", None)),
        ((None, ("data", "model")), (), (None, ("data", "model"))),
        (("layers", "data"), (0,), (None, "data")),  # What a scan called its dim is not an axis.
        ((None, None), (), (None, None)),
    ],
)
def test_annotations_over_the_data_axes_are_kept(names, loop_dims, expected):
    info = describe(box((16, 64), names), loop_dims)
    assert info.names == expected
    assert info.path == "p"
    assert replicate(info, ("data", "model"), 8).names == expected
    sharded = shard_one_dim(info, ("data", "model"), 8, min_weight_size=0)
    if any(expected):
        assert sharded.names == expected
    else:
        assert sharded.names == (None, ("data", "model"))


def test_placements():
    info = ParameterInfo("p", (4, 64), jnp.float32, (None, None), frozenset())
    assert replicate(info, ("data",), 8) == Placement((None, None))
    assert replicate(info, ("data",), 8).spec == P()
    placement = shard_one_dim(info, ("data",), 8, min_weight_size=0)
    assert placement == Placement((None, "data"), "only one that divides")
    assert placement.spec == P(None, "data")
    both = shard_one_dim(info, ("replica", "data"), 8, min_weight_size=0)
    assert both.spec == P(None, ("replica", "data"))
    whole = shard_one_dim(info, ("data",), 8, min_weight_size=1000)
    assert whole == Placement((None, None), "too small: 256 < 1000")


@pytest.mark.parametrize(
    ("shape", "padded", "spec"),
    [
        ((16, 63), (0, 0), P("data", None)),  # It divides along another dim.
        ((15, 63), (0, 1), P(None, "data")),
        ((66, 63), (6, 0), P("data", None)),
        ((5,), (3,), P("data")),
        ((1, 1), (), P()),
    ],
)
def test_padding_makes_the_largest_dim_divide(shape, padded, spec):
    info = describe(jax.ShapeDtypeStruct(shape, jnp.float32))
    placement = shard_one_dim(info, ("data",), 8, min_weight_size=0, pad=True)
    assert placement.spec == placement.state_spec == spec
    assert any(placement.padding) == any(padded)
    assert placement.padding == padded or not any(padded)
    x = jnp.arange(float(np.prod(shape))).reshape(shape)
    there = pad_leaf(x, placement.padding)
    assert all(a == b + c for a, b, c in zip(there.shape, shape, padded, strict=False))
    np.testing.assert_array_equal(unpad_leaf(there, placement.padding), x)
    assert there.sum() == x.sum()


# Eight parts of 1,000 are no whole tiles, but eight parts of 128 are.
SHAPE = (128, 1000)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        kernel = self.param("kernel", nn.initializers.normal(), SHAPE)
        return x + (x @ kernel) @ kernel.T, None


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return layers()(x, None)[0]


class NNXLayer(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), SHAPE))

    def __call__(self, x):
        return x @ self.kernel


def loss_fn(params, apply_fn, batch, rng):
    loss = apply_fn({"params": params}, batch.inputs, train=True).sum(-1)
    return loss.mean(), {"loss": (loss.sum(), jnp.ones_like(loss).sum())}


@pytest.mark.parametrize(
    ("builder", "axes", "options"),
    [
        (fsdp, {"data": 8}, {}),
        (fsdp, {"data": 8}, {"mode": "auto"}),
        (fsdp, {"data": 8}, {"mode": "explicit"}),
        (fsdp, {"data": 8}, {"pad": True}),
        (fsdp, {"data": 4, "other": 2}, {"axis_name": ("data", "other")}),
        (fsdp, {"stage": 2, "data": 4}, {"pipeline": Pipeline(), "num_minibatches": 2}),
        (hsdp, {"replica": 1, "data": 8}, {}),
        (zero, {"data": 8}, {"stage": 1}),
        (zero, {"data": 8}, {"stage": 2}),
    ],
)
def test_all_builders_and_modes_shard_the_same_dim(builder, axes, options, devices8):
    batch = Batch(np.ones((16, SHAPE[0]), np.float32), np.zeros(16))
    options = {"mesh": make_mesh(axes, devices8), "batch": batch, **options}
    models = [Layers()] if "pipeline" in options else [Layers(), NNXLayer(nnx.Rngs(0))]
    for model in models:
        program = builder(model, optax.sgd(1.0), loss_fn, **options, min_weight_size=0)
        ((_, placement),) = program.parameters
        *loops, first, second = placement.sharded_names
        assert "data" in axis_tuple(first)
        assert second is None
        assert loops == (["stage"] if "pipeline" in options else [None] * (model is models[0]))
        assert placement.note == "whole tiles"


def test_sharding_by_hand_shards_the_same_dim(mesh8):
    def on_device():
        x = shard_params({"p": jnp.ones(SHAPE)}, mesh8.axis_names, min_weight_size=0)["p"]
        assert x.value.shape == (SHAPE[0] // 8, SHAPE[1])
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(on_device, mesh=mesh8, in_specs=(), out_specs=P()))


def test_only_the_state_of_zero_is_sharded():
    info = describe(jax.ShapeDtypeStruct((15, 63), jnp.float32))
    placement = shard_state_only(info, ("data",), 8, min_weight_size=0, pad=True)
    assert placement.spec == P()
    assert placement.state_spec == P(None, "data")
    assert (placement.padding, placement.parameter_padding) == ((0, 1), ())


PARAMS = {
    "layer": {"kernel": jnp.ones((256, 128)), "bias": jnp.ones(128)},
    "kernel": jnp.ones((128, 256)),  # The path of another parameter ends in this one's.
}
SPECS = {"layer": {"kernel": P("data", None), "bias": P()}, "kernel": P(None, "data")}


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(1e-3),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9)),
        optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
        optax.masked(optax.adam(1e-3), {"layer": {"kernel": True, "bias": False}, "kernel": True}),
        optax.multi_transform(
            {"a": optax.adam(1e-3), "b": optax.sgd(1e-3, momentum=0.9)},
            {"layer": {"kernel": "a", "bias": "b"}, "kernel": "b"},
        ),
        optax.apply_if_finite(optax.lamb(1e-3), 3),
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    ],
    ids=["adamw", "chain", "MultiSteps", "masked", "multi_transform", "apply_if_finite", "inject"],
)
def test_optimizer_state_lies_where_its_parameters_do(tx):
    state = jax.eval_shape(tx.init, PARAMS)
    specs = like_params(state, PARAMS, SPECS, P())
    leaves = zip(jax.tree.leaves(state), jax.tree.leaves(specs), strict=True)
    by_shape = {(256, 128): P("data", None), (128, 256): P(None, "data")}
    found = set()
    for leaf, spec in leaves:
        assert spec == by_shape.get(leaf.shape, P())
        found.add(leaf.shape)
    assert (256, 128) in found


def test_state_of_another_shape_is_replicated():
    state = jax.eval_shape(optax.adafactor(1e-3, min_dim_size_to_factor=128).init, PARAMS)
    specs = like_params(state, PARAMS, SPECS, P())
    for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(specs), strict=True):
        if leaf.shape not in ((256, 128), (128, 256)):
            assert spec == P()


def test_a_path_that_ends_in_a_shorter_one_belongs_to_the_longer():
    params = {"a": {"k": jnp.ones((8, 8))}, "k": jnp.ones((8, 8))}
    specs = {"a": {"k": P("data", None)}, "k": P(None, "data")}
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    found = like_params(state, params, specs, P())
    assert found[0].mu == found[0].nu == specs
    assert found[0].count == P()
