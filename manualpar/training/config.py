"""What a training config may hold, checked before anything else happens.

A config is a locked `ml_collections.ConfigDict` of plain values, so that every field can be set by
a flag and stored as JSON, where tuples are lists. `FIELDS` lists them all: a config has each of
them and no other. A field that means nothing for a strategy is there, checked and not used.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import ml_collections

from manualpar.strategy import MODES
from manualpar.training.data import SOURCES

DTYPES = ("bfloat16", "float16", "float32")
# "" leaves it as it is. In float16 gradients overflow: they are summed before they are divided.
WIRE_DTYPES = ("", "bfloat16", "float32")
STRATEGIES = ("dp", "zero1", "zero2", "fsdp", "hsdp")


@dataclasses.dataclass(frozen=True)
class Field:
    """What one field may be.

    Attributes:
      kind: Its type; an integer passes for a float.
      minimum: The smallest number allowed.
      below: A number that it must be less than.
      choices: All values allowed.

    A tuple holds pairs of a name and a mesh axis, a tuple of axes or `None`.
    """

    kind: type
    minimum: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()

    def expectation(self) -> str:
        """What to write, in words."""
        if self.choices:
            return "one of " + ", ".join(map(repr, self.choices))
        if self.kind is dict:
            return "a dict of axis sizes such as {'data': -1}"
        if self.kind is tuple:
            return "a tuple of pairs such as (('embed', None), ('mlp', 'data'))"
        if self.kind is bool:
            return "True or False"
        noun = {int: "an integer", float: "a finite number", str: "a string"}[self.kind]
        limits = [] if self.minimum is None else [f"at least {self.minimum}"]
        limits += [] if self.below is None else [f"less than {self.below}"]
        return ", ".join([noun, *filter(None, [" and ".join(limits)])])

    def allows(self, value: Any) -> bool:
        """Whether `value` is as expected."""
        if self.kind in (bool, dict, str):
            return isinstance(value, self.kind) and (not self.choices or value in self.choices)
        if self.kind is tuple:
            return isinstance(value, tuple) and all(map(_is_rule, value))
        numbers = (int, float) if self.kind is float else (int,)
        if not isinstance(value, numbers) or isinstance(value, bool):
            return False
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.below is None else self.below
        # Neither NaN nor infinity is less than anything here.
        return low <= value < high


FIELDS: Mapping[str, Field] = {
    "seed": Field(int, 0, below=2**32),
    "data.source": Field(str, choices=SOURCES),
    "data.batch_size": Field(int, 1),
    "model.hidden_size": Field(int, 1),
    "model.num_classes": Field(int, 1),
    "model.dropout_rate": Field(float, 0, below=1),
    "model.num_layers": Field(int, 1),
    "model.dtype": Field(str, choices=DTYPES),
    "optimizer.learning_rate": Field(float, 0),
    "optimizer.warmup_steps": Field(int, 0),
    "optimizer.weight_decay": Field(float, 0),
    "optimizer.b1": Field(float, 0, below=1),
    "optimizer.b2": Field(float, 0, below=1),
    "optimizer.num_minibatches": Field(int, 1),
    "parallel.strategy": Field(str, choices=STRATEGIES),
    "parallel.mode": Field(str, choices=MODES),
    "parallel.mesh": Field(dict),
    "parallel.min_weight_size": Field(int, 0),
    "parallel.reshard_after_forward": Field(bool),
    "parallel.communicate_every": Field(str, choices=("minibatch", "step")),
    "parallel.pad": Field(bool),
    "parallel.param_dtype": Field(str, choices=WIRE_DTYPES),
    "parallel.gather_dtype": Field(str, choices=WIRE_DTYPES),
    "parallel.reduce_dtype": Field(str, choices=WIRE_DTYPES),
    "parallel.rules": Field(tuple),
    "training.num_steps": Field(int, 1),
    "training.eval_every_steps": Field(int, 0),
    "training.log_every_steps": Field(int, 1),
    "training.norm_metrics": Field(bool),
    "debug.check_replicas_every": Field(int, 0),
    "debug.draw_sharding": Field(str),
}


def _is_rule(value: Any) -> bool:
    """Whether a value is a pair of a name and a mesh axis, a tuple of axes or `None`."""
    if not isinstance(value, tuple | list) or len(value) != 2 or not isinstance(value[0], str):
        return False
    axes = value[1] if isinstance(value[1], tuple | list) else (value[1] or "",)
    return all(isinstance(axis, str) for axis in axes)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like `name`; of a dotted one the last part alone may be what is alike."""

    def likeness(candidate: str) -> float:
        pairs = [(name, candidate), (name.split(".")[-1], candidate.split(".")[-1])]
        return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    return max(sorted(known), key=likeness)


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value by its dotted name, in order; a dict that is itself a field counts as a value."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        inner = isinstance(value, Mapping | ml_collections.ConfigDict) and name not in FIELDS
        flat |= flatten_config(value, f"{name}.") if inner else {name: value}
    return flat


def check_config(config: Any) -> None:
    """Checks a config against `FIELDS`.

    Args:
      config: The `ConfigDict`.

    Raises:
      ValueError: It is none, lacks a field, has an unknown one, or a value does not fit; the
        message names the first.
    """
    if not isinstance(config, ml_collections.ConfigDict):
        raise ValueError(
            f"config is a {type(config).__name__}, expected an ml_collections.ConfigDict."
        )
    values = flatten_config(config)
    for name in FIELDS:
        if name not in values:
            raise ValueError(f"config.{name} is missing, expected {FIELDS[name].expectation()}.")
    for name, value in values.items():
        if name not in FIELDS:
            raise ValueError(
                f"config.{name} is not a known field; the nearest one is "
                f"config.{nearest(name, FIELDS)}."
            )
        value = value.to_dict() if isinstance(value, ml_collections.ConfigDict) else value
        if not FIELDS[name].allows(value):
            message = f"config.{name} is {value!r}, expected {FIELDS[name].expectation()}"
            if FIELDS[name].choices and isinstance(value, str):
                message += f"; the nearest one is {nearest(value, FIELDS[name].choices)!r}"
            raise ValueError(f"{message}.")
    for axis, size in config.parallel.mesh.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise ValueError(
                f"config.parallel.mesh.{axis} is {size!r}, expected a number of devices, "
                "or -1 for the rest."
            )
