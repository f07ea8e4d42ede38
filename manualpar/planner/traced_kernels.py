"""Traces cuDNN's attention for GPUs that are not here.

JAX examines the GPU and the cuDNN of this process before it traces cuDNN's kernel, and has no
setting for another GPU. So `tracing_for` replaces JAX's checks, whose names JAX does not promise,
as long as a trace lasts. Only the process of a compiler (`manualpar.planner.compiler_worker`) does
so; no training does. If a version of JAX has other checks, the context refuses it.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax

from manualpar.layers.attention.devices import Device, planned_device

CUDNN_VERSION = 91_002  # 9.10.2, the first that takes a window and a mask together.


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
    asked.update(answers)
    try:
        with planned_device(device):
            yield
    finally:
        asked.update(own)


def _numbers(device: Device) -> tuple[int, ...]:
    return _version(device.compute_capability) if device.major else (0,)


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))
