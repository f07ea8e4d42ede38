"""The versions and sources that must be equal in all processes of a run."""

import functools
import hashlib
import importlib.metadata
import platform
from collections.abc import Iterable
from pathlib import Path

from manualpar.system.cluster.facts import Facts

PACKAGES = (
    *("manualpar", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "libtpu"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)
PACKAGE = Path(__file__).parents[2]


def software_facts() -> Facts:
    """Returns the versions of Python and of packages, and a hash of this package's sources.

    The hash differs between hosts that have different commits of one version.
    """
    facts = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return {**facts, "the hash of manualpar's sources": _package_hash()}


def hash_files(paths: Iterable[Path]) -> str:
    """Returns a hash of the names and contents of files."""
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


@functools.cache
def _package_hash() -> str:
    return hash_files(sorted(PACKAGE.rglob("*.py")))
