"""Runs one training job with several libraries, and counts the lines of each script.

    python -m benchmarks.same_job                    # all of `SCRIPTS`
    python -m benchmarks.same_job flax manualpar     # some of them

`benchmarks/same_job/job.py` describes the job. Each script trains `HALF` steps, goes on to `STEPS`
in a second process, and trains `STEPS` steps at once in a third. The command fails unless the loss
falls, each device holds an eighth of the state, and the interrupted training shows the losses of
the other. A line counts if it has code: neither comments, docstrings and blank lines, nor lines
that end in `# not counted`.
"""

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.same_job.job import DEVICES

FOLDER = Path(__file__).parent
HALF, STEPS = 24, 48
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={DEVICES}")
# Script -> how Python is called, before its path.
SCRIPTS = {"manualpar": (), "flax": (), "accelerate": TORCHRUN}
NOT_COUNTED = "# not counted"
_LINE = re.compile(r"^step +(\d+)(?:/\d+)? +(train|eval) .*?loss +(\d+\.\d+)", re.MULTILINE)
_SHARE = re.compile(r"^a device holds (\d\.\d+) of the state$", re.MULTILINE)


class Outcome(NamedTuple):
    """What a script printed: the loss at each step, and the share of the state on a device."""

    losses: dict[tuple[str, int], float]
    share: float


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table with a row for each script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(SCRIPTS)}")
    names = parser.parse_args(argv).names or list(SCRIPTS)
    if unknown := set(names) - set(SCRIPTS):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(SCRIPTS)}")
    print("| with | lines | loss at steps 8, 24, 48 | evaluation | on a device |")
    print("| --- | ---: | --- | ---: | ---: |")
    for name in names:
        path = FOLDER / f"with_{name}.py"
        with tempfile.TemporaryDirectory() as folder:
            first = train(path, f"{folder}/stopped", HALF)
            second = train(path, f"{folder}/stopped", STEPS)
            whole = train(path, f"{folder}/whole", STEPS)
        check(name, first, second, whole)
        losses = ", ".join(f"{whole.losses['train', step]:.3f}" for step in (8, HALF, STEPS))
        row = name, count_lines(path), losses, f"{whole.losses['eval', STEPS]:.3f}"
        print("|", " | ".join(map(str, row)), f"| {whole.share:.3f} |", flush=True)


def train(path: Path, folder: str, steps: int) -> Outcome:
    """Runs a script, and reads the lines that it prints."""
    options = SCRIPTS[path.stem.removeprefix("with_")]
    command = [sys.executable, *options, str(path), str(folder), str(steps)]
    environment = os.environ | {
        "PYTHONPATH": str(FOLDER.parents[1]),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "JAX_NUM_CPU_DEVICES": str(DEVICES),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{path}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return read_outcome(done.stdout)


def read_outcome(text: str) -> Outcome:
    """Reads the losses and the share of the state from the output of a script."""
    losses = {(split, int(step)): float(loss) for step, split, loss in _LINE.findall(text)}
    (share,) = _SHARE.findall(text)
    return Outcome(losses, float(share))


def check(name: str, first: Outcome, second: Outcome, whole: Outcome) -> None:
    """Refuses outcomes of a script that does not train, shard or resume."""
    train_losses = {step: loss for (split, step), loss in whole.losses.items() if split == "train"}
    mistakes = []
    if not train_losses[STEPS] < 0.5 * train_losses[min(train_losses)]:
        mistakes.append(f"the loss does not fall: {train_losses}")
    share = max(x.share for x in (first, second, whole))
    if not 1 / 8 <= share < 0.13:
        mistakes.append(f"a device holds {share} of the state, expected an eighth")
    if min(step for _, step in second.losses) <= HALF:
        mistakes.append(f"the second call does not go on: {second.losses}")
    # Step 0 is evaluated before training by some.
    interrupted = {**first.losses, **second.losses}
    differ = {
        key: (loss, interrupted.get(key))
        for key, loss in whole.losses.items()
        if abs(loss - interrupted.get(key, float("inf"))) > 1e-3
    }
    if differ:
        mistakes.append(f"an interrupted training is another: {differ}")
    if mistakes:
        raise SystemExit(f"{name}: {'; '.join(mistakes)}")


def count_lines(path: Path) -> int:
    """Counts the lines of a script that have code."""
    text = path.read_text(encoding="utf-8")
    skipped = {i for i, line in enumerate(text.splitlines(), 1) if line.endswith(NOT_COUNTED)}
    counted, is_statement_start = set[int](), True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            continue
        is_docstring = token.type == tokenize.STRING and is_statement_start
        is_statement_start = token.type == tokenize.NEWLINE
        if token.string.strip() and not is_docstring:
            counted.update(range(token.start[0], token.end[0] + 1))
    return len(counted - skipped)


if __name__ == "__main__":
    main()
