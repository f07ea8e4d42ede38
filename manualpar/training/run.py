"""Runs an experiment in a folder, from the beginning or from the latest checkpoint there."""

import contextlib
import functools
import importlib.metadata
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import ml_collections
import rich.console

from manualpar.core.mesh.axes import axes_size, axis_tuple
from manualpar.core.mesh.mesh import describe_links, describe_mesh
from manualpar.core.program.program import Program
from manualpar.core.state.train_state import TrainState
from manualpar.data.dataset import SPLITS
from manualpar.errors import UsageError
from manualpar.inspect import draw_sharding, layout_table, state_bytes
from manualpar.inspect.step_ledger import describe_codes
from manualpar.inspect.tables import describe_bytes, print_line
from manualpar.inspect.throughput import Throughput, lowest_peak, memory_in_use
from manualpar.parameter_average import ema_params
from manualpar.system.cluster import Cluster
from manualpar.system.cluster.agreement import first_failure
from manualpar.system.storage import AnyPath, BucketError, mirrored
from manualpar.system.storage.durable_files import WriteError
from manualpar.training.checkpoints import Checkpoints, Restored
from manualpar.training.checkpoints.saved_state import unpad_whole
from manualpar.training.config import complete_config, flatten_config, is_own
from manualpar.training.division import combines_examples, describe_change
from manualpar.training.exit_codes import ending_all
from manualpar.training.experiment import Experiment
from manualpar.training.hooks import Hooks
from manualpar.training.imported_model import initial_state
from manualpar.training.monitoring.profiling import StepProfiler, parse_profile
from manualpar.training.monitoring.progress import TrainingProgress
from manualpar.training.monitoring.report import write_report
from manualpar.training.monitoring.run_files import METRICS_FILE, PLACED_FILES, RunWriter
from manualpar.training.monitoring.run_record import (
    COMPILING,
    RESTORING,
    TIMES_FILE,
    TimeLedger,
)
from manualpar.training.monitoring.stalls import StallDetector
from manualpar.training.monitoring.trackers import start_trackers
from manualpar.training.optimizer import describe_jump
from manualpar.training.recorder import Recorder
from manualpar.training.trainer import Trainer
from manualpar.training.workdir import (
    FOLDER,
    START,
    check_folder,
    lock_workdir,
    open_checkpoints,
    position_of,
    restore,
)

# Files in a workdir whose paths begin with these strings are not copied to a bucket as results.
NO_RESULTS = (f"{FOLDER}/", ".lock", "profile/", "wandb/")


class Result(NamedTuple):
    """The result of a run.

    Attributes:
      state: The state after the last step.
      metrics: The latest report of each split, such as `metrics["test"]["loss"]`.
      sample: A text that the trained model generated; "" if the config asks for none.
    """

    state: TrainState
    metrics: dict[str, dict[str, float]]
    sample: str = ""


class ResultsTarget(NamedTuple):
    """The folder of a run, the local folder for its files, and a function that uploads the files.

    If `workdir` is not in a bucket, `folder` is `workdir`, and `publish` uploads nothing.
    """

    workdir: AnyPath
    folder: Path
    publish: Callable[[], None]


def run(
    experiment: Experiment,
    workdir: AnyPath,
    *,
    cluster: Cluster,
    console: rich.console.Console,
    times: TimeLedger | None = None,
) -> Result:
    """Trains and tests an experiment, and shows the mesh, the layout and the progress.

    If the folder contains checkpoints, the run resumes from the latest checkpoint. `times` began
    with the process; by default it begins now.

    Raises:
      CheckpointError: A checkpoint cannot be read or written.
      UsageError: The folder contains a run with another config, or another run is using the folder.
      WriteError: The folder cannot be written to.
      StoppedError, KeyboardInterrupt, NonFiniteError, ReplicaError: See `Trainer.train`.
    """
    times = times or TimeLedger()
    with contextlib.ExitStack() as stack:
        failure, check = "", _no_lock
        if cluster.is_main:
            try:
                say = functools.partial(print_line, console)
                check = stack.enter_context(lock_workdir(workdir, report=say))
                # Another run may have used the folder since the command line was checked.
                check_folder(experiment.config, workdir)
            # These two errors are also ValueErrors, but not mistakes on the command line.
            except (WriteError, BucketError):
                raise
            except (UsageError, ValueError) as error:
                failure = str(error)
        if failure := first_failure(failure):
            raise UsageError(failure)
        results = mirrored(workdir, left_out=NO_RESULTS, check=check, is_main=cluster.is_main)
        folder, publish = stack.enter_context(results)
        _describe(experiment, cluster=cluster, console=console)
        checkpoints = stack.enter_context(open_checkpoints(experiment.config, workdir))
        stack.enter_context(ending_all(cluster))
        if experiment.config.checkpoint.every_steps:
            checkpoints.check_shared()
        try:
            target = ResultsTarget(workdir, folder, publish)
            return _run(experiment, target, checkpoints, times, cluster=cluster, console=console)
        except jax.errors.JaxRuntimeError as error:
            if options := experiment.chosen.options:
                error.add_note(
                    f"The compiler was given {', '.join(options)}. If it fails because of those, "
                    "--config.parallel.overlap=none leaves them out."
                )
            raise


