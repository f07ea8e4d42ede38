"""The kinds chosen for GPUs, compiled for them by XLA on a machine without one; nothing runs."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from manualpar.layers.attention.causal_attention import mask_bytes
from manualpar.layers.attention.context import Context
from manualpar.planner.gpu_targets import GPU_TARGETS, describe_target
from manualpar.planner.hardware import chip_named
from manualpar.plans.compiler_worker import installed, tracing_for
from manualpar.plans.gpu_compiler import INSTALL, PACKAGES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not installed(PACKAGES), reason=f"XLA's compiler for GPUs is not installed: {INSTALL}"
    ),
]

# An old GPU that the planner does not know, with XLA's numbers of the kind.
T4 = dataclasses.replace(
    chip_named("a100"),
    name="t4",
    device_kind="Tesla T4",
    compute_capability="7.5",
    hbm_bytes=14 * 2**30,
)
T4_TARGET = GPU_TARGETS["a100"]._replace(
    cores=40,
    clock=1.59,
    bandwidth=320_000_000_000,
    l2=2**22,
    memory=14 * 2**30,
    shared=2**16,
    shared_optin=2**16 - 2**10,
)
TARGETS = {T4.name: (T4, T4_TARGET)}
TARGETS |= {name: (chip_named(name), target) for name, target in GPU_TARGETS.items()}
FUSED = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
BIASED = {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"}
MASKS = {
    "causal": (False, {}, FUSED),
    "window": (False, {"window": 1024}, FUSED),
    "documents": (True, {}, BIASED),
    "both": (True, {"window": 1024}, BIASED),
    "cap": (True, {"soft_cap": 30.0}, set()),
}
WHOLE = (Context(), P("x"), 8)  # Each of eight devices has an example.
SPLITS = {
    "tensor": (Context(), P(None, None, "x"), 1),
    "ulysses": (Context("x", "ulysses"), P(None, "x"), 1),
    "ring": (Context("x", "ring"), P(None, "x"), 1),
}
S, N, K, H = 8192, 32, 8, 128  # Llama-3-8B


def devices_of(name):
    """Returns eight devices of one host that only XLA's compiler knows."""
    text = describe_target(*TARGETS[name])
    topology = topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x8")
    return list(topology.devices)


def compile_gradients(chip, mask, split):
    """Compiles attention of a layer forward and backward, and returns the compiled program."""
    has_documents, options, _ = MASKS[mask]
    context, spec, examples = split
    mesh = Mesh(np.asarray(devices_of(chip)), ("x",))

    def array(dtype, *shape, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    of_documents = P(*spec[:2])
    arrays = [array(jnp.bfloat16, examples, S, n, H, spec=spec) for n in (N, K, K, N)]
    if has_documents:
        arrays.append(array(jnp.int32, examples, S, spec=of_documents))

    def gradients(query, key, value, g, documents=None):
        def attend(query, key, value):
            return context.attention(query, key, value, documents, **options)

        out, pullback = jax.vjp(attend, query, key, value)
        return out, *pullback(g)

    specs = (*(spec,) * 4, of_documents)[: len(arrays)]
    run = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=(spec,) * 4, check_vma=True)
    with tracing_for(TARGETS[chip][0].device):
        lowered = jax.jit(run).trace(*arrays).lower()
    return lowered.compile()


def kernels(compiled):
    return set(re.findall(r"__cudnn\$\w+", compiled.as_text()))


@pytest.mark.parametrize("chip", TARGETS)
@pytest.mark.parametrize("mask", MASKS)
def test_what_is_chosen_compiles(chip, mask):
    compiled = compile_gradients(chip, mask, WHOLE)
    assert kernels(compiled) == (set() if chip == T4.name else MASKS[mask][2])


@pytest.mark.parametrize(("name", "mask"), [(n, m) for n in SPLITS for m in ("causal", "both")])
def test_what_is_chosen_compiles_with_split_layers_and_sequences(name, mask):
    compiled = compile_gradients("h100", mask, SPLITS[name])
    assert kernels(compiled) == (set() if name == "ring" else MASKS[mask][2])


def test_documents_take_the_memory_that_the_choice_expects():
    held = [
        compile_gradients("h100", mask, WHOLE).memory_analysis().temp_size_in_bytes
        for mask in ("causal", "window", "documents", "both")
    ]
    query = jax.ShapeDtypeStruct((1, S, N, H), jnp.bfloat16)
    mask = mask_bytes(query, has_documents=True)
    assert held[0] == held[1]
    assert held[2] - held[0] == pytest.approx(mask, rel=0.01)
    assert held[3] - held[0] == pytest.approx(mask, rel=0.01)
