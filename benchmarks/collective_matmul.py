"""Sequence parallelism with collective matmuls against the plain form, compiled for TPUs.

python -m benchmarks.collective_matmul [--topologies v5e:4x4 v5p:2x2x4 v5p:4x4x4]
    [--forms ...] [--layers 2]
    [--model 4 --hidden_size 2048 --mlp_size 8192 --sequence_length 2048 --examples 2]
    [--output FILE.md] [--json FILE.json]

The program is Megatron's MLP, `x += down(gelu(up(norm(x))))`, a few times: its value, or its value
and all gradients, in bfloat16. No TPU is needed, but libtpu is (`pip install
"manualpar[tpu-compiler]"`). Nothing is timed: the schedule and the memory are the compiler's, and
seconds are an estimate from them, see `manualpar.planner.tpu_timeline`.
"""

import argparse
import dataclasses
import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.results import note_conditions, write_results
from manualpar.core.mesh.mesh import make_mesh
from manualpar.core.parameters.collectives import cast_to_varying
from manualpar.layers import enter, enter_ring, gather_matmul, leave, matmul_scatter, whole_sequence
from manualpar.planner.compiled_plan import CompiledStep, schedule_of
from manualpar.planner.topology import parse_topology
from manualpar.planner.tpu_compiler import ENVIRONMENT
from manualpar.planner.tpu_timeline import Timeline

TOPOLOGIES = ("v5e:4x4", "v5p:2x2x4", "v5p:4x4x4")
SEQUENCE_DIM = 1
MIB = 2**20
AXIS = "model"

Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def all_reduces(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Tensor parallelism whose activations are whole between the layers."""
    return leave(jax.nn.gelu(enter(x, AXIS) @ up) @ down, AXIS)


def plain(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Sequence parallelism with an all-gather and a reduce-scatter."""
    return leave(jax.nn.gelu(enter(x, AXIS, SEQUENCE_DIM) @ up) @ down, AXIS, SEQUENCE_DIM)


def ring(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Sequence parallelism with collective matmuls."""
    hidden = gather_matmul(enter_ring(x, AXIS, SEQUENCE_DIM), up)
    return matmul_scatter(jax.tree.map(jax.nn.gelu, hidden), down, AXIS, SEQUENCE_DIM)


def joined_ring(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """The same, with a whole sequence between the products, as attention needs."""
    hidden = whole_sequence(gather_matmul(enter_ring(x, AXIS, SEQUENCE_DIM), up))
    return matmul_scatter(jax.nn.gelu(hidden), down, AXIS, SEQUENCE_DIM)


FORMS: Mapping[str, Product] = {
    "all-reduces": all_reduces,
    "plain": plain,
    "ring": ring,
    "ring, joined": joined_ring,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What the compiler has made of one program; bytes are a chip's, seconds a run's.

    Attributes:
      topology: For what it was compiled.
      form: Its name in `FORMS`.
      program: `"forward"` or `"gradients"`.
      temporaries: The bytes of its temporaries.
      schedule: Its schedule.
    """

    topology: str
    form: str
    program: str
    temporaries: int
    schedule: Timeline

    @property
    def values(self) -> dict[str, float]:
        """All figures."""
        collectives = self.schedule.collectives
        sent = float(sum(one.bytes_sent for one in collectives))
        hidden = float(sum(one.bytes_sent for one in collectives if one.is_async))
        return {
            "collectives": sum(one.times for one in collectives),
            "sent_mib": sent / MIB,
            "asynchronous": hidden / sent if sent else 0.0,
            "compute_ms": self.schedule.compute_seconds * 1e3,
            "exposed_ms": self.schedule.exposed_seconds * 1e3,
            "step_ms": self.schedule.step_seconds * 1e3,
            "temporaries_mib": self.temporaries / MIB,
        }

    def cells(self) -> list[str]:
        """The row of a table."""
        values = self.values
        return [
            *(self.topology, self.program, self.form),
            f"{values['collectives']:.0f}",
            f"{values['sent_mib']:,.0f} ({values['asynchronous']:.0%})",
            *(f"{values[name]:.2f}" for name in ("compute_ms", "exposed_ms", "step_ms")),
            f"{values['temporaries_mib']:,.0f}",
        ]


HEADER = (
    *("topology", "program", "form", "collectives", "sent MiB (asynchronous)"),
    *("compute ms", "exposed ms", "sum ms", "temporaries MiB"),
)


def _sequence_axis(form: Product) -> str | None:
    """The axis that the sequence is split over between the layers."""
    return None if form is all_reduces else AXIS


def make_program(form: Product, mesh: jax.sharding.Mesh, layers: int, *, is_forward: bool) -> Any:
    """The jitted program of one form: the value, or also the gradients of weights and input."""

    def norm(x: jax.Array) -> jax.Array:
        square = jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True)
        return (x * jax.lax.rsqrt(square + 1e-6)).astype(x.dtype)

    def value(weights: Any, x: jax.Array) -> jax.Array:
        for up, down in weights:
            x = x + form(norm(x), up, down)
        return x

    def local(weights: Any, x: jax.Array) -> Any:
        # The gradients of the weights stay unreduced over `data`: that is another matter.
        weights = cast_to_varying(weights, ("data",))
        if is_forward:
            return value(weights, x)
        y, transpose = jax.vjp(value, weights, x)
        grads, grad = transpose(y)
        return jax.tree.map(lambda g: g[None], grads), grad

    weight = (P(None, AXIS), P(AXIS, None))
    activation = P("data", _sequence_axis(form))
    grads = (P("data", None, AXIS), P("data", AXIS, None))
    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=([weight] * layers, activation),
            out_specs=activation if is_forward else ([grads] * layers, activation),
            check_vma=True,
        )
    )


