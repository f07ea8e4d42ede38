"""What ways to fine-tune hold, send and compute in a step: read off the programs, nothing is timed.

python -m benchmarks.fine_tuning [--devices 8] [--hidden_size 256] [--layers 4]
    [--output FILE.md] [--json FILE.json]

One Transformer under `fsdp` with AdamW, its layers in a scan and checkpointed, in as many ways as
`WAYS` has. All numbers are of one device and one step. Bytes held are those of the state; bytes
sent and collectives are those of the traced step; operations are those of its products; and
temporaries are those of the step as XLA compiles it for simulated CPU devices, where bfloat16 is
computed in float32.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.results import note_conditions, write_results
from manualpar import Batch, Program, fsdp, lora, make_mesh, quantized
from manualpar.inspect.step_ledger import ledger
from manualpar.inspect.trained_parts import trained_parts
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.system.reports.tables import describe_bytes, describe_flops
from manualpar.training.devices import simulate_devices

EXAMPLES, POSITIONS, VOCABULARY = 16, 128, 2048
HEADER = (
    "way",
    "trained",
    "parameters",
    "optimizer state",
    "gradients sent",
    "gathers sent",
    "collectives",
    "products",
    "temporaries",
)
ADAPTED = {"*/attention/*": 8, "*/mlp/*": 8}
LAST = ("head", "final_norm/*")
# By the name of the row: what becomes of the model, and the options of the builder.
WAYS: Mapping[str, tuple[Callable[[Any], Any], Mapping[str, Any]]] = {
    "all parameters": (lambda model: model, {}),
    "attention": (lambda model: model, {"trainable": ("*/attention/*",)}),
    "attention, the rest in bfloat16": (
        lambda model: model,
        {"trainable": ("*/attention/*",), "frozen_dtype": "bfloat16"},
    ),
    "head and last norm": (lambda model: model, {"trainable": LAST}),
    "head and last norm, the rest in bfloat16": (
        lambda model: model,
        {"trainable": LAST, "frozen_dtype": "bfloat16"},
    ),
    "LoRA of rank 8": (lambda model: lora(model, ADAPTED, alpha=16), {}),
    "LoRA of rank 8, adapters whole": (
        lambda model: lora(model, ADAPTED, alpha=16),
        {"min_weight_size": 2**18},
    ),
    "LoRA of rank 8, the rest in bfloat16": (
        lambda model: lora(model, ADAPTED, alpha=16),
        {"frozen_dtype": "bfloat16"},
    ),
    "LoRA of rank 8, kernels in int8": (
        lambda model: lora(quantized(model), ADAPTED, alpha=16),
        {},
    ),
    "LoRA of rank 8, kernels in int8, the rest in bfloat16": (
        lambda model: lora(quantized(model), ADAPTED, alpha=16),
        {"frozen_dtype": "bfloat16"},
    ),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What a device holds, sends and computes in a step.

    Attributes:
      way: The name of the row.
      trained: How many elements are trained, and of how many in all.
      parameters: The bytes of all parameters.
      optimizer: The bytes of the optimizer's state.
      gradients_sent: The bytes sent for gradients.
      gathers_sent: The bytes sent for gathered parameters.
      collectives: How many collectives run.
      flops: The operations of products.
      temporaries: The temporaries of the compiled step, if it was compiled.
    """

    way: str
    trained: tuple[int, int]
    parameters: int
    optimizer: int
    gradients_sent: int
    gathers_sent: int
    collectives: int
    flops: int
    temporaries: int | None

    def cells(self) -> list[str]:
        """The row of a table."""
        some, every = self.trained
        sizes = self.parameters, self.optimizer, self.gradients_sent, self.gathers_sent
        return [
            self.way,
            f"{some:,} ({some / every:.1%})",
            *map(describe_bytes, sizes),
            f"{self.collectives:,}",
            describe_flops(self.flops),
            describe_bytes(self.temporaries),
        ]


def build(way: str, *, devices: int = 8, hidden_size: int = 256, layers: int = 4) -> Program:
    """The program of one of `WAYS`."""
    change, options = WAYS[way]
    model = Transformer(
        vocab_size=VOCABULARY,
        num_layers=layers,
        hidden_size=hidden_size,
        num_heads=8,
        mlp_size=4 * hidden_size,
        remat="full",
    )
    tokens = jax.ShapeDtypeStruct((EXAMPLES, POSITIONS), jnp.int32)
    return fsdp(
        change(model),
        optax.adamw(1e-4),
        language_model_loss,
        mesh=make_mesh({"data": devices}),
        batch=Batch(inputs=tokens, labels=tokens),
        **{"min_weight_size": 1024, **options},
    )


def measure(way: str, *, compile: bool = True, **sizes: int) -> Row:
    """Reads the row of one of `WAYS`."""
    program = build(way, **sizes)
    found = ledger(program, compile=compile)
    parts = trained_parts(program, found.collectives)
    elements = [parts[name]["elements"] for name in ("trained", "frozen")]
    return Row(
        way=way,
        trained=(elements[0], sum(elements)),
        parameters=parts["trained"]["bytes"] + parts["frozen"]["bytes"],
        optimizer=parts["optimizer"],
        gradients_sent=parts["gradients_sent"],
        gathers_sent=parts["gathers_sent"],
        collectives=sum(found.counts().values()),
        flops=found.total_flops,
        temporaries=found.compiled.temporaries if found.compiled else None,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table and writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("devices", 8), ("hidden_size", 256), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("output", "json"):
        parser.add_argument(f"--{name}", type=Path)
    args = parser.parse_args(argv)
    conditions = note_conditions("benchmarks.fine_tuning", argv)
    simulate_devices(args.devices)
    shape = f"{args.layers} layers of {args.hidden_size} features on {args.devices} devices"
    lines = [f"## Fine-tuning: {shape}", "", conditions.sentence(), ""]
    lines += [f"| {' | '.join(row)} |" for row in (HEADER, ["---"] * len(HEADER))]
    print("\n".join(lines), flush=True)
    rows = []
    for way in WAYS:
        sizes = {"devices": args.devices, "hidden_size": args.hidden_size, "layers": args.layers}
        rows.append(measure(way, **sizes))
        lines.append(f"| {' | '.join(rows[-1].cells())} |")
        print(lines[-1], flush=True)
    data = {"shape": shape, "rows": rows}
    write_results(conditions, lines=lines, data=data, output=args.output, json_output=args.json)


if __name__ == "__main__":
    main()
