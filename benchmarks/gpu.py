"""Accelerators: what a language model reaches of their peak, and what an axis of size 1 costs.

python -m benchmarks.gpu [--devices 1] [--layers 24 --hidden_size 2048 --mlp_size 5504 ...]
    [--batch_size 0] [--no-torch] [--no-suite] [--seconds 2] [--rounds 7]
    [--output FILE.md] [--json FILE.json]
python -m benchmarks.gpu --tiny     # on a CPU, one device: all but the speed of an accelerator

One table, whose rows train the same model on the same tokens from the same parameters with AdamW:

- On one device a plain `jax.jit` of the same model and loss, which knows of no mesh, and mode
  `manual` (FSDP, kept or gathered again, and DP, over an axis of size 1) and mode `auto`. An axis
  of size 1 must cost nothing: FLOPs, bytes accessed and temporaries of the compiled step may be 2%
  above those of plain jit, and no collective is left. The command ends with exit code 1 if that
  does not hold, and says of what. An all-reduce of one device stays in the types of mode `manual`,
  and XLA's GPU compiler has a pass that removes it. XLA:CPU keeps it, and copies what it reduces:
  there no all-reduce is held against a step, nor DP, which reduces every gradient, against plain
  jit.
- FSDP with each attention that there is, and with logits that are held in place of head and loss in
  one. One that cannot run, or does not fit, says why.
- PyTorch's FSDP2, compiled as torchtitan does it, with its flash kernel, in a process for each
  device, if PyTorch is installed. Nothing is computed again there, so `--remat` is to be none.

A row that takes longer than `--row_seconds`, or whose process crashes, says so, and the others go
on in a new process (`benchmarks.gpu_rows`). A row whose losses differ from the first's says so too.
The exit code is 1 after any of these. The JSON file is written after each row.

`--devices` takes more than one; then FSDP is over all of them, and there is no plain jit. Rows are
measured one after another, so that one has the memory to itself, and the first again at the end.
With a batch size of 0 the batch is the largest power of two for which FSDP's step fits.
MFU is held against the vendor's peak (`manualpar.training.monitoring.throughput`); of a device that
is not known there, such as a CPU, none is given.

On an accelerator the fast tests run too, at the end, with products in full float32. Those that need
eight devices skip themselves. `--suite` says which files; nobody has run them on a GPU yet, so
a failure may be a tolerance.

On a CPU nothing is said of the speed of an accelerator, its kernels, its memory, or whether its
compiler removes collectives of one device. 2026-11-22, jax 0.10.2, `--tiny` on a CPU: FSDP accesses
6.0 MiB and has 0.7 MiB of temporaries, as plain jit has (1.000 of both); DP 1.084 and 1.039.
"""

import argparse
import dataclasses
import functools
import importlib.util
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu_rows import LOG_VARIABLE, Row, RowLog, watch
from benchmarks.gpu_steps import (
    CONTENDERS,
    DIFFERENT,
    PLAIN,
    largest_batch,
    make_model_workload,
    measure,
)
from benchmarks.results import Conditions, note_conditions, write_results
from benchmarks.turns import table

INSTALL = "pip install 'manualpar[torch,train]'"
ROOT = Path(__file__).parent.parent
ALLOWED = 1.02
SUITE_SECONDS = 7200.0
COUNTED = ("flops", "accessed", "temporaries")
# Those that an axis of size 1 is to cost nothing; others have another attention or loss.
HELD_AGAINST_PLAIN = ("manual fsdp", "manual fsdp, kept", "manual dp")
HELD_ON_CPU = HELD_AGAINST_PLAIN[:2]
TINY = {
    "layers": 2,
    "hidden_size": 32,
    "mlp_size": 64,
    "heads": 2,
    "vocab_size": 260,
    "sequence_length": 16,
    "batch_size": 4,
    "dtype": "float32",
    "seconds": 0.05,
    "rounds": 2,
    "torch_backend": "aot_eager",
    "suite": [],
}


