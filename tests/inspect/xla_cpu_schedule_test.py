"""What XLA for CPUs holds because of the order in which it runs, and of what it makes of products.

Compiled by jax 0.10.2 the cases take 7, 11, 6 and 6 squares; the products of 16 bits 3.5, where the
narrow result has a place of its own, and the last ones as many as here.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import make_mesh
from manualpar.inspect.peak_memory import FUSIONS, FlatProgram, find_peak

N = 64
SQUARE, WIDE = (jax.ShapeDtypeStruct((N, n), jnp.float32) for n in (N, 4 * N))


def squares_held(function, *args, platform):
    """What a function holds besides its arguments, in float32 arrays of `[N, N]`."""
    closed = jax.make_jaxpr(function)(*args)
    flat = FlatProgram()
    body = flat.flatten(closed, [flat.add_value(x) for x in closed.in_avals])
    kept = [value for value in body.results if value is not None]
    fusion = FUSIONS[platform]
    found = find_peak(body.operations, flat.values, kept=kept, fusion=fusion)
    return found.total() / (4 * N * N)


def on_devices(function):
    """A function of an array of every device and one of all."""
    specs = P("data"), P()
    mesh = make_mesh({"data": -1})
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("data"))


def with_a_late_product(x, w):
    return jnp.tanh(x @ w) @ w.T @ (x @ x)


def with_loops(x, w):
    def run(x, _):
        return jnp.tanh(x @ w), x

    first = jax.lax.scan(run, x, length=4)[1].sum(0)
    return jax.lax.scan(run, first, length=4)[1].sum()


def with_repeated_gathers(x, w):
    shard = x[: N // 8]

    def gathered():
        return jax.lax.all_gather(shard, "data", tiled=True)

    return jnp.tanh(x @ gathered() @ w) @ w.T @ gathered() @ gathered()


def with_reductions(x, w):
    del w
    y = x @ x
    return jnp.stack([jax.lax.psum(z, "data") for z in (y, y @ x, y @ x @ x)]).max(0) + x


CASES = {
    # The wide activations, and what they are multiplied to; the late product is made at once.
    "eager": (with_a_late_product, (SQUARE, WIDE), {"cpu": 6, "tpu": 5}),
    # Both stacks, a carry and the next one; on TPUs one stack.
    "stacks": (with_loops, (SQUARE, SQUARE), {"cpu": 10, "tpu": 6}),
    "gather": (
        on_devices(with_repeated_gathers),
        (jax.ShapeDtypeStruct((8 * N, N), jnp.float32), WIDE),
        {"cpu": 6, "tpu": 5.125},  # On TPUs the shard, to be gathered again.
    ),
    # Three operands and three results.
    "reductions": (
        on_devices(with_reductions),
        (jax.ShapeDtypeStruct((8 * N, N), jnp.float32), WIDE),
        {"cpu": 6, "tpu": 4},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_runs_when_decides_what_is_held(name):
    function, args, expected = CASES[name]
    found = {platform: squares_held(function, *args, platform=platform) for platform in expected}
    assert found == expected


def test_products_of_16_bits_are_computed_in_float32():
    x = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
    # Both operands are cast, and the product is written over by nothing narrower.
    assert squares_held(lambda x, w: x @ w, x, x, platform="cpu") == 3
    assert squares_held(lambda x, w: x @ w, x, x, platform="tpu") == 0.5


def test_a_stack_of_16_bits_is_cast_before_a_loop_takes_slices_of_it():
    def function(stack):
        return jax.lax.scan(lambda total, x: (total + x.sum(), None), 0.0, stack)[0]

    stack = jax.ShapeDtypeStruct((4, N, N), jnp.bfloat16)
    assert squares_held(function, stack, platform="cpu") == pytest.approx(4, abs=0.01)
    assert squares_held(function, stack, platform="tpu") == pytest.approx(0, abs=0.01)


def test_a_product_that_makes_float32_takes_16_bits():
    def function(x, w):
        return jnp.dot(x, w, preferred_element_type=jnp.float32)

    x = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
    assert squares_held(function, x, x, platform="cpu") == 1


def test_several_products_at_once_are_transposed_to_be_reshaped():
    def held(subscripts, *shapes):
        args = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        return squares_held(functools.partial(jnp.einsum, subscripts), *args, platform="cpu")

    assert held("bji,bjk->bik", (2, N, N), (2, N, N)) == 2
    shapes = (2, 3, N, N), (2, 3, N, N)
    assert held("bgji,bgjk->bik", *shapes) == 2 + 6
    assert held("bigj,bgjk->bik", (2, N, 3, N), (2, 3, N, N)) == 2
