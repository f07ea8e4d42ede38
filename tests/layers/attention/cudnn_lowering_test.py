"""Steps with cuDNN's attention lowered for NVIDIA GPUs on a host without one.

What JAX asks of a GPU and of cuDNN is answered here as an H100 would; the rest is lowered as it
would be there. Nothing is compiled or run.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from manualpar.layers.attention import causal_attention as choice
from manualpar.planner.hardware import chip_named
from manualpar.plans.compiler_worker import tracing_for
from manualpar.training.config import load_config
from manualpar.training.experiment import prepare
from tests.paths import ROOT

CONFIG = ROOT / "configs" / "fsdp_lm.py"
KERNELS = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
WITH_MASK = {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"}


@pytest.fixture
def h100():
    """Traces attention as a process with H100s and cuDNN would."""
    with tracing_for(chip_named("h100").device):
        yield


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


@pytest.mark.parametrize(("memory", "expected"), [(2**27, WITH_MASK), (2**27 - 1, set())])
def test_a_mask_that_is_too_large_is_not_made(memory, expected):
    """A mask `[1, 1, 2048, 2048]` and its gradient take 16 MiB, an eighth of 128 MiB."""

    def loss(documents, *heads):
        return choice.attention(*heads, documents).astype(jnp.float32).sum()

    heads = [jax.ShapeDtypeStruct((1, 2048, 2, 64), jnp.bfloat16)] * 3
    documents = jax.ShapeDtypeStruct((1, 2048), jnp.int32)
    with tracing_for(chip_named("h100").device._replace(memory_bytes=memory)):
        traced = jax.jit(jax.grad(loss, 1)).trace(documents, *heads)
    assert _kernels(traced) == expected
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("2048x2048" in text) == bool(expected)


@pytest.mark.slow
def test_the_step_of_a_config_lowers_with_the_kernels(h100, devices8):
    config = load_config(CONFIG)
    config.model.dtype = "bfloat16"
    program = prepare(config).program
    step = program.train_step
    traced = getattr(step, "jitted", step).trace(program.abstract_state, program.abstract_batch)
    assert _kernels(traced) == WITH_MASK  # The documents of 128 positions are a small mask.
