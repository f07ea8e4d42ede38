"""JAX's attention for TPUs, interpreted on CPUs: its values and gradients, alone and in models."""

import functools
import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from manualpar import Batch, Pipeline, fsdp, make_mesh
from manualpar.core.tracing.jaxprs import inner_jaxprs
from manualpar.core.tracing.scopes import blocks_computed
from manualpar.layers import Context
from manualpar.layers.attention import causal_attention as attention
from manualpar.layers.attention import splash_attention as splash
from manualpar.layers.attention import splash_attention as splash_parts
from manualpar.layers.attention.blockwise_attention import ATTENDED
from manualpar.layers.attention.causal_attention import Device
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.flat_fields import with_fields
from manualpar.planner.hardware import kernels_in
from tests.layers.attention.reference import arrays, numbers, reference, zigzag
from tests.models.transformer_on_one_device import assert_same_as_plain_flax, loss_of
from tests.one_device import slow_unless

attend = functools.partial(splash.splash_attention, interpret=True)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(splash, "BLOCK", 128)
    monkeypatch.setattr(splash, "BLOCKS", (128,))


def pulled(documents, options, *arrays):
    *arguments, g = arrays
    out, pullback = jax.vjp(lambda *x: attend(*x, documents, **options), *arguments)
    return out, *pullback(g)


def assert_is_reference(found, arrays, documents, options, *, tolerance=2e-5):
    *arguments, g = arrays
    for got, wanted in zip(found, reference(*arguments, documents, g, **options), strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), wanted, rtol=0, atol=tolerance)


# What is tried, and of it what each run of the tests tries.
CASES = {
    "groups, documents, padded": ({"S": 200}, True, {}),
    "one key head, window, a cap": ({"S": 256, "K": 2}, False, {"window": 130, "soft_cap": 2.0}),
    "a head for each": ({"S": 256, "K": 4}, False, {}),
    "documents, window, a cap": ({"S": 300, "K": 4}, True, {"window": 140, "soft_cap": 2.0}),
}
FAST = (("groups, documents, padded", True),)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_fused"),
    [slow_unless(FAST, name, is_fused) for name in CASES for is_fused in (True, False)],
)
def test_devices_compute_what_one_does(name, is_fused, monkeypatch, devices8):
    """Each device has some of the examples and some of the heads."""
    if not is_fused:
        monkeypatch.setattr(splash, "LONGEST_FUSED", 0)
    shape, has_documents, options = CASES[name]
    given = arrays(**{"N": 4, "K": 2, "H": 8, **shape})
    documents = numbers(given[0].shape[1]) if has_documents else None
    run = jax.shard_map(
        lambda documents, *arrays: pulled(documents, options, *arrays),
        mesh=make_mesh({"data": 2, "model": 2}, devices=devices8[:4]),
        in_specs=(P("data"), *(P("data", None, "model"),) * 4),
        out_specs=P("data", None, "model"),
    )
    assert_is_reference(jax.jit(run)(documents, *given), given, documents, options)


@pytest.mark.slow
def test_sixteen_bits(devices8):
    given = arrays(S=128, N=2, K=1, H=16, dtype="bfloat16")
    mesh = make_mesh({"data": 2}, devices=devices8[:2])
    run = functools.partial(pulled, None, {})
    run = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    found = jax.jit(run)(*given)
    assert {x.dtype for x in found} == {jnp.dtype("bfloat16")}
    assert_is_reference(found, given, None, {}, tolerance=0.06)


