"""This package's attention for GPUs, interpreted on CPUs: its values, gradients and tiles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from manualpar import make_mesh
from manualpar.core.tracing.jaxprs import all_equations
from manualpar.inspect.flops import flops_of
from manualpar.layers.attention import causal_attention
from manualpar.layers.attention import triton_attention as triton
from manualpar.layers.attention.blockwise_attention import ATTENDED, Scoring
from manualpar.layers.attention.chunked_attention import attend_in_blocks
from manualpar.layers.attention.triton_attention import Kernels, Tiles
from manualpar.planner.hardware import chip_named
from manualpar.plans.compiler_worker import tracing_for
from tests.layers.attention.reference import arrays, numbers, reference
from tests.one_device import slow_unless

attend = functools.partial(triton.triton_attention, interpret=True)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    small = Kernels(Tiles(32, 16, 4, 1), Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1))
    monkeypatch.setattr(triton, "NARROW", small)
    monkeypatch.setattr(triton, "LENGTH", 32)


def pulled(documents, options, *arrays):
    *arguments, g = arrays
    out, pullback = jax.vjp(lambda *x: attend(*x, documents, **options), *arguments)
    return out, *pullback(g)


def assert_is_reference(found, arrays, documents, options, *, tolerance=2e-5):
    *arguments, g = arrays
    for got, wanted in zip(found, reference(*arguments, documents, g, **options), strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), wanted, rtol=0, atol=tolerance)


def runs_of_documents(S, B=2):
    """Documents that follow each other, some longer than several tiles, one of one position."""
    lengths = [[70, 1, 20, S], [33, S, 1, 1]]
    of_rows = [np.repeat(np.arange(4), row)[:S] for row in lengths[:B]]
    return jnp.asarray(np.stack(of_rows), jnp.int32)


CASES = {
    "groups, documents, padded": ({"S": 100}, runs_of_documents, {}),
    "documents that come again": ({"S": 128, "K": 1}, numbers, {}),
    "a window": ({"S": 128, "K": 4}, None, {"window": 70}),
    "a cap, features to pad": ({"S": 64, "K": 4, "H": 12}, None, {"soft_cap": 2.0}),
    "documents, window, a cap": ({"S": 128}, runs_of_documents, {"window": 60, "soft_cap": 2.0}),
}
FAST = (("groups, documents, padded",), ("documents, window, a cap",))


@pytest.mark.parametrize("name", [slow_unless(FAST, name) for name in CASES])
def test_devices_compute_what_one_does(name, devices8):
    """Each device has some of the examples and some of the heads."""
    shape, documents_of, options = CASES[name]
    given = arrays(**{"N": 4, "K": 2, "H": 16, **shape})
    documents = documents_of(given[0].shape[1]) if documents_of else None
    heads = "model" if given[1].shape[2] > 1 else None
    run = jax.shard_map(
        lambda documents, *arrays: pulled(documents, options, *arrays),
        mesh=make_mesh({"data": 2, "model": 2}, devices=devices8[:4]),
        in_specs=(P("data"), *(P("data", None, heads),) * 4),
        out_specs=P("data", None, heads),
    )
    assert_is_reference(jax.jit(run)(documents, *given), given, documents, options)


def test_global_arrays_are_split_over_the_examples(devices8):
    given = arrays(S=32, N=2, K=1, H=16)
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=devices8[:2])
    with jax.set_mesh(mesh):
        given = [jax.device_put(x, P("data")) for x in given]
        run = jax.jit(functools.partial(pulled, None, {}))
        compiled = run.lower(*given).compile()
    assert_is_reference(compiled(*given), given, None, {})
    assert "all-gather" not in compiled.as_text()


# -------------------------------------------------------------------------------------------------
# Sinks, which triton's and cuDNN's kernel do not know.


def assert_sinks_are_those_of_blocks(attend, given, sinks):
    def pulled(attend):
        *arguments, g = given
        out, pullback = jax.vjp(attend, *arguments, sinks)
        return out, *pullback(g)

    def in_blocks(query, key, value, sinks):
        return attend_in_blocks(query, key, value, None, Scoring(), sinks)

    for got, wanted in zip(
        jax.jit(pulled, static_argnums=0)(attend), pulled(in_blocks), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)


def test_sinks():
    given, sinks = arrays(S=64, N=4, K=2, H=16), jnp.array([-1.0, 0.0, 1.0, 3.0])
    assert_sinks_are_those_of_blocks(
        lambda query, key, value, sinks: attend(query, key, value, sinks=sinks), given, sinks
    )


@jax.custom_vjp
def kernel_of_nvidia(query, key, value):
    """Stands in for cuDNN: its gradient reads the result and the logarithms, as cuDNN's does."""
    return _kernel_forward(query, key, value)[0]


def _kernel_forward(query, key, value):
    out, log_weights = triton._forward(query, key, value, None, None, SCALE, OPTIONS)
    return out, (query, key, value, out, log_weights)


