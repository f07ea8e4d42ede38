"""The roles of mesh axes decide how batches are split and how gradients are reduced."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import Batch, abstract_mesh, fsdp, make_mesh
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.mesh.splitting import check_batch, split_minibatches, to_zigzag
from manualpar.core.model.loss_function import Mean
from manualpar.core.modes.gradients import accumulate, unrolled
from manualpar.core.modes.manual import Manual
from manualpar.core.parameters.placement import (
    ParameterInfo,
    ParameterSharding,
    Placement,
    parameter_sharding,
    split_over_stages,
)
from tests.tiny import masked_square_loss

DATA = AxisRoles({0: ("replica", "data")})
TOKENS = AxisRoles({0: ("data",), 1: ("context",)}, {"expert": "model"})


def test_a_batch_is_split_by_the_axes_of_each_dim():
    batch = {"tokens": jnp.zeros((8, 4, 3)), "weights": jnp.zeros(8), "scale": jnp.zeros(())}
    assert DATA.batch_specs(batch) == {
        "tokens": P(("replica", "data")),
        "weights": P(("replica", "data")),
        "scale": P(),
    }
    assert TOKENS.batch_specs(batch) == {
        "tokens": P(("data",), ("context",)),
        "weights": P(("data",)),
        "scale": P(),
    }


def test_an_axis_has_a_role():
    axes = ("data", "context", "model", "expert")
    roles = [TOKENS.role_of(axis) for axis in axes]
    assert roles == ["data", "context", "shard_only", "model"]
    assert TOKENS.data_axes == ("data", "context")


def parameter(names, split_axes=()):
    shape = (8,) * len(names)
    return ParameterInfo("p", shape, jnp.float32, names, frozenset(), frozenset(split_axes))


def test_a_placement_follows_from_the_roles():
    mesh = abstract_mesh({"data": 2, "context": 4, "expert": 2, "model": 2}, 32)
    names = ("expert", ("data", "context"), "model")
    placement = parameter_sharding(Placement(names), parameter(names), TOKENS, mesh)
    assert placement.mean_axes == ("data", "context")
    assert placement.shard_only_axes == ("model",)
    assert (placement.sum_axes, placement.divisor) == ((), 1)


def test_the_layers_of_a_stage_are_its_own_and_the_rest_is_summed_over_stages():
    mesh = abstract_mesh({"data": 2, "stage": 4}, 8)
    roles = AxisRoles({0: ("data",)}, {"stage": "stage"})
    infos = {
        name: ParameterInfo(name, (8, 8), jnp.float32, (None, None), frozenset({0}))
        for name in ("layers", "head")
    }
    infos = split_over_stages(infos, frozenset({"layers"}), "stage")
    assert infos["layers"].unsharded_dims == frozenset()
    layers = parameter_sharding(Placement(("stage", "data")), infos["layers"], roles, mesh)
    head = parameter_sharding(Placement((None, "data")), infos["head"], roles, mesh)
    assert (layers.sum_axes, layers.shard_only_axes, layers.mean_axes) == ((), (), ("data",))
    assert (head.sum_axes, head.shard_only_axes, head.mean_axes) == (("stage",), (), ("data",))


def test_a_split_parameter_is_neither_gathered_nor_averaged_over_its_axes():
    mesh = abstract_mesh({"data": 2, "context": 4, "expert": 2, "model": 2}, 32)
    info = parameter(("context", None, "model"), {"context", "model"})
    placement = parameter_sharding(Placement(("context", "data", "model")), info, TOKENS, mesh)
    assert placement.mean_axes == ("data",)
    assert placement.shard_only_axes == ()
    assert placement.divisor == 4


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": np.zeros((6, 4))}, r"batch\['x'\] has 6 examples.*multiple of the 4 devices"),
        ({"x": np.zeros((8, 3))}, r"batch\['x'\] has 3 entries along dim 1.*the 2 devices"),
        ({"x": np.zeros((8, 6))}, r"batch\['x'\] has 6 positions.*multiple of 4, two half blocks"),
        (
            {"x": np.zeros((8, 4)), "w": np.zeros(8)},
            r"batch\['w'\] has shape \(8,\).*\[B, S, ...\]",
        ),
        (
            {"x": np.zeros((8, 4)), "y": np.zeros((8, 6))},
            "different numbers of entries along dim 1",
        ),
        ({"x": np.zeros(8)}, "some entries along dim 1"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(devices8, batch, message):
    mesh = make_mesh({"data": 4, "context": 2}, devices8)
    with pytest.raises(ValueError, match=message):
        check_batch("batch", batch, mesh, TOKENS)


class PerToken(nn.Module):
    """A model that computes each position of a sequence separately."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(jnp.tanh(nn.Dense(16)(x)))


