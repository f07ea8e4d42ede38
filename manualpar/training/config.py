"""Loads config files, and checks the fields of a config before anything else happens.

A config file is Python with a `get_config()`, which returns an `ml_collections.ConfigDict`. Each
field is a number, a string, a bool, a tuple or a dict, so that a flag can set it and JSON can store
it (tuples become lists). `manualpar.training.config_fields` lists the fields. A config has no other
fields, except those of registered strategies. It may leave out a field with a default;
`complete_config` fills in the default. If a config has a field that only other strategies use, the
field is checked but not used.
"""

import ast
import dataclasses
import difflib
import importlib.util
import math
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_collections

from manualpar.core.mesh.mesh import check_order
from manualpar.errors import UsageError, suggest
from manualpar.layers.model_fields import MOST_WRITTEN_OUT
from manualpar.strategies import strategy_kinds
from manualpar.strategies.registry import Field
from manualpar.training.checkpoints.compatibility import REMOVED, renamed_value
from manualpar.training.config_fields import DICT_FIELDS, FIELDS, MODEL_FIELDS
from manualpar.training.optimizer import check_optimizer

OWN = "own"  # The name of a model that is given in Python.


def load_config(path: Path) -> ml_collections.ConfigDict:
    """Runs a config file, and returns its config, completed and locked, but not checked."""
    return complete_config(run_config_file(path))


def complete_config(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Returns a locked copy of a config, with the default of every field that it leaves out."""
    config = config.copy_and_resolve_references().unlock()
    for name, default in field_defaults(config).items():
        group, field = name.split(".")
        if group not in config:
            config[group] = ml_collections.ConfigDict()
        # If a group is not a `ConfigDict`, `check_config` reports it.
        if isinstance(config[group], ml_collections.ConfigDict) and field not in config[group]:
            config[group][field] = default
    return config.lock()


def field_defaults(config: Mapping[str, Any] | ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns the default of each field that this config may leave out, by dotted name."""
    fields = fields_of(config).items()
    return {name: field.default for name, field in fields if field.default is not None}


def fields_of(config: Mapping[str, Any] | ml_collections.ConfigDict) -> dict[str, Field]:
    """Returns `FIELDS`, with the fields of this config's model and strategy added."""
    values, kinds = flatten_config(config), strategy_kinds()
    kind = kinds.get(str(values.get("parallel.strategy")))
    return {
        **FIELDS,
        **own_fields(values),
        "parallel.strategy": dataclasses.replace(FIELDS["parallel.strategy"], choices=tuple(kinds)),
        **MODEL_FIELDS.get(str(values.get("model.name")), {}),
        **({f"parallel.{name}": field for name, field in kind.fields.items()} if kind else {}),
    }


def is_own(model_name: Any) -> bool:
    """Returns whether a `model.name` stands for a user's model: `OWN` or module:function."""
    return model_name == OWN or (isinstance(model_name, str) and ":" in model_name)


def own_fields(values: Mapping[str, Any]) -> dict[str, Field]:
    """Returns the fields that a user added to the groups `model` and `data` of an own model."""
    if not is_own(values.get("model.name")):
        return {}
    names = [x for x in values if x.startswith(("model.", "data.")) and x not in FIELDS]
    return {name: Field(type(values[name]), meaning="A field of this config.") for name in names}


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the value of each field by its dotted name; a field of `DICT_FIELDS` is a dict."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        is_dict = isinstance(value, Mapping | ml_collections.ConfigDict)
        if is_dict and name not in DICT_FIELDS:
            flat |= flatten_config(value, f"{name}.")
        else:
            flat[name] = ml_collections.ConfigDict(value).to_dict() if is_dict else value
    return flat


# Said in place of the nearest field if none is near.
ALL_FIELDS = "; `manualpar train --help` lists all"


def check_config(config: Any) -> None:
    """Checks a config against `fields_of(config)`."""
    if not isinstance(config, ml_collections.ConfigDict):
        raise ValueError(
            f"config is a {type(config).__name__}, expected an ml_collections.ConfigDict."
        )
    values, fields = flatten_config(config), fields_of(config)
    own = own_fields(values)
    for name in own:
        _check_own_field(name, values[name])
    if not is_own(model := values.get("model.name", OWN)) and model not in MODEL_FIELDS:
        raise ValueError(
            f"config.model.name is {one_line(repr(model))}, expected one of "
            f"{', '.join(map(repr, MODEL_FIELDS))}, or module:function for a model of your own"
            f"{suggest(str(model), MODEL_FIELDS)}."
        )
    for name in fields:
        if name not in values and fields[name].default is None:
            raise ValueError(f"config.{name} is missing, expected {fields[name].expectation()}.")
    for kind in strategy_kinds().values():
        # A config may also have fields of a registered strategy that it does not use.
        fields |= {f"parallel.{name}": field for name, field in kind.fields.items()}
    for name, value in values.items():
        if name in own:
            continue
        if name in REMOVED:
            raise ValueError(f"config.{name} was removed: {REMOVED[name][1]}; delete the field.")
        if name not in fields:
            model = values["model.name"]
            of_model = f" of a config with model.name={model!r}" if model in MODEL_FIELDS else ""
            near = suggest(name, fields, show="config.{}".format, otherwise=ALL_FIELDS)
            raise ValueError(f"config.{name} is not a known field{of_model}{near}.")
        if not fields[name].allows(value):
            shown = one_line(repr(value))
            message = f"config.{name} is {shown}, expected {fields[name].expectation()}"
            if renamed := renamed_value(name, value):
                message += f"; it is called {renamed!r} now"
            elif fields[name].choices and isinstance(value, str):
                message += suggest(value, fields[name].choices)
            raise ValueError(f"{message}.")
    _check_written_out(config)
    if not config.parallel.mesh:
        raise ValueError("config.parallel.mesh is {}, expected an axis such as {'data': -1}.")
    for axis, size in config.parallel.mesh.items():
        if not isinstance(axis, str) or not axis:
            raise ValueError(
                f"config.parallel.mesh has an axis {axis!r}, expected names such as 'data'."
            )
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise ValueError(
                f"config.parallel.mesh.{axis} is {one_line(repr(size))}, expected a number of "
                "devices, or -1 for the rest."
            )
    check_order("config.parallel.mesh_order", config.parallel.mesh, config.parallel.mesh_order)
    check_optimizer(complete_config(config))


def _check_own_field(name: str, value: Any) -> None:
    """Refuses a field that is probably a misspelt one, and a value that JSON cannot store."""
    if near := difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.85):
        raise ValueError(
            f"config.{name} is not a known field; the nearest one is config.{near[0]}. If it is a "
            "field of your own, give it another name."
        )
    parts = value if isinstance(value, tuple) else (value,)
    is_plain = all(isinstance(x, bool | int | float | str) for x in parts)
    if not is_plain or any(isinstance(x, float) and not math.isfinite(x) for x in parts):
        raise ValueError(
            f"config.{name} is {one_line(repr(value))}, expected a finite number, a string, a "
            "bool, or a tuple of such."
        )


