"""The task of a config: a model, its loss, its data, and its metrics.

The model is the model of `config.model` without LoRA and int8 weights. `fine_tuned` adds them.
"""

import dataclasses
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import ml_collections
import numpy as np

from manualpar.core.model.loss_function import LossFn
from manualpar.core.program.optimizer_update import Optimizer
from manualpar.core.program.state_arrays import Missing
from manualpar.core.state.train_state import TrainState
from manualpar.core.summary import Summarized
from manualpar.data import (
    ClassificationDataset,
    Dataset,
    LanguageDataset,
    load_dataset,
)
from manualpar.errors import naming_arguments
from manualpar.layers import Context
from manualpar.models import Classifier, Split, Transformer
from manualpar.models.cross_entropy import (
    classification_loss,
    language_model_loss,
    mixture_of_experts_loss,
)
from manualpar.models.finetuning.lora import lora
from manualpar.models.finetuning.preferences import first_call, preference_loss
from manualpar.models.finetuning.quantized import Code, quantized
from manualpar.models.flat_fields import nest_fields
from manualpar.models.generation.drawing import sample_tokens
from manualpar.models.transformer import flops_per_token
from manualpar.training.config import OWN, complete_config, is_own

# For each weight: a multiplication and an addition forward, and twice as many backward.
FLOPS_PER_WEIGHT = 6
# The fields of `config.model` that `fine_tuned` uses. The model takes the others as arguments.
FINE_TUNING_FIELDS = (
    *("lora", "lora_alpha", "lora_rank_stabilized", "lora_dropout", "lora_magnitudes"),
    *("lora_save", "add_tokens", "adapter", "int8", "nf4"),
)
# The mesh axes of tensor, expert, context and pipeline parallelism, in this order.
SPLIT_AXIS, EXPERT_AXIS, CONTEXT_AXIS, STAGE_AXIS = "model", "expert", "context", "stage"


@dataclasses.dataclass(frozen=True, repr=False)
class Task(Summarized):
    """The model, loss, data and metrics that a config trains.

    Attributes:
      dataset: The data, see `manualpar.data.as_dataset` for a user's own.
      model: The model, as a builder takes it.
      loss_fn: The loss function, see `manualpar.core.model.loss_function`.
      headline: The name of the metric that sums up a run.
      flops_per_example: The FLOPs per example of a training step, forward and backward, without
        recomputation; `None` if they are not known. A run then reports no MFU.
      tokens_per_example: The number of tokens in an example; 0 if examples have none.
      derive: Turns the means of a split's metrics into the reported metrics.
      sample: Generates a text from a trained state without padding and a random key. `None` if the
        config asks for no text.
      optimizer: The optimizer; `None` for the one that the config describes.
      options: Arguments of the program's builder that a config has no field for, such as
        `init_args` and `sync_collections`.
      hooks: Hooks of the run, see `manualpar.training.hooks`.
      init_from: The parameters to begin with, as `Program.init_from` takes them; `None` to
        initialize them.
      missing: What happens to parameters that `init_from` does not have, as in `Program.init_from`.
    """

    dataset: Dataset
    model: Any
    loss_fn: LossFn
    headline: str = "loss"
    flops_per_example: float | None = None
    tokens_per_example: int = 0
    derive: Callable[[str, dict[str, float]], dict[str, float]] = lambda split, means: means
    sample: Callable[[TrainState, jax.Array], str] | None = None
    optimizer: Optimizer | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    hooks: Sequence[Any] = ()
    init_from: Any = None
    missing: Missing = "error"


def make_task(config: ml_collections.ConfigDict) -> Task:
    """Loads the data that a config names, and makes the model for it.

    If `config.model.name` is `module:function`, the function makes the task.
    """
    config = complete_config(config)
    if is_own(config.model.name):
        return _task_of_user(config)
    is_language = config.model.name == "transformer"
    return _language_modelling(config) if is_language else _classification(config)


def _task_of_user(config: ml_collections.ConfigDict) -> Task:
    name = config.model.name
    if name == OWN:
        raise ValueError(
            f"config.model.name is {OWN!r}, expected module:function, such as "
            "'my_task:make_task', where the function makes a manualpar.training.task.Task of the "
            "config; or give model, loss and data to manualpar.training.fit."
        )
    task = find_function(name)(config)
    if not isinstance(task, Task):
        raise ValueError(
            f"config.model.name is {name!r}, which returned a {type(task).__name__}, expected a "
            "manualpar.training.task.Task."
        )
    return task


