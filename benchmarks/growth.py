"""Measures how the time to build a program and to compile its step grows with the model.

    python -m benchmarks.growth --params 100 300 1000 --layers 4 16 64

There are two models: small dense layers with `--params` parameter arrays in all, unrolled, and a
dense Transformer of `--layers` layers, unrolled and scanned. For each model and each entry of
`WAYS`, a program is built and its step is compiled. `plain` is `jax.jit` for one device, `plan` is
FSDP with a plan that splits the layers over two devices, and `nnx` is FSDP of an NNX model. Seconds
are processor seconds, which other programs on the machine hardly change. A ratio divides these
seconds by the seconds of plain jit in the same round; the table shows the median over rounds. An
exponent of 1 means that a model of twice the size takes twice as long. Every measurement has a
process of its own, because jax caches traces.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import note_conditions, write_results
from benchmarks.turns import table

WAYS = ("plain", "dp", "zero", "fsdp", "plan", "nnx")
MODELS = ("params", "unrolled", "scanned")
WIDTH = 16


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, and prints a table for each model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth")
    parser.add_argument("--params", type=int, nargs="*", default=[100, 300, 1000])
    parser.add_argument("--layers", type=int, nargs="*", default=[4, 16, 64])
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no_compile", action="store_true", help="trace and lower only")
    parser.add_argument("--json", type=Path, help="a JSON file")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        model, way, size = args.measure
        print(json.dumps(measure(model, way, int(size), compiles=not args.no_compile)))
        return
    conditions = note_conditions("benchmarks.growth", argv)
    lines: list[str] = []
    for model in MODELS:
        sizes = args.params if model == "params" else args.layers
        ways = [way for way in args.ways if has_way(model, way)]
        if sizes and ways:
            seconds = {
                (way, size): [_in_process(model, way, size, args) for _ in range(args.rounds)]
                for size in sizes
                for way in dict.fromkeys(("plain", *ways))
            }
            part = ["", f"## {model}: processor seconds, ratio to plain", "", *rows(seconds)]
            print("\n".join(part), flush=True)
            lines += part
    write_results(conditions, lines=lines, data={}, output=None, json_output=args.json)


def has_way(model: str, way: str) -> bool:
    """Returns whether `way` can build `model`; there is no Transformer for `nnx`."""
    return model == "params" or way != "nnx"


def rows(seconds: dict[tuple[str, int], list[float]]) -> list[str]:
    """Makes a table: each way's seconds and ratio at each size, and the exponent of the seconds."""
    ways = list(dict.fromkeys(way for way, _ in seconds))
    sizes = list(dict.fromkeys(size for _, size in seconds))
    lines: list[list[str]] = []
    for way in ways:
        medians = [statistics.median(seconds[way, size]) for size in sizes]
        ratios = [
            statistics.median(
                x / y for x, y in zip(seconds[way, size], seconds["plain", size], strict=True)
            )
            for size in sizes
        ]
        cells = [f"{s:.2f} ({ratio:.2f})" for s, ratio in zip(medians, ratios, strict=True)]
        exponent = f"{growth(sizes, medians):.2f}" if len(sizes) > 1 else "-"
        lines.append([way, *cells, exponent])
    return table(["", *map(str, sizes), "exponent"], lines)


