"""Prepares a model for fine-tuning: adds the LoRA adapters and int8 weights of a run's config."""

from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import ml_collections

from manualpar.models.finetuning.lora import lora
from manualpar.models.finetuning.quantized import quantized

# The fields of `config.model` that are not arguments of the model.
FINE_TUNING_FIELDS = ("lora", "lora_alpha", "int8")


def fine_tuned(model: nn.Module, config: ml_collections.ConfigDict) -> Any:
    """Adds LoRA and int8 weights to a model; returns the model unchanged if the config has neither.

    `config` is the group `config.model` of a config.

    Raises:
      ValueError: An entry of `lora` or `int8` is not `glob:number`, or repeats a glob. Or
        `lora_alpha` is 0.
    """
    blocks = _numbers_by_glob(
        "int8",
        config.int8,
        "a glob on parameter paths and a block length of at least 1, such as '*kernel:64'",
    )
    ranks = _numbers_by_glob(
        "lora",
        config.lora,
        "a glob on module paths and a rank of at least 1, such as '*/attention/query:8'",
    )
    tuned: Any = quantized(model, blocks) if blocks else model
    if not ranks:
        return tuned
    if not config.lora_alpha:
        raise ValueError(
            "config.model.lora_alpha is 0, expected a number above 0, such as twice the rank, "
            "because the output of an adapter is multiplied by lora_alpha / rank."
        )
    return lora(tuned, ranks, alpha=config.lora_alpha)


def _numbers_by_glob(field: str, targets: Iterable[str], expected: str) -> dict[str, int]:
    """Parses a field's entries `glob:number`."""
    found: dict[str, int] = {}
    for target in targets:
        glob, _, number = target.rpartition(":")
        if not glob or not number.isdecimal() or int(number) < 1 or glob in found:
            again = ", which is there already" if glob in found else ""
            raise ValueError(f"config.model.{field} has {target!r}{again}, expected {expected}.")
        found[glob] = int(number)
    return found
