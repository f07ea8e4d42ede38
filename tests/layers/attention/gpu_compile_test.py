"""The kinds chosen for GPUs, compiled for them by XLA on a machine without one; nothing runs."""

import contextlib
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from manualpar.layers.attention.context import Context
from manualpar.layers.attention.cudnn_attention import mask_bytes
from manualpar.layers.attention.devices import Device, tracing_for
from manualpar.planner.hardware import chip_named

HAS_COMPILER = False
with contextlib.suppress(ModuleNotFoundError):  # There is no namespace jax_plugins.
    HAS_COMPILER = importlib.util.find_spec("jax_plugins.xla_cuda12") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not HAS_COMPILER,
        reason="XLA's compiler for GPUs is not installed: pip install --no-deps jax-cuda12-pjrt, "
        "in the version of jaxlib",
    ),
]

# Compute capability, cores, float units of a core, GB/s, MiB of cache, GHz, KiB shared by a core.
# After `xla/backends/gpu/target_config/specs` of https://github.com/openxla/xla.
TARGETS = {
    "t4": ("7.5", 40, 64, 320, 4, 1.59, 64),
    "a100": ("8.0", 108, 64, 2039, 40, 1.41, 164),
    "h100": ("9.0", 132, 128, 3352, 50, 1.98, 228),
    "h200": ("9.0", 132, 128, 4800, 50, 1.98, 228),
    "b200": ("10.0", 148, 128, 7672, 126, 1.965, 228),
}
OLD = {"t4": Device("gpu", "7.5", 14 * 2**30)}
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


def device_of(chip):
    return OLD.get(chip) or chip_named(chip).device


def devices_of(chip):
    """Returns eight devices of one host that only XLA's compiler knows."""
    capability, cores, units, bandwidth, cache, clock, shared = TARGETS[chip]
    major, minor = capability.split(".")
    text = f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          shared_memory_per_block: 49152 shared_memory_per_core: {shared * 2**10}
          shared_memory_per_block_optin: {(shared - 1) * 2**10}
          core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {clock}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          memory_bandwidth: {bandwidth}000000000 l2_cache_size: {cache * 2**20}
          device_memory_size: {device_of(chip).memory_bytes}
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability {capability}"
          name: "{chip}" device_address_bits: 64 pcie_bandwidth: 34359738368
          driver_version: "13.0.0" runtime_version: "12.9.0"
          compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.2"
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 patch: 2 }}
    """
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
    with tracing_for(device_of(chip)):
        lowered = jax.jit(run).trace(*arrays).lower()
    return lowered.compile()


def kernels(compiled):
    return set(re.findall(r"__cudnn\$\w+", compiled.as_text()))


@pytest.mark.parametrize("chip", TARGETS)
@pytest.mark.parametrize("mask", MASKS)
def test_what_is_chosen_compiles(chip, mask):
    compiled = compile_gradients(chip, mask, WHOLE)
    assert kernels(compiled) == (set() if chip in OLD else MASKS[mask][2])


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
