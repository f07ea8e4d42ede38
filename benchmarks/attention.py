"""Estimates one layer's attention on TPUs, for each kind of attention, with XLA's TPU compiler.

python -m benchmarks.attention [--topologies v5e:2x2 v6e:2x2 v5p:2x2x1] [--kinds splash blockwise]
    [--lengths 2048 8192 32768] [--heads 16 --key_heads 16] [--output FILE.md] [--json FILE.json]

No TPU is needed, but libtpu is: `pip install "manualpar[tpu-compiler]"`. Nothing is timed. A row of
the table is the attention of one layer, forward and backward, in bfloat16: one sequence per chip,
128 features per head, with document numbers. If a kind of attention does not fit into memory, its
row contains the compiler's error.

Milliseconds are the compiler's cycles divided by the chip's clock. The compiler gives no cycles for
Pallas kernels. So a kernel is assumed to reach a share of the chip's peak, which was fitted to
published speeds, see `manualpar.planner.hardware`. Therefore the figures of splash attention, which
is a kernel, are less certain than the other figures.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.results import note_conditions, write_results
from manualpar.layers.attention import AttentionKind, attention
from manualpar.planner.compiled_plan import read_out_of_memory
from manualpar.planner.compiled_timeline import on_all_links, read_timeline
from manualpar.planner.hardware import kernel_clock, kernels_in
from manualpar.planner.topology import parse_topology
from manualpar.plans.compiler_worker import is_out_of_hbm
from manualpar.plans.tpu_compiler import ENVIRONMENT

KINDS: tuple[AttentionKind, ...] = tuple(
    kind for kind in get_args(AttentionKind) if kind not in ("", "cudnn")
)
HEAD_SIZE = 128
HEADER = (
    *("topology", "positions", "attention", "temporaries MiB"),
    *("compute ms", "of it kernels ms", "without an estimate"),
)


def compile_layer(
    args: argparse.Namespace, name: str, length: int, kind: AttentionKind
) -> tuple[float, ...] | str:
    """Returns temporary bytes, compute seconds, kernel seconds, and unestimated operations.

    The compute seconds include the kernel seconds. The last number counts the operations for which
    there is no estimate. If the layer does not fit into memory, returns the compiler's error.
    """
    topology = parse_topology(name)
    devices = topologies.get_topology_desc(topology.slice_name, "tpu").devices
    mesh = Mesh(np.asarray(devices), ("data",))

    def run(query: Any, key: Any, value: Any, documents: Any, g: Any) -> Any:
        def attend(query: Any, key: Any, value: Any) -> jax.Array:
            return attention(query, key, value, documents, kind=kind)

        out, pullback = jax.vjp(attend, query, key, value)
        return out, pullback(g)

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (len(devices), length, *shape), dtype, sharding=NamedSharding(mesh, P("data"))
        )

    query, key = array(args.heads, HEAD_SIZE), array(args.key_heads, HEAD_SIZE)
    step = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=True)
    traced = jax.jit(step).trace(query, key, key, array(dtype=jnp.int32), query)
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_hbm(str(error)):
            raise
        return read_out_of_memory(str(error)).sentences[0]
    schedule = read_timeline(
        compiled.as_text() or "",
        dict(mesh.shape),
        clock=topology.chip.clock,
        wire=on_all_links(lambda _: 0.0),
        kernel_seconds=kernel_clock(kernels_in(traced.jaxpr.jaxpr), topology.chip),
    )
    temporaries = float(compiled.memory_analysis().temp_size_in_bytes)
    kernels = sum(one.seconds for one in schedule.kernels)
    return temporaries, schedule.compute_seconds, kernels, sum(schedule.unestimated.values())


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles the layers, and prints and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--topologies", nargs="+", default=["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192, 32768])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    for name in ("heads", "key_heads"):
        parser.add_argument(f"--{name}", type=int, default=16)
    for name in ("output", "json"):
        parser.add_argument(f"--{name}", type=Path)
    args = parser.parse_args(argv)
    os.environ.update(ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")
    conditions = note_conditions("benchmarks.attention", argv)
    title = f"## Attention of a layer on TPUs: {args.heads} heads, {args.key_heads} of keys"
    lines = [title, "", conditions.sentence(), ""]
    lines += [_line(HEADER), _line(["---"] * len(HEADER))]
    print("\n".join(lines), flush=True)
    rows = []
    for name in args.topologies:
        for length in args.lengths:
            for kind in args.kinds:
                found = compile_layer(args, name, length, kind)
                cells = [found, *[""] * 3]
                if not isinstance(found, str):
                    temporaries, compute, kernels, without = found
                    cells = [f"{temporaries / 2**20:,.0f}"]
                    cells += [f"{seconds * 1e3:,.2f}" for seconds in (compute, kernels)]
                    cells += [f"{without:.0f}"]
                lines.append(_line([name, f"{length:,}", kind, *map(str, cells)]))
                print(lines[-1], flush=True)
                rows.append([name, length, kind, found])
    write_results(
        conditions, lines=lines, data={"rows": rows}, output=args.output, json_output=args.json
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
