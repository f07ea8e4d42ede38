"""Simulates several devices on one CPU, so that every strategy can run on every machine."""

import os

import jax

from manualpar.core.mesh.mesh import how_to_simulate
from manualpar.system.storage.compilation_cache import check_compilation_cache

DEFAULT_COUNT = 8
# The most devices to simulate. Each simulated device needs a thread, and a machine can run some
# tens of thousands of threads.
MOST = 4096


def simulate_devices(count: int | None, *, force: bool = False) -> None:
    """Chooses the devices of this process; call this function before any code uses a JAX device.

    Args:
      count: The number of CPU devices to simulate, which are used even if the machine has GPUs or
        TPUs. With `None`, a machine without GPUs and TPUs simulates `DEFAULT_COUNT` devices, unless
        `JAX_NUM_CPU_DEVICES`, or `--xla_force_host_platform_device_count` in `XLA_FLAGS`, is set.
      force: Whether `count` may be more than `MOST`.

    Raises:
      ValueError: `count` is more than `MOST`.
      RuntimeError: JAX already has other devices. The message explains how to start again with the
        right devices.
    """
    check_compilation_cache()
    if count is not None and count > MOST and not force:
        raise ValueError(
            f"--devices={count}: expected at most {MOST}, because each simulated device takes a "
            "thread and memory; simulate fewer, or add --force."
        )
    if count is None:
        chosen = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
        # This setting affects only CPU devices, so GPUs and TPUs stay the default if there are any.
        if not chosen and jax.config.values["jax_num_cpu_devices"] == -1:
            _choose(DEFAULT_COUNT, accepts_accelerators=True)
        return
    _choose(count, accepts_accelerators=False)
    jax.config.update("jax_platforms", "cpu")


def _choose(count: int, *, accepts_accelerators: bool) -> None:
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX has already made its devices.
        is_cpu = jax.devices()[0].platform == "cpu"
        if jax.local_device_count() == count if is_cpu else accepts_accelerators:
            return
        raise RuntimeError(
            f"simulate_devices: it is too late for {count} devices. "
            f"{how_to_simulate(count * jax.process_count())}"
        ) from None


def describe_mesh(mesh: jax.sharding.Mesh) -> str:
    """Describes a mesh in a line, such as `data=8 on 8 simulated cpu devices`."""
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    device = mesh.devices.flat[0]
    simulated = "simulated " if device.platform == "cpu" and mesh.size > 1 else ""
    plural = "device" if mesh.size == 1 else "devices"
    return f"{axes} on {mesh.size} {simulated}{device.device_kind.lower()} {plural}"
