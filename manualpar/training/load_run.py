"""Loads a trained model on any devices, to export it, to generate with it or to evaluate it.

A run is loaded in three steps. `saved_config` reads the config of the newest checkpoint,
`prepare_saved` builds an experiment for the devices at hand, and `restore_saved` restores the
state. `load_run` does all three. `load_directory` loads a Hugging Face model instead.

The parallelism of the run does not matter, because a checkpoint stores global arrays, and each
device reads its own part of each array. The loaded model is sharded over the data axis, and by
default the mesh has only this axis. If the run kept a moving average of its parameters, the average
is loaded, because the run evaluated the average too.
"""

import dataclasses
import os
import reprlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_collections
import optax

from manualpar.core.mesh.mesh import make_mesh
from manualpar.core.program.program import Program
from manualpar.core.state.train_state import Batch, TrainState
from manualpar.data import LanguageDataset, load_tokenizer
from manualpar.data.tokenizer import Tokenizer
from manualpar.errors import UsageError
from manualpar.models import Split, Transformer
from manualpar.models.cross_entropy import language_model_loss, mixture_of_experts_loss
from manualpar.models.generation.drawing import Drawing, make_penalties
from manualpar.models.pretrained import load_hf, load_peft, lora_of_peft, read_architecture
from manualpar.models.pretrained.architecture import text_config
from manualpar.models.pretrained.export import GENERATION_CONFIG
from manualpar.models.pretrained.tensor_files import CONFIG_FILE, model_directory
from manualpar.parameter_average import ema_params
from manualpar.strategies import FSDP, strategy_kinds
from manualpar.strategies.registry import fields_of_manual_mode
from manualpar.system.storage import AnyPath, user_path
from manualpar.system.storage.untrusted import read_model_object
from manualpar.training.checkpoints import CheckpointError, Restored
from manualpar.training.checkpoints.folders import open_folder
from manualpar.training.checkpoints.saved_state import read_extra
from manualpar.training.config import complete_config
from manualpar.training.experiment import Experiment, prepare
from manualpar.training.imported_model import MODEL_FOLDER
from manualpar.training.task import EXPERT_AXIS, SPLIT_AXIS
from manualpar.training.workdir import FOLDER, open_checkpoints

# The fields of `config.parallel` with which a model is loaded: every parameter is sharded, and
# communication is exact.
SPLITS: dict[str, Any] = {
    "strategy": FSDP.name,
    "mode": "manual",
    "mesh_order": (),
    "regather_axes": (),
    **{name.removeprefix("parallel."): x for name, x in fields_of_manual_mode().items()},
    "rules": (),
    "sequence": False,
    "layer_overlap": "none",
    "pad": True,
}


