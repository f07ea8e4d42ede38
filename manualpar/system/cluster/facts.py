"""Describes in sentences how the processes of a run differ.

A fact is a value that must be equal in every process: a field of the config, a version, the
fingerprint of the data. It has a name that users understand, and its value is a text.
"""

import functools
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

from manualpar.errors import list_some

MAX_VALUE_CHARACTERS = 200
# Sentences go to all processes, so their lengths must not grow with the number of processes.
SHOWN_PROCESSES = 16
SHOWN_VALUES = 8

Facts = Mapping[str, str]


class DisagreementError(ValueError):
    """The facts of a run's processes differ; every process raises this error."""

    def __init__(self, differences: list[str]) -> None:
        super().__init__(
            "the processes of this run differ, expected the same in all of them:\n"
            + "\n".join(f"  {line}" for line in differences)
        )


def describe_differences(facts: Mapping[int, Facts]) -> list[str]:
    """Compares the facts of the processes; `facts` maps the number of a process to its facts.

    Returns a sentence for each difference, such as `config.seed is 42 in process 0 and 3 in process
    1`. If there are too many differences, the last sentence gives the number of the others.
    """
    sentences = []
    for name in dict.fromkeys(name for process in sorted(facts) for name in facts[process]):
        holders: dict[str, list[int]] = {}
        for process in sorted(facts):
            holders.setdefault(facts[process].get(name, "absent"), []).append(process)
        if len(holders) > 1:
            parts = [f"{_shorten(value)} in {name_processes(p)}" for value, p in holders.items()]
            rest = len(parts) - SHOWN_VALUES
            parts = [*parts[:SHOWN_VALUES], *([f"{rest} other values"] if rest > 0 else [])]
            sentences.append(f"{name} is {' and '.join(parts)}")
    return list_some(sentences)


def announce(sentence: str) -> None:
    """Writes a sentence to standard error, without Python's buffers, whose locks might be taken."""
    os.write(2, f"{sentence}\n".encode(errors="backslashreplace"))


def name_processes(processes: list[int]) -> str:
    """Formats the numbers of processes: `process 1`, `processes 1, 3`; the first few of many."""
    shown = ", ".join(map(str, processes[:SHOWN_PROCESSES]))
    more = len(processes) - SHOWN_PROCESSES
    return f"process{'es' if len(processes) > 1 else ''} {shown}" + (
        f" and {more:,} more" if more > 0 else ""
    )


def _shorten(value: str) -> str:
    return value if len(value) <= MAX_VALUE_CHARACTERS else f"{value[:MAX_VALUE_CHARACTERS]}..."


# -------------------------------------------------------------------------------------------------
# The versions and sources that must be equal in all processes of a run.


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
