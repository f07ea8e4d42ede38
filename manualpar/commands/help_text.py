"""The text of a command's `--help`."""

import textwrap
from collections.abc import Mapping
from pathlib import Path

from manualpar.core.model.options import PROGRAM_OPTIONS
from manualpar.strategies.shared_options import PARAMETER_SHARDING
from manualpar.training.config import fields_of, flatten_config, load_config


def help_text(description: str, default_config: Path, flags: Mapping[str, str]) -> str:
    """Returns the text of `--help`: the flags, and the fields of the default config.

    Args:
      description: The first lines.
      default_config: The file of the default config.
      flags: The help of each flag, by name.
    """
    config = load_config(default_config)
    fields = fields_of(config)
    meanings = {name: field.meaning for name, field in fields.items() if field.meaning}
    meanings |= {x.field: x.meaning for x in PARAMETER_SHARDING.values()}
    meanings |= {x.field: x.meaning for x in PROGRAM_OPTIONS.values()}
    lines = [f"{description.strip()}\n\nFlags:"]
    lines += [_flag(name, text) for name, text in flags.items()]
    lines.append(f"\nFields of {default_config.name}, each a flag --<field>=<value>:")
    for name, value in flatten_config(config).items():
        expected = f"  ({fields[name].expectation()})" if name in fields else ""
        lines.append(f"  {name:31s}  {value or repr(value)}{expected}")
        if name in meanings:
            lines.append(textwrap.indent(textwrap.fill(meanings[name], 90), " " * 6))
    return "\n".join(lines)


def _flag(name: str, text: str) -> str:
    """Returns the lines of a flag: its name, and its help beside it."""
    first = f"  --{name.replace('_', '-'):20s}  "
    return textwrap.fill(text, 100, initial_indent=first, subsequent_indent=" " * len(first))
