"""Fits the planner's times of products and attention on GPUs to half of what was measured.

python -m benchmarks.measured_kernels

`docs/measured/h200_kernels.json` has the times of kernels on one H200. The command takes half a
minute, needs no GPU, and prints for each kind of kernel the numbers that half of the rows give, and
the errors of both halves. It also prints the errors of the planner as it was before, with one share
of the peak for products and one for attention. `manualpar/planner/hardware.py` has the numbers.

Every second product is fitted, and so is every second rounding to float8, and every second product
whose weights XLA transposes. Of attention the fitted rows are those without which a number could
not be found: short and long, with and without documents. Attention in blocks is fitted to its
longer causal rows; what it takes to start is left out, so short rows take longer than estimated.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.compiled_for_chips import LAYOUTS, SHAPES, Variant, make_config
from manualpar.core.mesh.mesh import abstract_mesh
from manualpar.core.modes.layer_loops import planned_memory
from manualpar.inspect.communication import Around
from manualpar.inspect.flops import TrafficReader
from manualpar.layers.attention import attention
from manualpar.planner import hardware, roofline
from manualpar.planner.hardware import CUDNN, chip_named, cudnn_kernel_seconds
from manualpar.planner.step_work import read_work
from manualpar.planner.topology import parse_topology
from manualpar.plans.planned_experiment import prepare_planned
from manualpar.plans.sweep import has_kernel, throughput_of

MEASURED = Path(__file__).parents[1] / "docs" / "measured" / "h200_kernels.json"
CHIP = chip_named("h200")
FITTED_PRODUCTS_ROWS = (0, 2, 4)
FITTED_CUDNN_ROWS = (0, 3, 4, 5)
FITTED_BLOCKS_ROWS = (3, 4)
# The share of the peak that the planner had for products and attention before.
BEFORE_PRODUCTS, BEFORE_ATTENTION = 0.694, 0.518
Row = Mapping[str, Any]


class Group(NamedTuple):
    """The errors of one kind of kernel, by row: (estimated / measured) - 1.

    Attributes:
      name: The kind of kernel.
      fitted: The rows that were fitted.
      numbers: What the fit found.
      errors: With these numbers.
      before: Of the planner before.
    """

    name: str
    fitted: Sequence[int]
    numbers: Mapping[str, float]
    errors: Sequence[float]
    before: Sequence[float]

    def largest(self, *, tested: bool, before: bool = False) -> float:
        """Returns the largest error of the tested or of the fitted rows."""
        errors = self.before if before else self.errors
        return max(abs(x) for i, x in enumerate(errors) if tested != (i in self.fitted))


def linear_fit(columns: np.ndarray, times: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """Returns the factors of the columns whose sum has the least relative errors in some rows."""
    scaled = columns[list(rows)] / times[list(rows), None]
    return np.linalg.lstsq(scaled, np.ones(len(rows)), rcond=None)[0]


def of_products(rows: Sequence[Row]) -> list[Group]:
    """Fits the share of the peak of products in bfloat16, and the gain of float8."""
    flops = np.array([2 * row["m"] * row["k"] * row["n"] for row in rows])
    peak, groups = CHIP.peak("bfloat16"), []
    for name, factor in (("bfloat16", 1), ("float8", 2)):
        times = np.array([row[f"{name} ms"] / 1e3 for row in rows])
        reached = flops / times / (factor * peak)
        share = math.exp(np.log(reached[list(FITTED_PRODUCTS_ROWS)]).mean())
        before = reached / BEFORE_PRODUCTS * factor - 1  # Float8 was planned as bfloat16.
        errors = reached / share - 1
        groups.append(Group(name, FITTED_PRODUCTS_ROWS, {"share": share}, errors, before))
    return groups


def of_changes(rows: Sequence[Row]) -> list[Group]:
    """Fits the passes of rounding to float8, and of transposing weights in float8.

    The largest number of an operand was found by a reduction, which the roofline counts as one pass
    over 2 bytes a number. Rounding reads 2 bytes and writes 1. The errors of transpositions are
    those of the product with its transposition.
    """
    hbm = CHIP.hbm_bandwidth * CHIP.hbm_efficiency
    numbers = np.array([row["m"] * row["k"] for row in rows])
    times = np.array([row["quantization ms"] / 1e3 for row in rows])
    reduced = 2 * numbers / hbm
    rounded = _passes("rounding", times, reduced, 3 * numbers / hbm, hardware.ROUNDED_PASSES)
    weights = np.array([row["k"] * row["n"] for row in rows])
    times = np.array([row["float8, transposed by XLA, ms"] / 1e3 for row in rows])
    alone = np.array([row["float8 ms"] / 1e3 for row in rows])
    flops = np.array([2 * row["m"] * row["k"] * row["n"] for row in rows])
    computing = flops / CHIP.product_rate("float8")
    fit = _passes("transposed", times, alone, 2 * weights, 1 / hardware.TRANSPOSED)
    errors = (computing + 2 * weights / hardware.TRANSPOSED) / times - 1
    numbers_of_fit = {"bytes per second": 1 / fit.numbers["passes"]}
    return [rounded, Group(*fit[:2], numbers_of_fit, errors, computing / times - 1)]


def _passes(
    name: str, times: np.ndarray, fixed: np.ndarray, each: np.ndarray, used: float
) -> Group:
    """Fits `times = fixed + passes * each`; errors are with the planner's number, and with none."""
    fitted = list(FITTED_PRODUCTS_ROWS)
    passes = math.exp(np.log((times - fixed)[fitted] / each[fitted]).mean())
    errors, before = ((fixed + n * each) / times - 1 for n in (used, 0.0))
    return Group(name, fitted, {"passes": passes}, errors, before)


