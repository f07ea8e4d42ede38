"""From a config to a trained model."""

from typing import Any, NamedTuple

import jax
import ml_collections
import optax
import rich.console

from manualpar.data_parallel import data_parallel
from manualpar.fsdp import fsdp
from manualpar.inspect import layout_table
from manualpar.mesh import make_mesh
from manualpar.models import Classifier
from manualpar.program import Program
from manualpar.training.config import check_config
from manualpar.training.data import Dataset, abstract_batch, load_dataset
from manualpar.training.devices import describe_mesh
from manualpar.training.loop import Recorder, train
from manualpar.training.losses import classification_loss
from manualpar.training.optimizer import adamw, warmup_cosine_schedule
from manualpar.training.progress import TrainingProgress, print_line
from manualpar.training.writers import RunWriter


class Experiment(NamedTuple):
    """Everything a run needs, nothing compiled yet."""

    config: ml_collections.ConfigDict
    dataset: Dataset
    schedule: optax.Schedule
    program: Program


def prepare(config: ml_collections.ConfigDict) -> Experiment:
    """Checks a config and builds what it describes.

    Args:
      config: See `manualpar.training.config` for its fields, and `configs/` for examples.

    Returns:
      The experiment.

    Raises:
      ValueError: The config does not fit itself or the devices; the message names the field.
    """
    check_config(config)
    dataset = load_dataset(config.data.source, seed=config.seed)
    if config.model.num_classes < dataset.num_classes:
        raise ValueError(
            f"config.model.num_classes is {config.model.num_classes}, expected at least the "
            f"{dataset.num_classes} classes of config.data.source={config.data.source}."
        )
    schedule = warmup_cosine_schedule(
        config.optimizer.learning_rate,
        warmup_steps=config.optimizer.warmup_steps,
        num_steps=config.training.num_steps,
    )
    program = build_program(config, dataset, schedule)
    return Experiment(config, dataset, schedule, program)


def build_program(
    config: ml_collections.ConfigDict, dataset: Dataset, schedule: optax.Schedule
) -> Program:
    """Builds the program that `config` describes, for batches of `dataset`.

    Raises:
      ValueError: The batch size, the minibatches and the devices do not fit together.
    """
    optimizer = config.optimizer
    mesh = make_mesh(config.parallel.mesh.to_dict())
    parts = mesh.shape.get("data", 1) * optimizer.num_minibatches
    if config.data.batch_size % parts:
        raise ValueError(
            f"config.data.batch_size is {config.data.batch_size}, expected a multiple of {parts}, "
            f"the {mesh.shape.get('data', 1)} devices along 'data' times "
            f"config.optimizer.num_minibatches={optimizer.num_minibatches}."
        )
    model = Classifier(**config.model.to_dict())
    tx = adamw(schedule, weight_decay=optimizer.weight_decay, b1=optimizer.b1, b2=optimizer.b2)
    shared: dict[str, Any] = {
        "mesh": mesh,
        "batch": abstract_batch(dataset.train, config.data.batch_size),
        "num_minibatches": optimizer.num_minibatches,
    }
    if config.parallel.strategy == "dp":
        return data_parallel(model, tx, classification_loss, **shared)
    shared["min_weight_size"] = config.parallel.min_weight_size
    return fsdp(model, tx, classification_loss, **shared)


def run(
    experiment: Experiment, *, writer: RunWriter, console: rich.console.Console
) -> dict[str, float]:
    """Trains and tests, showing the mesh, the layout and how far it is.

    Args:
      experiment: What to run.
      writer: Where the metrics go.
      console: Where to show them.

    Returns:
      The metrics on the test examples.
    """
    config, program = experiment.config, experiment.program
    print_line(console, f"mesh: {describe_mesh(program.mesh)}")
    console.print(layout_table(program))
    state = program.init(jax.random.key(config.seed))
    with TrainingProgress(console, num_steps=config.training.num_steps) as progress:
        recorder = Recorder(
            writer,
            progress,
            batch_size=config.data.batch_size,
            learning_rate=experiment.schedule,
        )
        train(
            program,
            state,
            experiment.dataset,
            recorder=recorder,
            seed=config.seed,
            batch_size=config.data.batch_size,
            **config.training.to_dict(),
        )
    return recorder.latest("test")
