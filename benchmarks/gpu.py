"""One accelerator: what a language model reaches of its peak, and what an axis of size 1 costs.

python -m benchmarks.gpu [--layers 24 --hidden_size 2048 --mlp_size 5504 --heads 16 ...]
    [--batch_size 0] [--no-torch] [--seconds 2] [--rounds 15] [--output FILE.md] [--json FILE.json]
python -m benchmarks.gpu --tiny     # on a CPU, one device: all but the speed of an accelerator

The same step by mode `manual` (FSDP, kept or gathered again, and DP, over an axis of size 1), by
mode `auto`, and by a plain `jax.jit` written with optax alone, which knows nothing of this package.
An axis of size 1 must cost nothing: FLOPs, bytes accessed and temporaries of the compiled step and
its time, interleaved, may be 2 % above those of plain jit; the command ends with exit code 1 if
one of the three that are counted is not, and says which. With a batch size of 0 the batch is the
largest power of two for which all steps fit into the memory. MFU is held against the vendor's peak
(`manualpar.watching.throughput`); of a device that is not known there, such as a CPU, none is
given. If PyTorch is installed, a model of the same shape takes its turns, compiled by
`torch.compile`, with parameters of its own; on an accelerator it shares the memory with jax, so set
XLA_PYTHON_CLIENT_PREALLOCATE=false and let `--memory_share` leave it room.

On a CPU nothing is said of the speed of an accelerator, its kernels, its memory, or whether its
compiler removes collectives of one device.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.compiled_steps import CompiledStep, Counts, count, mean_loss, of_program
from benchmarks.plain_step import plain_step
from benchmarks.process_group import ProcessGroup
from benchmarks.results import Conditions, note_conditions, write_results
from benchmarks.turns import Estimate, estimate, ratios, table, take_turns
from benchmarks.workloads import ADAMW, Workload
from manualpar import Batch, data_parallel, fsdp, make_mesh
from manualpar.core.program import Program
from manualpar.models import Transformer
from manualpar.models.transformer import flops_per_token
from manualpar.training.cross_entropy import language_model_loss
from manualpar.watching.throughput import peak_flops

PLAIN, TORCH = "plain jit", "PyTorch"
INSTALL = "pip install 'manualpar[torch,train]'"
# By name: the builder, and its options.
PROGRAMS: Mapping[str, tuple[Callable[..., Program], Mapping[str, Any]]] = {
    "manual fsdp": (fsdp, {"min_weight_size": 0}),
    "manual fsdp, kept": (fsdp, {"min_weight_size": 0, "reshard_after_forward": False}),
    "manual dp": (data_parallel, {}),
    "auto dp": (data_parallel, {"mode": "auto"}),
}
ALLOWED = 1.02
COUNTED = ("flops", "accessed", "temporaries")
LARGEST_BATCH = 2**12
TINY = {
    "layers": 2,
    "hidden_size": 32,
    "mlp_size": 64,
    "heads": 2,
    "vocab_size": 260,
    "sequence_length": 16,
    "batch_size": 4,
    "dtype": "float32",
    "attention": "",
    "seconds": 0.05,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found out about one step.

    Attributes:
      name: Whose it is.
      seconds: Of a step, by round.
      ratio: Of a step's time to that of plain jit in the same round.
      counts: What was counted of it; `None` of PyTorch's.
      memory: The most that PyTorch held, in bytes; `None` of the others.
      mfu: The share of the peak that the model's own operations are; `None` where no peak is known.
    """

    name: str
    seconds: tuple[float, ...]
    ratio: Estimate
    counts: Counts | None
    memory: int | None
    mfu: float | None


def make_model_workload(options: argparse.Namespace, batch_size: int) -> Workload:
    """The language model that the flags describe."""
    size = (batch_size, options.sequence_length + 1)
    tokens = np.random.default_rng(0).integers(0, options.vocab_size, size).astype(np.int32)
    model = Transformer(
        vocab_size=options.vocab_size,
        num_layers=options.layers,
        hidden_size=options.hidden_size,
        mlp_size=options.mlp_size,
        num_heads=options.heads,
        num_kv_heads=options.heads,
        dtype=options.dtype,
        remat=options.remat,
        attention=options.attention,
        scan_layers=not options.unrolled,
    )
    return Workload(
        name="lm",
        words=f"transformer, {options.layers} layers of {options.hidden_size}, "
        f"{'unrolled' if options.unrolled else 'scanned'}, batch {batch_size} x "
        f"{options.sequence_length} tokens, {options.dtype}, remat {options.remat}",
        model=model,
        loss_fn=language_model_loss,
        tx=optax.adamw(
            ADAMW["lr"], b1=ADAMW["b1"], b2=ADAMW["b2"], weight_decay=ADAMW["weight_decay"]
        ),
        batch=Batch(inputs=tokens[:, :-1], labels=tokens[:, 1:]),
        num_minibatches=1,
        min_weight_size=0,
    )


