"""Mutation test of this package's collectives: each is broken in turn, and a test must fail.

python -m benchmarks.mutations [--jobs 1] [--only NAME] [--list] [--timeout S] [--output FILE.md]
                               [--results FOLDER] [--shard I/N]

`mutation_sites` finds the calls, and `mutation_operators` mutates them. Each mutant is applied to a
snapshot of the working tree, which is taken when the command begins. In this snapshot `TESTS` run
in one process until the first failure. A mutant is killed if a test fails (also if JAX refuses to
trace a program), or if the tests take longer than the timeout. Mutants that are equivalent to the
original are not run; `EQUIVALENT` lists them with reasons. The command first runs the fast tests
for all mutants, and then the slow tests for the mutants that survived. Tests must pass without a
mutation: the fast tests run so before the first mutant, and a slow test that killed a mutant runs
so afterwards. The fast tests then fill a cache of compiled programs. (The cache's key is everything
that the compiler sees, so a mutant shares only the programs that it does not change.)

Running all mutants takes hours. `--results` names a folder in which every outcome is appended to a
file. A later command with the same folder goes on from there, if the package and the tests have not
changed. With `--shard` a command runs every N-th mutant, so that several commands can share the
work and a results folder.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

import jax

from benchmarks.mutation_operators import KINDS, Mutant, left_alone, mutate
from benchmarks.mutation_sites import Site, find_sites
from benchmarks.mutation_tests import FIRST, TESTS

ROOT = Path(__file__).parent.parent
FAST, SLOW = "not slow", "slow"  # Marks of tests.
LONGEST = {FAST: 4, SLOW: 40}  # In parts of the time of the fast tests without a mutation.
ORIGINAL = "not mutated"  # The name of the outcome without a mutation.
NO_TESTS = 5  # Pytest's exit code if no test is selected.
NOT_COPIED = (".*", "__pycache__", "*.egg-info")
NOT_COPIED_FROM_ROOT = ("build", "dist", "runs")  # `tests/runs` is copied


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of the tests for a mutant, or for the original.

    Attributes:
      killed_by: The test that failed; `""` if all passed.
      error: The type of the test's exception: `AssertionError` if numbers, copies or counts were
        wrong, another type if the program was refused.
      seconds: The time of the tests.
      output: The output of the tests, which files of results leave out.
      marked: The mark of the tests.
    """

    killed_by: str
    error: str
    seconds: float
    output: str = ""
    marked: str = FAST


def select_tests(mutant: Mutant | None) -> tuple[str, ...]:
    """Returns the tests for a mutant in order; without a mutant, the tests for all mutants."""
    fitting = [t for name, t in FIRST.items() if not mutant or fnmatchcase(mutant.name, name)]
    first = [test for tests in fitting[: 1 if mutant else None] for test in tests]
    return tuple(dict.fromkeys([*first, *TESTS]))


