"""Makes meshes, and checks the sizes of their axes and the number of devices."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from manualpar.core.mesh.mesh_order import arrange_devices, check_order

# Devices, devices of a kind without a device, the number of devices, or `None` for all devices.
AnyDevices: TypeAlias = Sequence[jax.Device] | Sequence[AbstractDevice] | int | None


def make_mesh(
    axes: Mapping[str, int],
    devices: Sequence[jax.Device] | None = None,
    *,
    order: Sequence[str] = (),
) -> Mesh:
    """Builds a mesh for `shard_map` from axis names and sizes.

    ```python
    make_mesh({"data": -1})                # all devices along one axis
    make_mesh({"replica": 2, "data": -1})  # two groups of half the devices each
    ```

    With two processes, each process has one replica of the second mesh; see
    `manualpar.core.mesh.mesh_order`.

    Args:
      axes: The size of each axis. One size may be -1, which stands for the rest of the devices.
      devices: The devices to use, by default all of `jax.devices()`. If no size is -1, the mesh may
        have fewer devices: the first devices are used.
      order: The names of all axes, the axis on the slowest links first. By default: replica, stage,
        data, data_minor, context, expert, model. An axis with another name keeps its position.

    Returns:
      A `jax.sharding.Mesh` whose axes are all of `AxisType.Auto`. With several hosts, the first
      axes of the order span hosts and the others stay within a host, as far as the sizes allow. In
      a slice of TPUs each axis is a ring of neighbours if possible.

    Raises:
      ValueError: A size is neither positive nor -1, more than one size is -1, the sizes do not fit
        the devices, or the order does not name the mesh's axes. Without `devices`, also: a process
        would have no device in the mesh, or the number of CPU devices was set after JAX had
        started.
      TypeError: A name is not a string or a size is not an integer.
    """
    uses_all_processes = devices is None
    devices = list(jax.devices() if devices is None else devices)
    if uses_all_processes:
        _check_enough(axes, devices)
    sizes = _fill_sizes("make_mesh", axes, len(devices))
    used = devices[: math.prod(sizes)]
    idle = {d.process_index for d in devices} - {d.process_index for d in used}
    if uses_all_processes and idle:
        raise ValueError(
            f"make_mesh: axes={dict(axes)} uses {len(used)} of {len(devices)} devices, none "
            f"of them in process {min(idle)}; expected devices of every process. Use -1 "
            "for the rest of the devices, or start fewer processes."
        )
    check_order("make_mesh: order", axes, order)
    array = arrange_devices(dict(zip(axes, sizes, strict=True)), used, order)
    return Mesh(array, tuple(axes), axis_types=(AxisType.Auto,) * len(sizes))


def abstract_mesh(
    axes: Mapping[str, int], num_devices: int, device: AbstractDevice | None = None
) -> AbstractMesh:
    """Builds a mesh without devices, on which a program can be traced but not run.

    Args:
      axes: As in `make_mesh`.
      num_devices: The number of devices.
      device: The kind of the devices, from which programs choose shards and kernels; `None` if it
        is not known.

    Returns:
      A `jax.sharding.AbstractMesh` whose axes are all of `AxisType.Auto`.

    Raises:
      ValueError: A size is neither positive nor -1, more than one size is -1, or the sizes do not
        fit the devices.
      TypeError: A name is not a string or a size is not an integer.
    """
    sizes = _fill_sizes("abstract_mesh", axes, num_devices)
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes), tuple(axes), axis_types=types, abstract_device=device)


def mesh_of(
    axes: Mapping[str, int], devices: AnyDevices, *, order: Sequence[str] = ()
) -> Mesh | AbstractMesh:
    """Builds a mesh of devices, or an abstract mesh if they are abstract or only a number.

    `axes` and `order` are as in `make_mesh`, which also raises the errors.
    """
    if isinstance(devices, int):
        return abstract_mesh(axes, devices)
    known: Any = devices or jax.devices()
    if isinstance(known[0], AbstractDevice):
        return abstract_mesh(axes, len(known), known[0])
    return make_mesh(axes, known, order=order)


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """Returns the platform of a mesh's devices, such as `"gpu"`; `""` if it is not known."""
    device = mesh.abstract_mesh.abstract_device
    return device.platform if device else ""


