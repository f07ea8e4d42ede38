"""The fields of a config that say how a model is fine-tuned."""

from typing import Any

import flax.linen as nn
import ml_collections

from manualpar.finetuning.lora import lora

# Of `config.model`, which are none of the model's own.
FINE_TUNING_FIELDS = ("lora", "lora_alpha")


def with_adapters(model: nn.Module, config: ml_collections.ConfigDict) -> Any:
    """A model with the adapters that `config.model` asks for; the model itself if it asks for none.

    Raises:
      ValueError: What `lora` holds is no `glob:rank`, or names a glob twice; or `lora_alpha` is 0.
    """
    targets: dict[str, int] = {}
    for target in config.lora:
        glob, _, rank = target.rpartition(":")
        if not glob or not rank.isdecimal() or int(rank) < 1 or glob in targets:
            again = ", which is there already" if glob in targets else ""
            raise ValueError(
                f"config.model.lora has {target!r}{again}, expected a glob on module paths and a "
                "rank of at least 1, such as '*/attention/query:8'."
            )
        targets[glob] = int(rank)
    if not targets:
        return model
    if not config.lora_alpha:
        raise ValueError(
            "config.model.lora_alpha is 0, expected a number above 0, such as twice the rank: what "
            "an adapter adds is multiplied by lora_alpha / rank."
        )
    return lora(model, targets, alpha=config.lora_alpha)
