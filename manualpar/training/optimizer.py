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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import optax

from manualpar.core.trees import path_name
from manualpar.errors import nearest
from manualpar.training.optax_functions import (
    OF_MATRICES,
    OWN_EVALUATION,
    RATES,
    address,
    convert_arguments,
    optimizers,
    schedules,
    takes_schedule,
)

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
    """Checks the groups `optimizer` and `schedule` of a config, and calls nothing.

    Args:
      config: A complete config whose fields have values of the right type.

    Raises:
      ValueError: A name or an argument is not one of optax, the optimizer cannot do what the fields
        ask for, or the warm-up is longer than the run. The message names the field.
    """
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
    if call.name in OF_MATRICES and config.model.get("scan_layers"):
        raise ValueError(
            f"config.optimizer.name is {call.name!r} and config.model.scan_layers is True, "
            "expected False, because the optimizer treats each array of two dims as a matrix, and "
            "a scan stacks the layers' vectors to such arrays; set --config.model.scan_layers="
            "false."
        )


def make_schedule(config: ml_collections.ConfigDict) -> optax.Schedule:
    """Makes the learning rate of a config, a function of the number of earlier updates.

    The first update has a positive rate if there is a warm-up, so that no batch is wasted.

    Raises:
      ValueError: As `check_optimizer`, or optax refuses the arguments.
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


def make_optimizer(
    config: ml_collections.ConfigDict, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Makes the optimizer of a config, with its clipping.

    Args:
      config: A complete config.
      schedule: The learning rate. An optimizer that needs a number gets the config's.

    Raises:
      ValueError: As `check_optimizer`, or optax refuses the arguments.
    """
    call, optimizer = _optimizer_call(config), config.optimizer
    rate = schedule if takes_schedule(call.function) else optimizer.learning_rate
    with _explained("optimizer", call):
        tx = call.function(learning_rate=rate, **call.arguments)
    if "adam_weight_decay" in call.parameters and "adam_weight_decay" not in call.arguments:
        tx = _with_decay_of_others(tx, call, optimizer, rate)
    if not optimizer.clip_norm:
        return tx
    return optax.chain(optax.clip_by_global_norm(optimizer.clip_norm), tx)


def weight_decay_mask(params: Any, globs: Sequence[str] = ()) -> Any:
    """Marks the parameters to decay.

    By default these are all but biases, scales and arrays of fewer than two dims. Biases and scales
    are found by name, because in scanned layers they have two dims.

    Args:
      params: The tree of parameters.
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
                "globs on the parameters' paths such as '*kernel' and '!*embedding*'; the nearest "
                f"path is {nearest(glob.removeprefix('!'), paths)!r}."
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
            f"{', '.join(map(repr, known))}; the nearest one is {nearest(name, known)!r}."
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
            "that has an argument learning_rate and needs no other optimizer or function; the "
            f"nearest one is {nearest(name, known)!r}."
        )
    parameters, called = inspect.signature(known[name]).parameters, address(known[name], name)
    mask = next((key for key in ("mask", "weight_decay_mask") if key in parameters), None)
    set_by = {key: f"config.optimizer.{key}" for key in ("learning_rate", "weight_decay")}
    filled: dict[str, Any] = {}
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


def _with_decay_of_others(
    tx: optax.GradientTransformation, call: _Call, optimizer: Any, rate: Any
) -> optax.GradientTransformation:
    """Adds the weight decay of parameters that are no matrices, which Muon leaves to Adam.

    Adam's weight decay within `optax.contrib.muon` has no mask.
    """
    if not optimizer.weight_decay:
        return tx
    rate = call.arguments.get("adam_learning_rate") or rate

    def others(params: Any) -> Any:
        marked = weight_decay_mask(params, optimizer.decay_mask)
        return jax.tree.map(lambda x, is_marked: is_marked and x.ndim != 2, params, marked)

    def negative(step: jax.Array) -> Any:
        return -optimizer.weight_decay * (rate(step) if callable(rate) else rate)

    decay = optax.inject_hyperparams(optax.add_decayed_weights, static_args=("mask",))
    return optax.chain(tx, decay(weight_decay=negative, mask=others))


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
