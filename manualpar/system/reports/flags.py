"""The flags of commands: declared as data, parsed by absl, and explained by `--help`.

    FLAGS = {"text": Flag("The file to read.", Path, is_required=True)}
    flags = parse_flags(argv, USAGE, FLAGS)

This is the only parser of command lines. A command without a config calls `parse_flags`. Commands
with a config add `--config` and its fields, see `manualpar.commands.command_line`. Flags are
declared with underscores. On a command line a dash in a flag's name means the same, and messages
show a flag as it was typed. A user's mistake is one sentence, and ends the process with exit code
2.
"""

import contextlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags as absl_flags

from manualpar.errors import USAGE_EXIT_CODE, UsageError, print_error, suggest
from manualpar.system.reports.help_text import list_flags, print_help, wrap_text
from manualpar.system.storage import AnyPath, BucketPath, user_path

HELP = frozenset({"--help", "-help", "-h", "--helpshort"})
# The type of a flag's value -> the word for a value in `--help`, and the expectation in a message.
VALUES: Mapping[type, str] = {int: "NUMBER", float: "NUMBER", str: "TEXT", Path: "PATH"}
EXPECTED: Mapping[type, str] = {
    int: "an integer without point or exponent",
    float: "a number",
    bool: "true or false",
}
NO_NAMES: Mapping[str, str] = types.MappingProxyType({})


class Flag(NamedTuple):
    """A flag of a command, or an argument of it without `--`.

    Attributes:
      help: What it means, a sentence.
      kind: The type of the value.
      default: The value if the flag is not given; `[]` for one that repeats.
      in_buckets: Whether a path may begin with s3:// or gs://.
      value: The word for the value in `--help`; by default that of `VALUES`.
      choices: The allowed texts; any if there are none.
      is_required: Whether the flag must be given.
      repeats: Whether several values may be given; the value is then a list.
      is_argument: Whether the value is given without the flag's name.
      heading: The heading in `--help` under which the flag stands.
    """

    help: str
    kind: type = str
    default: Any = None
    in_buckets: bool = False
    value: str = ""
    choices: Sequence[str] = ()
    is_required: bool = False
    repeats: bool = False
    is_argument: bool = False
    heading: str = "Flags"

    def form(self, name: str) -> str:
        """Returns the flag as one types it, such as `--devices=NUMBER`."""
        if self.is_argument:
            return f"{name.upper()} ..." if self.repeats else name.upper()
        name = name.replace("_", "-")
        if self.kind is bool:
            return f"--{name}" if self.default is False else f"--[no-]{name}"
        return f"--{name}={self.value or VALUES[self.kind]}"

    def explain(self) -> str:
        """Returns the help with the allowed values and the default."""
        choices = [f"one of {', '.join(self.choices)}"] if self.choices else []
        is_shown = bool(self.default) or (self.kind is float and self.default is not None)
        default = [f"default {self.shown_default}"] if is_shown else []
        notes = "; ".join(choices + default)
        return f"{self.help} [{notes}]" if notes else self.help

    @property
    def shown_default(self) -> str:
        """The default as one types it, such as `300`."""
        return f"{self.default:g}" if self.kind is float else str(self.default)


def parse_flags(
    argv: Sequence[str],
    usage: str,
    flags: Mapping[str, Flag],
    *,
    renamed: Mapping[str, str] = NO_NAMES,
    check: Callable[[types.SimpleNamespace], None] = lambda flags: None,
) -> types.SimpleNamespace:
    """Parses the command line of a command without a config.

    Ends the process with code 0 after `--help`, and with code 2 after a mistake.

    Args:
      argv: The command line, the program's name first.
      usage: The first lines of `--help`; `{program}` in it stands for the program's name.
      renamed: Old names of flags, each with its new name.
      check: Checks the values, and may change them; raises `UsageError` for a mistake.

    Returns:
      An object with an attribute for each flag.
    """
    typed: dict[str, str] = {}
    try:
        if HELP & set(argv):
            print_help(f"{wrap_text(usage.replace('{program}', argv[0]))}\n\n{explain(flags)}")
            sys.exit(0)
        arguments = translate(argv[1:], flags, renamed=renamed, typed=typed)
        with naming_typed(typed):
            values, rest = read_flags([*argv[:1], *arguments], flags)
            for argument in rest:
                if re.match(r"--?[a-zA-Z_]", argument):
                    refuse_flag(argument, flags)
            _fill_argument(values, rest, flags)
            for name, flag in flags.items():
                if flag.is_required and values[name] in (None, []):
                    raise UsageError(f"{flag.form(name)} is missing: {flag.help}")
            found = types.SimpleNamespace(**values)
            check(found)
    except UsageError as error:
        print_error(error)
        sys.exit(USAGE_EXIT_CODE)
    return found