def _run(
    experiment: Experiment,
    target: ResultsTarget,
    checkpoints: Checkpoints,
    times: TimeLedger,
    *,
    cluster: Cluster,
    console: rich.console.Console,
) -> Result:
    """Restores the latest checkpoint if there is one, trains, tests, and generates a sample."""
    config, program, task = experiment.config, experiment.program, experiment.task
    say = functools.partial(print_line, console)
    workdir, folder, publish = target
    restored: Restored | None = None
    if checkpoints.latest_step() is not None:
        with times.during(RESTORING):
            restored = restore(checkpoints, experiment, workdir, report=say)
            times.set_step(restored.step)
        say(f"going on from the checkpoint of step {restored.step} in {workdir}")
        if experiment.schedule and "config" in restored.extra:
            before = complete_config(ml_collections.ConfigDict(restored.extra["config"]))
            if jump := describe_jump(before, config, restored.step):
                say(jump)
        for sentence in describe_change(
            restored.extra.get("division"),
            experiment.division,
            batch_size=config.data.batch_size,
            draws=_draws(config),
            combines=functools.partial(combines_examples, program),
        ):
            say(sentence)
    position = position_of(restored) if restored else START
    if restored:
        state = restored.state
    else:
        state = initial_state(
            config, program, init_from=task.init_from, missing_given=task.missing, report=say
        )
    with contextlib.ExitStack() as stack:
        trackers, failure = [], ""
        try:
            if cluster.is_main:
                trackers = start_trackers(flatten_config(config), folder, say=say)
        except UsageError as error:
            failure = str(error)
        if failure := first_failure(failure):
            raise UsageError(failure)
        hooks = Hooks([*task.hooks, *trackers])
        stack.push(lambda _, error, __: hooks.call("on_end", error))
        place = restored.extra["files"] if restored else None
        if place is None and (folder / METRICS_FILE).exists():
            # An earlier run ended before its first checkpoint. This run starts over.
            place = dict.fromkeys(PLACED_FILES, 0)
        writer = RunWriter(
            folder,
            config=config.to_dict(),
            place=place,
            step=position.step,
            report=say,
            process=cluster.process_id,
            publish=publish,
        )
        stack.enter_context(writer)
        times.write_to(folder / TIMES_FILE if cluster.is_main else None)
        stack.push(lambda _, error, __: _write_times(times.close, error))
        if cluster.is_main:
            stack.push(lambda _, error, __: _write_report(experiment, target, say, error))
            flush = functools.partial(times.flush, always=True)
            stack.push(lambda _, error, __: _write_times(flush, error))
        progress = TrainingProgress(
            console,
            num_steps=config.training.num_steps,
            first_step=position.step,
            state_bytes=state_bytes(program.abstract_state)[0],
            while_compiling=functools.partial(times.during, COMPILING),
        )
        recorder = Recorder(
            writer,
            stack.enter_context(progress),
            learning_rate=experiment.schedule,
            rates=_rates(experiment),
            derive=task.derive,
            skips_nonfinite=config.training.on_nonfinite == "skip",
            on_report=hooks.on_report,
        )
        if restored:
            recorder.resume(restored.extra["recorder"])
            hooks.restore(restored.extra.get("hooks", []))
        detector = StallDetector(
            config.watch.stall_seconds,
            others=cluster.steps,
            num_processes=cluster.num_processes,
            on_over=times.stalled,
        )
        # Only process 0 profiles, because several processes of a host would write to one file.
        profiled = parse_profile(config.profile) if cluster.is_main else range(0)
        profiler = StepProfiler(profiled, folder / "profile", say)
        restored = None  # Drops a reference to the state, because the first step donates it.
        trainer = Trainer(
            experiment,
            checkpoints,
            recorder,
            writer,
            cluster,
            detector,
            profiler,
            report=say,
            hooks=hooks,
            times=times,
        )
        state = trainer.train(state, position)
        sample = ""
        if task.sample:
            shown = ema_params(state) if config.optimizer.ema_decay else state
            sample = task.sample(_without_padding(program, shown), jax.random.key(config.seed))
    metrics = {split: recorder.latest(split) for split in SPLITS if recorder.latest(split)}
    return Result(state, metrics, sample)


def _draws(config: ml_collections.ConfigDict) -> bool:
    """Returns whether the loss may draw random numbers; not known of models of the user's own."""
    values = flatten_config(config)
    return is_own(config.model.name) or any("dropout" in x and values[x] for x in values)


def _write_times(write: Callable[[], None], error: BaseException | None) -> None:
    """Writes the last times of a run that has ended, perhaps with an error."""
    try:
        write()
    except WriteError as failure:
        if error is None:
            raise
        error.add_note(str(failure))  # The user must see the first error.


def _no_lock() -> None:
    """Does nothing; a process that does not hold the lock calls this instead of checking it."""


