"""Chips and the networks between them, with the source of each number.

Peak FLOP/s come from `manualpar.inspect.throughput.PEAKS`. Every number of a `Chip` is
per `jax.Device`. A TPU7x chip is two devices, so each device has half of the chip's number.
Bandwidths are bytes per second in one direction. (Vendors mostly print the sum of both directions,
or bits.)

There are two kinds of networks. In a *torus* (TPU) every chip has two links for each dimension, to
its neighbours; slices, each a torus, are joined by the data center's network. In *nodes* (GPU) all
devices of a node reach one another at full speed, and each device has its own network card to the
other nodes.

`Chip.source` marks numbers that vendors do not print as "assumed": latencies, and the shares of a
bandwidth that large transfers reach. The assumed numbers are round, chosen before any comparison
with a measurement, and the same for all chips of a kind.

Two kinds of numbers are fitted to published speeds (`python -m benchmarks.calibration`): the share
of the peak that products reach, by chip (`FITTED_PRODUCTS`), and the share that attention kernels
reach, by kind of network (`FITTED_ATTENTION`). Half of the published speeds were left out of the
fit, and `docs/scale.md` gives the errors of the estimates for this half. A chip without a published
speed keeps a round number for its products, and its `calibration` says so.

Attention on GPUs has two speeds. `CUDNN` has the speed of single kernels on an H200. A program that
is traced or compiled gets it, because its kernels have known sizes. `FITTED_ATTENTION` has the mean
share in complete steps of other frameworks, from which a fit can separate attention only roughly:
the halves give 0.40 and 0.23. The formula and the stages of a pipeline get it. With `CUDNN` in
the formula the published speeds are estimated no better (3.7% in place of 3.8% on average in
the fitted half), and rows with pipelines and split sequences would decide about the share alone.
The search of a plan traces its best layouts again, so its table has the first speed.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jax.extend.core import Jaxpr
from jax.sharding import AbstractDevice

from manualpar.core.tracing.jaxprs import inner_jaxprs
from manualpar.core.tracing.scopes import (
    PRODUCTS_COMPUTED,
    PRODUCTS_COUNTED,
    blocks_computed,
)
from manualpar.errors import suggest
from manualpar.inspect.compiled import Instruction, Instructions, array_bytes, arrays
from manualpar.inspect.flops import flops_of, is_narrow, product_dtype, without_format
from manualpar.inspect.throughput import PEAKS, peak_flops
from manualpar.layers.attention.causal_attention import Device

GIGA, GIB, MICRO = 1e9, 2**30, 1e-6
TPU_DOCS = "https://docs.cloud.google.com/tpu/docs/"
NVIDIA = "https://www.nvidia.com/en-us/data-center/"
SCALING_BOOK = "https://jax-ml.github.io/scaling-book/tpus/"
ASSUMED = (
    "; assumed: the shares of bandwidths that are reached, latencies, time to start a collective"
)
FITTED_PRODUCTS = {
    "v5e": 0.789,
    "v5p": 0.902,
    "v6e": 0.628,
    "a100": 0.642,
    "h100": 0.704,
    "h100-500w": 0.452,
}
FITTED_ATTENTION = {"torus": 0.444, "nodes": 0.401}
# Chip -> chip with the same die, and therefore the same speed of products.
SAME_PRODUCTS = {"h200": "h100"}


class KernelSpeed(NamedTuple):
    """How long attention takes on GPUs, forward and backward, fitted to measurements.

    Attributes:
      share: The share of the peak that the seven products of a causal mask or a window reach.
      number_bytes: Bytes to and from memory for each number of the queries, beyond these products.
      mask_bytes: Likewise for each score on one side of the diagonal, if there is a mask in memory.
      start: Seconds beyond these, for both passes together.
    """

    share: float
    number_bytes: float
    mask_bytes: float
    start: float


# The share that products reach where they were timed alone.
MEASURED_PRODUCTS = {"h200": 0.743}
# Half of the kernels that were timed on an H200 give these numbers, and the other half tests them
# (`python -m benchmarks.measured_kernels`).
CUDNN = KernelSpeed(share=0.637, number_bytes=82.7, mask_bytes=21.1, start=84e-6)
# How much faster products in float8 are than in 16 bits on an H200, whose peak is twice as high:
# they reach less of it. Products in float8 and int8 of other chips are assumed to reach as little.
# A chip without a peak for a narrow dtype multiplies such operands as bfloat16.
FLOAT8_GAIN = 1.79
# Passes over what rounding to a narrow dtype reads and writes, and bytes per second that XLA reads
# and writes when it transposes codes in float8, both on an H200. The second is far below the
# memory's bandwidth, so it is the same for all GPUs that need it, of this compute capability.
ROUNDED_PASSES = 2.35
TRANSPOSED = 0.377e12
TRANSPOSES_FLOAT8 = ("9.0",)
# Passes over what the products of attention in blocks read and write, in place of the one pass
# that elementwise operations around other products take.
BLOCK_PASSES = 1.56
# Passes over the values that a loop over layers keeps for its backward pass: they are copied into a
# stack and out of it. Fitted to the compiled plan of one model without remat; with the policy
# `dots` it tests the number.
STACK_PASSES = 3.0
# The kernel of this package has not been timed. It computes nine products where seven count.
TRITON_SHARE = 0.4
ASSUMED_PRODUCTS = 0.7


@dataclasses.dataclass(frozen=True)
class Network:
    """How devices of a kind reach one another.

    Attributes:
      bandwidth: Bytes per second in one direction: of one link of a torus, or of a device to all
        other devices of its node together.
      latency: Seconds from a device to the next.
      launch: Seconds to start a collective of any size.
      slow_bandwidth: Bytes per second in one direction from each device to other slices or nodes.
      slow_latency: Seconds from one slice or node to the next.
      efficiency: The share of a bandwidth that a large transfer reaches.
      dims: Dimensions of the torus, 0 for nodes.
      node_size: Devices of a node; 0 in a torus.
      names: The names of the fast and the slow network.
    """

    kind: Literal["torus", "nodes"]
    bandwidth: float
    latency: float
    launch: float
    slow_bandwidth: float
    slow_latency: float
    efficiency: float
    dims: int = 0
    node_size: int = 0
    names: tuple[str, str] = ("ICI", "DCN")


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of device.

    Attributes:
      name: Its name in a topology, such as `v5p`.
      device_kind: Its `jax.Device.device_kind`, which `PEAKS` matches by a regular expression.
      flops: Peak FLOP/s by dtype.
      hbm_bytes: The bytes of the device's memory that a program can use.
      hbm_bandwidth: Bytes per second between a device and its memory.
      flops_efficiency: The share of the peak that large products reach.
      attention_efficiency: The share of the peak that a fused kernel of attention reaches. This
        counts only the operations that a causal mask leaves, of two products forward and four
        backward.
      hbm_efficiency: The share of the memory's bandwidth that long reads and writes reach.
      clock: Cycles per second; 0 for GPUs, because only the compiler for TPUs counts cycles.
      source: The source of the numbers, and which of them are assumed.
      calibration: The published speeds to which the efficiencies were fitted, in words; "" if none.
      compute_capability: An NVIDIA GPU's, such as `9.0`; "" for TPUs.
      devices_per_chip: The number of `jax.Device`s of a chip.
      max_devices: The largest number of devices in a slice, or in a cluster.
    """

    name: str
    device_kind: str
    flops: Mapping[str, float]
    hbm_bytes: int
    hbm_bandwidth: float
    network: Network
    flops_efficiency: float
    attention_efficiency: float
    hbm_efficiency: float
    clock: float
    source: str
    calibration: str = ""
    compute_capability: str = ""
    devices_per_chip: int = 1
    max_devices: int = 2**14

    @property
    def is_tpu(self) -> bool:
        """Whether the chip is a TPU; XLA can compile for TPUs without a device."""
        return self.network.kind == "torus"

    def product_rate(self, dtype: str) -> float:
        """Returns the FLOP/s that products reach; raises `ValueError` if no peak is known."""
        if is_narrow(dtype):
            wide, narrow = self.peak("bfloat16"), self.flops.get(without_format(dtype), 0.0)
            gain = max(1.0, FLOAT8_GAIN / 2 * narrow / wide)
            return gain * self.product_rate("bfloat16")
        return self.peak(dtype) * self.flops_efficiency

    def multiplies_in(self, dtype: str) -> bool:
        """Returns whether the chip has products of a narrow dtype."""
        return without_format(dtype) in self.flops

    @property
    def abstract_device(self) -> AbstractDevice:
        """The device that a plan without a compiler traces programs for.

        On each platform strategies shard other dims, and layers and experts run in other ways. But
        a kernel would replace attention in blocks, from which FLOPs are read. So the number of
        cores, which every TPU has, is left out.
        """
        return AbstractDevice(self.device_kind, None, "tpu" if self.is_tpu else "gpu")

    @property
    def device(self) -> Device:
        """The chip, as the choice of attention sees it."""
        return Device("tpu" if self.is_tpu else "gpu", self.compute_capability, self.hbm_bytes)

    def peak(self, dtype: str) -> float:
        """Returns the peak FLOP/s for operands of a dtype; raises `ValueError` if unknown."""
        if dtype not in self.flops:
            raise ValueError(
                f"chip {self.name}: no peak is known for dtype {dtype!r}, expected one of "
                f"{', '.join(self.flops)}."
            )
        return self.flops[dtype]