def test_a_dim_besides_the_first_may_be_split(devices8):
    rng = np.random.default_rng(0)
    inputs, labels = (rng.normal(size=(8, 12, n)).astype(np.float32) for n in (8, 4))
    mask = (rng.random((8, 12)) < 0.5).astype(np.float32)  # So the devices have different counts.
    batch = Batch(inputs=inputs, labels=labels, mask=mask)
    mesh = make_mesh({"data": 4, "context": 2}, devices8)
    options = {"mesh": mesh, "batch": batch, "num_minibatches": 2, "min_weight_size": 1}
    program = fsdp(
        PerToken(), optax.sgd(1.0), masked_square_loss, context_axis="context", **options
    )
    assert ("data", "context") in program.layout.params["Dense_0"]["kernel"]
    assert program.batch_sharding.spec == P(("data",), ("context",))
    state = program.init(jax.random.key(0))
    params = jax.device_get(state.params)
    new_state, metrics = program.train_step(state, batch)

    def whole_loss(params):
        return masked_square_loss(params, PerToken().apply, batch, None)[0]

    grads = jax.tree.map(np.subtract, params, jax.device_get(new_state.params))
    expected = jax.jit(jax.grad(whole_loss))(params)
    chex.assert_trees_all_close(grads, expected, rtol=1e-4, atol=1e-6)
    assert metrics["loss"][1] == mask.sum()
    assert program.eval_step(new_state, batch)["loss"][1] == mask.sum()


@pytest.mark.parametrize("size", [1, 2, 4, 8, 3])
def test_a_device_has_two_half_blocks_of_each_sequence(devices8, size):
    others = 8 // size
    mesh = make_mesh({"data": others, "context": size}, devices8[: others * size])
    x = np.arange(4 * size * 2).reshape(2, 2 * size * 2)

    def on_device(x):
        return to_zigzag({"x": x, "scale": jnp.ones(())}, "context")["x"]

    run = jax.jit(
        Manual(mesh, ()).run(on_device, in_specs=P(None, "context"), out_specs=P(None, "context"))
    )
    halves = x.reshape(2, 2 * size, 2)
    order = [block for c in range(size) for block in (c, 2 * size - 1 - c)]
    np.testing.assert_array_equal(run(x), halves[:, order].reshape(x.shape))


def test_how_a_gradient_is_reduced_belongs_to_its_placement(devices8):
    mesh = make_mesh({"data": 2, "stage": 2, "expert": 2}, devices8)
    mode = Manual(mesh, ("data",))
    place = ParameterSharding((None,), mean_axes=("data",), sum_axes=("stage", "expert"), divisor=5)

    def part(g):
        return mode.sync(place, g, mode.scatter(place, g, g))

    own = np.arange(8, dtype=np.float32).reshape(2, 2, 2) ** 2
    run = jax.jit(mode.run(part, in_specs=(P("data", "stage", "expert"),), out_specs=P()))
    np.testing.assert_allclose(run(own).item(), own.sum((1, 2)).mean(0) / 5)
    assert run.lower(own).as_text().count('"stablehlo.all_reduce"') == 2


def test_a_schedule_may_run_minibatches_in_another_order():
    order = []

    def backwards(loss, params, collections, minibatches, reduce):
        order.extend(range(len(minibatches[1]))[::-1])
        return unrolled(
            loss, params, collections, jax.tree.map(lambda x: x[::-1], minibatches), reduce
        )

    def loss(params, collections, x, key):
        pair = (params * x).sum(), jnp.asarray(x.size)
        return Mean((params * x).mean(), pair[1]), {"loss": pair}, collections

    x = jnp.arange(6.0) ** 2
    params = jnp.ones(()), optax.MaskedNode()
    results = [
        accumulate(loss, params, {}, split_minibatches(x, 3), jax.random.key(0), schedule=schedule)
        for schedule in (unrolled, backwards)
    ]
    assert order == [2, 1, 0]
    np.testing.assert_allclose(results[1][0], x.mean())
    chex.assert_trees_all_close(*results)
