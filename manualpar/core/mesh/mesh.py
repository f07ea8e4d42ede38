"""Makes meshes, and checks the sizes of their axes and the number of devices."""

import collections
import dataclasses
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

__all__ = [
    "AnyDevices",
    "abstract_mesh",
    "check_order",
    "count_hosts",
    "describe_links",
    "describe_mesh",
    "make_mesh",
    "mesh_of",
    "platform_of",
    "simulate_devices",
]

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
    `manualpar.core.mesh.mesh`.

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


# -------------------------------------------------------------------------------------------------
# Rings of neighbours in the torus of a slice of TPUs.
#
# Along a mesh axis each device sends to the next device, and the last device to the first. A *hop*
# is one link between neighbours. If the next device is always one hop away, each link carries the
# data of one device in each direction, and XLA makes permutations along the axis asynchronous.
# Gathers and scatters do not depend on the order of devices, because XLA finds rings for them.
#
# If a grid has at least two dimensions and one has an even size, a ring of neighbours can pass
# through all positions without a link between opposite ends. The ring first passes through all
# rows, but leaves out the first position of each row. The ring then returns through these first
# positions. In a grid of 2x4 the ring goes up one column and down the other.
#
# A chip with two devices counts as two positions, one hop apart.


NAMES = ("x", "y", "z", "core")
FAR = 2**30  # Larger than the number of hops in any slice.
# Words in the `device_kind` of chips whose torus has two dimensions. The torus of other chips has
# three.
FLAT = ("lite", "v5e", "v6e")


@dataclasses.dataclass(frozen=True)
class _Chip:
    """A fake device of a kind for which `mesh_utils` has no special order."""

    device: Any
    coords: tuple[int, ...]
    platform: str = "tpu"
    device_kind: str = ""
    core_on_chip: int = 0


def arrange_in_torus(sizes: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """Arranges the devices of a slice of TPUs in an array whose dimensions have few hops.

    Args:
      sizes: The sizes of the array. The last dimension takes the fastest links.
      devices: The devices of one slice, as many as the product of the sizes.

    Returns:
      The arrangement with the fewest hops along the last dimension; if several are equal, along the
      dimension before it, and so on. The candidates are: the arrangement of
      `mesh_utils.create_device_mesh`; the one that `mesh_utils` makes without its special cases for
      some slices; and both with each dimension in the order of `ring_through`. Devices keep their
      order if they do not fill a box or have no coordinates.
    """
    array = np.empty(len(devices), object)
    array[:] = devices
    coords = _coords_of(array)
    if coords is None or len(array) != math.prod(np.ptp(coords, 0) + 1):
        return array.reshape(sizes)
    arrays = [mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)]
    if not coords[:, -1].any():  # A fake device cannot describe a chip with two devices.
        chips = [_Chip(device, tuple(device.coords)) for device in devices]
        general = mesh_utils.create_device_mesh(sizes, chips, allow_split_physical_axes=True)
        arrays.append(np.vectorize(lambda chip: chip.device, otypes=[object])(general))
    wraps = _wraps(array)
    arrays += [_in_rings(array, wraps) for array in arrays]
    dims = range(len(sizes))[::-1]
    return min(arrays, key=lambda array: [_hops(array, dim, wraps).sum() for dim in dims])


