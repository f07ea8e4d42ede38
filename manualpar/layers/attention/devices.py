"""The device that attention is traced for, as the choice of an implementation sees it.

JAX examines the GPU and the cuDNN of this process before it traces cuDNN's kernel. So a process
without a GPU can trace the kernel only inside `tracing_for`, which answers for a planned GPU.
"""

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from manualpar.layers.boundaries import platform_traced_for

# The memory of a GPU whose allocator names no limit: the smallest GPUs for servers, from Ampere on.
ASSUMED_MEMORY = 16 * 2**30
CUDNN_VERSION = 91_002  # 9.10.2, the first that takes a window and a mask together.


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

    Inside `tracing_for` it is the planned device. Otherwise its platform is that of the enclosing
    mesh, and a GPU's numbers are those of this process's first GPU.
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
def tracing_for(device: Device) -> Iterator[None]:
    """Traces attention for a device that this process need not have.

    JAX's questions about the GPU and about cuDNN are answered for `device` and `CUDNN_VERSION`. Use
    it around the traces of programs for a planned mesh. JAX caches traces, so a function that was
    traced outside is not traced again.

    Raises:
      RuntimeError: This version of JAX asks other questions.
    """
    attend: Any = inspect.unwrap(jax.nn.dot_product_attention)
    kernel: Any = attend.__globals__.get("cudnn_dot_product_attention")
    asked = inspect.unwrap(kernel).__globals__ if kernel else {}
    answers: dict[str, Callable[..., Any]] = {
        "check_cudnn_version": lambda: CUDNN_VERSION,
        "check_compute_capability": lambda least: _numbers(device) >= _version(least),
        "is_cuda_compute_capability_equal": lambda one: _numbers(device) == _version(one),
    }
    if missing := sorted(answers.keys() - asked.keys()):
        raise RuntimeError(
            f"tracing_for: JAX {jax.__version__} has no {', '.join(missing)}, expected the checks "
            "of jax.nn.dot_product_attention that JAX 0.10 has."
        )
    own = {name: asked[name] for name in answers}
    token = _planned.set(device)
    asked.update(answers)
    try:
        yield
    finally:
        asked.update(own)
        _planned.reset(token)


def _numbers(device: Device) -> tuple[int, ...]:
    return _version(device.compute_capability) if device.major else (0,)


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))
