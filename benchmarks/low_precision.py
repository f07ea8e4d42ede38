"""Compares the losses of a small language model with products in bfloat16, float8 and int8.

python -m benchmarks.low_precision [--steps 300] [--seeds 3] [--recipes bfloat16 float8 int8 qwix]
    [--json FILE.json]

The model reads bytes of Python's standard library on eight devices (FSDP, bfloat16), and the losses
are those of files that it does not train on, in nats for each byte. `float8 codes` also gathers
weights as codes in float8, which changes no bit. `qwix` replaces the products by qwix's in int8
(`pip install "manualpar[low-precision]"`). A CPU emulates such products, so nothing is timed.
"""

import argparse
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.results import note_conditions, write_results
from manualpar import Batch, fsdp, make_mesh, simulate_devices
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.layer_config import LowPrecision

LENGTH, SEQUENCES, HELD_OUT = 128, 16, 256
BYTES = 2**21
SIZES: Mapping[str, Any] = {
    "vocab_size": 256,
    "num_layers": 2,
    "hidden_size": 96,
    "num_heads": 4,
    "mlp_size": 256,
    "dtype": "bfloat16",
}
RECIPES = ("bfloat16", "float8", "float8 codes", "int8", "qwix")


def read_sequences() -> np.ndarray:
    """Reads the first bytes of the standard library: `int32[N, LENGTH + 1]`."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= BYTES:
            break
    count = len(text) // (LENGTH + 1)
    rows = np.frombuffer(bytes(text), np.uint8)[: count * (LENGTH + 1)]
    return rows.reshape(count, -1).astype(np.int32)


def make_model(recipe: str) -> Any:
    """Makes the model of a recipe."""
    if recipe != "qwix":
        matmul: Any = "" if recipe == "bfloat16" else recipe.split()[0]
        return Transformer(**SIZES, low_precision=LowPrecision(matmul))
    import qwix

    rule = qwix.QtRule(
        # The modules of products with kernels, not the attention around them.
        module_path=".*/(query|key|value|out|gate|up|down)",
        weight_qtype="int8",
        act_qtype="int8",
        bwd_qtype="int8",
    )
    return qwix.quantize_model(Transformer(**SIZES), qwix.QtProvider([rule]))


def train(recipe: str, seed: int, steps: int, rows: np.ndarray) -> float:
    """Trains a recipe; returns the mean loss of the sequences that are held out, in nats."""
    held_out, rows = rows[-HELD_OUT:], rows[:-HELD_OUT]
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, steps // 10, steps)
    abstract = jax.ShapeDtypeStruct((SEQUENCES, LENGTH), "int32")
    options: Any = {"gather_code": "float8"} if recipe == "float8 codes" else {}
    program = fsdp(
        make_model(recipe),
        optax.adamw(schedule, weight_decay=0.1),
        language_model_loss,
        mesh=make_mesh({"data": 8}),
        batch=Batch(abstract, abstract),
        min_weight_size=1,
        gather_dtype="bfloat16",
        **options,
    )
    state = program.init(jax.random.key(seed))
    order = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = rows[order.integers(0, len(rows), SEQUENCES)]
        state, _ = program.train_step(state, Batch(chosen[:, :-1], chosen[:, 1:]))
    total = count = 0.0
    for start in range(0, HELD_OUT, SEQUENCES):
        chosen = held_out[start : start + SEQUENCES]
        metrics = program.eval_step(state, Batch(chosen[:, :-1], chosen[:, 1:]))
        total, count = total + float(metrics["loss"][0]), count + float(metrics["loss"][1])
    return total / count


def main(argv: Sequence[str] | None = None) -> int:
    """Trains each recipe with each seed, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    simulate_devices(8)
    conditions = note_conditions("benchmarks.low_precision", argv)
    print(conditions.sentence(), flush=True)
    rows = read_sequences()
    losses: dict[str, list[float]] = {}
    for recipe in args.recipes:
        losses[recipe] = []
        for seed in range(args.seeds):
            losses[recipe].append(train(recipe, seed, args.steps, rows))
            print(recipe, seed, losses[recipe][-1], flush=True)
    first = np.mean(losses[args.recipes[0]])
    lines = ["## Products in few bits: held-out losses", "", conditions.sentence(), ""]
    lines += ["| products | nats for each byte | more | seeds |", "| --- | ---: | ---: | --- |"]
    for recipe, values in losses.items():
        each = ", ".join(f"{loss:.4f}" for loss in values)
        mean = np.mean(values)
        lines.append(f"| {recipe} | {mean:.4f} | {mean - first:+.4f} | {each} |")
    print("\n".join(lines))
    data = {"steps": args.steps, "losses": losses}
    write_results(conditions, lines=lines, data=data, output=None, json_output=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
