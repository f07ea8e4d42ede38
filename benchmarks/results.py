"""What a result stands on, and where it goes: versions, machine, load; Markdown and JSON."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from benchmarks.mutations import write_section

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "torch")
CPU_INFO = Path("/proc/cpuinfo")


@dataclasses.dataclass(frozen=True)
class Conditions:
    """Under which conditions something was measured.

    Attributes:
      command: The command that measured.
      date: When it began.
      versions: Of Python and of the packages that are installed.
      processor: The machine's processor, as it calls itself.
      cores: How many cores this process may use.
      load: The machine's load averages over 1, 5 and 15 minutes when it began: this process had
        hardly run, so it is what others did.
    """

    command: str
    date: str
    versions: Mapping[str, str]
    processor: str
    cores: int
    load: tuple[float, float, float]

    def sentence(self) -> str:
        """The conditions in a sentence, for a report."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        load = " / ".join(f"{x:.1f}" for x in self.load)
        return (
            f"`{self.command}`, {self.date}, {versions}; {self.cores} cores of {self.processor}, "
            f"load {load} (1, 5, 15 minutes) when it began."
        )


def note_conditions(module: str, argv: Sequence[str] | None) -> Conditions:
    """Notes the conditions; call it before anything else runs.

    Args:
      module: The module that is run, such as `"benchmarks.step_time"`.
      argv: Its arguments; `None` for those of this process.

    Returns:
      The conditions.
    """
    versions = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Conditions(
        command=" ".join(["python -m", module, *(sys.argv[1:] if argv is None else argv)]),
        date=time.strftime("%Y-%m-%d %H:%M"),
        versions=versions,
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg(),
    )


def write_results(
    conditions: Conditions,
    *,
    lines: Sequence[str],
    data: Mapping[str, Any],
    output: Path | None,
    json_output: Path | None,
) -> None:
    """Writes a report where it is wanted.

    Args:
      conditions: Under which it was measured; they go into the JSON.
      lines: The report in Markdown, its heading first.
      data: The same as values; a fraction becomes a whole number or a float.
      output: A Markdown file to write to, in a section of its own.
      json_output: A JSON file.
    """
    if output:
        write_section(output, "\n".join(lines))
    if json_output:
        whole = {"conditions": dataclasses.asdict(conditions), **data}
        text = json.dumps(whole, indent=2, default=plain, allow_nan=False)
        json_output.write_text(f"{text}\n", encoding="utf-8")


def plain(x: Any) -> Any:
    """Turns a value that JSON does not know into one that it knows; for `json.dumps`."""
    if isinstance(x, Fraction):
        return int(x) if x.denominator == 1 else float(x)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return dataclasses.asdict(x)
    raise TypeError(f"write_results: {x!r} is no value that JSON has.")


def _processor() -> str:
    """The processor's name."""
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
