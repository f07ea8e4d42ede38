"""Builds the program that a config describes."""

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import optax
from jax.sharding import AbstractMesh, Mesh

from manualpar.core.mesh.axes import axes_size
from manualpar.core.mesh.compiler_options import (
    SEQUENCE,
    ChosenOptions,
    choose_options,
    keep_if_known,
)
from manualpar.core.mesh.mesh import AnyDevices, count_hosts, mesh_of
from manualpar.core.model.apply_fn import CarryingApply
from manualpar.core.model.interface import interface_of
from manualpar.core.model.options import PROGRAM_OPTIONS
from manualpar.core.model.trace_model import init_variables
from manualpar.core.parameters.placement import combine, is_trained, strip_boxes
from manualpar.core.program.program import Program
from manualpar.core.summary import as_text, describe_fields
from manualpar.core.trees import path_name
from manualpar.data import abstract_batch
from manualpar.errors import suggest
from manualpar.inspect.flops import ProductReader
from manualpar.inspect.scope_parsing import phase_of
from manualpar.inspect.state_layout import ALL
from manualpar.layers.pipeline import Pipeline
from manualpar.models import Transformer, qk_clip
from manualpar.models.transformer import check_transformer, size_of_vocabulary
from manualpar.parameter_average import params_ema
from manualpar.strategies import StrategyKind, strategy_kinds
from manualpar.strategies.registry import fields_of_manual_mode, values_of_options
from manualpar.training.config import check_config, complete_config, flatten_config, is_own
from manualpar.training.division import (
    Division,
    EarlierDivision,
    combines_examples,
    divide_batch,
)
from manualpar.training.imported_model import fill_from_hf
from manualpar.training.monitoring.profiling import parse_profile
from manualpar.training.optimizer import check_decay_mask, make_optimizer, make_schedule
from manualpar.training.task import (
    CONTEXT_AXIS,
    EXPERT_AXIS,
    SPLIT_AXIS,
    STAGE_AXIS,
    Task,
    fine_tuned,
    make_task,
    splits_layers,
)

# `config.training.on_nonfinite` -> the program's option `nonfinite`. If the program reports a
# non-finite loss or gradient, the training loop stops or rolls back.
NONFINITE = {"ignore": "ignore", "stop": "report", "skip": "skip", "rollback": "report"}
# The axes that split the batch, if the mesh has them. `replica` comes first; some strategies
# replicate parameters over it. `data` and `data_minor` together are the data axis, in two parts for
# collectives that run axis by axis. Devices along `expert` have different examples, and send their
# tokens to the experts.
DATA_AXES = ("replica", "data", "data_minor", EXPERT_AXIS)


class Experiment(NamedTuple):
    """Everything that a run needs; nothing is compiled yet.

    `division` says how the batch is divided, and `chosen` holds the program's compiler options and
    the reason for them.
    """

    config: ml_collections.ConfigDict
    task: Task
    schedule: optax.Schedule | None
    program: Program
    division: Division
    chosen: ChosenOptions = ChosenOptions()

    def __repr__(self) -> str:
        return as_text("Experiment", describe_fields(self))


