"""Imports a Hugging Face model from the directory `config.model.from_hf`.

The directory's `config.json` sets the fields of `config.model` that define the model. The run uses
the directory's tokenizer, unless `config.data.tokenizer` names another. The fields are filled in
before the config is checked, so that all code that reads the config finds the imported model.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import ml_collections

from manualpar.core.program.program import Program
from manualpar.core.program.state_arrays import Missing
from manualpar.core.state.train_state import TrainState
from manualpar.data import load_tokenizer
from manualpar.errors import UsageError
from manualpar.inspect.tables import describe_bytes
from manualpar.models import Transformer
from manualpar.models.flat_fields import nest_fields
from manualpar.models.pretrained import load, load_peft, lora_of_peft, read_architecture
from manualpar.models.pretrained.architecture import DEFAULTS, SAID
from manualpar.models.pretrained.tensor_files import model_directory

MODEL_FOLDER = "model"  # The folder of a workdir for the small files of an imported model.


def fill_from_hf(
    config: ml_collections.ConfigDict, *, given: Iterable[str] = ()
) -> ml_collections.ConfigDict:
    """Returns a locked copy of a config, with fields filled in from `config.model.from_hf`.

    If `from_hf` is '', the function returns the config itself.

    Args:
      config: The config; it is not checked yet.
    """
    model = config.get("model")
    directory = model.get("from_hf", "") if isinstance(model, ml_collections.ConfigDict) else ""
    if not directory or not isinstance(directory, str):
        adapter = model.get("adapter", "") if isinstance(model, ml_collections.ConfigDict) else ""
        if adapter and isinstance(adapter, str):  # `check_config` reports any other value.
            raise ValueError(
                f"config.model.adapter is {adapter!r} and config.model.from_hf is {directory!r}, "
                "expected the directory of the base model in config.model.from_hf."
            )
        return config
    path = model_directory(directory, weights=False)
    fields = {name: value for name, value in DEFAULTS.items() if name in SAID}
    fields |= read_architecture(path).flat_fields
    for name in given:
        group, _, field = name.partition(".")
        if group == "model" and field in fields and model.get(field) != fields[field]:
            raise ValueError(
                f"config.{name} is {model.get(field)!r} and config.model.from_hf is "
                f"{directory!r}, whose config.json says {fields[field]!r}; leave one of them out."
            )
    config = config.copy_and_resolve_references().unlock()
    for name, value in fields.items():
        config.model[name] = value
    if adapter := config.model.get("adapter", ""):
        config.model.update(_fields_of_adapter(config, fields, adapter))
    if not config.data.get("tokenizer"):
        if not (path / "tokenizer.json").exists():
            raise ValueError(
                f"config.model.from_hf is {directory!r}, which has no tokenizer.json, and "
                "config.data.tokenizer is ''; expected a tokenizer in one of them."
            )
        config.data.tokenizer = directory
    if config.model.get("add_tokens"):
        number = load_tokenizer(config.data.tokenizer).vocab_size
        config.model.vocab_size = max(config.model.vocab_size, number)
    return config.lock()


def _fields_of_adapter(
    config: ml_collections.ConfigDict, fields: Mapping[str, Any], adapter: str
) -> dict[str, Any]:
    """Returns the fields of `config.model` that describe the adapters in a directory of peft."""
    layout = {"scan_layers": config.model.get("scan_layers", True)}
    found = lora_of_peft(Transformer(**nest_fields({**fields, **layout})), adapter)
    return {
        "lora": tuple(f"{glob}:{rank}" for glob, rank in found.targets),
        "lora_alpha": found.alpha,
        "lora_rank_stabilized": found.rank_stabilized,
        "lora_dropout": found.dropout,
        "lora_magnitudes": found.magnitudes,
        "lora_save": found.save,
        # The adapters may have an embedding with more tokens.
        "vocab_size": found.model.vocab_size,
    }


def initial_state(
    config: ml_collections.ConfigDict,
    program: Program,
    *,
    report: Callable[[str], None],
    init_from: Any = None,
    missing_given: Missing = "error",
) -> TrainState:
    """Makes a run's first state.

    The parameters are those of `init_from`, or of `config.model.from_hf`. Without these, the state
    is initialized. `missing_given` says what happens to parameters that `init_from` does not have.
    """
    key = jax.random.key(config.seed)
    directory = config.model.get("from_hf", "")
    # Neither has LoRA adapters, so these are initialized.
    missing: Missing = "init" if config.model.get("lora") else missing_given
    if init_from is not None:
        try:
            return program.init_from(init_from, key, missing=missing)
        except ValueError as error:
            raise UsageError(str(error)) from error
    if not directory:
        return program.init(key)
    try:
        loaded = load(program, directory, key, missing=missing, add_tokens=adds_tokens(config))
    except ValueError as error:
        raise UsageError(f"config.model.from_hf: {error}") from error
    if adapter := config.model.get("adapter", ""):
        try:
            loaded = loaded._replace(state=load_peft(program, loaded.state, adapter))
        except ValueError as error:
            raise UsageError(f"config.model.adapter: {error}") from error
    report(
        f"read {describe_bytes(loaded.bytes_read)} of {loaded.tensors} tensors from {directory} in "
        f"{loaded.seconds:.1f} s"
        + (f"; {loaded.new_tokens} new tokens begin as the mean" if loaded.new_tokens else "")
    )
    return loaded.state


def adds_tokens(config: ml_collections.ConfigDict) -> bool:
    """Returns whether a config's model may have more tokens than `config.model.from_hf`."""
    return bool(config.model.get("add_tokens") or config.model.get("adapter"))
