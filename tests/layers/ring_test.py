"""Collective matmuls against products on one device: values, all gradients, and what is sent."""

import collections
import functools
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import Batch, assert_same_as_one_device, fsdp
from manualpar.core.mesh.mesh import make_mesh
from manualpar.core.tracing.scopes import SEQUENCE_SCOPE, purpose_of
from manualpar.inspect import trace_collectives
from manualpar.layers import (
    SplitDense,
    enter,
    enter_ring,
    gather_matmul,
    leave,
    matmul_scatter,
    whole_sequence,
)

B, D, N, H = 8, 6, 8, 3
AXES = ("outer", "inner")


def one_device(scale: Any, x: Any, weights: Any, gate: Any, up: Any, down: Any, *, dim: int) -> Any:
    """The loss of both blocks, written in another way."""
    x = x * scale
    gate, up = jnp.einsum("abd,dnh->abnh", x, gate), jnp.einsum("abd,dnh->abnh", x, up)
    y = jnp.einsum("abnh,nhd->abd", jnp.tanh(gate) * jnp.cumsum(up, dim), down)
    return (weights * jnp.sin(y)).sum()


def plain_block(x: Any, dim: int, gate: Any, up: Any, down: Any) -> Any:
    x = enter(x, AXES, dim)
    gate, up = jnp.tensordot(x, gate, 1), jnp.tensordot(x, up, 1)
    return leave(jnp.tensordot(jnp.tanh(gate) * jnp.cumsum(up, dim), down, 2), AXES, dim)


def ring_block(x: Any, dim: int, gate: Any, up: Any, down: Any) -> Any:
    x = enter_ring(x, AXES, dim)
    gate, up = jax.tree.map(jnp.tanh, gather_matmul(x, gate)), gather_matmul(x, up)
    hidden = whole_sequence(gate) * jnp.cumsum(whole_sequence(up), dim)
    return matmul_scatter(hidden, down, AXES, dim, 2)


def make_arguments(positions: int, dim: int, dtype: Any) -> tuple[jax.Array, ...]:
    """A scale, x, the weights of the loss, and the kernels."""
    keys = jax.random.split(jax.random.key(0), 6)
    shape = (B, positions) if dim == 1 else (positions, B)
    shapes = [(1, 1, D), (*shape, D), (*shape, D), (D, N, H), (D, N, H), (N, H, D)]
    arrays = [0.5 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    return tuple(array.astype(dtype) for array in arrays)


def make_step(block: Any, size: int, dim: int, *, remat: bool = False) -> Any:
    """The loss and all gradients, with `size` devices along `AXES` and the others along `data`."""

    def local(*arguments: jax.Array) -> Any:
        def loss(scale: jax.Array, x: jax.Array, weights: jax.Array, *kernels: jax.Array) -> Any:
            some_block = jax.checkpoint(block, static_argnums=1) if remat else block
            value = weights * jnp.sin(some_block(x * scale, dim, *kernels))
            return jax.lax.psum(value.sum(), ("data", *AXES))

        return jax.value_and_grad(loss, range(6))(*arguments)

    x = P("data", AXES) if dim == 1 else P(AXES, "data")
    specs = (P(), x, x, P(None, AXES), P(None, AXES), P(AXES))
    inner = min(size, 2)
    # The axes of the ring in another order than those of the mesh.
    mesh = make_mesh({"inner": inner, "data": 8 // size, "outer": size // inner})
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), specs), check_vma=True)
    )


def num_permutes(size: int, chunk: int) -> int:
    """Of one ring: one for each other device, and one more if the last chunk is halved."""
    return size - 1 + (size > 2 and size % 2 == 0 and chunk % 2 == 0)


