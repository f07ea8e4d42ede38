"""Simulated devices: a CPU that passes for several, so that every strategy runs everywhere."""

import os

import jax

DEFAULT_COUNT = 8


def simulate_devices(count: int | None) -> None:
    """Chooses the devices of this process; call it before anything has asked jax for one.

    Args:
      count: How many CPU devices to simulate, whatever else the machine has. `None` simulates eight
        where the CPU would be the only device there is. It leaves accelerators alone, and anybody
        who has already said how many CPU devices to make, by `JAX_NUM_CPU_DEVICES` or
        `--xla_force_host_platform_device_count` in `XLA_FLAGS`.

    Raises:
      RuntimeError: jax already has its devices.
    """
    if count is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    elif not _cpu_devices_chosen():
        # Only the CPU's client reads this, so GPUs and TPUs stay the default where they exist.
        jax.config.update("jax_num_cpu_devices", DEFAULT_COUNT)


def _cpu_devices_chosen() -> bool:
    """Whether the environment or the program has said how many devices the CPU is to be."""
    flag = "xla_force_host_platform_device_count"
    return flag in os.environ.get("XLA_FLAGS", "") or jax.config.values["jax_num_cpu_devices"] != -1


def describe_mesh(mesh: jax.sharding.Mesh) -> str:
    """A mesh in a line, such as `data=8 on 8 simulated cpu devices`."""
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    device = mesh.devices.flat[0]
    simulated = "simulated " if device.platform == "cpu" and mesh.size > 1 else ""
    plural = "device" if mesh.size == 1 else "devices"
    return f"{axes} on {mesh.size} {simulated}{device.device_kind.lower()} {plural}"
