"""Orders the devices of a mesh: the axes over which devices wait most get the fastest links.

The order of a mesh's axes goes from the slowest links to the fastest. The names of the axes decide
this order, not the sequence in which the axes are written (`DEFAULT_ORDER`):

- `replica` sends a shard of the gradients once a step;
- `stage` sends the activations of one microbatch to one neighbour;
- `data` gathers the parameters of each layer, while another layer computes;
- `context` passes keys and values around a ring, while a block of attention computes;
- `expert` sends tokens and waits for them, in each layer;
- `model` sends activations and waits for them, several times in each layer.

(Narayanan et al., https://arxiv.org/abs/2104.04473, keep tensor parallelism within a host and run
pipelines across hosts. Llama 3, https://arxiv.org/abs/2407.21783, section 3.3, has the same order,
except that `data` is on slower links than `stage`.)

A *host* is a group of devices that reaches other devices over a slow network: a process, or one of
JAX's slices if there are several. One slice of TPUs is one host, because a fast network joins its
machines. Hosts are divided over the slowest axes first, so the fastest axes stay within a host if
their sizes allow it. In a slice of TPUs each axis is a ring of neighbours if possible, see
`manualpar.core.mesh.torus`. Devices of one process need not be neighbours in the mesh: a process
reads the rows of the batch that belong to its devices.

The order changes only which device is at a position of the mesh. Axes and specs stay the same, so
a program computes the same numbers.
"""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from manualpar.core.mesh.torus import arrange_in_torus, describe_along

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