def excesses(rows: Sequence[Row]) -> list[str]:
    """What of the manual steps is counted more than 2% above plain jit, a sentence each."""
    plain = next((row.counts for row in rows if row.name == PLAIN), None)
    if plain is None:
        return []
    sentences = []
    is_cpu = jax.default_backend() == "cpu"
    for row in rows:
        if row.counts is None or row.name not in (HELD_ON_CPU if is_cpu else HELD_AGAINST_PLAIN):
            continue
        for name in COUNTED:
            ratio = getattr(row.counts, name) / max(getattr(plain, name), 1)
            if ratio > ALLOWED:
                sentences.append(f"{row.name}: {name} are {ratio:.3f} of plain jit's.")
        kept = ("all_reduce",) if is_cpu else ()
        if number := sum(n for kind, n in row.counts.collectives.items() if kind not in kept):
            sentences.append(f"{row.name}: {number} collectives of one device are compiled.")
    return sentences


def report_rows(words: str, rows: Sequence[Row], *, tokens: int) -> list[str]:
    """The table, and what is above what is allowed; `tokens` are those of a step and device."""
    header = [
        "",
        "ms a step",
        f"of {rows[0].name}'s time",
        "tokens/s a device",
        "MFU",
        "GFLOP",
        "accessed MiB",
        "tempor. MiB",
        "state MiB",
        "HLO instr.",
        "collectives",
    ]
    cells = []
    for row in rows:
        if row.problem:
            cells.append([f"{row.name}: {row.problem}", *[""] * (len(header) - 1)])
            continue
        numbers = [""] * 6
        if counts := row.counts:
            numbers = [
                f"{counts.flops / 1e9:,.3f}",
                _mib(counts.accessed),
                _mib(counts.temporaries),
                _mib(counts.state),
                f"{counts.instructions:,}",
                str(sum(counts.collectives.values())),
            ]
        elif row.memory is not None:
            numbers[2] = f"{_mib(row.memory)} held at most, all together"
        step = statistics.median(row.seconds)
        cells.append(
            [
                row.name,
                f"{1e3 * step:.2f}",
                "1" if row is rows[0] else row.ratio.show("{:.3f}".format) if row.ratio else "",
                f"{tokens / step:,.0f}",
                "" if row.mfu is None else f"{row.mfu:.1%}",
                *numbers,
            ]
        )
    above = excesses(rows)
    said = "Above the 2% that an axis of size 1 may cost:" if above else "Nothing is above 2%."
    if jax.default_backend() == "cpu":
        said = f"Held against plain jit here: {' and '.join(HELD_ON_CPU)}. {said}"
    if all(row.name != PLAIN for row in rows):
        said = "Plain jit is for one device."
    return [
        f"{words}.",
        "",
        *table(header, cells),
        "",
        said,
        *([""] * bool(above)),
        *(f"- {sentence}" for sentence in above),
        "",
    ]


