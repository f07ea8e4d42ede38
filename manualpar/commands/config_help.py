"""The text of `--help` of the commands that take a config: their flags, and the config's fields."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manualpar.strategies import Field, strategy_kinds
from manualpar.system.reports.help_text import fill, list_flags, wrap_text
from manualpar.training.config import fields_of, flatten_config, load_config

GENERAL = "General"
# Group of fields -> its heading, in the order of the text. Other groups come last.
HEADINGS: Mapping[str, str] = {
    "model": "Model",
    "data": "Data",
    "optimizer": "Optimizer",
    "schedule": "Learning rate after the warm-up",
    "training": "Training and evaluation",
    "parallel": "Parallelism",
    "checkpoint": "Checkpoints",
    "sample": "Text that is generated at the end",
    "watch": "Lost and stalled processes",
    "debug": "Debugging",
}
ABOUT_FIELDS = (
    "Fields of {name}, with the values that they have there. --GROUP.FIELD=VALUE sets a field. The "
    "brackets contain the allowed values, and the default for a config file without the field. "
    "With the name of a config, as in `fsdp_lm --help`, its fields are shown."
)


def config_help(
    description: str, path: Path, *, flags: Mapping[str, str], added: Mapping[str, Field]
) -> str:
    """Returns the text of `--help`.

    Args:
      description: The first paragraphs.
      path: The file of the config whose fields are shown.
      flags: The help of each flag of the command.
      added: The fields that only the configs of this command have.
    """
    config = load_config(path)
    values, fields = flatten_config(config), {**fields_of(config), **added}
    blocks = [wrap_text(description), f"Flags:\n{list_flags(flags)}"]
    blocks.append(fill(ABOUT_FIELDS.format(name=path.name)))
    for heading, names in _grouped(values, fields).items():
        lines = [_describe(name, values[name], fields.get(name)) for name in names]
        blocks.append("\n".join([f"{heading}:", *lines]))
    return "\n\n".join(blocks)


def _grouped(values: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, list[str]]:
    """Returns the names of the fields of each heading, in the order of the table of fields."""
    strategy = str(values.get("parallel.strategy"))
    unused = _fields_of_other_strategies(strategy)
    others = f"Parallelism, only for other strategies than {strategy}"
    headings = [GENERAL, *HEADINGS.values()]
    headings.insert(headings.index(HEADINGS["parallel"]) + 1, others)
    found: dict[str, list[str]] = {heading: [] for heading in headings}
    order = {name: number for number, name in enumerate(fields)}
    for name in sorted(values, key=lambda name: order.get(name, len(order))):
        group = name.rpartition(".")[0]
        heading = HEADINGS.get(group, group) or GENERAL
        found.setdefault(others if name in unused else heading, []).append(name)
    return {heading: names for heading, names in found.items() if names}


def _fields_of_other_strategies(strategy: str) -> set[str]:
    """Returns the fields that only other strategies have; none if there is no such strategy."""
    kinds = strategy_kinds()
    if strategy not in kinds:
        return set()
    fields = {name for kind in kinds.values() for name in kind.fields}
    return {f"parallel.{name}" for name in fields - kinds[strategy].fields.keys()}


def _describe(name: str, value: Any, field: Field | None) -> str:
    """Returns the lines about a field: as a flag with its value, then meaning, values, default."""
    text = str(value)
    if not text or set(text) & set(" '(){}*!;&|<>$`#~"):
        text = '"{}"'.format(text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$"))
    lines = [fill(f"--{name}={text}", "  ", hanging=" " * 6)]
    if field is not None:
        default = "no default" if field.default is None else f"default {field.default!r}"
        lines.append(fill(f"{field.meaning} [{field.expectation()}; {default}]", " " * 6))
    return "\n".join(lines)
