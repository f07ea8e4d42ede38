"""Measures on one GPU, within minutes, what matters most: the rows in order of their value.

python -m benchmarks.gpu_hour [--minutes 9] [--output gpu_hour] [--rows 'LoRA|generation']
python -m benchmarks.gpu_hour --tiny        # tries the command on a CPU; its times mean nothing

The command is for an hour, or ten minutes, on somebody's GPU: a bare machine without a network. It
measures the rows of `ROWS` in their order: a training step with this package's defaults beside
plain jit and PyTorch, the ways to keep less for the backward pass, and then attention, products in
float8, Muon, fine-tuning, generation, a profile, and what one of eight GPUs computes.

Each row runs in a process of its own, as in `benchmarks.gpu`, whose rows the training steps are.
The process has at most the seconds in `ROWS`, and never more than are left; most rows need fewer. A
row that fails has its reason, and the next row follows. So has a row whose library is not
installed, and a row for which no time was left.

The folder `--output` has `rows.jsonl`, the page `page.md`, and the profile. A row is a line that is
written when the row has been measured, and rows of several cases also after each case; the last
line of a name counts. So nothing is lost if the command is ended at any moment. `--rows` measures
some rows only, for a second try.
"""

import argparse
import collections
import dataclasses
import functools
import gzip
import importlib.util
import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen import fp8_ops

from benchmarks import gpu, gpu_layouts, gpu_report, gpu_steps
from benchmarks.compiled_steps import CompiledStep, mean_loss, of_program
from benchmarks.gpu_rows import UNFINISHED, Row, note_where_it_hangs, run_row
from benchmarks.results import note_conditions, plain
from benchmarks.turns import table
from manualpar import Batch, data_parallel, fsdp, lora, make_mesh, quantized
from manualpar.layers.attention import attention
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.generation import Generator
from manualpar.training.monitoring.profiling import TRACE_FILE, StepProfiler