def growth(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Returns the exponent with which the seconds grow between the two largest sizes."""
    (a, b), (s, t) = (
        sorted(sizes)[-2:],
        [x for _, x in sorted(zip(sizes, seconds, strict=True))][-2:],
    )
    return math.log(t / s) / math.log(b / a)


def _in_process(model: str, way: str, size: int, args: argparse.Namespace) -> float:
    command = [sys.executable, "-m", "benchmarks.growth", "--measure", model, way, str(size)]
    command += ["--no_compile"] if args.no_compile else []
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(json.loads(out.stdout.splitlines()[-1]))


def measure(model: str, way: str, size: int, *, compiles: bool = True) -> float:
    """Returns the processor seconds to build a program and to trace, lower and compile its step.

    Building a program traces the initial state; the seconds of plain jit do not include this.
    """
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    prepare = _plain if way == "plain" else _program
    build = prepare(*(_small_layers if model == "params" else _transformer)(model, way, size), way)
    start = time.process_time()
    step, args = build()
    lowered = step.trace(*args).lower()
    if compiles:
        lowered.compile()
    return time.process_time() - start


def _plain(model: Any, plan: Any, loss_fn: Any, batch: Any, way: str) -> Callable[[], Any]:
    import jax
    import optax

    del plan, way
    tx = optax.adam(1e-3)
    params = jax.eval_shape(model.init, jax.random.key(0), batch.inputs)["params"]
    opt_state = jax.eval_shape(tx.init, params)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return loss_fn(params, model.apply, batch, jax.random.key(0))

        grads, metrics = jax.grad(loss, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, metrics

    return lambda: (jax.jit(step), (params, opt_state, batch))


def _program(model: Any, plan: Any, loss_fn: Any, batch: Any, way: str) -> Callable[[], Any]:
    import optax

    from manualpar import data_parallel, fsdp, make_mesh, tensor_parallel, zero

    axes = {"data": 4, "model": 2} if way == "plan" else {"data": 8}
    options: Any = {"mesh": make_mesh(axes), "batch": batch}
    build: Any
    more: Any
    build, more = {
        "dp": (data_parallel, {}),
        "zero": (zero, {"stage": 2, "min_weight_size": 1}),
    }.get(way, (fsdp, {"min_weight_size": 1}))

    def make() -> Any:
        planned = tensor_parallel(model, plan, "model") if way == "plan" else model
        program: Any = build(planned, optax.adam(1e-3), loss_fn, **options, **more)
        return program.train_step, (program.abstract_state, program.abstract_batch)

    return make


def _small_layers(model: str, way: str, size: int) -> tuple[Any, Any, Any, Any]:
    """Returns `size // 2` unrolled dense layers, each with a kernel and a bias.

    Also returns a plan that splits the layers, a loss function and a batch.
    """
    import flax.linen as nn
    import jax.numpy as jnp
    from flax import nnx

    from manualpar import Batch, Column, Row

    del model
    num_layers = size // 2

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool = False) -> Any:
            for layer in range(num_layers):
                x = nn.tanh(nn.Dense(WIDTH, name=f"d{layer}")(x))
            return x

    class NNXLayers(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(num_layers)])

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x

    def loss_fn(params: Any, apply_fn: Any, batch: Any, rng: Any) -> Any:
        del rng
        out = apply_fn({"params": params}, batch.inputs)
        losses = jnp.square(out - batch.labels).mean(-1)
        return losses.mean(), {"loss": (losses.sum(), losses.size)}

    plan = {f"d{i}": Row() if i % 2 else Column() for i in range(num_layers // 2 * 2)}
    batch = Batch(jnp.zeros((64, WIDTH)), jnp.zeros((64, WIDTH)))
    return NNXLayers if way == "nnx" else Layers(), plan, loss_fn, batch


def _transformer(model: str, way: str, size: int) -> tuple[Any, Any, Any, Any]:
    """Returns a Transformer of `size` layers, a plan that splits them, a loss and a batch."""
    import flax.linen as nn
    import numpy as np

    from manualpar import Batch, Column, Row, Vocab
    from manualpar.layers import split_cross_entropy

    del way

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, mask: Any) -> tuple[Any, None]:
            x = x + nn.MultiHeadDotProductAttention(4, name="attention")(
                nn.LayerNorm()(x), mask=mask
            )
            hidden = nn.gelu(nn.Dense(128, name="up")(nn.LayerNorm()(x)))
            return x + nn.Dense(64, name="down")(hidden), None

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any, train: bool = False) -> Any:
            embed = nn.Embed(256, 64, name="embed")
            x, mask = embed(tokens), nn.make_causal_mask(tokens)
            if model == "scanned":
                options: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
                scan: Any = nn.scan(Block, length=size, in_axes=nn.broadcast, **options)
                x, _ = scan(name="layers")(x, mask)
            else:
                for layer in range(size):
                    x, _ = Block(name=f"layer_{layer}")(x, mask)
            return embed.attend(nn.LayerNorm()(x))

    def loss_fn(params: Any, apply_fn: Any, batch: Any, rng: Any) -> Any:
        del rng
        losses = split_cross_entropy(apply_fn({"params": params}, batch.inputs), batch.labels)
        return losses.mean(), {"loss": (losses.sum(), losses.size)}

    columns = {f"*/attention/{name}": Column(-2) for name in ("query", "key", "value")}
    plan = {"embed": Vocab(), **columns, "*/attention/out": Row(-3)}
    plan |= {"*/up": Column(), "*/down": Row()}
    tokens = np.zeros((16, 32), np.int32)
    return Transformer(), plan, loss_fn, Batch(tokens, tokens)


if __name__ == "__main__":
    main()
