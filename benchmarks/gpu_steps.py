"""Measures one row of `benchmarks.gpu`: a training step of one language model.

A contender is a way to train: plain jit, a program of this package (`benchmarks.gpu_layouts`), or
PyTorch. Every contender trains the same model from the same parameters on the same tokens with
AdamW; only the rows of experts have another model. Each row runs in a process of its own
(`benchmarks.gpu_rows`), so the model may be as large as one contender can train. The first
contender is measured again at the end, which shows how far the machine has drifted.
"""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.compiled_steps import CompiledStep, count, mean_loss, of_program
from benchmarks.gpu_layouts import CONTENDERS, build, find_chip, plan_step
from benchmarks.gpu_rows import Row
from benchmarks.plain_step import plain_step
from benchmarks.process_group import ProcessGroup
from benchmarks.turns import Block, estimate, ratios
from benchmarks.workloads import ADAMW as ADAMW_OF_TESTS
from benchmarks.workloads import Workload
from manualpar import Batch
from manualpar.inspect.throughput import peak_flops
from manualpar.models import Attention, Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.flat_fields import with_fields
from manualpar.models.transformer import flops_per_token
from manualpar.system.cluster.agreement import from_first, gather

# Without a warmup a larger rate lets the losses of a wide model jump, and then the losses of two
# libraries differ although they train the same.
ADAMW = {**ADAMW_OF_TESTS, "lr": 1e-5}
PLAIN, TORCH, AGAIN = "plain jit", "PyTorch FSDP2, compiled", "the first, again"
DIFFERENT = "not the same training: its losses are"
LARGEST_BATCH = 2**12
SHAPE = ("vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "mlp_size")


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


def largest_batch(options: argparse.Namespace) -> int:
    """Finds the largest batch with which FSDP fits: a power of two times the number of devices.

    Raises:
      ValueError: The device does not report its memory, or a single sequence does not fit.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ValueError(
            "--batch_size is 0 (the largest that fits), but the device does not report its memory; "
            "give a number."
        )
    room, size = options.memory_share * from_first(stats["bytes_limit"]), 1
    while size <= LARGEST_BATCH and _need(options, size * options.devices) <= room:
        size *= 2
    if size == 1:
        raise ValueError(f"one sequence does not fit into {room / 2**30:.1f} GiB; make it smaller.")
    return size // 2 * options.devices


def _need(options: argparse.Namespace, batch_size: int) -> float:
    """Returns the bytes of FSDP's state and temporaries on a device."""
    workload = make_model_workload(options, batch_size)
    program, _ = build(workload, "manual fsdp", devices=options.devices)
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


def measure_step(options: argparse.Namespace, name: str) -> Row:
    """Measures plain jit or a program; returns the row without its ratio.

    Raises:
      ValueError: The step cannot run on these devices, or in this mode.
      RuntimeError: The step does not fit into a device's memory.
    """
    workload = make_model_workload(options, options.batch_size)
    row = Row(name)
    if name == PLAIN:
        jitted, make_state = plain_step(workload)
        state = make_state()
        batch = jax.device_put(workload.batch, jax.devices()[0])
        step = CompiledStep(jitted, state, batch, parts=state, read_loss=mean_loss)
    else:
        program, chosen = build(workload, name, devices=options.devices)
        chip = find_chip(jax.devices()[0].device_kind, options.chip)
        planned = plan_step(program, workload, chip)
        row = Row(name, planned=planned, options=chosen.describe())
        step = of_program(program, workload.batch)
    losses = tuple(map(float, step.losses(3)))
    seconds = _rounds(options, step.block)
    return dataclasses.replace(
        row,
        seconds=seconds,
        counts=step.counts,
        compiled=step.held_bytes,
        memory=most_in_use(),
        losses=losses,
        mfu=_mfu(options, name, seconds),
    )


def measure_torch(options: argparse.Namespace, files: Path) -> Row:
    """Measures PyTorch's row; `files` is where its processes find the parameters and tokens."""
    workload = make_model_workload(options, options.batch_size)
    with start_torch(options, workload, files) as group:
        losses = group.ask("losses", steps=3)[0]["losses"]
        seconds = _rounds(options, group.block)
        held = max(answer["peak"] for answer in group.ask("memory"))
    losses = tuple(map(float, losses))
    return Row(TORCH, seconds, memory=held, losses=losses, mfu=_mfu(options, TORCH, seconds))


def most_in_use() -> int | None:
    """Returns the most bytes that this process held on any device; `None` if unknown."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = gather(max((x.get("peak_bytes_in_use", 0) for x in stats), default=0))
    return max(peaks) or None


def compare_rows(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows with their ratios to the first row's times.

    If a row's losses differ from those of the first row of the same model, `problem` says so.
    """
    steps = [row for row in rows if row.losses and row.name != TORCH]
    compared = []
    for row in rows:
        alike = [one for one in steps if ("experts" in one.name) == ("experts" in row.name)]
        if row.seconds and (timed := [one for one in rows if one.seconds]):
            row = dataclasses.replace(row, ratio=estimate(ratios(row.seconds, timed[0].seconds)))
        # The tolerance is for bfloat16; another model would be far off.
        if alike and row.losses and not np.allclose(row.losses, alike[0].losses, rtol=1e-2):
            here, there = ([round(x, 4) for x in one.losses] for one in (row, alike[0]))
            problem = f"{DIFFERENT} {here}, those of {alike[0].name} {there}"
            row = dataclasses.replace(row, problem=problem)
        compared.append(row)
    return compared


def reason(error: Exception) -> str:
    """Returns an error in one line: for another process's error, the last line of its traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
    is_process = "has ended:" in lines[0]
    return lines[-1 if is_process else 0].strip()[:300]


def _rounds(options: argparse.Namespace, block: Block) -> tuple[float, ...]:
    """Returns the seconds of a step in each round, after one round that is not counted."""
    # All processes must run equally many steps.
    steps = int(from_first(max(1, math.ceil(options.seconds / (block(2) / 2)))))
    return tuple(block(steps) / steps for _ in range(options.rounds))


def _mfu(options: argparse.Namespace, name: str, seconds: Sequence[float]) -> float | None:
    """Returns the model's FLOP/s as a share of the peak; `None` for an unknown peak."""
    model: Any = make_model_workload(options, 1).model
    fields = CONTENDERS[name].fields if name in CONTENDERS else {}
    tokens = options.batch_size * options.sequence_length
    flops = flops_per_token(with_fields(model, **fields), options.sequence_length) * tokens
    peak = peak_flops(jax.devices()[0].device_kind, options.dtype)
    return peak and flops / options.devices / statistics.median(seconds) / peak