def prepare(
    config: ml_collections.ConfigDict,
    *,
    devices: AnyDevices = None,
    task: Task | None = None,
    tracing: contextlib.AbstractContextManager[object] | None = None,
    earlier: EarlierDivision | None = None,
) -> Experiment:
    """Checks a config, and builds the task and the program that it describes.

    See `manualpar.training.config` and `configs/` for the fields.

    Args:
      config: The config.
      devices: The devices to train on; by default all of `jax.devices()`. For abstract devices, or
        for a number of devices, the program is traced and cannot run.
      task: The model, loss and data; by default `make_task(config)`.
      tracing: A context in which the program is traced, for example to show that this takes long.
      earlier: The division of the batch in the checkpoint that the run goes on from.

    Raises:
      ValueError: A field is not allowed, or contradicts another field or the devices. The message
        names the fields.
    """
    config = fill_from_hf(config)
    check_config(config)
    config = complete_config(config)
    parse_profile(config.profile)
    task = task or make_task(config)
    schedule = None if task.optimizer else make_schedule(config)
    program, chosen, division = _build(config, task, schedule, devices, tracing, earlier)
    if not isinstance(program, Program):
        raise TypeError(
            f"the builder of config.parallel.strategy={config.parallel.strategy!r} returned "
            f"{program!r}, expected a Program; return what build_sharded returns."
        )
    every = 1 if program.outer is None else program.outer.every
    if config.training.num_steps % every:
        raise ValueError(
            f"config.training.num_steps is {config.training.num_steps} and config.parallel.every "
            f"is {every}, expected a number of steps that is a multiple of {every}, because the "
            "steps after the last outer step would be lost."
        )
    paths = [info.path for info, _ in program.parameters]
    check_decay_mask(config.optimizer.decay_mask, paths)
    wanted = config.debug.draw_sharding
    if wanted not in ("", ALL, *paths):
        raise ValueError(
            f"config.debug.draw_sharding is {wanted!r}, expected the path of a parameter, {ALL!r} "
            f"or '' for none{suggest(wanted, paths)}."
        )
    _check_best_metric(config, task, program)
    flops = flops_of_example(task, fine_tuned(task.model, config.model), program)
    task = dataclasses.replace(task, flops_per_example=flops)
    return Experiment(config, task, schedule, program, division, chosen)


def _check_best_metric(config: ml_collections.ConfigDict, task: Task, program: Program) -> None:
    """Refuses a `config.checkpoint.best_metric` that evaluations do not report."""
    wanted = config.checkpoint.best_metric
    if not wanted:
        return
    if not config.training.eval_every_steps:
        raise ValueError(
            f"config.checkpoint.best_metric is {wanted!r} and config.training.eval_every_steps is "
            "0, expected at least 1, because evaluations report this metric; or set best_metric=''."
        )
    metrics = jax.eval_shape(program.eval_step, program.abstract_state, program.abstract_batch)
    known = task.derive("eval", dict.fromkeys(metrics, 0.0))
    if wanted not in known:
        raise ValueError(
            f"config.checkpoint.best_metric is {wanted!r}, expected one of "
            f"{', '.join(map(repr, known))} or '' for none{suggest(wanted, known)}."
        )


def build_experiment(
    config: ml_collections.ConfigDict,
    task: Task,
    schedule: optax.Schedule | None,
    *,
    devices: AnyDevices = None,
) -> Program:
    """Traces the program that `config` describes, for batches of the task's data.

    Ignores options that the strategy does not have, such as `pad` for `dp`. If the mesh has several
    of `DATA_AXES`, the strategy shards over all of them as if they were one axis. A strategy that
    replicates over `replica` does not shard over that axis.
    """
    return _build(config, task, schedule, devices)[0]


