"""Loads config files, and checks the fields of a config before anything else happens.

A config file is Python with a `get_config()`, which returns an `ml_collections.ConfigDict`. Each
field is a number, a string, a bool, a tuple or a dict, so that a flag can set it and JSON can store
it (tuples become lists). `FIELDS` lists the fields of every config, and `MODEL_FIELDS` the fields
that a model adds. A config has no other fields, except those of registered strategies. It may leave
out a field with a default; `complete_config` fills in the default. If a config has a field that
only other strategies use, the field is checked but not used.
"""

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_collections

from manualpar.core.mesh.compiler_options import OVERLAPS
from manualpar.core.mesh.mesh_order import check_order
from manualpar.core.model.options import PROGRAM_OPTIONS
from manualpar.data.packing import LONG_EXAMPLES
from manualpar.data.sources import TEXT_SOURCES
from manualpar.errors import nearest
from manualpar.layers.attention.context import CONTEXT_ATTENTIONS
from manualpar.layers.field_groups import LARGEST_FLOAT, MOST_WRITTEN_OUT, config_fields
from manualpar.layers.pipeline.stages import KEEPS, SCHEDULES
from manualpar.layers.ring_chunks import LAYER_OVERLAPS
from manualpar.models.transformer import DTYPES, Transformer
from manualpar.strategies import BUILT_IN, Field, strategy_kinds
from manualpar.strategies.fields import fields_of_options
from manualpar.training.checkpoints.compatibility import REMOVED, renamed_value
from manualpar.training.config_files import one_line, run_config_file
from manualpar.training.monitoring.trackers import TRACKERS
from manualpar.training.optimizer import check_optimizer

OWN = "own"  # The name of a model that is given in Python.
ON_NONFINITE = ("ignore", "stop", "skip", "rollback")
LONGEST_SECONDS = 1e6  # Every clock and timer accepts this duration.
_IF_IT_HAS = "The argument {} of an optimizer that has it, unless optimizer.arguments has it."
# What `manualpar.training.optimizer` reads.
OPTIMIZER_FIELDS: Mapping[str, Field] = {
    "optimizer.name": Field(
        str,
        default="adamw",
        expected="the name of an optimizer",
        meaning="An optimizer of optax or optax.contrib, such as lion, muon or sgd.",
    ),
    "optimizer.arguments": Field(
        dict,
        default={},
        expected="a dict such as {'nesterov': True}",
        meaning="Arguments of the optimizer that have no field; optax has the list.",
    ),
    "optimizer.learning_rate": Field(
        float, 0, below=LARGEST_FLOAT, meaning="The learning rate at the end of the warm-up."
    ),
    "optimizer.warmup_steps": Field(
        int,
        0,
        below=2**31,
        meaning="The steps in which the learning rate rises, at most as many as the run has.",
    ),
    "optimizer.weight_decay": Field(
        float,
        0,
        below=LARGEST_FLOAT,
        meaning="The argument weight_decay; must be 0 if the optimizer has none.",
    ),
    "optimizer.decay_mask": Field(
        tuple,
        holds_names=True,
        default=(),
        expected="a tuple of globs such as ('*kernel', '!*embedding*')",
        meaning="The parameters to decay, by globs on their paths; ! spares parameters. By default "
        "all but biases, scales and arrays of fewer than two dims.",
    ),
    "optimizer.b1": Field(float, 0, below=1, meaning=_IF_IT_HAS.format("b1")),
    "optimizer.b2": Field(float, 0, below=1, meaning=_IF_IT_HAS.format("b2")),
    "optimizer.clip_norm": Field(
        float, 0, below=LARGEST_FLOAT, meaning="The largest norm of the gradient; 0 for no limit."
    ),
    "schedule.name": Field(
        str,
        default="cosine_decay_schedule",
        expected="the name of a schedule",
        meaning="A schedule of optax for the steps after the warm-up, such as constant_schedule.",
    ),
    "schedule.arguments": Field(
        dict,
        default={},
        expected="a dict such as {'alpha': 0.1}",
        meaning="Arguments of the schedule. Its length is by default the rest of the run.",
    ),
}

