"""Products in float8 and int8: their errors, their gradients, and what they refuse."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from manualpar.layers import MoE, SplitDense, float8_dot_general, int8_dot_general
from manualpar.layers.low_precision import dot_general
from manualpar.models.layer_config import LowPrecision
from manualpar.models.transformer import Transformer
from manualpar.quantization.quantized_collectives import FLOAT8, encode_float8, float8_scale

ROWS = (((1,), (0,)), ((), ()))
# A product with batch dims, and with contracted dims that the factors have in another order.
BATCHED = (((3, 1), (0, 3)), ((2,), (1,)))
SHAPES = {ROWS: ((64, 32), (32, 48)), BATCHED: ((5, 7, 3, 11), (11, 3, 9, 7, 2))}


def normal(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def error(found, expected):
    return float(jnp.linalg.norm((found - expected).ravel()) / jnp.linalg.norm(expected.ravel()))


@pytest.mark.parametrize("dims", SHAPES, ids=["rows", "batched"])
@pytest.mark.parametrize(("product", "most"), [("float8", 0.065), ("int8", 0.012)])
def test_a_product_and_its_gradients_are_near_those_of_exact_products(product, most, dims):
    """A code in e4m3 is off by up to a 16th, one in int8 by up to a 254th of the largest."""
    x, y = (normal(seed, shape) for seed, shape in enumerate(SHAPES[dims]))
    found, pullback = jax.vjp(lambda x, y: dot_general(product, x, y, dims), x, y)
    expected, exact_pullback = jax.vjp(lambda x, y: jax.lax.dot_general(x, y, dims), x, y)
    g = normal(2, expected.shape)
    errors = [error(found, expected), *map(error, pullback(g), exact_pullback(g))]
    assert max(errors) < most
    assert min(errors) > 1e-4  # Nothing was multiplied exactly.


def test_each_factor_of_a_float8_product_is_rounded_once():
    """The gradients take the codes of the factors, and both take those of the result's gradient."""
    gradient = jax.grad(lambda *xs: float8_dot_general(*xs, ROWS).sum(), (0, 1))
    traced = str(jax.make_jaxpr(gradient)(normal(0, (16, 32)), normal(1, (32, 8))))
    assert traced.count("new_dtype=float8_e4m3fn") == 2
    assert traced.count("new_dtype=float8_e5m2") == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_float8_product_does_not_depend_on_a_power_of_two(dtype):
    """So it hardly matters which devices' numbers choose the scale."""
    x, y = normal(0, (16, 32), dtype), normal(1, (32, 8), dtype)
    found = float8_dot_general(x, y, ROWS)
    assert found.dtype == dtype
    np.testing.assert_array_equal(float8_dot_general(4 * x, y / 8, ROWS), found / 2)


def test_codes_of_decoded_numbers_are_the_same():
    x = normal(0, (64, 64), jnp.bfloat16) * jnp.exp2(normal(1, (64, 1), jnp.bfloat16) * 4)

    def decoded(x):
        scale = float8_scale(jnp.abs(x).max(), FLOAT8)
        return encode_float8(x, scale, FLOAT8).astype(x.dtype) * scale.astype(x.dtype)

    np.testing.assert_array_equal(decoded(decoded(x)), decoded(x))


@pytest.mark.parametrize(
    ("largest", "scale"),
    [(448, 1), (448.001, 2), (449, 2), (1e-30, 2**-108), (0, 1), (jnp.inf, jnp.nan)],
)
def test_a_scale_is_the_smallest_power_of_two_that_fits(largest, scale):
    np.testing.assert_equal(float(float8_scale(jnp.float32(largest), FLOAT8)), float(scale))


@pytest.mark.parametrize("matmul", ["float8", "int8"])
@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_zeros_give_zeros_and_what_is_not_finite_shows(matmul, bad):
    x, y = jnp.zeros((4, 8)).at[1, 2].set(bad), normal(1, (8, 3))
    found = dot_general(matmul, x, y, ROWS)
    assert bool(jnp.isfinite(found).all()) is (bad == 0)


def test_flax_layers_take_the_product():
    x = normal(0, (4, 6, 8))
    layers = [
        nn.Dense(3, dot_general=float8_dot_general),
        nn.DenseGeneral((2, 3), axis=(1, 2), dot_general=int8_dot_general),
    ]
    for layer in layers:
        params = layer.init(jax.random.key(0), x)
        exact = layer.clone(dot_general=jax.lax.dot_general).apply(params, x)
        assert 1e-4 < error(layer.apply(params, x), exact) < 0.1
    layer = nnx.Linear(8, 3, use_bias=False, dot_general=float8_dot_general, rngs=nnx.Rngs(0))
    assert 1e-4 < error(layer(x), x @ layer.kernel[...]) < 0.1


def test_each_expert_has_scales_of_its_own():
    """An expert with large weights makes those of another no coarser."""
    x = normal(0, (2, 8, 16))
    layer = MoE(2, 32, capacity_factor=4.0, matmul="float8")
    params = nn.unbox(layer.init(jax.random.key(0), x)["params"])
    scaled = {name: params[name].at[0].mul(2**20) for name in ("gate", "up")}
    first = params["router"].at[:, 0].set(-100.0).at[:, 1].set(100.0)  # All choose expert 1 first.
    only = layer.clone(top_k=1)
    x = jnp.abs(x)
    found, expected = (
        only.apply({"params": params | more | {"router": first}}, x) for more in (scaled, {})
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: float8_dot_general(jnp.ones((2, 2), jnp.int32), jnp.ones((2, 2)), ROWS),
            "lhs has the dtype int32, expected a floating-point dtype",
        ),
        (
            lambda: int8_dot_general(
                jnp.ones((2, 2)), jnp.ones((2, 2)), ROWS, out_sharding=jax.P()
            ),
            "out_sharding is .*, expected None",
        ),
        (
            lambda: SplitDense((2, 2), (None, None), matmul="fp8").init(
                jax.random.key(0), jnp.ones((1, 2))
            ),
            "has matmul='fp8', expected one of",
        ),
        (
            lambda: MoE(2, 4, capacity_factor=None, matmul="int8").init(
                jax.random.key(0), jnp.ones((1, 2, 4))
            ),
            "matmul is 'int8', expected '' without a capacity",
        ),
        (
            lambda: Transformer(low_precision=LowPrecision("float8", ("mpl/*",))).init(
                jax.random.key(0), jnp.ones((1, 2), jnp.int32)
            ),
            r"layers is .*'mpl/\*' matches none.*nearest one is 'mlp/up'",
        ),
        (lambda: LowPrecision("fp8"), "matmul is 'fp8', expected one of '', 'float8', 'int8'"),
        (lambda: LowPrecision("", ("mlp/*",)), r"layers is .*expected \('\*',\) without matmul"),
    ],
)
def test_a_sentence_says_what_is_wrong(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "TPU v5 lite", "TPU v6 lite"])
def test_a_chip_without_float8_is_told_of_int8(kind):
    device = jax.sharding.AbstractDevice(kind, None, "gpu" if "NVIDIA" in kind else "tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        x = jax.ShapeDtypeStruct((2, 2), jnp.float32)
        with pytest.raises(ValueError, match=r"is of .*int8_dot_general, or config\.model\.matmul"):
            jax.eval_shape(functools.partial(float8_dot_general, dimension_numbers=ROWS), x, x)
        jax.eval_shape(functools.partial(int8_dot_general, dimension_numbers=ROWS), x, x)
