"""Tables of the options of builders, the functions such as `manualpar.fsdp` that build a program.

A builder checks its arguments with its table, a config derives fields from the table, and `help`
prints the table. An option is one entry of a `TypedDict` such as `ProgramOptions`: its annotation
gives the type and an `Option`, and the docstring of the class explains the option. So a new option
is written in one place.
"""

import collections.abc
import dataclasses
import difflib
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

_Builder = TypeVar("_Builder", bound=Callable[..., Any])
_SEQUENCES = (tuple, collections.abc.Sequence)
_ENTRY = re.compile(r"^  (\w+): (.*(?:\n    .*)*)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Option:
    """A keyword argument of a builder, such as `num_minibatches` of `manualpar.fsdp`.

    The annotation of an entry contains an `Option` with the first group of attributes;
    `option_table` adds the second group.

    Attributes:
      default: The value of an option that is not given.
      field: The dotted name of the config field that sets the option; `""` if no config sets it.
      minimum: The smallest number, or the fewest members of a sequence.
      expected: The allowed values in words, for messages. An option without words is checked here
        only if its type lists all values, as `bool` and `Literal` do.
      config_choices: The strings that a config may set, if the annotation does not list them.
      xla_chooses: What XLA chooses in modes other than `"manual"`, in words for messages. In these
        modes the option must have its default. `""` if the option is for all modes.

      name: The name of the keyword argument.
      kind: The type in the annotation, without `Required` and `Annotated`.
      required: Whether the option must be given.
      meaning: The first sentence of the option's entry in the docstring.
    """

    default: Any = None
    field: str = ""
    minimum: int | None = None
    expected: str = ""
    config_choices: tuple[str, ...] = ()
    xla_chooses: str = ""

    name: str = ""
    kind: Any = None
    required: bool = False
    meaning: str = ""

    @property
    def choices(self) -> tuple[Any, ...]:
        """All allowed values if the type lists them, otherwise `()`."""
        members = _members(self.kind)
        if members == (bool,):
            return (True, False)
        literals = [value for member in members for value in get_args(member)]
        if not all(get_origin(member) is Literal for member in members if member is not type(None)):
            return ()
        return ((None,) if type(None) in members else ()) + tuple(literals)

    @property
    def holds_names(self) -> bool:
        """Whether the value is a sequence of strings."""
        sequences = [x for x in _members(self.kind) if get_origin(x) in _SEQUENCES]
        return any(get_args(x)[0] is str for x in sequences)

    def check(self, builder: str, value: Any) -> None:
        """Refuses a value that is not allowed; `builder` begins the message."""
        if self.choices:
            check_choice(builder, self.name, value, self.choices)
        elif self.expected and not self._allows(value):
            error = ValueError if self.kind is int else TypeError
            raise error(f"{builder}: {self.name}={value!r}, expected {self.expected}.")

    def _allows(self, value: Any) -> bool:
        if not any(_is_of(value, member) for member in _members(self.kind)):
            return False
        if value is None or self.minimum is None:
            return True
        return (len(value) if isinstance(value, list | tuple) else value) >= self.minimum

    def describe(self) -> str:
        """Describes the option: its name, type, default and meaning."""
        kinds = " | ".join(map(_name, _members(self.kind)))
        default = "" if self.required else f" = {self.default!r}"
        return f"{self.name}: {kinds}{default}. {self.meaning}"


OptionTable = Mapping[str, Option]


def option_table(options: type, *, beyond: OptionTable = types.MappingProxyType({})) -> OptionTable:
    """Reads the options of a `TypedDict`, by name.

    Args:
      options: The `TypedDict`. Each annotation is `Annotated[kind, Option(...)]`.
      beyond: Options to leave out, such as those of the class that `options` extends.
    """
    meanings = first_sentences(options)
    table = {}
    for name, annotation in typing.get_type_hints(options, include_extras=True).items():
        if name in beyond:
            continue
        required = get_origin(annotation) is typing.Required
        kind, option = get_args(get_args(annotation)[0] if required else annotation)
        table[name] = dataclasses.replace(
            option, name=name, kind=kind, required=required, meaning=meanings.get(name, "")
        )
    return table


def first_sentences(documented: object) -> dict[str, str]:
    """Returns the first sentence of each entry in the `Attributes:` or `Args:` of a docstring."""
    return {
        name: re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]
        for name, text in _ENTRY.findall(inspect.getdoc(documented) or "")
    }


def check_options(builder: str, options: Mapping[str, Any], table: OptionTable) -> None:
    """Refuses options that are unknown, missing or not allowed.

    Raises:
      TypeError: An option is unknown, missing or of the wrong type.
      ValueError: A value is not among the choices, or a number is too small.
    """
    for name in options:
        if name not in table:
            near = difflib.get_close_matches(name, table, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise TypeError(
                f"{builder}: {name!r} is not an option, expected some of {', '.join(table)}, or "
                f"the builder's own{hint}"
            )
    for option in table.values():
        if option.name in options:
            option.check(builder, options[option.name])
        elif option.required:
            raise TypeError(
                f"{builder}: {option.name}= is missing, expected it as a keyword argument."
            )


def with_defaults(options: Mapping[str, Any], table: OptionTable) -> dict[str, Any]:
    """Returns the options of `table`, with the default of each option that is not given."""
    return {name: options.get(name, option.default) for name, option in table.items()}


def explain_options(builder: _Builder, table: OptionTable) -> _Builder:
    """Adds a list of options to a builder's docstring, which `help` prints."""
    wrap = textwrap.TextWrapper(
        96, initial_indent="  ", subsequent_indent="    ", break_long_words=False
    )
    lines = [wrap.fill(option.describe()) for option in table.values()]
    text = inspect.cleandoc(builder.__doc__ or "")
    builder.__doc__ = "\n".join([text, "", "Options:", *lines])
    return builder


def check_choice(builder: str, field: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Refuses a value that is not among the choices."""
    if isinstance(value, bool) is not isinstance(choices[0], bool) or value not in choices:
        raise ValueError(
            f"{builder}: {field}={value!r}, expected one of {', '.join(map(repr, choices))}."
        )


def _members(kind: Any) -> tuple[Any, ...]:
    """Returns the members of a union; for any other type, a tuple of only this type."""
    return get_args(kind) if get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _is_of(value: Any, kind: Any) -> bool:
    """Returns whether a value is of a type; members of lists and tuples are checked too."""
    origin = get_origin(kind) or kind
    if origin in _SEQUENCES:
        allowed = (list, tuple) if origin is collections.abc.Sequence else (tuple,)
        member = get_args(kind)[0]
        return isinstance(value, allowed) and all(_is_of(each, member) for each in value)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin)


def _name(kind: Any) -> str:
    """Returns a type as a user writes it, without the modules of its names."""
    if kind is type(None):
        return "None"
    if get_origin(kind) is Literal:
        return " | ".join(map(repr, get_args(kind)))
    if isinstance(kind, type) and not get_args(kind):
        return kind.__name__
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", str(kind))
