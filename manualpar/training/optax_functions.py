"""Finds functions of optax by name, and checks the arguments that a config gives them.

The signature of a function says which arguments it has. Its annotations and defaults say which
values an argument may have: numbers, booleans, strings, names of dtypes, and tuples and dicts of
them. A config cannot hold other values, such as functions and arrays.
"""

import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args, get_origin

import jax.numpy as jnp
import optax
import optax.contrib

from manualpar.errors import nearest

# The argument of a schedule that is the learning rate; the first one that a schedule has.
RATES = ("peak_value", "init_value", "value")
# Optimizers that evaluate other parameters than they train; a run evaluates the trained ones.
OWN_EVALUATION = ("schedule_free_adamw", "schedule_free_sgd")
# Optimizers that treat arrays of two dims as matrices, and other arrays in another way.
OF_MATRICES = ("galore", "muon")


class Kind(NamedTuple):
    """The values that an argument may have: in words, and a function that converts them.

    `convert` raises a `ValueError` or a `TypeError` for a value that is not allowed.
    """

    words: str
    convert: Callable[[Any], Any]


def optimizers() -> dict[str, Callable[..., Any]]:
    """Returns the optimizers of optax and `optax.contrib` that a config can name.

    They have an argument `learning_rate`, and need no other optimizer, function or array. Parts of
    optimizers (`scale_by_*`) are left out, because some of them have the opposite sign.
    """

    def is_optimizer(name: str, parameters: Mapping[str, inspect.Parameter]) -> bool:
        is_whole = "learning_rate" in parameters and not name.startswith("scale_by_")
        others = [p for key, p in parameters.items() if key != "learning_rate"]
        return is_whole and all(kind_of(p) for p in others if p.default is p.empty)

    # If both modules have the name, optax's own is deprecated.
    return _functions(optax, is_optimizer) | _functions(optax.contrib, is_optimizer)


def schedules() -> dict[str, Callable[..., optax.Schedule]]:
    """Returns the schedules of optax that have an argument for the learning rate (`RATES`)."""
    return _functions(optax.schedules, lambda _, parameters: bool({*RATES} & parameters.keys()))


def _functions(
    module: types.ModuleType, accepts: Callable[[str, Mapping[str, inspect.Parameter]], bool]
) -> dict[str, Callable[..., Any]]:
    """Returns the public functions of a module whose name and signature are accepted."""
    found = {}
    for name, function in inspect.getmembers(module, callable):
        # Some functions are partial functions, such as `optax.nadam`.
        if name.startswith("_") or not inspect.isfunction(getattr(function, "func", function)):
            continue
        if accepts(name, inspect.signature(function).parameters):
            found[name] = function
    return found


def address(function: Callable[..., Any], name: str) -> str:
    """Returns the name by which users import a function, such as `optax.contrib.muon`."""
    is_contributed = getattr(optax.contrib, name, None) is function
    return f"optax.contrib.{name}" if is_contributed else f"optax.{name}"


def convert_arguments(
    field: str,
    function: Callable[..., Any],
    name: str,
    arguments: Mapping[str, Any],
    *,
    set_by: Mapping[str, str],
    given: Iterable[str] = (),
) -> dict[str, Any]:
    """Checks the arguments that a config gives a function, and converts them for the call.

    Args:
      field: The config field that has the arguments, such as `config.optimizer.arguments`.
      function: The function.
      name: The function's name.
      arguments: The arguments in the config.
      set_by: The fields that set the function's other arguments, by argument.
      given: Other arguments that have a value if `arguments` does not give one.

    Raises:
      ValueError: An argument is unknown or missing, belongs to another field, or has a value that
        is not allowed. The message names the field.
    """
    parameters = inspect.signature(function).parameters
    called = address(function, name)
    kinds = {key: kind_of(p) for key, p in parameters.items() if key not in set_by}
    known = [key for key, kind in kinds.items() if kind]
    for key, value in arguments.items():
        if key in set_by and key in parameters:
            raise ValueError(
                f"{field} has {key!r}, which {set_by[key]} sets; set it there, and leave it out "
                f"of {field}."
            )
        if key in kinds and not kinds[key] and not _is_none(value, parameters[key]):
            raise ValueError(
                f"{field} has {key!r}, which is a function or an object in {called}, expected "
                "arguments that a config can hold: numbers, booleans, strings, names of dtypes, "
                "and tuples of them; leave it out."
            )
        if key not in kinds:
            near = f"; the nearest one is {nearest(key, known)!r}" if known else ""
            raise ValueError(
                f"{field} has {key!r}, which {called} does not have, expected "
                f"{_listed(known) or 'no arguments'}{near}."
            )
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in {*set_by, *given, *arguments}:
            raise ValueError(
                f"{field} has no {key!r}, which {called} needs, expected {_words(kinds[key])}; "
                f"""set --{field}="{{{key!r}: ...}}"."""
            )
    converted = {}
    for key, value in arguments.items():
        kind, parameter = kinds[key], parameters[key]
        if kind is None or _is_none(value, parameter):
            converted[key] = value
            continue
        try:
            converted[key] = kind.convert(value)
        except (TypeError, ValueError):
            or_none = " or None" if _may_be_none(parameter) else ""
            raise ValueError(
                f"{field} has {key}={value!r}, expected {kind.words}{or_none}, as {called} has it."
            ) from None
    return converted


