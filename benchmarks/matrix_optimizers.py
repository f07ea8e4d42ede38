"""Measures what Muon's update costs on whole matrices, and what it costs if XLA divides it.

    python -m benchmarks.matrix_optimizers                     # every layout, simulated devices
    python -m benchmarks.matrix_optimizers --chip h100:8       # XLA's compiler, without the chips
    python -m benchmarks.matrix_optimizers --growth 8 64 512   # bytes on more devices, traced
    python -m benchmarks.matrix_optimizers --losses 200        # Muon and AdamW, on 1 and 8 devices

The model is a language model of 8 scanned layers of 512 with 128 MiB of matrices. Each step is
compiled with AdamW, with Muon as XLA divides it, and with Muon on whole matrices. `update` is the
GFLOP of a device, and `extra` the MiB that a device sends, both above those of AdamW's step. The
least work divides five Newton-Schulz iterations of `4 m^2 n + 2 m^3` among the devices; the fewest
bytes on sharded matrices are `2 P/N (N - 1)/N`.
"""

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import note_conditions, write_results
from benchmarks.turns import table

MIB = 2**20
LAYERS, WIDTH, VOCAB, LENGTH = 8, 512, 1024, 32
# The mesh of each layout on 8 devices.
LAYOUTS: dict[str, dict[str, int]] = {
    "fsdp": {"data": 8},
    "zero1": {"data": 8},
    "hsdp 2 x 4": {"replica": 2, "data": 4},
    "fsdp x model, 4 x 2": {"data": 4, "model": 2},
    "dp": {"data": 8},
}
OPTIMIZERS = ("adamw", "muon by XLA", "muon")


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, and prints a table of each kind that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matrix_optimizers")
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--chip", help="a topology, such as h100:8 or v5e:2x4")
    parser.add_argument("--growth", type=int, nargs="*", default=[], metavar="DEVICES")
    parser.add_argument("--losses", type=int, default=0, metavar="STEPS")
    parser.add_argument("--json", type=Path, help="a JSON file")
    args = parser.parse_args(argv)
    conditions = note_conditions("benchmarks.matrix_optimizers", argv)
    if args.chip:
        title, lines = f"Muon, compiled for {args.chip}", chip_rows(args.chip)
    elif args.growth:
        title, lines = "Muon on more devices", growth_rows(args.growth)
    elif args.losses:
        title, lines = "Losses of Muon and AdamW", loss_rows(args.losses)
    else:
        title, lines = "Muon in every layout", layout_rows(args.layouts)
    lines = [f"## {title}", "", *lines]
    print("\n".join(lines), flush=True)
    write_results(conditions, lines=lines, data={}, output=None, json_output=args.json)


# The programs.


def matrix_dims(params: Any) -> Any:
    """Returns the dims of the matrices of a `Transformer`; `None` for what Adam updates."""
    import jax
    from optax.contrib import MuonDimensionNumbers as Dims

    from manualpar.core.trees import path_name

    def dims(path: Any, x: Any) -> Any:
        *_, module, name = ["", *path_name(path).split("/")]
        if name != "kernel" or module == "router":
            return None
        inside = "attention" in path_name(path)
        if inside and module in ("query", "key", "value"):
            return Dims(-3, (-2, -1))
        return Dims((-3, -2), -1) if inside else Dims(-2, -1)

    return jax.tree_util.tree_map_with_path(dims, params)


def make_optimizer(name: str) -> Any:
    """Makes AdamW or Muon. In `muon by XLA` one operation joins all gradients.

    So no function of one matrix is found, and XLA divides the update.
    """
    import jax
    import optax

    if name == "adamw":
        return optax.adamw(1e-3)
    tx = optax.contrib.muon(0.02, muon_weight_dimension_numbers=matrix_dims)
    join = optax.stateless(lambda grads, _: jax.lax.optimization_barrier(grads))
    return optax.chain(join, tx) if name == "muon by XLA" else tx


