"""What a layer that is split over a model axis sends for each token: ours, XLA's, and peers' forms.

python -m benchmarks.tensor_parallel_bytes [--data 2 --model 4] [--hidden_size 64]
    [--output FILE.md] [--json FILE.json]

Nothing is timed. A small Transformer is built with two layers and with three, so that the
difference is what one layer sends, forward and backward. In mode `manual` that is read from the
traced step. In the other modes, whose annotations are the same, it is read from the program that
XLA:CPU has compiled, without the collectives along the data axis. Parameters are whole along that
axis, so that nothing is gathered for them. (Mode `explicit` has no row, because it gathers the
parameters of a split layer and sends none of its tokens.)

The peers' rows are closed forms from what they publish, not measurements:

- Megatron-LM: two all-reduces forward and two backward (https://arxiv.org/abs/1909.08053, section
  3). With sequence parallelism all-gathers and reduce-scatters take their place, and the input of
  each of the two column-parallel products, which is kept in parts, is gathered again for the
  gradient of its weights (https://arxiv.org/abs/2205.05198, section 4.2.2).
- torchtitan (https://arxiv.org/abs/2410.06511): the plan of its Llama, sequence-parallel norms, one
  gather before attention and one before the MLP, and row-parallel outputs that are scattered.
  Autograd keeps what was gathered.

The gradients of two norms' scales are left out of them.
"""

import argparse
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.results import note_conditions, write_results
from manualpar import Batch, data_parallel, make_mesh
from manualpar.inspect import compiled_collectives, ring_bytes, total_bytes, trace_collectives
from manualpar.inspect.communication import Kind, count_by_kind
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.training.devices import simulate_devices

EXAMPLES, POSITIONS = 16, 32
KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
HEADER = ("program", *(f"{kind.replace('_', '-')}s" for kind in KINDS), "bytes a token", "of A")
# The model's fields, and the mode, by the name of the row.
OURS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "ours": ({}, "manual"),
    "ours, sequence": ({"sequence_parallel": True}, "manual"),
    "auto": ({}, "auto"),
    "auto-unconstrained": ({}, "auto-unconstrained"),
}
# The collectives of a layer of peers by kind; each is of all of a device's tokens.
PEERS: Mapping[str, Mapping[Kind, int]] = {
    "Megatron-LM": {"all_reduce": 4},
    "Megatron-LM, sequence": {"all_gather": 6, "reduce_scatter": 4},
    "torchtitan, sequence": {"all_gather": 4, "reduce_scatter": 4},
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What a layer sends.

    Attributes:
      counts: Its collectives by kind, forward and backward together.
      bytes_a_token: The bytes that a device sends for each of its tokens.
      shares: Those in multiples of `A (N - 1) / N`, where `A` are the bytes of the token between
        layers: an all-reduce is 2, an all-gather or a reduce-scatter 1.
    """

    program: str
    counts: Mapping[str, int]
    bytes_a_token: Fraction
    shares: Fraction

    def cells(self) -> list[str]:
        """The row of a table."""
        counts = (str(self.counts.get(kind, 0)) for kind in KINDS)
        numbers = (f"{float(x):,.6g}" for x in (self.bytes_a_token, self.shares))
        return [self.program, *counts, *numbers]


def measure(name: str, *, sizes: Mapping[str, int], hidden_size: int) -> Row:
    """What one layer of the Transformer sends in one of `OURS`."""
    fields, mode = OURS[name]
    counts: list[Counter[str]] = []
    sent: list[Fraction] = []
    for num_layers in (2, 3):
        found = _collectives(fields, mode, sizes, num_layers, hidden_size)
        counts.append(Counter(count_by_kind(found)))
        sent.append(total_bytes(found))
    of_layer = {kind: counts[1][kind] - counts[0][kind] for kind in KINDS}
    bytes_a_token = (sent[1] - sent[0]) / (EXAMPLES // sizes["data"] * POSITIONS)
    return _row(name, of_layer, bytes_a_token, sizes["model"], hidden_size)


def of_peer(name: str, *, sizes: Mapping[str, int], hidden_size: int) -> Row:
    """What one layer of a peer sends, by its closed form."""
    devices, size = sizes["model"], 4 * hidden_size
    sent = Fraction(0)
    for kind, number in PEERS[name].items():
        operand = Fraction(size, devices) if kind == "all_gather" else Fraction(size)
        sent += number * operand * ring_bytes(kind, 1, devices)
    return _row(name, PEERS[name], sent, devices, hidden_size)


def _row(
    name: str, counts: Mapping[Any, int], sent: Fraction, devices: int, hidden_size: int
) -> Row:
    return Row(name, counts, sent, sent / (4 * hidden_size * Fraction(devices - 1, devices)))


def _collectives(
    fields: Mapping[str, Any], mode: Any, sizes: Mapping[str, int], num_layers: int, hidden: int
) -> list[Any]:
    """What a step sends, but for what goes over the data axis."""
    model = Transformer(
        vocab_size=64,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=8,
        mlp_size=4 * hidden,
        scan_layers=False,
        split_axis="model",
        **fields,
    )
    tokens = jax.ShapeDtypeStruct((EXAMPLES, POSITIONS), jnp.int32)
    program = data_parallel(
        model,
        optax.sgd(1e-3),
        language_model_loss,
        mesh=make_mesh(sizes),
        batch=Batch(inputs=tokens, labels=tokens),
        mode=mode,
    )
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    if mode == "manual":
        return [one for one in trace_collectives(traced) if one.axes != ("data",)]
    found = compiled_collectives(traced.lower().compile())
    # A group of another size lies along the model axis, or along both.
    return [one for one in found if one.group_size not in (1, sizes["data"])]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table and writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("data", 2), ("model", 4), ("hidden_size", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("output", "json"):
        parser.add_argument(f"--{name}", type=Path)
    args = parser.parse_args(argv)
    if args.data == args.model:
        parser.error("--data and --model are equal, expected sizes that tell groups apart.")
    conditions = note_conditions("benchmarks.tensor_parallel_bytes", argv)
    simulate_devices(args.data * args.model)
    sizes = {"data": args.data, "model": args.model}
    shape = f"data={args.data} x model={args.model}, {args.hidden_size} features in float32"
    lines = [f"## What a split layer sends: {shape}", "", conditions.sentence(), ""]
    lines += [f"| {' | '.join(row)} |" for row in (HEADER, ["---"] * len(HEADER))]
    print("\n".join(lines), flush=True)
    rows = []
    for name in (*OURS, *PEERS):
        make = measure if name in OURS else of_peer
        rows.append(make(name, sizes=sizes, hidden_size=args.hidden_size))
        lines.append(f"| {' | '.join(rows[-1].cells())} |")
        print(lines[-1], flush=True)
    data = {"shape": shape, "rows": rows}
    write_results(conditions, lines=lines, data=data, output=args.output, json_output=args.json)


if __name__ == "__main__":
    main()
