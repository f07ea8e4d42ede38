"""Commands over lines, with a model that answers nothing but `x`."""

import json
from pathlib import Path

import numpy as np
import pytest

from manualpar.commands import evaluate_command as evaluating
from manualpar.commands import generate_command as generating
from manualpar.models.generation.generator import Answer
from manualpar.models.generation.scoring import Score
from manualpar.training.load_run import OwnSettings


class Fake:
    max_length, batch_size, state, template, described = 8, 4, None, "", "a fake"
    own = OwnSettings()

    def generate(self, state, prompts, **options):
        return [Answer([1, 2], [0.0, 0.0], "x", "stop") for _ in prompts]

    def encode(self, text):
        return np.frombuffer(text.encode(errors="surrogatepass"), np.uint8)

    def count_special(self, documents):
        return {}

    def encode_pair(self, context, completion):
        return self.encode(context), self.encode(completion)

    @property
    def tokenizer(self):
        return self


def fake_run(flags, work):
    work(Fake(), Fake())
    return 0


def ask(command, flag, lines):
    """Runs a command over lines in the working directory and returns its output."""
    path, output = Path("lines.jsonl"), Path("output.jsonl")
    path.write_text("".join(f"{line}\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        for module in (generating, evaluating):
            patch.setattr(module, "run_with_model", fake_run)
        scores = [Score(-1.0, True, 1)]
        patch.setattr(evaluating, "score_completions", lambda *args, **options: scores)
        line = ["command", "--workdir=.", f"--{flag}={path}", f"--output={output}"]
        assert command(line) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]