Figures = Mapping[str, Any]
MODULE = "benchmarks.gpu_hour"
CONDITIONS = "the conditions"
# A row is not begun with less time than this.
LEAST_SECONDS = 15.0
MACHINE_SECONDS = 60.0
# The row of `benchmarks.gpu` with the compiler options that programs have by default.
DEFAULTS = f"manual fsdp{gpu_layouts.OURS}"
LORA_RANK, LORA_RATE = 16, 1e-4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the rows that are not the training step of `benchmarks.gpu`.

    Attributes:
      repeats: How often something is called in a timed block.
      attention: Batch, positions, heads, key heads, head size.
      float8: Rows, features, hidden features of a layer.
      matrices: A stack of matrices whose products Muon takes.
      model: The model that is fine-tuned and that generates.
      tokens: Sequences and positions of a fine-tuning step.
      answers: Prompts, their length, and new tokens.
      dtype: The dtype of the computation.
    """

    repeats: int = 10
    attention: tuple[int, int, int, int, int] = (1, 8192, 32, 8, 128)
    float8: tuple[int, int, int] = (16_384, 4096, 14_336)
    matrices: tuple[int, int, int] = (24, 2048, 5504)
    model: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {
            "vocab_size": 32_768,
            "num_layers": 8,
            "hidden_size": 4096,
            "mlp_size": 14_336,
            "num_heads": 32,
            "num_kv_heads": 8,
        }
    )
    tokens: tuple[int, int] = (4, 2048)
    answers: tuple[int, int, int] = (8, 128, 128)
    dtype: str = "bfloat16"


TINY = Sizes(
    repeats=1,
    attention=(1, 32, 4, 2, 16),
    float8=(32, 32, 64),
    matrices=(2, 16, 32),
    model={
        "vocab_size": 128,
        "num_layers": 2,
        "hidden_size": 64,
        "mlp_size": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    tokens=(2, 16),
    answers=(2, 4, 4),
    dtype="float32",
)


class Step(NamedTuple):
    """A row that is a row of `benchmarks.gpu`.

    Attributes:
      limit: The most seconds.
      row: The name of the row there.
      flags: The flags of `benchmarks.gpu`.
      needs: The modules that must be installed.
    """

    limit: float
    row: str
    flags: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


class Part(NamedTuple):
    """A row with figures of its own.

    Attributes:
      limit: The most seconds.
      measure: Yields figures by name, case by case.
      needs: The modules that must be installed.
      environment: Environment variables of its process.
    """

    limit: float
    measure: Callable[[argparse.Namespace], Iterator[Figures]]
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}


def sizes(options: argparse.Namespace) -> Sizes:
    """Returns the sizes that `--tiny` decides."""
    return TINY if options.tiny else Sizes()


def step_flags(options: argparse.Namespace) -> list[str]:
    """Returns the flags of `benchmarks.gpu` for the training step of all rows."""
    if options.tiny:
        small = ["--tiny", "--layers=2", "--batch_size=8", "--rounds=2"]
        return ["--devices=1", *small, "--no-torch", "--remat=auto"]
    short = ["--batch_size=8", "--rounds=3", "--seconds=0.6"]
    return ["--devices=1", *short, "--no-torch", "--remat=auto"]


def milliseconds(run: Callable[..., Any], *args: Any, repeats: int) -> float:
    """Returns the milliseconds of a jitted call, as the median of three blocks."""
    jitted = jax.jit(run)
    for _ in range(2):
        jax.block_until_ready(jitted(*args))
    blocks = []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(repeats):
            result = jitted(*args)
        jax.block_until_ready(result)
        blocks.append((time.perf_counter() - started) / repeats)
    return 1e3 * statistics.median(blocks)


def each_case(cases: Mapping[str, Callable[[], Figures]]) -> Iterator[Figures]:
    """Yields the figures of each case; a case that cannot run has its reason."""
    for name, measure in cases.items():
        try:
            found = measure()
        except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
            found = {"not measured": gpu_steps.reason(error)}
        yield {f"{name}, {key}": value for key, value in found.items()}


def _attention(options: argparse.Namespace) -> Iterator[Figures]:
    """Measures attention forward and backward, by implementation."""
    size = sizes(options)
    batch, length, heads, key_heads, features = size.attention
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [
        jax.random.normal(key, (batch, length, number, features), size.dtype)
        for key, number in zip(keys, (heads, key_heads, key_heads), strict=True)
    ]
    documents = jnp.sort(jax.random.randint(jax.random.key(3), (batch, length), 0, 5), axis=1)
    flops = 3.5 * 2 * batch * length**2 * heads * features  # Of causal attention.

    def measure(kind: Any, documents: Any = None, **scoring: Any) -> Figures:
        def total(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            found = attention(query, key, value, documents, kind=kind, **scoring)
            return jnp.square(found.astype(jnp.float32)).sum()

        gradients = jax.grad(total, (0, 1, 2))
        took = milliseconds(gradients, *arrays, repeats=size.repeats)
        return {"ms": took, "TFLOP/s": flops / took / 1e9}

    yield {"batch, positions, heads, key heads, features": list(size.attention)}
    yield from each_case(
        {
            "causal, cudnn": functools.partial(measure, "cudnn"),
            "five documents, triton": functools.partial(measure, "triton", documents),
            "soft cap, triton": functools.partial(measure, "triton", soft_cap=30.0),
            "sinks, cudnn": functools.partial(measure, "cudnn", sinks=jnp.zeros(heads)),
            "causal, triton": functools.partial(measure, "triton"),
            "window 1024, triton": functools.partial(measure, "triton", window=1024),
            "five documents, the default": functools.partial(measure, "", documents),
            "five documents, cudnn": functools.partial(measure, "cudnn", documents),
            "causal, blockwise": functools.partial(measure, "blockwise"),
            "soft cap, blockwise": functools.partial(measure, "blockwise", soft_cap=30.0),
        }
    )


class _Layer(nn.Module):
    """A layer whose products may be in float8."""

    hidden: int
    dtype: str
    product: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = functools.partial(
            nn.Dense, use_bias=False, dtype=self.dtype, dot_general_cls=self.product
        )
        h = nn.gelu(dense(self.hidden, name="up")(x))
        return dense(x.shape[-1], name="down")(h)


def _square_loss(params: Any, apply_fn: Any, batch: Batch, rng: Any) -> Any:
    found = apply_fn({"params": params}, batch.inputs).astype(jnp.float32)
    losses = jnp.square(found - batch.labels).mean(-1)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


def _float8(options: argparse.Namespace) -> Iterator[Figures]:
    """Measures a training step of one layer with flax's products in float8."""
    size = sizes(options)
    rows, features, hidden = size.float8
    x = np.random.default_rng(0).normal(size=(rows, features)).astype(np.float32)
    batch, mesh = Batch(inputs=x, labels=np.sin(x)), make_mesh({"data": 1}, jax.devices()[:1])

    def measure(product: Any) -> Figures:
        model = _Layer(hidden, size.dtype, product)
        program = data_parallel(model, optax.sgd(0.1), _square_loss, mesh=mesh, batch=batch)
        step = of_program(program, batch)
        losses = step.losses(3)
        step.block(2)
        took = statistics.median(step.block(size.repeats) / size.repeats for _ in range(3))
        return {
            "ms": 1e3 * took,
            "TFLOP/s": 3 * 4 * rows * features * hidden / took / 1e12,
            "losses": losses,
            "calls of float8 products": step.compiled.as_text().count("matmul$f8"),
        }

    product = functools.partial(fp8_ops.Fp8DirectDotGeneralOp, amax_history_length=16)
    yield {"rows, features, hidden": list(size.float8)}
    yield from each_case(
        {
            size.dtype: functools.partial(measure, None),
            "flax's float8": functools.partial(measure, product),
        }
    )


