"""The device that attention is traced for, as the choice of an implementation sees it."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

import jax

from manualpar.layers.boundaries import platform_traced_for

# The memory of a GPU whose allocator names no limit: the smallest GPUs for servers, from Ampere on.
ASSUMED_MEMORY = 16 * 2**30


class Device(NamedTuple):
    """The properties of a device from which an implementation of attention is chosen.

    Attributes:
      platform: JAX's name, such as `"tpu"` or `"gpu"`; `""` if no device is known.
      compute_capability: An NVIDIA GPU's, such as `"9.0"`; `""` for others.
      memory_bytes: The bytes that programs can use on an NVIDIA GPU; 0 for others.
    """

    platform: str
    compute_capability: str = ""
    memory_bytes: int = 0

    @property
    def major(self) -> int:
        """The major number of the compute capability; 0 if the device is no NVIDIA GPU."""
        major = self.compute_capability.partition(".")[0]
        return int(major) if major.isdecimal() else 0


_planned: contextvars.ContextVar[Device | None] = contextvars.ContextVar("_planned", default=None)


def device_traced_for() -> Device:
    """Returns the device for which the code is traced.

    Inside `planned_device` it is the planned device. Otherwise its platform is that of the
    enclosing mesh, and a GPU's numbers are those of this process's first GPU.
    """
    if planned := _planned.get():
        return planned
    platform = platform_traced_for()
    if platform not in ("gpu", None) or jax.default_backend() != "gpu":
        return Device(platform or "")
    gpu = jax.local_devices()[0]
    memory = (gpu.memory_stats() or {}).get("bytes_limit", ASSUMED_MEMORY)
    return Device("gpu", str(getattr(gpu, "compute_capability", "")), memory)


@contextlib.contextmanager
def planned_device(device: Device) -> Iterator[None]:
    """Chooses attention for a device that this process need not have.

    JAX itself still asks for the GPU and the cuDNN of this process before it traces cuDNN's kernel,
    see `manualpar.planner.traced_kernels`.
    """
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)