def run_suite(files: Sequence[str]) -> str:
    """Runs tests on the accelerator; returns what pytest says at its end."""
    platforms = jax.default_backend()
    environment = {
        "JAX_PLATFORMS": "cpu" if platforms == "cpu" else f"{_platform(platforms)},cpu",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", *files]
    try:
        ran = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=SUITE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"Tests: ended, because they took longer than {SUITE_SECONDS:g} s"
    lines = [line for line in ran.stdout.splitlines() if line.strip()]
    failed = [line for line in lines if re.match(r"(FAILED|ERROR) ", line)]
    return "; ".join([f"Tests: {lines[-1].strip('= ') if lines else 'none ran'}", *failed[:20]])


def _platform(backend: str) -> str:
    """What `JAX_PLATFORMS` calls a backend."""
    return "cuda" if backend == "gpu" else backend


def introduction(conditions: Conditions, options: argparse.Namespace) -> list[str]:
    """What was run on what, and what was not measured."""
    device = jax.devices()[0]
    missing = " Not measured, because there is no accelerator: the speed of one, MFU, its kernels "
    missing += "and its memory, and what its compiler makes of a collective of one device."
    return [
        "## Accelerators",
        "",
        conditions.sentence(),
        "",
        f"{options.devices} x {device.device_kind}.{missing if device.platform == 'cpu' else ''} "
        "In parts of the first row's time: the median over rounds, in brackets its interval (95%). "
        "FLOP, bytes accessed and temporaries are those of the compiled step, in which the body of "
        "a loop counts once. PyTorch compiles with the backend "
        f"{options.torch_backend}.",
        "",
    ]


def _mib(size: float) -> str:
    """Bytes in MiB."""
    return f"{size / 2**20:,.1f}"


def _parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (
        ("devices", 1),
        ("layers", 24),
        ("hidden_size", 2048),
        ("mlp_size", 5504),
        ("heads", 16),
        ("kv_heads", 0),
        ("vocab_size", 32_768),
        ("sequence_length", 2048),
        ("batch_size", 0),
        ("rounds", 7),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--remat", default="none", choices=("none", "dots", "full"))
    parser.add_argument("--attention", default="", help="of rows that do not say another")
    parser.add_argument("--unrolled", action="store_true", help="layers that are not scanned")
    parser.add_argument("--memory_share", type=float, default=0.85, help="of the device's")
    parser.add_argument("--seconds", type=float, default=2.0, help="that a block takes")
    parser.add_argument("--row_seconds", type=float, default=1800.0, help="that a row may take")
    parser.add_argument("--torch", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--torch_backend", default="inductor", help="of torch.compile")
    parser.add_argument("--suite", nargs="*", default=["tests"], help="files of tests to run")
    parser.add_argument("--no-suite", dest="suite", action="store_const", const=[])
    parser.add_argument("--tiny", action="store_true", help="a tiny model in float32, on a CPU too")
    parser.add_argument("--output", type=Path, help="a Markdown file, for a section of its own")
    parser.add_argument("--json", type=Path, help="a JSON file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the report and writes it where it is wanted; returns the exit code."""
    parser = _parser()
    if parser.parse_args(argv).tiny:
        parser.set_defaults(**TINY)
    options = parser.parse_args(argv)
    if options.torch and importlib.util.find_spec("torch") is None:
        parser.error(f"PyTorch is not installed; {INSTALL}, or --no-torch to go without")
    if options.torch and options.remat != "none":
        parser.error(f"--remat is {options.remat}, expected none beside PyTorch, or --no-torch")
    if LOG_VARIABLE not in os.environ:
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            *(sys.argv[1:] if argv is None else argv),
        ]
        with tempfile.TemporaryDirectory() as folder:
            path, show = Path(folder) / "rows.jsonl", functools.partial(print, "  ", flush=True)
            return watch(command, path, seconds=options.row_seconds, report=show)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs some, too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # JAX takes 75% at most else.
    if jax.default_backend() == "cpu" and not options.tiny:
        parser.error(
            "jax sees no accelerator here, only CPUs. Run this where there is a GPU and "
            "jax[cuda13] is installed, or with --tiny to try the command on a CPU."
        )
    for name, most in (("rounds", None), ("devices", jax.device_count())):
        value = getattr(options, name)
        if value < 1 or (most and value > most):
            parser.error(f"--{name} is {value}, expected 1 to {most or 'any number'}.")
    conditions = note_conditions("benchmarks.gpu", argv)
    lines = introduction(conditions, options)
    print("\n".join(lines), flush=True)
    log = RowLog.read(Path(os.environ[LOG_VARIABLE]))
    try:
        options.batch_size = options.batch_size or log.batch_size or largest_batch(options)
    except ValueError as error:
        parser.error(str(error))
    log.note_batch_size(options.batch_size)
    facts: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "devices": options.devices,
        "batch_size": options.batch_size,
    }

    def write(rows: Sequence[Row], lines: Sequence[str] = (), **more: Any) -> None:
        shown = [
            {**dataclasses.asdict(row), "ratio": row.ratio and row.ratio._asdict()} for row in rows
        ]
        write_results(
            conditions,
            lines=lines,
            data={**facts, "rows": shown, "excesses": excesses(rows), **more},
            output=options.output if lines else None,
            json_output=options.json,
        )

    workload = make_model_workload(options, options.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "given.npz"
        show = functools.partial(print, "  ", flush=True)
        rows = measure(options, workload, files, show, log=log, keep=write)
    tokens = workload.batch.inputs.size // options.devices
    part = report_rows(workload.words, rows, tokens=tokens)
    suite = {}
    if options.suite:
        suite["suite"] = run_suite(options.suite)
        part += [suite["suite"], ""]
    print("\n".join(part), flush=True)
    write(rows, lines + part, **suite)
    is_wrong = not rows[0].seconds or any(row.problem.startswith(DIFFERENT) for row in rows)
    return 1 if excesses(rows) or is_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