def _newton_schulz(options: argparse.Namespace) -> Iterator[Figures]:
    """Measures Muon's update of stacked matrices."""
    size = sizes(options)
    layers, rows, columns = size.matrices
    numbers = {"w": optax.contrib.MuonDimensionNumbers(1, 2)}
    flops = layers * 5 * (4 * rows * rows * columns + 2 * rows**3)

    def measure(dtype: str) -> Figures:
        tx = optax.contrib.scale_by_muon(weight_dimension_numbers=numbers)
        gradients = {"w": jax.random.normal(jax.random.key(0), size.matrices, dtype)}
        state = jax.jit(tx.init)(gradients)
        took = milliseconds(tx.update, gradients, state, repeats=max(size.repeats // 5, 1))
        return {"ms": took, "TFLOP/s": flops / took / 1e9}

    yield {"layers, rows, columns": list(size.matrices)}
    dtypes = ("bfloat16", "float32")
    yield from each_case({dtype: functools.partial(measure, dtype) for dtype in dtypes})


def _model(size: Sizes) -> Transformer:
    """Returns the model that is fine-tuned and that generates."""
    return Transformer(**size.model, dtype=size.dtype, scan_layers=True)


def _tokens(size: Sizes) -> np.ndarray:
    """Returns the tokens of a fine-tuning step, with the label of the last position."""
    batch, length = size.tokens
    random = np.random.default_rng(0)
    return random.integers(0, size.model["vocab_size"], (batch, length + 1)).astype(np.int32)


def _fine_tuning(size: Sizes, losses: Sequence[float], seconds: float, held: int) -> Figures:
    """Returns the figures of a fine-tuning step, the same for both libraries."""
    batch, length = size.tokens
    return {
        "ms": 1e3 * seconds,
        "tokens/s": batch * length / seconds,
        "peak GiB": held / 2**30,
        "losses": list(losses),
    }


def _nf4_lora(options: argparse.Namespace) -> Iterator[Figures]:
    """Measures a step that trains adapters of all kernels in layers, over kernels in NF4."""
    size, tokens = sizes(options), _tokens(sizes(options))
    batch = Batch(inputs=tokens[:, :-1], labels=tokens[:, 1:])
    targets = {"*/attention/*": LORA_RANK, "*/mlp/*": LORA_RANK}
    program = fsdp(
        lora(quantized(_model(size), code="nf4"), targets, alpha=2 * LORA_RANK),
        optax.adamw(LORA_RATE),
        language_model_loss,
        mesh=make_mesh({"data": 1}, jax.devices()[:1]),
        batch=batch,
        frozen_dtype=size.dtype,
    )
    yield {"model": dict(size.model), "rank": LORA_RANK}
    step = of_program(program, batch)
    losses = step.losses(3)
    step.block(2)
    took = statistics.median(step.block(size.repeats) / size.repeats for _ in range(3))
    yield _fine_tuning(size, losses, took, gpu_steps.most_in_use() or 0)


def _llama(size: Sizes) -> tuple[Any, Any]:
    """Returns transformers' model of the same sizes, and its device."""
    import torch
    import transformers

    model = size.model
    config = transformers.LlamaConfig(
        vocab_size=model["vocab_size"],
        hidden_size=model["hidden_size"],
        intermediate_size=model["mlp_size"],
        num_hidden_layers=model["num_layers"],
        num_attention_heads=model["num_heads"],
        num_key_value_heads=model["num_kv_heads"],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with device:
        built = transformers.LlamaForCausalLM(config)
    return built.to(getattr(torch, size.dtype)), device


def _peft(options: argparse.Namespace) -> Iterator[Figures]:
    """Measures the step of `_nf4_lora` with peft and bitsandbytes."""
    import bitsandbytes
    import peft
    import torch

    size = sizes(options)
    model, device = _llama(size)
    for module in list(model.model.layers.modules()):
        for name, linear in list(module.named_children()):
            if isinstance(linear, torch.nn.Linear):
                code = {"quant_type": "nf4", "compress_statistics": False}
                size_of = (linear.in_features, linear.out_features)
                dtype = linear.weight.dtype
                narrow = bitsandbytes.nn.Linear4bit(
                    *size_of, bias=False, compute_dtype=dtype, device="meta", **code
                )
                weight = linear.weight.data
                narrow.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, **code)
                setattr(module, name, narrow.to(device))  # Here it is encoded.
    model.is_loaded_in_4bit = True
    adapters = peft.LoraConfig(
        r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, adapters)
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LORA_RATE)
    tokens = torch.from_numpy(_tokens(size)).long().to(device)

    def step() -> Any:
        logits = model(input_ids=tokens[:, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    yield {"model": dict(size.model), "rank": LORA_RANK, "kernels": _kinds(model)}
    losses = [float(step()) for _ in range(3)]
    took = _torch_seconds(step, size.repeats)
    held = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    yield _fine_tuning(size, losses, took, held)


def _kinds(model: Any) -> dict[str, int]:
    """Counts the dtypes of a model's parameters, which show whether its base is in four bits."""
    return dict(collections.Counter(str(x.dtype) for x in model.parameters()))


def _torch_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Returns the seconds of a call with PyTorch, as the median of three blocks."""
    import torch

    blocks = []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        blocks.append((time.perf_counter() - started) / repeats)
    return statistics.median(blocks)


def _prompts(size: Sizes) -> np.ndarray:
    count, length, _ = size.answers
    return np.random.default_rng(0).integers(1, size.model["vocab_size"], (count, length))


def _answers(size: Sizes, seconds: float) -> Figures:
    count, _, new = size.answers
    return {"new tokens/s": count * new / seconds, "ms a token": 1e3 * seconds / new}


def _generation(options: argparse.Namespace) -> Iterator[Figures]:
    """Measures greedy answers, with parameters stored in the dtype of the computation."""
    size = sizes(options)
    prompts, new = _prompts(size), size.answers[2]
    batch = Batch(inputs=prompts, labels=prompts)
    program = fsdp(
        _model(size),
        optax.sgd(0.0),
        language_model_loss,
        mesh=make_mesh({"data": 1}, jax.devices()[:1]),
        batch=jax.tree.map(np.int32, batch),
        param_dtype=size.dtype,
    )
    yield {"model": dict(size.model), "prompts, length, new tokens": list(size.answers)}
    state = program.init(jax.random.key(0))
    generator = Generator(program, batch_size=len(prompts), stop_tokens=())
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        answers = generator.generate(state, prompts.tolist(), max_tokens=new)
        seconds.append(time.perf_counter() - started)
    assert all(len(answer.tokens) == new for answer in answers)
    yield {"the first call, s": seconds[0], **_answers(size, min(seconds[1:]))}


def _transformers(options: argparse.Namespace) -> Iterator[Figures]:
    """Measures the answers of `_generation` with transformers."""
    import torch

    size = sizes(options)
    model, device = _llama(size)
    prompts = torch.from_numpy(_prompts(size)).to(device)
    new = size.answers[2]

    def run() -> Any:
        return model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
        )

    yield {"model": dict(size.model), "prompts, length, new tokens": list(size.answers)}
    with torch.no_grad():
        assert run().shape[1] == prompts.shape[1] + new
        yield _answers(size, _torch_seconds(run, 1))


def _profile(options: argparse.Namespace) -> Iterator[Figures]:
    """Profiles three steps with the defaults; its figures are the kernels that took longest."""
    own = gpu.parse(step_flags(options))
    workload = gpu_steps.make_model_workload(own, own.batch_size)
    step = of_program(gpu_layouts.build(workload, DEFAULTS)[0], workload.batch)
    step.losses(2)
    said: list[str] = []
    with StepProfiler(range(1, 4), options.output / "profile", said.append) as profiler:
        for number in range(1, 4):
            profiler.begin_step(number, step.state)
            step.losses(1)
            profiler.end_step(number, step.state)
    yield {"said": said}
    trace = max(options.output.glob(f"profile/plugins/profile/*/{TRACE_FILE}"))
    yield {"ms of three steps, by kernel": kernel_times(trace)}


def kernel_times(path: Path, most: int = 15) -> dict[str, float]:
    """Returns the milliseconds of the longest kernels of a trace, without the numbers of names."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    named = [event for event in events if event.get("ph") == "M"]
    device = {
        event["pid"]
        for event in named
        if event["name"] == "process_name" and "/device:" in event["args"]["name"]
    }
    # The other threads of a device show the same kernels by module and by step.
    streams = {
        (event["pid"], event["tid"])
        for event in named
        if event["name"] == "thread_name" and "Stream" in event["args"]["name"]
    }
    times: collections.Counter[str] = collections.Counter()
    for event in events:
        is_kernel = (event.get("pid"), event.get("tid")) in streams and event["pid"] in device
        if event.get("ph") == "X" and is_kernel:
            times[re.sub(r"[._]\d+$", "", event["name"])[:80]] += event["dur"] / 1e3
    return {"all": sum(times.values()), **dict(times.most_common(most))}


def _mocked_eight(options: argparse.Namespace) -> Iterator[Figures]:
    """Measures a step of one of eight GPUs whose collectives send nothing and cost nothing.

    The other seven exist only in JAX's client, so the sums are wrong and no losses are compared.
    The difference from a step of one device with as many sequences is what FSDP computes besides.
    """
    own = gpu.parse(step_flags(options))
    jax.config.update("jax_mock_gpu_topology", "1x8x1")  # JAX reads no environment variable for it.
    yield {"devices, processes": [jax.device_count(), jax.process_count()]}
    started = time.perf_counter()
    workload = gpu_steps.make_model_workload(own, own.batch_size * 8)
    program, _ = gpu_layouts.build(workload, DEFAULTS, devices=8)
    yield {"building, s": time.perf_counter() - started}
    state = program.init(jax.random.key(0))  # It returns when it has been compiled.
    yield {"building and compiling init, s": time.perf_counter() - started}
    jax.block_until_ready(state)
    yield {"building and init, s": time.perf_counter() - started}

    def put(x: np.ndarray) -> jax.Array:  # `device_put` would ask the other processes.
        sharding: Any = program.batch_sharding
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    train: Any = program.train_step
    step = CompiledStep(
        getattr(train, "jitted", train),
        state,
        jax.tree.map(put, workload.batch),
        parts=(state.params, state.opt_state),
        read_loss=mean_loss,
    )
    yield {"building, init and compiling, s": time.perf_counter() - started}
    step.block(2)
    repeats = sizes(options).repeats
    took = statistics.median(step.block(repeats) / repeats for _ in range(3))
    yield {"ms": 1e3 * took, "temporaries GiB": step.counts.temporaries / 2**30}


# In a cluster each process tries some of XLA's tiles, writes what it found into the store that all
# processes share, and waits for the others; but the mocked processes do not exist, so the first
# program that has a product would never be compiled. Running needs nothing of them: with mocked
# devices XLA acquires no clique of NCCL, and its executor passes over the collectives.
MOCKED = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_shard_autotuning=false"}
FSDP, PLAIN_JIT = "manual fsdp", gpu_steps.PLAIN
ROWS: Mapping[str, Step | Part] = {
    FSDP: Step(110, DEFAULTS),
    PLAIN_JIT: Step(80, PLAIN_JIT, ("--remat=none",)),
    gpu_steps.TORCH: Step(90, gpu_steps.TORCH, needs=("torch",)),
    "manual fsdp, remat none": Step(60, DEFAULTS, ("--remat=none",)),
    "manual fsdp, remat dots": Step(60, DEFAULTS, ("--remat=dots",)),
    "manual fsdp, remat full": Step(60, DEFAULTS, ("--remat=full",)),
    "manual fsdp, unrolled": Step(80, DEFAULTS, ("--unrolled", "--remat=none")),
    "attention": Part(75, _attention),
    "a layer in float8": Part(45, _float8),
    "Newton-Schulz, Muon's products": Part(35, _newton_schulz),
    "NF4 and LoRA": Part(60, _nf4_lora),
    "NF4 and LoRA, peft": Part(60, _peft, ("torch", "transformers", "peft", "bitsandbytes")),
    "generation": Part(50, _generation),
    "generation, transformers": Part(50, _transformers, ("torch", "transformers")),
    "a profile": Part(60, _profile),
    "one of eight, mocked": Part(75, _mocked_eight, environment=MOCKED),
    "plain jit, unrolled": Step(80, PLAIN_JIT, ("--unrolled", "--remat=none")),
}


def _run_in_this_process(options: argparse.Namespace) -> int:
    """Measures `options.row`, and writes it after each case; returns the exit code."""
    note_where_it_hangs()
    part = ROWS[options.row]
    assert isinstance(part, Part)
    row = Row(options.row, problem=UNFINISHED)
    for found in part.measure(options):
        row = dataclasses.replace(row, facts={**row.facts, **found})
        _append(options, row)
        row.write(options.result)
    dataclasses.replace(row, problem="").write(options.result)
    return 0


def _append(options: argparse.Namespace, row: Row) -> None:
    """Writes a row as a line, which is on the disk when this function returns."""
    with (options.output / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(row), default=plain) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _run(options: argparse.Namespace, name: str, left: float) -> Row:
    """Runs a row in a process of its own, within the seconds that are left."""
    one = ROWS[name]
    missing = [module for module in one.needs if importlib.util.find_spec(module) is None]
    if missing:
        return Row(name, problem=f"not measured: {', '.join(missing)} is not installed here")
    if left < LEAST_SECONDS:
        return Row(name, problem=f"not measured: {options.minutes:g} minutes are over")
    limit = min(one.limit, left)
    environment = gpu.environment_of(argparse.Namespace(tiny=options.tiny, devices=8))
    # One process has the GPU at a time, so it may have nearly all of the memory.
    environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    if isinstance(one, Step):
        flags = [*step_flags(options), *one.flags, f"--row={one.row}"]
        row = run_row(name, _python("benchmarks.gpu", *flags), limit=limit, environment=environment)
        return dataclasses.replace(row, name=name)
    flags = [*["--tiny"] * options.tiny, f"--output={options.output}", f"--row={name}"]
    environment |= one.environment
    return run_row(name, _python(MODULE, *flags), limit=limit, environment=environment)


def _python(module: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", module, *flags]


def figures(rows: Sequence[Row]) -> list[str]:
    """Returns the tables of the rows that are no training steps."""
    lines = []
    for row in rows:
        if row.facts:
            cells = [[key, _show(value)] for key, value in row.facts.items()]
            lines += ["", f"## {row.name}", "", *table(["", "figure"], cells)]
    return lines


def _show(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_show(x)}" for key, x in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_show, value))
    text = f"{value:.4g}" if isinstance(value, float) and abs(value) < 1e4 else ""
    text = text or (f"{value:,.0f}" if isinstance(value, float) else str(value))
    return text.replace("|", "/").replace("\n", " ")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="the time of all rows")
    parser.add_argument("--rows", default="", help="a regular expression for the rows' names")
    parser.add_argument("--output", type=Path, default=Path("gpu_hour"), help="a folder")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--row", default="", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        re.compile(options.rows)
    except re.error as error:
        parser.error(f"--rows is {options.rows!r}, expected a regular expression: {error}.")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measures row after row, and writes each; returns the exit code."""
    options = _parse(argv)
    if options.row:
        return _run_in_this_process(options)
    # Ended by a signal, the command also ends the process of the row.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    end = time.monotonic() + 60 * options.minutes
    conditions = note_conditions(MODULE, argv)
    options.output.mkdir(parents=True, exist_ok=True)
    own = gpu.parse(step_flags(options))
    environment = gpu.environment_of(argparse.Namespace(tiny=options.tiny, devices=8))
    command = _python("benchmarks.gpu", *step_flags(options), f"--row={gpu.MACHINE}")
    machine = run_row(gpu.MACHINE, command, limit=MACHINE_SECONDS, environment=environment)
    for row in (Row(CONDITIONS, facts=dataclasses.asdict(conditions)), machine):
        _append(options, row)
    if problem := gpu.check_machine(own, machine):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    facts = {**machine.facts, "used": 1, "remat": "auto"}
    rows: list[Row] = []
    for name in (name for name in ROWS if re.search(options.rows, name)):
        started = time.monotonic()
        row = _run(options, name, end - started)
        rows.append(row)
        _append(options, row)
        # Times are shown relative to plain jit's, if it has times.
        shown = gpu_steps.compare_rows(sorted(rows, key=lambda row: row.name != PLAIN_JIT))
        page = gpu_report.page(conditions, own, facts, shown, "")
        text = "\n".join([*page, *figures(rows), ""])
        (options.output / "page.md").write_text(text, encoding="utf-8")
        took = time.monotonic() - started
        print(f"{took:5.0f} s  {name}: {row.problem or 'measured'}", flush=True)
    return int(all(row.problem for row in rows))


if __name__ == "__main__":
    sys.exit(main())
