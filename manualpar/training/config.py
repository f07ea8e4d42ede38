"""What a training config may hold, checked before anything else happens.

A config is a locked `ml_collections.ConfigDict` of plain values, so that every field can be set by
a flag and stored as JSON, where tuples are lists. `FIELDS` lists those of every config and
`MODEL_FIELDS` those that a model adds: a config has each of them and no other. A field that means
nothing for a strategy is there, checked and not used.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import ml_collections

from manualpar.checkpoints.compatibility import REMOVED
from manualpar.compiler_options import OVERLAPS
from manualpar.core.strategy import COMMUNICATE_EVERY, MODES

DTYPES = ("bfloat16", "float16", "float32")
# "" leaves it as it is. In float16 gradients overflow: they are summed before they are divided.
WIRE_DTYPES = ("", "bfloat16", "float32")
STRATEGIES = ("dp", "zero1", "zero2", "fsdp", "hsdp")
ON_NONFINITE = ("ignore", "stop", "skip", "rollback")
# What Python writes out is traced and compiled one by one, about a tenth of a second each.
MOST_WRITTEN_OUT = 1000
LARGEST = 1e38  # What float32 holds.
LONGEST_SECONDS = 1e6  # What every clock and timer takes.


@dataclasses.dataclass(frozen=True)
class Field:
    """What one field may be.

    Attributes:
      kind: Its type; an integer passes for a float.
      minimum: The smallest number allowed.
      below: A number that it must be less than.
      choices: All values allowed.
      holds_names: Whether a tuple holds names; otherwise it holds pairs of a name and a mesh axis,
        a tuple of axes or `None`.
    """

    kind: type
    minimum: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    holds_names: bool = False

    def expectation(self) -> str:
        """What to write, in words."""
        if self.choices:
            return "one of " + ", ".join(map(repr, self.choices))
        if self.kind is dict:
            return "a dict of axis sizes such as {'data': -1}"
        if self.holds_names:
            return "a tuple of names such as ('head',)"
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
            is_member = _is_name if self.holds_names else _is_rule
            return isinstance(value, tuple) and all(map(is_member, value))
        numbers = (int, float) if self.kind is float else (int,)
        if not isinstance(value, numbers) or isinstance(value, bool):
            return False
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.below is None else self.below
        # Neither NaN nor infinity is less than anything here.
        return low <= value < high


FIELDS: Mapping[str, Field] = {
    "seed": Field(int, 0, below=2**32),
    "profile": Field(str),
    "data.source": Field(str),
    "data.batch_size": Field(int, 1),
    "data.prefetch": Field(int, 1, below=2**10),  # Each is read by a thread.
    "model.name": Field(str, choices=("classifier", "transformer")),
    "optimizer.learning_rate": Field(float, 0, below=LARGEST),
    "optimizer.warmup_steps": Field(int, 0, below=2**31),
    "optimizer.weight_decay": Field(float, 0, below=LARGEST),
    "optimizer.b1": Field(float, 0, below=1),
    "optimizer.b2": Field(float, 0, below=1),
    "optimizer.clip_norm": Field(float, 0, below=LARGEST),
    "optimizer.num_minibatches": Field(int, 1),
    "parallel.strategy": Field(str, choices=STRATEGIES),
    "parallel.mode": Field(str, choices=MODES),
    "parallel.mesh": Field(dict),
    "parallel.min_weight_size": Field(int, 0),
    "parallel.reshard_after_forward": Field(bool),
    "parallel.communicate_every": Field(str, choices=COMMUNICATE_EVERY),
    "parallel.keep_gathered": Field(tuple, holds_names=True),
    "parallel.axis_by_axis": Field(bool),
    "parallel.overlap": Field(str, choices=OVERLAPS),
    "parallel.pad": Field(bool),
    "parallel.param_dtype": Field(str, choices=WIRE_DTYPES),
    "parallel.gather_dtype": Field(str, choices=WIRE_DTYPES),
    "parallel.reduce_dtype": Field(str, choices=WIRE_DTYPES),
    "parallel.rules": Field(tuple),
    "training.num_steps": Field(int, 1, below=2**31),
    "training.eval_every_steps": Field(int, 0),
    "training.eval_batches": Field(int, 0),
    "training.log_every_steps": Field(int, 1),
    "training.norm_metrics": Field(bool),
    "training.on_nonfinite": Field(str, choices=ON_NONFINITE),
    "checkpoint.every_steps": Field(int, 0),
    "checkpoint.keep": Field(int, 1),
    "checkpoint.keep_every_steps": Field(int, 0),
    "checkpoint.best_metric": Field(str),
    "checkpoint.on_corruption": Field(str, choices=("stop", "previous")),
    "watch.lost_seconds": Field(float, 1, below=LONGEST_SECONDS),
    "watch.stall_seconds": Field(float, 0, below=LONGEST_SECONDS),
    "debug.check_replicas_every": Field(int, 0),
    "debug.draw_sharding": Field(str),
}
MODEL_FIELDS: Mapping[str, Mapping[str, Field]] = {
    "classifier": {
        "data.source": Field(str, choices=("digits", "synthetic")),
        "model.hidden_size": Field(int, 1),
        "model.num_classes": Field(int, 1, below=2**31),
        "model.dropout_rate": Field(float, 0, below=1),
        "model.num_layers": Field(int, 1),
        "model.dtype": Field(str, choices=DTYPES),
    },
    "transformer": {
        "data.source": Field(str, choices=("text", "tokens")),
        "data.path": Field(str),
        "data.sequence_length": Field(int, 1, below=2**31),
        "data.tokenizer": Field(str),
        "model.hidden_size": Field(int, 1, below=2**31),
        "model.mlp_size": Field(int, 1, below=2**31),
        "model.num_layers": Field(int, 1),
        "model.num_heads": Field(int, 1, below=2**31),
        "model.num_kv_heads": Field(int, 1, below=2**31),
        "model.rope_base": Field(float, 1, below=LARGEST),
        "model.tied_head": Field(bool),
        "model.dropout_rate": Field(float, 0, below=1),
        "model.dtype": Field(str, choices=DTYPES),
        "model.remat": Field(str, choices=("none", "dots", "full")),
        "model.scan_layers": Field(bool),
        "model.attention": Field(str, choices=("", "xla", "cudnn")),
        "sample.num_tokens": Field(int, 0, below=10**6),  # Each is a pass of the whole model.
        "sample.prompt": Field(str),
        "sample.temperature": Field(float, 0, below=LARGEST),
    },
}
# A dict that is itself a value, not a group of fields.
DICT_FIELDS = frozenset({"parallel.mesh"})


def fields_of(config: Mapping[str, Any] | ml_collections.ConfigDict) -> dict[str, Field]:
    """The fields of a config with this `model.name`; those of every config if it is no model's."""
    model = config.get("model")
    name = model.get("name") if isinstance(model, Mapping | ml_collections.ConfigDict) else None
    return {**FIELDS, **MODEL_FIELDS.get(name, {})} if isinstance(name, str) else dict(FIELDS)