def _build(
    config: ml_collections.ConfigDict,
    task: Task,
    schedule: optax.Schedule | None,
    devices: AnyDevices,
    tracing: contextlib.AbstractContextManager[object] | None = None,
    earlier: EarlierDivision | None = None,
) -> tuple[Program, ChosenOptions, Division]:
    """Builds the program, and returns it with its compiler options and its batch's division."""
    optimizer, parallel = config.optimizer, config.parallel
    own = is_own(config.model.name)
    axes = _mesh_axes(parallel, is_split=own or isinstance(task.model, Transformer))
    mesh = mesh_of(axes, devices, order=parallel.mesh_order)
    kind = strategy_kinds()[parallel.strategy]
    if kind.replicates and "replica" not in mesh.shape:
        raise ValueError(
            f"config.parallel.strategy is {kind.name!r} and config.parallel.mesh has the axes "
            f"{list(mesh.shape)}, expected 'replica' too; "
            """set --config.parallel.mesh="{'replica': 2, 'data': -1}"."""
        )
    values = flatten_config(config)
    if parallel.mode != "manual":
        _check_left_to_xla(values)
    _check_split(config, task, mesh)
    if EXPERT_AXIS in mesh.shape and not own and not config.model.get("num_experts"):
        raise ValueError(
            f"config.parallel.mesh has the axes {list(mesh.shape)} and the model has no experts to "
            f"divide over {EXPERT_AXIS!r}, expected config.model.num_experts, or other axes; set "
            """--config.parallel.mesh="{'data': -1}"."""
        )
    if not own:
        _check_stages_and_context(config, task, mesh)
    elif STAGE_AXIS in mesh.shape and "pipeline" not in task.options:
        raise ValueError(
            f"config.parallel.mesh has the axis {STAGE_AXIS!r}, expected the option 'pipeline' "
            "too, such as options={'pipeline': manualpar.Pipeline()}; or leave out the axis."
        )
    data_axes = tuple(axis for axis in DATA_AXES if axis in mesh.shape)
    divide = functools.partial(divide_batch, config, data_axes, axes_size(mesh, data_axes))
    division = divide(earlier)
    values["optimizer.num_minibatches"] = division.minibatches
    if optimizer.qk_clip and not kind.is_exact:
        raise ValueError(
            f"config.optimizer.qk_clip is {optimizer.qk_clip} and config.parallel.strategy is "
            f"{kind.name!r}, expected 0.0, because each replica would clip by its own scores."
        )
    if optimizer.ema_decay and not kind.is_exact:
        raise ValueError(
            f"config.optimizer.ema_decay is {optimizer.ema_decay} and config.parallel.strategy is "
            f"{kind.name!r}, expected 0.0, because each replica would average its own parameters."
        )

    def tx(parameters: Any) -> optax.GradientTransformation:
        if schedule:
            made = make_optimizer(config, schedule, parameters)
        else:
            assert task.optimizer is not None, "a task without an optimizer has a schedule"
            made = task.optimizer(parameters) if callable(task.optimizer) else task.optimizer
        more = [qk_clip(optimizer.qk_clip)] if optimizer.qk_clip else []
        more += [params_ema(optimizer.ema_decay)] if optimizer.ema_decay else []
        return optax.chain(made, *more) if more else made

    axis_name = tuple(axis for axis in data_axes if axis != "replica" or not kind.replicates)
    half_bytes = _bytes_of_half(config, task, mesh, division)
    chosen = _choose_options(parallel, mesh, axis_name, half_bytes=half_bytes)
    shared: dict[str, Any] = {
        "mesh": mesh,
        "batch": abstract_batch(task.dataset.train, config.data.batch_size),
        **values_of_options(PROGRAM_OPTIONS, values),
        "compiler_options": chosen.options,
        "nonfinite": NONFINITE[config.training.on_nonfinite],
    }
    if CONTEXT_AXIS in mesh.shape:
        shared["context_axis"] = CONTEXT_AXIS
    if STAGE_AXIS in mesh.shape and not own:
        shared["pipeline"] = Pipeline(
            axis=STAGE_AXIS,
            schedule=parallel.pipeline,
            chunks=parallel.pipeline_chunks,
            keep=parallel.pipeline_keep,
        )
    if set(axis_name) - {"data"}:
        shared["axis_name"] = axis_name if len(axis_name) > 1 else axis_name[0]
    shared |= _options_of(task, kind, decided=shared)
    strategy_fields = {name: parallel[name] for name in kind.fields if name in parallel}
    model = fine_tuned(task.model, config.model)
    if optimizer.qk_clip:
        model = _noting_scores(model, config)

    def build() -> Program:
        options = {**shared, **strategy_fields, **kind.constants}
        program: Program = kind.builder(model, tx, task.loss_fn, **options)
        return program

    with (
        _optimizer_named(config),
        tracing or contextlib.nullcontext(),
        warnings.catch_warnings(),
    ):
        # The table at the beginning of a run says of each parameter whether it is sharded.
        warnings.filterwarnings("ignore", message=r"\w+: 0 of .* parameters are sharded")
        program = build()
        if division.minibatches > optimizer.num_minibatches and combines_examples(program):
            division = divide(None)._replace(at_once=division.at_once)
            shared["num_minibatches"] = division.minibatches
            program = build()
    return program, chosen, division


def _noting_scores(model: Any, config: ml_collections.ConfigDict) -> Transformer:
    """Returns a model that notes its largest attention scores, for QK-clip; refuses others."""
    where = f"config.optimizer.qk_clip is {config.optimizer.qk_clip}"
    if not isinstance(model, Transformer):
        raise ValueError(
            f"{where} and the model is {type(model).__name__}, expected 0.0, because only a "
            "Transformer whose own kernels are trained notes its attention scores; set "
            "--config.optimizer.qk_clip=0."
        )
    if STAGE_AXIS in config.parallel.mesh:
        raise ValueError(
            f"{where} and config.parallel.mesh has the axis {STAGE_AXIS!r}, expected 0.0, because "
            "a stage of a pipeline has only some layers' scores; set --config.optimizer.qk_clip=0."
        )
    model = dataclasses.replace(
        model, attention=dataclasses.replace(model.attention, notes_largest=True)
    )
    try:
        check_transformer(model)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return model


