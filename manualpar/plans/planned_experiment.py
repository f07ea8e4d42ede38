"""Builds the program of a config with any vocabulary size, without a tokenizer of this size.

The vocabulary size of a language model follows from the tokenizer of its data. A model of 32,000
tokens can be planned without the tokenizer's file, because a program is built from the shapes of
the data only.
"""

import dataclasses

import ml_collections

from manualpar.core.mesh.mesh import AnyDevices
from manualpar.models import Transformer
from manualpar.models.transformer import flops_per_token
from manualpar.training.config import check_config
from manualpar.training.experiment import Experiment, prepare
from manualpar.training.task import Task, make_task


def prepare_planned(
    config: ml_collections.ConfigDict,
    *,
    devices: AnyDevices = None,
    vocab_size: int = 0,
) -> Experiment:
    """Checks a config and builds its experiment, like `manualpar.training.experiment.prepare`.

    If `vocab_size` replaces the vocabulary of the data, the experiment can be planned but not run.
    """
    task = planned_task(config, vocab_size)
    return prepare(config, devices=devices, task=task)


def planned_task(config: ml_collections.ConfigDict, vocab_size: int = 0) -> Task:
    """Checks a config and makes its task, with `vocab_size` tokens; 0 for the data's vocabulary."""
    check_config(config)
    task = make_task(config)
    if not vocab_size:
        return task
    model, length = task.model, task.tokens_per_example
    if not isinstance(model, Transformer) or vocab_size < 1:
        raise ValueError(
            f"vocab_size is {vocab_size} and config.model.name is {config.model.name!r}, expected "
            "a positive number of tokens and a 'transformer', or 0 for the data's vocabulary."
        )
    model = model.clone(vocab_size=vocab_size, bos_token=min(model.bos_token, vocab_size - 1))
    flops = flops_per_token(model, length) * length
    return dataclasses.replace(task, model=model, flops_per_example=flops)
