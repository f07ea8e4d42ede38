"""What each kind of attention takes on the CPU: temporaries, operations and time.

python -m benchmarks.attention_on_cpu [--lengths 2048 8192 32768] [--kinds xla blockwise]
    [--heads 8] [--key_heads 2] [--head_size 32] [--dtype float32] [--repeats 3]
    [--memory 4] [--output FILE.md] [--json FILE]

The table is of the attention of one layer, forward and backward: one sequence on one device, with
numbers of documents. Temporaries are those that XLA plans. The kinds of a length run in turn, and
the time is that of the fastest run. A kind whose temporaries are more than `--memory` GiB is
compiled and not run.

Last figures, 2026-11-22, jax 0.10.2, two cores of a Xeon that others used too (load 11 to 18), so
that only the seconds of one length compare: at 2,048 positions XLA 642.6 MiB and 7.8 s, blockwise
11.1 MiB and 1.2 s; at 8,192 10,250 MiB, not run, and 44.5 MiB, 24 s; at 32,768 163,881 MiB, not
run, and 178 MiB, 226 s.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.results import note_conditions, write_results
from manualpar.inspect import ledger
from manualpar.layers.attention import AttentionKind, attention

KINDS: tuple[AttentionKind, ...] = ("xla", "blockwise")  # Those that run on CPUs.
HEADER = ("positions", "attention", "temporaries MiB", "GFLOP", "seconds")


class Row(NamedTuple):
    """A kind of attention at a length; `seconds` is `None` for one that did not run."""

    positions: int
    kind: str
    temporaries: int
    flops: int
    seconds: float | None

    def cells(self) -> tuple[str, ...]:
        """As in the table."""
        return (
            f"{self.positions:,}",
            self.kind,
            f"{self.temporaries / 2**20:,.1f}",
            f"{self.flops / 1e9:,.1f}",
            "not run" if self.seconds is None else f"{self.seconds:,.2f}",
        )


def measure(args: argparse.Namespace, positions: int) -> list[Row]:
    """The kinds at one length."""
    keys = jax.random.split(jax.random.key(0), 4)
    counts = (args.heads, args.key_heads, args.key_heads, args.heads)
    query, key, value, g = (
        jax.random.normal(k, (1, positions, count, args.head_size), args.dtype)
        for k, count in zip(keys, counts, strict=True)
    )
    documents = (jnp.arange(positions, dtype=jnp.int32) // 1000)[None]
    compiled, rows = {}, {}
    for kind in args.kinds:

        def run(*given: Any, kind: AttentionKind = kind) -> Any:
            *heads, g = given

            def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
                return attention(query, key, value, documents, kind=kind)

            out, pullback = jax.vjp(attend, *heads)
            return out, pullback(g)

        step = jax.jit(run).lower(query, key, value, g).compile()
        analysis = step.memory_analysis()
        assert analysis is not None
        temporaries = analysis.temp_size_in_bytes
        flops = ledger(run, query, key, value, g).total_flops
        rows[kind] = Row(positions, kind, temporaries, flops, None)
        if temporaries <= args.memory * 2**30:
            compiled[kind] = step
    for _ in range(args.repeats):
        for kind, step in compiled.items():
            began = time.perf_counter()
            jax.block_until_ready(step(query, key, value, g))
            seconds = min(time.perf_counter() - began, rows[kind].seconds or float("inf"))
            rows[kind] = rows[kind]._replace(seconds=seconds)
    return list(rows.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192, 32768])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    for name, default in {"heads": 8, "key_heads": 2, "head_size": 32, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--memory", type=float, default=4.0)
    for name in ("output", "json"):
        parser.add_argument(f"--{name}", type=Path)
    args = parser.parse_args(argv)
    conditions = note_conditions("benchmarks.attention_on_cpu", argv)
    shape = f"{args.heads} heads, {args.key_heads} of keys, {args.head_size} features"
    lines = [f"## Attention on the CPU: {shape}, {args.dtype}", "", conditions.sentence(), ""]
    lines += [f"| {' | '.join(HEADER)} |", "| ---: | --- | ---: | ---: | ---: |"]
    print("\n".join(lines), flush=True)
    rows = []
    for positions in args.lengths:
        for row in measure(args, positions):
            rows.append(row)
            lines.append(f"| {' | '.join(row.cells())} |")
            print(lines[-1], flush=True)
    data = {"rows": [row._asdict() for row in rows]}
    write_results(conditions, lines=lines, data=data, output=args.output, json_output=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
