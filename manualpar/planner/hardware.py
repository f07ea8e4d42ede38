"""Chips and the networks between them, with where each number is from.

What a chip computes is not written here but looked up in `manualpar.watching.throughput.PEAKS`.
Everything is of one `jax.Device`: of a chip that is two devices (TPU7x) a half. Bandwidths are
bytes a second in one direction; vendors mostly print both directions together, or bits.

A network is one of two kinds. In a *torus* (TPU) every chip has two links for each dimension, to
its neighbours; slices, each a torus, are joined by the data center's network. In *nodes* (GPU) all
devices of a node reach one another at full speed, and each has its own card to the other nodes.

What vendors do not print is marked "assumed" in `Chip.source`: the share of a peak that large
products reach, the share of a bandwidth that large transfers reach, and latencies. They are round
numbers chosen before anything was compared with a measurement, and the same for chips alike.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Literal

from manualpar.watching.throughput import PEAKS, TERA, peak_flops

GIGA = 1e9
GIB = 2**30
MICRO = 1e-6
TPU_DOCS = "https://docs.cloud.google.com/tpu/docs/"
NVIDIA = "https://www.nvidia.com/en-us/data-center/"
SCALING_BOOK = "https://jax-ml.github.io/scaling-book/tpus/"


@dataclasses.dataclass(frozen=True)
class Network:
    """How devices of a kind reach one another.

    Attributes:
      kind: `"torus"` or `"nodes"`.
      bandwidth: Bytes a second in one direction: of one link of a torus, or of a device to all
        others of its node together.
      latency: Seconds from a device to the next.
      launch: Seconds to start a collective, whatever its size.
      slow_bandwidth: Bytes a second in one direction that a device has to itself to what is outside
        its slice or its node.
      slow_latency: Seconds from one slice or node to the next.
      efficiency: The share of a bandwidth that a large transfer reaches.
      dims: Dimensions of the torus, 0 for nodes.
      ring_sizes: In a torus, which sizes of a dimension are closed to a ring: multiples of it.
      node_size: Devices of a node; 0 in a torus.
      names: What the fast and the slow network are called.
    """

    kind: Literal["torus", "nodes"]
    bandwidth: float
    latency: float
    launch: float
    slow_bandwidth: float
    slow_latency: float
    efficiency: float
    dims: int = 0
    ring_sizes: int = 0
    node_size: int = 0
    names: tuple[str, str] = ("ICI", "DCN")


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of device.

    Attributes:
      name: Its name in a topology, such as `v5p`.
      device_kind: `jax.Device.device_kind` of one; `PEAKS` matches it by a regular expression.
      flops: FLOP/s at peak by dtype.
      hbm_bytes: Bytes that a program can have on a device.
      hbm_bandwidth: Bytes a second between a device and its memory.
      network: How it reaches others.
      flops_efficiency: The share of the peak that large products reach.
      hbm_efficiency: The share of the memory's bandwidth that long reads and writes reach.
      clock: Cycles a second, 0 where it is not known.
      devices_per_chip: How many `jax.Device`s a chip is.
      max_devices: How many devices one slice, or a cluster, has at most.
      source: Where the numbers are from, and which are assumed.
    """

    name: str
    device_kind: str
    flops: Mapping[str, float]
    hbm_bytes: int
    hbm_bandwidth: float
    network: Network
    flops_efficiency: float
    hbm_efficiency: float
    clock: float
    source: str
    devices_per_chip: int = 1
    max_devices: int = 2**14

    @property
    def is_tpu(self) -> bool:
        """Whether it is a TPU, for which there is a compiler that needs none."""
        return self.network.kind == "torus"

    def peak(self, dtype: str) -> float:
        """FLOP/s at peak with operands of a dtype.

        Raises:
          ValueError: No peak is known for it.
        """
        if dtype not in self.flops:
            raise ValueError(
                f"chip {self.name}: no peak is known for dtype {dtype!r}, expected one of "
                f"{', '.join(self.flops)}."
            )
        return self.flops[dtype]


