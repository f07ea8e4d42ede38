"""Explains and checks the options that several strategies have."""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import jax

from manualpar.core.mesh.axes import axis_tuple
from manualpar.core.model.interface import Model
from manualpar.core.model.loss_function import LossFn
from manualpar.core.model.options import (
    PROGRAM_OPTIONS,
    Option,
    OptionTable,
    ProgramOptions,
    check_options,
    option_table,
    with_defaults,
)
from manualpar.core.modes.strategy import Strategy
from manualpar.core.parameters.placement import TOO_SMALL, check_named
from manualpar.core.program.optimizer_update import Optimizer
from manualpar.core.program.program import Program
from manualpar.strategies.build import build_checked

ReplicaMean = Literal["step", "backward"]
CommunicateEvery = Literal["minibatch", "step", "gather-step"]
Names = tuple[str, ...]
_NAMES = "a tuple of names of parameters or modules, such as ('head',)"


class StateShardingOptions(ProgramOptions, total=False):
    """The keyword arguments of builders that shard the optimizer's state.

    Attributes:
      min_weight_size: The smallest number of elements with which a parameter, or its optimizer
        state, is sharded. A smaller parameter is replicated. A parameter is sharded along a
        dimension that the number of devices divides. Dimensions whose shards are full tiles of TPU
        memory are preferred, and the largest of these dimensions is chosen. Dimensions that
        `nn.scan` or `nn.vmap` runs over are not sharded.
      replicate: The names of parameters or modules to replicate. Their optimizer state is
        replicated too, even if the model annotates them. Use it for a parameter that the model
        cannot read from a shard, as in `nn.WeightNorm`.
      pad: Whether a parameter is padded with zeros and sharded if the number of devices divides
        none of its dimensions. The state then has the padded parameter. Losses are the same, and
        the optimizer does not get the zeros.
    """

    min_weight_size: Annotated[
        int,
        Option(
            2**18,
            "parallel.min_weight_size",
            minimum=0,
            expected="a number of elements, 0 or more",
        ),
    ]
    # This option has no config field, because no model that a config can name needs it.
    replicate: Annotated[Names, Option((), expected=_NAMES)]
    pad: Annotated[bool, Option(False, "parallel.pad")]


class ParameterShardingOptions(StateShardingOptions, total=False):
    """The keyword arguments of builders that shard the parameters too.

    Attributes:
      reshard_after_forward: Whether gathered parameters are dropped after the forward pass and
        gathered again for the backward pass, instead of kept.
      communicate_every: When a step gathers parameters and scatters gradients: both in each
        minibatch (`"minibatch"`), both once (`"step"`), or it gathers once and scatters in each
        minibatch (`"gather-step"`). With `"minibatch"` a device has only the gathered layers that
        it computes. With `"step"` it has all parameters and all gradients during the step, and with
        `"gather-step"` all parameters and its shard of the accumulated gradients. `"step"` and
        `"gather-step"` keep the gathered parameters and ignore `reshard_after_forward`.
      keep_gathered: The names of parameters or modules (`("head",)` for `head/kernel`) that are
        gathered once in each minibatch and kept until the backward pass. These parameters ignore
        `reshard_after_forward`. Use the option for the last layer, because the backward pass begins
        with this layer, and for parameters that are used several times. With a pipeline, do not use
        the option for parameters of the pipeline's layers.
      regather_axes: The axes over which parameters are gathered again for the backward pass: the
        first axes of `axis_name`; by default all its axes. The other axes have slower links. The
        part of a parameter that is gathered over these slower axes is kept from the forward pass.
        This secondary shard is `1 / D` of the parameters on `D` devices along `regather_axes` (hpZ
        of ZeRO++, https://arxiv.org/abs/2306.10209). The option implies `axis_by_axis`. It needs
        mode `"manual"` and no pipeline.
    """

    reshard_after_forward: Annotated[bool, Option(True, "parallel.reshard_after_forward")]
    communicate_every: Annotated[
        CommunicateEvery, Option("minibatch", "parallel.communicate_every")
    ]
    keep_gathered: Annotated[Names, Option((), "parallel.keep_gathered", expected=_NAMES)]
    regather_axes: Annotated[Names, Option((), "parallel.regather_axes", expected=_NAMES)]


class ReplicatedShardingOptions(ParameterShardingOptions, total=False):
    """The keyword arguments of builders that shard parameters within groups of devices.

    Attributes:
      replica_mean: When gradients are averaged over `replica_axis`. `"step"`: all gradients after
        the last backward pass, once a step. `"backward"`: the gradient of a gathered parameter as
        soon as the backward pass has scattered it, once for each minibatch. The slow links then
        work while the backward pass computes the layers before, and no gradient waits for them.
        Parameters that are too small to shard are averaged once a step in either case. Use
        `"backward"` with one minibatch, or few. It needs mode `"manual"`, no pipeline,
        `communicate_every="minibatch"` and no `error_feedback`.
    """

    replica_mean: Annotated[ReplicaMean, Option("step", "parallel.replica_mean")]


