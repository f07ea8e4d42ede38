"""Attention of split sequences: what a device holds and sends, for each way, and what a layer adds.

python -m benchmarks.long_context [--output FILE.md] [--json FILE.json]

Nothing is timed. The attention of a layer, forward and backward, is compiled by XLA for simulated
CPU devices: 8 query heads, 2 key heads, 32 features a head, float32, one sequence of two documents.
First the sequence grows with the devices, so that each has 1,024 tokens. Then two devices have more
and more tokens each. Temporaries are XLA's, and what is sent is read from the traced program. The
ring's permutes stand beside their closed form: `C - 1` of keys and values forward, as many
backward, and `C` of their gradients.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.results import note_conditions, write_results
from manualpar.core.mesh.mesh import make_mesh
from manualpar.inspect import total_bytes, trace_collectives
from manualpar.inspect.communication import count_by_kind
from manualpar.layers import Context
from manualpar.layers.attention.blockwise_attention import ATTENDED
from manualpar.layers.attention.context import CONTEXT_ATTENTIONS, ContextAttention
from manualpar.training.devices import simulate_devices

QUERY_HEADS, KEY_HEADS, HEAD_SIZE = 8, 2, 32
HEADER = (
    "attention",
    "devices",
    "tokens a device",
    "temporaries MiB",
    "permutes, closed form",
    "all-to-alls",
    "all-gathers / reduce-scatters",
    "sent MiB",
)
POLICIES: Mapping[str, Any] = {
    "": None,
    ", its result saved by name": jax.checkpoint_policies.save_only_these_names(ATTENDED),
    ", nothing saved": jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What a device holds and sends for the attention of a layer, forward and backward.

    Attributes:
      name: The way, and what a checkpoint around it saves.
      devices: The devices along the context axis.
      tokens: The tokens of each.
      temporaries: The bytes that XLA allocates, without arguments and results.
      counts: The collectives by kind.
      sent: The bytes that a device sends.
    """

    name: str
    devices: int
    tokens: int
    temporaries: int
    counts: Mapping[str, int]
    sent: float

    def cells(self) -> list[str]:
        """The row of a table."""
        formula = ring_permutes(self.devices) if self.name.startswith("ring") else 0
        count = {kind: self.counts.get(kind, 0) for kind in ("all_gather", "reduce_scatter")}
        return [
            self.name,
            str(self.devices),
            f"{self.tokens:,}",
            f"{self.temporaries / 2**20:,.1f}",
            f"{self.counts.get('permute', 0)}, {formula}",
            str(self.counts.get("all_to_all", 0)),
            f"{count['all_gather']} / {count['reduce_scatter']}",
            f"{self.sent / 2**20:,.2f}",
        ]


def ring_permutes(devices: int) -> int:
    """The permutes of ring attention in a layer, forward and backward, in closed form."""
    return 2 * (devices - 1) + devices


def measure(how: ContextAttention, devices: int, tokens: int, saved: str = "") -> Row:
    """Compiles attention and its gradients; `saved` is one of `POLICIES`."""
    context, policy = Context("context", how), POLICIES[saved]

    def local(query: Any, key: Any, value: Any, documents: Any) -> Any:
        def loss(query: Any, key: Any, value: Any) -> Any:
            attention = context.attention
            if policy is not None:
                attention = jax.checkpoint(attention, policy=policy)
            return jnp.square(attention(query, key, value, documents)).sum()

        return jax.grad(loss, range(3))(query, key, value)

    split = P(None, "context")
    mesh = make_mesh({"context": devices}, devices=jax.devices()[:devices])
    step = jax.shard_map(
        local, mesh=mesh, in_specs=(split,) * 4, out_specs=(split,) * 3, check_vma=True
    )

    def heads(number: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, devices * tokens, number, HEAD_SIZE), jnp.float32)

    documents = jax.ShapeDtypeStruct((1, devices * tokens), jnp.int32)
    arguments = (heads(QUERY_HEADS), heads(KEY_HEADS), heads(KEY_HEADS), documents)
    traced = jax.jit(step).trace(*arguments)
    sent = trace_collectives(traced)
    allocated = traced.lower().compile().memory_analysis()
    counts = {str(kind): count for kind, count in count_by_kind(sent).items()}
    return Row(
        f"{how}{saved}",
        devices,
        tokens,
        allocated.temp_size_in_bytes,
        counts,
        float(total_bytes(sent)),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table and writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("output", "json"):
        parser.add_argument(f"--{name}", type=Path)
    args = parser.parse_args(argv)
    conditions = note_conditions("benchmarks.long_context", argv)
    simulate_devices(8)
    cases: list[tuple[ContextAttention, int, int, str]] = [
        (how, devices, 1024, "") for how in CONTEXT_ATTENTIONS for devices in (2, 4, 8)
    ]
    cases += [("ring", 4, 1024, saved) for saved in POLICIES if saved]
    cases += [("ring", 2, tokens, "") for tokens in (2048, 4096)]
    lines = ["## Attention of split sequences", "", conditions.sentence(), ""]
    lines += [f"| {' | '.join(row)} |" for row in (HEADER, ["---"] * len(HEADER))]
    print("\n".join(lines), flush=True)
    rows = []
    for case in cases:
        rows.append(measure(*case))
        lines.append(f"| {' | '.join(rows[-1].cells())} |")
        print(lines[-1], flush=True)
    write_results(
        conditions, lines=lines, data={"rows": rows}, output=args.output, json_output=args.json
    )


if __name__ == "__main__":
    main()