def explain(flags: Mapping[str, Flag]) -> str:
    """Returns the part of `--help` that lists flags, under their headings."""
    by_heading: dict[str, dict[str, str]] = {}
    for name, flag in flags.items():
        by_heading.setdefault(flag.heading, {})[flag.form(name)] = flag.explain()
    return "\n\n".join(f"{head}:\n{list_flags(texts)}" for head, texts in by_heading.items())


def check_one_of(flags: types.SimpleNamespace, *names: str, is_required: bool = False) -> None:
    """Refuses flags that exclude each other; `is_required` says whether one must be given."""
    forms = {name: f"--{name.replace('_', '-')}" for name in names}
    given = [form for name, form in forms.items() if getattr(flags, name) is not None]
    if len(given) > 1:
        raise UsageError(f"{given[1]} with {given[0]}: expected only one of them.")
    if is_required and not given:
        raise UsageError(f"expected {' or '.join(forms.values())}.")


# -------------------------------------------------------------------------------------------------
# From the arguments that people type to the values of flags.


def translate(
    arguments: Sequence[str],
    flags: Mapping[str, Flag],
    *,
    renamed: Mapping[str, str] = NO_NAMES,
    others: Callable[[str, str, Iterator[str]], tuple[str, str] | None] = lambda *_: None,
    typed: dict[str, str] | None = None,
) -> list[str]:
    """Translates the arguments of a command into those that absl understands.

    Args:
      arguments: The arguments, without the program's name.
      renamed: Old names of flags, each with its new name.
      others: Translates an argument whose name is none of the flags. It gets the name with
        underscores, the value with its `=`, and the arguments that follow, and returns the flag and
        the value; or `None` to leave the argument as it is.
      typed: Gets the name that was typed for each translated flag, for messages.
    """
    translated: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        match = re.fullmatch(r"(--?)([A-Za-z][^=\s]*)(=.*)?", argument, re.DOTALL)
        if not match:
            translated.append(argument)
            continue
        name, value = match[2].replace("-", "_"), match[3] or ""
        name = renamed.get(name, name)
        flag = flags.get(name)
        switch = flags.get(name[3:]) if name.startswith("no_") else None
        if flag is None and switch is not None and switch.kind is bool:
            if value:
                raise UsageError(f"{argument}: expected {match[1]}{match[2]} without a value.")
            form = f"--no{name[3:]}"
        elif flag is None and (other := others(name, value, rest)):
            form, value = other
        else:
            form = f"--{name}"
        translated.append(f"{form}{value}")
        if flag is not None and flag.kind is not bool and not value:
            translated += [text for text in [next(rest, None)] if text is not None]
        if typed is not None:
            typed[form] = match[1] + match[2]
    return translated


@contextlib.contextmanager
def naming_typed(typed: Mapping[str, str]) -> Iterator[None]:
    """Names flags in an error's message as they were typed; `typed` is that of `translate`."""
    try:
        yield
    except UsageError as error:
        message = str(error)
        for flag, name in typed.items():
            message = re.sub(rf"(?<![\w-]){re.escape(flag)}(?![\w.])", name, message)
        raise UsageError(message) from error