ASSUMED = (
    "; assumed: the shares of peak and bandwidths that are reached, latencies, time to start a "
    "collective"
)


def _peaks(device_kind: str) -> dict[str, float]:
    """The peaks of a kind of device by dtype, from `PEAKS`."""
    dtypes = {dtype for peak in PEAKS for dtype in peak.teraflops}
    found = {dtype: peak_flops(device_kind, dtype) for dtype in sorted(dtypes)}
    return {dtype: flops for dtype, flops in found.items() if flops is not None}


def _tpu(
    name: str,
    device_kind: str,
    *,
    usable_gib: float,
    hbm: float,
    ici: float,
    dims: int,
    dcn_gigabits: float,
    clock: float,
    max_devices: int,
    source: str,
    devices_per_chip: int = 1,
) -> Chip:
    """A TPU.

    `ici` is what the documents call bidirectional bandwidth of a chip, in GB/s: of its `2 * dims`
    links, both ways. `dcn_gigabits` is a chip's share of its host's network cards.
    """
    network = Network(
        kind="torus",
        bandwidth=ici * GIGA / (2 * dims) / 2 / devices_per_chip,
        latency=1 * MICRO,
        launch=5 * MICRO,
        slow_bandwidth=dcn_gigabits * GIGA / 8 / devices_per_chip,
        slow_latency=50 * MICRO,
        efficiency=0.9,
        dims=dims,
        # Of 2D tori only a full dimension of a pod is closed, of 3D ones those of whole cubes.
        ring_sizes=16 if dims == 2 else 4,
    )
    return Chip(
        name=name,
        device_kind=device_kind,
        flops=_peaks(device_kind),
        hbm_bytes=int(usable_gib * GIB),
        hbm_bandwidth=hbm * GIGA / devices_per_chip,
        network=network,
        flops_efficiency=0.85,
        hbm_efficiency=0.85,
        clock=clock * GIGA,
        devices_per_chip=devices_per_chip,
        max_devices=max_devices,
        source=f"{source}; links and rings: {SCALING_BOOK}{ASSUMED}",
    )


def _gpu(
    name: str,
    device_kind: str,
    *,
    gib: float,
    hbm: float,
    nvlink: float,
    nic_gigabits: float,
    clock: float,
    source: str,
    flops_efficiency: float = 0.7,
) -> Chip:
    """A GPU in nodes of eight with NVSwitch and a network card for each GPU.

    `nvlink` is what NVIDIA prints, in GB/s, both directions together. Of the memory, 2 GiB are left
    to the driver, to NCCL and to fragments.
    """
    network = Network(
        kind="nodes",
        bandwidth=nvlink * GIGA / 2,
        latency=1 * MICRO,
        launch=15 * MICRO,
        slow_bandwidth=nic_gigabits * GIGA / 8,
        slow_latency=5 * MICRO,
        efficiency=0.8,
        node_size=8,
        names=("NVLink", "InfiniBand"),
    )
    return Chip(
        name=name,
        device_kind=device_kind,
        flops=_peaks(device_kind),
        hbm_bytes=int((gib - 2) * GIB),
        hbm_bandwidth=hbm * TERA,
        network=network,
        flops_efficiency=flops_efficiency,
        hbm_efficiency=0.85,
        clock=clock * GIGA,
        source=f"{source}{ASSUMED}, and 2 GiB that a program cannot have",
    )