@pytest.mark.parametrize(
    "axis_type",
    [slow_unless([(AxisType.Auto,)], axis) for axis in (AxisType.Auto, AxisType.Explicit)],
)
def test_global_arrays_are_split_over_the_axes_that_divide_them(axis_type, devices8):
    given = arrays(S=128, N=2, K=1, H=8)
    documents = numbers(128)
    mesh = jax.make_mesh((4, 2), ("data", "replica"), (axis_type,) * 2, devices=devices8)
    spec = P("replica")  # Two examples do not divide over the four devices along `data`.

    def run(documents, *arrays):
        found = pulled(documents, {}, *arrays)
        if axis_type == AxisType.Auto:
            return tuple(jax.lax.with_sharding_constraint(x, spec) for x in found)
        assert all(jax.typeof(x).sharding.spec[0] == "replica" for x in found)
        return found

    with jax.set_mesh(mesh):
        given = [jax.device_put(x, spec) for x in given]
        run = jax.jit(run)
        found = run(jax.device_put(documents, spec), *given)
        text = run.lower(jax.device_put(documents, spec), *given).compile().as_text()
    assert_is_reference(found, given, documents, {})
    assert "all-gather" not in text


def test_heads_follow_the_logical_rules(devices8):
    given = arrays(S=128, N=4, K=2, H=8)
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=devices8[:4])
    rules = (("heads", "model"), ("kv_heads", "model"))
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        traced = jax.jit(lambda *x: attend(*x)).trace(*given[:3]).jaxpr
    (split,) = [eqn for eqn in traced.eqns if eqn.primitive.name == "shard_map"]
    assert split.params["out_specs"] == (P("data", None, "model"),)
    assert split.params["in_specs"].count(P("data", None, "model")) == 3


def kernels_of(jaxpr, scope=""):
    """The names of all kernels, each with the scope that it stands in."""
    for eqn in jaxpr.eqns:
        around = f"{scope}/{eqn.source_info.name_stack}"
        if eqn.primitive.name == "pallas_call":
            yield eqn.params["name"], around
        for _, inner in inner_jaxprs(eqn) if eqn.primitive.name != "pallas_call" else ():
            yield from kernels_of(inner, around)


@pytest.mark.parametrize(("named", "forward"), [((ATTENDED,), 1), ((), 2)])
def test_no_kernel_runs_again_where_its_name_is_saved(named, forward, devices8):
    query, key, value, _ = arrays(S=256, N=2, K=1, H=8)
    policy = jax.checkpoint_policies.save_only_these_names(*named)

    def step(query, key, value):
        def layer(x, _):
            return jax.checkpoint(lambda x: attend(jnp.sin(x), key, value), policy=policy)(x), None

        loss = lambda x: jax.lax.scan(layer, x, None, length=2)[0].sum()  # noqa: E731
        return jax.grad(loss)(query)

    mesh = make_mesh({"data": 2}, devices=devices8[:2])
    run = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    found = list(kernels_of(jax.jit(run).trace(query, key, value).jaxpr.jaxpr))
    assert len(found) == forward + 1
    assert sum("fwd" in name for name, _ in found) == forward
    assert {blocks_computed(scope) for _, scope in found} == {3}  # Of two times two blocks.


@pytest.mark.parametrize(
    ("length", "padded"), [(1, 128), (128, 128), (500, 512), (768, 768), (1000, 1024), (1152, 1152)]
)
def test_lengths_are_padded_to_blocks(length, padded, monkeypatch):
    monkeypatch.undo()
    found, block = splash._padded_length(length)
    assert found == padded
    assert found % block == 0
    assert block % splash.LANES == 0


def test_it_lowers_for_tpus(devices8, monkeypatch):
    """Mosaic takes the kernels; nothing is compiled."""
    monkeypatch.undo()
    query, key, value, g = arrays(S=1000, N=2, K=1, H=64, dtype="bfloat16")

    def local(documents, *arrays):
        *arguments, g = arrays
        return jax.vjp(lambda *x: splash.splash_attention(*x, documents), *arguments)[1](g)

    mesh = make_mesh({"data": 2}, devices=devices8[:2])
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    traced = run.trace(numbers(1000), query, key, value, g)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    found = re.findall(r'kernel_name = "splash_mha_(\w+?)_', text)
    assert sorted(found) == ["dkv", "fwd"]


def test_what_the_kernel_cannot_do_is_refused():
    query, key, value, _ = arrays(dtype="float16")
    with pytest.raises(ValueError, match=r"the dtype is float16, not bfloat16 or float32\. Take"):
        attend(query, key, value)