# ICI is a chip's bidirectional bandwidth in the documents, the sum over all its links and both
# directions. DCN is a chip's share of its host's network cards. The usable memory is from the
# message of XLA's TPU compiler about a program that does not fit (libtpu 0.0.42): "exceeds
# available HBM (95.74G)". Clocks are assumed. name: kind, usable GiB, HBM GB/s, ICI GB/s, dims,
# DCN Gbit/s, GHz, devices a chip, largest slice
TPUS = {
    "v4": ("TPU v4", 31.25, 1228, 600, 3, 50, 1.05, 1, 4096),
    "v5e": ("TPU v5 lite", 15.75, 819, 400, 2, 25, 1.5, 1, 256),
    "v5p": ("TPU v5p", 95.74, 2765, 1200, 3, 50, 1.75, 1, 6144),
    "v6e": ("TPU v6 lite", 31.25, 1600, 800, 2, 100, 1.75, 1, 256),
    "tpu7x": ("TPU7x", 94.75, 7380, 1200, 3, 100, 2.2, 2, 2 * 9216),
}
# NVLink is NVIDIA's number, the sum of both directions. Each GPU of a node has a network card.
# name: kind, GiB, HBM GB/s, NVLink GB/s, network card Gbit/s, compute capability
GPUS = {
    "a100": ("NVIDIA A100-SXM4-80GB", 80, 2039, 600, 200, "8.0"),
    "h100": ("NVIDIA H100 80GB HBM3", 80, 3350, 900, 400, "9.0"),
    "h100-500w": ("NVIDIA H100 96GB HBM2e", 96, 2400, 900, 400, "9.0"),
    "h200": ("NVIDIA H200", 141e9 / GIB, 4800, 900, 400, "9.0"),
    "b200": ("NVIDIA B200", 180e9 / GIB, 8000, 1800, 400, "10.0"),
}
SOURCES = {
    "v4": TPU_DOCS + "v4 (32 GiB, of which 31.25 are assumed usable as on v6e); "
    "https://arxiv.org/abs/2304.01433 table 4; DCN assumed as v5p's",
    "v5e": TPU_DOCS + "v5e: 819 GB/s, ICI 400 GB/s, 2 x 100 Gbit/s for 8 chips",
    "v5p": TPU_DOCS + "v5p: 2765 GB/s, ICI 1200 GB/s, DCN 50 Gbit/s a chip",
    "v6e": TPU_DOCS + "v6e: 1600 GB/s, ICI 3200 Gbit/s taken as both ways together, 4 x 200 "
    "Gbit/s for 8 chips",
    "tpu7x": TPU_DOCS + "tpu7x: 192 GiB a chip of two devices, 1.25 GiB of each assumed not "
    "usable; from memory and not checked: 7380 GB/s, ICI 1200 GB/s, DCN 100 Gbit/s a chip",
    "a100": NVIDIA + "a100: SXM 80GB; 200 Gbit/s a GPU as in DGX A100",
    "h100": NVIDIA + "h100: SXM; 400 Gbit/s a GPU as in DGX H100",
    "h100-500w": "https://github.com/pytorch/torchtitan/blob/"
    "31a17bfdb70bab6f62a13d21816a5339b911d6e3/benchmarks/llama3_h100_202412_torchtitan.md: 96 GB, "
    "2.4 TB/s, 500 of 700 W, 400 Gbit/s a GPU",
    "h200": NVIDIA + "h200: SXM; 400 Gbit/s a GPU as in DGX H200",
    "b200": "https://docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html: 1,440 GB "
    "and NVLink 14.4 TB/s for eight, 400 Gbit/s a GPU; 8 TB/s: " + NVIDIA + "dgx-b200",
}


