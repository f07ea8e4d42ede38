"""Computes how fast a run is: examples, tokens and model FLOPs per second, and the MFU.

Model FLOPs utilization (MFU) is the FLOPs that the model needs, divided by the FLOPs that the
devices could compute in the time. Recomputation for the backward pass does not count (PaLM,
appendix B, https://arxiv.org/abs/2204.02311).

A peak is for dense matrix products on one `jax.Device`, without structured sparsity. It depends on
the operands' dtype and assumes JAX's default precision. For float32 this precision is TF32 on
NVIDIA GPUs that support it, and one pass in bfloat16 on TPUs. CPUs and unlisted devices have no
peak, because no number is better than a wrong number.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax

__all__ = [
    "PEAKS",
    "Throughput",
    "lowest_peak",
    "memory_in_use",
    "peak_flops",
]

TERA = 1e12
TPU_DOCS = "https://cloud.google.com/tpu/docs/"
NVIDIA = "https://www.nvidia.com/en-us/data-center/"


class Peak(NamedTuple):
    """The peak FLOP/s of one kind of device."""

    kind: str  # A regular expression for the full `jax.Device.device_kind`.
    # TFLOP/s of a device by dtype; `float8` is for all of its formats, and missing without them.
    teraflops: Mapping[str, float]
    source: str  # The vendor's page, and how the number follows from the page.


def _tpu(teraflops: float, **narrow: float) -> dict[str, float]:
    """Uses the bfloat16 peak for float32 too, because a TPU multiplies float32 as bfloat16."""
    return {"bfloat16": teraflops, "float32": teraflops, **narrow}


def _gpu(half: float, single: float, eight: float = 0.0, **narrow: float) -> dict[str, float]:
    """Datasheets of GPUs with float8 give the same number for float8 and int8."""
    if eight:
        narrow = {"float8": eight, "int8": eight}
    return {"bfloat16": half, "float16": half, "float32": single, **narrow}


# The patterns match `device_kind` of JAX. Up to v3 and from v7 on, a TPU chip is two devices in
# JAX. If a datasheet gives a number only with sparsity, half of it is used.
PEAKS = (
    Peak(r"TPU v3", _tpu(123 / 2), TPU_DOCS + "v3: 123 a chip"),
    Peak(r"TPU v4", _tpu(275, int8=275), TPU_DOCS + "v4: the same in int8"),
    Peak(r"TPU v5 lite|TPU v5e", _tpu(197, int8=393), TPU_DOCS + "v5e"),
    Peak(r"TPU v5|TPU v5p", _tpu(459, int8=918), TPU_DOCS + "v5p"),
    Peak(r"TPU v6 lite|TPU v6e", _tpu(918, int8=1836), TPU_DOCS + "v6e"),
    Peak(
        r"TPU ?(v7|7)x?",
        _tpu(2307 / 2, float8=4614 / 2),
        TPU_DOCS + "tpu7x: 2307 a chip, 4614 in float8",
    ),
    Peak(
        r"Tesla V100-SXM\d.*", {"float16": 125, "float32": 15.7}, NVIDIA + "v100: no bfloat16, TF32"
    ),
    Peak(r"Tesla V100-PCIE.*", {"float16": 112, "float32": 14}, NVIDIA + "v100"),
    Peak(r"Tesla T4", {"float16": 65, "float32": 8.1}, NVIDIA + "tesla-t4: no bfloat16, TF32"),
    Peak(r"NVIDIA A10", _gpu(125, 62.5), NVIDIA + "products/a10-gpu"),
    Peak(r"NVIDIA A30", _gpu(165, 82), NVIDIA + "products/a30-gpu"),
    Peak(r"NVIDIA A40", _gpu(149.7, 74.8), NVIDIA + "a40"),
    Peak(
        r"NVIDIA A100[- ](SXM4|PCIE|PG509|80GB PCIe)((?!MIG).)*",
        _gpu(312, 156, int8=624),
        NVIDIA + "a100",
    ),
    Peak(r"NVIDIA L4", _gpu(242 / 2, 120 / 2, 485 / 2), NVIDIA + "l4"),
    Peak(r"NVIDIA L40S", _gpu(362.05, 183, 733), NVIDIA + "l40s"),
    Peak(r"NVIDIA H100 PCIe", _gpu(1513 / 2, 756 / 2, 3026 / 2), NVIDIA + "h100"),
    Peak(r"NVIDIA H100 NVL", _gpu(1671 / 2, 835 / 2, 3341 / 2), NVIDIA + "h100"),
    Peak(r"NVIDIA H100 \d+GB HBM\w+", _gpu(1979 / 2, 989 / 2, 3958 / 2), NVIDIA + "h100: SXM"),
    Peak(
        r"NVIDIA GH200 \d+GB", _gpu(1979 / 2, 989 / 2, 3958 / 2), NVIDIA + "grace-hopper-superchip"
    ),
    Peak(r"NVIDIA H200 NVL", _gpu(1671 / 2, 835 / 2, 3341 / 2), NVIDIA + "h200"),
    Peak(r"NVIDIA H200", _gpu(1979 / 2, 989 / 2, 3958 / 2), NVIDIA + "h200: SXM"),
    Peak(r"NVIDIA B200", _gpu(4500 / 2, 2250 / 2, 9000 / 2), NVIDIA + "hgx: an eighth of HGX B200"),
    Peak(r"NVIDIA GB200", _gpu(5000 / 2, 2500 / 2, 10000 / 2), NVIDIA + "gb200-nvl72: a 72nd"),
)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Returns a device's peak FLOP/s for products of a dtype; `None` if `PEAKS` lacks it."""
    for peak in PEAKS:
        if re.fullmatch(peak.kind, device_kind):
            return peak.teraflops[dtype] * TERA if dtype in peak.teraflops else None
    return None


def lowest_peak(devices: Iterable[jax.Device], dtype: str) -> float | None:
    """Returns the lowest peak of the devices, because faster devices wait; `None` if unknown."""
    peaks = {peak_flops(device.device_kind, dtype) for device in devices}
    return None if None in peaks else min(filter(None, peaks), default=None)


def memory_in_use(devices: Iterable[jax.Device]) -> int | None:
    """Returns the bytes in use on this process's fullest device; `None` if they are not known."""
    own = [device for device in devices if device.process_index == jax.process_index()]
    stats = [device.memory_stats() for device in own]
    used = [entry["bytes_in_use"] for entry in stats if entry and "bytes_in_use" in entry]
    return max(used, default=None)


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Computes rates, such as examples per second, from steps and seconds."""

    examples_per_step: int  # On all devices together.
    tokens_per_example: int | None = None
    flops_per_example: float | None = None  # Model FLOPs, forward and backward.
    num_devices: int = 1
    peak: float | None = None  # FLOP/s of one device, see `peak_flops`.

    def rates(self, steps: int, seconds: float) -> dict[str, float]:
        """Computes the rates of `steps` steps that took `seconds` together; empty if either is 0.

        The rates are `examples_per_second` and, if their inputs are known, `tokens_per_second`,
        `model_flops_per_second` (of all devices) and `mfu` (1 is the peak).
        """
        if not steps or seconds <= 0:
            return {}
        examples = steps * self.examples_per_step / seconds
        rates = {"examples_per_second": examples}
        if self.tokens_per_example is not None:
            rates["tokens_per_second"] = examples * self.tokens_per_example
        if self.flops_per_example is not None:
            flops = examples * self.flops_per_example
            rates["model_flops_per_second"] = flops
            if self.peak is not None:
                rates["mfu"] = flops / (self.num_devices * self.peak)
        return rates
