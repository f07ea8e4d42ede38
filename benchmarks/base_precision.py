"""What a language model loses when its kernels are stored narrower, before and after LoRA.

python -m benchmarks.base_precision [--steps 200] [--tuning_steps 60]
    [--output FILE.md] [--json FILE.json]

A small Transformer on bytes learns the sources of this package in float32, on one device. Then its
kernels, or all of it, are stored as each of `BASES` says, and it is asked about sources that it has
not seen: the difference of its logits from those in float32, relative to their standard deviation,
and its loss. At last LoRA tunes each on pages of `docs/`, and the loss is that of pages that were
held out. Bytes are those of all frozen parameters, for each of their elements.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.results import note_conditions, write_results
from manualpar import Batch, Program, fsdp, lora, make_mesh, quantized
from manualpar.inspect import state_bytes
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss

ROOT = Path(__file__).parent.parent
EXAMPLES, POSITIONS, HELD_OUT = 16, 128, 8
ADAPTED = {"*/attention/*": 8, "*/mlp/*": 8}
HEADER = ("base", "bytes a parameter", "logits off by", "loss", "loss after LoRA")
# The length of the blocks in int8, if there are some, and `frozen_dtype`.
BASES: Mapping[str, tuple[int, str | None]] = {
    "float32": (0, None),
    "bfloat16": (0, "bfloat16"),
    **{f"int8, blocks of {block}": (block, None) for block in (64, 256)},
    "int8, blocks of 64, the rest in bfloat16": (64, "bfloat16"),
}


class Row(NamedTuple):
    """What one base holds and loses."""

    base: str
    bytes_each: float
    logits_off: float
    loss: float
    tuned_loss: float

    def cells(self) -> list[str]:
        """The row of a table."""
        losses = (f"{x:.4f}" for x in (self.loss, self.tuned_loss))
        return [self.base, f"{self.bytes_each:.3f}", f"{self.logits_off:.2%}", *losses]


def read_batches(pattern: str, number: int, *, seed: int) -> tuple[list[Batch], list[Batch]]:
    """Batches of bytes of files, and some of the last files, which the others do not have."""
    paths = sorted(ROOT.glob(pattern))
    split = max(len(paths) // 10, 1)
    text, held_out = (
        np.frombuffer(b"".join(path.read_bytes() for path in some), np.uint8).astype(np.int32)
        for some in (paths[:-split], paths[-split:])
    )
    rng = np.random.default_rng(seed)

    def draw(of: np.ndarray) -> Batch:
        starts = rng.integers(0, len(of) - POSITIONS, EXAMPLES)
        rows_BS = np.stack([of[start : start + POSITIONS + 1] for start in starts])
        return Batch(rows_BS[:, :-1], rows_BS[:, 1:])

    return [draw(text) for _ in range(number)], [draw(held_out) for _ in range(HELD_OUT)]


def build(model: Any, learning_rate: float, **options: Any) -> Program:
    """A program on one device."""
    tokens = jax.ShapeDtypeStruct((EXAMPLES, POSITIONS), jnp.int32)
    return fsdp(
        model,
        optax.adam(learning_rate),
        language_model_loss,
        mesh=make_mesh({"data": 1}, jax.devices()[:1]),
        batch=Batch(inputs=tokens, labels=tokens),
        **options,
    )


def train(program: Program, state: Any, batches: Sequence[Batch]) -> Any:
    """The state after a step for each batch."""
    for batch in batches:
        state, _ = program.train_step(state, batch)
    return state


def loss_of(program: Program, state: Any, batches: Sequence[Batch]) -> float:
    """The mean loss of batches."""
    sums = [program.eval_step(state, batch)["loss"] for batch in batches]
    return float(sum(total for total, _ in sums) / sum(count for _, count in sums))


def measure(steps: int, tuning_steps: int, model: Transformer | None = None) -> list[Row]:
    """Trains a model and measures a row for each of `BASES`."""
    model = model or Transformer(
        vocab_size=256, num_layers=4, hidden_size=128, num_heads=2, mlp_size=512
    )
    batches, held_out = read_batches("manualpar/*/*.py", steps, seed=0)
    pages, page = read_batches("docs/*.md", tuning_steps, seed=1)
    whole = build(model, 3e-3)
    params = whole.whole(train(whole, whole.init(jax.random.key(0)), batches))["params"]
    inputs = held_out[0].inputs
    expected = np.asarray(jax.jit(model.apply)({"params": params}, inputs))
    rows = []
    for base, (block, dtype) in BASES.items():
        given = quantized(model, {"*kernel": block}) if block else model
        stored = lora(given, ADAPTED, alpha=16)
        program = build(stored, 2e-3, frozen_dtype=dtype)
        state = program.init_from(params, jax.random.key(1), missing="init")
        logits = jax.jit(stored.apply)(program.whole(state), inputs)
        frozen = [
            (info, x)
            for (info, _), x in zip(program.parameters, jax.tree.leaves(state.params), strict=True)
            if not info.trainable
        ]
        elements = sum(x.size for info, x in frozen if not info.path.endswith("_scales"))
        row = Row(
            base,
            state_bytes([x for _, x in frozen])[0] / elements,
            float(np.std(np.asarray(logits, np.float32) - expected) / np.std(expected)),
            loss_of(program, state, held_out),
            loss_of(program, train(program, state, pages), page),
        )
        print(f"| {' | '.join(row.cells())} |", flush=True)
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table and writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tuning_steps", type=int, default=60)
    for name in ("output", "json"):
        parser.add_argument(f"--{name}", type=Path)
    args = parser.parse_args(argv)
    conditions = note_conditions("benchmarks.base_precision", argv)
    print("\n".join(f"| {' | '.join(row)} |" for row in (HEADER, ["---"] * len(HEADER))))
    rows = measure(args.steps, args.tuning_steps)
    lines = ["## Narrower bases", "", conditions.sentence(), ""]
    table = (HEADER, ["---"] * len(HEADER), *(row.cells() for row in rows))
    lines += [f"| {' | '.join(row)} |" for row in table]
    data = {"rows": [row._asdict() for row in rows]}
    write_results(conditions, lines=lines, data=data, output=args.output, json_output=args.json)


if __name__ == "__main__":
    main()