def _tpu(name: str) -> Chip:
    kind, gib, hbm, ici, dims, dcn, clock, devices_per_chip, max_devices = TPUS[name]
    network = Network(
        kind="torus",
        bandwidth=ici * GIGA / (2 * dims) / 2 / devices_per_chip,
        latency=1 * MICRO,
        launch=5 * MICRO,
        slow_bandwidth=dcn * GIGA / 8 / devices_per_chip,
        slow_latency=50 * MICRO,
        efficiency=0.9,
        dims=dims,
    )
    return Chip(
        name=name,
        device_kind=kind,
        flops=_peaks(kind),
        hbm_bytes=int(gib * GIB),
        hbm_bandwidth=hbm * GIGA / devices_per_chip,
        network=network,
        **_shares(name, "torus"),
        clock=clock * GIGA,
        source=f"{SOURCES[name]}; links and rings: {SCALING_BOOK}{ASSUMED}",
        devices_per_chip=devices_per_chip,
        max_devices=max_devices,
    )


def _gpu(name: str) -> Chip:
    kind, gib, hbm, nvlink, card, capability = GPUS[name]
    network = Network(
        kind="nodes",
        bandwidth=nvlink * GIGA / 2,
        latency=1 * MICRO,
        launch=15 * MICRO,
        slow_bandwidth=card * GIGA / 8,
        slow_latency=5 * MICRO,
        efficiency=0.8,
        node_size=8,
        names=("NVLink", "InfiniBand"),
    )
    return Chip(
        name=name,
        device_kind=kind,
        flops=_peaks(kind),
        hbm_bytes=int((gib - 2) * GIB),  # The driver, NCCL and fragments take 2 GiB.
        hbm_bandwidth=hbm * GIGA,
        network=network,
        **_shares(name, "nodes"),
        clock=0.0,
        source=f"{SOURCES[name]}{ASSUMED}, and 2 GiB that a program cannot have",
        compute_capability=capability,
    )