def _is_name(value: Any) -> bool:
    """Whether a value is a name."""
    return isinstance(value, str) and bool(value)


def _is_rule(value: Any) -> bool:
    """Whether a value is a pair of a name and a mesh axis, a tuple of axes or `None`."""
    if not isinstance(value, tuple | list) or len(value) != 2 or not isinstance(value[0], str):
        return False
    axes = value[1] if isinstance(value[1], tuple | list) else (value[1] or "",)
    return all(isinstance(axis, str) for axis in axes)


def one_line(value: object) -> str:
    """The text of a value without line breaks, for a message that is one sentence."""
    return re.sub(r"\s*\n\s*", " ", str(value))


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
        inner = isinstance(value, Mapping | ml_collections.ConfigDict) and name not in DICT_FIELDS
        flat |= flatten_config(value, f"{name}.") if inner else {name: value}
    return flat


def check_config(config: Any) -> None:
    """Checks a config against `fields_of(config)`.

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
    values, fields = flatten_config(config), fields_of(config)
    for name in fields:
        if name not in values:
            raise ValueError(f"config.{name} is missing, expected {fields[name].expectation()}.")
    # The model's name first: which other fields there are depends on it.
    for name, value in sorted(values.items(), key=lambda item: item[0] != "model.name"):
        if name in REMOVED:
            raise ValueError(f"config.{name} was removed: {REMOVED[name][1]}; delete the field.")
        if name not in fields:
            raise ValueError(
                f"config.{name} is not a known field{_of_model(config)}; the nearest one is "
                f"config.{nearest(name, fields)}."
            )
        value = value.to_dict() if isinstance(value, ml_collections.ConfigDict) else value
        if not fields[name].allows(value):
            shown = one_line(repr(value))
            message = f"config.{name} is {shown}, expected {fields[name].expectation()}"
            if fields[name].choices and isinstance(value, str):
                message += f"; the nearest one is {nearest(value, fields[name].choices)!r}"
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


def _check_written_out(config: ml_collections.ConfigDict) -> None:
    """Refuses a program that would take hours to trace and to compile."""
    layers = () if config.model.get("scan_layers", False) else ("model.num_layers",)
    for name in (*layers, "optimizer.num_minibatches"):
        group, field = name.split(".")
        if config[group][field] > MOST_WRITTEN_OUT:
            mend = "; or set config.model.scan_layers=True" if "scan_layers" in config.model else ""
            raise ValueError(
                f"config.{name} is {config[group][field]}, expected at most {MOST_WRITTEN_OUT}: "
                f"each is traced and compiled by itself{mend if field == 'num_layers' else ''}."
            )


def _of_model(config: ml_collections.ConfigDict) -> str:
    """Whose fields are known, where a model adds some."""
    name = config.model.name if "model" in config else None
    return f" of a config with model.name={name!r}" if name in MODEL_FIELDS else ""