def _load_data(config: ml_collections.ConfigDict, **arguments: Any) -> Dataset:
    """Calls `load_dataset`; errors name the fields of `config.data`."""
    with naming_arguments({name: f"config.data.{name}" for name in arguments}):
        return load_dataset(seed=config.seed, **arguments)


def _classification(config: ml_collections.ConfigDict) -> Task:
    dataset = _load_data(config, source=config.data.source)
    assert isinstance(dataset, ClassificationDataset)
    if config.model.num_classes < dataset.num_classes:
        raise ValueError(
            f"config.model.num_classes is {config.model.num_classes}, expected at least the "
            f"{dataset.num_classes} classes of config.data.source={config.data.source}."
        )
    model = Classifier(**_fields(config.model), annotate=bool(config.parallel.rules))
    sizes = [dataset.train[0].inputs.size, *[model.hidden_size] * model.num_layers]
    weights = sum(a * b for a, b in zip(sizes, [*sizes[1:], model.num_classes], strict=True))
    return Task(
        dataset=dataset,
        model=model,
        loss_fn=classification_loss,
        headline="accuracy",
        flops_per_example=FLOPS_PER_WEIGHT * weights,
    )


def _language_modelling(config: ml_collections.ConfigDict) -> Task:
    data, length = config.data, config.data.sequence_length
    dataset = _load_data(
        config,
        source=data.source,
        path=data.path,
        tokenizer=data.tokenizer,
        sequence_length=length,
        field=data.field,
        held_out=data.held_out,
        cache=data.cache,
        mixture=data.mixture,
        template=data.template,
        long_examples=data.long_examples,
        parse_special=data.parse_special,
        bad_rows=data.bad_rows,
    )
    assert isinstance(dataset, LanguageDataset)
    tokenizer = dataset.tokenizer
    has_pairs = data.source == "preferences"
    if has_pairs and not config.model.lora:
        raise ValueError(
            "config.data.source is 'preferences' and config.model.lora is (), expected adapters "
            "such as ('*/attention/*:8',), because the model without them is the reference; to "
            "train a whole model see docs/preferences.md."
        )
    if 0 < config.model.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"config.data.tokenizer has {tokenizer.vocab_size} tokens and config.model.vocab_size "
            f"is {config.model.vocab_size}, expected a tokenizer with at most as many tokens, such "
            "as the model's; or set config.model.add_tokens, if the model is imported."
        )
    experts = {"expert_axis": EXPERT_AXIS if config.model.num_experts else ""}
    model = Transformer(
        **nest_fields(_fields(config.model) | experts)
        | {"vocab_size": config.model.vocab_size or tokenizer.vocab_size},
        # A pair's sequence is one document, and templates may write BOS in its middle.
        bos_token=-1 if has_pairs else tokenizer.bos_token,
        label_smoothing=config.training.label_smoothing,
        z_loss=config.training.z_loss,
        annotate=bool(config.parallel.rules),
        split=split_of(config),
        context=Context(
            CONTEXT_AXIS if CONTEXT_AXIS in config.parallel.mesh else None,
            config.parallel.context_attention,
        ),
    )

    def derive(split: str, means: dict[str, float]) -> dict[str, float]:
        more = {}
        if tokens_per_byte := getattr(dataset, split).tokens_per_byte:
            # Bits per byte can be compared between models with different tokenizers.
            more["bits_per_byte"] = means["loss"] / math.log(2) * tokens_per_byte
        if (number := model.experts.num_experts) and not has_pairs:
            # The load of the busiest expert, in multiples of an equal share.
            shares = [means[f"expert_{index}"] for index in range(number)]
            more["busiest_expert"] = max(shares) * number
        return means | more

    # The prompt is encoded here, so that a bad prompt is refused before the training.
    prompt = tokenizer.encode(config.sample.prompt)
    if prompt[:1].tolist() != [tokenizer.bos_token]:  # With `parse_special` it may have BOS.
        prompt = np.concatenate([[tokenizer.bos_token], prompt])

    def sample(state: TrainState, rng: jax.Array) -> str:
        tokens = sample_tokens(
            state.apply_fn,
            state.params,
            prompt,
            num_tokens=config.sample.num_tokens,
            sequence_length=data.sequence_length,
            temperature=config.sample.temperature,
            rng=rng,
            collections=state.collections,
        )
        return config.sample.prompt + tokenizer.decode(np.asarray(tokens))

    loss_fn: LossFn = mixture_of_experts_loss if model.experts.num_experts else language_model_loss
    if has_pairs:
        with naming_arguments({"beta": "config.training.preference_beta"}):
            loss_fn = preference_loss(config.training.preference_beta)
        length *= 2  # Both answers.
    return Task(
        dataset=dataset,
        model=model,
        loss_fn=loss_fn,
        headline="bits_per_byte" if dataset.test.tokens_per_byte else "loss",
        # The loss of pairs has a reference, whose FLOPs are not counted, so there is no MFU.
        flops_per_example=None if has_pairs else flops_per_token(model, length) * length,
        tokens_per_example=length,
        derive=derive,
        sample=sample if config.sample.num_tokens else None,
        options={"init_args": first_call} if has_pairs else {},
    )


