"""Trains a user's own model, loss and data with everything that a run has."""

import contextlib
import functools
import inspect
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import jax
import ml_collections

from manualpar.core.model.loss_function import LossFn
from manualpar.core.program.optimizer_update import Optimizer
from manualpar.core.program.program import Program
from manualpar.core.program.state_arrays import Missing
from manualpar.core.state.train_state import TrainState
from manualpar.data import BatchStream, ExampleSplit, as_dataset
from manualpar.data.dataset import SPLITS
from manualpar.errors import suggest
from manualpar.inspect.tables import print_line
from manualpar.system.cluster import Cluster, initialize
from manualpar.system.storage import AnyPath, as_path
from manualpar.training.agreement import experiment_facts, run_facts
from manualpar.training.config import (
    ALL_FIELDS,
    OWN,
    complete_config,
    fields_of,
    flatten_config,
    named_config,
)
from manualpar.training.division import read_earlier
from manualpar.training.exit_codes import ending_all
from manualpar.training.experiment import prepare
from manualpar.training.fields import Fields
from manualpar.training.memory_check import check_fits
from manualpar.training.monitoring.progress import make_console, show_tracing
from manualpar.training.run import run
from manualpar.training.task import Task
from manualpar.training.workdir import FOLDER, RUNS, check_folder, choose_workdir

# Fields of `config.optimizer` that also apply to a user's optimizer.
OF_ANY_OPTIMIZER = ("optimizer.num_minibatches", "optimizer.ema_decay")
# Arguments of `fit` that are short for fields of the config.
FIELD_OF = {
    "steps": "training.num_steps",
    "batch_size": "data.batch_size",
    "strategy": "parallel.strategy",
    "mesh": "parallel.mesh",
    "learning_rate": "optimizer.learning_rate",
}


class Fit(NamedTuple):
    """The result of `fit`.

    Attributes:
      program: The program that trained; `program.whole(state)` returns the parameters in full.
      state: The state after the last step.
      metrics: The latest report of each split, such as `metrics["eval"]["loss"]`.
      workdir: The folder with the checkpoints, the metrics and the report.
    """

    program: Program
    state: TrainState
    metrics: dict[str, dict[str, float]]
    workdir: AnyPath