def _shares(name: str, kind: str) -> dict[str, Any]:
    """Returns a chip's efficiencies, and a text about the speeds to which they were fitted."""
    twin = SAME_PRODUCTS.get(name, name)
    found = "attention on published speeds of chips of its kind"
    if name in MEASURED_PRODUCTS:
        found = f"products on products that were timed on {name}, {found}"
    elif twin in FITTED_PRODUCTS:
        found = f"products on published speeds of {twin}, {found}"
    else:
        found = f"{found}, products on no speeds: {ASSUMED_PRODUCTS:.0%} of the peak is assumed"
    return {
        "flops_efficiency": MEASURED_PRODUCTS.get(
            name, FITTED_PRODUCTS.get(twin, ASSUMED_PRODUCTS)
        ),
        "attention_efficiency": FITTED_ATTENTION[kind],
        "hbm_efficiency": 0.85,
        "calibration": f"{found} (python -m benchmarks.calibration)",
    }


def _peaks(device_kind: str) -> dict[str, float]:
    dtypes = {dtype for peak in PEAKS for dtype in peak.teraflops}
    found = {dtype: peak_flops(device_kind, dtype) for dtype in sorted(dtypes)}
    return {dtype: flops for dtype, flops in found.items() if flops is not None}


CHIPS = (*map(_tpu, TPUS), *map(_gpu, GPUS))


def chip_named(name: str) -> Chip:
    """Returns the chip of a name such as `v5p`; for an unknown name, raises a `ValueError`."""
    chips = {chip.name: chip for chip in CHIPS}
    if name not in chips:
        near = suggest(name, chips)
        raise ValueError(f"chip {name!r} is not known, expected one of {', '.join(chips)}{near}.")
    return chips[name]