def _options_of(task: Task, kind: StrategyKind, *, decided: Collection[str]) -> Mapping[str, Any]:
    """Returns a task's options for the builder; refuses those that the config decides."""
    fields = {name: option.field for name, option in PROGRAM_OPTIONS.items() if option.field}
    fields |= {name: f"parallel.{name}" for name in kind.fields}
    if task.options.get("other_models"):
        raise ValueError(
            "Task.options has 'other_models', expected none, because a run trains one model. Write "
            "a loop that takes a step of each program in turn."
        )
    for name in task.options:
        if name in fields or name in decided:
            mend = f"set config.{fields[name]}" if name in fields else "leave it out"
            raise ValueError(f"Task.options has {name!r}, which the config decides; {mend}.")
    return task.options


@contextlib.contextmanager
def _optimizer_named(config: ml_collections.ConfigDict) -> Iterator[None]:
    """Names the config's field if a builder refuses the optimizer."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not str(error).startswith("tx: "):
            raise
        raise ValueError(
            f"config.optimizer.name is {config.optimizer.name!r}: "
            f"{str(error).removeprefix('tx: ')} In a config, choose another optimizer."
        ) from error


def _check_left_to_xla(values: Mapping[str, Any]) -> None:
    """Refuses options of communication in a mode in which XLA chooses the communication."""
    choices = {x.field: x.xla_chooses for x in PROGRAM_OPTIONS.values() if x.xla_chooses}
    choices["parallel.sequence"] = "how activations are sharded"
    choices["parallel.layer_overlap"] = "when activations are sent"
    of_layers = {"parallel.sequence": False, "parallel.layer_overlap": "none"}
    for field, default in (fields_of_manual_mode() | of_layers).items():
        if (value := values.get(field)) and value != default:
            raise ValueError(
                f"config.{field} is {value!r} and config.parallel.mode is "
                f"{values['parallel.mode']!r}, expected {default!r} or mode 'manual', because in "
                f"other modes XLA chooses {choices[field]}."
            )


def _bytes_of_half(
    config: ml_collections.ConfigDict, task: Task, mesh: Mesh | AbstractMesh, division: Division
) -> int:
    """Returns the bytes of a half of a device's batch between layers; 0 without halves."""
    if config.parallel.get("layer_overlap") != "dual_batch" or not splits_layers(config):
        return 0
    batch_size = config.data.batch_size
    examples = batch_size // (division.devices * division.minibatches)
    if examples % 2:
        raise ValueError(
            f"config.parallel.layer_overlap is 'dual_batch', and config.data.batch_size="
            f"{batch_size} gives a device {examples} sequence{'s' * (examples > 1)} of a minibatch "
            f"({division.devices} devices with different sequences, {division.minibatches} "
            f"minibatch{'es' * (division.minibatches > 1)}), expected an even number, because it "
            f"divides them into two halves; set --config.data.batch_size={2 * batch_size}, use "
            "fewer minibatches, or --config.parallel.layer_overlap=none."
        )
    model: Any = task.model
    parts = mesh.shape.get(CONTEXT_AXIS, 1)
    parts *= mesh.shape[SPLIT_AXIS] if config.parallel.sequence else 1
    positions = config.data.sequence_length // parts
    return examples // 2 * positions * model.hidden_size * jnp.dtype(model.dtype).itemsize