def _describe(experiment: Experiment, *, cluster: Cluster, console: rich.console.Console) -> None:
    """Prints the mesh, the compiler options, the layout, and the coverage of the replica check."""
    debug, program = experiment.config.debug, experiment.program
    mesh = program.mesh
    print_line(console, f"mesh: {_describe_mesh(mesh)}")
    if chosen := str(experiment.chosen):
        print_line(console, f"compiler options: {chosen}")
    if choice := program.layer_choice:
        print_line(console, f"layers: {choice}")
    for name in SPLITS:
        split = getattr(experiment.task.dataset, name)
        if count := getattr(split, "unlearned", 0):
            words = f"{name}: {count} examples are left out, because nothing of them is learned"
            print_line(console, f"{words} when they are cut to {split.sequence_length} tokens")
    console.print(layout_table(program), soft_wrap=True)
    for axis in _unused_axes(program):
        words = f"nothing is divided over the mesh axis {axis!r}"
        print_line(console, f"{words}, so its devices do the same work")
    if debug.draw_sharding and cluster.is_main:
        draw_sharding(program.abstract_state.params, debug.draw_sharding)
    if every := debug.check_replicas_every:
        specs = jax.tree.leaves(program.layout)
        parts = [math.prod(axes_size(mesh, axis_tuple(entry)) for entry in spec) for spec in specs]
        copied = sum(number < mesh.size for number in parts)
        steps = "every step" if every == 1 else f"every {every} steps"
        words = f"{steps}, {copied} of {len(specs)} arrays have copies to compare"
        if not copied:
            words = "nothing to compare, each part of the state is on one device only"
        print_line(console, f"replica check: {words}")


def _unused_axes(program: Program) -> list[str]:
    """Returns the axes of several devices over which neither batches nor parameters are divided."""
    specs = [program.batch_sharding.spec, *jax.tree.leaves(program.layout)]
    used = {axis for spec in specs for entry in spec for axis in axis_tuple(entry)}
    used |= set(program.data_axes)
    return [axis for axis, size in program.mesh.shape.items() if size > 1 and axis not in used]


def _describe_mesh(mesh: jax.sharding.Mesh) -> str:
    links = describe_links(mesh)
    return f"{describe_mesh(mesh)}{links and f' ({links})'}"


def _without_padding(program: Program, state: TrainState) -> TrainState:
    """Returns the state without the padding of its parameters."""

    def take_off(x: jax.Array, model_array: jax.ShapeDtypeStruct) -> jax.Array:
        padding = tuple(a - b for a, b in zip(x.shape, model_array.shape, strict=True))
        return unpad_whole(x, padding, program.mesh) if any(padding) else x

    return state.replace(params=jax.tree.map(take_off, state.params, program.unpadded_state.params))


def _write_report(
    experiment: Experiment,
    target: ResultsTarget,
    say: Callable[[str], None],
    error: BaseException | None,
) -> None:
    """Writes the report of a run, whether it finished or failed.

    The run ends as it would without a report: if the report cannot be written, a line says so.
    """
    try:
        facts = _facts(experiment, error)
        write_report(target.folder, title=str(target.workdir), facts=facts, report=say)
    except Exception as failure:  # Matplotlib and the libraries that it uses raise any error.
        reason = " ".join(str(failure).split()) or type(failure).__name__
        sentence = f"{target.folder} has no new report: {reason}"
        if error is None:
            say(sentence)
        else:
            error.add_note(sentence)  # The user must see the first error.


def _facts(experiment: Experiment, error: BaseException | None) -> dict[str, str]:
    """Returns the facts about a run that its report shows in a table."""
    program = experiment.program
    return {
        "ended": "finished" if error is None else f"{type(error).__name__}: {error}",
        "strategy": f"{program.strategy.name}, mode {program.mode}",
        "mesh": _describe_mesh(program.mesh),
        "compiler options": experiment.chosen.describe(),
        **({"layers": str(choice)} if (choice := program.layer_choice) else {}),
        "parameters": f"{sum(math.prod(info.shape) for info, _ in program.parameters):,}",
        "state on the fullest device": describe_bytes(state_bytes(program.abstract_state)[0]),
        **({"dtypes sent": codes} if (codes := describe_codes(program.comm)) else {}),
        "manualpar": importlib.metadata.version("manualpar"),
        "jax": jax.__version__,
    }


def _rates(experiment: Experiment) -> Callable[[int, float], dict[str, float]]:
    """Makes a function from (steps, seconds) to the rates to report, such as tokens per second."""
    task, devices = experiment.task, experiment.program.mesh.devices
    throughput = Throughput(
        examples_per_step=experiment.config.data.batch_size,
        tokens_per_example=task.tokens_per_example or None,
        flops_per_example=task.flops_per_example,
        num_devices=devices.size,
        peak=lowest_peak(devices.flat, experiment.config.model.get("dtype", "float32")),
    )

    def rates(steps: int, seconds: float) -> dict[str, float]:
        memory = memory_in_use(devices.flat)
        used = {} if memory is None else {"memory_bytes": float(memory)}
        return throughput.rates(steps, seconds) | used

    return rates
