"""A ring whose products are kernels' is the attention of one device: values and gradients."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.sharding import PartitionSpec as P

from manualpar import Batch, fsdp, make_mesh
from manualpar.layers import Context
from manualpar.layers.attention import splash_attention as splash_parts
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.planner.hardware import kernels_in
from tests.layers.attention.reference import arrays, numbers, reference, zigzag
from tests.models.transformer_on_one_device import assert_same_as_plain_flax


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    """As if the mesh were of TPUs, with small blocks."""
    monkeypatch.setattr(splash_parts, "platform_traced_for", lambda: "tpu")
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
