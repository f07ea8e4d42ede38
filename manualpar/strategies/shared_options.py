"""The options that several strategies share: explained and checked once."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import optax

from manualpar.core.mesh.axes import axis_tuple
from manualpar.core.model.interface import Model
from manualpar.core.model.loss_function import LossFn
from manualpar.core.model.options import ProgramOptions, check_choice
from manualpar.core.modes.strategy import Strategy
from manualpar.core.parameters.placement import check_named
from manualpar.core.program.program import Program, build_program

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
        begins with it, and for parameters that are used several times. With a pipeline, not for
        those of its layers.
      regather_axes: The first axes of `axis_name`, over which alone parameters are gathered again
        for the backward pass; all if there are none. What came over the others, the slow links, is
        kept from the forward pass: a secondary shard, `1 / D` of the parameters on `D` devices
        along `regather_axes` (hpZ of ZeRO++, https://arxiv.org/abs/2306.10209). It implies
        `axis_by_axis`. For mode `"manual"`, without a pipeline.
    """

    reshard_after_forward: bool
    communicate_every: CommunicateEvery
    keep_gathered: tuple[str, ...]
    regather_axes: tuple[str, ...]


# The options of each group, and their values if they are not given.
STATE_SHARDING: Mapping[str, Any] = {"min_weight_size": 2**18, "replicate": (), "pad": False}
PARAMETER_SHARDING: Mapping[str, Any] = {
    **STATE_SHARDING,
    "reshard_after_forward": True,
    "communicate_every": "minibatch",
    "keep_gathered": (),
    "regather_axes": (),
}


def build_sharded(
    builder: str,
    strategy: Callable[..., Strategy],
    model: Model,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    options: Mapping[str, Any],
    own: Mapping[str, Any],
) -> Program:
    """Builds the program of a strategy that takes some of the options in this file.

    Args:
      builder: The name of the builder, for messages.
      strategy: Makes the strategy from the options in `own`.
      model: The model.
      tx: The optimizer.
      loss_fn: The loss.
      options: The keyword arguments that the builder was called with.
      own: Which of them are the strategy's own, with their defaults.
    """
    values = {name: options.get(name, default) for name, default in own.items()}
    for name, value in values.items():
        _check(builder, name, value)
    shared = {name: value for name, value in options.items() if name not in values}
    if values.get("regather_axes"):
        _check_regather(builder, values, shared)
        shared["axis_by_axis"] = True
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


def _check_regather(builder: str, values: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
    """Refuses axes of a second gather where there is none, or that are not the first ones."""
    axes, names = values["regather_axes"], axis_tuple(shared.get("axis_name", "data"))
    second = {"communicate_every": "minibatch", "reshard_after_forward": True}
    for field, expected in {"mode": "manual", "pipeline": None, **second}.items():
        if (got := {**shared, **values}.get(field, expected)) != expected:
            raise ValueError(
                f"{builder}: regather_axes={axes!r} with {field}={got!r}, expected {expected!r}: "
                "elsewhere no second gather is written here. Leave regather_axes out."
            )
    if axes != names[: len(axes)] or len(axes) >= len(names):
        raise ValueError(
            f"{builder}: regather_axes={axes!r} and axis_name={names!r}, expected the first of "
            "those axes, and not all: gathers begin with the last, whose links are slow, and what "
            "came over it is kept. Order axis_name and the mesh so."
        )
