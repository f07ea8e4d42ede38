"""A function that types cannot be checked of: its values and gradients are those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from manualpar import make_mesh
from manualpar.core.tracing.jaxprs import all_equations
from manualpar.layers.attention.unchecked import run_unchecked

NAME = "of the kernel"


def _call(function, *args):
    """A kernel that says nothing of mesh axes."""

    def kernel(*refs):
        *ins, out = refs
        out[...] = function(*(ref[...] for ref in ins))

    out = jax.ShapeDtypeStruct(args[0].shape, args[0].dtype)
    return pl.pallas_call(kernel, out_shape=out, interpret=True)(*args)


@jax.custom_vjp
def bent(x, scale, ids):
    """`tanh(x * scale)` where `ids` are more than 1, and `x` elsewhere."""
    return _call(lambda x, w, i: jnp.where(i > 1, jnp.tanh(x * w), x), x, scale, ids)


def _forward(x, scale, ids):
    out = checkpoint_name(bent(x, scale, ids), NAME)
    return out, (x, scale, ids, out)


def _backward(kept, g):
    x, scale, ids, out = kept
    of_x = _call(lambda g, w, i, y: jnp.where(i > 1, g * w * (1 - y * y), g), g, scale, ids, out)
    of_scale = _call(lambda g, x, i, y: jnp.where(i > 1, g * x * (1 - y * y), 0), g, x, ids, out)
    return of_x, of_scale, None


bent.defvjp(_forward, _backward)


def arrays():
    x = jax.random.normal(jax.random.key(0), (8, 4))
    scale = jax.random.normal(jax.random.key(1), (8, 2))
    return x, scale, jnp.arange(16, dtype=jnp.int32).reshape(8, 2) % 4


def on_device(run, x, scale, ids):
    """Each device has some rows and columns of `x`, columns of `scale`, and rows of `ids`."""
    scale = jnp.tile(scale[:1], (x.shape[0], 2))
    return run(x, scale, jnp.tile(ids[:, :1], (1, 2)))


def together(x, scale, ids):
    """What the devices compute, in plain arrays."""
    return jnp.where(ids[:, :1] > 1, jnp.tanh(x * jnp.repeat(scale[:1], 2, 1)), x)


bridged = functools.partial(on_device, functools.partial(run_unchecked, bent))


def over_devices(function, mesh, *, out_specs):
    in_specs = (P("data", "model"), P(None, "model"), P("data"))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


@pytest.fixture
def mesh(devices8):
    return make_mesh({"data": 4, "model": 2}, devices=devices8)


def test_the_check_refuses_the_kernel_by_itself(mesh):
    """If it does no longer, this bridge is not needed any more."""
    with pytest.raises(ValueError, match="manual_axis_type"):
        over_devices(functools.partial(on_device, bent), mesh, out_specs=P("data", "model"))(
            *arrays()
        )


@pytest.mark.parametrize("wrap", ["plain", "scan", "vmap"])
def test_values_and_gradients_are_those_of_one_device(mesh, wrap):
    x, scale, ids = arrays()

    def step(x, scale, ids):
        def apply(x, scale):
            if wrap == "scan":
                body = jax.checkpoint(lambda x, _: (bridged(x, scale, ids), None))
                return jax.lax.scan(body, x, None, length=2)[0]
            if wrap == "vmap":
                return jax.vmap(bridged, in_axes=(0, None, None))(x[None], scale, ids)[0]
            return bridged(x, scale, ids)

        def loss(x, scale):
            return jax.lax.psum(jnp.sin(apply(x, scale)).sum(), ("data", "model"))

        value, grads = jax.value_and_grad(loss, (0, 1))(x, scale)
        return apply(x, scale), value, grads

    specs = (P("data", "model"), P(), (P("data", "model"), P(None, "model")))
    found = over_devices(step, mesh, out_specs=specs)(x, scale, ids)

    def expected(x, scale):
        once = together(x, scale, ids)
        return together(once, scale, ids) if wrap == "scan" else once

    loss = lambda *args: jnp.sin(expected(*args)).sum()  # noqa: E731
    value, grads = jax.value_and_grad(loss, (0, 1))(x, scale)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        found,
        (expected(x, scale), value, grads),
    )


def test_the_result_varies_over_the_axes_of_all_arguments(mesh):
    def local(x, scale, ids):
        out = bridged(x, scale, ids)
        assert jax.typeof(out).mat.varying == {"data", "model"}
        same = run_unchecked(jnp.sin, scale)
        assert jax.typeof(same).mat.varying == {"model"}
        return out

    over_devices(local, mesh, out_specs=P("data", "model")).trace(*arrays())


@pytest.mark.parametrize(("policy", "calls"), [(None, 4), (NAME, 3)])
def test_what_the_function_names_is_not_computed_again(mesh, policy, calls):
    policy = policy and jax.checkpoint_policies.save_only_these_names(policy)

    def step(x, scale, ids):
        run = jax.checkpoint(lambda x: bridged(x, scale, ids), policy=policy)
        return jax.grad(lambda x: jax.lax.psum(jnp.sin(run(x)).sum(), ("data", "model")))(x)

    traced = over_devices(step, mesh, out_specs=P("data", "model")).trace(*arrays()).jaxpr.jaxpr
    kernels = [eqn for eqn in all_equations(traced) if eqn.primitive.name == "pallas_call"]
    assert len(kernels) == calls


def test_without_a_mesh_it_is_the_function():
    x, scale, ids = (jnp.ones((8, 4)), jnp.full((8, 4), 2.0), jnp.full((8, 4), 3))
    np.testing.assert_array_equal(run_unchecked(bent, x, scale, ids), bent(x, scale, ids))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.lax.psum(x, "data"),
        lambda x: jax.lax.scan(lambda x, _: (x + jax.lax.pmax(x, "model"), None), x, None, 2)[0],
        lambda x: x * jax.lax.axis_index("data"),
    ],
)
def test_what_names_a_mesh_axis_is_refused(mesh, function):
    with pytest.raises(ValueError, match=r"run_unchecked: the function .*(data|model).* outside"):
        over_devices(lambda x, *_: run_unchecked(function, x), mesh, out_specs=P("data", "model"))(
            *arrays()
        )