def _kernel_backward(residuals, g):
    query, key, value, out, log_weights = residuals
    known = (g, log_weights, triton.product_with_gradient(out, g))
    return triton._backward(query, key, value, None, known, SCALE, OPTIONS)


kernel_of_nvidia.defvjp(_kernel_forward, _kernel_backward)
SCALE, OPTIONS = 0.25, triton._Options(None, None, True)


def test_sinks_with_the_kernel_of_nvidia(monkeypatch):
    given, sinks = arrays(S=64, N=4, K=2, H=16), jnp.array([-1.0, 0.0, 1.0, 3.0])
    stand_in = lambda query, key, value, *_: kernel_of_nvidia(query, key, value)  # noqa: E731
    monkeypatch.setattr(causal_attention, "dot_product_attention", stand_in)
    assert_sinks_are_those_of_blocks(
        lambda query, key, value, sinks: causal_attention.cudnn_attention(
            query, key, value, None, sinks=sinks
        ),
        given,
        sinks,
    )


def test_jax_keeps_the_two_arrays_of_nvidias_kernel_that_sinks_replace():
    """Its backward pass reads the result and the logarithms with the sinks in them."""

    def total(*arrays):
        return causal_attention.attention(*arrays[:3], sinks=arrays[3]).astype(jnp.float32).sum()

    heads = [jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)] * 3
    sinks = jax.ShapeDtypeStruct((4,), jnp.float32)
    with tracing_for(chip_named("h100").device):
        traced = jax.make_jaxpr(jax.grad(total, (0, 1, 2, 3)))(*heads, sinks)
    equations = {eqn.primitive.name: eqn for eqn in traced.eqns}
    named = {x: eqn for eqn in traced.eqns if eqn.primitive.name == "name" for x in eqn.outvars}
    backward = equations["dot_product_attention_bwd_wrapper"]
    read = [named[x].invars[0] for x in backward.invars if x in named]
    assert sorted(x.aval.ndim for x in read) == [3, 4]
    assert not set(read) & {*equations["dot_product_attention_fwd_wrapper"].outvars}


# -------------------------------------------------------------------------------------------------
# What is computed and what is kept.


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("documents_of", [None, runs_of_documents, numbers])
def test_spans_have_all_tiles_in_which_a_key_is_seen(documents_of, window):
    S, tiles = 128, Tiles(32, 16, 4, 1)
    documents = documents_of(S) if documents_of else None
    places = np.arange(S)
    seen = (places[:, None] >= places) & (places[:, None] - places < (window or S))
    seen = seen[None]
    if documents is not None:
        seen = seen & np.asarray(documents[:, :, None] == documents[:, None])
    seen = seen.reshape(-1, S // 32, 32, S // 16, 16)
    pairs = triton.pairs_of_tiles(S, tiles, window, documents)
    for spans, some, every in (
        (triton.spans_of_queries(*pairs), seen.any((2, 4)), seen.all((2, 4))),
        (
            triton.spans_of_keys(*pairs),
            *(x.swapaxes(1, 2) for x in (seen.any((2, 4)), seen.all((2, 4)))),
        ),
    ):
        start, full_start, full_stop, stop = (np.asarray(x)[..., None] for x in spans)
        tile = np.arange(some.shape[-1])
        assert ((tile >= start) & (tile < stop) >= some).all()
        assert ((tile >= full_start) & (tile < full_stop) <= every).all()
        assert ((start <= full_start) & (full_start <= full_stop) & (full_stop <= stop)).all()
        if documents_of is not numbers:  # Nothing is computed or masked without need.
            assert ((tile >= start) & (tile < stop) == some).all()
            assert (full_stop - full_start)[..., 0].sum() == every.sum()


def test_documents_that_follow_each_other_compute_few_tiles():
    documents = jnp.repeat(jnp.arange(4), 32)[None]
    some, _ = triton.pairs_of_tiles(128, Tiles(32, 16, 4, 1), None, documents)
    assert int(some.sum()) == 8  # Of 20 with a causal mask.


def test_operations_count_as_those_of_nvidias_kernel():
    """Seven products of half of all scores in a layer, and no kernel runs again if it is named."""
    query, key, value, _ = arrays(S=64, N=4, K=2, H=16, B=1)

    def total(query):
        policy = jax.checkpoint_policies.save_only_these_names(ATTENDED)

        def layer(x, _):
            return jax.checkpoint(lambda x: attend(jnp.sin(x), key, value), policy=policy)(x), None

        return jax.lax.scan(layer, query, None, length=2)[0].sum()

    equations = list(all_equations(jax.make_jaxpr(jax.grad(total))(query).jaxpr))
    kernels = [x for x in equations if x.primitive.name == "pallas_call"]
    # JAX 0.10 leaves it to XLA to drop a kernel whose results nothing reads.
    read = {id(x) for eqn in equations for x in eqn.invars}
    runs = [x for x in kernels if "forward" not in x.params["name"] or id(x.outvars[0]) in read]
    assert sum(map(flops_of, runs)) == 7 * 2 * 4 * 64 * 64 // 2 * 16
