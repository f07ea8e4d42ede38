"""What a loss reads of experts and of split layers is the whole parameter."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import Batch, assert_same_as_one_device, data_parallel, fsdp, make_mesh
from manualpar.core.model.trace_model import PartOfDevice
from manualpar.core.parameters.placement import ParameterInfo
from manualpar.core.parameters.sharded_parameter import ShardedParameter
from manualpar.layers import MoE
from tests.one_device import slow_unless

LAYER = MoE(num_experts=2, mlp_size=16, top_k=1, gates="sigmoid", model_axis="model")
EXPERTS = {"data": 2, "expert": 2}


def squares(params, apply_fn, batch, rng):
    losses = jnp.square(apply_fn({"params": params}, batch.inputs) - 1).mean((1, 2))
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


def with_penalty(params, apply_fn, batch, rng):
    """A norm, which is no sum of what devices have."""
    loss, metrics = squares(params, apply_fn, batch, rng)
    penalty = jnp.sqrt(sum(jnp.square(x).sum() for x in jax.tree.leaves(nn.unbox(params))))
    return loss + penalty + jnp.abs(params["down"]).max(), metrics


def of_whole(params, apply_fn, batch, rng):
    """The model is applied to what the loss has gathered and changed."""
    whole = jax.tree.map(lambda x: 1.5 * x, nn.unbox(params))
    assert whole["gate"].shape == (2, 8, 16)
    return squares(whole, apply_fn, batch, rng)


CASES = [
    (with_penalty, fsdp, EXPERTS, {"axis_name": tuple(EXPERTS), "keep_gathered": ("down",)}),
    (with_penalty, data_parallel, {"expert": 2, "model": 2}, {"axis_name": "expert"}),
    (of_whole, fsdp, EXPERTS, {"axis_name": tuple(EXPERTS)}),
    (of_whole, data_parallel, {"data": 2, "model": 2}, {}),
]


@pytest.mark.parametrize(
    ("loss_fn", "build", "sizes", "options"),
    [slow_unless((CASES[0], CASES[2]), *case) for case in CASES],
)
def test_a_loss_reads_whole_parameters(devices8, loss_fn, build, sizes, options):
    x = np.random.default_rng(0).normal(size=(8, 4, 8)).astype(np.float32)
    options = options if build is data_parallel else {"min_weight_size": 16, **options}
    mesh, batch = make_mesh(sizes, devices8[:4]), Batch(x, x)
    program = build(LAYER, optax.sgd(1.0), loss_fn, mesh=mesh, batch=batch, **options)
    assert_same_as_one_device(program, batch, jax.random.key(0))


@pytest.mark.parametrize(
    ("shape", "names", "shared_names"),
    [
        ((16, 3), (("expert", "model"), None), ()),
        ((16, 3), (("model", "expert"), None), ()),
        ((4, 8), ("expert", "model"), ()),
        ((4, 2), ("expert", None), (None, "model")),
    ],
)
def test_a_device_takes_its_part_and_one_sum_gives_the_gradient(
    devices8, shape, names, shared_names
):
    mesh = make_mesh({"expert": 2, "model": 4}, devices8)
    split_axes = frozenset(jax.tree.leaves(names))
    info = ParameterInfo("w", shape, np.float32, names, frozenset(), split_axes, shared_names)
    spec = P(*names) if not shared_names else P("expert", "model")
    expected = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    if shared_names:  # Two devices use each column.
        parts, summed = expected.repeat(2, axis=1), lambda x: x.reshape(4, 2, 2).sum(-1)
    else:
        parts, summed = expected, lambda x: x

    def on_device(x, weight):
        take = PartOfDevice({"w": info}, {"w": ShardedParameter(x, names)})

        def loss(x):
            part = take({"w": x})["w"]
            return jnp.vdot(part, weight), part

        return jax.grad(loss, has_aux=True)(x)

    run = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=(P(), spec), out_specs=(P(), spec)))
    weights = np.random.default_rng(0).normal(size=parts.shape).astype(np.float32)
    grad, found = run(expected, weights)
    np.testing.assert_array_equal(found, parts)
    np.testing.assert_allclose(grad, summed(weights), rtol=1e-6)
    assert run.lower(expected, weights).as_text().count('"stablehlo.all_reduce"') == 1
