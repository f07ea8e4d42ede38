"""Measures an owner's GPUs in one command: training steps, collectives, memory, and their plans.

python -m benchmarks.gpu [--devices 8] [--rows 'fsdp|tp'] [--limit 1200] [--processes gpu]
    [--layers 24 --hidden_size 2048 --mlp_size 5504 ...] [--batch_size 0] [--chip h100]
    [--output gpu.md] [--json gpu.json] [--no-torch] [--no-suite]
srun --ntasks-per-node=1 python -m benchmarks.gpu       # on several machines
python -m benchmarks.gpu --tiny         # on simulated devices; tests all but a GPU's speed

By default the command uses all devices. It writes a page in Markdown and a JSON file, again after
each row. Each row runs in a process of its own. If the process crashes or takes longer than
`--limit` seconds, the row has the reason, and the command goes on. The rows are:

- *Collectives*: the bandwidth of all-gather, reduce-scatter, all-reduce, all-to-all and ppermute
  over all devices, by size, in bfloat16.
- *Training steps* of one language model, with the same parameters, tokens and AdamW: FSDP, HSDP,
  ZeRO-1, tensor, expert and context parallelism in the modes manual, auto and explicit; tensor
  parallelism with split sequences, a pipeline, and FSDP with quantized collectives (codes) in mode
  manual. Each is compiled with the compiler's default options, and with the options of this package
  for the chip (`parallel.overlap="auto"`). Then FSDP with kept parameters, data parallelism, stored
  logits, and each kind of attention.
- *PyTorch*: FSDP2 with PyTorch's flash kernel, compiled as in torchtitan, in one process for each
  device of one machine. PyTorch saves what its compiler chooses, so this row needs `--remat auto`
  or `none`. Without PyTorch the row says so.
- The fast *tests* of this package on the accelerator, with matrix products in full float32; tests
  that need more devices are skipped. `--suite` chooses the test files.

Beside the measured step and the measured peak of memory stand the compiled step's memory, and the
plan by the roofline of `manualpar.planner` for the chip that was found. A device's measured peak
includes the initialization of the state. The plan is of mode manual with the compiler's default
options; in the other modes XLA chooses the collectives, and there is no plan.

Processes: by default one process has all devices of the machine. With `--processes gpu`, each GPU
has its own process (`manualpar.launch`). Under `srun`, the command runs in each task, the tasks of
a row find one another as in every run of this package, and the first task writes the files.

On one device, plain `jax.jit` without a mesh comes first, and an axis of size 1 must cost nothing:
FLOPs, accessed bytes and temporaries of mode manual may be at most 2% above plain jit, and no
collective may be left. In mode manual, the types of `check_vma` need an all-reduce even if the axis
has one device. XLA's GPU compiler removes this all-reduce; XLA:CPU keeps it, and copies its
operand. So on a CPU all-reduces are allowed, and DP is not compared with plain jit.

The exit code is 1 if a cost is above these 2%, if the first step has no times, or if a row's losses
differ from those of the first row with the same model. MFU is relative to the vendor's peak.
With `--batch_size 0` each device gets the largest number of sequences, a power of two, for which
FSDP fits into `--memory_share` of the memory; other rows may need more.
"""

import argparse
import dataclasses
import importlib.util
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu_bandwidth import COLLECTIVES, measure_bandwidth
from benchmarks.gpu_layouts import CONTENDERS
from benchmarks.gpu_report import excesses, page
from benchmarks.gpu_rows import Row, run_row
from benchmarks.gpu_steps import (
    AGAIN,
    DIFFERENT,
    PLAIN,
    TORCH,
    compare_rows,
    largest_batch,
    measure_step,
    measure_torch,
    reason,
)
from benchmarks.results import note_conditions, write_results
from manualpar.models.transformer import REMATS
from manualpar.system.cluster import initialize
from manualpar.system.cluster.agreement import from_first

INSTALL = "pip install 'manualpar[torch,train]'"
ROOT = Path(__file__).parent.parent
MACHINE, BATCH, SUITE = "the machine", "the largest batch", "the tests"
MIB = 2**20
TINY = {
    "layers": 4,
    "hidden_size": 32,
    "mlp_size": 64,
    "heads": 4,
    "vocab_size": 256,
    "sequence_length": 16,
    "batch_size": 64,
    "dtype": "float32",
    "seconds": 0.05,
    "rounds": 2,
    "sizes": [2**10, 2**16],
    "torch_backend": "aot_eager",
    "suite": [],
}


def row_names(options: argparse.Namespace, devices: int) -> list[str]:
    """Returns the names of the rows to measure, in order."""
    steps = [name for name, one in CONTENDERS.items() if devices > 1 or not one.axis]
    steps = [*([PLAIN] if devices == 1 else []), *steps]
    names = [*(COLLECTIVES if devices > 1 else ()), *steps, *([TORCH] if options.torch else [])]
    return [name for name in names if re.search(options.rows, name)]