# What XLA's TPU compiler allows is read off its message when a program does not fit (libtpu
# 0.0.42): "exceeds available HBM (95.74G)". Clocks of TPUs are assumed.
CHIPS = (
    _tpu(
        "v4",
        "TPU v4",
        usable_gib=31.25,
        hbm=1228,
        ici=600,
        dims=3,
        dcn_gigabits=50,
        clock=1.05,
        max_devices=4096,
        source=TPU_DOCS + "v4 (32 GiB, of which 31.25 are assumed usable as on v6e); "
        "https://arxiv.org/abs/2304.01433 table 4; DCN assumed as v5p's",
    ),
    _tpu(
        "v5e",
        "TPU v5 lite",
        usable_gib=15.75,
        hbm=819,
        ici=400,
        dims=2,
        dcn_gigabits=25,
        clock=1.5,
        max_devices=256,
        source=TPU_DOCS + "v5e: 819 GB/s, ICI 400 GB/s, 2 x 100 Gbit/s for 8 chips",
    ),
    _tpu(
        "v5p",
        "TPU v5p",
        usable_gib=95.74,
        hbm=2765,
        ici=1200,
        dims=3,
        dcn_gigabits=50,
        clock=1.75,
        max_devices=6144,
        source=TPU_DOCS + "v5p: 2765 GB/s, ICI 1200 GB/s, DCN 50 Gbit/s a chip",
    ),
    _tpu(
        "v6e",
        "TPU v6 lite",
        usable_gib=31.25,
        hbm=1600,
        ici=800,
        dims=2,
        dcn_gigabits=100,
        clock=1.75,
        max_devices=256,
        source=TPU_DOCS + "v6e: 1600 GB/s, ICI 3200 Gbit/s taken as both ways together, 4 x 200 "
        "Gbit/s for 8 chips",
    ),
    _tpu(
        "tpu7x",
        "TPU7x",
        usable_gib=94.75,
        hbm=7380,
        ici=1200,
        dims=3,
        dcn_gigabits=100,
        clock=2.2,
        max_devices=2 * 9216,
        devices_per_chip=2,
        source=TPU_DOCS + "tpu7x: 192 GiB a chip of two devices, 1.25 GiB of each assumed "
        "not usable; from memory and not checked: 7380 GB/s, ICI 1200 GB/s, DCN 100 Gbit/s a chip",
    ),
    _gpu(
        "a100",
        "NVIDIA A100-SXM4-80GB",
        gib=80,
        hbm=2.039,
        nvlink=600,
        nic_gigabits=200,
        clock=1.41,
        flops_efficiency=0.8,
        source=NVIDIA + "a100: SXM 80GB; 200 Gbit/s a GPU as in DGX A100",
    ),
    _gpu(
        "h100",
        "NVIDIA H100 80GB HBM3",
        gib=80,
        hbm=3.35,
        nvlink=900,
        nic_gigabits=400,
        clock=1.83,
        source=NVIDIA + "h100: SXM; 400 Gbit/s a GPU as in DGX H100",
    ),
    _gpu(
        "h200",
        "NVIDIA H200",
        gib=141e9 / GIB,
        hbm=4.8,
        nvlink=900,
        nic_gigabits=400,
        clock=1.83,
        source=NVIDIA + "h200: SXM; 400 Gbit/s a GPU as in DGX H200",
    ),
    _gpu(
        "b200",
        "NVIDIA B200",
        gib=180e9 / GIB,
        hbm=8.0,
        nvlink=1800,
        nic_gigabits=400,
        clock=1.85,
        source="https://docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html: 1,440 "
        "GB and NVLink 14.4 TB/s for eight, 400 Gbit/s a GPU; 8 TB/s: " + NVIDIA + "dgx-b200",
    ),
)


def chip_named(name: str) -> Chip:
    """Looks up a chip.

    Args:
      name: Its name in a topology, such as `v5p` or `h100`.

    Returns:
      The chip.

    Raises:
      ValueError: There is none of that name; the message has those there are.
    """
    names = [chip.name for chip in CHIPS]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; the nearest one is {near[0]!r}" if near else ""
        raise ValueError(f"chip {name!r} is not known, expected one of {', '.join(names)}{hint}.")
    return CHIPS[names.index(name)]