def ring_through(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the positions of a grid in an order in which successive positions are neighbours.

    The last position is next to the first, unless all sizes are odd or the grid is a line.
    """
    even = next((dim for dim, size in enumerate(shape) if size % 2 == 0), None)
    if even is None:
        return _path_through(shape)
    first, *others = _path_through([size for dim, size in enumerate(shape) if dim != even])
    rows = range(shape[even])
    out = [(row, position) for row in rows for position in others[:: 1 if row % 2 == 0 else -1]]
    ring = [(0, first), *out, *((row, first) for row in reversed(rows[1:]))]
    return [(*position[:even], row, *position[even:]) for row, position in ring]


def _path_through(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the positions of a grid along a path that goes back and forth between neighbours."""
    path: list[tuple[int, ...]] = [()]
    for size in reversed(shape):
        path = [(i, *place) for i in range(size) for place in (path if i % 2 == 0 else path[::-1])]
    return path


def _in_rings(array: np.ndarray, wraps: np.ndarray) -> np.ndarray:
    """Puts each dimension of the array in the order of a ring if the ring has fewer hops."""
    for dim, size in enumerate(array.shape):
        coords = _coords_of(np.moveaxis(array, dim, 0).reshape(size, -1)[:, 0])
        columns = [np.unique(column, return_inverse=True) for column in coords.T]
        shape = [len(values) for values, _ in columns]
        if math.prod(shape) == size:  # The devices form a grid.
            positions = zip(*(inverse for _, inverse in columns), strict=True)
            index = {position: i for i, position in enumerate(positions)}
            ring = np.take(array, [index[position] for position in ring_through(shape)], dim)
            if _hops(ring, dim, wraps).sum() < _hops(array, dim, wraps).sum():
                array = ring
    return array


def _hops(array: np.ndarray, dim: int, wraps: np.ndarray) -> np.ndarray:
    """Counts the hops from each device to the next along a dimension, and from last to first."""
    coords = _coords_of(array)
    apart = np.abs(coords - np.roll(coords, -1, dim))
    return np.minimum(apart, np.abs(wraps - apart)).sum(-1)


def closed_sides(sides: Sequence[int], *, is_flat: bool) -> list[bool]:
    """Returns, for each side of a slice, whether it is a ring: a link joins its two ends.

    `sides` are in chips. In a flat torus (two dimensions) a side of 16 chips, the full side of a
    pod, is a ring. In three dimensions all sides are rings if each is a multiple of four chips;
    else no side is.
    """
    if is_flat:
        return [side % 16 == 0 for side in sides]
    return [all(side % 4 == 0 for side in sides)] * len(sides)


def _wraps(array: np.ndarray) -> np.ndarray:
    """Returns the number of hops around each dimension of a slice; `FAR` if it has no ring."""
    sides = np.ptp(_coords_of(array).reshape(-1, len(NAMES)), 0) + 1
    is_flat = any(word in array.flat[0].device_kind for word in FLAT)
    closed = closed_sides(sides[:-1].tolist(), is_flat=is_flat)
    closed.append(False)  # The last side counts cores.
    return np.where(closed, sides, FAR)


def describe_along(array: np.ndarray, hosts: np.ndarray, dim: int) -> str:
    """Describes how a dimension of a device array runs through the torus of TPUs within a host.

    Args:
      hosts: The number of the host or slice of each device, in an array of the same shape.

    Returns:
      Words such as `in a ring of neighbours along xy`; empty if no host has two devices along
      `dim`.
    """
    if _coords_of(array) is None:
        return "in an unknown order (no coordinates)"
    size, wraps = array.shape[dim], _wraps(array)
    lines, hosts_of_lines = (np.moveaxis(x, dim, -1).reshape(-1, size) for x in (array, hosts))
    runs = [
        line[line_hosts == host]
        for line, line_hosts in zip(lines, hosts_of_lines, strict=True)
        for host in np.unique(line_hosts)
        if (line_hosts == host).sum() > 1
    ]
    if not runs:
        return ""
    moved = np.any([np.ptp(_coords_of(run), 0) > 0 for run in runs], 0)
    along = "".join(name for name, has_moved in zip("xyz", moved, strict=False) if has_moved)
    if not along:
        return "within a chip"
    hops = [_hops(run, 0, wraps) for run in runs]
    most, within = max(map(max, hops)), max(max(run_hops[:-1]) for run_hops in hops)
    if most == 1:
        return f"{'between' if len(runs[0]) == 2 else 'in a ring of'} neighbours along {along}"
    if within == 1:
        return f"in a line of neighbours along {along} with {most} hops back"
    return f"along {along} with up to {most} hops"


def _coords_of(array: np.ndarray) -> Any:
    """Returns each device's coordinates and core number, `[..., 4]`; `None` without coordinates."""
    if not all(getattr(device, "coords", None) for device in array.flat):
        return None
    coords = [(*(*device.coords, 0, 0)[:3], device.core_on_chip) for device in array.flat]
    return np.array(coords).reshape(*array.shape, len(NAMES))


# -------------------------------------------------------------------------------------------------
# Orders the devices of a mesh: the axes over which devices wait most get the fastest links.
#
# The order of a mesh's axes goes from the slowest links to the fastest. The names of the axes
# decide this order, not the sequence in which the axes are written (`DEFAULT_ORDER`):
#
# - `replica` sends a shard of the gradients once a step;
# - `stage` sends the activations of one microbatch to one neighbour;
# - `data` gathers the parameters of each layer, while another layer computes;
# - `context` passes keys and values around a ring, while a block of attention computes;
# - `expert` sends tokens and waits for them, in each layer;
# - `model` sends activations and waits for them, several times in each layer.
#
# (Narayanan et al., https://arxiv.org/abs/2104.04473, keep tensor parallelism within a host and
# run pipelines across hosts. Llama 3, https://arxiv.org/abs/2407.21783, section 3.3, has the same
# order, except that `data` is on slower links than `stage`.)
#
# A *host* is a group of devices that reaches other devices over a slow network: a process, or one
# of JAX's slices if there are several. One slice of TPUs is one host, because a fast network joins
# its machines. Hosts are divided over the slowest axes first, so the fastest axes stay within a
# host if their sizes allow it. In a slice of TPUs each axis is a ring of neighbours if possible,
# see `manualpar.core.mesh.mesh`. Devices of one process need not be neighbours in the mesh: a
# process reads the rows of the batch that belong to its devices.
#
# The order changes only which device is at a position of the mesh. Axes and specs stay the same,
# so a program computes the same numbers.


DEFAULT_ORDER = ("replica", "stage", "data", "data_minor", "context", "expert", "model")


def in_order(axes: Mapping[str, int], order: Sequence[str] = ()) -> dict[str, int]:
    """Sorts the sizes of the axes, the axis on the slowest links first.

    Args:
      axes: The size of each axis.
      order: The names of all axes, slowest links first; by default `DEFAULT_ORDER`. An axis that
        is not in `order` keeps its position in `axes`.
    """
    if order:
        return {axis: axes[axis] for axis in order}
    known = iter(sorted(set(axes) & set(DEFAULT_ORDER), key=DEFAULT_ORDER.index))
    names = [next(known) if axis in DEFAULT_ORDER else axis for axis in axes]
    return {axis: axes[axis] for axis in names}


def check_order(field: str, axes: Iterable[str], order: Sequence[str]) -> None:
    """Refuses an order that does not name each mesh axis once; an empty order is the default."""
    axes = list(axes)
    if order and (isinstance(order, str) or sorted(order) != sorted(axes)):
        unknown = [axis for axis in order if axis not in axes]
        missing = [axis for axis in axes if axis not in order]
        wrong = f"names {unknown}, which the mesh lacks" if unknown else f"lacks {missing}"
        if not unknown and not missing:
            wrong = "names an axis twice"
        raise ValueError(
            f"{field} is {order!r} and {wrong}; expected each of the mesh's axes {axes} once, the "
            f"one on the slowest links first, such as {tuple(in_order(dict.fromkeys(axes, 1)))}, "
            "which is the default."
        )


def arrange_devices(
    axes: Mapping[str, int], devices: Sequence[Any], order: Sequence[str] = ()
) -> np.ndarray:
    """Arranges devices: the first axis of the order gets the slowest links, the last the fastest.

    Args:
      axes: The size of each axis.
      devices: The devices, as many as the product of the sizes.
      order: The order of axes, as in `in_order`. By default, devices of one host that are not TPUs
        keep their order, because all distances between them are equal.

    Returns:
      The devices in an array with the sizes of `axes`, in the order of `axes`.
    """
    if not order and len(set(_hosts(devices))) == 1 and devices[0].platform != "tpu":
        order = tuple(axes)
    ordered = in_order(axes, order)
    array = _arrange(list(ordered.values()), devices)
    return array.transpose([list(ordered).index(axis) for axis in axes])


def _arrange(sizes: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """Arranges devices in an array whose last dimensions stay within a host."""
    by_host: dict[int, list[Any]] = {host: [] for host in sorted(set(_hosts(devices)))}
    for host, device in zip(_hosts(devices), devices, strict=True):
        by_host[host].append(device)
    if len(set(map(len, by_host.values()))) > 1:  # No regular arrangement fits unequal hosts.
        array = np.empty(len(devices), object)
        array[:] = [device for group in by_host.values() for device in group]
        return array.reshape(sizes)
    across = sizes_across(sizes, len(by_host))
    within = [size // outer for size, outer in zip(sizes, across, strict=True)]
    arrays = np.stack([_arrange_host(within, group) for group in by_host.values()])
    pairs = [pair for dim in range(len(sizes)) for pair in (dim, len(sizes) + dim)]
    return arrays.reshape(*across, *within).transpose(pairs).reshape(sizes)


def _arrange_host(sizes: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    if devices[0].platform == "tpu":
        return arrange_in_torus(sizes, devices)
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def sizes_across(sizes: Iterable[int], num_hosts: int) -> list[int]:
    """Returns, for each axis, the factor of its size that spans hosts; hosts are of equal size."""
    across = []
    for size in sizes:
        across.append(math.gcd(size, num_hosts))
        num_hosts //= across[-1]
    return across


def count_hosts(mesh: Mesh) -> int:
    """Counts the hosts, or the slices, of a mesh's devices."""
    return len(set(_hosts(list(mesh.devices.flat))))


def describe_links(mesh: Mesh) -> str:
    """Describes, in one line, the links along each axis of a mesh; "" for one host without TPUs.

    Returns:
      A line such as `4 hosts; data: 2 within a host x 4 across, model: within a host`. For a slice
      of TPUs it describes each axis in the torus:
      `data: in a ring of neighbours along xy, model: between neighbours along z`.
    """
    devices = list(mesh.devices.flat)
    hosts = np.array(_hosts(devices)).reshape(mesh.devices.shape)
    num_hosts, is_torus = len(np.unique(hosts)), devices[0].platform == "tpu"
    kind = "slice" if is_torus and _has_slices(devices) else "host"
    axes = [(dim, axis) for dim, axis in enumerate(mesh.axis_names) if mesh.shape[axis] > 1]
    if not axes or (num_hosts == 1 and not is_torus):
        return ""
    parts = []
    for dim, axis in axes:
        words = [_describe_hosts_along(hosts, dim, kind)] if num_hosts > 1 else []
        if is_torus and (torus := describe_along(mesh.devices, hosts, dim)):
            words.append(torus)
        parts.append(f"{axis}: {' '.join(words)}")
    return (f"{num_hosts} {kind}s; " if num_hosts > 1 else "") + ", ".join(parts)


def _describe_hosts_along(hosts: np.ndarray, dim: int, kind: str) -> str:
    size = hosts.shape[dim]
    lines = np.moveaxis(hosts, dim, -1).reshape(-1, size).tolist()
    counts = {count for line in lines for count in collections.Counter(line).values()}
    if len(counts) > 1:
        return f"across {kind}s unevenly"
    (within,) = counts
    if within == size:
        return f"within a {kind}"
    return (
        f"{within} within a {kind} x {size // within} across" if within > 1 else f"across {kind}s"
    )


def _has_slices(devices: Iterable[Any]) -> bool:
    """Returns whether the devices belong to more than one slice."""
    return len({getattr(device, "slice_index", 0) for device in devices}) > 1


def _hosts(devices: Sequence[Any]) -> list[int]:
    """Returns the host number of each device: of the machine, if each GPU has its own process."""
    if _has_slices(devices):
        return [int(device.slice_index) for device in devices]
    if devices[0].platform == "tpu" or _is_one_machine(devices):
        return [0] * len(devices)
    return [int(device.process_index) for device in devices]


def _is_one_machine(devices: Sequence[Any]) -> bool:
    """Returns whether all devices, of one slice, are GPUs of one machine.

    A GPU's slice is its machine. Only a GPU that is described for a compiler has a process for each
    machine of its slice; none of these has a number in the hardware.
    """
    return devices[0].platform == "gpu" and any(
        hasattr(device, "slice_index") and device.local_hardware_id is not None
        for device in devices
    )


# -------------------------------------------------------------------------------------------------
# Simulates several devices on one CPU, so that every strategy can run on every machine.


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
