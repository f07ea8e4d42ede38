"""Generates with drafts of several lengths, and compares passes and time with no draft.

python -m benchmarks.speculative [--steps 150] [--rows 1] [--tokens 96] [--drafts 2 4 8]
    [--rounds 7] [--devices 1] [--output FILE.md] [--json FILE.json]

A large and a small byte-level Transformer are trained on the modules of Python's standard library.
Then each generator answers the same prompts, which are beginnings of other modules: without a
draft, with drafts of several lengths by the small model, and with drafts by the large model itself,
all of which it accepts. The tokens must equal those without a draft; how many answers do is in the
table, because ties within rounding may be broken otherwise. The generators are timed in turn
(`turns`); a ratio below 1 is faster than no draft in the same round.

A forward pass gives the tokens of all rows. The table counts passes for each token of an answer,
and which share of the proposed tokens the large model accepted.
"""

import argparse
import dataclasses
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.results import note_conditions, write_results
from benchmarks.turns import Block, Estimate, estimate, ratios, table, take_turns
from manualpar import Batch, fsdp, make_mesh
from manualpar.core.mesh.mesh import simulate_devices
from manualpar.core.program.program import Program
from manualpar.core.state.train_state import TrainState
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.generation import Draft, Generator
from manualpar.models.generation.answers import Answer

LARGE = Transformer(
    vocab_size=256, num_layers=6, hidden_size=256, num_heads=4, mlp_size=768, tied_head=True
)
SMALL = LARGE.clone(num_layers=1, hidden_size=96, num_heads=2, mlp_size=256)
LENGTH, ROWS, PROMPT = 128, 16, 64
TEMPERATURES = (0.0, 0.8)
NO_DRAFT, ITSELF = "no draft", "itself, 4"


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of a generator.

    Attributes:
      temperature: The temperature of the draws.
      draft: The draft model and the number of drafted tokens.
      equal: The share of answers with the tokens of the generator without a draft.
      passes: The forward passes of the large model for each token of an answer.
      accepted: The share of proposed tokens that were accepted; `None` without a draft.
      time: The time in multiples of the time without a draft.
    """

    temperature: float
    draft: str
    equal: float
    passes: float
    accepted: float | None
    time: Estimate

    def cells(self) -> list[str]:
        """Returns the row of the table."""
        accepted = "" if self.accepted is None else f"{self.accepted:.0%}"
        start = [f"{self.temperature:g}, {self.draft}", f"{self.equal:.0%}"]
        return [*start, f"{self.passes:.3f}", accepted, self.time.show("{:.2f}".format)]


def main(argv: Sequence[str] | None = None) -> None:
    """Trains both models, measures the generators and prints the table."""
    parser = argparse.ArgumentParser()
    for name, default in (("steps", 150), ("rows", 1), ("tokens", 96), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args(argv)
    conditions = note_conditions("benchmarks.speculative", argv)
    simulate_devices(flags.devices)
    train_text, test_text = _texts()
    large, small = (_train(model, train_text, flags.steps) for model in (LARGE, SMALL))
    rows = [
        row
        for temperature in TEMPERATURES
        for row in _measure(large, small, test_text, temperature, flags)
    ]
    header = ("temperature, draft", "equal answers", "passes a token", "accepted", "time")
    lines = [
        "## Speculative decoding",
        "",
        conditions.sentence(),
        "",
        f"Trained for {flags.steps} steps. {flags.rows} prompts of {PROMPT} bytes in one batch, "
        f"{flags.tokens} tokens of answer, {flags.rounds} rounds.",
        "",
        *table(header, [row.cells() for row in rows]),
    ]
    print("\n".join(lines))
    data = {"rows": [dataclasses.asdict(row) for row in rows]}
    write_results(conditions, lines=lines, data=data, output=flags.output, json_output=flags.json)


def _texts() -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of the standard library's modules, and those of every tenth module."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    train = b"".join(file.read_bytes() for index, file in enumerate(files) if index % 10)
    test = b"".join(file.read_bytes() for file in files[::10])
    return np.frombuffer(train, np.uint8), np.frombuffer(test, np.uint8)


def _train(model: Transformer, text: np.ndarray, steps: int) -> tuple[Program, TrainState]:
    rng = np.random.default_rng(0)

    def batch() -> Batch:
        starts = rng.integers(0, len(text) - LENGTH - 1, ROWS)
        rows = np.stack([text[start : start + LENGTH + 1] for start in starts]).astype(np.int32)
        return Batch(inputs=rows[:, :-1], labels=rows[:, 1:])

    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0, 3e-3, 10, steps))
    mesh = make_mesh({"data": -1})
    program = fsdp(model, optimizer, language_model_loss, mesh=mesh, batch=batch())
    state = program.init(jax.random.key(0))
    for _ in range(steps):
        state, _ = program.train_step(state, batch())
    return program, state


def _measure(
    large: tuple[Program, TrainState],
    small: tuple[Program, TrainState],
    text: np.ndarray,
    temperature: float,
    flags: argparse.Namespace,
) -> list[Row]:
    starts = np.random.default_rng(1).integers(0, len(text) - PROMPT, flags.rows)
    prompts = [text[start : start + PROMPT].tolist() for start in starts]
    options: Any = {"max_tokens": flags.tokens, "temperature": temperature}
    drafts: dict[str, Draft | None] = {NO_DRAFT: None}
    drafts |= {f"small, {number}": Draft(*small, number) for number in flags.drafts}
    drafts[ITSELF] = Draft(*large, 4)
    answers: dict[str, list[Answer]] = {}

    def block_of(name: str) -> Block:
        generator = Generator(large[0], batch_size=flags.rows, stop_tokens=(), draft=drafts[name])

        def run(repeats: int) -> float:
            started = time.perf_counter()
            for _ in range(repeats):
                answers[name] = generator.generate(large[1], prompts, **options)
            return time.perf_counter() - started

        return run

    blocks = {name: block_of(name) for name in drafts}
    seconds = take_turns(blocks, steps=1, rounds=flags.rounds)
    rows = []
    for name, draft in drafts.items():
        found, expected = answers[name], answers[NO_DRAFT]
        equal = [a.tokens == b.tokens for a, b in zip(found, expected, strict=True)]
        proposed = draft.tokens * sum(x.forward_passes - 1 for x in found) if draft else 0
        passes = sum(x.forward_passes for x in found) / sum(len(x.tokens) for x in found)
        accepted = sum(x.drafted for x in found) / proposed if proposed else None
        ratio = estimate(ratios(seconds[name], seconds[NO_DRAFT]))
        rows.append(Row(temperature, name, float(np.mean(equal)), passes, accepted, ratio))
    return rows


if __name__ == "__main__":
    main()
