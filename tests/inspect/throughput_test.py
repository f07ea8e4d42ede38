"""Rates by hand, and peaks for the names that devices have."""

import jax
import pytest

from manualpar.inspect.throughput import (
    PEAKS,
    Throughput,
    lowest_peak,
    memory_in_use,
    peak_flops,
)


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("TPU v3", 61.5),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5e", 197),
        ("TPU v5", 459),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("TPU v6e", 918),
        ("TPU7x", 1153.5),
        ("TPU v7", 1153.5),
        ("NVIDIA A10", 125),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("Tesla T4", None),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("TPU v4 lite", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_peaks_in_bfloat16(kind, teraflops):
    assert peak_flops(kind, "bfloat16") == (None if teraflops is None else teraflops * 1e12)


def test_other_dtypes_have_peaks_of_their_own():
    assert peak_flops("Tesla T4", "float16") == 65e12
    assert peak_flops("Tesla T4", "float32") == 8.1e12
    assert peak_flops("Tesla V100-SXM2-16GB", "float16") == 125e12
    assert peak_flops("Tesla V100-PCIE-32GB", "float32") == 14e12
    assert peak_flops("NVIDIA H200", "float32") == 494.5e12
    assert peak_flops("TPU v4", "float32") == peak_flops("TPU v4", "bfloat16")
    assert peak_flops("TPU v4", "float16") is None
    assert peak_flops("NVIDIA H200", "float64") is None
    assert peak_flops("NVIDIA H200", "float8") == peak_flops("NVIDIA H200", "int8") == 1979e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float8") is None
    assert peak_flops("NVIDIA A100-SXM4-80GB", "int8") == 624e12


def test_every_peak_says_where_it_is_from():
    assert all(peak.source.startswith("https://") for peak in PEAKS)
    for peak in PEAKS:
        assert peak.teraflops["float32"] <= max(peak.teraflops.values())


class _Device:
    def __init__(self, kind: str, used: int | None = None, process: int = 0) -> None:
        self.device_kind, self.used, self.process_index = kind, used, process

    def memory_stats(self):
        return None if self.used is None else {"bytes_in_use": self.used}


def test_the_slowest_device_is_waited_for():
    assert lowest_peak([_Device("TPU v4"), _Device("TPU v5e")], "bfloat16") == 197e12
    assert lowest_peak([_Device("TPU v4"), _Device("cpu")], "bfloat16") is None
    assert lowest_peak([], "bfloat16") is None
    assert lowest_peak(jax.devices("cpu"), "bfloat16") is None


def test_the_fullest_of_the_devices_here_counts():
    assert memory_in_use([_Device("a", 3), _Device("a", 7), _Device("a", 9, process=1)]) == 7
    assert memory_in_use([_Device("a", None), _Device("a", 7)]) == 7
    assert memory_in_use([_Device("a", None)]) is None
    assert memory_in_use(jax.devices("cpu")) is None


def test_rates_are_of_all_devices_and_mfu_of_their_peaks():
    throughput = Throughput(
        examples_per_step=32,
        tokens_per_example=128,
        flops_per_example=1e9,
        num_devices=8,
        peak=1e10,
    )
    assert throughput.rates(10, 5.0) == {
        "examples_per_second": 64,
        "tokens_per_second": 8192,
        "model_flops_per_second": 64e9,
        "mfu": pytest.approx(0.8),
    }


def test_what_is_not_known_is_not_there():
    assert Throughput(4).rates(3, 2.0) == {"examples_per_second": 6}
    assert Throughput(4, peak=1e12).rates(3, 2.0) == {"examples_per_second": 6}
    known = Throughput(4, flops_per_example=2.0).rates(3, 2.0)
    assert known == {"examples_per_second": 6, "model_flops_per_second": 12}
    assert Throughput(4).rates(0, 0.0) == {}