def splits_layers(config: ml_collections.ConfigDict) -> bool:
    """Returns whether the config's mesh splits the layers of a transformer.

    With `parallel.rules`, the axis `SPLIT_AXIS` only shards parameters, and layers gather them
    before use.
    """
    return SPLIT_AXIS in config.parallel.mesh and not config.parallel.rules


def split_of(config: ml_collections.ConfigDict) -> Split:
    """Returns how the config splits the layers of a transformer."""
    if not splits_layers(config):
        # `prepare` refuses `parallel.sequence` if the mesh does not split layers.
        return Split()
    sequence, overlap = config.parallel.sequence, config.parallel.layer_overlap
    # `prepare` refuses a ring without `parallel.sequence`.
    return Split(SPLIT_AXIS, sequence, "none" if overlap == "ring" and not sequence else overlap)


def fine_tuned(model: nn.Module, config: ml_collections.ConfigDict) -> Any:
    """Adds LoRA and quantized weights to a model; returns it unchanged if the config has neither.

    `config` is the group `config.model` of a config.
    """
    if config.int8 and config.nf4:
        raise ValueError(
            f"config.model.nf4 is {config.nf4!r} and config.model.int8 is {config.int8!r}, "
            "expected only one of them; leave one empty."
        )
    code: Code = "nf4" if config.nf4 else "int8"
    blocks = _numbers_by_glob(
        code,
        config.nf4 or config.int8,
        "a glob on parameter paths and a block length of at least 1, such as '*kernel:64'",
    )
    ranks = _numbers_by_glob(
        "lora",
        config.lora,
        "a glob on module paths and a rank of at least 1, such as '*/attention/query:8'",
    )
    tuned: Any = quantized(model, blocks, code=code) if blocks else model
    if not ranks:
        for field in ("lora_dropout", "lora_magnitudes", "lora_save"):
            if value := config[field]:
                raise ValueError(
                    f"config.model.{field} is {value!r} and config.model.lora is (), expected "
                    "adapters such as ('*/attention/*:8',); without adapters name the parameters "
                    "in config.optimizer.trainable."
                )
        return tuned
    if not config.lora_alpha:
        raise ValueError(
            "config.model.lora_alpha is 0, expected a number above 0, such as twice the rank, "
            "because the output of an adapter is multiplied by lora_alpha / rank."
        )
    return lora(
        tuned,
        ranks,
        alpha=config.lora_alpha,
        rank_stabilized=config.lora_rank_stabilized,
        dropout=config.lora_dropout,
        magnitudes=config.lora_magnitudes,
        save=config.lora_save,
    )


def _fields(config: ml_collections.ConfigDict) -> dict[str, Any]:
    others = {"name", "from_hf", *FINE_TUNING_FIELDS}
    return {name: value for name, value in config.to_dict().items() if name not in others}


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


# -------------------------------------------------------------------------------------------------
# Imports a function of a user that a config names, as `module:function`.


def find_function(name: str) -> Callable[..., Any]:
    """Imports the function `module:function` of `config.model.name`.

    The current folder is searched too, but last.
    """
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0]:
            raise
        raise ValueError(
            f"config.model.name is {name!r}, and there is no module {error.name!r} beside the "
            f"config, in {os.getcwd()} or in Python's path; run the command in its folder."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(
            f"config.model.name is {name!r}, and {module.__file__} has no function "
            f"{function_name!r}, expected one that takes the config and returns a Task."
        )
    return function