@pytest.fixture
def on_tpus(monkeypatch):
    """Programs are traced as if their mesh were of TPUs; without a mesh, for this host."""
    mesh_of = jax.sharding.get_abstract_mesh
    monkeypatch.setattr(
        attention, "device_traced_for", lambda: Device("cpu" if mesh_of().empty else "tpu")
    )
    monkeypatch.setattr(attention, "splash_attention", attend)


SMALL = Transformer(
    vocab_size=29,
    vocab_multiple=8,
    num_layers=2,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    mlp_size=32,
    bos_token=28,
)
SPLIT = {"split_axis": "model", "sequence_parallel": True, "remat": "dots"}
ULYSSES = {"context_axis": "context", "context_attention": "ulysses"}
PROGRAMS = (
    ({"data": 4}, "manual", {"remat": "full"}),
    ({"data": 4}, "manual", {"scan_layers": False, "num_kv_heads": 4, "bos_token": -1}),
    ({"data": 4}, "auto", {"remat": "full"}),
    ({"data": 4}, "explicit", {"num_kv_heads": 1}),
    ({"data": 2, "model": 2}, "manual", SPLIT),
    ({"data": 2, "context": 2, "model": 2}, "manual", ULYSSES | SPLIT),
    ({"data": 2, "stage": 2}, "manual", {"remat": "full"}),
    ({"data": 2, "expert": 2}, "manual", {"num_experts": 4, "expert_axis": "expert"}),
)


def make_small_batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 28, (8, 17)).astype(np.int32)
    tokens[:, [2, 6, 11]] = 28
    mask = (rng.random((8, 16)) < 0.7).astype(np.float32)
    return Batch(inputs=tokens[:, :-1], labels=tokens[:, 1:], mask=mask)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "mode", "fields"), PROGRAMS)
def test_a_transformer_takes_it_and_is_that_of_one_device(mesh, mode, fields, on_tpus, devices8):
    model = with_fields(SMALL, **fields)
    size = math.prod(mesh.values())
    axes = tuple(axis for axis in ("data", "expert") if axis in mesh)
    options = {"pipeline": Pipeline(keep="inputs")} if "stage" in mesh else {"mode": mode}
    program = fsdp(
        model,
        optax.sgd(1.0),
        loss_of(model),
        mesh=make_mesh(mesh, devices=devices8[:size]),
        axis_name=axes,
        context_axis="context" if "context" in mesh else None,
        batch=make_small_batch(),
        min_weight_size=16,
        **options,
    )
    assert_same_as_plain_flax(program, model, make_small_batch)
    step = program.train_step.trace(program.abstract_state, program.abstract_batch).jaxpr.jaxpr
    found = [name for name, _ in kernels_of(step)]
    # No forward kernel runs twice, whatever is computed again, but where stages keep only inputs.
    layers = 1 if model.scan_layers else model.num_layers
    again = layers if "stage" in mesh else 0
    assert sum("fwd" in name for name in found) == len(found) - layers == layers + again


# -------------------------------------------------------------------------------------------------
# A ring whose products are kernels' is the attention of one device: values and gradients.


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    """As if the mesh were of TPUs, with small blocks."""
    monkeypatch.setattr(splash_parts, "has_tpu_kernels", lambda: True)
    make = functools.partial(kernels.make_splash_mha, interpret=True)
    monkeypatch.setattr(kernels, "make_splash_mha", make)
    monkeypatch.setattr(splash_parts, "BLOCKS", (128,))