def _fill_sizes(function: str, axes: Mapping[str, int], num_devices: int) -> list[int]:
    """Returns the sizes of the axes, with -1 replaced; refuses sizes that do not fit."""
    sizes = list(axes.values())
    if not axes:
        raise ValueError(
            f"{function}: axes is empty, expected at least one axis such as {{'data': -1}}."
        )
    for name, size in axes.items():
        if not isinstance(name, str) or isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(
                f"{function}: axes has {name!r}: {size!r}, expected a name with an integer size."
            )
        if size < 1 and size != -1:
            raise ValueError(
                f"{function}: axis {name!r} has size {size}, expected a positive size or -1 for "
                "the rest of the devices."
            )
    if sizes.count(-1) > 1:
        raise ValueError(
            f"{function}: axes={dict(axes)} has more than one -1; fix all sizes but one."
        )
    fixed = math.prod(size for size in sizes if size != -1)
    if -1 in sizes:
        if num_devices % fixed:
            raise ValueError(
                f"{function}: axes={dict(axes)} has sizes with the product {fixed}, expected a "
                f"divisor of the number of devices, {num_devices}. Choose sizes whose product "
                f"divides {num_devices}."
            )
        sizes[sizes.index(-1)] = num_devices // fixed
    elif fixed > num_devices:
        raise ValueError(
            f"{function}: axes={dict(axes)} needs {fixed} devices, got {num_devices}. Use smaller "
            "sizes, or -1 for the rest of the devices."
        )
    return sizes


def _check_enough(axes: Mapping[str, int], devices: Sequence[jax.Device]) -> None:
    """Refuses axes if JAX has fewer devices than the axes or the environment ask for."""
    sizes = [size for size in axes.values() if isinstance(size, int) and size >= -1]
    if -1 not in sizes:
        needed, reason = math.prod(sizes), "needs"
        mend = "use smaller sizes, or -1 for the rest of the devices"
    elif devices[0].platform == "cpu":  # The number of CPU devices counts only on CPUs.
        needed = (cpu_devices_asked_for() or 0) * jax.process_count()
        reason = "takes all devices, and the environment asks for"
        mend = "pass devices=jax.devices() to use the devices that JAX has"
    else:
        return
    if needed > len(devices):
        raise ValueError(
            f"make_mesh: axes={dict(axes)} {reason} {needed} devices, got {len(devices)}. "
            f"{how_to_simulate(needed)} Or {mend}."
        )


def cpu_devices_asked_for() -> int | None:
    """Returns the number of CPU devices that this process asks for, `None` if it asks for none.

    Reads JAX's config, then `XLA_FLAGS`, then `JAX_NUM_CPU_DEVICES`. An environment variable counts
    even if it was set after JAX had read it.
    """
    count: int = jax.config.values["jax_num_cpu_devices"]
    if count != -1:
        return count
    flags = os.environ.get("XLA_FLAGS", "")
    found = re.search(r"--xla_force_host_platform_device_count=(\d+)", flags)
    text = found[1] if found else os.environ.get("JAX_NUM_CPU_DEVICES", "")
    return int(text) if text.isdigit() else None


def how_to_simulate(count: int) -> str:
    """Writes, for messages, how many devices JAX has, and how to simulate `count` of them."""
    devices = jax.devices()
    plural = "device" if len(devices) == 1 else "devices"
    each = -(-count // jax.process_count())
    lines = f"jax.config.update('jax_num_cpu_devices', {each})"
    if devices[0].platform != "cpu":
        lines = f"jax.config.update('jax_platforms', 'cpu') and {lines}"
    return (
        f"JAX has started with {len(devices)} {devices[0].platform} {plural}, which "
        f"cannot be changed. To simulate {each}, restart the process (in a notebook, the kernel) "
        f"and run this first, before anything makes an array or asks for a device: {lines}."
    )