def fit(
    model: Any,
    loss_fn: LossFn,
    data: Any,
    optimizer: Optimizer | None = None,
    config: Fields | Mapping[str, Any] | ml_collections.ConfigDict | None = None,
    hooks: Sequence[Any] = (),
    *,
    steps: int | None = None,
    batch_size: int | None = None,
    strategy: str | None = None,
    mesh: Mapping[str, int] | None = None,
    learning_rate: float | None = None,
    workdir: str | AnyPath | None = None,
    options: Mapping[str, Any] | None = None,
    init_from: Any = None,
    missing: Missing = "error",
    cluster: Cluster | None = None,
    **misspelt: Any,
) -> Fit:
    """Trains a model, with sharding, progress, evaluation, checkpoints and a report.

    If `workdir` has a checkpoint of an earlier call, the training resumes from it.

    Args:
      model: A Linen module, or an NNX class or function of `rngs`, as builders take it.
      loss_fn: `loss_fn(params, apply_fn, batch, rng) -> (loss, metrics)`, see
        `manualpar.core.model.loss_function`.
      data: The training data, or a mapping from `train`, `eval` and `test` to data. Examples by
        number, or batches in order, see `manualpar.data.as_dataset`.
      optimizer: An optax optimizer, or a function that makes one from the parameters, see
        `manualpar.muon_dims`; by default the one that the config describes.
      config: Values of config fields by dotted name, such as `{"training.num_steps": 100,
        "parallel.mesh": {"data": 2, "model": 4}}`, or a complete config. An editor completes the
        names, and a type checker sees a misspelt one in a dict of the type `Fields`. Other fields
        have the values of `configs/own.py`. Fields of your own, in the groups `model` and `data`,
        are stored with the run; a run that resumes must have the same.
      hooks: Objects with methods of `manualpar.training.hooks.Hook`.
      steps: The field `training.num_steps`; this and the next four are short for the fields in
        `FIELD_OF`.
      batch_size: The field `data.batch_size`; by default the size of the first batch, if the data
        has batches.
      strategy: The field `parallel.strategy`.
      mesh: The field `parallel.mesh`, such as `{"data": 2, "model": 4}`.
      learning_rate: The field `optimizer.learning_rate`, without an `optimizer`.
      workdir: The folder of the run; by default a new folder in `runs/fit/`.
      options: Arguments of the program's builder that a config has no field for, such as
        `init_args`.
      init_from: The parameters to begin with, as `Program.init_from` takes them; by default they
        are initialized. A call that resumes does not use them.
      missing: What happens to parameters that `init_from` does not have: `"error"` refuses, and
        `"init"` initializes them.
      cluster: The processes that train together, from `manualpar.system.cluster.initialize`, inside
        its context. By default the environment decides, as in `initialize`.
      **misspelt: Refused, with the name that is most like it.

    Returns:
      The program, the state, and the metrics.

    Raises:
      ValueError: A field is not allowed, or contradicts another one or the data.
      TypeError: An argument has the wrong type.
      UsageError: The folder contains another run.
      StoppedError, NonFiniteError, CheckpointError: See `manualpar.training.run.run`, which raises
        others too.

    Communication:
      That of the program, and with several processes that of agreements on the data and the folder.
    """
    if misspelt:
        raise TypeError(_describe_misspelt(next(iter(misspelt))))
    if missing not in get_args(Missing):
        raise ValueError(f"fit: missing is {missing!r}, expected one of {get_args(Missing)}.")
    if missing != "error" and init_from is None:
        raise ValueError(f"fit: missing is {missing!r} and init_from is None, expected both.")
    short = {
        "steps": steps,
        "batch_size": batch_size,
        "strategy": strategy,
        "mesh": mesh,
        "learning_rate": learning_rate,
    }
    dataset, given = as_dataset(data), _with_short(_flat(config), short)
    if optimizer is not None:
        _check_no_other_optimizer(given)
    folder = None if workdir is None else as_path(str(workdir))
    task = Task(
        dataset,
        model,
        loss_fn,
        optimizer=optimizer,
        options=options or {},
        hooks=tuple(hooks),
        init_from=init_from,
        missing=missing,
    )
    with contextlib.ExitStack() as stack:
        if cluster is None:
            cluster = _connect(_fill(given), folder)
            if threading.current_thread() is threading.main_thread():
                stack.enter_context(cluster.stop_on_sigterm())
            stack.enter_context(cluster)
        stack.enter_context(cluster.one_run())
        console = make_console(process=cluster.process_id)
        with ending_all(cluster):
            for split in map(functools.partial(getattr, dataset), SPLITS):
                if isinstance(split, ExampleSplit | BatchStream) and split.reading:
                    print_line(console, split.reading)
            if isinstance(dataset.train, BatchStream) and "data.batch_size" not in given:
                given["data.batch_size"] = _rows(dataset.train)
                words = f"the batch size is {given['data.batch_size']}"
                print_line(console, f"{words}, because the first batch has so many examples")
            filled = _fill(given)
            earlier = None if folder is None else read_earlier(folder / FOLDER)
            experiment = prepare(filled, task=task, tracing=show_tracing(console), earlier=earlier)
            if cluster.num_processes > 1:
                cluster.agree(experiment_facts(experiment))
            check_fits(experiment)
            for change in check_folder(filled, folder):
                print_line(console, change)
            folder = choose_workdir(folder, name="fit")
            result = run(experiment, folder, cluster=cluster, console=console)
            cluster.nothing_to_lose()
    return Fit(experiment.program, result.state, result.metrics, folder)


