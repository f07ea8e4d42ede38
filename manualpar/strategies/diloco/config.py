"""Builds a `diloco` program from a config, whose fields are names and numbers."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import optax

from manualpar.core.model.interface import Model
from manualpar.core.model.loss_function import LossFn
from manualpar.core.model.option_table import first_sentences
from manualpar.core.model.options import PROGRAM_OPTIONS
from manualpar.core.parameters.block_quantization import Quantization
from manualpar.core.program.program import Program
from manualpar.strategies.diloco.builder import diloco
from manualpar.strategies.fields import Field, with_meanings
from manualpar.strategies.registry import strategy_kinds


def diloco_of_config(
    model: Model,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    *,
    inner: str,
    outer_learning_rate: float,
    outer_momentum: float,
    outer_code: Quantization | Literal[""],
    **options: Any,
) -> Program:
    """Builds a `diloco` program from the fields of a config.

    Args:
      model: The model, see `diloco`.
      tx: The optimizer of each replica.
      loss_fn: The loss.
      inner: The name of each replica's strategy. Options that this strategy lacks are ignored.
      outer_learning_rate: The learning rate of the outer optimizer. Without momentum the optimizer
        is plain gradient descent. A rate of 1 then takes the mean of the replicas' parameters.
      outer_momentum: Nesterov momentum of the outer optimizer; 0 for none.
      outer_code: The quantizer of exchanged differences; `""` for none.
      **options: The options of `diloco`.
    """
    kind = strategy_kinds()[inner]
    known = {*PROGRAM_OPTIONS, *kind.fields, *FIELDS}
    known_options = {name: value for name, value in options.items() if name in known}

    def build(*args: Any, **inner_options: Any) -> Any:
        return kind.builder(*args, **inner_options, **kind.constants)

    momentum = outer_momentum or None
    return diloco(
        model,
        tx,
        loss_fn,
        inner=build,
        outer_tx=optax.sgd(outer_learning_rate, momentum=momentum, nesterov=momentum is not None),
        outer_code=outer_code or None,
        **known_options,
    )


FIELDS: Mapping[str, Field] = with_meanings(
    {
        "inner": Field(str, choices=("dp", "zero1", "zero2", "fsdp"), default="fsdp"),
        "every": Field(int, 1, default=10),
        "outer_learning_rate": Field(float, 0, below=1e38, default=1.0),
        "outer_momentum": Field(float, 0, below=1, default=0.0),
        "outer_code": Field(str, choices=("", *get_args(Quantization)), default=""),
        "outer_fragments": Field(int, 1, default=1),
        "outer_overlap": Field(bool, default=False),
    },
    first_sentences(diloco) | first_sentences(diloco_of_config),
)