def check(size: int, chunk: int, dim: int = 1, dtype: Any = jnp.float32, **options: Any) -> None:
    arguments = make_arguments(size * chunk, dim, dtype)
    step = make_step(ring_block, size, dim, **options)
    traced = step.trace(*arguments)
    got = traced.lower().compile()(*arguments)
    reference = functools.partial(one_device, dim=dim)
    expected = jax.jit(jax.value_and_grad(reference, range(6)))(*arguments)
    if dtype == jnp.bfloat16:
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            error = jnp.abs(one - other).max() / jnp.abs(other).max()
            assert error < 0.05, error
    else:
        chex.assert_trees_all_close(got, expected, rtol=2e-5, atol=2e-5)
    sent = trace_collectives(traced)
    ours = [one for one in sent if purpose_of(one.scope) == SEQUENCE_SCOPE]
    # Forward and backward of two rings; a rematerialised one is run forward once more.
    rings = 4 + options.get("remat", False)
    kinds = collections.Counter(one.kind for one in ours)
    assert kinds == collections.Counter(permute=rings * num_permutes(size, chunk))
    if not options:
        plain = trace_collectives(make_step(plain_block, size, dim).trace(*arguments))
        assert sum(one.bytes_sent for one in sent) == sum(one.bytes_sent for one in plain)


def test_a_ring_is_the_plain_form(devices8: list[jax.Device]) -> None:
    del devices8
    check(4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_rings_of_every_size(devices8: list[jax.Device], size: int, chunk: int, dim: int) -> None:
    del devices8
    check(size, chunk, dim)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"remat": True}, {"dtype": jnp.bfloat16}], ids=str)
def test_rings_rematerialised_and_in_16_bits(
    devices8: list[jax.Device], options: dict[str, Any]
) -> None:
    del devices8
    check(4, 2, **options)


def test_an_input_may_be_the_same_everywhere(devices8: list[jax.Device]) -> None:
    mesh = make_mesh({"model": 4}, devices=devices8[:4])

    def gradient(x: jax.Array, kernel: jax.Array) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            return jax.lax.psum(matmul_scatter(x, kernel, "model", 0).sum(), "model")

        return jax.grad(loss)(x)

    specs = {"in_specs": (P(), P("model")), "out_specs": P()}
    step = jax.jit(jax.shard_map(gradient, mesh=mesh, check_vma=True, **specs))
    kernel = jnp.arange(32.0).reshape(16, 2)
    # Each device multiplies the same features with other rows.
    expected = jnp.broadcast_to(kernel.reshape(4, 4, 2).sum((0, 2)), (8, 4))
    chex.assert_trees_all_close(step(jnp.ones((8, 4)), kernel), expected)


class Mixer(nn.Module):
    """Products with a split sequence between them; everything is whole before and after."""

    @nn.compact
    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        dense = functools.partial(SplitDense, bias_init=nn.initializers.normal(0.5))
        column, row = ((D, 4 * D), (None, "model")), ((4 * D, D), ("model", None))
        y_BSD = jnp.tanh(dense(*column, name="in")(enter(x_BSD, "model")))
        y_BSD = dense(*row, sequence_dim=1, overlap="ring", name="scattered")(y_BSD)
        chunks = dense(*column, name="gathered")(enter_ring(y_BSD, "model", 1))
        y_BSF = jnp.cumsum(whole_sequence(jax.tree.map(jnp.tanh, chunks)), 1)
        return dense(*row, name="out")(y_BSF)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_in_a_program(devices8: list[jax.Device], size: int) -> None:
    def loss_fn(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
        del rng
        losses = jnp.square(apply_fn({"params": params}, batch.inputs) - batch.labels).sum((1, 2))
        return losses.mean(), {"loss": (losses.sum(), losses.size)}

    x_BSD = jax.random.normal(jax.random.key(0), (B, 8, D))
    batch = Batch(x_BSD, jnp.roll(x_BSD, 1, axis=0))
    mesh = make_mesh({"data": 8 // size, "model": size}, devices=devices8)
    program = fsdp(Mixer(), optax.sgd(1.0), loss_fn, mesh=mesh, batch=batch, min_weight_size=8)
    assert_same_as_one_device(program, batch, jax.random.key(0))
