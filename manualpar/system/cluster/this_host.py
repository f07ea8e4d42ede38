"""Examines this process's host: its name, limits, disks, devices and driver.

A finding is a list of a text, whose subject is the host, and whether a run must be refused. So it
can be sent as JSON.
"""

import contextlib
import dataclasses
import ipaddress
import os
import re
import resource
import shutil
import socket
from pathlib import Path
from typing import Any

import jax

from manualpar.system.cluster.facts import Facts
from manualpar.system.storage import AnyPath

# Less free space is mentioned, but not refused.
LEAST_FREE_BYTES = 2**30
# The open files that a process needs in addition to the connections with the other processes.
OWN_FILES = 256
# With fewer of them process 0 might not be able to accept connections.
HUB_FILES = 64
ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel0", "/dev/vfio")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

Finding = list[Any]


@dataclasses.dataclass(frozen=True)
class Host:
    """This process's host, as the other hosts should reach it.

    Attributes:
      name: The name of the host.
      address: The address to which the name resolves; empty if it does not resolve.
      has_address: Whether the host can listen at this address.
    """

    name: str
    address: str
    has_address: bool = True

    @property
    def is_loopback(self) -> bool:
        """Whether every host has the address, so that no other host is reached there."""
        return bool(self.address) and ipaddress.ip_address(self.address.split("%")[0]).is_loopback


def find_host() -> Host:
    """Resolves this host's own name, as gloo does, and tries to listen at the address."""
    name = socket.gethostname()
    addresses = []
    with contextlib.suppress(OSError):  # The name does not resolve.
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        addresses = [str(where[0]) for *_, where in found]
    for address in addresses:
        with contextlib.suppress(OSError):
            listen_at(address).close()
            return Host(name, address)
    return Host(name, addresses[0] if addresses else "", has_address=False)


def raise_limits(count: int) -> None:
    """Raises this process's limit of open files for a run of `count` processes, if it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OWN_FILES + 2 * count
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):  # The system allows less; `limits` says so.
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def check_hub_limits(count: int) -> None:
    """Raises a `ValueError` if process 0 may not open a connection with each of `count` processes.

    Otherwise processes would wait for a hub that cannot accept them.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < HUB_FILES + count:
        raise ValueError(f"{socket.gethostname()}, the host of process 0, {limits(count)[0][0]}")


def limits(count: int) -> list[Finding]:
    """Returns findings about the limit of open files, for a run of `count` processes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OWN_FILES + 2 * count
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return []
    why = f"may open {soft} files, expected at least {needed} for {count} processes"
    return [[f"{why}; set ulimit -n {max(needed, 65536)}", True]]


def free_space(workdir: AnyPath | None) -> list[Finding]:
    """Returns findings about the disks of the workdir and of JAX's compilation cache."""
    folders = {"the workdir": workdir} if isinstance(workdir, Path) else {}
    cache = jax.config.values["jax_compilation_cache_dir"]
    if cache and "://" not in cache:
        folders["the compilation cache"] = Path(cache)
    findings = []
    for name, folder in folders.items():
        there = next(
            (one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir()), None
        )
        if there and (free := shutil.disk_usage(there).free) < LEAST_FREE_BYTES:
            mib = free // 2**20
            findings.append([f"{name} {folder} has {mib} MiB of free space; make room", False])
    return findings


def name_findings(host: Host) -> list[Finding]:
    """Returns findings about a host's own name; fatal if gloo listens there."""
    needed = _needs_name()
    mend = "write the address by which other hosts reach it into /etc/hosts"
    if not host.address:
        return [[f"does not know its own name {host.name}; {mend}", needed]]
    if not host.has_address:
        return [[f"does not have the address {host.address} of its own name; {mend}", needed]]
    if host.is_loopback:
        what = f"resolves its own name to {host.address}, where no other host reaches it"
        return [[f"{what}; {mend}", needed]]
    return []


def _needs_name() -> bool:
    """Returns whether the collectives will be gloo's, which listen at the host's name."""
    if platforms := jax.config.values["jax_platforms"]:
        return bool(platforms.split(",")[0] == "cpu")
    return not any(map(os.path.exists, ACCELERATORS))


def device_facts() -> Facts:
    """Returns the facts of this process's devices; makes them."""
    devices = jax.local_devices()
    return {
        "the number of devices": str(len(devices)),
        "the kind of device": devices[0].device_kind,
    }


def device_memory() -> int:
    """Returns the smallest memory of a device in bytes; 0 if it is not known."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return min((entry.get("bytes_limit", 0) for entry in stats), default=0)


def driver_version() -> str:
    """Returns the version of NVIDIA's driver; empty if this host has none."""
    try:
        text = NVIDIA_DRIVER.read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return found[1] if found else ""


def listen_at(address: str) -> socket.socket:
    """Listens on a free port at an address of this host; at all addresses if it is empty."""
    if not address:
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # The host has no IPv6.
                return socket.create_server(
                    ("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
                )
        return socket.create_server(("", 0), backlog=1024)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=1024)