def measure_row(options: argparse.Namespace, name: str) -> Row:
    """Measures a row in this process; errors of the step become the row's problem."""
    try:
        if name == MACHINE:
            return Row(name, facts=_describe_machine())
        if name == BATCH:
            return Row(name, facts={"batch_size": largest_batch(options)})
        if name == TORCH:
            with tempfile.TemporaryDirectory() as folder:
                return measure_torch(options, Path(folder) / "given.npz")
        if name in COLLECTIVES:
            return measure_bandwidth(options, name)
        return measure_step(options, name)
    except (ValueError, RuntimeError, TypeError) as error:  # It cannot run, or does not fit.
        return Row(name, problem=reason(error))


def _describe_machine() -> dict[str, Any]:
    first = jax.devices()[0]
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "kind": first.device_kind,
        "platform": first.platform,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "process": jax.process_index(),
        "memory": stats.get("bytes_limit", 0),
    }


def _run_in_this_process(options: argparse.Namespace) -> int:
    """Measures `options.row` and writes it to `options.result`; returns the exit code."""
    own = os.environ.get("MANUALPAR_PROCESS_ID")
    if options.processes == "gpu" and own and os.environ.get("JAX_PLATFORMS") != "cpu":
        os.environ["JAX_LOCAL_DEVICE_IDS"] = own
    with initialize(start_timeout_seconds=options.limit, facts={"the row": options.row}):
        row = measure_row(options, options.row)
        if from_first(row.name) == row.name:
            row.write(options.result)
    return 0


class _Runner:
    """Starts the processes of rows.

    Attributes:
      devices: The number of devices of the machine; 0 while it is unknown.
    """

    def __init__(self, options: argparse.Namespace, given: Sequence[str]) -> None:
        self._options, self._given = options, list(given)
        # The processes of PyTorch need memory too.
        # XLA tries tiles for half a minute a row. The rows have the same products, so the processes
        # of the later rows read what the first has found.
        self._environment = {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / "manualpar-gpu-tiles"),
            "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "xla_gpu_per_fusion_autotune_cache_dir",
            **os.environ,
        }
        if options.tiny:
            self._environment.setdefault("JAX_NUM_CPU_DEVICES", str(options.devices or 8))
        self.machine: Mapping[str, Any] = {}
        self.batch_size = options.batch_size

    def run(self, name: str, measured: str = "") -> Row:
        """Runs the row that is called `measured` by `measure_row`; returns it as `name`."""
        measured = measured or name
        command = [sys.executable, "-m", "benchmarks.gpu", *self._given, "--row", measured]
        command += ["--batch_size", str(self.batch_size)]
        environment = self._environment
        if self.machine:
            command += ["--devices", str(self.devices)]
            if self._options.processes == "gpu" and measured != TORCH:
                launch = [sys.executable, "-m", "manualpar.launch", f"--processes={self.devices}"]
                if self.machine["platform"] == "cpu":
                    launch.append("--devices-per-process=1")
                command = [*launch, "--grace=5", "--", *command]
        limit = self._options.limit
        row = run_row(measured, command, limit=limit, environment=environment)
        return dataclasses.replace(row, name=name)

    @property
    def devices(self) -> int:
        """The number of devices on which the rows run."""
        return int(self._options.devices or self.machine["devices"])


