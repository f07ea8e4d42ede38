import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from manualpar.core.model.loss_function import call_loss

LOSSES = jnp.arange(8.0)


def test_what_it_returns_becomes_arrays():
    loss, metrics = call_loss(lambda: (LOSSES.mean(), {"loss": (LOSSES.sum(), 8), "n": (1.0, 2)}))
    assert loss == 3.5
    assert metrics["loss"][0] == 28
    assert metrics["loss"][1].dtype == jnp.int32
    assert metrics["n"][1] == 2


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (LOSSES.mean(), TypeError, "loss_fn returned a .*, expected the pair"),
        ((LOSSES, {}), ValueError, r"the loss is float32\[8\], expected a floating-point scalar"),
        ((jnp.int32(8), {}), ValueError, r"the loss is int32\[\], expected a floating-point"),
        ((jnp.complex64(8), {}), ValueError, r"the loss is complex64\[\]"),
        ((None, {}), ValueError, "the loss is a NoneType"),
        ((LOSSES.mean(), LOSSES.mean()), TypeError, "metrics is a .*, expected a dict"),
        ((LOSSES.mean(), {}), ValueError, r"metrics has \[\], expected a 'loss'"),
        (
            (LOSSES.mean(), {"lose": (LOSSES.sum(), 8)}),
            ValueError,
            r"metrics has \['lose'\].*Did you mean it by 'lose'",
        ),
        (
            (LOSSES.mean(), {"loss": LOSSES.sum()}),
            ValueError,
            r"metrics\['loss'\] is \(float32\[\]\), expected a pair of scalars",
        ),
        (
            (LOSSES.mean(), {"loss": (LOSSES.sum(), None)}),
            ValueError,
            r"metrics\['loss'\] is \(float32\[\], a NoneType\)",
        ),
        (
            (LOSSES.mean(), {"loss": (LOSSES.sum(), 8), "acc": (LOSSES, 8)}),
            ValueError,
            r"metrics\['acc'\] is \(float32\[8\], a int\), expected a pair of scalars",
        ),
        (
            (LOSSES.mean(), {"loss": (LOSSES.sum(), jnp.bfloat16(300))}),
            ValueError,
            "count of dtype bfloat16, which cannot hold large counts",
        ),
        (
            (LOSSES.mean(), {"loss": (LOSSES.sum(), np.bool_(True))}),
            ValueError,
            "count of dtype bool",
        ),
    ],
)
def test_what_it_returns_is_checked(result, error, message):
    with pytest.raises(error, match=message):
        call_loss(lambda: result)


def test_a_loop_by_another_name_may_not_start_from_a_constant(devices8):
    original = jax.lax.scan, jax.lax.while_loop, jax.lax.cond

    def scan(x):
        return original[0](lambda h, x: (h + x, None), jnp.zeros(2), x)

    def while_loop(x):
        return original[1](lambda h: h.sum() < 3, lambda h: h + x[0], jnp.zeros(2))

    def cond(x):
        return original[2](x.sum() > 0, lambda: jnp.zeros(2), lambda: x[0])

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    for function in (scan, while_loop, cond):
        run = functools.partial(call_loss, function)
        place = r"at loss_function_test.py:\d+ \(return original.*\),"
        message = rf"function, {place} a loop .* has a constant .* type float32\[2\].*mode='auto'"
        with pytest.raises(TypeError, match=message):
            jax.eval_shape(
                jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data")),
                jax.ShapeDtypeStruct((8, 2), jnp.float32),
            )

    def other():
        raise TypeError("something else")

    with pytest.raises(TypeError, match="something else"):
        call_loss(other)


def test_a_constant_cotangent_is_refused(devices8):
    def pull(x):
        y, vjp = jax.vjp(lambda x: jnp.sin(x).sum(), x)
        return vjp(jnp.ones(y.shape))

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    run = functools.partial(call_loss, pull)
    with pytest.raises(TypeError, match=r"cotangent .* is a constant, .* jnp.ones_like\(y\)"):
        jax.eval_shape(
            jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data")),
            jax.ShapeDtypeStruct((8, 2), jnp.float32),
        )
