"""Models with several inputs, and batches that are any tree, train as in plain flax."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from manualpar import data_parallel, fsdp, hsdp, make_mesh

WIDTH = 16


class EncoderDecoder(nn.Module):
    """A model that draws from its own RNG stream, and has statistics that it only reads."""

    @nn.compact
    def __call__(self, source, target, *, z_keys, mask=None, train=True):
        noise = jax.random.normal(self.make_rng("sample"), ())
        memory = nn.tanh(nn.Dense(WIDTH)(source))
        memory = nn.BatchNorm(use_running_average=True)(memory)
        z = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(z_keys)
        memory = memory + nn.Dense(WIDTH, use_bias=False)(z)
        memory = memory if mask is None else memory * mask[:, None]
        return nn.Dense(4)(memory + nn.Dense(WIDTH)(target)) + (noise if train else 0)


class NNXDecoder(nnx.Module):
    def __init__(self, rngs):
        self.source, self.target = nnx.Linear(8, 4, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)

    def __call__(self, source, *, target):
        return self.norm(self.source(source) + self.target(target))


def make_batch():
    source, target, labels = jax.random.normal(jax.random.key(1), (3, 32, 8))
    return {
        "source": source,
        "target": target,
        "mask": jnp.arange(32) % 3 > 0,
        "z_keys": jax.random.split(jax.random.key(2), 32),
        "labels": labels[:, :4],
        "scale": jnp.float32(0.5),
        "key": jax.random.key(3),
    }


BATCH = make_batch()


def init_args(batch):
    return (batch["source"], batch["target"]), {"z_keys": batch["z_keys"], "mask": batch["mask"]}


def loss_fn(params, apply_fn, batch, rng):
    args, kwargs = init_args(batch)
    out = apply_fn({"params": params}, *args, **kwargs, train=False, rngs={"sample": rng})
    weights = 1 + jax.random.uniform(batch["key"], ())
    losses = batch["scale"] * weights * jnp.square(out - batch["labels"]).mean(-1)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


@pytest.fixture(scope="module")
def one_device():
    """Returns the parameters before and after a step of SGD with plain flax."""
    init_rng, rng = jax.random.split(jax.random.key(0))
    args, kwargs = init_args(BATCH)
    model = EncoderDecoder()
    variables = model.init({"params": init_rng}, *args, **kwargs, train=False)
    others = {"batch_stats": variables["batch_stats"]}

    def mean_loss(params):
        def apply_fn(variables, *args, **kwargs):
            return model.apply({**others, **variables}, *args, **kwargs)

        return loss_fn(params, apply_fn, BATCH, rng)[0]

    grads = jax.jit(jax.grad(mean_loss))(variables["params"])
    after = jax.tree.map(lambda p, g: p - 0.5 * g, variables["params"], grads)
    return variables["params"], after


@pytest.mark.parametrize(
    ("builder", "axes", "options"),
    [
        pytest.param(fsdp, {"data": 8}, {"num_minibatches": 2}, marks=pytest.mark.slow),
        (fsdp, {"data": 8}, {"num_minibatches": 2, "use_scan": True, "mode": "explicit"}),
        pytest.param(data_parallel, {"data": 2, "model": 4}, {}, marks=pytest.mark.slow),
        pytest.param(hsdp, {"replica": 2, "data": 4}, {}, marks=pytest.mark.slow),
    ],
)
def test_a_model_of_several_inputs_is_that_of_plain_flax(
    devices8, one_device, builder, axes, options
):
    if builder is not data_parallel:
        options = {"min_weight_size": 16, **options}
    program = builder(
        EncoderDecoder(),
        optax.sgd(0.5),
        loss_fn,
        mesh=make_mesh(axes),
        batch=BATCH,
        init_args=init_args,
        **options,
    )
    before, after = one_device
    state = program.init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)
    assert set(state.collections) == {"batch_stats"}
    state, _ = program.train_step(state, BATCH)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        jax.device_get(state.params),
        after,
    )


def test_an_nnx_model_is_made_without_being_called(devices8):
    def nnx_loss(params, apply_fn, batch, rng):
        out = apply_fn({"params": params}, batch["source"], target=batch["target"])
        return out.mean(), {"loss": (out.sum(), out.size)}

    mesh = make_mesh({"data": 8})
    program = fsdp(NNXDecoder, optax.sgd(1.0), nnx_loss, mesh=mesh, batch=BATCH, min_weight_size=0)
    assert set(program.abstract_state.collections) == {"batch_stats"}


class Vae(nn.Module):
    """The autoencoder of flax's example, which takes a random key as an argument."""

    @nn.compact
    def __call__(self, x, z_rng):
        mean = nn.Dense(4)(x)
        return nn.Dense(8)(mean + jax.random.normal(z_rng, mean.shape))


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_a_key_among_the_arguments(devices8, make_key):
    def vae_loss(params, apply_fn, batch, rng):
        out = apply_fn({"params": params}, batch["image"], rng)
        return out.mean(), {"loss": (out.sum(), out.size)}

    batch = {"image": jnp.ones((8, 8))}
    program = fsdp(
        Vae(),
        optax.sgd(1.0),
        vae_loss,
        mesh=make_mesh({"data": 8}),
        batch=batch,
        min_weight_size=0,
        init_args=lambda batch: ((batch["image"], make_key(0)), {}),
    )
    init_rng, _ = jax.random.split(jax.random.key(7))
    plain = Vae().init({"params": init_rng}, batch["image"], make_key(0))["params"]
    params = jax.device_get(program.init(jax.random.key(7)).params)
    jax.tree.map(np.testing.assert_array_equal, params, plain)


def build(batch, **options):
    return data_parallel(
        EncoderDecoder(),
        optax.sgd(1.0),
        loss_fn,
        mesh=make_mesh({"data": 8}),
        batch=batch,
        **{"init_args": init_args, **options},
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": "yes"}, r"data_parallel: batch\['mask'\] is a str, expected an array"),
        ({"table": jnp.ones((12, 8))}, r"batch\['table'\] has 12 examples, .* 8 devices"),
        ({"table": jnp.ones((16, 8))}, r"different numbers .*batch\['table'\] has 16"),
        ({"key": jax.random.PRNGKey(0)}, r"batch\['key'\] has 2 examples"),
    ],
)
def test_a_batch_that_does_not_split_is_refused_by_name(devices8, change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build({**BATCH, **change})


def test_a_wrapper_around_a_module_is_refused_with_the_module(devices8):
    class Wrapper:
        """A wrapper around a module, as the Flax models of transformers are."""

        module = Vae()

    mesh = make_mesh({"data": 8})
    with pytest.raises(TypeError, match=r"expected an instance of .* Pass its \.module\."):
        data_parallel(Wrapper(), optax.sgd(1.0), loss_fn, mesh=mesh, batch=BATCH)


def test_what_is_no_init_args_is_refused(devices8):
    with pytest.raises(TypeError, match="init_args=3, expected a function of the batch"):
        build(BATCH, init_args=3)
    with pytest.raises(ValueError, match="batch has no arrays of shape"):
        build({"scale": 1.0})


def test_without_init_args_the_model_is_initialised_as_the_loss_calls_it(devices8):
    found, given = build(BATCH, init_args=None), build(BATCH)
    assert [info for info, _ in found.parameters] == [info for info, _ in given.parameters]