STATE_SHARDING = option_table(StateShardingOptions, beyond=PROGRAM_OPTIONS)
PARAMETER_SHARDING = {
    **STATE_SHARDING,
    **option_table(ParameterShardingOptions, beyond={**PROGRAM_OPTIONS, **STATE_SHARDING}),
}
REPLICATED_SHARDING = {
    **PARAMETER_SHARDING,
    **option_table(ReplicatedShardingOptions, beyond={**PROGRAM_OPTIONS, **PARAMETER_SHARDING}),
}


def build_sharded(
    builder: str,
    strategy: Callable[..., Strategy],
    model: Model,
    tx: Optimizer,
    loss_fn: LossFn,
    options: Mapping[str, Any],
    own: OptionTable,
) -> Program:
    """Builds the program of a strategy that takes some of the options in this file.

    Args:
      strategy: Makes the strategy from the options in `own`: from all of them if it takes
        `**placing`, otherwise from those that it names. The builder then refuses the others.
      own: The options of such strategies, such as `STATE_SHARDING`.
    """
    parameters = inspect.signature(strategy).parameters
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        own = {name: option for name, option in own.items() if name in parameters}
    check_options(builder, options, {**PROGRAM_OPTIONS, **own})
    values = with_defaults(options, own)
    program_options = {name: value for name, value in options.items() if name not in values}
    if values.get("regather_axes"):
        _check_regather(builder, values, program_options)
        program_options["axis_by_axis"] = True
    if values.get("replica_mean") == "backward":
        _check_backward_mean(builder, {**program_options, **values})
    program = build_checked(strategy(**values), model, tx, loss_fn, program_options)
    names = {name: values[name] for name in ("keep_gathered", "replicate") if name in values}
    infos = jax.tree.leaves(program.model.parameters)  # Those of `other_models` too.
    check_named(builder, infos, **names)
    if values.get("min_weight_size") == STATE_SHARDING["min_weight_size"].default:
        _warn_if_nothing_is_sharded(builder, program)
    return program


def _warn_if_nothing_is_sharded(builder: str, program: Program) -> None:
    """Warns that the default of `min_weight_size` leaves a small model as it is.

    The default suits models that need sharding. A default that followed the model would shard more
    or less of it when a layer is added, so that a checkpoint's layout would depend on it.
    """
    sizes = [math.prod(info.shape) for info, _ in program.parameters]
    is_small = all(route.note.startswith(TOO_SMALL) for _, route in program.parameters)
    if sizes and is_small and program.mesh.size > 1:
        default = STATE_SHARDING["min_weight_size"].default
        warnings.warn(
            f"{builder}: 0 of {len(sizes)} parameters are sharded, because the largest has "
            f"{max(sizes):,} elements and min_weight_size is {default:,}; set min_weight_size=, "
            "for example to 1024.",
            stacklevel=4,
        )


def has_one_pass(options: Mapping[str, Any]) -> bool:
    """Returns whether a step has one backward pass, in which gradients may be reduced."""
    needed = {"num_minibatches": 1, "pipeline": None, "error_feedback": False}
    return all(options.get(name, value) == value for name, value in needed.items())


def _check_regather(
    builder: str, values: Mapping[str, Any], program_options: Mapping[str, Any]
) -> None:
    """Refuses `regather_axes` unless a step gathers twice, and they begin `axis_name`."""
    axes, names = values["regather_axes"], axis_tuple(program_options.get("axis_name", "data"))
    needed = {
        "mode": "manual",
        "pipeline": None,
        "communicate_every": "minibatch",
        "reshard_after_forward": True,
    }
    for field, expected in needed.items():
        if (got := {**program_options, **values}.get(field, expected)) != expected:
            raise ValueError(
                f"{builder}: regather_axes={axes!r} with {field}={got!r}, expected {expected!r}, "
                "because otherwise this package does not gather parameters a second time. Leave "
                "regather_axes out."
            )
    if axes != names[: len(axes)] or len(axes) >= len(names):
        raise ValueError(
            f"{builder}: regather_axes={axes!r} and axis_name={names!r}, expected the first axes "
            "of axis_name, but not all of them: gathers begin with the last axis, over slow links, "
            "and the part gathered there is kept. Reorder axis_name and the mesh."
        )


def _check_backward_mean(builder: str, options: Mapping[str, Any]) -> None:
    """Refuses `replica_mean="backward"` unless a backward pass scatters complete gradients."""
    needed = {
        "mode": "manual",
        "pipeline": None,
        "communicate_every": "minibatch",
        "error_feedback": False,
    }
    for field, expected in needed.items():
        if (got := options.get(field, expected)) != expected:
            raise ValueError(
                f"{builder}: replica_mean='backward' with {field}={got!r}, expected {expected!r}, "
                "because the backward pass averages only gradients that it scatters, and cannot "
                "keep what rounding loses. Leave replica_mean='step'."
            )
