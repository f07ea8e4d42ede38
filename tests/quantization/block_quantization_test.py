"""Numbers in int8 blocks are off by half a scale at most."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from manualpar.quantization.quantized_collectives import (
    BITS,
    LARGEST,
    LARGEST_CODE,
    dequantize,
    pack_codes,
    quantize,
    quantized_block_size,
    quantized_bytes,
    round_to_bfloat16,
    unpack_codes,
)
from tests.one_device import slow_unless

TINY = float(jnp.finfo(jnp.bfloat16).tiny)
MAGNITUDES = (st.floats(-LARGEST, LARGEST, width=32), st.floats(-1, 1, width=32))
SIZES = [(13, 5), (1, 1), (7, 1), (16, 64), (40, 8), (67, 64), (130, 64)]


@pytest.mark.parametrize("dtype", ["float32", slow_unless((), "bfloat16")])
@pytest.mark.parametrize(("size", "most"), [slow_unless([(13, 5)], *case) for case in SIZES])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_number_is_off_by_half_a_scale_at_most(size, most, dtype, data):
    few = st.sampled_from([0.0, -2.5, 1e-40, LARGEST, TINY])
    elements = data.draw(st.sampled_from([*MAGNITUDES, few]))
    x = data.draw(arrays.arrays(np.float32, (2, size), elements=elements))
    if dtype == "bfloat16":  # Where the largest magnitude is less.
        x = np.clip(x, -3e38, 3e38).astype(jnp.bfloat16)
    block = quantized_block_size(size, most)
    assert 1 <= block <= most
    codes, scales = jax.jit(quantize, static_argnums=1)(x, block)
    y = jax.jit(dequantize)(codes, scales)
    assert (codes.dtype, scales.dtype, y.dtype) == (jnp.int8, x.dtype, x.dtype)
    assert (scales.shape, y.shape) == ((2, -(-size // block)), x.shape)
    np.testing.assert_array_equal(scales.astype(jnp.bfloat16).astype(x.dtype), scales)
    x, y, scales = (np.asarray(each, np.float64) for each in (x, y, scales))
    each = np.repeat(scales, block, -1)[:, :size]
    # What a product in float32 rounds, and the dtype of the scales.
    rounding = np.abs(y) * float(jnp.finfo(dtype).eps)
    bound = np.where(each == 0, 127.5 * TINY, each / 2 * (1 + 1e-6)) + rounding
    assert (np.abs(x - y) <= bound).all()


@pytest.mark.parametrize("code", LARGEST_CODE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_was_decoded_has_the_same_codes_again(dtype, code, data):
    elements = data.draw(st.sampled_from(MAGNITUDES))
    x = data.draw(arrays.arrays(np.float32, (2, 16), elements=elements))
    x = np.clip(x, -3e38, 3e38).astype(dtype)
    once = jax.jit(quantize, static_argnums=1, static_argnames="code")
    codes, scales = once(x, 4, code=code)
    again = once(jax.jit(dequantize)(codes, scales), 4, code=code)
    np.testing.assert_array_equal(again[0], codes)
    np.testing.assert_array_equal(again[1], scales)


def test_every_device_decodes_its_own_part_alike():
    x = np.random.default_rng(0).normal(size=(3, 24)).astype(np.float32)
    codes, scales = map(np.asarray, jax.jit(quantize, static_argnums=1)(x, 6))
    part = jax.jit(dequantize)
    whole = part(codes, scales)
    halves = [part(codes[:, i : i + 12], scales[:, i // 6 : i // 6 + 2]) for i in (0, 12)]
    np.testing.assert_array_equal(np.concatenate(halves, 1), whole)
    thirds = [part(codes[:, i : i + 2], scales[:, i // 6 : i // 6 + 1]) for i in range(0, 24, 2)]
    np.testing.assert_array_equal(np.concatenate(thirds, 1), whole)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_with_a_number_that_is_not_finite_is_not_finite(bad):
    x = np.ones((1, 8), np.float32)
    x[0, 2] = bad
    y = jax.jit(lambda x: dequantize(*quantize(x, 4)))(x)
    assert np.isnan(y[0, :4]).all()
    np.testing.assert_allclose(y[0, 4:], 1, rtol=0.01)


ROWS = [(1, "int8"), (7, "int4"), (256, "int8"), (257, "int4"), (600, "int8"), (600, "int4")]


@pytest.mark.parametrize(("n", "code"), [slow_unless([(7, "int4")], *case) for case in ROWS])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_row_is_off_by_half_a_scale_and_has_the_bytes_that_it_says(n, code, data):
    elements = data.draw(st.sampled_from([*MAGNITUDES, st.sampled_from([0.0, 1e-40, LARGEST])]))
    x = data.draw(arrays.arrays(np.float32, (2, n), elements=elements, fill=elements))
    packed = jax.jit(pack_codes, static_argnums=1)(x, code)
    assert (packed.dtype, packed.shape) == (jnp.uint8, (2, quantized_bytes(n, code)))
    blocks = -(-n // 256)
    fewest = -(-n * BITS[code] // 8) + 2 * blocks
    assert fewest <= quantized_bytes(n, code) <= fewest + blocks
    y = np.asarray(jax.jit(unpack_codes, static_argnums=(1, 2))(packed, n, code), np.float64)
    largest = np.abs(x).max(-1, keepdims=True).astype(np.float64)
    # A scale is at most half a unit of bfloat16 more than the largest magnitude in largest codes.
    bound = largest / LARGEST_CODE[code] * (1 + 2**-8) / 2 * (1 + 1e-6) + 128 * TINY
    assert (np.abs(np.asarray(x, np.float64) - y) <= bound).all()


def test_random_rounding_is_right_on_average_and_off_by_a_scale_at_most():
    x = np.random.default_rng(0).normal(size=(300,)).astype(np.float32)
    each = jax.jit(jax.vmap(lambda key: unpack_codes(pack_codes(x, "int4", key), 300, "int4")))
    y = np.asarray(each(jax.random.split(jax.random.key(0), 4000)), np.float64)
    scale = np.abs(x).max() / 7 * (1 + 2**-7)
    assert (np.abs(y - x) < scale * (1 + 1e-6)).all()
    assert len(np.unique(y[:, 5])) == 2
    # Five standard deviations of the mean of 4000.
    np.testing.assert_allclose(y.mean(0), x, rtol=0, atol=5 * scale / 2 / 4000**0.5)


def test_random_rounding_to_bfloat16_is_right_on_average():
    x = np.random.default_rng(0).normal(size=(300,)).astype(np.float32)
    x[:3] = np.nan, np.inf, -np.inf
    each = jax.jit(jax.vmap(lambda key: round_to_bfloat16(x, key)))
    y = np.asarray(each(jax.random.split(jax.random.key(0), 4000)), np.float64)
    np.testing.assert_array_equal(y[:, :3], np.broadcast_to(x[:3], (4000, 3)))
    x, y = x[3:], y[:, 3:]
    unit = 2.0 ** (np.floor(np.log2(np.abs(x))) - 7)
    assert (np.abs(y - x) < unit).all()
    assert len(np.unique(y[:, 5])) == 2
    error = (y.mean(0) - x) / unit
    assert np.abs(error).max() < 5 / 2 / 4000**0.5
    nearest = np.asarray(round_to_bfloat16(x), np.float64)
    assert (np.abs(nearest - x) <= unit / 2).all()


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_rounding_has_no_pattern(seed):
    """Rows, blocks, neighbours and keys round independently of each other."""
    x = np.full((4, 1024), 0.5, np.float32)
    x[:, ::256] = 127  # The scale is 1.
    keys = jax.random.split(jax.random.key(seed), 64)
    encoded, _ = jax.jit(jax.vmap(lambda key: quantize(x, 256, key=key)))(keys)
    up = np.asarray(encoded, np.float64)
    up = np.delete(up.reshape(64, 4, 4, 256), 0, -1) * 2 - 1
    neighbours = [(up[..., step:], up[..., :-step]) for step in (1, 2, 64)]
    others = [(up, np.roll(up, 1, axis)) for axis in (0, 1, 2)]
    for one, other in ((up, np.ones_like(up)), *neighbours, *others):
        assert abs(np.mean(one * other)) < 6 / one.size**0.5


@pytest.mark.parametrize("code", LARGEST_CODE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_sent_block_with_a_number_that_is_not_finite_is_not_finite(bad, code):
    x = np.ones(400, np.float32)
    x[2] = bad
    y = jax.jit(lambda x: unpack_codes(pack_codes(x, code), 400, code))(x)
    assert np.isnan(y[:200]).all()
    np.testing.assert_allclose(y[200:], 1, rtol=0.01)


@pytest.mark.parametrize("code", LARGEST_CODE)
def test_the_largest_numbers_stay_finite(code):
    x = np.full(7, np.finfo(np.float32).max)
    np.testing.assert_allclose(unpack_codes(pack_codes(x, code), 7, code), x, rtol=0.02)