def build(workload: Workload, name: str) -> Program:
    """One of `PROGRAMS` on one device."""
    make, options = PROGRAMS[name]
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    batch = workload.abstract_batch
    return make(workload.model, workload.tx, workload.loss_fn, mesh=mesh, batch=batch, **options)


def largest_batch(options: argparse.Namespace) -> int:
    """The largest power of two for which all steps fit, as their compiler counts memory.

    Raises:
      ValueError: The device does not say how much memory it has; or not one sequence fits.
    """
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ValueError(
            "--batch_size is 0, for as many as fit, and the device does not say how much memory "
            "it has; give a number."
        )
    room, size = options.memory_share * stats["bytes_limit"], 1
    while size <= LARGEST_BATCH and _need(options, size) <= room:
        size *= 2
    if size == 1:
        raise ValueError(f"not one sequence fits into {room / 2**30:.1f} GiB; make the model less.")
    return size // 2


def _need(options: argparse.Namespace, batch_size: int) -> float:
    """The bytes that all states and the neediest step take."""
    workload = make_model_workload(options, batch_size)
    needs, states = [], 0
    for name in PROGRAMS:
        program = build(workload, name)
        lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
        state = program.abstract_state
        parts = (state.params, state.opt_state)
        counts = count(lowered, lowered.compile(), parts, 0.0)
        needs.append(counts.temporaries)
        states += counts.state
    return states * (len(PROGRAMS) + 1) / len(PROGRAMS) + max(needs)  # Plain jit has a state too.


def measure(
    options: argparse.Namespace, workload: Workload, *, report: Callable[[str], None]
) -> list[Row]:
    """Compiles and times all steps; PyTorch's if it is asked for."""
    jitted, make_state = plain_step(workload)
    batch = jax.device_put(workload.batch, jax.devices()[0])
    state = make_state()
    steps = {PLAIN: CompiledStep(jitted, state, batch, parts=state, read_loss=mean_loss)}
    for name in PROGRAMS:
        steps[name] = of_program(build(workload, name), workload.batch)
        report(f"{name}, compiled in {steps[name].counts.compile_seconds:.1f} s")
    losses = {name: step.losses(3) for name, step in steps.items()}
    for name, values in losses.items():
        if not np.allclose(values, losses[PLAIN], rtol=1e-2):  # In bfloat16; another would be far.
            raise RuntimeError(
                f"the losses of {name} are {values}, expected those of plain jit, {losses[PLAIN]}."
            )
    blocks = {name: step.block for name, step in steps.items()}
    with contextlib.ExitStack() as stack:
        if options.torch:
            group = stack.enter_context(start_torch(options, workload))
            report(f"{TORCH}: losses {group.ask('losses', steps=3)[0]['losses']}")
            blocks[TORCH] = group.block
        num_steps = max(1, math.ceil(options.seconds / (steps[PLAIN].block(2) / 2)))
        taken = take_turns(blocks, steps=num_steps, rounds=options.rounds)
        memory = group.ask("memory")[0]["peak"] if options.torch else None
    assert isinstance(workload.model, Transformer)
    flops = flops_per_token(workload.model, options.sequence_length) * workload.batch.inputs.size
    peak = peak_flops(jax.devices()[0].device_kind, options.dtype)
    return [
        Row(
            name=name,
            seconds=tuple(x / num_steps for x in seconds),
            ratio=estimate(ratios(seconds, taken[PLAIN])),
            counts=steps[name].counts if name in steps else None,
            memory=memory if name == TORCH else None,
            mfu=flops * num_steps / statistics.median(seconds) / peak if peak else None,
        )
        for name, seconds in taken.items()
    ]


