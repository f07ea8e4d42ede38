"""Compiles one program of collectives for devices that are not here, in a process of its own.

python -m tests.core.mesh.compile_with_options v5e:2x4 '{"xla_tpu_rwb_fusion": "false"}'

The arguments are a topology and the options. A loop gathers a weight, multiplies and scatters, over
all devices. The process prints the options that `keep_if_known` keeps. If the compiler refuses an
option, alone or beside another, the process ends with the compiler's message.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from manualpar.core.mesh.compiler_options import ChosenOptions, keep_if_known
from manualpar.planner.topology import parse_topology
from manualpar.plans.gpu_compiler import GPU
from manualpar.plans.tpu_compiler import TPU

AXIS = "data"


def gather_multiply_scatter(x: jax.Array, w: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        gathered = jax.lax.all_gather(w, AXIS, axis=0, tiled=True)
        scattered = jax.lax.psum_scatter(x.T @ x, AXIS, scatter_dimension=0, tiled=True)
        return jnp.tanh(x @ gathered), scattered

    x, scattered = jax.lax.scan(layer, x, w)
    return jnp.sum(x, axis=0, keepdims=True) + jnp.sum(scattered, axis=(0, 1))


def main(name: str, options: str) -> None:
    topology = parse_topology(name)
    compiler = TPU if topology.chip.is_tpu else GPU
    devices = topologies.get_topology_desc(**compiler.describe(topology)).devices
    mesh = Mesh(np.array(devices), (AXIS,))
    specs = PartitionSpec(AXIS), PartitionSpec(None, AXIS)
    function = jax.shard_map(
        gather_multiply_scatter, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(AXIS)
    )
    shapes = (len(devices) * 256, 1024), (8, 1024, 1024)
    args = [
        jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    chosen = ChosenOptions(json.loads(options), "why")
    jax.jit(function).lower(*args).compile(compiler_options=dict(chosen.options))
    print(json.dumps(dict(keep_if_known(chosen, devices[0]).options)))


if __name__ == "__main__":
    main(*sys.argv[1:])