def ring(mesh, **options):
    """Attention of each device's part of sequences, and its gradients."""

    def local(documents, *arrays):
        *arguments, g = arrays
        attend = functools.partial(Context("context").attention, **options)
        out, pullback = jax.vjp(lambda *x: attend(*x, documents), *arguments)
        return out, *pullback(g)

    spec = P("data", "context")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "length", "kv_heads", "has_documents", "soft_cap"),
    [(2, 512, 2, True, None), (4, 1024, 1, True, 2.0), (2, 1024, 2, False, None)],
)
def test_a_ring_is_one_device(devices, length, kv_heads, has_documents, soft_cap, devices8):
    given = arrays(S=length, N=2, K=kv_heads, H=8)
    documents = numbers(length) if has_documents else None
    mesh = make_mesh({"data": 1, "context": devices}, devices=devices8[:devices])
    order = zigzag(devices, length)
    inputs = [None if x is None else x[:, order] for x in (documents, *given)]
    found = ring(mesh, soft_cap=soft_cap)(*inputs)
    expected = reference(*given[:3], documents, given[3], soft_cap=soft_cap)
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted[:, order], rtol=0, atol=2e-5)


def test_the_backward_pass_runs_no_forward_kernel(devices8):
    given = arrays(S=1024, N=2, K=1, H=8)
    mesh = make_mesh({"data": 2, "context": 2}, devices=devices8[:4])
    traced = ring(mesh).trace(numbers(1024), *given).jaxpr.jaxpr
    kernels = list(kernels_in(traced))
    # Early and late queries with their own keys, late with early ones, and two of another device.
    assert sum("fwd" in kernel.name for kernel in kernels) == 5
    assert sum("dkv" in kernel.name for kernel in kernels) == 5
    assert {kernel.blocks for kernel in kernels} == {3, 4}  # Causal, and whole.
    traced = ring(mesh, kind="blockwise").trace(numbers(1024), *given).jaxpr.jaxpr
    assert not list(kernels_in(traced))


def test_a_kernel_whose_gradient_could_not_be_that_of_all_keys_is_refused(devices8, monkeypatch):
    make = kernels.make_splash_mha

    def without_names(*args, residual_checkpoint_name=None, **options):
        return make(*args, **options)

    monkeypatch.setattr(kernels, "make_splash_mha", without_names)
    mesh = make_mesh({"data": 2, "context": 2}, devices=devices8[:4])
    with pytest.raises(ValueError, match=r"names 0 values that its gradient uses, expected"):
        ring(mesh).trace(numbers(1024), *arrays(S=1024, N=2, K=1, H=8))


def test_a_window_or_a_part_of_odd_length_takes_no_kernel():
    query, key, _, _ = arrays(S=128, N=2, K=1, H=8)
    assert splash_parts.fits_parts(query, key, 128, splash_parts.Scoring())
    assert not splash_parts.fits_parts(query, key, 100, splash_parts.Scoring())
    assert not splash_parts.fits_parts(query, key, 128, splash_parts.Scoring(window=9))
    assert not splash_parts.fits_parts(query, key, 128, splash_parts.Scoring(chunk=64))


def make_long_batch():
    tokens = np.random.default_rng(0).integers(0, 28, (4, 513)).astype(np.int32)
    tokens[:, [100, 130, 400]] = 28
    return Batch(inputs=tokens[:, :-1], labels=tokens[:, 1:], mask=np.ones((4, 512), np.float32))


@pytest.mark.slow
def test_a_transformer_is_that_of_one_device(devices8):
    model = Transformer(
        vocab_size=29,
        num_layers=2,
        hidden_size=16,
        num_heads=4,
        num_kv_heads=2,
        mlp_size=32,
        bos_token=28,
        remat="full",
        context=Context("context"),
    )
    program = fsdp(
        model,
        optax.sgd(1.0),
        language_model_loss,
        mesh=make_mesh({"data": 2, "context": 2}, devices=devices8[:4]),
        axis_name="data",
        context_axis="context",
        batch=make_long_batch(),
        min_weight_size=16,
    )
    assert_same_as_plain_flax(program, model, make_long_batch)
    step = program.train_step.trace(program.abstract_state, program.abstract_batch).jaxpr.jaxpr
    found = [kernel.name for kernel in kernels_in(step)]
    assert sum("fwd" in name for name in found) == sum("dkv" in name for name in found) == 5
