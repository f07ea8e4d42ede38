"""Makes the optimizer and the learning rate's schedule that a config names.

`config.optimizer.name` is an optimizer of optax or `optax.contrib`, and `config.schedule.name` is a
schedule of optax. Their arguments come from three places:

- Fields set the arguments that many functions have: `learning_rate`, `weight_decay`, the mask of
  the weight decay (`decay_mask`), and `b1` and `b2`. An optimizer without `b1` and `b2` ignores
  these two fields. A weight decay that the optimizer does not have is refused.
- `config.optimizer.arguments` and `config.schedule.arguments` have the other arguments, and may
  also have `b1` and `b2`, which then take precedence over the fields.
- The length of the run is `decay_steps` or `transition_steps` of a schedule, by default.

A run has T steps, of which the first w are the warm-up, and p is the learning rate of the config.
In the warm-up, update s (counted from 0) has the learning rate p (s + 1) / (w + 1). Then the
schedule begins, with T - w steps. By default it is half a cosine, from p to 0 at step T. A schedule
that has `warmup_steps` itself gets them, and all T steps.

Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
"""

import contextlib
import fnmatch
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin

import jax
import jax.numpy as jnp
import ml_collections
import optax
import optax.contrib

from manualpar.core.parameters.placement import choose_matrices
from manualpar.core.program.program import muon_dims
from manualpar.core.trees import path_name
from manualpar.errors import suggest

EVERYTHING = ("*",)


class _Call(NamedTuple):
    """A function of optax with its arguments, except an optimizer's learning rate."""

    function: Callable[..., Any]
    name: str
    arguments: Mapping[str, Any]

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The function's parameters."""
        return inspect.signature(self.function).parameters

    @property
    def address(self) -> str:
        """The name by which users import the function."""
        return address(self.function, self.name)


def check_optimizer(config: ml_collections.ConfigDict) -> None:
    """Checks the groups `optimizer` and `schedule` of a config, and calls nothing."""
    optimizer, num_steps = config.optimizer, config.training.num_steps
    if optimizer.warmup_steps > num_steps:
        raise ValueError(
            f"config.optimizer.warmup_steps is {optimizer.warmup_steps} and "
            f"config.training.num_steps is {num_steps}, expected at most as many, because the "
            f"warm-up would be longer than the run; set --config.optimizer.warmup_steps="
            f"{num_steps // 10}, or train for more steps."
        )
    schedule, call = _schedule_call(config), _optimizer_call(config)
    is_constant = schedule.name == "constant_schedule" and not optimizer.warmup_steps
    if not is_constant and not takes_schedule(call.function):
        raise ValueError(
            f"config.schedule.name is {schedule.name!r} and config.optimizer.warmup_steps is "
            f"{optimizer.warmup_steps}, expected 'constant_schedule' and 0, because the learning "
            f"rate of {call.address} must be a number; set --config.schedule.name=constant_schedule"
            " --config.optimizer.warmup_steps=0."
        )
    if call.name == "galore" and config.model.get("scan_layers"):
        raise ValueError(
            f"config.optimizer.name is {call.name!r} and config.model.scan_layers is True, "
            "expected False, because the optimizer treats each array of two dims as a matrix, and "
            "a scan stacks the layers' vectors to such arrays; set --config.model.scan_layers="
            "false."
        )


def make_schedule(config: ml_collections.ConfigDict) -> optax.Schedule:
    """Makes the learning rate of a config, a function of the number of earlier updates.

    The first update has a positive rate if there is a warm-up, so that no batch is wasted.
    """
    call, optimizer = _schedule_call(config), config.optimizer
    with _explained("schedule", call):
        schedule: optax.Schedule = call.function(**call.arguments)
    warmup = optimizer.warmup_steps
    if not warmup or "warmup_steps" in call.parameters:
        return schedule
    first = optimizer.learning_rate / (warmup + 1)
    return optax.join_schedules(
        [optax.linear_schedule(first, optimizer.learning_rate, warmup), schedule], [warmup]
    )


def describe_jump(
    before: ml_collections.ConfigDict, after: ml_collections.ConfigDict, step: int
) -> str:
    """Describes by how much the learning rate jumps if a run goes on with another config.

    A schedule ends with the run, so a shortened or prolonged run has another rate at every step.
    Returns a sentence; "" if the rate changes by less than a percent.
    """
    try:
        was = float(make_schedule(before)(step))
    except ValueError:  # A schedule of another version of optax, which this one refuses.
        return ""
    now = float(make_schedule(after)(step))
    if abs(was - now) <= 0.01 * max(abs(was), abs(now)):
        return ""
    lengths = [config.training.num_steps for config in (before, after)]
    why = "the schedule is another one"
    if lengths[0] != lengths[1]:
        why = f"training.num_steps was {lengths[0]:,} and is {lengths[1]:,}"
    return f"warning: the learning rate jumps from {was:.3g} to {now:.3g}, because {why}"