# The settings of draws that `generation_config.json` may have, with the defaults of transformers
# for models that say `do_sample`; and other settings, which have no counterpart here.
DRAWN: Mapping[str, float] = {
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
WITHOUT_COUNTERPART: Mapping[str, Any] = {
    "num_beams": 1,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    **dict.fromkeys(
        (
            *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
            *("forced_bos_token_id", "forced_eos_token_id", "penalty_alpha", "guidance_scale"),
            *("exponential_decay_length_penalty", "stop_strings", "dola_layers"),
        )
    ),
}


class OwnSettings(NamedTuple):
    """What the directory of a Hugging Face model says about generation.

    Attributes:
      stop_tokens: The tokens that end an answer.
      drawing: The defaults of draws, as arguments of `Generator.stream`.
      described: `drawing`, and the settings that have no counterpart here, in words; "" for none.
    """

    stop_tokens: frozenset[int] = frozenset()
    drawing: Mapping[str, float] = {}
    described: str = ""


class Trained(NamedTuple):
    """A trained language model on devices.

    Attributes:
      program: The program of the model.
      state: The program's state with the trained parameters.
      tokenizer: The model's tokenizer.
      max_length: The number of tokens in a training sequence; 0 if it is not known.
      dataset: The data of the run; `None` for a Hugging Face model.
      described: A few words on where the model was loaded from.
      template: The file or the name of the chat template; "" for the tokenizer's template.
      own: What the directory of a Hugging Face model says about generation.
    """

    program: Program
    state: TrainState
    tokenizer: Tokenizer
    max_length: int
    dataset: LanguageDataset | None
    described: str
    template: str = ""
    own: OwnSettings = OwnSettings()


def load_run(workdir: AnyPath, *, mesh: Mapping[str, int] | None = None) -> Trained:
    """Loads the newest checkpoint of a run.

    Args:
      workdir: The folder of the run, with `checkpoints/`.
      mesh: The axes of the mesh, such as `{"data": -1, "model": 2}`.

    Raises:
      UsageError: The folder holds no checkpoint of a language model, or the checkpoint is damaged.
      ValueError: The model does not fit the mesh, or the data of the run is missing.

    Communication:
      None.
    """
    config = saved_config(workdir)
    multiple = config.model.vocab_multiple
    if (model := (mesh or {}).get(SPLIT_AXIS, 1)) > 1 and multiple % model:
        raise UsageError(
            f"--mesh has model={model} and the run has config.model.vocab_multiple={multiple}, "
            f"expected a model axis that divides {multiple}, because the vocabulary is split along "
            "it; put the devices along data."
        )
    experiment = prepare_saved(config, mesh)
    try:
        restored = restore_saved(experiment, workdir)
    except CheckpointError as error:
        raise UsageError(f"--workdir={workdir}: {error}") from error
    dataset: Any = experiment.task.dataset
    return Trained(
        experiment.program,
        restored.state,
        dataset.tokenizer,
        config.data.sequence_length,
        dataset,
        f"step {restored.step} of {workdir}",
        config.data.template,
        _own_settings_of_run(
            config, workdir, config.model.vocab_size or dataset.tokenizer.vocab_size
        ),
    )


def load_directory(
    directory: AnyPath, *, mesh: Mapping[str, int] | None = None, adapter: AnyPath | None = None
) -> Trained:
    """Loads a Hugging Face model from a directory, see `load_hf`.

    Args:
      directory: The directory.
      mesh: As in `load_run`.
      adapter: A directory of the library peft with LoRA adapters of the model, see `load_peft`. If
        it has a tokenizer, that is used.

    Raises:
      ValueError: `Transformer` does not support the model in the directory, there is no tokenizer,
        or the adapters do not fit.

    Communication:
      None.
    """
    local = model_directory(directory)
    architecture = read_architecture(local)
    made = make_mesh(mesh or {"data": -1})
    split, expert = (axis if axis in made.shape else None for axis in (SPLIT_AXIS, EXPERT_AXIS))
    model = Transformer(**architecture.fields)
    experts = dataclasses.replace(model.experts, capacity_factor=0.0, axis=expert)
    model = model.clone(experts=experts, split=Split(split))
    tokens = jax.ShapeDtypeStruct((made.size, 16), "int32")
    adapted: Any = model
    if adapter is not None:
        # Nothing is trained.
        adapted = dataclasses.replace(lora_of_peft(model, adapter), dropout=0.0)
        model = adapted.model  # It may have more tokens.
    program = FSDP.builder(
        adapted,
        optax.identity(),
        mixture_of_experts_loss if experts.num_experts else language_model_loss,
        mesh=made,
        batch=Batch(tokens, tokens),
        axis_name=tuple(axis for axis in ("data", EXPERT_AXIS) if axis in made.shape),
    )
    if adapter is None:
        state = load_hf(program, local)
    else:
        state = load_hf(program, local, missing="init", add_tokens=True)
        state = load_peft(program, state, adapter)
    described = str(directory) if adapter is None else f"{directory} with {adapter}"
    own = own_settings(local, model.vocab_size)
    # Adapters with new tokens come with a tokenizer that has them.
    has_own = adapter is not None and (adapter / "tokenizer.json").exists()
    tokenizer = load_tokenizer(str(adapter if has_own else local))
    return Trained(program, state, tokenizer, 0, None, described, own=own)


def own_settings(directory: Path, vocab_size: int) -> OwnSettings:
    """Reads what `generation_config.json` and `config.json` of a directory say about generation.

    An answer ends at each `eos_token_id` of both files. As in transformers, answers are drawn if
    `do_sample` is true.
    """
    stops: list[Any] = []
    for name in (CONFIG_FILE, GENERATION_CONFIG):
        fields: dict[str, Any] = {}  # In the end those of the last file.
        if not os.path.lexists(directory / name):
            continue
        try:
            fields = read_model_object(directory / name, directory)
        except (OSError, ValueError) as error:
            raise ValueError(f"{directory / name} {error}.") from error
        inner = text_config(fields)[0] if name == CONFIG_FILE else fields
        for ends in (fields.get("eos_token_id"), inner.get("eos_token_id")):
            stops += ends if isinstance(ends, list) else [] if ends is None else [ends]
        if wrong := [end for end in stops if type(end) is not int or not 0 <= end < vocab_size]:
            warnings.warn(
                f"{directory / name}: ignored the eos_token_id {reprlib.repr(wrong[0])}, expected "
                f"a token from 0 to {vocab_size - 1}.",
                stacklevel=2,
            )
        stops = [end for end in stops if end not in wrong]
    drawing = _drawing(fields, f"{directory / GENERATION_CONFIG}")
    left_out = [
        f"{name}={reprlib.repr(fields[name])}"
        for name, default in WITHOUT_COUNTERPART.items()
        if fields.get(name) not in (None, default)
    ]
    words = [" ".join(f"{name}={value:g}" for name, value in drawing.items())] if drawing else []
    words += [f"without {', '.join(left_out)}, which has no counterpart here"] if left_out else []
    return OwnSettings(frozenset(stops), drawing, "; ".join(words))


def _drawing(fields: Mapping[str, Any], where: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in DRAWN:
        value = fields.get(name)
        if value is None:
            continue
        if type(value) not in (int, float):
            raise ValueError(f"{where} has {name}={reprlib.repr(value)}, expected a number.")
        found[name] = value
    is_drawn = fields.get("do_sample", False)
    if is_drawn not in (True, False, None):
        raise ValueError(f"{where} has do_sample={reprlib.repr(is_drawn)}, expected true or false.")
    found = {**DRAWN, **found} if is_drawn else found
    if not is_drawn:
        found.pop("temperature", None)
    drawn: dict[str, Any] = {name: x for name, x in found.items() if name != "repetition_penalty"}
    try:
        Drawing(**drawn).as_arrays()
        make_penalties(1, found.get("repetition_penalty", 1.0), 0.0, 0.0, None)
    except ValueError as error:
        said = str(error).removeprefix("generate: ")
        raise ValueError(f"{where}: {said}") from error
    # What changes nothing is not worth a word.
    neutral = {**DRAWN, "top_k": 0, "temperature": None}
    return {name: x for name, x in found.items() if x != neutral[name]}


def _own_settings_of_run(
    config: ml_collections.ConfigDict, workdir: AnyPath, vocab_size: int
) -> OwnSettings:
    """Reads the settings of an imported model, from the copies of its files in the workdir."""
    named = config.model.get("from_hf", "")
    if not named:
        return OwnSettings()
    for folder in (workdir / MODEL_FOLDER, user_path(named)):
        if (folder / CONFIG_FILE).is_file():
            return own_settings(model_directory(folder, weights=False), vocab_size)
    warnings.warn(
        f"config.model.from_hf was {named!r}, which is gone, so its {GENERATION_CONFIG} is not "
        "used: answers end at the tokenizer's end token, and are not drawn by default.",
        stacklevel=2,
    )
    return OwnSettings()


def saved_config(workdir: AnyPath) -> ml_collections.ConfigDict:
    """Reads the config of the newest checkpoint of a language model, complete and locked."""
    steps = open_folder(workdir / FOLDER).steps()
    if not steps:
        raise UsageError(f"--workdir={workdir} holds no checkpoint, expected the folder of a run.")
    try:
        saved = read_extra(workdir / FOLDER / str(steps[-1]))["config"]
        config = complete_config(ml_collections.ConfigDict(_with_tuples(saved)))
        name = config.model.name
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--workdir={workdir}: the checkpoint of step {steps[-1]} has no config of a run "
            f"({error}), expected one that a training command saved."
        ) from error
    if name != "transformer":
        raise UsageError(
            f"--workdir={workdir} holds a run of config.model.name={name!r}, expected "
            "'transformer', a language model."
        )
    return config


def prepare_saved(
    config: ml_collections.ConfigDict, mesh: Mapping[str, int] | None = None
) -> Experiment:
    """Prepares the experiment of a saved config on all devices that JAX has now.

    Args:
      config: The config from `saved_config`.
      mesh: As in `load_run`.
    """
    config = config.copy_and_resolve_references().unlock()
    kind = strategy_kinds().get(config.parallel.strategy, FSDP)
    # Only DiLoCo can load the state of a DiLoCo run. So the strategy stays, with one replica.
    strategy_fields = {} if kind.is_exact else {"strategy": kind.name, "inner": FSDP.name}
    for name, value in (SPLITS | strategy_fields).items():
        if name in config.parallel:
            config.parallel[name] = value
    axes = dict(mesh or {"data": -1})
    config.parallel.mesh = ml_collections.ConfigDict(
        axes if kind.is_exact else {"replica": 1, **axes}
    )
    if config.model.get("from_hf"):
        config.model.from_hf = ""  # The saved fields are complete. The directory may be missing.
    config.model.adapter = ""
    # Nothing is trained, so a warm-up longer than the run does no harm. Older runs had such.
    config.optimizer.warmup_steps = 0
    config.optimizer.num_minibatches = 1
    config.data.batch_size = jax.device_count()
    if "sample" in config:
        config.sample.num_tokens = 0
    return prepare(config.lock())


def restore_saved(
    experiment: Experiment, workdir: AnyPath, *, report: Callable[[str], None] = print
) -> Restored:
    """Restores the newest checkpoint of a workdir, for the experiment of `prepare_saved`.

    Raises:
      CheckpointError: The checkpoint is damaged.
    """
    with open_checkpoints(experiment.config, workdir) as checkpoints:
        restored = checkpoints.restore(experiment.program, report=report)
    if not experiment.config.optimizer.ema_decay:
        return restored
    return dataclasses.replace(restored, state=ema_params(restored.state))


def _with_tuples(value: Any) -> Any:
    """Converts the lists of a JSON value to tuples, because configs have no lists."""
    if isinstance(value, dict):
        return {key: _with_tuples(inner) for key, inner in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
