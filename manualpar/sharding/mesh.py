"""Meshes, built for the hosts that the devices are on.

With several processes the major axes go across *hosts* and the others stay within, where the sizes
allow it. A host is what a slow network connects to others: what JAX calls a slice where there are
several, else a process. One slice of TPUs is one host, for its own network joins its machines.
"""

import collections
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh


def make_mesh(axes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds a mesh for `shard_map` from axis names and sizes.

    ```python
    make_mesh({"data": -1})                # all devices along one axis
    make_mesh({"replica": 2, "data": -1})  # two groups of half the devices each
    ```

    In two processes the second mesh has one replica on each; `describe_hosts` says what became of
    the axes.

    Args:
      axes: The size of each axis, the major one first. One size may be -1: the rest of the devices.
      devices: The devices to use, by default all of `jax.devices()`. With no -1, the sizes may ask
        for fewer than there are: the first ones are used.

    Returns:
      A `jax.sharding.Mesh` whose axes are all of `AxisType.Auto`, laid out by `jax.make_mesh` for
      the devices' interconnect, on several hosts by `mesh_utils.create_hybrid_device_mesh`. Where
      the sizes do not fit the hosts the devices stand in their order, host by host.

    Raises:
      ValueError: A size is neither positive nor -1, more than one is -1, or the sizes do not fit
        the devices; or, without `devices`, leave a process without any, or JAX has fewer CPU
        devices than the process has asked for, because it asked too late.
      TypeError: A name is not a string or a size is not an integer.
    """
    is_everyones = devices is None
    devices = list(jax.devices() if devices is None else devices)
    if is_everyones:
        _check_enough(axes, devices)
    sizes = _fill_sizes("make_mesh", axes, len(devices))
    used = devices[: math.prod(sizes)]
    idle = {d.process_index for d in devices} - {d.process_index for d in used}
    if is_everyones and idle:
        raise ValueError(
            f"make_mesh: axes={dict(axes)} uses {len(used)} of {len(devices)} devices, none "
            f"of them in process {min(idle)}; expected devices of every process. Use -1 "
            "for the rest of the devices, or start fewer processes."
        )
    axis_types = (AxisType.Auto,) * len(sizes)
    if len(set(_hosts(used))) == 1:
        return jax.make_mesh(sizes, tuple(axes), axis_types, devices=used)
    return Mesh(arrange_devices(sizes, used), tuple(axes), axis_types=axis_types)


def abstract_mesh(axes: Mapping[str, int], num_devices: int) -> AbstractMesh:
    """Builds a mesh of devices that nobody has: a program on it can be traced and not run.

    Args:
      axes: As for `make_mesh`.
      num_devices: How many devices there would be.

    Returns:
      A `jax.sharding.AbstractMesh` whose axes are all of `AxisType.Auto`.

    Raises:
      ValueError: A size is neither positive nor -1, more than one is -1, or the sizes do not fit
        the devices.
      TypeError: A name is not a string or a size is not an integer.
    """
    sizes = _fill_sizes("abstract_mesh", axes, num_devices)
    return AbstractMesh(tuple(sizes), tuple(axes), axis_types=(AxisType.Auto,) * len(sizes))


def _fill_sizes(function: str, axes: Mapping[str, int], num_devices: int) -> list[int]:
    """The sizes of the axes, with the rest of the devices for a -1."""
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
                f"{function}: axes={dict(axes)} fixes {fixed} devices a group, which does not "
                f"divide the {num_devices} "
                f"devices there are. Choose sizes whose product divides {num_devices}."
            )
        sizes[sizes.index(-1)] = num_devices // fixed
    elif fixed > num_devices:
        raise ValueError(
            f"{function}: axes={dict(axes)} needs {fixed} devices, got {num_devices}. Use smaller "
            "sizes, or -1 for the rest of the devices."
        )
    return sizes


def _check_enough(axes: Mapping[str, int], devices: Sequence[jax.Device]) -> None:
    """Refuses axes if JAX has started with fewer devices than they, or the environment, ask for."""
    sizes = [size for size in axes.values() if isinstance(size, int) and size >= -1]
    if -1 not in sizes:
        needed, wish = math.prod(sizes), "needs"
        mend = "use smaller sizes, or -1 for the rest of the devices"
    elif devices[0].platform == "cpu":  # Otherwise CPUs that were asked for are not used.
        needed = (cpu_devices_asked_for() or 0) * jax.process_count()
        wish = "takes all devices, and the environment asks for"
        mend = "pass devices=jax.devices() to use those there are"
    else:
        return
    if needed > len(devices):
        raise ValueError(
            f"make_mesh: axes={dict(axes)} {wish} {needed} devices, got {len(devices)}. "
            f"{how_to_simulate(needed)} Or {mend}."
        )


def cpu_devices_asked_for() -> int | None:
    """How many CPU devices this process is to have: JAX's config, else `XLA_FLAGS`, else unsaid.

    An environment variable that was set too late for JAX to read it counts too.
    """
    count: int = jax.config.values["jax_num_cpu_devices"]
    if count != -1:
        return count
    flags = os.environ.get("XLA_FLAGS", "")
    found = re.search(r"--xla_force_host_platform_device_count=(\d+)", flags)
    text = found[1] if found else os.environ.get("JAX_NUM_CPU_DEVICES", "")
    return int(text) if text.isdigit() else None


def how_to_simulate(count: int) -> str:
    """Says what JAX has started with, and how a process gets so many devices all the same."""
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


def arrange_devices(sizes: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """Lays devices of several hosts out so that the major axes go across hosts.

    Args:
      sizes: The sizes of the axes, the major one first.
      devices: As many devices.

    Returns:
      The devices in an array of these sizes.
    """
    hosts = _hosts(devices)
    by_host = collections.Counter(hosts)
    across = _sizes_across(sizes, len(by_host))
    if across is None or len(set(by_host.values())) > 1:
        ordered = sorted(range(len(devices)), key=lambda i: hosts[i])
        array = np.empty(len(devices), object)
        array[:] = [devices[i] for i in ordered]
        return array.reshape(tuple(sizes))
    return mesh_utils.create_hybrid_device_mesh(
        [size // outer for size, outer in zip(sizes, across, strict=True)],
        across,
        devices,
        process_is_granule=not _has_slices(devices),
        allow_split_physical_axes=True,
    )


def _sizes_across(sizes: Sequence[int], num_hosts: int) -> list[int] | None:
    """What of each size goes across hosts; `None` if the major axes do not fill the hosts."""
    across = []
    for size in sizes:
        outer = math.gcd(size, num_hosts)
        if outer not in (size, num_hosts):
            return None
        across.append(outer)
        num_hosts //= outer
    return across if num_hosts == 1 else None


def axes_across_hosts(mesh: Mesh) -> tuple[str, ...]:
    """The axes along which a collective leaves a host, for any of its groups."""
    hosts = np.array(_hosts(mesh.devices.flat)).reshape(mesh.devices.shape)
    return tuple(
        axis
        for dim, axis in enumerate(mesh.axis_names)
        if (hosts != np.take(hosts, [0], axis=dim)).any()
    )


def describe_hosts(mesh: Mesh) -> str:
    """Says in a line which axes go across hosts; empty where there is one host.

    Returns:
      A line such as `2 hosts: replica across, data within`.
    """
    num_hosts = len(set(_hosts(mesh.devices.flat)))
    if num_hosts == 1:
        return ""
    across = axes_across_hosts(mesh)
    within = [axis for axis in mesh.axis_names if axis not in across and mesh.shape[axis] > 1]
    parts = [f"{', '.join(across)} across"]
    if within:
        parts.append(f"{', '.join(within)} within")
    return f"{num_hosts} hosts: {', '.join(parts)}"


def _has_slices(devices: Sequence[Any]) -> bool:
    """Whether the devices know of more than one slice."""
    return len({getattr(device, "slice_index", 0) for device in devices}) > 1


def _hosts(devices: Iterable[Any]) -> list[int]:
    """The host of each device, by number."""
    devices = list(devices)
    if _has_slices(devices):
        return [int(device.slice_index) for device in devices]
    return [0 if device.platform == "tpu" else int(device.process_index) for device in devices]
