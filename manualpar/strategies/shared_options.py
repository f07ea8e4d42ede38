"""The options that several strategies share: explained, checked and declared for configs once."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import optax

from manualpar.core.program import Program, build_program
from manualpar.core.strategy import Strategy
from manualpar.guards.options import ProgramOptions, check_choice
from manualpar.sharding.layout import check_named
from manualpar.strategies.fields import Field
from manualpar.user_model.adapter import Model
from manualpar.user_model.loss_function import LossFn

CommunicateEvery = Literal["minibatch", "step", "gather-step"]
COMMUNICATE_EVERY: tuple[CommunicateEvery, ...] = ("minibatch", "step", "gather-step")


class StateShardingOptions(ProgramOptions, total=False):
    """The keyword arguments of builders that shard the optimizer's state.

    Attributes:
      min_weight_size: The fewest elements of a parameter that is sharded, or whose state is; 2**18
        if not given. A smaller parameter is whole on every device. A parameter is sharded along a
        dimension that divides: those whose shards are whole tiles of a TPU's memory come first,
        then the largest. It is never one that `nn.scan` or `nn.vmap` runs over.
      replicate: The names of parameters, or of modules that contain them, that every device holds
        whole, their state too, even if the model annotates them. Use it for a parameter that the
        model reads in a way that a shard cannot serve, as `nn.WeightNorm` does.
      pad: Whether a parameter of which no dimension divides is padded with zeros and sharded. The
        state then holds it padded. Losses are the same, and the optimizer does not see the zeros.
    """

    min_weight_size: int
    replicate: tuple[str, ...]
    pad: bool


class ParameterShardingOptions(StateShardingOptions, total=False):
    """The keyword arguments of builders that shard the parameters too.

    Attributes:
      reshard_after_forward: Whether gathered parameters are dropped after the forward pass and
        gathered again for the backward pass (the default), or kept until then.
      communicate_every: `"minibatch"` (the default) gathers and scatters in each minibatch, and a
        device never holds more than the layers at work. `"step"` gathers once and scatters once,
        and a device holds all parameters and all gradients in between. `"gather-step"` gathers once
        and scatters in each minibatch: a device holds all parameters and its own shard of the
        accumulated gradients. The last two keep the parameters, whatever `reshard_after_forward`.
      keep_gathered: The names of parameters, or of modules that contain them (`("head",)` for
        `head/kernel`), that are gathered once in each minibatch and kept until the backward pass,
        whatever `reshard_after_forward`. Use it for the last layer, because the backward pass
        begins with it, and for parameters that are used several times.
    """

    reshard_after_forward: bool
    communicate_every: CommunicateEvery
    keep_gathered: tuple[str, ...]


class OwnOptions(NamedTuple):
    """A group of options that strategies share.

    Attributes:
      defaults: Their values if they are not given.
      fields: What a config may set of them. (The names of a model's parameters in `replicate` are
        not for the models that configs describe.)
    """

    defaults: Mapping[str, Any]
    fields: Mapping[str, Field]


STATE_SHARDING = OwnOptions(
    {"min_weight_size": 2**18, "replicate": (), "pad": False},
    {"min_weight_size": Field(int, 0), "pad": Field(bool)},
)
PARAMETER_SHARDING = OwnOptions(
    {
        **STATE_SHARDING.defaults,
        "reshard_after_forward": True,
        "communicate_every": "minibatch",
        "keep_gathered": (),
    },
    {
        **STATE_SHARDING.fields,
        "reshard_after_forward": Field(bool),
        "communicate_every": Field(str, choices=COMMUNICATE_EVERY),
        "keep_gathered": Field(tuple, holds_names=True),
    },
)


def build_sharded(
    builder: str,
    strategy: Callable[..., Strategy],
    model: Model,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    options: Mapping[str, Any],
    own: OwnOptions,
) -> Program:
    """Builds the program of a strategy that takes some of the options in this file.

    Args:
      builder: The name of the builder, for messages.
      strategy: Makes the strategy from the options in `own`.
      model: The model.
      tx: The optimizer.
      loss_fn: The loss.
      options: The keyword arguments that the builder was called with.
      own: Which of them are the strategy's own.
    """
    values = {name: options.get(name, default) for name, default in own.defaults.items()}
    for name, value in values.items():
        _check(builder, name, value)
    shared = {name: value for name, value in options.items() if name not in values}
    program = build_program(strategy(**values), model, tx, loss_fn, **shared)
    names = {name: values[name] for name in ("keep_gathered", "replicate") if name in values}
    check_named(builder, program.parameters, **names)
    return program


def _check(builder: str, name: str, value: Any) -> None:
    if name in ("pad", "reshard_after_forward"):
        check_choice(builder, name, value, (True, False))
    elif name == "communicate_every":
        check_choice(builder, name, value, COMMUNICATE_EVERY)
    elif name == "min_weight_size":
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(
                f"{builder}: {name}={value!r}, expected a number of elements, 0 or more."
            )
    elif not isinstance(value, tuple) or not all(isinstance(x, str) for x in value):
        raise TypeError(
            f"{builder}: {name}={value!r}, expected a tuple of names of parameters or modules, "
            "such as ('head',)."
        )
