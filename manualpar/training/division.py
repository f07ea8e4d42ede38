"""How the examples of a step are divided over devices and minibatches, also after a resume.

A run that comes back with fewer devices keeps its batch, so each device gets more examples. If the
mesh is given by a rule (`data=-1`) and nothing else about the division has changed, the number of
minibatches grows, so that a device computes at most as many examples at once as when the run began.
With the old number of devices, the config's own number of minibatches holds again.

A loss may combine the examples of a minibatch over the devices, such as in-batch negatives or the
statistics of `nn.BatchNorm(axis_name=...)`. With smaller minibatches it would be another loss, so
the number of minibatches stays.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import ml_collections
from jax.sharding import PartitionSpec

from manualpar.core.mesh.mesh_context import no_mesh, with_auto_axes
from manualpar.core.program.program import Program
from manualpar.core.tracing.scopes import EXAMPLES_SCOPE, purpose_of
from manualpar.inspect.communication import trace_collectives
from manualpar.system.cluster.agreement import from_first
from manualpar.system.storage import AnyPath
from manualpar.training.checkpoints.folders import open_folder
from manualpar.training.checkpoints.saved_state import read_extra
from manualpar.training.config import flatten_config

# If one of these differs from the checkpoint's, the config's number of minibatches holds.
DECIDING = ("parallel.mesh", "optimizer.num_minibatches", "data.batch_size")


class Division(NamedTuple):
    """How the examples of a step are divided.

    Attributes:
      devices: The number of devices among which the batch is divided.
      minibatches: The number of minibatches of each device.
      at_once: The number of examples that a device computed at once when the run began, as the
        config asked. It is the limit after a resume, so it may be larger than the number now.
    """

    devices: int
    minibatches: int
    at_once: int

    @classmethod
    def from_json(cls, value: Any) -> Self | None:
        """Reads what a checkpoint has of a division; returns `None` if that is not valid."""
        if not isinstance(value, list) or len(value) != len(cls._fields):
            return None
        return cls(*value) if all(type(x) is int and x > 0 for x in value) else None


class EarlierDivision(NamedTuple):
    """The division in a checkpoint, with the config of that run, flattened."""

    division: Division
    config: Mapping[str, Any]


def read_earlier(checkpoints: AnyPath) -> EarlierDivision | None:
    """Reads the division in the newest checkpoint of a folder; `None` if there is none.

    Communication:
      The communication of `from_first`.
    """
    extra = None
    if jax.process_index() == 0:
        try:
            steps = open_folder(checkpoints).steps()
            extra = read_extra(checkpoints / str(steps[-1])) if steps else None
        except (OSError, ValueError):  # `restore` reports the damage.
            extra = None
    extra = extra or {}
    value, config = from_first([extra.get("division"), extra.get("config")])
    division = Division.from_json(value)
    if division is None or not isinstance(config, dict):
        return None
    return EarlierDivision(division, flatten_config(config))


def divide_batch(
    config: ml_collections.ConfigDict,
    data_axes: Sequence[str],
    devices: int,
    earlier: EarlierDivision | None = None,
) -> Division:
    """Divides the batch of a config over `devices` along `data_axes`."""
    batch_size, asked = config.data.batch_size, config.optimizer.num_minibatches
    began = earlier.division if earlier and _asks_the_same(config, earlier.config) else None

    def divide(number: int) -> Division | None:
        each = batch_size // number
        if batch_size % number:
            return None
        if began is not None:
            counts = (n for n in range(asked, each + 1) if each % n == 0)
            if (found := next((n for n in counts if each // n <= began.at_once), None)) is not None:
                return Division(number, found, began.at_once)
        return None if each % asked else Division(number, asked, each // asked)

    if (division := divide(devices)) is None:
        along = " and ".join(map(repr, data_axes)) or repr("data")
        most = min(devices, batch_size + 1)
        fitting = [str(number) for number in range(1, most) if divide(number)]
        could = f" Of fewer devices, {', '.join(fitting)} would divide it." if fitting else ""
        raise ValueError(
            f"config.data.batch_size is {batch_size}, expected a multiple of {devices * asked}, "
            f"the {devices} devices along {along} times "
            f"config.optimizer.num_minibatches={asked}.{could}"
        )
    return division


def combines_examples(program: Program) -> bool | None:
    """Returns whether the loss or the model has a collective over the axes that split the examples.

    It is a collective of the user's code, or of `gather_examples`. This package's own collectives
    gather parameters and add up results. If XLA writes the collectives, the answer is not known,
    and it is `None`. The loss is traced once.
    """
    if not program.step.mode.writes_collectives:
        return None
    if program.outer is not None:
        program = program.outer.inner
    axes = set(program.roles.batch_dims[0])
    loss = with_auto_axes(program.step.loss_only, mesh=program.mesh, out_specs=PartitionSpec())
    with no_mesh():
        traced = jax.jit(loss).trace(program.abstract_state, program.abstract_batch)
    return any(
        not axes.isdisjoint(found.axes) and purpose_of(found.scope) in (None, EXAMPLES_SCOPE)
        for found in trace_collectives(traced, while_trips=1)
    )


def _asks_the_same(config: ml_collections.ConfigDict, earlier: Mapping[str, Any]) -> bool:
    """Returns whether the checkpoint's config asks for the same division as this config."""
    asked = flatten_config(json.loads(json.dumps(config.to_dict())))
    return all(asked.get(name) == earlier.get(name) for name in DECIDING)


def describe_change(
    before: Any, now: Division, *, batch_size: int, draws: bool, combines: Callable[[], bool | None]
) -> list[str]:
    """Returns a sentence if a resumed run divides its batch in another way than before.

    Args:
      before: The division in the checkpoint, as JSON.
      draws: Whether the loss may draw random numbers, such as dropout masks.
      combines: Returns whether the loss combines examples, see `combines_examples`.
    """
    earlier = Division.from_json(before)
    if earlier is None or earlier[:2] == now[:2]:
        return []

    def describe(one: Division) -> str:
        devices = f"{one.devices} device{'s' if one.devices > 1 else ''}"
        each = batch_size // one.devices // one.minibatches
        return f"{devices} x {one.minibatches} x {each}"

    sentence = (
        f"the {batch_size} examples of a step are divided as {describe(now)} (devices x "
        f"minibatches x examples), before as {describe(earlier)}: they are the same examples, "
        "whose sums are added in another order"
    )
    kept = now.minibatches == earlier.minibatches
    combined = combines()
    if combined is None and not kept:
        sentence += "; a loss that combines examples combines those of one minibatch, so it differs"
    if combined:
        sentence += "; the loss or the model combines the examples of a minibatch over the devices"
        sentence += ", so there are as many minibatches as before" if kept else ""
        if not kept or now.minibatches > 1:
            sentence += ", and a minibatch has other examples than before, so losses differ"
    if draws:
        sentence += ", but other random numbers are drawn for them (dropout masks)"
    return [sentence]