def read_flags(
    argv: Sequence[str],
    flags: Mapping[str, Flag],
    flag_values: absl_flags.FlagValues | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Reads the values of flags from translated arguments.

    `argv` begins with the program's name. The flags are defined in `flag_values`, by default in a
    new object, which may have others.

    Returns:
      The values by name, and the arguments that are none of the flags, nor the value of one.
    """
    flag_values = absl_flags.FlagValues() if flag_values is None else flag_values
    define = {
        int: absl_flags.DEFINE_integer,
        float: absl_flags.DEFINE_float,
        bool: absl_flags.DEFINE_boolean,
    }
    named = {name: flag for name, flag in flags.items() if not flag.is_argument}
    for name, flag in named.items():
        several, default = absl_flags.DEFINE_multi_string, absl_flags.DEFINE_string
        define_flag: Any = several if flag.repeats else define.get(flag.kind, default)
        define_flag(name, flag.default, flag.help, flag_values=flag_values)
    flag_values.set_gnu_getopt()  # Allows `--config.seed 1` in addition to `--config.seed=1`.
    with explained(lambda name: EXPECTED.get(flags[name].kind) if name in flags else None):
        _, *rest = flag_values(list(argv), known_only=True)
    values = {name: flag_values[name].value for name in named}
    return {name: _read(f"--{name}", value, flags[name]) for name, value in values.items()}, rest


def _fill_argument(values: dict[str, Any], given: list[str], flags: Mapping[str, Flag]) -> None:
    """Adds the values that are given without a flag's name."""
    name = next((name for name, flag in flags.items() if flag.is_argument), None)
    if name is not None:
        taken = len(given) if flags[name].repeats else 1
        found = [_read(flags[name].form(name), text, flags[name]) for text in given[:taken]]
        given = given[taken:]
        values[name] = found if flags[name].repeats else next(iter(found), flags[name].default)
    if given:
        raise UsageError(f"{given[0]!r} is not understood; --help lists what is.")


def _read(shown: str, value: Any, flag: Flag) -> Any:
    """Checks a text, and makes a path of it where the flag is one."""
    if isinstance(value, str) and "\0" in value:
        raise UsageError(f"{shown}={value!r}: expected a value without NUL characters.")
    if flag.choices and value not in (*flag.choices, flag.default):
        near = suggest(value, flag.choices, show=str)
        raise UsageError(f"{shown}={value}: expected one of {', '.join(flag.choices)}{near}.")
    if flag.kind is not Path or isinstance(value, list):
        return value
    return _path(shown, value, flag) if value else None


def _path(shown: str, value: str, flag: Flag) -> AnyPath:
    try:
        path = user_path(value)
    except ValueError as error:
        raise UsageError(f"{shown}: {error}") from None
    if isinstance(path, BucketPath) and not flag.in_buckets:
        raise UsageError(f"{shown}={path}: expected a path on a disk.")
    return path


def refuse_flag(argument: str, flags: Mapping[str, Flag], *more: str) -> None:
    """Refuses an argument that is no flag, and names the nearest of the flags and of `more`."""
    name = argument.lstrip("-").split("=")[0]
    near = suggest(
        name,
        {*(name for name, flag in flags.items() if not flag.is_argument), *more},
        show=lambda x: f"--{x.replace('_', '-') if x in flags else x}",
        otherwise="; --help lists all",
    )
    raise UsageError(f"--{name} is not a known flag{near}.")


@contextlib.contextmanager
def explained(expected: Callable[[str], str | None]) -> Iterator[None]:
    """Turns absl's errors into `UsageError`s.

    `expected(flag)` describes the values of a flag, or is `None` for a flag that it does not know.
    """
    try:
        yield
    except absl_flags.IllegalFlagValueError as error:
        message = str(error).splitlines()[0]
        found = re.match(r"flag (--([\w.]+)=.*?): ", message)
        if found and (words := expected(found[2])):
            message = f"{found[1]}: expected {words}"
        raise UsageError(f"{message}.") from error
    except absl_flags.Error as error:
        raise UsageError(f"{error}.") from error