def takes_schedule(function: Callable[..., Any]) -> bool:
    """Returns whether an optimizer's learning rate may be a schedule; otherwise it is a number."""
    annotation = inspect.signature(function).parameters["learning_rate"].annotation
    members = _members(annotation)
    return annotation is inspect.Parameter.empty or any(map(_is_callable, members))


def kind_of(parameter: inspect.Parameter) -> Kind | None:
    """Returns the values that an argument may have; `None` if a config cannot hold them."""
    default, members = parameter.default, _members(parameter.annotation)
    literals = tuple(x for m in members if get_origin(m) is Literal for x in get_args(m))
    is_variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    if is_variadic or any(getattr(m, "__module__", "").startswith("optax") for m in members):
        return None
    if "dtype" in parameter.name:
        return Kind("the name of a floating-point dtype such as 'bfloat16'", _dtype)
    if literals:
        return Kind(f"one of {_listed(literals)}", lambda value: _choice(value, literals))
    if isinstance(default, bool) or {*members} - {type(None)} == {bool}:
        return Kind("True or False", _boolean)
    if (containers := [m for m in members if _is_container(m)]) or type(default) is tuple:
        if any(get_origin(m) is dict for m in containers):
            return Kind("a dict of numbers", _dict)
        example = f" such as {default!r}" if type(default) is tuple else ""
        has_strings = type(default) is tuple and any(isinstance(x, str) for x in default)
        is_string = str in members
        return Kind(
            f"a tuple{example}{' or a string' * is_string}",
            lambda value: (
                value if is_string and isinstance(value, str) else _tuple(value, has_strings)
            ),
        )
    if type(default) is int or (int in members and float not in members):
        return Kind("an integer", _integer)
    if type(default) is float or float in members:
        return Kind("a finite number", _number)
    return Kind("a string", _string) if str in members or isinstance(default, str) else None


def _members(annotation: Any) -> tuple[Any, ...]:
    """Returns the types that an annotation allows, without unions."""
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(x for member in get_args(annotation) for x in _members(member))
    return (annotation,)


def _is_callable(annotation: Any) -> bool:
    return get_origin(annotation) is Callable


def _is_container(annotation: Any) -> bool:
    """Returns whether an annotation is a tuple, another sequence, or a dict of plain values."""
    origin = get_origin(annotation)
    if not (isinstance(origin, type) and issubclass(origin, Iterable)):
        return False
    inner = [x for argument in get_args(annotation) for x in _members(argument)]
    # A tree of arrays is annotated as an iterable of names that are defined later.
    return not any(_is_callable(x) or isinstance(x, typing.ForwardRef) for x in inner)


def _is_none(value: Any, parameter: inspect.Parameter) -> bool:
    """Returns whether a value is `None`, and the argument may be `None`."""
    return value is None and _may_be_none(parameter)


def _may_be_none(parameter: inspect.Parameter) -> bool:
    return parameter.default is None or type(None) in _members(parameter.annotation)


def _words(kind: Kind | None) -> str:
    return kind.words if kind else "a value"


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(repr, names))


def _refuse(value: Any) -> Any:
    raise TypeError(value)


def _choice(value: Any, choices: tuple[Any, ...]) -> Any:
    return value if value in choices else _refuse(value)


def _boolean(value: Any) -> bool:
    return value if isinstance(value, bool) else _refuse(value)


def _integer(value: Any) -> int:
    return value if type(value) is int else _refuse(value)


def _number(value: Any) -> int | float:
    return value if type(value) in (int, float) and math.isfinite(value) else _refuse(value)


def _string(value: Any) -> str:
    return value if isinstance(value, str) else _refuse(value)


def _dtype(value: Any) -> Any:
    dtype = jnp.dtype(_string(value))
    return dtype if jnp.issubdtype(dtype, jnp.floating) else _refuse(value)


def _tuple(value: Any, has_strings: bool) -> tuple[Any, ...]:
    """Converts a sequence of numbers, maybe of strings too, and of such sequences to tuples."""
    if not isinstance(value, tuple | list):
        return _refuse(value)
    members: list[Any] = []
    for x in value:
        if isinstance(x, tuple | list):
            members.append(_tuple(x, has_strings))
        else:
            members.append(x if has_strings and isinstance(x, str) else _number(x))
    return tuple(members)


def _dict(value: Any) -> dict[int, Any]:
    """Converts a dict from steps to numbers; in JSON and in configs the steps may be strings."""
    if not isinstance(value, Mapping):
        return _refuse(value)
    return {int(key): _number(number) for key, number in value.items()}
