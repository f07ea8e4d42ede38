"""Measures training steps of one language model on accelerators, one contender after another.

A contender is a way to train: plain jit, a program of this package, or PyTorch. Every contender
trains the same model from the same parameters on the same tokens with AdamW. Only one contender
uses memory at a time, so that the model may be as large as one contender can train.
The first contender is measured again at the end, which shows how far the machine has drifted.
"""

import argparse
import dataclasses
import gc
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.compiled_steps import CompiledStep, count, mean_loss, of_program
from benchmarks.gpu_rows import Row, RowLog
from benchmarks.plain_step import plain_step
from benchmarks.process_group import ProcessGroup
from benchmarks.turns import Block, estimate, ratios
from benchmarks.workloads import ADAMW, Workload
from manualpar import Batch, data_parallel, fsdp, make_mesh
from manualpar.core.program.program import Program
from manualpar.layers.attention import ATTENTION_KINDS
from manualpar.models import Attention, Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.flat_fields import with_fields
from manualpar.models.transformer_fields import flops_per_token
from manualpar.training.monitoring.throughput import peak_flops

PLAIN, TORCH, AGAIN = "plain jit", "PyTorch FSDP2, compiled", "the first, again"
LOGITS = "manual fsdp, whole logits"
NARROW = {"gather_dtype": "bfloat16", "reduce_dtype": "float32"}
DIFFERENT = "not the same training: its losses are"
LARGEST_BATCH = 2**12
SHAPE = ("vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "mlp_size")


def loss_of_logits(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
    """Computes the language model's loss from stored logits, without the fused head and loss.

    The lambda hides that the model takes labels, so that the model returns logits.
    """
    return language_model_loss(params, lambda *args, **more: apply_fn(*args, **more), batch, rng)


@dataclasses.dataclass(frozen=True)
class Contender:
    """A program of this package.

    Attributes:
      builder: The builder of the program.
      options: The builder's options.
      attention: The kind of attention; `None` for the kind of `--attention`.
      loss_fn: The loss function.
    """

    builder: Callable[..., Program]
    options: Mapping[str, Any]
    attention: str | None = None
    loss_fn: Any = language_model_loss


FSDP: Mapping[str, Any] = {"min_weight_size": 0}
CONTENDERS: Mapping[str, Contender] = {
    "manual fsdp": Contender(fsdp, FSDP),
    "manual fsdp, kept": Contender(fsdp, {**FSDP, "reshard_after_forward": False}),
    "manual dp": Contender(data_parallel, {}),
    "auto dp": Contender(data_parallel, {"mode": "auto"}),
    LOGITS: Contender(fsdp, FSDP, loss_fn=loss_of_logits),
    **{
        f"manual fsdp, attention {kind}": Contender(fsdp, FSDP, attention=kind)
        for kind in ATTENTION_KINDS
        if kind
    },
}


def make_model_workload(options: argparse.Namespace, batch_size: int) -> Workload:
    """Makes the language model that the flags describe, its optimizer and a batch of tokens."""
    size = (batch_size, options.sequence_length + 1)
    tokens = np.random.default_rng(0).integers(0, options.vocab_size, size).astype(np.int32)
    model = Transformer(
        vocab_size=options.vocab_size,
        num_layers=options.layers,
        hidden_size=options.hidden_size,
        mlp_size=options.mlp_size,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads or options.heads,
        dtype=options.dtype,
        remat=options.remat,
        scan_layers=not options.unrolled,
        attention=Attention(options.attention),
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


def build(workload: Workload, name: str, *, devices: int = 1) -> Program:
    """Builds the program of `CONTENDERS[name]` on the first `devices` devices."""
    contender, model = CONTENDERS[name], workload.model
    assert isinstance(model, Transformer)
    if contender.attention is not None:
        model = with_fields(model, attention=contender.attention)
    options = dict(contender.options)
    if contender.builder is fsdp and model.dtype == "bfloat16":
        options |= NARROW
    mesh = make_mesh({"data": devices}, jax.devices()[:devices])
    batch = workload.abstract_batch
    return contender.builder(
        model, workload.tx, contender.loss_fn, mesh=mesh, batch=batch, **options
    )


def largest_batch(options: argparse.Namespace) -> int:
    """Finds the largest batch with which FSDP fits: a power of two times the number of devices.

    Raises:
      ValueError: The device does not report its memory, or a single sequence does not fit.
    """
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ValueError(
            "--batch_size is 0 (the largest that fits), but the device does not report its memory; "
            "give a number."
        )
    room, size = options.memory_share * stats["bytes_limit"], 1
    while size <= LARGEST_BATCH and _need(options, size * options.devices) <= room:
        size *= 2
    if size == 1:
        raise ValueError(f"one sequence does not fit into {room / 2**30:.1f} GiB; make it smaller.")
    return size // 2 * options.devices


def _need(options: argparse.Namespace, batch_size: int) -> float:
    """Returns the bytes of FSDP's state and temporaries on a device."""
    workload = make_model_workload(options, batch_size)
    program = build(workload, "manual fsdp", devices=options.devices)
    lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
    state = program.abstract_state
    counts = count(lowered, lowered.compile(), (state.params, state.opt_state), 0.0)
    return float(counts.temporaries + counts.state)


def first_parameters(workload: Workload) -> dict[str, np.ndarray]:
    """Returns the initial parameters by path; a scan's stacked parameters are split by layer."""
    model: Any = workload.model
    key = jax.random.split(jax.random.key(0))[0]  # `Program.init` uses this key too.
    params = jax.jit(model.init)(key, workload.batch.inputs[:1])["params"]
    named: dict[str, np.ndarray] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.startswith("layers/"):
            rest = name.removeprefix("layers/")
            named |= {f"layer_{i}/{rest}": np.asarray(one) for i, one in enumerate(x)}
        else:
            named[name] = np.asarray(x)
    return named


def shape_of(model: Any) -> dict[str, Any]:
    """Returns the fields of a `Transformer` that `TorchTransformer` needs."""
    return {name: getattr(model, name) for name in SHAPE} | {"rope_base": model.rotary.base}


def start_torch(options: argparse.Namespace, workload: Workload, files: Path) -> ProcessGroup:
    """Starts one process per device, which train the same model in PyTorch.

    Writes the initial parameters and the batch to `files`, from which the processes read them.
    """
    batch = {"batch.inputs": workload.batch.inputs, "batch.labels": workload.batch.labels}
    np.savez(files, **first_parameters(workload), **batch)  # type: ignore[arg-type]
    settings = {
        "files": str(files),
        "shape": shape_of(workload.model),
        "dtype": options.dtype,
        "optimizer": ADAMW,
        "backend": options.torch_backend,
    }
    module = "benchmarks.torch_compile_worker"
    return ProcessGroup(module, settings, num_processes=options.devices)


def measure(
    options: argparse.Namespace,
    workload: Workload,
    files: Path,
    report: Callable[[str], None],
    *,
    log: RowLog,
    keep: Callable[[list[Row]], None],
) -> list[Row]:
    """Compiles and times all steps that are not in `log` yet, one contender at a time.

    After each row `keep` is called with all rows so far. If a row's losses differ from the first
    row's losses, the row does not train the same model, and its `problem` says so.
    """
    chosen = [name for name in CONTENDERS if name in options.contenders]
    names = [PLAIN, *chosen] if options.devices == 1 else chosen
    in_order = (*names, AGAIN, TORCH)
    # PyTorch is measured first, because JAX does not return memory to the device.
    for name in [*([TORCH] if options.torch else []), *names, AGAIN]:
        if name in log.rows:
            continue
        log.begin(name)
        try:
            if name == TORCH:
                row = _measure_torch(options, workload, files)
            else:
                row = _measure(options, workload, names[0] if name == AGAIN else name)
        except (ValueError, RuntimeError) as error:  # The step cannot run, or does not fit.
            row = Row(name, problem=_reason(error))
        log.end(dataclasses.replace(row, name=name))
        compiled = f", compiled in {row.counts.compile_seconds:.1f} s" if row.counts else ""
        step = f"{1e3 * statistics.median(row.seconds):.2f} ms a step" if row.seconds else ""
        report(f"{name}: {step}{compiled}{row.problem}")
        gc.collect()  # The next contender needs the memory.
        keep([log.rows[name] for name in in_order if name in log.rows])
    return _finished(
        [_compared(log.rows[one], log) for one in in_order if one in log.rows], options
    )


def _compared(row: Row, log: RowLog) -> Row:
    """Returns the row, with a problem if its losses differ from the first row's losses."""
    first = next((one for one in log.rows.values() if one.losses and one.name != TORCH), None)
    # The tolerance is for bfloat16; another model would be far off.
    if first is None or not row.losses or np.allclose(row.losses, first.losses, rtol=1e-2):
        return row
    here, there = ([round(x, 4) for x in one.losses] for one in (row, first))
    return dataclasses.replace(row, problem=f"{DIFFERENT} {here}, those of {first.name} {there}")


def _reason(error: Exception) -> str:
    """Returns an error in one line: for another process's error, the last line of its traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    is_process = "has ended:" in lines[0]
    return lines[-1 if is_process else 0].strip()[:200]


def _measure(options: argparse.Namespace, workload: Workload, name: str) -> Row:
    """Measures plain jit or a program; its state is freed when this function returns."""
    step = _step(workload, name, options.devices)
    losses = tuple(map(float, step.losses(3)))
    return Row(name, _rounds(options, step.block), counts=step.counts, losses=losses)


def _measure_torch(options: argparse.Namespace, workload: Workload, files: Path) -> Row:
    """Measures PyTorch's row."""
    with start_torch(options, workload, files) as group:
        losses = group.ask("losses", steps=3)[0]["losses"]
        seconds = _rounds(options, group.block)
        held = max(answer["peak"] for answer in group.ask("memory"))
    return Row(TORCH, seconds, memory=held, losses=tuple(map(float, losses)))


def _step(workload: Workload, name: str, devices: int) -> CompiledStep:
    if name != PLAIN:
        return of_program(build(workload, name, devices=devices), workload.batch)
    jitted, make_state = plain_step(workload)
    state = make_state()
    batch = jax.device_put(workload.batch, jax.devices()[0])
    return CompiledStep(jitted, state, batch, parts=state, read_loss=mean_loss)


def _rounds(options: argparse.Namespace, block: Block) -> tuple[float, ...]:
    """Returns the seconds of a step in each round, after one round that is not counted."""
    steps = max(1, math.ceil(options.seconds / (block(2) / 2)))
    return tuple(block(steps) / steps for _ in range(options.rounds))


def _finished(rows: Sequence[Row], options: argparse.Namespace) -> list[Row]:
    """Returns the rows with their ratios to the first row's times, and with MFU."""
    workload = make_model_workload(options, options.batch_size)
    assert isinstance(workload.model, Transformer)
    flops = flops_per_token(workload.model, options.sequence_length) * workload.batch.inputs.size
    peak = peak_flops(jax.devices()[0].device_kind, options.dtype)
    finished = []
    for row in rows:
        if row.seconds:
            mfu = peak and flops / options.devices / statistics.median(row.seconds) / peak
            first = rows[0].seconds
            ratio = estimate(ratios(row.seconds, first)) if first else None
            row = dataclasses.replace(row, mfu=mfu, ratio=ratio)
        finished.append(row)
    return finished