def _shape(row: Row) -> tuple[int, int, int, int, int]:
    names = ("examples", "positions", "heads", "key heads", "features")
    B, S, N, K, H = (row[name] for name in names)
    return B, S, N, K, H


def _pairs(row: Row) -> int:
    S = row["positions"]
    return min(S * S // 2, S * (row["window"] or S))


def of_cudnn(rows: Sequence[Row]) -> Group:
    """Fits the four numbers of `KernelSpeed`."""
    columns, before = [], []
    for row in rows:
        B, S, N, _, H = _shape(row)
        computing = 7 * 2 * B * N * H * _pairs(row) / CHIP.peak("bfloat16")
        masked = B * N * S * S // 2 if row["documents"] else 0
        columns.append(
            [computing, B * S * N * H / CHIP.hbm_bandwidth, masked / CHIP.hbm_bandwidth, 1]
        )
        before.append(computing / BEFORE_ATTENTION)
    times = np.array([row["cudnn ms"] / 1e3 for row in rows])
    found = linear_fit(np.array(columns), times, FITTED_CUDNN_ROWS)
    numbers = dict(zip(CUDNN._fields, (1 / found[0], *found[1:]), strict=True))
    estimated = []
    for row in rows:
        B, S, N, _, H = _shape(row)
        masked = B * N * S * S // 2 if row["documents"] else 0
        run = functools.partial(cudnn_kernel_seconds, CHIP, "bfloat16", masked=masked)
        estimated.append(run(products=7, numbers=B * S * N * H, pairs=_pairs(row) / S))
    errors = np.array(estimated) / times - 1
    return Group("cuDNN", FITTED_CUDNN_ROWS, numbers, errors, np.array(before) / times - 1)


def of_blocks(rows: Sequence[Row]) -> Group:
    """Fits the passes over the products of attention in blocks, as the roofline reads them."""
    times = np.array([row["blockwise ms"] / 1e3 for row in rows])
    once, twice = (
        np.array([_blocks_seconds(row, passes) for row in rows]) for passes in (1.0, 2.0)
    )
    # Traffic decides, and not operations, so the time grows linearly with the passes.
    fixed, each = 2 * once - twice, twice - once
    fitted = list(FITTED_BLOCKS_ROWS)
    passes = float(np.mean((times - fixed)[fitted] / each[fitted]))
    estimated = np.array([_blocks_seconds(row, hardware.BLOCK_PASSES) for row in rows])
    return Group("in blocks", fitted, {"passes": passes}, estimated / times - 1, once / times - 1)


def _blocks_seconds(row: Row, passes: float) -> float:
    B, S, N, K, H = _shape(row)
    heads = [jax.ShapeDtypeStruct((B, S, n, H), jnp.bfloat16) for n in (N, K, K)]
    documents = jnp.zeros((B, S), jnp.int32) if row["documents"] else None

    def total(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        out = attention(query, key, value, documents, kind="blockwise", window=row["window"])
        return out.astype(jnp.float32).sum()

    # The device decides how large blocks are.
    with jax.sharding.use_abstract_mesh(abstract_mesh({"data": 1}, 1, CHIP.abstract_device)):
        traced = jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(*heads).jaxpr
    products: Any = TrafficReader("measured_kernels").read(traced, Around())
    with_passes: Callable[..., float] = functools.partial(
        roofline.compute_seconds, products, CHIP, block_passes=passes
    )
    return with_passes(("forward", "backward"))


def step_seconds(row: Row) -> float:
    """Returns the roofline's time of a training step of 24 layers on one device."""
    shape = dataclasses.replace(SHAPES["8x2048"], layers=24, mlp_size=5504)
    layout = dataclasses.replace(LAYOUTS["fsdp"], sequences=8)
    config = make_config(shape, f"{CHIP.name}:1", layout, Variant("manual", "none")).unlock()
    config.optimizer.num_minibatches = 1
    config.model.scan_layers, config.model.remat = row["scan_layers"], row["remat"]
    config.model.attention = row["attention"]
    topology = parse_topology(f"{CHIP.name}:1")
    with planned_memory(CHIP.hbm_bytes):
        devices: Any = topology.abstract_devices
        experiment = prepare_planned(config.lock(), devices=devices, vocab_size=32_768)
    model, program = experiment.task.model, experiment.program
    work = read_work(
        program,
        throughput_of(config, experiment.task),
        fused_attention=has_kernel(model, program, CHIP),
        overlap="none",
    )
    return float(roofline.estimate(work, topology).step_seconds or 0.0)


def groups() -> list[Group]:
    """Fits all kinds of kernels."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    rows = measured["attention"]
    products = measured["products"]
    return [*of_products(products), *of_changes(products), of_cudnn(rows), of_blocks(rows)]


def main() -> None:
    """Prints the numbers and the errors."""
    print(f"{'':12}{'fitted rows':>14}{'tested rows':>14}{'tested, before':>17}   numbers")
    for group in groups():
        errors = (
            group.largest(tested=False),
            group.largest(tested=True),
            group.largest(tested=True, before=True),
        )
        shown = ", ".join(f"{name} {number:.4g}" for name, number in group.numbers.items())
        print(f"{group.name:12}{errors[0]:14.1%}{errors[1]:14.1%}{errors[2]:17.1%}   {shown}")
    for row in json.loads(MEASURED.read_text(encoding="utf-8"))["steps"]["rows"]:
        print(f"{1e3 * step_seconds(row):.1f} ms by the roofline: {row}")


if __name__ == "__main__":
    main()
