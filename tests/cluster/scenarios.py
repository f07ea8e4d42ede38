"""Runs of two hosts with the faults of real clusters; `tests/cluster/run` calls this module.

A scenario is a function that starts a small run, causes a fault, and returns when the fault was
named, by which sentence, and the exit codes. It raises an AssertionError if a code is wrong or if
the sentence does not come. This module also checks how long the sentence took, and that no process
printed a traceback or lines of a C++ library.
"""

import re
import sys
import tempfile
from pathlib import Path

from tests.cluster.bench import Bench
from tests.cluster.hosts import Slurm, make_hosts
from tests.cluster.under_slurm import UNDER_SLURM
from tests.cluster.without_slurm import (
    ONE_MACHINE,
    TWO_HOSTS,
    a_firewall_during_the_run,
    launched_and_process_0_killed,
    two_hosts_by_the_lines_of_the_page,
)
from tests.compiling import ENVIRONMENT

# Most faults must be named in this time.
BOUND = 15.0
RAW = re.compile(
    r"Traceback|^(\[\d\] |\d: )?[EFWI]\d{4} |external/|\*\*\* (?!STEP|JOB)|@ +0x|"
    r"terminate called|Gloo.*(fail|clos|reset|error|time)",
    re.MULTILINE,
)
# The limit of a hang is 10 s and the time of the longest phase so far. The page has two commands.
BOUNDS = {a_firewall_during_the_run: 30.0, two_hosts_by_the_lines_of_the_page: 120.0}
# XLA aborts a process that finds JAX's coordination service gone, and says so in lines of its own.
SAY_MORE = (launched_and_process_0_killed,)


def try_scenario(scenario, bench):
    """Runs a scenario, prints its row of the table, and returns whether it passed."""
    title = scenario.__name__.replace("_", " ")
    try:
        if bench.slurm:
            bench.slurm.make_idle()
        seen = scenario(bench)
        for output in bench.outputs:
            raw = RAW.search(output.text)
            assert raw is None or scenario in SAY_MORE, f"{output.path.name} has {raw[0]!r}"
        bound = BOUNDS.get(scenario, BOUND)
        assert seen.seconds < bound, f"after {seen.seconds:.1f} s, not {bound:g}: {seen.sentence}"
    except Exception as error:
        print(f"| {title} | failed | | {type(error).__name__}: {error} |", flush=True)
        for output in bench.outputs:
            print(f"--- {output.path.name}\n{output.text[-2500:]}", flush=True)
        return False
    sentence = seen.sentence.replace(str(bench.folder), "")
    print(f"| {title} | {seen.seconds:.1f} s | {seen.codes} | `{sentence}` |", flush=True)
    return True


def main(names):
    chosen = [
        scenario
        for scenario in (*UNDER_SLURM, *TWO_HOSTS, *ONE_MACHINE)
        if not names or any(name in scenario.__name__ for name in names)
    ]
    folder = Path(tempfile.mkdtemp())
    hosts = make_hosts(folder)
    environment = {
        **ENVIRONMENT,
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONUNBUFFERED": "1",
    }
    slurm = Slurm(folder / "slurm", hosts) if set(chosen) & set(UNDER_SLURM) else None
    passed = 0
    print("| scenario | named after | code | sentence |\n|---|---|---|---|", flush=True)
    for scenario in chosen:
        daemons = slurm if scenario in UNDER_SLURM else None
        bench = Bench(folder / scenario.__name__, hosts, environment, daemons)
        try:
            passed += try_scenario(scenario, bench)
        finally:
            bench.clear()
    print(f"{passed} passed, {len(chosen) - passed} failed", flush=True)
    return 0 if passed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
