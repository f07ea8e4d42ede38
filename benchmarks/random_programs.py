"""Draws programs at random and compares each with plain flax on one device.

python -m benchmarks.random_programs --to=2000 --output=programs.jsonl
python -m benchmarks.random_programs --program=1234
python -m benchmarks.random_programs --description='{"model": ...}'

The number `N` of a program determines it: a model, a loss, a strategy with its options, a mode, a
mesh of up to eight devices, dtypes and quantization, an optimizer, and a move of the state to
another program. A program has one of these outcomes:

- `exact`: all results are as on one device (`random_checks` compares them),
- `refused`: an error message of the package explains why the program cannot run,
- `wrong`: a result differs from one device,
- `crash`: any other exception is raised, or the process ends,
- `hang`: the program has not ended within `--seconds`,
- `skipped`: a library that the program needs is not installed.

Each outcome is appended to `--output` at once, and programs with an outcome in this file are not
run again; `docs/measured/random_programs.jsonl` is such a file. The programs run in another
process, which is replaced after `--each` programs. The exit code is 1 if the outcome of a program
is `wrong`, `crash` or `hang`.
"""

import argparse
import collections
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jaxlib.version

from benchmarks.random_options import draw, features_of

BAD = ("wrong", "crash", "hang")
# The same flags as in `tests/compiling.py`. The second flag exists only before jaxlib 0.11.
XLA_FLAGS = "--xla_cpu_parallel_codegen_split_count=1"
if jaxlib.version.__version_info__ < (0, 11):
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"
ENVIRONMENT = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "8",
    "XLA_FLAGS": XLA_FLAGS,
    # The last frame of the traceback shows which package raised an error.
    "JAX_TRACEBACK_FILTERING": "off",
    "FLAX_FILTER_FRAMES": "0",
}


def main() -> int:
    """Runs the programs that the command line chooses, and prints a table of the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first program")
    parser.add_argument("--to", type=int, default=100, help="the number after the last program")
    parser.add_argument("--program", type=int, help="run only this program")
    parser.add_argument("--description", help="the JSON description of a program to run")
    parser.add_argument("--only", default="", help="text in the description of programs")
    parser.add_argument("--output", type=Path, help="a file to which outcomes are appended")
    parser.add_argument("--seconds", type=float, default=180, help="time limit of a program")
    parser.add_argument("--each", type=int, default=48, help="number of programs per process")
    parser.add_argument("--table", action="store_true", help="run nothing, only print the table")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return _work()
    if args.description:
        rows = [json.loads(args.description)]
    else:
        one = args.program
        numbers = range(args.first, args.to) if one is None else range(one, one + 1)
        rows = [row for row in map(draw, numbers) if args.only in json.dumps(row)]
    done = list(_read(args.output)) if args.output else []
    known = {row["number"] for row in done}
    rows = [] if args.table else [row for row in rows if row.get("number") not in known]
    alone = len(rows) == 1
    for result in run_all(rows, seconds=args.seconds, each=args.each):
        done.append(result)
        if args.output:
            with args.output.open("a") as file:
                kept = {k: x for k, x in result.items() if k != "description"}
                file.write(json.dumps(kept if result["number"] >= 0 else result) + "\n")
        if alone or result["outcome"] in BAD:
            print(f"{result['number']}: {result['outcome']}: {result['words']}")
            print(json.dumps(result["description"]), flush=True)
    if not alone:
        summarize(done)
    return int(any(row["outcome"] in BAD for row in done))


def run_all(rows: list[Any], *, seconds: float, each: int) -> Iterator[dict[str, Any]]:
    """Runs all described programs; yields the outcome of each."""
    while rows:
        worker = _Worker()
        for row in rows[:each]:
            began = time.monotonic()
            outcome, words = worker.ask(row, seconds)
            took = round(time.monotonic() - began, 2)
            number = row.get("number", -1)
            yield {
                "number": number,
                "outcome": outcome,
                "words": words,
                "seconds": took,
                "description": row,
            }
            rows = rows[1:]
            if worker.process.poll() is not None or outcome == "hang":
                break
        worker.end()


class _Worker:
    """A process that runs programs, and a thread that reads its answers."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.random_programs", "--worker"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        # The process answers once after all imports, which take minutes on a busy machine.
        self._answers.get(timeout=1800)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("answer "):
                self._answers.put(line.removeprefix("answer "))
        self._answers.put(None)

    def ask(self, row: Any, seconds: float) -> tuple[str, str]:
        """Runs a program; returns its outcome and an explanation."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(row) + "\n")
        self.process.stdin.flush()
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            return "hang", f"no end in {seconds:g} s"
        if answer is None:
            return "crash", f"the process ended with code {self.process.wait()}"
        outcome, words = json.loads(answer)
        return outcome, words

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self._reader.join()
        self.process.communicate()


def _work() -> int:
    import gc

    from benchmarks.random_checks import Shared, run

    gc.set_threshold(100_000, 20, 100)
    shared = Shared()
    print("answer ready", flush=True)
    for line in sys.stdin:
        answer = run(json.loads(line), shared)
        print("answer " + json.dumps(answer), flush=True)
    return 0


def _read(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text().splitlines():
            yield json.loads(line)


def summarize(rows: Iterable[dict[str, Any]]) -> None:
    """Prints the number of each outcome by feature, and the first words of refusals."""
    by_feature: dict[str, collections.Counter[str]] = {}
    refusals: collections.Counter[str] = collections.Counter()
    for row in rows:
        for feature in ("all", *features_of(row.get("description") or draw(row["number"]))):
            by_feature.setdefault(feature, collections.Counter())[row["outcome"]] += 1
        if row["outcome"] == "refused":
            refusals[sentence_class(row["words"])] += 1
    outcomes = ("exact", "refused", "skipped", *BAD)
    print(f"{'':<28}{'run':>6}{''.join(f'{outcome:>9}' for outcome in outcomes)}")
    for feature, counts in sorted(by_feature.items(), key=lambda item: -sum(item[1].values())):
        cells = "".join(f"{counts[o]:>9}" for o in outcomes)
        print(f"{feature:<28}{sum(counts.values()):>6}{cells}")
    for words, count in refusals.most_common():
        print(f"{count:>5} {words}")


def sentence_class(words: str) -> str:
    """Returns the first words of a refusal, without its names, lists and numbers."""
    _, _, sentence = words.partition(": ")
    return re.sub(r"'[^']*'|\[[^]]*\]|\([^)]*\)|\d+", "…", sentence)[:90]


if __name__ == "__main__":
    sys.exit(main())
