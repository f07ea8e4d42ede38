"""Records the conditions of a measurement, and writes results as Markdown and JSON.

The JSON file has the conditions, the tables as the report shows them, and what the benchmark adds.
`docs/measured` has such files; `benchmarks.pictures` draws them.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.mutations import write_section

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "grain", "torch")
CPU_INFO = Path("/proc/cpuinfo")


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The conditions of a measurement.

    Attributes:
      command: The command that measured.
      date: The time when the command began.
      versions: The versions of Python and of the installed packages.
      processor: The name that the machine's processor reports.
      cores: The number of cores that this process may use.
      load: The machine's load averages over 1, 5 and 15 minutes before the measurement, which only
        other processes have caused.
    """

    command: str
    date: str
    versions: Mapping[str, str]
    processor: str
    cores: int
    load: tuple[float, float, float]

    def sentence(self) -> str:
        """Describes the conditions in a sentence, for a report."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        load = " / ".join(f"{x:.1f}" for x in self.load)
        return (
            f"`{self.command}`, {self.date}, {versions}; {self.cores} cores of {self.processor}, "
            f"load {load} (1, 5, 15 minutes) when it began."
        )


class Table(NamedTuple):
    """A table of a report: the heading above it, the names of its columns, and its cells."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def note_conditions(module: str, argv: Sequence[str] | None) -> Conditions:
    """Records the conditions of a measurement; call it before all other work.

    Args:
      module: The module that runs, such as `"benchmarks.step_time"`.
      argv: The module's arguments; `None` for the arguments of this process.

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
    """Writes a report to the given files.

    Args:
      conditions: The conditions of the measurement, which the JSON file contains.
      lines: The report in Markdown; the first line is its heading. The JSON file has its tables.
      data: The results for the JSON file; a `Fraction` becomes an integer or a float.
      output: A Markdown file; the report replaces its section with the same heading. `None` for no
        file.
      json_output: The JSON file; `None` for no file.
    """
    if output:
        write_section(output, "\n".join(lines))
    if json_output:
        tables = [table._asdict() for table in read_tables(lines)]
        whole = {"conditions": dataclasses.asdict(conditions), "tables": tables, **data}
        text = json.dumps(whole, indent=2, default=plain, allow_nan=False)
        json_output.write_text(f"{text}\n", encoding="utf-8")


def read_tables(lines: Iterable[str]) -> list[Table]:
    """Reads the tables of a Markdown report."""
    tables: list[Table] = []
    title, is_inside = "", False
    for line in "\n".join(lines).splitlines():
        if line.startswith("#"):
            title = line.lstrip("# ")
        if not line.startswith("|"):
            is_inside = False
        elif not is_inside:
            tables.append(Table(title, _cells(line), []))
            is_inside = True
        elif set(line) - set("|-: "):
            tables[-1].rows.append(_cells(line))
    return tables


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def plain(x: Any) -> Any:
    """Converts a fraction or a dataclass for `json.dumps(default=plain)`."""
    if isinstance(x, Fraction):
        return int(x) if x.denominator == 1 else float(x)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return dataclasses.asdict(x)
    raise TypeError(f"write_results: {x!r} has no form in JSON.")


def _processor() -> str:
    """Returns the processor's name."""
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