def compile_row(args: argparse.Namespace, name: str, form_name: str, program: str) -> Row:
    """Compiles one program for one topology."""
    topology, form = parse_topology(name), FORMS[form_name]
    devices: list[Any] = list(topologies.get_topology_desc(name, "tpu").devices)
    sizes = {"data": topology.num_devices // args.model, AXIS: args.model}
    mesh = make_mesh(sizes, devices=devices)

    def array(*shape: int, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    hidden, mlp = args.hidden_size, args.mlp_size
    weight = (
        array(hidden, mlp, spec=P(None, AXIS)),
        array(mlp, hidden, spec=P(AXIS, None)),
    )
    spec = P("data", _sequence_axis(form))
    x = array(args.examples * sizes["data"], args.sequence_length, hidden, spec=spec)
    jitted = make_program(form, mesh, args.layers, is_forward=program == "forward")
    compiled = jitted.lower([weight] * args.layers, x).compile()
    text = compiled.as_text() or ""
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
        file = f"{name}-{program}-{form_name}.txt".replace(" ", "_").replace(":", "_")
        (args.folder / file).write_text(text, encoding="utf-8")
    facts = {"mesh": sizes, "order": (), "kernels": ()}
    schedule = schedule_of(CompiledStep(topology, {}, facts, text))
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return Row(name, form_name, program, temporaries, schedule)


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles, prints the table, writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    for name, default in (
        ("layers", 2),
        ("model", 4),
        ("hidden_size", 2048),
        ("mlp_size", 8192),
        ("sequence_length", 2048),
        ("examples", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("output", "json"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--folder", type=Path, help="where to leave the compiled programs")
    args = parser.parse_args(argv)
    conditions = note_conditions("benchmarks.collective_matmul", argv)
    os.environ.update(ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")
    shape = (
        f"{args.layers} MLPs, D={args.hidden_size}, F={args.mlp_size}, model={args.model}, "
        f"{args.examples} sequences of {args.sequence_length:,} for each {args.model} chips"
    )
    versions = f"libtpu {importlib.metadata.version('libtpu')}"
    lines = [f"## Collective matmul: {shape}", "", f"{versions}; {conditions.sentence()}", ""]
    lines += [f"| {' | '.join(row)} |" for row in (HEADER, ["---"] * len(HEADER))]
    print("\n".join(lines), flush=True)
    rows: list[Row] = []
    for topology in args.topologies:
        for program in ("forward", "gradients"):
            for form in args.forms:
                rows.append(compile_row(args, topology, form, program))
                lines.append(f"| {' | '.join(rows[-1].cells())} |")
                print(lines[-1], flush=True)
    data = {
        "shape": shape,
        "rows": [
            {"topology": row.topology, "form": row.form, "program": row.program, **row.values}
            for row in rows
        ],
    }
    write_results(conditions, lines=lines, data=data, output=args.output, json_output=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
