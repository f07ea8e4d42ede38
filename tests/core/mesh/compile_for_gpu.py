"""Compiles one program of collectives for eight GPUs of a kind, in a process of its own.

python -m tests.core.mesh.compile_for_gpu 9.0 '{"xla_gpu_enable_pipelined_all_gather": true}'

The arguments are the compute capability and the options. A loop gathers a weight, multiplies and
scatters. If the compiler refuses an option, alone or beside another, the process ends with the
compiler's message. No GPU is needed, but the package jax-cuda12-pjrt is, of the version of jaxlib.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from manualpar.core.mesh.compiler_options import ChosenOptions, keep_if_known

AXIS = "data"
# A GpuTargetConfigProto with the numbers of an H100.
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 166912
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  runtime_version: "12.9.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
"""


def gather_multiply_scatter(x: jax.Array, w: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        gathered = jax.lax.all_gather(w, AXIS, axis=0, tiled=True)
        scattered = jax.lax.psum_scatter(x.T @ x, AXIS, scatter_dimension=0, tiled=True)
        return jnp.tanh(x @ gathered), scattered

    x, scattered = jax.lax.scan(layer, x, w)
    return jnp.sum(x, axis=0, keepdims=True) + jnp.sum(scattered, axis=(0, 1))


def main(capability: str, options: str) -> None:
    major, minor = capability.split(".")
    devices = topologies.get_topology_desc(
        platform="cuda",
        target_config=TARGET.format(major=major, minor=minor),
        topology="1x1x8",
    ).devices
    mesh = Mesh(np.array(devices), (AXIS,))
    specs = PartitionSpec(AXIS), PartitionSpec(None, AXIS)
    function = jax.shard_map(
        gather_multiply_scatter, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(AXIS)
    )
    args = [
        jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(((8 * 256, 1024), (8, 1024, 1024)), specs, strict=True)
    ]
    chosen = ChosenOptions(json.loads(options), "why")
    jax.jit(function).lower(*args).compile(compiler_options=dict(chosen.options))
    print(json.dumps(dict(keep_if_known(chosen, devices[0]).options)))


if __name__ == "__main__":
    main(*sys.argv[1:])
