"""Attention and positions of a split sequence are those of one device: values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import make_mesh
from manualpar.core.tracing.scopes import CONTEXT_SCOPE, purpose_of
from manualpar.inspect import trace_collectives
from manualpar.layers import Context
from manualpar.layers.attention import blockwise_attention
from manualpar.layers.attention.blockwise_attention import ATTENDED
from tests.layers.attention.reference import zigzag

B, N, H = 2, 8, 4


def arguments(length, kv_heads, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (N, kv_heads, kv_heads, N)
    q, k, v, w = (
        jax.random.normal(key, (B, length, heads, H)).astype(dtype)
        for key, heads in zip(keys, shapes, strict=True)
    )
    # Documents of unequal lengths, of which some begin within a block.
    begins = jax.random.uniform(jax.random.key(1), (B, length)) < 5 / length
    return q, k, v, w, begins


def loss_of(context, q, k, v, w, begins, *, packed, remat=False, **scoring):
    documents = context.cumsum(begins) if packed else None

    def attention(q, k, v):
        # The reference does not compute in blocks.
        kind = "" if context.axis else "xla"
        return context.attention(q, k, v, documents, kind=kind, **scoring)

    if remat:
        policy = jax.checkpoint_policies.save_only_these_names(ATTENDED)
        attention = jax.checkpoint(attention, policy=policy)
    # What the position is counts too.
    turned = jnp.cos(context.positions(q.shape[1]))[None, :, None, None]
    out = attention(q * turned.astype(q.dtype), k, v)
    return (jnp.sin(out.astype(jnp.float32)) * w.astype(jnp.float32)).sum()


def make_step(how, mesh, **options):
    """The loss and the gradients of a sequence that is split over `context`."""
    context, axes = Context("context", how), tuple(mesh)

    def local(q, k, v, w, begins):
        step = jax.value_and_grad(functools.partial(loss_of, context, **options), range(3))
        loss, grads = step(q, k, v, w, begins)
        return jax.lax.psum(loss, axes), grads

    spec = P("data", "context") if "data" in mesh else P(None, "context")
    if "model" in mesh:
        spec = P("data", "context", "model")
    flat = P(*spec[:2])
    run = jax.shard_map(
        local,
        mesh=make_mesh(mesh),
        in_specs=(spec,) * 4 + (flat,),
        out_specs=(P(), (spec,) * 3),
        check_vma=True,
    )
    return jax.jit(run)


def check(how, mesh, *, length=32, kv_heads=2, dtype=jnp.float32, tolerance=2e-5, **options):
    options = {"packed": True} | options
    values = arguments(length, kv_heads, dtype)
    place = zigzag(mesh["context"], length)
    traced = make_step(how, mesh, **options).trace(*(x[:, place] for x in values))
    loss, grads = traced.lower().compile()(*(x[:, place] for x in values))
    options.pop("remat", None)
    one_device = functools.partial(loss_of, Context(None), **options)
    expected, wanted = jax.jit(jax.value_and_grad(one_device, range(3)))(*values)
    assert float(loss) == pytest.approx(float(expected), rel=tolerance)
    for got, want in zip(grads, wanted, strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(want[:, place], np.float32)
        assert np.abs(got - want).max() < tolerance * np.abs(want).max()
    return [one for one in trace_collectives(traced) if purpose_of(one.scope) == CONTEXT_SCOPE]


def num_permutes(devices, layers=1):
    """Of keys and values forward and backward, and of their gradients."""
    return layers * (2 * (devices - 1) + devices)


@pytest.mark.parametrize(
    "scoring", [{"window": 20}, pytest.param({"chunk": 20}, marks=pytest.mark.slow)]
)
def test_a_ring_is_attention(devices8, monkeypatch, scoring):
    del devices8
    # Keys in blocks that do not divide: 8 are two of 3 and one of 2 and what fills it.
    monkeypatch.setattr(blockwise_attention, "CPU_BLOCK", 3)
    sent = check("ring", {"data": 2, "context": 4}, length=64, remat=True, **scoring)
    permutes = [one for one in sent if one.kind == "permute"]
    assert sum(one.times for one in permutes) == num_permutes(4)
    pair = 2 * (64 // 4) * 2 * H * 4
    assert sum(one.bytes_sent for one in permutes) == num_permutes(4) * pair


def test_keys_may_vary_over_fewer_axes_than_queries(devices8):
    del devices8

    def gradient(query, key):
        attend = Context("context").attention
        return jax.grad(lambda key: attend(query, key, key).sum())(key)

    same = P(None, "context")
    run = jax.shard_map(
        gradient,
        mesh=make_mesh({"data": 2, "context": 4}),
        in_specs=(P("data", "context"), same),
        out_specs=same,  # Summed over the axis that the queries vary over.
        check_vma=True,
    )
    assert jax.eval_shape(run, jnp.ones((2, 16, 2, 4)), *heads(2, length=16)).shape == (1, 16, 2, 4)


@pytest.mark.parametrize(
    ("how", "scoring"),
    [
        ("ulysses", {"window": 9}),
        ("gather", {"window": 9}),
        pytest.param("ulysses", {"chunk": 9}, marks=pytest.mark.slow),
        pytest.param("gather", {"chunk": 9}, marks=pytest.mark.slow),
    ],
)
def test_all_positions_of_some_heads_or_all_keys_are_attention(devices8, monkeypatch, how, scoring):
    del devices8
    # Blocks that do not divide, of which some have no key in the window or in the chunk.
    monkeypatch.setattr(blockwise_attention, "CPU_BLOCK", 3)
    sent = check(how, {"data": 2, "context": 4}, **scoring)
    assert [one.kind for one in sent].count("all_gather") == (4 if how == "gather" else 2)


MESHES = ({"data": 1, "context": 8}, {"data": 2, "context": 4}, {"data": 2, "context": 2})
THREE = {"data": 2, "context": 2, "model": 2}


@pytest.mark.slow
@pytest.mark.parametrize(("kv_heads", "packed"), [(1, True), (2, False), (8, True)])
@pytest.mark.parametrize("how", ["ring", "ulysses", "gather"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_and_number_of_heads(devices8, mesh, how, kv_heads, packed):
    del devices8
    sent = check(how, mesh, kv_heads=kv_heads, packed=packed)
    if how == "ring":
        assert sum(one.times for one in sent if one.kind == "permute") == num_permutes(
            mesh["context"]
        )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ring", "ulysses", "gather"])
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (THREE, {"kv_heads": 4}),  # Heads are split, so that all arrays vary over a third axis.
        (MESHES[2], {"dtype": jnp.bfloat16, "tolerance": 0.03}),
        (MESHES[1], {"remat": True}),
    ],
    ids=["heads split", "16 bits", "remat"],
)
def test_heads_over_another_axis_fewer_bits_and_checkpoints(devices8, how, mesh, options):
    del devices8
    check(how, mesh, **options)


def split_over(function, mesh=None):
    return jax.shard_map(
        function,
        mesh=mesh or make_mesh({"context": 4}, devices=jax.devices()[:4]),
        in_specs=P(None, "context"),
        out_specs=P(None, "context"),
        check_vma=True,
    )


def on_devices(function, *arrays):
    """Of sequences in zig-zag, from and to the order of the sequence."""
    place = zigzag(4, arrays[0].shape[1])
    run = split_over(function, make_mesh({"data": 2, "context": 4}))
    return jax.jit(run)(*(x[:, place] for x in arrays))[:, np.argsort(place)]


def test_positions_and_sums_are_those_of_the_sequence(devices8):
    del devices8
    context = Context("context")
    x = jnp.arange(2 * 16 * 3).reshape(2, 16, 3) % 7
    np.testing.assert_array_equal(on_devices(context.cumsum, x), jnp.cumsum(x, axis=1))
    np.testing.assert_array_equal(on_devices(context.cumsum, x > 3), jnp.cumsum(x > 3, axis=1))
    positions = on_devices(lambda x: x * 0 + context.positions(4)[None], jnp.zeros((1, 16), int))
    np.testing.assert_array_equal(positions[0], np.arange(16))
    total = on_devices(lambda x: x * 0 + context.total(x.sum(1, keepdims=True)), x)
    np.testing.assert_array_equal(total, jnp.broadcast_to(x.sum(1, keepdims=True), x.shape))
    # A mesh without the axis.
    np.testing.assert_array_equal(Context("other").cumsum(x), jnp.cumsum(x, axis=1))


def heads(*counts, length=8):
    return [jnp.ones((1, length, count, 4)) for count in counts]


@pytest.mark.slow
@pytest.mark.optimized
def test_memory_grows_with_a_devices_tokens_and_not_with_their_square(devices8, monkeypatch):
    del devices8
    monkeypatch.setattr(blockwise_attention, "CPU_BLOCK", 32)

    def temporaries(length):
        shapes = jax.eval_shape(lambda: arguments(length, 2))
        step = make_step("ring", {"context": 2}, packed=True)
        return step.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(2048) < 4.5 * temporaries(512)
