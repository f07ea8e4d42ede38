"""From a config to a trained model."""

import math
from typing import Any, NamedTuple

import jax
import ml_collections
import optax
import rich.console

from manualpar.data_parallel import data_parallel
from manualpar.fsdp import fsdp
from manualpar.hsdp import hsdp
from manualpar.inspect import layout_table
from manualpar.inspect.drawing import ALL, draw_sharding
from manualpar.mesh import axes_size, axis_tuple, make_mesh
from manualpar.models import Classifier
from manualpar.program import Program
from manualpar.training.config import check_config, nearest
from manualpar.training.data import Dataset, abstract_batch, load_dataset
from manualpar.training.devices import describe_mesh
from manualpar.training.loop import Recorder, train
from manualpar.training.losses import classification_loss
from manualpar.training.optimizer import adamw, warmup_cosine_schedule
from manualpar.training.progress import TrainingProgress, print_line
from manualpar.training.writers import RunWriter
from manualpar.zero import zero

# What the batch is split over, as far as the mesh has it; the axis that hsdp replicates over first.
DATA_AXES = ("replica", "data")


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
    paths = [info.path for info, _ in program.parameters]
    wanted = config.debug.draw_sharding
    if wanted not in ("", ALL, *paths):
        raise ValueError(
            f"config.debug.draw_sharding is {wanted!r}, expected the path of a parameter, {ALL!r} "
            f"or '' for none; the nearest one is {nearest(wanted, paths)!r}."
        )
    return Experiment(config, dataset, schedule, program)


def build_program(
    config: ml_collections.ConfigDict, dataset: Dataset, schedule: optax.Schedule
) -> Program:
    """Builds the program that `config` describes, for batches of `dataset`.

    An option that the strategy does not have, such as `pad` for `dp`, is not used. On a mesh with
    an axis `replica` other strategies than `hsdp` work over it and `data` as one axis.

    Args:
      config: A config that `check_config` passes.
      dataset: What it is trained on; only shapes and dtypes are read.
      schedule: The learning rate of each update.

    Returns:
      The program, traced but not compiled.

    Raises:
      ValueError: The batch size, the minibatches and the devices do not fit together, or two
        options; the message names them.
    """
    optimizer, parallel = config.optimizer, config.parallel
    mesh = make_mesh(_mesh_axes(parallel))
    if parallel.strategy == "hsdp" and "replica" not in mesh.shape:
        raise ValueError(
            f"config.parallel.strategy is 'hsdp' and config.parallel.mesh has the axes "
            f"{list(mesh.shape)}, expected 'replica' too; "
            """set --config.parallel.mesh="{'replica': 2, 'data': -1}"."""
        )
    if parallel.reduce_dtype and parallel.mode != "manual":
        raise ValueError(
            f"config.parallel.reduce_dtype is {parallel.reduce_dtype!r} and config.parallel.mode "
            f"is {parallel.mode!r}, expected '', for XLA chooses where it sums, or mode 'manual'."
        )
    data_axes = tuple(axis for axis in DATA_AXES if axis in mesh.shape)
    along, devices = " and ".join(map(repr, data_axes)), axes_size(mesh, data_axes)
    parts = devices * optimizer.num_minibatches
    if config.data.batch_size % parts:
        raise ValueError(
            f"config.data.batch_size is {config.data.batch_size}, expected a multiple of {parts}, "
            f"the {devices} devices along {along or repr('data')} times "
            f"config.optimizer.num_minibatches={optimizer.num_minibatches}."
        )
    model = Classifier(**config.model.to_dict(), annotate=bool(config.parallel.rules))
    tx = adamw(schedule, weight_decay=optimizer.weight_decay, b1=optimizer.b1, b2=optimizer.b2)
    batch = abstract_batch(dataset.train, config.data.batch_size)
    shared: dict[str, Any] = {
        "mesh": mesh,
        "batch": batch,
        "num_minibatches": optimizer.num_minibatches,
        "mode": parallel.mode,
        "rules": parallel.rules,
        "param_dtype": parallel.param_dtype or None,
        "gather_dtype": parallel.gather_dtype or None,
        "reduce_dtype": parallel.reduce_dtype or None,
        "norm_metrics": config.training.norm_metrics,
    }
    if parallel.strategy != "hsdp" and "replica" in mesh.shape:
        shared["axis_name"] = DATA_AXES
    if parallel.strategy == "dp":
        return data_parallel(model, tx, classification_loss, **shared)
    shared |= {"min_weight_size": parallel.min_weight_size, "pad": parallel.pad}
    if parallel.strategy in ("zero1", "zero2"):
        stage = int(parallel.strategy[-1])
        return zero(model, tx, classification_loss, stage=stage, **shared)
    shared |= {
        "reshard_after_forward": parallel.reshard_after_forward,
        "communicate_every": parallel.communicate_every,
    }
    builder = hsdp if parallel.strategy == "hsdp" else fsdp
    return builder(model, tx, classification_loss, **shared)


def _mesh_axes(parallel: ml_collections.ConfigDict) -> dict[str, int]:
    """The axes of the mesh, the major one first: a config keeps no order, ours is `DATA_AXES`.

    Devices of a group that shares a replica are then neighbours, whose links are the fastest.
    """
    sizes = parallel.mesh.to_dict()
    first = {axis: sizes[axis] for axis in DATA_AXES if axis in sizes}
    return first | sizes


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

    Raises:
      ReplicaError: Devices that should hold the same do not, see `config.debug`.
      KeyboardInterrupt: Ctrl-C was pressed.
    """
    config, program = experiment.config, experiment.program
    training, check_every = config.training, config.debug.check_replicas_every
    print_line(console, f"mesh: {describe_mesh(program.mesh)}")
    console.print(layout_table(program))
    if config.debug.draw_sharding:
        draw_sharding(program.abstract_state.params, config.debug.draw_sharding)
    if check_every:
        print_line(console, _describe_check(program, check_every))
    state = program.init(jax.random.key(config.seed))
    with TrainingProgress(console, num_steps=training.num_steps) as progress:
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
            num_steps=training.num_steps,
            eval_every_steps=training.eval_every_steps,
            log_every_steps=training.log_every_steps,
            check_replicas_every=check_every,
        )
    return recorder.latest("test")


def _describe_check(program: Program, every: int) -> str:
    """A line that says how much of the state the replica sentinel can compare."""
    mesh, specs = program.mesh, jax.tree.leaves(program.layout)
    parts = [math.prod(axes_size(mesh, axis_tuple(entry)) for entry in spec) for spec in specs]
    copied = sum(number < mesh.size for number in parts)
    if not copied:
        return "replica check: nothing to compare, each part of the state is on one device only"
    steps = "every step" if every == 1 else f"every {every} steps"
    return f"replica check: {steps}, {copied} of {len(specs)} arrays have copies to compare"