def make_optimizer(
    config: ml_collections.ConfigDict, schedule: optax.Schedule, parameters: Any
) -> optax.GradientTransformation:
    """Makes the optimizer of a config, with its clipping.

    Args:
      schedule: The learning rate. An optimizer that needs a number gets the config's.
      parameters: The tree of the program's parameters with a `ParameterInfo` at each leaf.
    """
    call, optimizer = _optimizer_call(config), config.optimizer
    rate = schedule if takes_schedule(call.function) else optimizer.learning_rate
    arguments, others = dict(call.arguments), None
    if OF_MATRICES in call.parameters:
        chosen = choose_matrices(parameters, optimizer.matrices, "config.optimizer.matrices")
        arguments[OF_MATRICES] = muon_dims(parameters, optimizer.matrices)
        others = jax.tree.map(lambda is_matrix: not is_matrix, chosen)
    with _explained("optimizer", call):
        tx = call.function(learning_rate=rate, **arguments)
    if others is not None and "adam_weight_decay" not in call.arguments:
        tx = _with_decay_of(others, tx, call, optimizer, rate)
    if not optimizer.clip_norm:
        return tx
    return optax.chain(optax.clip_by_global_norm(optimizer.clip_norm), tx)


def weight_decay_mask(params: Any, globs: Sequence[str] = ()) -> Any:
    """Marks the parameters to decay.

    By default these are all but biases, scales and arrays of fewer than two dims. Biases and scales
    are found by name, because in scanned layers they have two dims.

    Args:
      globs: Globs on the parameters' paths, such as `"*kernel"`; `*` matches any characters, even
        slashes. A parameter that matches a glob is marked, instead of the parameters above. A
        parameter that matches a glob with `!` before it, such as `"!*embedding*"`, is not marked.
    """
    named = [glob for glob in globs if not glob.startswith("!")]
    spared = [glob.removeprefix("!") for glob in globs if glob.startswith("!")]

    def decays(key_path: jax.tree_util.KeyPath, value: Any) -> bool:
        path = path_name(key_path)
        by_default = value.ndim > 1 and path.rpartition("/")[2] not in ("bias", "scale")
        return (_matches(path, named) if named else by_default) and not _matches(path, spared)

    return jax.tree_util.tree_map_with_path(decays, params)


def check_decay_mask(globs: Sequence[str], paths: Sequence[str]) -> None:
    """Refuses a glob of `config.optimizer.decay_mask` that matches no parameter.

    Args:
      globs: The globs, as in `weight_decay_mask`.
      paths: The paths of all parameters, such as `encoder/kernel`.
    """
    for glob in globs:
        if not fnmatch.filter(paths, glob.removeprefix("!")):
            raise ValueError(
                f"config.optimizer.decay_mask has {glob!r}, which matches no parameter, expected "
                "globs on the parameters' paths such as '*kernel' and '!*embedding*'"
                f"{suggest(glob.removeprefix('!'), paths)}."
            )


def _matches(path: str, globs: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, glob) for glob in globs)


def _schedule_call(config: ml_collections.ConfigDict) -> _Call:
    """Checks the schedule's name and arguments, and adds the arguments that other fields set."""
    name, given = config.schedule.name, config.schedule.arguments.to_dict()
    rate, warmup = config.optimizer.learning_rate, config.optimizer.warmup_steps
    known = schedules()
    if name not in known:
        raise ValueError(
            f"config.schedule.name is {name!r}, expected a schedule of optax, one of "
            f"{', '.join(map(repr, known))}{suggest(name, known)}."
        )
    parameters = inspect.signature(known[name]).parameters
    rate_name = next(key for key in RATES if key in parameters)
    filled: dict[str, Any] = {rate_name: rate}
    set_by = {rate_name: "config.optimizer.learning_rate"}
    length = config.training.num_steps
    if "warmup_steps" in parameters:
        filled["warmup_steps"] = warmup
        set_by["warmup_steps"] = "config.optimizer.warmup_steps"
    elif rate_name == "peak_value" and warmup:
        raise ValueError(
            f"config.optimizer.warmup_steps is {warmup} and config.schedule.name is {name!r}, "
            "expected 0, because this schedule begins with a rise of its own; set "
            "--config.optimizer.warmup_steps=0."
        )
    else:
        length = max(length - warmup, 1)
    lengths = {key: length for key in ("decay_steps", "transition_steps") if key in parameters}
    arguments = convert_arguments(
        "config.schedule.arguments", known[name], name, given, set_by=set_by, given=lengths
    )
    return _Call(known[name], name, {**filled, **lengths, **arguments})