def copy_tree(target: Path) -> None:
    """Copies the working tree without hidden files, caches, builds and the folder `runs`."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        patterns = NOT_COPIED + (NOT_COPIED_FROM_ROOT if Path(folder) == ROOT else ())
        return {name for name in names if any(fnmatchcase(name, p) for p in patterns)}

    shutil.copytree(ROOT, target, ignore=ignored)


def run_tests(
    snapshot: Path,
    mutant: Mutant | None,
    tests: Sequence[str],
    marked: str,
    *,
    cache: Path,
    timeout: float | None,
) -> Outcome:
    """Runs tests with the mark `marked` in a copy of the snapshot, until one of them fails.

    The mutation is applied to the copy, if there is one.

    Raises:
      RuntimeError: Pytest itself failed, so the outcome is unknown.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(snapshot, copy)
        if mutant:
            path = copy / mutant.site.path
            path.write_bytes(mutant.apply(path.read_bytes()))
        environment = {
            **os.environ,
            "PYTHONPATH": str(copy),
            "PYTHONDONTWRITEBYTECODE": "1",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=line"]
        command = [sys.executable, "-m", "pytest", *options, *tests, "-m", marked]
        begin = time.monotonic()
        try:
            process = subprocess.run(
                command,
                cwd=copy,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome("timeout", "TimeoutExpired", time.monotonic() - begin, "", marked)
    seconds = time.monotonic() - begin
    if process.returncode in (0, NO_TESTS):
        return Outcome("", "", seconds, process.stdout, marked)
    failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", process.stdout, re.MULTILINE)
    if process.returncode not in (1, 2) or not failed:
        raise RuntimeError(f"pytest ended with {process.returncode}:\n{process.stdout}")
    raised = re.findall(r"^/?\S+:\d+: (?:[\w.]+\.)?(assert |\w+)", process.stdout, re.MULTILINE)
    error = "?" if not raised else raised[0].replace("assert ", "AssertionError")
    return Outcome(failed[0], error, seconds, process.stdout, marked)


def hash_sources(snapshot: Path) -> str:
    """Hashes all Python files of the package and the tests in a snapshot."""
    files = [path for top in ("manualpar", "tests") for path in (snapshot / top).rglob("*.py")]
    parts = [f"{path.relative_to(snapshot)}\0{path.read_text('utf-8')}" for path in sorted(files)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def save_outcome(path: Path, sources: str, name: str, outcome: Outcome) -> None:
    """Appends an outcome as one line; several processes may append at the same time."""
    fields = dataclasses.asdict(dataclasses.replace(outcome, output=""))
    line = json.dumps({"sources": sources, "mutant": name, **fields})
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def load_outcomes(path: Path, sources: str) -> dict[str, Outcome]:
    """Reads the outcomes for these sources by mutant; `FAST` and `SLOW` name the original's."""
    outcomes = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        fields = json.loads(line)
        name = fields.pop("mutant")
        if fields.pop("sources") == sources:
            outcomes[name] = Outcome(**fields)
    return outcomes


def is_left(outcome: Outcome, marked: str) -> bool:
    """Returns whether a mutant survived, and its tests with the mark `marked` have not run yet."""
    return not outcome.killed_by and (outcome.marked, marked) == (FAST, SLOW)


def report(sites: Sequence[Site], outcomes: dict[str, Outcome], total: int, command: str) -> str:
    """Makes a Markdown table with a row for each site and a column for each kind."""
    survivors = [name for name, outcome in outcomes.items() if not outcome.killed_by]
    killed = len(outcomes) - len(survivors)
    kill_rate = f"{killed / max(len(outcomes), 1):.1%}"
    lines = [
        "## Mutation test of the collectives",
        "",
        f"`{command}`, {time.strftime('%Y-%m-%d')}, jax {jax.__version__}, eight CPU devices.",
        "",
        f"**Killed {killed} of {len(outcomes)} mutants: {kill_rate}.**"
        + ("" if len(outcomes) == total else f" Not run: {total - len(outcomes)} more."),
        "",
        "K: killed; **S**: survived; =: the same program, for the reason below; ?: not run; empty: "
        "the kind does not apply.",
        "",
        f"| call | {' | '.join(KINDS)} |",
        f"| --- {'| --- ' * len(KINDS)}|",
    ]
    mutants = [mutant for site in sites for mutant in mutate(site)]
    for site in sites:
        if left_alone(site):
            continue
        cells = dict.fromkeys(KINDS, "")
        for mutant in mutate(site):
            outcome = outcomes.get(mutant.name)
            verdict = ("K" if outcome.killed_by else "**S**") if outcome else "?"
            cells[mutant.kind] = "=" if mutant.equivalent else verdict
        lines.append(f"| `{site.name}` | {' | '.join(cells.values())} |")
    lines += ["", "Survivors:", "", *(f"- `{name}`" for name in survivors or ["none"])]
    lines += ["", "The same program as the original, and so not run:", ""]
    lines += [f"- `{m.name}`: {m.equivalent}" for m in mutants if m.equivalent]
    lines += ["", "Calls without mutants:", ""]
    lines += [f"- `{site.name}`: {left_alone(site)}" for site in sites if left_alone(site)]
    killers = Counter(o.killed_by.partition("::")[0] for o in outcomes.values() if o.killed_by)
    lines += ["", "Killed by (the first test that failed):", ""]
    lines += [f"- {test}: {number}" for test, number in killers.most_common()]
    errors = Counter(outcome.error for outcome in outcomes.values() if outcome.killed_by)
    lines += ["", "Which raised:", ""]
    lines += [f"- {error}: {number}" for error, number in errors.most_common()]
    return "\n".join([*lines, ""])


def write_section(path: Path, section: str) -> None:
    """Replaces the section with the same heading in a Markdown file, or appends the section."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    heading = section.splitlines()[0]
    before, found, after = f"\n{text}".partition(f"\n{heading}\n")
    _, next_heading, rest = after.partition("\n## ") if found else ("", "", "")
    parts = [before.strip("\n"), section.strip("\n"), f"{next_heading}{rest}".strip("\n")]
    path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def choose(mutants: Iterable[Mutant], only: str) -> tuple[Mutant, ...]:
    """Returns the mutants that have `only` in their name and differ from the original."""
    return tuple(m for m in mutants if only in m.name and not m.equivalent)


def parse_shard(text: str) -> tuple[int, int]:
    """Parses a shard; `2/4` is every fourth mutant, from the second."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"is {text!r}, expected I/N with 1 <= I <= N")
    return int(match[1]), int(match[2])


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--only", default="", help="run mutants with this in their name")
    parser.add_argument("--list", action="store_true", help="list the mutants and end")
    parser.add_argument(
        "--timeout",
        type=float,
        help="seconds for a mutant's tests, by default 4 (slow tests: 40) times those of the fast "
        "tests without a mutation",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="a Markdown file; the report becomes or replaces a section of it",
    )
    parser.add_argument(
        "--results", type=Path, help="a folder of outcomes and compiled programs, to go on later"
    )
    parser.add_argument(
        "--shard", type=parse_shard, default=(1, 1), metavar="I/N", help="run every N-th mutant"
    )
    return parser.parse_args()


class Runner:
    """Runs the tests for mutants, and stores the outcomes in a folder."""

    def __init__(self, snapshot: Path, results: Path, timeout: float | None) -> None:
        """Prepares the runs; without a timeout `LONGEST` decides."""
        results.mkdir(parents=True, exist_ok=True)
        self._snapshot, self._timeout = snapshot, timeout
        self._path, self._cache = results / "outcomes.jsonl", results / "compiled"
        self._sources = hash_sources(snapshot)
        self._lock = threading.Lock()

    def outcomes(self) -> dict[str, Outcome]:
        """Returns the stored outcomes, by the mutant's name."""
        return load_outcomes(self._path, self._sources)

    def run(self, mutant: Mutant, marked: str) -> Outcome:
        """Runs the fast or the slow tests for a mutant.

        Raises:
          SystemExit: The test that fails also fails without the mutation.
        """
        timeout = self._timeout or LONGEST[marked] * self.control().seconds
        outcome = self._run(mutant, select_tests(mutant), marked, timeout)
        if marked == SLOW and outcome.killed_by not in ("", "timeout"):
            self._check_passes(outcome.killed_by)
        save_outcome(self._path, self._sources, mutant.name, outcome)
        return outcome

    def control(self) -> Outcome:
        """Returns the outcome of the fast tests without a mutation; runs them only once.

        Raises:
          SystemExit: A test fails.
        """
        with self._lock:
            if ORIGINAL in (known := self.outcomes()):
                return known[ORIGINAL]
            outcome = self._run(None, select_tests(None), FAST, None)
            if outcome.killed_by:
                sys.exit(f"{outcome.output}\nNot mutated, and yet {outcome.killed_by} fails.")
            save_outcome(self._path, self._sources, ORIGINAL, outcome)
            print(f"not mutated, {FAST}: all pass, {outcome.seconds:.0f} s", flush=True)
            return outcome

    def _check_passes(self, test: str) -> None:
        """Checks that a slow test passes without a mutation; runs it only once."""
        with self._lock:
            if test not in self.outcomes():
                outcome = self._run(None, [test], SLOW, None)
                if outcome.killed_by:
                    sys.exit(f"{outcome.output}\nNot mutated, and yet {test} fails.")
                save_outcome(self._path, self._sources, test, outcome)

    def _run(
        self, mutant: Mutant | None, tests: Sequence[str], marked: str, timeout: float | None
    ) -> Outcome:
        return run_tests(self._snapshot, mutant, tests, marked, cache=self._cache, timeout=timeout)


def main() -> None:
    """Runs the mutants and prints a line for each."""
    arguments = parse_arguments()
    command = " ".join(["python -m benchmarks.mutations", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as folder:
        snapshot, results = Path(folder) / "snapshot", arguments.results or Path(folder) / "results"
        copy_tree(snapshot)
        sites = find_sites(snapshot)
        mutants = choose((m for site in sites for m in mutate(site)), arguments.only)
        if arguments.list:
            for mutant in mutants:
                print(f"{mutant.site.path}:{mutant.site.line} {mutant.name} {mutant.replacement}")
            return
        runner = Runner(snapshot, results, arguments.timeout)
        runner.control()
        index, number = arguments.shard

        def summarise() -> str:
            outcomes = runner.outcomes()
            chosen = {m.name: outcomes[m.name] for m in mutants if m.name in outcomes}
            return report(sites, chosen, len(mutants), command)

        for marked in (FAST, SLOW):
            known = runner.outcomes()
            mine = [
                mutant
                for mutant in mutants[index - 1 :: number]
                if mutant.name not in known or is_left(known[mutant.name], marked)
            ]
            with ThreadPoolExecutor(arguments.jobs) as executor:
                outcomes = executor.map(runner.run, mine, [marked] * len(mine))
                for mutant, outcome in zip(mine, outcomes, strict=True):
                    verdict = f"survives the tests that are {marked}"
                    if outcome.killed_by:
                        verdict = f"killed by {outcome.killed_by} ({outcome.error})"
                    where = f"{mutant.site.path}:{mutant.site.line}"
                    print(f"{where} {mutant.name} {verdict} {outcome.seconds:.1f} s", flush=True)
                    if arguments.output:  # An interrupted run keeps its results.
                        write_section(arguments.output, summarise())
        if arguments.output:
            write_section(arguments.output, summarise())
        print(summarise())


if __name__ == "__main__":
    main()
