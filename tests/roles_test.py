"""Roles of mesh axes: how batches are split, and how the gradients follow from it."""

import dataclasses

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import Batch, abstract_mesh, fsdp, make_mesh
from manualpar.core.gradients import accumulate, split_minibatches, unrolled
from manualpar.modes.manual import Manual
from manualpar.sharding.layout import ParameterInfo, Placement, complete
from manualpar.sharding.roles import AxisRoles
from manualpar.sharding.splitting import check_batch

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
    assert roles == ["data", "context", "storage", "model"]
    assert TOKENS.data_axes == ("data", "context")


def parameter(names, split_axes=()):
    shape = (8,) * len(names)
    return ParameterInfo("p", shape, jnp.float32, names, frozenset(), frozenset(split_axes))


def test_a_placement_follows_from_the_roles():
    mesh = abstract_mesh({"data": 2, "context": 4, "expert": 2, "model": 2}, 32)
    names = ("expert", ("data", "context"), "model")
    placement = complete(Placement(names), parameter(names), TOKENS, mesh)
    assert placement.mean_axes == ("data", "context")
    assert placement.storage_axes == ("model",)
    assert (placement.sum_axes, placement.divisor) == ((), 1)


def test_a_split_parameter_is_neither_gathered_nor_averaged_over_its_axes():
    mesh = abstract_mesh({"data": 2, "context": 4, "expert": 2, "model": 2}, 32)
    info = parameter(("context", None, "model"), {"context", "model"})
    placement = complete(Placement(("context", "data", "model")), info, TOKENS, mesh)
    assert placement.mean_axes == ("data",)
    assert placement.storage_axes == ()
    assert placement.divisor == 4


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": np.zeros((6, 4))}, r"batch\['x'\] has 6 examples.*multiple of the 4 devices"),
        ({"x": np.zeros((8, 3))}, r"batch\['x'\] has 3 entries along dim 1.*the 2 devices"),
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
    """A model that treats every position of a sequence alike."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(jnp.tanh(nn.Dense(16)(x)))


def loss_fn(params, apply_fn, batch, rng):
    error = jnp.square(apply_fn({"params": params}, batch.inputs) - batch.labels).mean(-1)
    total, count = (error * batch.mask).sum(), batch.mask.sum()
    return total / jnp.where(count > 0, count, 1), {"loss": (total, count)}


def test_a_dim_besides_the_first_may_be_split(devices8):
    rng = np.random.default_rng(0)
    inputs, labels = (rng.normal(size=(8, 6, n)).astype(np.float32) for n in (8, 4))
    mask = (rng.random((8, 6)) < 0.5).astype(np.float32)  # Other counts on every device.
    batch = Batch(inputs=inputs, labels=labels, mask=mask)
    mesh = make_mesh({"data": 4, "context": 2}, devices8)
    program = fsdp(PerToken(), optax.sgd(0.1), loss_fn, mesh=mesh, batch=batch, min_weight_size=1)
    mode = Manual(mesh, TOKENS.data_axes)
    step = dataclasses.replace(
        program.step,
        roles=TOKENS,
        mode=mode,
        placements=jax.tree.map(
            lambda info, p: complete(p, info, TOKENS, mesh),
            program.step.model.parameters,
            program.step.placements,
        ),
        num_minibatches=2,
    )
    state = program.init(jax.random.key(0))
    grads, metrics, _ = jax.jit(step.gradients)(state.params, {}, jax.random.key(1), batch)

    def whole_loss(params):
        return loss_fn(params, PerToken().apply, batch, None)[0]

    expected = jax.jit(jax.grad(whole_loss))(jax.device_get(state.params))
    chex.assert_trees_all_close(jax.device_get(grads), expected, rtol=1e-5, atol=1e-7)
    assert metrics["loss"][1] == mask.sum()


def test_how_a_gradient_is_reduced_belongs_to_its_placement(devices8):
    mesh = make_mesh({"data": 2, "stage": 2, "expert": 2}, devices8)
    mode = Manual(mesh, ("data",))
    place = Placement((None,), mean_axes=("data",), sum_axes=("stage", "expert"), divisor=5)

    def part(g):
        return mode.sync(place, g, g)

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
        return (params * x).mean(), {"loss": ((params * x).sum(), jnp.asarray(x.size))}, collections

    x = jnp.arange(6.0) ** 2
    results = [
        accumulate(
            loss, jnp.ones(()), {}, split_minibatches(x, 3), jax.random.key(0), schedule=schedule
        )
        for schedule in (unrolled, backwards)
    ]
    assert order == [2, 1, 0]
    np.testing.assert_allclose(results[1][0], x.mean())
    chex.assert_trees_all_close(*results)