def _choose_options(
    parallel: ml_collections.ConfigDict,
    mesh: Mesh | AbstractMesh,
    axes: Sequence[str],
    *,
    half_bytes: int,
) -> ChosenOptions:
    """Chooses the compiler options for a program that reduce-scatters gradients over `axes`."""
    if isinstance(mesh, AbstractMesh):
        return ChosenOptions()
    sizes = [mesh.shape[axis] for axis in axes]
    rings = sizes if parallel.axis_by_axis else [math.prod(sizes)]
    others = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in axes]
    if parallel.get("sequence") and SPLIT_AXIS in others:
        others.append(SEQUENCE)
    device = next(iter(mesh.local_devices), mesh.devices.flat[0])
    averages = strategy_kinds()[parallel.strategy].averages and count_hosts(mesh) > 1
    chosen = choose_options(
        device.device_kind,
        rings,
        others,
        overlap=parallel.overlap,
        averages=averages,
        half_bytes=half_bytes,
    )
    return keep_if_known(chosen, device)


def _check_split(config: ml_collections.ConfigDict, task: Task, mesh: Mesh | AbstractMesh) -> None:
    """Refuses a config whose layers cannot be split over the mesh."""
    if not isinstance(task.model, Transformer):
        return
    if config.parallel.sequence and not splits_layers(config):
        rules = (
            f" and config.parallel.rules={config.parallel.rules}" if config.parallel.rules else ""
        )
        raise ValueError(
            f"config.parallel.sequence is True and config.parallel.mesh has the axes "
            f"{list(mesh.shape)}{rules}, expected the axis {SPLIT_AXIS!r} and no rules, because "
            "positions are split over the axis that layers are split over; set "
            """--config.parallel.mesh="{'data': -1, 'model': 2}", or sequence=False."""
        )
    overlap = config.parallel.layer_overlap
    if overlap == "ring" and not config.parallel.sequence:
        raise ValueError(
            "config.parallel.layer_overlap is 'ring' and config.parallel.sequence is False, "
            "expected 'none', 'dual_batch' or sequence=True, because only the collectives of "
            "sequence parallelism can go around a ring."
        )
    if overlap == "dual_batch" and not splits_layers(config):
        raise ValueError(
            f"config.parallel.layer_overlap is 'dual_batch' and config.parallel.mesh has the axes "
            f"{list(mesh.shape)}, expected 'none' or layers that are split over {SPLIT_AXIS!r}, "
            "because it hides the collectives of split layers."
        )
    if not splits_layers(config):
        return
    devices, vocabulary = mesh.shape[SPLIT_AXIS], size_of_vocabulary(task.model)
    if vocabulary % devices:
        raise ValueError(
            f"config.model.vocab_multiple is {config.model.vocab_multiple}, which makes a "
            f"vocabulary of {vocabulary}, expected a vocabulary that divides over the {devices} "
            f"devices along {SPLIT_AXIS!r}; set --config.model.vocab_multiple={devices}."
        )
    if config.parallel.sequence and config.data.sequence_length % devices:
        raise ValueError(
            f"config.data.sequence_length is {config.data.sequence_length}, expected a multiple of "
            f"the {devices} devices along {SPLIT_AXIS!r}, or config.parallel.sequence=False."
        )


def _check_stages_and_context(
    config: ml_collections.ConfigDict, task: Task, mesh: Mesh | AbstractMesh
) -> None:
    """Refuses a config whose layers do not divide over `stage`, or sequences over `context`."""
    for axis, missing in ((STAGE_AXIS, "layers in a scan"), (CONTEXT_AXIS, "sequences")):
        if axis in mesh.shape and not isinstance(task.model, Transformer):
            raise ValueError(
                f"config.parallel.mesh has the axes {list(mesh.shape)}, and config.model.name="
                f"{config.model.name!r} has no {missing} to spread over {axis!r}; expected "
                "'transformer', or other axes."
            )
    if STAGE_AXIS in mesh.shape:
        if not config.model.scan_layers:
            raise ValueError(
                f"config.model.scan_layers is False and config.parallel.mesh has {STAGE_AXIS!r}, "
                "expected True: a pipeline is cut at the scan over layers."
            )
        stages, chunks = mesh.shape[STAGE_AXIS], config.parallel.pipeline_chunks
        # In a model with `global_every`, a pipeline cuts only between groups of `every` layers. If
        # some layers remain, the last stage computes them too.
        every = config.model.global_every
        groups = (config.model.num_layers - config.model.dense_layers) // max(every, 1)
        if not groups or groups % (stages * chunks):
            number = f"a multiple of {stages * chunks}"
            if every:
                number += f" groups of config.model.global_every={every}, or up to {every - 1} more"
            if config.model.dense_layers:
                number += f", plus config.model.dense_layers={config.model.dense_layers}"
            raise ValueError(
                f"config.model.num_layers is {config.model.num_layers}, expected {number}: "
                f"{stages} devices along {STAGE_AXIS!r} times "
                f"config.parallel.pipeline_chunks={chunks}."
            )
    parts = 2 * mesh.shape.get(CONTEXT_AXIS, 1)
    if parts > 2 and config.data.sequence_length % parts:
        raise ValueError(
            f"config.data.sequence_length is {config.data.sequence_length}, expected a multiple of "
            f"{parts}, because each device along {CONTEXT_AXIS!r} has two half blocks."
        )


