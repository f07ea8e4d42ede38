"""Compiles one program of collectives for a topology, in a process of its own.

python -m tests.core.mesh.compile_with_options v5e:2x4 '{"xla_tpu_rwb_fusion": "false"}'

The program gathers a weight, multiplies and scatters, over all chips. An option that the compiler
refuses, alone or beside another, ends the process with the compiler's message.
"""

import json
import sys

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "data"


def gather_multiply_scatter(x: jax.Array, w: jax.Array) -> jax.Array:
    gathered = jax.lax.all_gather(w, AXIS, axis=0, tiled=True)
    return jax.lax.psum_scatter(x @ gathered, AXIS, scatter_dimension=0, tiled=True)


def main(topology: str, options: str) -> None:
    devices = topologies.get_topology_desc(topology, "tpu").devices
    mesh = Mesh(np.array(devices), (AXIS,))
    spec = PartitionSpec(AXIS)
    function = jax.shard_map(
        gather_multiply_scatter, mesh=mesh, in_specs=(spec, spec), out_specs=spec
    )
    size, sharding = 256 * len(devices), NamedSharding(mesh, spec)
    args = [
        jax.ShapeDtypeStruct((rows, 1024), "bfloat16", sharding=sharding)
        for rows in (size * len(devices), 1024)
    ]
    jax.jit(function).lower(*args).compile(compiler_options=json.loads(options))


if __name__ == "__main__":
    main(*sys.argv[1:])
