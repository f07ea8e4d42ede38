import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar.layout import (
    ParameterInfo,
    Placement,
    box_params,
    describe_parameters,
    like_params,
    replicate,
    shard_largest_dim,
    strip_boxes,
)
from manualpar.model import init_variables
from manualpar.partitioning import ShardedParameter

X = jax.ShapeDtypeStruct((16, 8), jnp.float32)


def describe(model, axes=("data",), x=X):
    variables = jax.eval_shape(lambda key: init_variables(model, key, x), jax.random.key(0))
    infos, carried = describe_parameters(model, variables, x, axes)
    return {info.path: info for info in jax.tree.leaves(infos)}, carried


def block(dense):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.tanh(dense(8, name="dense")(x)), None

    return Block


@pytest.mark.parametrize("metadata_params", [{}, {nn.PARTITION_NAME: "layers"}])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_dims_that_scan_runs_over_are_found(axis, metadata_params):
    stack = nn.scan(
        block(nn.Dense),
        variable_axes={"params": axis},
        split_rngs={"params": True},
        length=16,
        metadata_params=metadata_params,
    )

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="head")(stack(name="stack")(x, None)[0])

    infos, _ = describe(Model())
    kernel, bias = infos["stack/dense/kernel"], infos["stack/dense/bias"]
    assert kernel.shape[axis] == bias.shape[axis] == 16
    assert kernel.loop_dims == {axis % 3}
    assert bias.loop_dims == {axis % 2}
    assert infos["head/kernel"].loop_dims == frozenset()
    # 16 layers of 8 x 8: the layers would be the largest dim, but no device may miss one.
    placement = shard_largest_dim(kernel, ("data",), 8, min_weight_size=0)
    assert placement.names[axis] is None
    assert "data" in placement.names


def test_the_dims_of_nested_loops_are_found():
    inner = nn.scan(
        block(nn.Dense), variable_axes={"params": 0}, split_rngs={"params": True}, length=16
    )

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return inner(name="inner")(x, None)[0]

    model = nn.vmap(
        Outer, variable_axes={"params": 1}, split_rngs={"params": True}, in_axes=None, axis_size=32
    )()
    infos, _ = describe(model)
    kernel = infos["inner/dense/kernel"]
    assert kernel.shape == (16, 32, 8, 8)
    assert kernel.loop_dims == {0, 1}


def test_annotations_over_the_data_axes_are_kept_and_scan_names_are_not_axes():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, ("data", "model")))
    stack = nn.scan(
        block(lambda *args, **kwargs: nn.Dense(*args, kernel_init=init, **kwargs)),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=4,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return stack(name="stack")(x, None)[0]

    infos, _ = describe(Model(), ("data", "model"))
    kernel = infos["stack/dense/kernel"]
    assert kernel.names == (None, None, ("data", "model"))
    for place in (replicate, shard_largest_dim):
        kwargs = {} if place is replicate else {"min_weight_size": 0}
        assert place(kernel, ("data", "model"), 8, **kwargs).spec == P(
            None, None, ("data", "model")
        )


@pytest.mark.parametrize("names", [("embed", None), (None, "model"), (("data", "model"), None)])
def test_an_annotation_over_other_axes_is_refused(names):
    init = nn.with_partitioning(nn.initializers.lecun_normal(), names)
    with pytest.raises(ValueError, match=r"parameter 'kernel' is annotated with .*not data axes"):
        describe(nn.Dense(8, kernel_init=init))


def test_collections_that_only_grow_are_not_carried():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
            self.sow("losses", "norm", jnp.sum(x**2))
            self.sow("intermediates", "x", x)
            return x

    _, carried = describe(Model())
    assert carried == ("batch_stats",)


def test_placements():
    info = ParameterInfo("p", (4, 64), jnp.float32, (None, None), frozenset())
    assert replicate(info, ("data",), 8) == Placement((None, None))
    assert replicate(info, ("data",), 8).spec == P()
    placement = shard_largest_dim(info, ("data",), 8, min_weight_size=0)
    assert placement == Placement((None, "data"))
    assert placement.spec == P(None, "data")
    both = shard_largest_dim(info, ("replica", "data"), 8, min_weight_size=0)
    assert both.spec == P(None, ("replica", "data"))
    whole = shard_largest_dim(info, ("data",), 8, min_weight_size=1000)
    assert whole == Placement((None, None), "too small: 256 < 1000")


def test_boxes_go_around_sharded_parameters_only_and_come_off():
    params = {"a": jnp.ones((8, 2)), "b": jnp.ones(3)}
    placements = {"a": Placement(("data", None)), "b": Placement((None,))}
    boxed = box_params(params, placements, ("data",))
    assert isinstance(boxed["a"], ShardedParameter)
    assert boxed["a"].gather_axes == ("data",)
    assert boxed["b"] is params["b"]
    chex.assert_trees_all_equal(strip_boxes(boxed), params)


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
    specs = like_params(state, PARAMS, SPECS)
    leaves = zip(jax.tree.leaves(state), jax.tree.leaves(specs), strict=True)
    by_shape = {(256, 128): P("data", None), (128, 256): P(None, "data")}
    found = set()
    for leaf, spec in leaves:
        assert spec == by_shape.get(leaf.shape, P())
        found.add(leaf.shape)
    assert (256, 128) in found


def test_state_of_another_shape_is_replicated():
    state = jax.eval_shape(optax.adafactor(1e-3, min_dim_size_to_factor=128).init, PARAMS)
    specs = like_params(state, PARAMS, SPECS)
    for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(specs), strict=True):
        if leaf.shape not in ((256, 128), (128, 256)):
            assert spec == P()


def test_a_path_that_ends_in_a_shorter_one_belongs_to_the_longer():
    params = {"a": {"k": jnp.ones((8, 8))}, "k": jnp.ones((8, 8))}
    specs = {"a": {"k": P("data", None)}, "k": P(None, "data")}
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    found = like_params(state, params, specs)
    assert found[0].mu == found[0].nu == specs
    assert found[0].count == P()