def start_torch(options: argparse.Namespace, workload: Workload) -> ProcessGroup:
    """Starts a process with a model of the same shape in PyTorch."""
    model = workload.model
    assert isinstance(model, Transformer)
    fields = ("vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "mlp_size")
    settings = {
        "shape": {name: getattr(model, name) for name in (*fields, "rope_base")},
        "batch_size": len(workload.batch.inputs),
        "sequence_length": options.sequence_length,
        "dtype": options.dtype,
        "optimizer": ADAMW,
        "backend": options.torch_backend,
    }
    return ProcessGroup("benchmarks.torch_compile_worker", settings, num_processes=1)


def excesses(rows: Sequence[Row]) -> list[str]:
    """What of the manual steps is counted more than 2 % above plain jit, a sentence each."""
    plain = next(row.counts for row in rows if row.name == PLAIN)
    assert plain is not None
    sentences = []
    for row in rows:
        if row.counts is None or not row.name.startswith("manual"):
            continue
        for name in COUNTED:
            ratio = getattr(row.counts, name) / max(getattr(plain, name), 1)
            if ratio > ALLOWED:
                sentences.append(f"{row.name}: {name} are {ratio:.3f} of plain jit's.")
        if row.counts.collectives:
            number = sum(row.counts.collectives.values())
            sentences.append(f"{row.name}: {number} collectives of one device are compiled.")
    return sentences


def report_rows(workload: Workload, rows: Sequence[Row]) -> list[str]:
    """The table, and what is above what is allowed."""
    header = [
        "",
        "ms a step",
        "of plain jit's time",
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
        counts = row.counts
        numbers = ["", "", "", "", "", ""]
        if counts:
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
        cells.append(
            [
                row.name,
                f"{1e3 * statistics.median(row.seconds):.2f}",
                "1" if row.name == PLAIN else row.ratio.show("{:.3f}".format),
                "" if row.mfu is None else f"{row.mfu:.1%}",
                *numbers,
            ]
        )
    above = excesses(rows)
    words = "Above the 2 % that an axis of size 1 may cost:" if above else "Nothing is above 2 %."
    lines = [f"{workload.words}.", "", *table(header, cells), "", words]
    return [*lines, *([""] * bool(above)), *(f"- {sentence}" for sentence in above), ""]


def introduction(conditions: Conditions, options: argparse.Namespace) -> list[str]:
    """What was run on what, and what was not measured."""
    device = jax.devices()[0]
    missing = " Not measured, for there is no accelerator: the speed of one, MFU, its kernels and "
    missing += "its memory, and what its compiler makes of a collective of one device."
    return [
        "## One accelerator",
        "",
        conditions.sentence(),
        "",
        f"One device: {device.device_kind}.{missing if device.platform == 'cpu' else ''} Of plain "
        "jit's time: the median over rounds, in brackets its interval (95 %). FLOP, bytes accessed "
        "and temporaries are those of the compiled step, in which the body of a loop counts once. "
        f"PyTorch's model is compiled by torch.compile with the backend {options.torch_backend}.",
        "",
    ]


def _mib(size: float) -> str:
    """Bytes in MiB."""
    return f"{size / 2**20:,.1f}"


def _parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("layers", 24),
        ("hidden_size", 2048),
        ("mlp_size", 5504),
        ("heads", 16),
        ("vocab_size", 32_768),
        ("sequence_length", 2048),
        ("batch_size", 0),
        ("rounds", 15),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--remat", default="none", choices=("none", "dots", "full"))
    parser.add_argument("--attention", default="cudnn", choices=("", "xla", "cudnn"))
    parser.add_argument("--unrolled", action="store_true", help="layers that are not scanned")
    parser.add_argument("--memory_share", type=float, default=0.45, help="of the device's, for jax")
    parser.add_argument("--seconds", type=float, default=2.0, help="that a block takes")
    parser.add_argument("--torch", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--torch_backend", default="inductor", help="of torch.compile")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in float32")
    parser.add_argument("--output", type=Path, help="a Markdown file, for a section of its own")
    parser.add_argument("--json", type=Path, help="a JSON file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the report and writes it where it is wanted; returns the exit code."""
    parser = _parser()
    if parser.parse_args(argv).tiny:
        parser.set_defaults(**TINY)
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}, expected at least 1.")
    if options.torch and importlib.util.find_spec("torch") is None:
        parser.error(f"PyTorch is not installed; {INSTALL}, or --no-torch to go without")
    conditions = note_conditions("benchmarks.gpu", argv)
    lines = introduction(conditions, options)
    print("\n".join(lines), flush=True)
    try:
        batch_size = options.batch_size or largest_batch(options)
    except ValueError as error:
        parser.error(str(error))
    workload = make_model_workload(options, batch_size)
    rows = measure(options, workload, report=lambda text: print(f"  {text}", flush=True))
    part = report_rows(workload, rows)
    print("\n".join(part), flush=True)
    lines += part
    data = {
        "device": jax.devices()[0].device_kind,
        "batch_size": batch_size,
        "rows": [{**dataclasses.asdict(row), "ratio": row.ratio._asdict()} for row in rows],
        "excesses": excesses(rows),
    }
    write_results(
        conditions,
        lines=lines,
        data=data,
        output=options.output,
        json_output=options.json,
    )
    return 1 if excesses(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