# -------------------------------------------------------------------------------------------------
# Times kernels of Pallas, for which XLA's compilers estimate no cycles.
#
# The traced program gives the number of operations in one run of a kernel
# (`manualpar.inspect.flops`), and the compiled program gives the number of runs. A kernel is
# identified in both programs by its name, the shapes of its operands, and the number of blocks of
# attention scores that it computes. A kernel reaches a share of the chip's peak, unless reading
# and writing its bytes takes longer.


TARGETS = ("tpu_custom_call", "__gpu$xla.gpu.triton")


class Kernel(NamedTuple):
    """A kernel of a traced program.

    Attributes:
      shapes: The shapes of the kernel's operands on one device.
      blocks: The number of blocks of attention scores that the kernel computes; `None` if the scope
        does not give this number.
      flops: The number of operations in one run.
      dtype: The dtype in which the kernel multiplies.
    """

    name: str
    shapes: Sequence[Sequence[int]]
    blocks: int | None
    flops: int
    dtype: str

    @property
    def key(self) -> tuple[Any, ...]:
        """The properties that identify the compiled instruction of the kernel."""
        return self.name, tuple(map(tuple, self.shapes)), self.blocks


def kernels_in(jaxpr: Jaxpr, scope: str = "") -> Iterator[Kernel]:
    """Yields the kernels of a traced program, except those with an unknown number of operations."""
    for eqn in jaxpr.eqns:
        inside = f"{scope}/{eqn.source_info.name_stack}"
        if eqn.primitive.name != "pallas_call":
            for _, inner in inner_jaxprs(eqn):
                yield from kernels_in(inner, inside)
        elif flops := flops_of(eqn, inside):
            operands: Any = [x.aval for x in eqn.invars]
            shapes = [operand.shape for operand in operands]
            name, blocks = eqn.params["name"], blocks_computed(inside)
            yield Kernel(name, shapes, blocks, flops, product_dtype(eqn))


def kernel_name(instruction: Instruction) -> str:
    """Returns the name of the kernel that an instruction runs, as in `jvp(NAME)/pallas_call`."""
    scope = instruction.op_name.removesuffix("/pallas_call").rpartition("/")[2]
    return scope.rpartition("(")[2].rstrip(")")


def cudnn_kernel_seconds(
    chip: Chip, dtype: str, *, products: int, numbers: int, pairs: float, masked: float
) -> float:
    """Returns the time of a run of cuDNN's attention, with `numbers` numbers in its queries.

    Args:
      products: The products of the run: 2 forward, 5 backward.
      pairs: How many keys a query sees, on average.
      masked: How many scores the kernel reads a mask for; 0 without a mask in memory.
    """
    share = products / PRODUCTS_COMPUTED
    flops = PRODUCTS_COMPUTED * 2 * numbers * pairs
    moved = CUDNN.number_bytes * numbers + CUDNN.mask_bytes * masked
    in_all = flops / (chip.peak(dtype) * CUDNN.share) + moved / chip.hbm_bandwidth + CUDNN.start
    return share * in_all


def kernel_efficiency(chip: Chip) -> float:
    """Returns the share of the peak that a kernel reaches, counting all its operations."""
    return min(1.0, chip.attention_efficiency * PRODUCTS_COMPUTED / PRODUCTS_COUNTED)


def kernel_clock(
    kernels: Iterable[Kernel], chip: Chip
) -> Callable[[Instruction, Instructions], float | None]:
    """Builds a function that returns the seconds of an instruction if it runs one of `kernels`."""
    kernels_by_key = {kernel.key: kernel for kernel in kernels}

    def seconds(instruction: Instruction, computation: Instructions) -> float | None:
        if instruction.target not in TARGETS:
            return None
        shapes_of_operands = (computation[name].shape for name in instruction.operands)
        operands = [array for shape in shapes_of_operands for array in arrays(shape)]
        shapes = tuple(shape for _, shape in operands)
        blocks = blocks_computed(instruction.op_name)
        kernel = kernels_by_key.get((kernel_name(instruction), shapes, blocks))
        if kernel is None:
            return None
        in_memory = sum(array_bytes(*x) for x in (*operands, *arrays(instruction.shape)))
        share = kernel_efficiency(chip) if chip.is_tpu else TRITON_SHARE
        return max(
            kernel.flops / (chip.peak(kernel.dtype) * share),
            in_memory / (chip.hbm_bandwidth * chip.hbm_efficiency),
        )

    return seconds
