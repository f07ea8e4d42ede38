"""Causal attention: its values and gradients against a reference, and its choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import abstract_mesh
from manualpar.layers.attention import attention, blockwise_attention, causal_attention
from manualpar.layers.attention.causal_attention import Device
from manualpar.layers.boundaries import platform_traced_for
from tests.layers.attention.reference import arrays, numbers, reference


def assert_is_attention(query, key, value, g, documents=None, *, kind, **options):
    """Compares a kind's values and gradients with the reference."""

    @jax.jit
    def run(query, key, value, g):
        function = lambda *x: attention(*x, documents, kind=kind, **options)  # noqa: E731
        out, pullback = jax.vjp(function, query, key, value)
        return out, *pullback(g)

    expected = reference(query, key, value, documents, g, **options)
    for got, wanted in zip(run(query, key, value, g), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


CASES = {
    "plain": ({"S": 13}, False, {}),
    "a head for each, documents": ({"N": 2, "K": 2}, True, {}),
    "one key head, window": ({"K": 1}, False, {"window": 5}),
    "documents, window": ({"S": 13}, True, {"window": 4}),
    "a window of one": ({"S": 5}, False, {"window": 1}),
    "chunks": ({"K": 1}, False, {"chunk": 4}),
    "chunks and a rest, documents": ({"S": 13}, True, {"chunk": 5}),
    "chunks, window": ({"S": 14}, False, {"chunk": 6, "window": 3}),
    "a chunk for all": ({"S": 5}, True, {"chunk": 8}),
}
CAPPED = {
    "a cap": ({"S": 10}, True, {"soft_cap": 0.5}),
    "a cap, window": ({"K": 1}, False, {"soft_cap": 1.5, "window": 7}),
}


@pytest.mark.parametrize("name", CASES)
def test_xla_is_attention(name):
    shape, has_documents, options = CASES[name]
    given = arrays(**shape)
    documents = numbers(given[0].shape[1]) if has_documents else None
    assert_is_attention(*given, documents, kind="xla", **options)


# A single block has no loop over blocks, so that few cases stand for all.
IN_ONE = ("documents, window", "chunks and a rest, documents", "a cap, window")


@pytest.mark.parametrize(
    ("name", "block"), [*((x, 3) for x in CASES | CAPPED), *((x, 16) for x in IN_ONE)]
)
def test_blocks_are_attention(monkeypatch, name, block):
    """Several blocks, of which the last one may be filled, or a single one."""
    monkeypatch.setattr(blockwise_attention, "CPU_BLOCK", block)
    shape, has_documents, options = (CASES | CAPPED)[name]
    given = arrays(**shape)
    documents = numbers(given[0].shape[1]) if has_documents else None
    # It is what is chosen on CPUs.
    assert_is_attention(*given, documents, kind="", **options)


def test_the_platform_is_that_of_the_mesh_around(devices8):
    found = []

    def look(x):
        found.append(platform_traced_for())
        return x

    whole = jax.ShapeDtypeStruct((8,), jnp.float32)
    for mesh in (
        jax.sharding.Mesh(np.asarray(devices8), ("data",)),
        abstract_mesh({"data": 8}, 8),
    ):
        run = jax.shard_map(look, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        jax.eval_shape(run, whole)
    assert [*found, platform_traced_for()] == ["cpu", None, jax.default_backend()]


def test_tpus_run_splash_where_it_fits(monkeypatch):
    monkeypatch.setattr(causal_attention, "device_traced_for", lambda: Device("tpu"))

    def is_splash(dtype, devices):
        monkeypatch.setattr(jax, "device_count", lambda: devices)
        heads = arrays(S=128, dtype=dtype)[:3]
        return "pallas_call" in str(jax.make_jaxpr(lambda *x: attention(*x))(*heads))

    assert is_splash("bfloat16", 1)
    assert not is_splash("float16", 1)
    assert not is_splash("bfloat16", 8)  # Without a mesh XLA may split it.
