"""Steps with cuDNN's attention lowered for NVIDIA GPUs on a host without one.

What JAX asks of a GPU and of cuDNN is answered here as an H100 would; the rest is lowered as it
would be there. Nothing is compiled or run.
"""

import inspect
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from manualpar.layers.attention import cudnn_attention
from manualpar.layers.attention import kinds as choice
from manualpar.training.config import load_config
from manualpar.training.experiment import prepare
from tests.paths import ROOT

CONFIG = ROOT / "configs" / "fsdp_lm.py"
KERNELS = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
WITH_MASK = {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"}


class Device(NamedTuple):
    """What a program asks of a GPU."""

    compute_capability: str = "9.0"


@pytest.fixture
def h100(monkeypatch):
    """Makes this process believe that it has H100s with cuDNN."""
    for module in (choice, cudnn_attention):
        monkeypatch.setattr(module, "platform_traced_for", lambda: "gpu")
    monkeypatch.setattr(cudnn_attention.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cudnn_attention.jax, "local_devices", lambda: [Device()])
    names = inspect.unwrap(jax.nn.dot_product_attention).__globals__
    kernel = inspect.unwrap(names["cudnn_dot_product_attention"])
    monkeypatch.setitem(kernel.__globals__, "check_cudnn_version", lambda: 91_000)
    monkeypatch.setitem(kernel.__globals__, "check_compute_capability", lambda *asked: True)


def _kernels(traced) -> set[str]:
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return set(re.findall(r"__cudnn\$\w+", text))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_lowers_under_the_check(h100, devices8, kv_heads):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def gradients(*heads):
        def loss(*heads):
            return choice.attention(*heads).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1, 2))(*heads)

    spread = jax.shard_map(
        gradients, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=True
    )
    arrays = [jax.ShapeDtypeStruct((8, 256, n, 64), jnp.bfloat16) for n in (4, kv_heads, kv_heads)]
    assert _kernels(jax.jit(spread).trace(*arrays)) == KERNELS


def test_many_positions_with_documents_have_no_mask(h100):
    """A mask `[B, S, S]` and its gradient would be larger than the queries: blocks compute it."""

    def loss(documents, *heads):
        return choice.attention(*heads, documents).astype(jnp.float32).sum()

    heads = [jax.ShapeDtypeStruct((1, 2048, 2, 64), jnp.bfloat16)] * 3
    documents = jax.ShapeDtypeStruct((1, 2048), jnp.int32)
    traced = jax.jit(jax.grad(loss, 1)).trace(documents, *heads)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn" not in text
    assert "2048x2048" not in text


@pytest.mark.slow
def test_the_step_of_a_config_lowers_with_the_kernels(h100, devices8):
    config = load_config(CONFIG)
    config.model.dtype = "bfloat16"
    program = prepare(config).program
    step = program.train_step
    traced = getattr(step, "jitted", step).trace(program.abstract_state, program.abstract_batch)
    assert _kernels(traced) == WITH_MASK  # The documents of 128 positions are a small mask.
