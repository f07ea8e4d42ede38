"""Translates the arguments that people type into the flags that absl and `config_flags` define.

    manualpar train fsdp_lm --num-processes=2 --model.num_layers=4 --mesh=data=4,model=2

becomes

    --config=fsdp_lm --num_processes=2 --config.model.num_layers=4
    --config.parallel.mesh={'data': 4, 'model': 2}

Dashes and underscores in a flag's name mean the same. A name with a dot is a field of the config,
and so are the fields that are in no group. Everything else stays as it is.
"""

import re
from collections.abc import Collection, Mapping, Sequence

from manualpar.errors import UsageError
from manualpar.training.config_fields import FIELDS

MESH = "mesh"
MESH_HELP = "The mesh: its axes with their sizes, such as data=4,model=2; -1 for all other devices."
# Fields of a config that are in no group, such as `seed`.
UNGROUPED = frozenset(name for name in FIELDS if "." not in name)


def translate(
    arguments: Sequence[str],
    *,
    flags: Collection[str],
    switches: Collection[str] = (),
    renamed: Mapping[str, str] | None = None,
    positional: str = "config",
    fields: Collection[str] = (),
) -> list[str]:
    """Translates the arguments of a command, without the program's name.

    Args:
      arguments: The arguments.
      flags: The names of the command's flags, with underscores.
      switches: The flags among these that take no value, so that `--no-compile` turns one off.
      renamed: Old names of flags, each with its new name.
      positional: The flag that the arguments before the first flag are values of. Only `config`
        may have several.
      fields: The fields of a config that only this command has.

    Raises:
      UsageError: The value of `--mesh` is missing or malformed.
    """
    renamed = renamed or {}
    given = list(arguments)
    translated: list[str] = []
    while given and not given[0].startswith("-"):
        translated.append(f"--{positional}={given.pop(0)}")
        if positional != "config":  # A field has one value; the command refuses more arguments.
            break
    rest = iter(given)
    for argument in rest:
        match = re.fullmatch(r"(--?)([A-Za-z][^=\s]*)(=.*)?", argument, re.DOTALL)
        if not match:
            translated.append(argument)
            continue
        name, value = match[2].replace("-", "_"), match[3] or ""
        name = renamed.get(name, name)
        if name == MESH and MESH not in flags:
            mesh = parse_mesh(value[1:] if value else next(rest, ""))
            translated.append(f"--config.parallel.mesh={mesh}")
        elif name in flags:
            translated.append(f"--{name}{value}")
        elif name.startswith("no_") and name[3:] in switches:
            translated.append(f"--no{name[3:]}{value}")
        elif name in fields or _is_field(name):
            translated.append(f"--config.{name}{value}")
        else:
            translated.append(f"--{name}{value}")
    return translated


def _is_field(name: str) -> bool:
    group = name.split(".")[0]
    return name in UNGROUPED or ("." in name and group not in ("config", "noconfig"))


def parse_mesh(text: str) -> dict[str, int]:
    """Parses the value of `--mesh`, such as `data=4,model=2`.

    Raises:
      UsageError: It is something else, or names an axis twice.
    """
    mesh: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if not axis.isidentifier() or not re.fullmatch(r"-?\d+", size) or axis in mesh:
            raise UsageError(f"--mesh={text}: expected axes such as data=4,model=2.")
        mesh[axis] = int(size)
    return mesh
