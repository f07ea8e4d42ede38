"""The table of chips: that it stands on the one table of peaks, and on sources."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas

from manualpar.core.tracing.scopes import blocks_scope
from manualpar.inspect.throughput import PEAKS, peak_flops
from manualpar.planner.compiled_timeline import KernelRuns, Timeline, on_all_links, read_timeline
from manualpar.planner.hardware import CHIPS, Kernel, chip_named, kernel_clock, kernels_in

IDS = [chip.name for chip in CHIPS]


@pytest.mark.parametrize("chip", CHIPS, ids=IDS)
def test_peaks_are_those_of_the_one_table(chip):
    assert sum(bool(re.fullmatch(peak.kind, chip.device_kind)) for peak in PEAKS) == 1
    assert chip.flops
    for dtype, flops in chip.flops.items():
        assert chip.peak(dtype) == flops == peak_flops(chip.device_kind, dtype)


@pytest.mark.parametrize("chip", CHIPS, ids=IDS)
def test_every_number_has_a_source_or_says_that_it_is_assumed(chip):
    assert re.match(r"https://\S+", chip.source)
    assert "assumed" in chip.source
    assert 0 < chip.flops_efficiency <= 1
    assert 0 < chip.hbm_efficiency <= 1
    network = chip.network
    assert 0 < network.efficiency <= 1
    assert network.slow_bandwidth < network.bandwidth < chip.hbm_bandwidth
    assert network.launch > 0
    assert 0 < network.latency <= network.slow_latency
    assert chip.is_tpu == (network.dims > 0) == (network.node_size == 0)


@pytest.mark.parametrize(
    ("name", "both_ways", "links"),
    [("v5e", 400e9, 4), ("v6e", 800e9, 4), ("v5p", 1200e9, 6), ("h100", 900e9, 1)],
)
def test_the_links_of_a_chip_make_its_printed_bandwidth(name, both_ways, links):
    assert 2 * links * chip_named(name).network.bandwidth == pytest.approx(both_ways)


@pytest.mark.parametrize(("name", "gib"), [("v5e", 15.75), ("v6e", 31.25), ("v5p", 95.74)])
def test_usable_memory_is_what_the_compiler_allows(name, gib):
    assert chip_named(name).hbm_bytes / 2**30 == pytest.approx(gib, abs=1e-6)


# -------------------------------------------------------------------------------------------------
# How long kernels take, in a program of splash attention that libtpu 0.0.52 has compiled.
# `data/tpu/splash_v5e_2x2`, without the kernels' code: forward, gradient of the queries, gradient
# of keys and values; 4 heads of 128, 2,048 positions, blocks of 512, of which a causal mask leaves
# 10.


DATA = Path(__file__).parent / "tpu"
TEXT = (DATA / "splash_v5e_2x2.txt").read_text(encoding="utf-8")
# A product of scores with 10 of 16 blocks.
PRODUCT = 2 * 4 * 10 * 512 * 512 * 128
MASK, ARRAY = (1, 4, 4), (4, 2048, 128)
FORWARD = Kernel(
    "splash_mha_fwd_residuals", [MASK, MASK, *[ARRAY] * 3, (2048, 128)], 10, 2 * PRODUCT, "bfloat16"
)
CHIP = dataclasses.replace(
    chip_named("v5e"),
    flops={"bfloat16": 200.0 * PRODUCT},
    attention_efficiency=3 / 7,
    hbm_bandwidth=1e15,
    hbm_efficiency=0.5,
)


def read(*kernels: Kernel, chip=CHIP) -> Timeline:
    return read_timeline(
        TEXT,
        {"data": 4},
        clock=1e6,
        wire=on_all_links(lambda collective: 0.0),
        kernel_seconds=kernel_clock(kernels, chip),
    )


def test_a_kernel_takes_its_share_of_the_peak() -> None:
    silent, known = read(), read(FORWARD)
    assert silent.kernels == ()
    assert silent.unestimated == {"custom-call tpu_custom_call": 3}
    # Two products at 100 a second.
    assert known.kernels == (KernelRuns("splash_mha_fwd_residuals", 1, 0.02),)
    assert known.compute_cycles == silent.compute_cycles + 0.02 * 1e6
    assert known.unestimated == {"custom-call tpu_custom_call": 2}


def test_a_kernel_takes_no_less_than_its_bytes() -> None:
    chip = dataclasses.replace(CHIP, hbm_bandwidth=1e8)
    # Queries, keys, values and results in two bytes, sums of 128 and an iota in four; small ones.
    array, iota, scratch = 4 * 2048 * 128, 2048 * 128, 3 * 512 * 128
    moved = 2 * 4 * array + 4 * (array + iota + scratch) + 2 * 16
    (found,) = read(FORWARD, chip=chip).kernels
    assert found.seconds == pytest.approx(moved / 5e7)


@pytest.mark.parametrize(
    "change", [{"name": "other"}, {"shapes": [ARRAY] * 6}, {"blocks": 16}, {"blocks": None}]
)
def test_another_kernel_is_not_taken_for_it(change) -> None:
    assert read(FORWARD._replace(**change)).kernels == ()


def test_kernels_are_found_in_a_traced_program_with_what_they_compute() -> None:
    def multiply(x_ref, y_ref, out_ref):
        out_ref[...] = x_ref[...] @ y_ref[...]

    def copy(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    out = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)
    block = pallas.BlockSpec((4, 8), lambda b, i: (i, 0))
    whole = pallas.BlockSpec((8, 8), lambda b, i: (0, 0))
    product = pallas.pallas_call(
        multiply, out_shape=out, grid=(3, 4), in_specs=[block, whole], out_specs=block, name="many"
    )

    @jax.jit
    def step(x, y):
        with jax.named_scope(blocks_scope(6)):
            x = jax.lax.fori_loop(0, 5, lambda _, x: product(x, y), x)
        return pallas.pallas_call(copy, out_shape=out, name="copy")(x)

    x, y = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16), jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    (found,) = kernels_in(jax.make_jaxpr(step)(x, y).jaxpr)
    assert found == Kernel("many", [(16, 8), (8, 8)], 6, 6 * 2 * 4 * 8 * 8, "bfloat16")


def test_a_kernel_that_is_fused_with_a_collective_computes_too() -> None:
    """A scan of 3 layers, whose kernel libtpu 0.0.52 has fused with the gather of a weight."""
    text = (DATA / "kernel_in_gather_v5e_2x2.txt").read_text(encoding="utf-8")
    product = Kernel("product", [(2048, 1024), (1024, 1024)], None, 100, "bfloat16")
    clock = kernel_clock([product], dataclasses.replace(CHIP, flops={"bfloat16": 200.0}))

    def timeline(kernel_seconds: Any = None) -> Timeline:
        wire = on_all_links(lambda collective: 0.75)
        return read_timeline(text, {"data": 4}, clock=1e6, wire=wire, kernel_seconds=kernel_seconds)

    silent, known = timeline(), timeline(clock)
    assert known.kernels == (KernelRuns("product", 3, 3.0),)
    assert known.compute_cycles == silent.compute_cycles + 3 * 1e6
    (gather,) = known.collectives
    assert gather.is_async
    assert gather.cycles_between > 1e6
    assert (silent.exposed_seconds > 2, known.exposed_seconds) == (True, 0)
    assert silent.unestimated == known.unestimated == {}