def _check_written_out(config: ml_collections.ConfigDict) -> None:
    """Refuses a config with so many unrolled layers or minibatches that compiling takes hours."""
    is_unrolled = config.model.name in MODEL_FIELDS and not config.model.get("scan_layers", False)
    for name in (*(("model.num_layers",) if is_unrolled else ()), "optimizer.num_minibatches"):
        group, field = name.split(".")
        if config[group][field] > MOST_WRITTEN_OUT:
            mend = "; or set config.model.scan_layers=True" if "scan_layers" in config.model else ""
            raise ValueError(
                f"config.{name} is {config[group][field]}, expected at most {MOST_WRITTEN_OUT}: "
                f"each is traced and compiled by itself{mend if field == 'num_layers' else ''}."
            )


# -------------------------------------------------------------------------------------------------
# Finds config files by their names, and runs them.
#
# The package brings the configs of its repository with it.
#
# A config has a name, such as `fsdp_lm` or `plan/llama3_8b`, or is a file of one's own, such as
# `my_config.py`. In the repository the package's configs are in `configs/`. A wheel has them in
# `manualpar/configs/`.


PACKAGE = Path(__file__).parents[1]


def config_folder() -> Path:
    """Returns the folder with the configs of the package."""
    installed = PACKAGE / "configs"
    return installed if installed.is_dir() else PACKAGE.parent / "configs"


def find_config(text: str) -> Path:
    """Returns the file of a config, given its name or a path that ends in `.py`.

    The file of a path may be missing; `load_config` refuses it.
    """
    if Path(text).suffix:
        return Path(text)
    names = dict(named_configs())
    if text not in names:
        raise UsageError(
            f"--config={text}: there is no config of this name{suggest(text, names)}. `manualpar "
            "configs` lists all; a file of your own ends in .py."
        )
    return names[text]


def named_configs() -> Iterator[tuple[str, Path]]:
    """Yields the name and the file of each config of the package, in the order of their names."""
    folder = config_folder()
    files = (path for path in folder.rglob("*.py") if path.name != "__init__.py")
    for path in sorted(files, key=lambda path: (len(path.parts), path)):
        yield path.relative_to(folder).with_suffix("").as_posix(), path


def first_sentence(path: Path) -> str:
    """Returns the first line of a config's docstring; the file is not executed."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def named_config(name: str) -> ml_collections.ConfigDict:
    """Returns the config of a name or file, as its `get_config()` returns it.

    A config that changes a few fields of another one begins with this, for example
    `named_config("fsdp_lm")`.

    Raises:
      UsageError: There is no config of this name, or see `run_config_file`.
    """
    return run_config_file(find_config(name))


def run_config_file(path: Path) -> ml_collections.ConfigDict:
    """Runs a config file, and returns what its `get_config()` returns."""

    def refused(why: str) -> UsageError:
        return UsageError(f"--config={path}: {why}.")

    try:
        is_file = path.is_file()
    except OSError as error:  # The name is too long, for example.
        raise refused(str(error.strerror)) from error
    if not is_file:
        raise refused("there is no such file; name one such as configs/fsdp.py")
    spec = importlib.util.spec_from_file_location("config_file", path)
    if spec is None or spec.loader is None:
        raise refused("expected a Python file whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.absolute().parent)
    if not path.is_relative_to(config_folder()) and folder not in sys.path:
        sys.path.append(folder)  # A config may import the modules beside it.
    try:
        spec.loader.exec_module(module)
        get_config = getattr(module, "get_config", None)
        config = get_config() if callable(get_config) else None
    except SyntaxError as error:
        raise refused(f"line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # Whatever the user's code raises.
        frames = traceback.extract_tb(error.__traceback__)
        line_numbers = [frame.lineno for frame in frames if frame.filename == spec.origin]
        where = f"line {line_numbers[-1]}: " if line_numbers else ""
        raise refused(
            f"{where}{type(error).__name__}: {one_line(error)}; expected a file whose get_config() "
            "returns the config"
        ) from error
    if not callable(get_config):
        raise refused("the file has no function get_config(), expected one")
    if not isinstance(config, ml_collections.ConfigDict):
        kind = type(config).__name__
        raise refused(f"get_config() returns a {kind}, expected an ml_collections.ConfigDict")
    return config


def one_line(value: object) -> str:
    """Returns the text of a value without line breaks."""
    return re.sub(r"\s*\n\s*", " ", str(value))
