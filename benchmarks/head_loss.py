"""The loss of a large vocabulary: temporaries and time of a step, with all logits and by chunks.

python -m benchmarks.head_loss [--vocabularies 32000 ...] [--rounds 0] [--output FILE.md]

A transformer of two layers with 256 features takes a step of AdamW on one simulated CPU device, in
float32. With *logits* the loss is `split_cross_entropy` of the model's logits; with *labels* the
model computes it by chunks of the vocabulary, `manualpar.layers.head_loss`. Temporaries are XLA's,
compiled for 4,096 tokens. Steps of 1,024 tokens are timed in turn, after one that is not counted,
and the ratios are those within a round; `--rounds=0` times none.

The second table is the head alone, forward and backward, with other chunks than the default: 1,024
tokens, 512 features, 32,000 columns. A chunk of all columns is the loss of logits.

On 2026-11-22 with jax 0.10.2 on two cores of an Intel Xeon that seven others used (load 10): the
median of five ratios labels / logits and its interval, taken with attention by XLA.

| V | MiB, logits | MiB, labels | labels / logits |
| --- | ---: | ---: | ---: |
| 260, which is one chunk | 452 | 452 | 1.01 (0.93 to 1.06) |
| 8,192 | 621 | 505 | 1.05 (0.88 to 1.18) |
| 32,000 | 1,411 | 654 | 0.81 (0.70 to 1.08) |
| 131,072 | 4,701 | 745 | 0.80 (0.68 to 1.18) |

The head alone, of which a third more is computed, took 1.1 to 1.3 of the time with all logits; the
size of the chunk made no difference that this machine could show.
"""

import argparse
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.results import note_conditions, write_results
from benchmarks.turns import estimate, ratios, table, take_turns
from manualpar import Batch, data_parallel, make_mesh
from manualpar.layers import head_cross_entropy
from manualpar.layers.head_loss import default_chunk
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.training.devices import simulate_devices
from manualpar.training.optimizer import adamw

VOCABULARIES = (260, 8_192, 32_000, 131_072)
CHUNKS = (1_024, 2_048, 4_096, 8_192, 16_384, 32_000)
LENGTH, TOKENS, TIMED_TOKENS = 1_024, 4_096, 1_024
MIB = 2**20


def loss_of_logits(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
    """`language_model_loss` of the logits: a function that is no module's takes no labels."""
    return language_model_loss(params, functools.partial(apply_fn), batch, rng)


LOSSES = {"logits": loss_of_logits, "labels": language_model_loss}


class Compiled(NamedTuple):
    """Something that may be timed, and what it allocates.

    Attributes:
      block: Runs it so many times and returns the seconds.
      temporaries: Bytes, without arguments and results.
    """

    block: Any
    temporaries: int


def compile_step(loss: str, vocabulary: int, tokens: int) -> Compiled:
    """Compiles a training step; `loss` is one of `LOSSES`."""
    model = Transformer(
        vocab_size=vocabulary, num_layers=2, hidden_size=256, num_heads=4, mlp_size=1_024
    )
    text = np.random.default_rng(0).integers(0, vocabulary, (tokens // LENGTH, LENGTH + 1))
    batch = Batch(np.int32(text[:, :-1]), np.int32(text[:, 1:]))
    tx = adamw(1e-3, weight_decay=0.1, b1=0.9, b2=0.95)
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    program = data_parallel(model, tx, LOSSES[loss], mesh=mesh, batch=batch)
    lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
    compiled = lowered.compile()

    def block(steps: int) -> float:
        state = program.init(jax.random.key(0))
        on_device = jax.block_until_ready(jax.device_put(batch, program.batch_sharding))
        start = time.perf_counter()
        for _ in range(steps):
            state, metrics = compiled(state, on_device)
        jax.block_until_ready(metrics)
        return time.perf_counter() - start

    return Compiled(block, _temporaries(compiled))


def compile_head(chunk: int) -> Compiled:
    """Compiles a head's loss and gradients."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (TIMED_TOKENS, 512))
    head = jax.random.normal(keys[1], (512, 32_000)) * 512**-0.5
    labels = jax.random.randint(keys[2], (TIMED_TOKENS,), 0, 32_000)

    def loss(x: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        losses, correct = head_cross_entropy(x, head, labels, chunk=chunk)
        return losses.mean(), correct.mean(dtype=jnp.float32)

    grad = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)).lower(x, head).compile()

    def block(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            out = grad(x, head)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    return Compiled(block, _temporaries(grad))


def _temporaries(compiled: Any) -> int:
    return int(compiled.memory_analysis().temp_size_in_bytes)


def compare_steps(vocabulary: int, rounds: int) -> list[str]:
    """The row of a vocabulary."""
    held = [compile_step(loss, vocabulary, TOKENS).temporaries for loss in LOSSES]
    row = [f"{vocabulary:,}", f"{default_chunk(TOKENS):,}", *(f"{x / MIB:,.0f}" for x in held)]
    if not rounds:
        return row
    blocks = {loss: compile_step(loss, vocabulary, TIMED_TOKENS).block for loss in LOSSES}
    seconds = take_turns(blocks, steps=1, rounds=rounds)
    fastest = [f"{min(seconds[loss]):.2f}" for loss in LOSSES]
    ratio = estimate(ratios(seconds["labels"], seconds["logits"]))
    return [*row, *fastest, ratio.show(lambda x: f"{x:.2f}")]


def compare_chunks(rounds: int) -> list[list[str]]:
    """The rows of the head alone."""
    compiled = {str(chunk): compile_head(chunk) for chunk in CHUNKS}
    blocks = {name: one.block for name, one in compiled.items()}
    seconds = take_turns(blocks, steps=1, rounds=rounds)
    base = seconds[str(CHUNKS[-1])]
    return [
        [
            f"{int(name):,}",
            f"{one.temporaries / MIB:,.0f}",
            f"{min(seconds[name]):.2f}",
            estimate(ratios(seconds[name], base)).show(lambda x: f"{x:.2f}"),
        ]
        for name, one in compiled.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the tables and writes them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocabularies", nargs="+", type=int, default=list(VOCABULARIES))
    parser.add_argument("--rounds", type=int, default=6)
    for name in ("output", "json"):
        parser.add_argument(f"--{name}", type=Path)
    args = parser.parse_args(argv)
    conditions = note_conditions("benchmarks.head_loss", argv)
    simulate_devices(1)
    header = ["V", "chunk", "MiB, logits", "MiB, labels"]
    header += ["seconds, logits", "seconds, labels", "labels / logits"] if args.rounds else []
    rows = [compare_steps(vocabulary, args.rounds) for vocabulary in args.vocabularies]
    lines = ["## The loss of a large vocabulary", "", conditions.sentence(), ""]
    lines += table(header, rows)
    data: dict[str, Any] = {"steps": rows}
    if args.rounds:
        data["chunks"] = compare_chunks(args.rounds)
        lines += ["", *table(["chunk", "MiB", "seconds", "to all columns"], data["chunks"])]
    print("\n".join(lines), flush=True)
    write_results(conditions, lines=lines, data=data, output=args.output, json_output=args.json)


if __name__ == "__main__":
    main()