def _optimizer_call(config: ml_collections.ConfigDict) -> _Call:
    """Checks the optimizer's name and arguments, and adds the arguments that other fields set."""
    optimizer, known = config.optimizer, optimizers()
    name, decay = optimizer.name, optimizer.weight_decay
    globs, given = tuple(optimizer.decay_mask), optimizer.arguments.to_dict()
    if name in OWN_EVALUATION:
        raise ValueError(
            f"config.optimizer.name is {name!r}, expected another optimizer, because this one "
            "evaluates an average of the parameters that it trains, and a run evaluates the "
            "parameters; set --config.optimizer.name=adamw --config.optimizer.ema_decay=0.99."
        )
    if name not in known:
        raise ValueError(
            f"config.optimizer.name is {name!r}, expected an optimizer of optax or optax.contrib "
            "that has an argument learning_rate and needs no other optimizer or function"
            f"{suggest(name, known)}."
        )
    parameters, called = inspect.signature(known[name]).parameters, address(known[name], name)
    if name == "muon" and OF_MATRICES not in parameters:
        raise ValueError(
            f"config.optimizer.name is 'muon' with optax {optax.__version__}, expected optax 0.2.7 "
            "or newer, because an older muon takes all arrays of two dims for matrices; upgrade "
            "optax."
        )
    if optimizer.matrices and OF_MATRICES not in parameters:
        raise ValueError(
            f"config.optimizer.matrices is {tuple(optimizer.matrices)} and config.optimizer.name "
            f"is {name!r}, expected (), because {called} treats no parameters as matrices; set "
            '--config.optimizer.name=muon, or --config.optimizer.matrices="()".'
        )
    mask = next((key for key in ("mask", "weight_decay_mask") if key in parameters), None)
    set_by = {key: f"config.optimizer.{key}" for key in ("learning_rate", "weight_decay")}
    filled: dict[str, Any] = {}
    if OF_MATRICES in parameters:
        set_by[OF_MATRICES] = "config.optimizer.matrices"
    if mask:
        set_by[mask] = "config.optimizer.decay_mask"
        filled[mask] = functools.partial(weight_decay_mask, globs=globs)
    if "weight_decay" in parameters:
        filled["weight_decay"] = decay
        if decay and not mask and globs != EVERYTHING:
            raise ValueError(
                f"config.optimizer.decay_mask is {globs} and config.optimizer.weight_decay is "
                f"{decay}, expected {EVERYTHING} or a weight decay of 0, because {called} decays "
                f"""all parameters; set --config.optimizer.decay_mask="('*',)"."""
            )
    elif decay:
        own = [key for key in parameters if key.startswith("weight_decay") and key != mask]
        hint = f"its own {own[0]} belongs in config.optimizer.arguments; " if own else ""
        raise ValueError(
            f"config.optimizer.weight_decay is {decay}, expected 0.0, because {called} has no "
            f"argument weight_decay; {hint}set --config.optimizer.weight_decay=0, or choose an "
            "optimizer that has one, such as adamw or lion."
        )
    filled |= {key: optimizer[key] for key in ("b1", "b2") if key in parameters}
    arguments = convert_arguments(
        "config.optimizer.arguments", known[name], name, given, set_by=set_by, given=filled
    )
    return _Call(known[name], name, filled | arguments)


def _with_decay_of(
    others: Any, tx: optax.GradientTransformation, call: _Call, optimizer: Any, rate: Any
) -> optax.GradientTransformation:
    """Adds the weight decay of the parameters that are no matrices, which Muon leaves to Adam.

    Adam's weight decay within `optax.contrib.muon` has no mask. `others` marks the parameters.
    """
    if not optimizer.weight_decay:
        return tx
    rate = call.arguments.get("adam_learning_rate") or rate

    def mask(params: Any) -> Any:
        # A frozen parameter is no leaf of `params`.
        marked = weight_decay_mask(params, optimizer.decay_mask)
        return jax.tree.map(
            lambda is_other, decays: decays and is_other if isinstance(decays, bool) else decays,
            others,
            marked,
        )

    def negative(step: jax.Array) -> Any:
        return -optimizer.weight_decay * (rate(step) if callable(rate) else rate)

    decay = optax.inject_hyperparams(optax.add_decayed_weights, static_args=("mask",))
    return optax.chain(tx, decay(weight_decay=negative, mask=mask))


@contextlib.contextmanager
def _explained(group: str, call: _Call) -> Iterator[None]:
    """Names the field if optax refuses the arguments."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        plain = {key: value for key, value in call.arguments.items() if not callable(value)}
        why = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            f"config.{group}.arguments are {plain}, expected arguments that "
            f"{call.address} accepts; it raises {type(error).__name__} "
            f"({why})."
        ) from error


# -------------------------------------------------------------------------------------------------
# Finds functions of optax by name, and checks the arguments that a config gives them.
#
# The signature of a function says which arguments it has. Its annotations and defaults say which
# values an argument may have: numbers, booleans, strings, names of dtypes, and tuples and dicts of
# them. A config cannot hold other values, such as functions and arrays.


# The argument of a schedule that is the learning rate; the first one that a schedule has.
RATES = ("peak_value", "init_value", "value")
# Optimizers that evaluate other parameters than they train; a run evaluates the trained ones.
OWN_EVALUATION = ("schedule_free_adamw", "schedule_free_sgd")
# The argument of an optimizer that says which dims of a parameter are a matrix.
OF_MATRICES = "muon_weight_dimension_numbers"


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
      set_by: The fields that set the function's other arguments, by argument.
      given: Other arguments that have a value if `arguments` does not give one.
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
            raise ValueError(
                f"{field} has {key!r}, which {called} does not have, expected "
                f"{_listed(known) or 'no arguments'}{suggest(key, known)}."
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
