"""Describes GPUs to XLA's compiler, which needs a description in place of a GPU.

The numbers are from XLA's own descriptions, in `xla/backends/gpu/target_config/specs` of
https://github.com/openxla/xla (Apache-2.0): `a100_sxm_80`, `h100_sxm`, `h200` and `b200`, each as
`.txtpb`. A description is a `GpuTargetConfigProto` in text form.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from manualpar.planner.hardware import Chip

# XLA checks these versions. A missing runtime version is an error in some versions of XLA
# (https://github.com/openxla/xla/issues/25919).
CUDA, CUDNN = (12, 9, 0), (9, 10, 2)
# XLA numbers dtypes by `PrimitiveType`.
BYTES_DTYPES = (2, 6, 19, 20, 23, 24, 25, 28, 29, 33, 35, 36)
F16, F32, F64, BF16, F4 = 10, 11, 12, 16, 32
S32, U32 = 4, 8


class GpuTarget(NamedTuple):
    """The numbers of a GPU from which XLA chooses tiles and estimates times.

    Attributes:
      cores: The number of streaming multiprocessors.
      fpus: The number of float32 units of a core.
      clock, matrix_clock: GHz of the scalar and of the matrix units.
      bandwidth: Bytes of the memory per second.
      l2, memory: Bytes of the cache and of the memory.
      shared, shared_optin: Bytes of shared memory of a core, and at most of a block.
      pcie: Bytes per second to the host.
      matrix_ops: Operations of a matrix unit in a cycle in bfloat16; 0 if XLA has no rates of the
        chip's units, and therefore estimates no times.
      scalar_half_ops: Operations of a scalar unit in a cycle, in 16 bits.
      matrix_ops_f64, matrix_ops_f4: Likewise for matrix units in these dtypes; 0 if there are none.
    """

    cores: int
    fpus: int
    clock: float
    bandwidth: int
    l2: int
    memory: int
    shared: int
    shared_optin: int
    pcie: int
    matrix_clock: float = 0.0
    matrix_ops: int = 0
    scalar_half_ops: int = 0
    matrix_ops_f64: int = 0
    matrix_ops_f4: int = 0

    @property
    def has_costs(self) -> bool:
        """Whether XLA can estimate the time of an instruction."""
        return self.matrix_ops > 0


_H100 = GpuTarget(
    cores=132,
    fpus=128,
    clock=1.98,
    bandwidth=3_352_320_000_000,
    l2=52_428_800,
    memory=84_942_979_072,
    shared=233_472,
    shared_optin=232_448,
    pcie=2**35,
    matrix_clock=1.8295201,
    matrix_ops=512,
    scalar_half_ops=2,
    matrix_ops_f64=32,
)
GPU_TARGETS: Mapping[str, GpuTarget] = {
    "a100": GpuTarget(
        cores=108,
        fpus=64,
        clock=1.41,
        bandwidth=2_039_040_000_000,
        l2=41_943_040,
        memory=85_100_068_864,
        shared=167_936,
        shared_optin=166_912,
        pcie=2**34,
    ),
    "h100": _H100,
    "h200": _H100._replace(bandwidth=4_800_000_000_000, memory=151_397_597_184),
    "b200": GpuTarget(
        cores=148,
        fpus=128,
        clock=1.965,
        bandwidth=7_672_320_000_000,
        l2=132_644_864,
        memory=191_514_411_008,
        shared=233_472,
        shared_optin=232_448,
        pcie=2**36,
        matrix_clock=1.8353101,
        matrix_ops=1024,
        scalar_half_ops=1,
        matrix_ops_f64=16,
        matrix_ops_f4=4096,
    ),
}


def describe_target(chip: Chip, target: GpuTarget) -> str:
    """Returns the description of a chip, in the text form of a `GpuTargetConfigProto`."""
    major, _, minor = chip.compute_capability.partition(".")
    device: dict[str, Any] = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": target.shared,
        "threads_per_core_limit": 2048,
        "core_count": target.cores,
        "fpus_per_core": target.fpus,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": target.bandwidth,
        "l2_cache_size": target.l2,
        "clock_rate_ghz": target.clock,
        "device_memory_size": target.memory,
        "shared_memory_per_block_optin": target.shared_optin,
        "cuda_compute_capability": {
            "major": major,
            "minor": minor,
            "feature_extension": "ACCELERATED_FEATURES" if chip.device.major > 8 else "NONE",
        },
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        **_rates(target),
        "device_vendor": '"NVIDIA Corporation"',
        "platform_version": f'"Compute Capability {chip.compute_capability}"',
        "device_address_bits": 64,
        "pcie_bandwidth": target.pcie,
        "ecc_enabled": "true",
        "name": f'"{chip.device_kind}"',
        "driver_version": '"13.0.0"',
        "runtime_version": _quoted(CUDA),
        "compile_time_toolkit_version": _quoted(CUDA),
        "dnn_version": _quoted(CUDNN),
        "device_interconnect_info": {"active_links": 18},
    }
    return _text(
        {
            "gpu_device_info": device,
            "platform_name": '"CUDA"',
            "dnn_version_info": _version(CUDNN),
            "runtime_version": _version(CUDA),
            "device_description_str": f'"{chip.device_kind}"',
        }
    )


def _rates(target: GpuTarget) -> dict[str, Any]:
    """Returns the speed of a core's scalar and matrix units, by dtype."""
    if not target.has_costs:
        return {}
    half = target.scalar_half_ops
    scalar = {S32: (64, 1), U32: (64, 1), F16: (128, half), F32: (128, 1), F64: (64, 1)}
    scalar[BF16] = (128, half)
    matrix = dict.fromkeys(BYTES_DTYPES, 2 * target.matrix_ops)
    matrix |= {F16: target.matrix_ops, BF16: target.matrix_ops, F32: target.matrix_ops // 2}
    matrix |= {F64: target.matrix_ops_f64, F4: target.matrix_ops_f4}

    def rate(dtype: int, clock: float, units: int, ops: int) -> dict[str, Any]:
        value = {"clock_rate_ghz": clock, "units_per_core": units, "ops_per_clock": ops}
        return {"key": dtype, "value": value}

    return {
        "scalar_unit_description": {
            "rate_infos": [rate(x, target.clock, *scalar[x]) for x in scalar]
        },
        "matrix_unit_description": {
            "rate_infos": [
                rate(x, target.clock if x == F64 else target.matrix_clock, 4, ops)
                for x, ops in matrix.items()
                if ops
            ]
        },
    }


def _version(numbers: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("major", "minor", "patch"), numbers, strict=True))


def _quoted(numbers: tuple[int, int, int]) -> str:
    return f'"{".".join(map(str, numbers))}"'


def _text(message: Mapping[str, Any]) -> str:
    """Writes a message as text: a dict is an inner message, and a list repeats its field."""
    lines = []
    for name, value in message.items():
        for each in value if isinstance(value, list) else [value]:
            is_message = isinstance(each, dict)
            lines.append(f"{name} {{\n{_text(each)}}}\n" if is_message else f"{name}: {each}\n")
    return "".join(lines)
