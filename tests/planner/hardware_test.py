"""The table of chips: that it stands on the one table of peaks, and on sources."""

import re

import pytest

from manualpar.planner.hardware import CHIPS, chip_named
from manualpar.training.monitoring.throughput import PEAKS, peak_flops

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