def _mesh_axes(parallel: ml_collections.ConfigDict, *, is_split: bool) -> dict[str, int]:
    """Returns the sizes of the mesh axes, `DATA_AXES` first, because a config keeps no order.

    Axes whose names `manualpar.core.mesh.mesh` does not know come last. There the links are
    the fastest. `is_split` is true for a transformer, whose layers may be split over an axis.
    """
    sizes = parallel.mesh.to_dict()
    first = {axis: sizes[axis] for axis in DATA_AXES if axis in sizes}
    if is_split and not first and set(sizes) <= {SPLIT_AXIS, CONTEXT_AXIS, STAGE_AXIS}:
        first = {"data": 1}  # All devices work on the same examples.
    return first | sizes


# -------------------------------------------------------------------------------------------------
# Counts the model FLOPs per example of a training step, also if some parameters are frozen.
#
# A task counts the FLOPs of training all parameters of a model, by formula. A step with frozen
# parameters does not compute their gradients, nor the gradients of activations before the first
# trained parameter. Adapters add matrix products. So the formula is multiplied by a ratio: the
# FLOPs of this step, divided by the FLOPs of a step that trains all parameters of the task's
# model. Both are counted in steps traced on one device. Recomputation in the backward pass is not
# counted.


# Positions of arguments of the traced loss: the trained parameters and the batch.
TRAINED, BATCH = 0, 1


def flops_of_example(task: Task, model: Any, program: Program) -> float | None:
    """Counts the FLOPs per example of a training step, without recomputation.

    The result is `None` if the task does not know them.

    Args:
      model: The task's model, with adapters if the run has any.
      program: The program of `model`.
    """
    if task.flops_per_example is None or all(place.trainable for _, place in program.parameters):
        return task.flops_per_example
    some = _products(model, task, program, program.model.trainable)
    # This also takes the gradient with respect to the batch, because the formula counts the
    # gradients of float inputs.
    every = _products(task.model, task, program, ("*",), argnums=(TRAINED, BATCH))
    return task.flops_per_example * float(some / every)


def _products(
    model: Any,
    task: Task,
    program: Program,
    globs: tuple[str, ...],
    *,
    argnums: tuple[int, ...] = (TRAINED,),
) -> Fraction:
    """Counts the FLOPs of a step that computes gradients of the parameters that match `globs`.

    The step is traced on one device. `argnums` are the positions of the loss's arguments for which
    gradients are computed.
    """
    interface, batch = interface_of(model), program.abstract_batch
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(
        lambda key: strip_boxes(init_variables(interface, key, batch)["params"]), key
    )

    def part(is_wanted: bool) -> Any:
        def choose(path: Any, x: Any) -> Any:
            return x if is_trained(path_name(path), globs) is is_wanted else optax.MaskedNode()

        return jax.tree.map_with_path(choose, params)

    def loss(trained: Any, batch: Any, frozen: Any, collections: Any, key: jax.Array) -> Any:
        apply_fn = CarryingApply(interface, collections)
        return task.loss_fn(combine((trained, frozen)), apply_fn, batch, key)[0]

    collections = program.unpadded_state.collections
    grads = jax.grad(loss, argnums=argnums, allow_int=True)
    step = jax.make_jaxpr(grads)(part(True), batch, part(False), collections, key)
    found = ProductReader("flops_of_example").read(step.jaxpr)
    counted = (one.flops for one in found if phase_of(one.scope) != "recomputed")
    return sum(counted, start=Fraction(0))
