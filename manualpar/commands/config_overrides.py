"""Loads a config with the fields that a command line sets, through `ml_collections.config_flags`.

A field that the config lacks, and a value of another type, raise a `UsageError` of one sentence.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import ml_collections
from absl import flags as absl_flags
from ml_collections import config_flags

from manualpar.commands.results import users_mistakes
from manualpar.errors import UsageError, nearest
from manualpar.training.checkpoints.compatibility import REMOVED
from manualpar.training.config import flatten_config, load_config
from manualpar.training.config_fields import FIELDS
from manualpar.training.imported_model import fill_from_hf

OVERRIDE = re.compile(r"--?(no)?config\.")
EXPECTED: Mapping[type, str] = {
    int: "an integer without point or exponent",
    float: "a number",
    bool: "true or false",
    tuple: "a tuple of pairs such as (('embed', None), ('mlp', 'data'))",
    ml_collections.ConfigDict: "a dict",
}
EXAMPLES: Mapping[str, str] = {
    "parallel.mesh": """--config.parallel.mesh="{'replica': 2, 'data': -1}\"""",
    "optimizer.arguments": """--config.optimizer.arguments="{'nesterov': True}\"""",
    "schedule.arguments": """--config.schedule.arguments="{'alpha': 0.1}\"""",
}


def load_with(path: Path, overrides: list[str]) -> ml_collections.ConfigDict:
    """Loads a config and applies overrides, such as `--config.seed=1`, to it.

    Raises:
      UsageError: The file, or an override, is wrong.
    """
    config = load_config(path)
    _check_fields(config, overrides)
    arguments = ["", *overrides]
    values = absl_flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=arguments)

    def kind_of(name: str) -> tuple[type, str]:
        default = functools.reduce(lambda group, key: group[key], name.split(".")[1:], config)
        if isinstance(default, ml_collections.ConfigDict):
            field = FIELDS.get(name.removeprefix("config."))
            words = field.expectation() if field else "a dict such as {'data': -1}"
            return type(default), words.removeprefix("a dict")
        example = f" such as {default!r}" if type(default) in (int, float) else ""
        return type(default), example

    with explained(kind_of):
        values(arguments)
    overridden = [
        argument.split("=")[0].split(".", 1)[1] for argument in overrides if "." in argument
    ]
    with users_mistakes():
        return fill_from_hf(values.config, given=overridden)


def _check_fields(config: ml_collections.ConfigDict, overrides: Sequence[str]) -> None:
    """Refuses an argument `--config.<field>` if the config has no such field."""
    values = flatten_config(config)
    groups = {name.rsplit(".", depth)[0] for name in values for depth in range(name.count(".") + 1)}
    dicts = {name: value for name, value in values.items() if isinstance(value, dict)}
    entries = {f"{name}.{key}" for name, entry in dicts.items() for key in entry}
    for argument in filter(OVERRIDE.match, overrides):
        field = argument.split("=")[0].split(".", 1)[1]
        if field in REMOVED and field not in values:
            raise UsageError(f"{argument}: {field} was removed: {REMOVED[field][1]}; leave it out.")
        if field not in groups | entries:
            near = nearest(field, values.keys() | entries)
            mend = ""
            if (name := field.rpartition(".")[0]) in dicts:
                mend = f"; to change the entries, set the complete dict, as in {EXAMPLES[name]}"
            raise UsageError(
                f"{argument}: the config has no field {field!r}; the nearest one is "
                f"--config.{near}{mend}."
            )


@contextlib.contextmanager
def explained(kind_of: Callable[[str], tuple[type, str] | None]) -> Iterator[None]:
    """Turns absl's errors into `UsageError`s.

    `kind_of(flag)` returns the type of a flag's value and an example value for the message, or
    `None` if there is no such flag.
    """
    try:
        yield
    except absl_flags.IllegalFlagValueError as error:
        message = str(error).splitlines()[0]
        found = re.match(r"flag (--([\w.]+)=.*?): ", message)
        kind, example = (found and kind_of(found[2])) or (None, "")
        if found and kind is not None and kind in EXPECTED:
            message = f"{found[1]}: expected {EXPECTED[kind]}{example}"
        raise UsageError(f"{message}.") from error
    except absl_flags.Error as error:
        raise UsageError(f"{error}.") from error
