"""Dropout's masks are the same where activations are, and differ where these are split."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from manualpar import fold_rng_over_axis, make_mesh
from manualpar.core.model.interface import interface_of, key_like
from manualpar.core.parameters.collectives import cast_to_varying

X = jax.random.normal(jax.random.key(3), (2, 16, 8))
MESH = {"data": 2, "model": 4}


class Looped(nn.Module):
    """In a loop whose body is computed again for the backward pass."""

    @nn.compact
    def __call__(self, x):
        class Body(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.Dropout(0.2)(x, deterministic=False), None

        loop = nn.scan(nn.remat(Body), split_rngs={"dropout": True}, length=2)
        return loop()(x, None)[0]


class Attending(nn.Module):
    broadcast: bool = False

    @nn.compact
    def __call__(self, x):
        attention = nn.MultiHeadDotProductAttention(
            2, dropout_rate=0.5, broadcast_dropout=self.broadcast, deterministic=False
        )
        return attention(x)


class NNXLooped(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Dropout(0.2, rngs=rngs))
        self.dropout = make(rngs.split(2))

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(dropout, x):
            return dropout(x)

        return run(self.dropout, x)


class NNXAttending(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(
            2,
            8,
            dropout_rate=0.5,
            broadcast_dropout=False,
            decode=False,
            deterministic=False,
            rngs=rngs,
        )

    def __call__(self, x):
        return self.attention(x)


MODELS = {
    "linen": Looped(),
    "linen's attention": Attending(),
    "linen's attention, one mask for all heads": Attending(True),
    "nnx": NNXLooped,
    "nnx's attention": NNXAttending,
}


@pytest.fixture(scope="module")
def outputs(devices8):
    """What each model makes on each device of the same numbers, split by their type or whole."""
    models = {name: interface_of(model) for name, model in MODELS.items()}
    init = jax.jit(
        lambda: {
            name: model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
            for name, model in models.items()
        }
    )
    variables = init()

    def on_device(variables, x):
        key = fold_rng_over_axis(jax.random.key(0), "data")
        split = cast_to_varying(x, ("model",))

        def run(name, x, key=key):
            out = models[name].apply(variables[name], x, rngs={"dropout": key})
            return cast_to_varying(out, tuple(MESH))[None]

        constant = run("linen's attention", split, jax.random.key(0))
        whole, splits = ({name: run(name, x) for name in models} for x in (x, split))
        return {"whole": whole, "split": splits, "a constant key": constant}

    run = jax.shard_map(
        on_device,
        mesh=make_mesh(MESH, devices8),
        in_specs=(P(), P("data")),
        out_specs=P(("data", "model")),
        check_vma=True,
    )
    got = jax.jit(run)(variables, jnp.concatenate([X, X]))
    return jax.tree.map(lambda x: np.asarray(x).reshape(2, 4, -1), got), variables


def number_of_different(rows):
    return len({row.tobytes() for row in rows.reshape(-1, rows.shape[-1])})


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_masks_differ_along_a_model_axis_where_activations_do(outputs, name):
    whole, split = (outputs[0][way][name] for way in ("whole", "split"))
    np.testing.assert_array_equal(whole, whole[:, :1].repeat(4, axis=1))
    assert number_of_different(whole) == 2
    assert number_of_different(split) == (2 if "one mask" in name else 8)


@pytest.mark.slow
def test_a_key_that_is_the_same_on_all_devices_stays_as_it_is(outputs):
    assert number_of_different(outputs[0]["a constant key"]) == 1


@pytest.mark.parametrize("name", ["linen", "linen's attention"])
def test_what_is_not_split_is_dropped_as_flax_drops_it(outputs, name):
    got, variables = outputs
    key = jax.random.fold_in(jax.random.key(0), 1)
    expected = MODELS[name].apply(variables[name], X, rngs={"dropout": key})
    np.testing.assert_allclose(got["whole"][name][1, 0], expected.ravel(), rtol=1e-6)


def keys_like_what_varies_over_all_axes(mesh):
    """The data of the key of each device, before and after."""

    def on_device(x):
        key = fold_rng_over_axis(jax.random.key(0), "data")
        keys = cast_to_varying((key, key_like(key, x)), mesh.axis_names)
        return jax.tree.map(lambda key: jax.random.key_data(key)[None], keys)

    everywhere = P(mesh.axis_names)
    run = jax.shard_map(
        on_device, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=True
    )
    return jax.device_get(jax.jit(run)(jnp.zeros(8)))


def test_along_an_axis_of_one_device_a_key_stays_as_it_is(devices8):
    mesh = make_mesh({"data": 8, "model": 1}, devices8)
    np.testing.assert_array_equal(*keys_like_what_varies_over_all_axes(mesh))


def test_a_key_differs_along_each_axis_that_activations_are_split_over(devices8):
    mesh = make_mesh({"data": 2, "model": 2, "expert": 2}, devices8)
    before, after = keys_like_what_varies_over_all_axes(mesh)
    assert (number_of_different(before), number_of_different(after)) == (2, 8)