FIELDS: Mapping[str, Field] = {
    "seed": Field(int, 0, below=2**32),
    "profile": Field(str),
    "data.batch_size": Field(int, 1, below=2**31),
    "data.prefetch": Field(int, 1, below=2**10),  # Each prefetched batch takes a thread.
    "model.name": Field(str, expected="'classifier', 'transformer' or module:function"),
    "model.lora": Field(tuple, holds_names=True, default=()),
    "model.int8": Field(tuple, holds_names=True, default=()),
    "model.lora_alpha": Field(float, 0, below=LARGEST_FLOAT, default=16.0),
    **OPTIMIZER_FIELDS,
    "optimizer.ema_decay": Field(float, 0, below=1, default=0.0),
    "parallel.strategy": Field(str),  # One of `strategy_kinds()`, see `fields_of`.
    "parallel.mesh": Field(dict, expected="a dict of axis sizes such as {'data': -1}"),
    "parallel.mesh_order": Field(tuple, holds_names=True),
    "parallel.overlap": Field(str, choices=OVERLAPS),
    "training.num_steps": Field(int, 1, below=2**31),
    "training.eval_every_steps": Field(int, 0),
    "training.eval_batches": Field(int, 0),
    "training.log_every_steps": Field(int, 1),
    "training.on_nonfinite": Field(str, choices=ON_NONFINITE),
    "training.trackers": Field(
        tuple,
        choices=tuple(TRACKERS),
        holds_names=True,
        default=(),
        meaning="The services that get the metrics: wandb, mlflow, trackio.",
    ),
    "training.project": Field(
        str, default="manualpar", meaning="The name of the project in the trackers."
    ),
    "checkpoint.every_steps": Field(int, 0),
    "checkpoint.keep": Field(int, 1),
    "checkpoint.keep_every_steps": Field(int, 0),
    "checkpoint.best_metric": Field(str),
    "checkpoint.on_corruption": Field(str, choices=("stop", "previous")),
    "watch.lost_seconds": Field(float, 1, below=LONGEST_SECONDS),
    "watch.stall_seconds": Field(float, 0, below=LONGEST_SECONDS),
    "debug.check_replicas_every": Field(int, 0),
    "debug.draw_sharding": Field(str),
    **{
        PROGRAM_OPTIONS[name].field: field
        for name, field in fields_of_options(PROGRAM_OPTIONS).items()
    },
    **{f"parallel.{name}": field for kind in BUILT_IN for name, field in kind.fields.items()},
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
        "data.source": Field(str, choices=(*TEXT_SOURCES, "mixture")),
        "data.path": Field(str),
        "data.sequence_length": Field(int, 1, below=2**31),
        "data.tokenizer": Field(str),
        "data.field": Field(str, default="text"),
        "data.held_out": Field(float, 0, below=0.5, default=0.02),
        "data.cache": Field(str, default=""),
        "data.mixture": Field(tuple, holds_names=True, default=()),
        "model.from_hf": Field(str, default=""),
        "model.vocab_size": Field(int, 0, below=2**31, default=0),  # 0: the tokenizer's.
        "data.template": Field(str, default=""),
        "data.long_examples": Field(str, choices=LONG_EXAMPLES, default="error"),
        **{f"model.{name}": field for name, field in config_fields(Transformer)},
        "training.label_smoothing": Field(float, 0, below=1),
        "training.z_loss": Field(float, 0, below=LARGEST_FLOAT),
        "parallel.sequence": Field(bool),
        "parallel.layer_overlap": Field(str, choices=LAYER_OVERLAPS),
        "parallel.context_attention": Field(str, choices=CONTEXT_ATTENTIONS),
        "parallel.pipeline": Field(str, choices=SCHEDULES),
        "parallel.pipeline_chunks": Field(int, 1, below=MOST_WRITTEN_OUT + 1),
        "parallel.pipeline_keep": Field(str, choices=KEEPS),
        # Each token takes one forward pass of the model.
        "sample.num_tokens": Field(int, 0, below=10**6),
        "sample.prompt": Field(str),
        "sample.temperature": Field(float, 0, below=LARGEST_FLOAT),
    },
}
# Fields whose value is a dict. Any other dict is a group of fields.
DICT_FIELDS = frozenset(name for name, field in FIELDS.items() if field.kind is dict)


def load_config(path: Path) -> ml_collections.ConfigDict:
    """Runs a config file, and returns its config, completed and locked, but not checked.

    Raises:
      UsageError: See `run_config_file`.
    """
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
        "parallel.strategy": Field(str, choices=tuple(kinds)),
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
    return {name: Field(type(values[name])) for name in names}


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


def check_config(config: Any) -> None:
    """Checks a config against `fields_of(config)`.

    Raises:
      ValueError: The config is not a `ConfigDict`, a field is missing or unknown, or a value is not
        allowed. The message names the first such field.
    """
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
            f"{', '.join(map(repr, MODEL_FIELDS))}, or module:function for a model of your own; "
            f"the nearest one is {nearest(str(model), MODEL_FIELDS)!r}."
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
            raise ValueError(
                f"config.{name} is not a known field{of_model}; the nearest one is "
                f"config.{nearest(name, fields)}."
            )
        if not fields[name].allows(value):
            shown = one_line(repr(value))
            message = f"config.{name} is {shown}, expected {fields[name].expectation()}"
            if renamed := renamed_value(name, value):
                message += f"; it is called {renamed!r} now"
            elif fields[name].choices and isinstance(value, str):
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