def _describe_misspelt(name: str) -> str:
    """Describes an argument that `fit` does not have, with the nearest argument or field."""
    arguments = [x for x in inspect.signature(fit).parameters if x != "misspelt"]
    mends = {field: f"config={{{field!r}: ...}}" for field in fields_of(_fill({}))}
    mends |= {field: f"{short}=" for short, field in FIELD_OF.items()}
    mends |= {argument: f"{argument}=" for argument in arguments}
    return f"fit has no argument {name!r}{suggest(name, mends, show=mends.__getitem__)}."


def _with_short(given: dict[str, Any], short: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the fields of short arguments; refuses one that contradicts the config."""
    for name, value in short.items():
        field = FIELD_OF[name]
        if value is None:
            continue
        if field in given and given[field] != value:
            raise ValueError(
                f"fit: {name} is {value!r} and config[{field!r}] is {given[field]!r}, expected one "
                "of the two; leave the other out."
            )
        given[field] = value
    return given


def _flat(config: Fields | Mapping[str, Any] | ml_collections.ConfigDict | None) -> dict[str, Any]:
    """Returns the given fields by dotted name."""
    if config is None:
        return {}
    if not isinstance(config, Mapping | ml_collections.ConfigDict):
        raise TypeError(
            f"config is a {type(config).__name__}, expected a dict of fields such as "
            "{'training.num_steps': 100}, or a ConfigDict."
        )
    return flatten_config(config)


def _fill(given: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """Returns a complete config of the given fields and those of `configs/own.py`."""
    config = complete_config(named_config(OWN)).unlock()
    known = fields_of(config)
    for name, value in given.items():
        group, _, field = name.partition(".")
        if name == "parallel.mesh" or name in known:
            value = ml_collections.ConfigDict(value) if isinstance(value, Mapping) else value
        elif group not in ("model", "data", "parallel") or not field:
            near = suggest(FIELD_OF.get(name, name), known, otherwise=ALL_FIELDS)
            raise ValueError(f"config has {name!r}, which is not a known field{near}.")
        (config[group] if field else config)[field or group] = value
    return complete_config(config)


def _check_no_other_optimizer(given: Mapping[str, Any]) -> None:
    """Refuses fields of an optimizer beside a user's optimizer, but for their defaults."""
    defaults = flatten_config(_fill({}))
    for name, value in given.items():
        is_of_optimizer = name.startswith(("optimizer.", "schedule."))
        if is_of_optimizer and name not in OF_ANY_OPTIMIZER and value != defaults.get(name):
            raise ValueError(
                f"config has {name!r} and an optimizer is given, expected one of the two; leave "
                "the field out, or leave out the optimizer and let the config describe it."
            )


def _rows(stream: BatchStream) -> int:
    """Returns the number of examples in a stream's batches."""
    if jax.process_count() > 1:
        raise ValueError(
            "config has no 'data.batch_size', expected the number of examples that all processes "
            "read together in a step."
        )
    return next(len(x) for x in jax.tree.leaves(stream.first) if x.ndim)


def _connect(config: ml_collections.ConfigDict, workdir: AnyPath | None) -> Cluster:
    """Connects this process with the other processes of the environment, if there are any."""
    mend = (
        "call manualpar.system.cluster.initialize() before anything uses a device, and give its "
        "result to fit(cluster=...)."
    )
    # Another thread may be training with these processes, and must not notice this call.
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        raise ValueError(f"fit: JAX has {jax.process_count()} processes already; {mend}")
    try:
        cluster = initialize(
            timeout_seconds=config.watch.lost_seconds,
            facts=run_facts(config, workdir),
            workdir=workdir or RUNS,
        )
    except RuntimeError as error:
        raise ValueError(f"fit: processes cannot be connected now ({error}); {mend}") from error
    if jax.process_count() != cluster.num_processes:
        raise ValueError(f"fit: JAX has {jax.process_count()} processes already; {mend}")
    return cluster
