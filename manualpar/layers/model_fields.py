"""Groups of a model's fields: frozen dataclasses that model, layers and configs share.

A group is defined in the file of the layer that uses it, and checks its own fields. Models pass it
to their layers unchanged. `config_field` declares a field once: its default, its *flat* name, and
the values that a config may have. The docstring of the dataclass explains the field; `--help` shows
the first sentence. Flat names are unique among all fields of a model. Configs and the tables of
`config.json` use flat names, because a command-line flag sets one value.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from manualpar.core.model.options import first_sentences
from manualpar.strategies import Field

__all__ = [
    "LARGEST_FLOAT",
    "MOST_WRITTEN_OUT",
    "FieldGroup",
    "config_field",
    "config_fields",
    "find_fields",
    "flat_field",
    "refuse",
    "refuse_unknown",
    "replace_in_groups",
]

# The largest number of layers, minibatches or experts that the program contains one by one. Tracing
# and compiling takes 0.1 s for a layer or a minibatch, and 12 ms for an expert, because each expert
# has a metric of how often it is chosen.
MOST_WRITTEN_OUT = 1000
LARGEST_FLOAT = 1e38  # Fits into a float32.
LARGEST_SIZE = 2**31


def config_field(
    default: Any,
    flat: str = "",
    minimum: float | None = None,
    *,
    below: float | None = None,
    choices: tuple[str, ...] = (),
    required: bool = False,
) -> Any:
    """Declares a field of a model, or of a group, that `config.model` has too.

    Args:
      default: The default; its type is the type of the field.
      flat: The flat name; `""` if it is the field's own name.
      minimum: See `Field`.
      below: See `Field`; by default the largest size or float, if there is a minimum.
      choices: See `Field`.
      required: Whether every config must set the field.
    """
    kind = type(default)
    if below is None and minimum is not None:
        below = LARGEST_FLOAT if kind is float else LARGEST_SIZE
    of_names = kind is tuple and any(isinstance(x, str) for x in default)
    of_numbers = kind is tuple and not choices and not of_names
    allowed = Field(
        kind,
        minimum,
        below,
        choices,
        default=None if required else default,
        holds_names=of_names,
        holds_numbers=of_numbers,
    )
    return dataclasses.field(default=default, metadata={"flat": flat, "allowed": allowed})


def flat_field(default: Any, flat: str) -> Any:
    """Declares a field that `config.model` lacks; `flat` is the field's flat name."""
    return dataclasses.field(default=default, metadata={"flat": flat})


class FieldGroup:
    """A group of fields; its `repr` shows only the fields that differ from the defaults.

    A subclass is a frozen dataclass with `repr=False`.
    """

    def __repr__(self) -> str:
        fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
        values = {field: getattr(self, field.name) for field in fields}
        shown = [f"{f.name}={value!r}" for f, value in values.items() if value != f.default]
        return f"{type(self).__name__}({', '.join(shown)})"


def refuse(group: Any, field: str, expected: str) -> NoReturn:
    """Raises a ValueError that names a field of a group, its value, and the expected values."""
    value = getattr(group, field)
    raise ValueError(f"{type(group).__name__}: {field} is {value!r}, expected {expected}.")


def refuse_unknown(group: Any, field: str, known: tuple[Any, ...]) -> None:
    """Raises a ValueError if the value of a group's field is not in `known`."""
    if getattr(group, field) not in known:
        refuse(group, field, f"one of {', '.join(map(repr, known))}")


@dataclasses.dataclass(frozen=True)
class FlatField:
    """A field with a flat name.

    Attributes:
      path: The names of the groups that contain the field, and the field's name.
      default: The default.
      allowed: The values that a config may have; `None` if `config.model` has no such field.
    """

    path: tuple[str, ...]
    default: Any
    allowed: Field | None


def find_fields(kind: type[Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, FlatField]]:
    """Yields the fields with a flat name of a dataclass and of the groups in it: (name, field)."""
    meanings = first_sentences(kind)
    for field in dataclasses.fields(kind):
        inside = (*path, field.name)
        if "flat" in field.metadata:
            allowed = field.metadata.get("allowed")
            if allowed is not None:
                allowed = dataclasses.replace(allowed, meaning=meanings.get(field.name, ""))
            name = field.metadata["flat"] or field.name
            yield name, FlatField(inside, field.default, allowed)
        elif dataclasses.is_dataclass(field.default):
            yield from find_fields(type(field.default), inside)


def config_fields(kind: type[Any]) -> Iterator[tuple[str, Field]]:
    """Yields the fields that `config.model` has: (flat name, allowed values)."""
    for name, field in find_fields(kind):
        if field.allowed is not None:
            yield name, field.allowed


def replace_in_groups(group: Any, changes: Mapping[tuple[str, ...], Any]) -> Any:
    """Returns a copy of a group, or of a model, with new values for some fields.

    Args:
      group: The group. It may contain other groups.
      changes: The new values by the paths of the fields, see `FlatField`.
    """
    values: dict[str, Any] = {}
    inner: dict[str, dict[tuple[str, ...], Any]] = {}
    for (name, *rest), value in changes.items():
        if rest:
            inner.setdefault(name, {})[tuple(rest)] = value
        else:
            values[name] = value
    for name, changed in inner.items():
        values[name] = replace_in_groups(getattr(group, name), changed)
    return dataclasses.replace(group, **values)
