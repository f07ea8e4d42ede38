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
from collections.abc import Callable, Mapping
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
from manualpar.models.pretrained import load_hf, load_peft, lora_of_peft, read_architecture
from manualpar.models.pretrained.tensor_files import model_directory
from manualpar.parameter_average import ema_params
from manualpar.strategies import FSDP, strategy_kinds
from manualpar.strategies.registry import fields_of_manual_mode
from manualpar.system.storage import AnyPath
from manualpar.training.checkpoints import CheckpointError, Restored
from manualpar.training.checkpoints.folders import open_folder
from manualpar.training.checkpoints.saved_state import read_extra
from manualpar.training.config import complete_config
from manualpar.training.experiment import Experiment, prepare
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
    """

    program: Program
    state: TrainState
    tokenizer: Tokenizer
    max_length: int
    dataset: LanguageDataset | None
    described: str
    template: str = ""


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
    )


def load_directory(
    directory: AnyPath, *, mesh: Mapping[str, int] | None = None, adapter: AnyPath | None = None
) -> Trained:
    """Loads a Hugging Face model from a directory, see `load_hf`.

    Args:
      directory: The directory.
      mesh: As in `load_run`.
      adapter: A directory of the library peft with LoRA adapters of the model, see `load_peft`.

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
    program = FSDP.builder(
        model if adapter is None else lora_of_peft(model, adapter),
        optax.identity(),
        mixture_of_experts_loss if experts.num_experts else language_model_loss,
        mesh=made,
        batch=Batch(tokens, tokens),
        axis_name=tuple(axis for axis in ("data", EXPERT_AXIS) if axis in made.shape),
    )
    if adapter is None:
        state = load_hf(program, local)
    else:
        state = load_peft(program, load_hf(program, local, missing="init"), adapter)
    described = str(directory) if adapter is None else f"{directory} with {adapter}"
    return Trained(program, state, load_tokenizer(str(local)), 0, None, described)


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