def run_suite(files: Sequence[str], platform: str, *, limit: float) -> str:
    """Runs tests on the accelerator; returns pytest's last lines."""
    environment = {
        "JAX_PLATFORMS": "cpu" if platform == "cpu" else f"{_backend(platform)},cpu",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", *files]
    # Where it is installed, its warning beside xdist would be an error, as all warnings are.
    command += ["-p", "no:benchmark"]
    try:
        ran = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return f"Tests: ended, because they took longer than {limit:g} s"
    lines = [line for line in ran.stdout.splitlines() if line.strip()]
    failed = [line for line in lines if re.match(r"(FAILED|ERROR) ", line)]
    return "; ".join([f"Tests: {lines[-1].strip('= ') if lines else 'none ran'}", *failed[:20]])


def _backend(platform: str) -> str:
    """Returns the name that `JAX_PLATFORMS` has for a device's platform."""
    return "cuda" if platform == "gpu" else platform


def _parser() -> argparse.ArgumentParser:
    """Makes the parser of the flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (
        ("devices", 0),
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
    parser.add_argument("--rows", default="", help="a regular expression for the rows' names")
    parser.add_argument("--limit", type=float, default=1200.0, help="most seconds of a row")
    parser.add_argument("--processes", choices=("one", "gpu"), default="one")
    parser.add_argument("--chip", default="", help="the chip to plan for; by default that here")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--remat", default="none", choices=REMATS)
    parser.add_argument("--attention", default="", help="kind of attention of most rows")
    parser.add_argument("--unrolled", action="store_true", help="do not scan the layers")
    parser.add_argument("--memory_share", type=float, default=0.6, help="for --batch_size 0")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a timed block")
    sizes = [2**exponent for exponent in range(12, 31, 3)]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, help="of collectives")
    parser.add_argument("--torch", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--torch_backend", default="inductor", help="for torch.compile")
    parser.add_argument("--suite", nargs="*", default=["tests"], help="test files to run")
    parser.add_argument("--suite_seconds", type=float, default=7200.0)
    parser.add_argument("--no-suite", dest="suite", action="store_const", const=[])
    parser.add_argument("--tiny", action="store_true", help="a tiny float32 model, for CPUs too")
    parser.add_argument("--output", type=Path, default=Path("gpu.md"), help="the page")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="the JSON file")
    parser.add_argument("--row", default="", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the flags."""
    parser = _parser()
    if parser.parse_args(argv).tiny:
        parser.set_defaults(**TINY)
    options = parser.parse_args(argv)
    if options.torch and options.remat not in ("auto", "none"):
        parser.error(
            f"--remat is {options.remat}, expected auto or none for PyTorch's row, or --no-torch."
        )
    for name, least in (("rounds", 1), ("devices", 0), ("batch_size", 0)):
        if (value := getattr(options, name)) < least:
            parser.error(f"--{name} is {value}, expected {least} or more.")
    if not (0 < options.limit < math.inf):
        parser.error(f"--limit is {options.limit:g}, expected a positive number of seconds.")
    try:
        re.compile(options.rows)
    except re.error as error:
        parser.error(f"--rows is {options.rows!r}, expected a regular expression: {error}.")
    return options


def _check_machine(options: argparse.Namespace, row: Row) -> str:
    """Returns why the rows cannot run on the machine; "" if they can."""
    machine = row.facts
    if row.problem:
        return f"jax finds no devices here: {row.problem}. manualpar doctor says more."
    if machine["platform"] == "cpu" and not options.tiny:
        return (
            "jax sees no accelerator here, only CPUs. Run this where there is a GPU and "
            "jax[cuda13] is installed, or with --tiny to try the command on a CPU."
        )
    if options.devices > machine["devices"]:
        return f"--devices is {options.devices}, expected 1 to {machine['devices']}."
    if options.devices not in (0, machine["devices"]) and options.processes == "gpu":
        return f"--devices is {options.devices} with --processes=gpu, expected all devices."
    return ""


def _rows(options: argparse.Namespace, runner: _Runner) -> Iterator[Row]:
    """Measures row after row."""
    names = row_names(options, runner.devices)
    steps = [name for name in names if name in CONTENDERS or name == PLAIN]
    if steps and not runner.batch_size:
        row = runner.run(BATCH)
        if row.problem:
            yield row
            names = [name for name in names if name in COLLECTIVES]
            steps = []
        else:
            runner.batch_size = row.facts["batch_size"]
    for name in names:
        if name == TORCH and importlib.util.find_spec("torch") is None:
            yield Row(name, problem=f"not measured: PyTorch is not installed; {INSTALL}")
        elif name == TORCH and runner.machine["processes"] > 1:
            yield Row(name, problem="not measured: it is measured on one machine alone")
        else:
            yield runner.run(name)
        if steps and name == steps[-1]:
            yield runner.run(AGAIN, steps[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints and writes the report; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    options = _parse(given)
    if options.row:
        return _run_in_this_process(options)
    conditions = note_conditions("benchmarks.gpu", argv)
    runner = _Runner(options, given)
    found = runner.run(MACHINE)
    if problem := _check_machine(options, found):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    found = dataclasses.replace(found, facts={**found.facts, "remat": options.remat})
    runner.machine = found.facts
    is_first = found.facts["process"] == 0
    rows: list[Row] = []

    def write(suite: str = "") -> list[Row]:
        compared = compare_rows(rows)
        facts = {**found.facts, "used": runner.devices, "batch_size": runner.batch_size}
        options.batch_size = runner.batch_size
        lines = page(conditions, options, facts, compared, suite)
        if is_first:
            options.output.write_text("\n".join([*lines, ""]), encoding="utf-8")
            shown = [dataclasses.asdict(row) for row in compared]
            data = {**facts, "rows": shown, "excesses": excesses(compared, facts), "suite": suite}
            write_results(conditions, lines=lines, data=data, output=None, json_output=options.json)
        return compared

    for row in _rows(options, runner):
        rows.append(row)
        write()
        if is_first:
            print(f"  {row.name}: {row.problem or 'measured'}", flush=True)
    suite = ""
    if options.suite and is_first:
        platform = found.facts["platform"]
        suite = run_suite(options.suite, platform, limit=options.suite_seconds)
    compared = write(suite)
    if is_first:
        print(f"Written: {options.output}, {options.json}", flush=True)
    steps = [row for row in compared if row.name in CONTENDERS or row.name == PLAIN]
    is_wrong = bool(steps) and not steps[0].seconds
    is_wrong |= any(row.problem.startswith(DIFFERENT) for row in compared)
    return int(is_wrong or bool(excesses(compared, found.facts)))


if __name__ == "__main__":
    sys.exit(main())