def build(
    layout: str,
    optimizer: str,
    mesh: Any,
    *,
    layers: int = LAYERS,
    width: int = WIDTH,
    rows: int = 8,
) -> Any:
    """Builds the program of a layout on a mesh."""
    import numpy as np

    from manualpar import Batch, data_parallel, fsdp, hsdp, zero
    from manualpar.models import Split, Transformer
    from manualpar.models.cross_entropy import language_model_loss

    model = Transformer(
        vocab_size=VOCAB,
        num_layers=layers,
        hidden_size=width,
        num_heads=max(2, width // 64),
        mlp_size=4 * width,
        scan_layers=True,
        split=Split("model"),
    )
    tokens = np.zeros((rows, LENGTH), np.int32)
    builders: dict[str, Callable[..., Any]] = {"zero1": zero, "hsdp": hsdp, "dp": data_parallel}
    builder = builders.get(layout.split()[0], fsdp)
    options = {} if builder is data_parallel else {"min_weight_size": 2**10}
    return builder(
        model,
        make_optimizer(optimizer),
        language_model_loss,
        mesh=mesh,
        batch=Batch(tokens, tokens),
        **options,
    )


# Layouts on simulated devices.


def layout_rows(layouts: Sequence[str]) -> list[str]:
    """Compiles each layout with each optimizer; returns a table."""
    import jax

    from manualpar import make_mesh

    jax.config.update("jax_num_cpu_devices", 8)
    rows = []
    for layout in layouts:
        costs = {name: cost(build(layout, name, make_mesh(LAYOUTS[layout]))) for name in OPTIMIZERS}
        flops, sent, _ = costs["adamw"]
        for name in OPTIMIZERS[1:]:
            its_flops, its_sent, held = costs[name]
            numbers = [(its_flops - flops) / 1e9, (its_sent - sent) / MIB, held / MIB]
            rows.append([layout, name, *(f"{x:,.1f}" for x in numbers)])
            print(" | ".join(rows[-1]), flush=True)
    rows.append(
        [
            "least, 8 devices",
            "",
            f"{least_flops(8) / 1e9:,.1f}",
            f"{fewest_bytes(8) / MIB:,.1f}",
            "",
        ]
    )
    return table(["layout", "optimizer", "update", "extra", "temporaries"], rows)


def cost(program: Any) -> tuple[float, float, int]:
    """Compiles a step; returns its FLOPs, the bytes it sends and its temporaries, of a device."""
    from manualpar.inspect import read_compiled, total_bytes

    step = program.train_step.lower(program.abstract_state, program.abstract_batch)
    compiled = step.compile()
    analysis: Any = compiled.cost_analysis()
    memory: Any = compiled.memory_analysis()
    sent = total_bytes(read_compiled(compiled).collectives)
    return analysis["flops"], float(sent), memory.temp_size_in_bytes


def matrix_shapes() -> list[tuple[int, int]]:
    """Returns the shapes of all matrices: four of attention and three of the MLP in a layer."""
    return LAYERS * [(WIDTH, WIDTH)] * 4 + LAYERS * [(WIDTH, 4 * WIDTH)] * 3


def least_flops(devices: int) -> float:
    """Returns the FLOPs of five Newton-Schulz iterations of all matrices, divided evenly."""
    return sum(5 * (4 * m * m * n + 2 * m**3) for m, n in matrix_shapes()) / devices


def fewest_bytes(devices: int) -> float:
    """Returns the bytes that a device sends for float32 matrices, out and back."""
    matrices = sum(4 * m * n for m, n in matrix_shapes())
    return 2 * matrices / devices * (devices - 1) / devices


# XLA's compilers for GPUs and TPUs.


def step_on_chip(devices: Sequence[Any], optimizer: str) -> tuple[Any, tuple[Any, Any]]:
    """Returns the FSDP step on devices that are not here, and its arguments."""
    import numpy as np
    from jax.sharding import Mesh

    program = build("fsdp", optimizer, Mesh(np.array(devices), ("data",)))
    return program.train_step, (program.abstract_state, program.abstract_batch)


adamw_step = functools.partial(step_on_chip, optimizer="adamw")
muon_step = functools.partial(step_on_chip, optimizer="muon")
xla_muon_step = functools.partial(step_on_chip, optimizer="muon by XLA")


def chip_rows(chip: str) -> list[str]:
    """Compiles the FSDP step for chips that are not here; returns a table."""
    from manualpar.inspect import compiled_collectives, total_bytes
    from manualpar.planner.topology import parse_topology
    from manualpar.plans.compiler_process import run_compiler
    from manualpar.plans.gpu_compiler import GPU
    from manualpar.plans.tpu_compiler import TPU

    compiler = TPU if parse_topology(chip).chip.is_tpu else GPU
    costs = {}
    for name, step in zip(OPTIMIZERS, ("adamw", "xla_muon", "muon"), strict=True):
        done = run_compiler(compiler, f"benchmarks.matrix_optimizers:{step}_step", chip)
        sent = float(total_bytes(compiled_collectives(done.text)))
        costs[name] = sent, done.facts["memory"]["temporaries"]
        print(name, f"{sent / MIB:,.1f}", flush=True)
    rows = [
        [name, f"{(sent - costs['adamw'][0]) / MIB:,.1f}", f"{held / MIB:,.1f}"]
        for name, (sent, held) in costs.items()
    ]
    return table(["optimizer", "extra", "temporaries"], rows)


# More devices.


def growth_rows(sizes: Sequence[int]) -> list[str]:
    """Returns a table of the bytes and FLOPs of Muon's update on more and more devices."""
    from manualpar import abstract_mesh
    from manualpar.core.tracing.scopes import MATRICES_SCOPE
    from manualpar.inspect import ledger
    from manualpar.inspect.expected_bytes import matrix_collectives

    rows = []
    for size in sizes:
        program = build("fsdp", "muon", abstract_mesh({"data": size}, size), rows=size)
        found = ledger(program)
        closed = float(sum(x.bytes_sent for x in matrix_collectives(program)))
        traced = float(found.bytes_by_purpose()[MATRICES_SCOPE])
        numbers = [traced / MIB, closed / MIB, found.flops_by_phase()["update"] / 1e9]
        least = [fewest_bytes(size) / MIB, least_flops(size) / 1e9]
        rows.append([str(size), *(f"{x:,.2f}" for x in (*numbers, *least))])
    names = ["devices", "extra, traced", "by formula", "update", "fewest bytes", "least work"]
    return table(names, rows)


# Losses.


def loss_rows(steps: int) -> list[str]:
    """Trains a small model by both optimizers on 1 and on 8 devices; returns a table of losses."""
    import jax
    import numpy as np

    from manualpar import Batch, make_mesh

    jax.config.update("jax_num_cpu_devices", 8)
    random = np.random.default_rng(0)
    table_of_next = random.integers(0, VOCAB, (VOCAB, 4))

    def text() -> Any:
        tokens = random.integers(0, VOCAB, (8, 1))
        for _ in range(LENGTH):
            choice = random.integers(0, 4, 8)
            tokens = np.concatenate([tokens, table_of_next[tokens[:, -1], choice][:, None]], 1)
        return Batch(tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32))

    batches = [text() for _ in range(steps)]
    shown = [step for step in (1, steps // 4, steps // 2, steps) if step]
    rows = []
    for name in ("adamw", "muon"):
        for devices in (1, 8):
            mesh = make_mesh({"data": devices}, jax.devices()[:devices])
            program = build("fsdp", name, mesh, layers=2, width=128)
            state = program.init(jax.random.key(0))
            losses = []
            for batch in batches:
                state, metrics = program.train_step(state, batch)
                total, count = metrics["loss"]
                losses.append(float(total) / float(count))
            assert all(map(math.isfinite, losses))
            rows.append([name, str(devices), *(f"{losses[step - 1]:.4f}" for step in shown)])
            print(" | ".join(rows[-1]), flush=True)
    return table(["optimizer", "devices", *(f"step {step}" for step in shown)], rows)


# A picture of the exchange, for the page about Muon.


def draw_exchange(path: Path) -> None:
    """Draws how four devices exchange parts of eight matrices for whole matrices, and back."""
    from matplotlib.patches import Rectangle

    from manualpar.system.reports.pictures import PURPOSE_COLORS, saved_figure

    devices, matrices = 4, 8
    colors = [PURPOSE_COLORS[name] for name in list(PURPOSE_COLORS)[:matrices]]
    names = ["momentum, in parts", "whole matrices of each owner", "updates, in parts"]
    with saved_figure(path, (9.0, 3.2), title="Two all-to-alls around a matrix function") as figure:
        axes = figure.add_subplot()
        for column, name in enumerate(names):
            left = 14 * column
            axes.text(left + 4, 4.45, name, ha="center")
            for device in range(devices):
                bottom, is_whole = devices - 1 - device, column == 1
                axes.text(left - 0.3, bottom + 0.4, f"device {device}", ha="right", va="center")
                for matrix in range(matrices):
                    if is_whole and matrix // (matrices // devices) != device:
                        continue
                    start = left + (matrix % 2) * 4 if is_whole else left + matrix
                    width = 3.8 if is_whole else 0.8
                    axes.add_patch(Rectangle((start, bottom), width, 0.8, color=colors[matrix]))
        for column, label in enumerate(["all-to-all", "all-to-all"]):
            tail = 14 * column + 8.2
            axes.annotate("", (tail + 2.6, 2), (tail, 2), arrowprops={"arrowstyle": "->"})
            axes.text(tail + 1.3, 2.2, label, ha="center", fontsize=8)
        axes.text(18, -0.6, "the matrix function runs here", ha="center", fontsize=8)
        axes.set(xlim=(-4, 37), ylim=(-0.9, 5))
        axes.axis("off")


if __name__ == "__main__":
    main()
