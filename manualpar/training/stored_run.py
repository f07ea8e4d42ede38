"""Loads a trained model from the folder of its run, or from a Hugging Face directory.

A checkpoint stores global arrays, and each device reads its own part. So the mesh may differ from
the mesh of the training. By default all devices are along `data` and the parameters are fully
sharded. Runs with pipeline or context parallelism are loaded in the same way.
"""

from typing import Any, NamedTuple

import jax
import optax

from manualpar.core.mesh.axes import AxisName
from manualpar.core.mesh.mesh import make_mesh
from manualpar.core.program.program import Program
from manualpar.core.state.train_state import Batch, TrainState
from manualpar.data import LanguageDataset, load_tokenizer
from manualpar.data.tokenizer import Tokenizer
from manualpar.errors import UsageError
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss, mixture_of_experts_loss
from manualpar.models.pretrained import load_hf, read_architecture
from manualpar.models.pretrained.directory import model_directory
from manualpar.strategies import FSDP
from manualpar.system.storage import AnyPath
from manualpar.training.checkpoints import CheckpointError
from manualpar.training.load_run import prepare_saved, restore_saved, saved_config


class Trained(NamedTuple):
    """A trained language model on devices.

    Attributes:
      program: Its program.
      state: Its state.
      tokenizer: Its tokenizer.
      max_length: The number of tokens in a training sequence; 0 if it is not known.
      dataset: The data of the run; `None` for a Hugging Face model.
      described: A few words on where the model was loaded from.
      template: The file of its chat template; "" for the tokenizer's template.
    """

    program: Program
    state: TrainState
    tokenizer: Tokenizer
    max_length: int
    dataset: LanguageDataset | None
    described: str
    template: str = ""


def load_run(workdir: AnyPath, *, mesh: dict[str, int] | None = None) -> Trained:
    """Loads the newest checkpoint of a run.

    Args:
      workdir: The folder of the run, with `checkpoints/`.
      mesh: The axes of the mesh, such as `{"data": -1, "model": 2}`; by default all devices along
        `data`.

    Raises:
      UsageError: The folder holds no checkpoint of a language model, or the checkpoint is damaged.
      ValueError: The model does not fit the mesh, or the data of the run is missing.

    Communication:
      None; each device reads its own part.
    """
    config = saved_config(workdir)
    multiple = config.model.vocab_multiple
    if (model := (mesh or {}).get("model", 1)) > 1 and multiple % model:
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


def load_directory(directory: AnyPath, *, mesh: dict[str, int] | None = None) -> Trained:
    """Loads a Hugging Face model from a directory, see `load_hf`; `mesh` is as in `load_run`.

    Raises:
      ValueError: No `Transformer` can be the model in the directory, or there is no tokenizer.

    Communication:
      None; each device reads its own part.
    """
    local = model_directory(directory)
    architecture = read_architecture(local)
    made = make_mesh(mesh or {"data": -1})
    fields: dict[str, Any] = {**architecture.fields, "capacity_factor": 0.0}
    if "model" in made.shape:
        fields["split_axis"] = "model"
    if "expert" in made.shape:
        fields["expert_axis"] = "expert"
    model = Transformer(**fields)
    axes = tuple(axis for axis in ("data", "expert") if axis in made.shape)
    axis_name: AxisName = axes if len(axes) > 1 else axes[0]
    tokens = jax.ShapeDtypeStruct((made.size, 16), "int32")
    program = FSDP.builder(
        model,
        optax.identity(),
        mixture_of_experts_loss if model.num_experts else language_model_loss,
        mesh=made,
        batch=Batch(tokens, tokens),
        axis_name=axis_name,
    )
    state = load_hf(program, local)
    return Trained(program, state, load_tokenizer(str(local)), 0, None, str(directory))
