"""The software that JAX needs for NVIDIA GPUs: what is installed, what is missing, what misfits."""

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from manualpar.system.cluster.own_host import driver_version

# The oldest driver for each version of CUDA, https://docs.jax.dev/en/latest/installation.html.
OLDEST_DRIVER: Mapping[int, int] = {12: 525, 13: 580}
PARTS = ("jax-cuda{}-plugin", "jax-cuda{}-pjrt")
LIBRARIES = ("nvidia-nccl-cu{}", "nvidia-cudnn-cu{}")
SMI_SECONDS = 30.0


def nvidia_facts() -> Iterator[tuple[str, str, bool]]:
    """Yields the name and value of each fact, and whether it keeps JAX from using the GPUs.

    Yields nothing on a machine without a driver and without a package for NVIDIA GPUs.
    """
    found = {
        name.format(cuda): version
        for cuda in OLDEST_DRIVER
        for name in (*PARTS, *LIBRARIES)
        if (version := _version(name.format(cuda)))
    }
    driver = find_driver()
    if not found and not driver:
        return
    yield "NVIDIA driver", driver or "not found, so JAX cannot use a GPU here", False
    for name, version in found.items():
        yield name, version, False
    if not driver:  # The packages may be there for the compiler alone.
        return
    is_asked = os.environ.get("JAX_PLATFORMS", "") != "cpu"
    major = int(number[0]) if (number := re.match(r"\d+", driver)) else 0
    cudas = [cuda for cuda in OLDEST_DRIVER if any(x.format(cuda) in found for x in PARTS)]
    if not cudas:
        newest = max((cuda for cuda in OLDEST_DRIVER if OLDEST_DRIVER[cuda] <= major), default=12)
        text = f"no jax-cuda{newest}-plugin: JAX cannot use the GPUs; {_install(newest)}"
        yield "missing for GPUs", text, is_asked
    for cuda in cudas:
        for sentence in _misfits(cuda, found, major):
            yield "does not fit", sentence, is_asked
        for name in (x.format(cuda) for x in LIBRARIES):
            if name not in found:
                text = f"{name}: JAX needs the system's library, or {_install(cuda)}"
                yield "missing for GPUs", text, False
    if len(cudas) > 1:
        text = f"plugins for CUDA {' and '.join(map(str, cudas))}; uninstall those of one version"
        yield "does not fit", text, is_asked


def find_driver() -> str:
    """Returns the version of NVIDIA's driver; "" if there is none."""
    if program := shutil.which("nvidia-smi"):
        query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            ran = subprocess.run(query, capture_output=True, text=True, timeout=SMI_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            return driver_version()
        if ran.returncode == 0 and (lines := ran.stdout.split()):
            return lines[0]
    return driver_version()


def _misfits(cuda: int, found: Mapping[str, str], driver: int) -> Iterator[str]:
    """Yields a sentence for each part of the plugin that is missing or does not fit the rest."""
    jaxlib = _version("jaxlib")
    for name in (x.format(cuda) for x in PARTS):
        if name not in found:
            yield f"{name} is missing, which the plugin needs; {_install(cuda)}"
        elif _numbers(found[name]) != _numbers(jaxlib):
            yield (
                f"{name} is {found[name]} and jaxlib is {jaxlib}, expected the same version; "
                f"pip install '{name}=={jaxlib}'"
            )
    oldest = OLDEST_DRIVER[cuda]
    if driver < oldest:
        yield (
            f"the driver is of version {driver}, expected at least {oldest} for CUDA {cuda}; "
            f"install a newer driver{' or jax[cuda12]' * (cuda > 12 and driver >= 525)}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers at the beginning of a version, the part that JAX compares."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _install(cuda: int) -> str:
    return f"pip install 'jax[cuda{cuda}]'"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
