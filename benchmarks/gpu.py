"""Measures a language model's share of an accelerator's peak, and the cost of an axis of size 1.

python -m benchmarks.gpu [--devices 1] [--layers 24 --hidden_size 2048 --mlp_size 5504 ...]
    [--batch_size 0] [--no-torch] [--no-suite] [--seconds 2] [--rounds 7]
    [--output FILE.md] [--json FILE.json]
python -m benchmarks.gpu --tiny     # on one CPU device; tests all but an accelerator's speed

The command makes one table. All rows train the same model on the same tokens from the same
parameters with AdamW:

- On one device: a plain `jax.jit` of the same model and loss without a mesh; mode `manual` over an
  axis of size 1 (FSDP with gathered parameters kept or gathered again, and DP); and mode `auto`. An
  axis of size 1 must cost nothing: FLOPs, accessed bytes and temporaries of the compiled step may
  be at most 2% above plain jit, and no collective may be left. Otherwise the command names the
  excess and ends with exit code 1. In mode `manual`, the types of `check_vma` need an all-reduce
  even if the axis has one device. XLA's GPU compiler removes this all-reduce; XLA:CPU keeps it, and
  copies its operand. So on a CPU all-reduces are allowed, and DP, which reduces every gradient, is
  not compared with plain jit.
- FSDP with each kind of attention, and with stored logits in place of the fused head and loss. If a
  step cannot run or does not fit, its row contains the reason.
- PyTorch's FSDP2 with PyTorch's flash kernel, compiled as in torchtitan, in one process for each
  device. PyTorch recomputes nothing, so this row needs `--remat none`. `--no-torch` leaves it out.

If a row takes longer than `--row_seconds` or its process crashes, the row reports it, and the other
rows run in a new process (`benchmarks.gpu_rows`). A row also reports losses that differ from the
losses of the first row. In all these cases the exit code is 1. The JSON file is written after each
row.

With several `--devices`, FSDP runs over all of them, and there is no plain jit. Only one row uses
memory at a time, and the first row is measured again at the end. With `--batch_size 0` each device
gets the largest number of sequences, a power of two, for which FSDP's step fits. MFU is relative to
the vendor's peak (`manualpar.training.monitoring.throughput`); an unknown device, such as a CPU,
has no MFU.

After the measurements, the fast tests of this package run on the accelerator, with matrix products
in full float32. Tests that need eight devices are skipped. `--suite` chooses the test files. The
tests have not been run on a GPU yet, so a failure may only mean that a tolerance is too small.

A run on a CPU does not show the speed, kernels or memory of an accelerator, or whether its compiler
removes collectives of one device. Measured on 2026-11-22 with jax 0.10.2 and `--tiny` on a CPU:
FSDP accesses 6.0 MiB and has 0.7 MiB of temporaries, the same as plain jit; DP accesses 1.084 times
as many bytes as plain jit, and has 1.039 times as many bytes of temporaries.
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
# The rows of mode `manual` with the attention and the loss of plain jit. In these rows an axis of
# size 1 must cost nothing.
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
    """Returns a sentence for each count of a manual step that exceeds plain jit by over 2%."""
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
    """Returns the table and the excesses; `tokens` is the number of tokens per step and device."""
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
    """Runs tests on the accelerator; returns pytest's last lines."""
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
    """Returns the name that `JAX_PLATFORMS` has for a backend of `jax.default_backend`."""
    return "cuda" if backend == "gpu" else backend


def introduction(conditions: Conditions, options: argparse.Namespace) -> list[str]:
    """Describes the machine, the command, and what was not measured."""
    device = jax.devices()[0]
    missing = " Not measured, because there is no accelerator: the speed of one, MFU, its kernels "
    missing += "and its memory, and what its compiler makes of a collective of one device."
    return [
        "## Accelerators",
        "",
        conditions.sentence(),
        "",
        f"{options.devices} x {device.device_kind}.{missing if device.platform == 'cpu' else ''} "
        "Times relative to the first row are medians over rounds, with 95% intervals in brackets. "
        "FLOP, bytes accessed and temporaries are those of the compiled step, in which the body of "
        "a loop counts once. PyTorch compiles with the backend "
        f"{options.torch_backend}.",
        "",
    ]


def _mib(size: float) -> str:
    """Formats bytes in MiB."""
    return f"{size / 2**20:,.1f}"


def _parser() -> argparse.ArgumentParser:
    """Makes the parser of the flags."""
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
    parser.add_argument("--attention", default="", help="kind of attention of most rows")
    parser.add_argument("--unrolled", action="store_true", help="do not scan the layers")
    parser.add_argument("--memory_share", type=float, default=0.85, help="for --batch_size 0")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a timed block")
    parser.add_argument("--row_seconds", type=float, default=1800.0, help="time limit of a row")
    parser.add_argument("--torch", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--torch_backend", default="inductor", help="for torch.compile")
    parser.add_argument("--suite", nargs="*", default=["tests"], help="test files to run")
    parser.add_argument("--no-suite", dest="suite", action="store_const", const=[])
    parser.add_argument("--tiny", action="store_true", help="a tiny float32 model, for CPUs too")
    parser.add_argument("--output", type=Path, help="Markdown file that gets a section")
    parser.add_argument("--json", type=Path, help="a JSON file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints and writes the report; returns the exit code."""
    parser = _parser()
    if parser.parse_args(argv).tiny:
        parser.set_defaults(**TINY)
    options = parser.parse_args(argv)
    if options.torch and importlib.util.find_spec("torch") is None:
        parser.error(f"PyTorch is not installed. Run {INSTALL}, or give --no-torch.")
    if options.torch and options.remat != "none":
        parser.error(f"--remat is {options.remat}, expected none for PyTorch's row, or --no-torch.")
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
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # JAX's default is 75%.
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
