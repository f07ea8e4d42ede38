"""Compiles one program of collectives for eight GPUs of a kind, in a process of its own.

python -m tests.core.mesh.compile_for_gpu h100 '{"xla_gpu_enable_pipelined_all_gather": true}'

The arguments are the chip and the options. A loop gathers a weight, multiplies and scatters. If the
compiler refuses an option, alone or beside another, the process ends with the compiler's
message. No GPU is needed, but the package jax-cuda12-pjrt is, of the version of jaxlib.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from manualpar.core.mesh.compiler_options import ChosenOptions, keep_if_known
from manualpar.planner.gpu_targets import GPU_TARGETS, describe_target
from manualpar.planner.topology import parse_topology

AXIS = "data"


def gather_multiply_scatter(x: jax.Array, w: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        gathered = jax.lax.all_gather(w, AXIS, axis=0, tiled=True)
        scattered = jax.lax.psum_scatter(x.T @ x, AXIS, scatter_dimension=0, tiled=True)
        return jnp.tanh(x @ gathered), scattered

    x, scattered = jax.lax.scan(layer, x, w)
    return jnp.sum(x, axis=0, keepdims=True) + jnp.sum(scattered, axis=(0, 1))


def main(name: str, options: str) -> None:
    target = describe_target(parse_topology(f"{name}:8").chip, GPU_TARGETS[name])
    devices = topologies.get_topology_desc(
        platform="cuda", target_config=target, topology="1x1x8"
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
