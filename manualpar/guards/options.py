"""The options that every builder takes, and their checks.

`check_options` refuses what cannot be built, before anything is traced.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Required, TypedDict

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from manualpar.collection_sync import CollectionSync
from manualpar.core.collectives import Wire
from manualpar.core.strategy import MODES, Mode
from manualpar.sharding.annotations import Rules
from manualpar.sharding.mesh import AxisName

Nonfinite = Literal["ignore", "report", "skip"]
NONFINITE: tuple[Nonfinite, ...] = ("ignore", "report", "skip")
WIRE_DTYPES = ("bfloat16", "float32", "float64")
# The options that are true or false.
FLAGS = ("use_scan", "norm_metrics", "axis_by_axis", "eval_dropout")


class ProgramOptions(TypedDict, total=False):
    """The keyword arguments that all strategies' builders take.

    Attributes:
      mesh: The devices, see `make_mesh`; an abstract mesh for a program to look at and not to run,
        see `abstract_mesh`. Required.
      batch: An example batch, or a tree of `jax.ShapeDtypeStruct`, with global shapes `[B, ...]`;
        only shapes and dtypes are read. It has `.inputs`, as `manualpar.Batch` has, unless
        `init_args` is given or the model is an NNX one. Required.
      init_args: How a Linen model is called to initialise it, from the batch: a function that
        returns `(args, kwargs)`, such as `lambda batch: ((batch["source"], batch["target"]), {})`.
        The parameters are those of `model.init({"params": init_rng}, *args, **kwargs)`: streams of
        random numbers that it asks for draw from that key too. The values in this batch are zero.
        If not given, the model is called with `batch.inputs`. NNX models are not called.
      axis_name: The mesh axis, or tuple of axes, that the batch is split over, and over which a
        strategy shards; `"data"` if not given.
      axis_aliases: The mesh axis, or tuple of axes, that each name stands for in the fields
        `axis_name` of the model's modules, where the mesh has no such axis: `{"batch": "data"}` for
        `nn.BatchNorm(axis_name="batch")`; none if not given. In other modes than `"manual"` the
        batch is global, and the names of the mesh's own data axes are understood without it.
      num_minibatches: How many parts a device takes its share of the batch in, to hold the
        activations of one; 1 if not given.
      use_scan: Whether the parts run in a `jax.lax.scan` (compiled once) and not unrolled.
      mode: Who writes the collectives: `"manual"` (the default), this package, inside `shard_map`;
        `"auto"`, XLA, from sharding constraints where a parameter is used; `"explicit"`, XLA, where
        the types say; `"auto-unconstrained"`, XLA, from the layout of the state alone. What
        builders say of communication holds for `"manual"`.
      rules: What logical names in `nn.with_logical_partitioning` mean: pairs of a name and a mesh
        axis, a tuple of axes, or `None`.
      param_dtype: What parameters are stored and updated in, a floating-point dtype's name; if not
        given, what the model makes.
      gather_dtype: What parameters are gathered and computed with; if not given, what they are
        stored in.
      reduce_dtype: What gradients are summed over devices in; if not given, `gather_dtype`, else
        what parameters are stored in.
      axis_by_axis: Whether what is sharded over a tuple of axes is gathered and scattered over one
        of them after the other, the last one first in a gather, and not over their product at once.
        The bytes are as many and the collectives more. On a TPU, XLA makes all-reduces of
        reduce-scatters, and in larger ones of all-gathers too, over a single axis, or a product,
        that fills a square torus, which is twice the bytes; over one side of the torus after the
        other it does not (`axis_name=("x", "y")` on a mesh of (16, 16)). Where some links are slow,
        name their axis last. All-reduces are over all axes at once either way. For mode `"manual"`.
      norm_metrics: Whether training reports `gradient_norm`, `update_norm` and `parameter_norm`:
        the global norms of the gradient, of the optimizer's update and of the new parameters.
      nonfinite: What a training step does about a loss or a gradient that is not finite (an element
        of it is infinite or not a number, on any device and in any minibatch). `"ignore"` (the
        default): nothing, and nothing is computed for it. `"report"`: the metrics say so in
        `nonfinite`, a pair (1 in such a step and else 0, 1), which has the global batch in it. If
        it is 0, `metrics["loss"]` is finite. `"skip"`: the same, and such a step leaves the
        parameters, all of the optimizer's state (its counters and schedules too) and the model's
        other collections as they were, bit for bit; `state.step` and `state.rng` move on, for they
        count steps and not updates. The device decides, the host waits for nothing. What an
        optimizer makes of finite gradients is not looked at. Norms in a step that is skipped are
        those of the gradient and of the update that was asked for, and of the parameters that were
        kept. In mode `"manual"` this adds no collective, but 8 bytes to the all-reduce of the
        metrics, which then waits for the gradients (and is not merged into theirs), and one
        all-reduce of 4 bytes where parameters are sharded over other axes than the batch; in the
        others XLA combines what it finds about each gradient. `"skip"` needs every gradient before
        the first parameter changes, and where XLA does not fuse an optimizer into one loop, as on
        the CPU, up to two shards of the parameters more.
      sync_collections: What becomes of the model's variables outside `params` whose values differ
        between devices after a step, by collection or by path, of which the longest that fits
        counts: `{"stats": "sum", "stats/amax": "max"}`. `"mean"` is right for running averages of
        means, as `nn.BatchNorm` keeps them: the mean over the devices. `"sum"` is right for
        counters and other totals, integers too: the value before the step and what all devices
        have added to it since, in all minibatches. `"max"` and `"min"` are right for running maxima
        and minima. None of them is right for a running average of *sums*, as vector quantisers keep
        it (`decay * old + (1 - decay) * total`): take `jax.lax.psum(total, axis)` in the model.
        `batch_stats` keeps its mean if nothing else is said. Anything else that differs by its type
        is refused if nothing is said, and what does not is left as it is. (A count that is taken
        from a shape, `seen += x.shape[0]`, does not, so it has to be named.) In other modes than
        `"manual"` a model sees the global batch, and nothing differs.
      eval_dropout: Whether `eval_step` leaves dropout on, as Monte Carlo dropout wants it; batch
        statistics come from the state all the same. If not (the default), training is turned off
        wherever a module is told to train: by an argument or a field `train`, `training` or
        `is_training`, by `deterministic`, by `use_running_average`, and in NNX by `eval()`. A
        module that draws from `rngs["dropout"]` and cannot be told is refused by its path. With
        dropout on, masks depend on the device and on `state.rng`, another in each step; for several
        samples of one state give it other keys: `state.replace(rng=key)`.
      compiler_options: Options of XLA for the training and the evaluation step, by name, see
        `manualpar.compiler_options`; none if not given.
    """

    mesh: Required[Mesh | AbstractMesh]
    batch: Required[Any]
    init_args: Callable[[Any], tuple[Sequence[Any], Mapping[str, Any]]] | None
    axis_name: AxisName
    axis_aliases: Mapping[str, AxisName]
    num_minibatches: int
    use_scan: bool
    mode: Mode
    rules: Rules
    param_dtype: str | None
    gather_dtype: str | None
    reduce_dtype: str | None
    axis_by_axis: bool
    norm_metrics: bool
    nonfinite: Nonfinite
    sync_collections: Mapping[str, CollectionSync]
    eval_dropout: bool
    compiler_options: Mapping[str, Any]


def check_options(builder: str, options: Mapping[str, Any]) -> None:
    """Refuses options that there are not, that are missing, or that are no choice."""
    for name in options:
        if name not in ProgramOptions.__annotations__:
            near = difflib.get_close_matches(name, ProgramOptions.__annotations__, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise TypeError(
                f"{builder}: {name!r} is not an option, expected some of "
                f"{', '.join(ProgramOptions.__annotations__)}, or the builder's own{hint}"
            )
    for name in sorted(ProgramOptions.__required_keys__ - options.keys()):
        raise TypeError(f"{builder}: {name}= is missing, expected it as a keyword argument.")
    choices_of = {"mode": MODES, "nonfinite": NONFINITE} | dict.fromkeys(FLAGS, (True, False))
    for name, choices in choices_of.items():
        if name in options:
            check_choice(builder, name, options[name], choices)
    init_args = options.get("init_args")
    if init_args is not None and not callable(init_args):
        raise TypeError(
            f"{builder}: init_args={init_args!r}, expected a function of the batch that returns "
            "the model's (args, kwargs)."
        )
    compiler_options = options.get("compiler_options", {})
    if not isinstance(compiler_options, Mapping):
        raise TypeError(
            f"{builder}: compiler_options={compiler_options!r}, expected a dict of names and "
            "values."
        )


def check_wire(strategy: str, options: Mapping[str, Any]) -> tuple[str | None, Wire]:
    """What parameters are stored in, and what travels and which way, as it is asked for."""
    mode = options.get("mode", "manual")
    names: dict[str, str | None] = {}
    for field in ("param_dtype", "gather_dtype", "reduce_dtype"):
        value = options.get(field)
        try:
            names[field] = None if value is None else str(jnp.dtype(value))
        except TypeError:
            names[field] = repr(value)  # What jax does not know is not allowed either.
        if value is not None and names[field] not in WIRE_DTYPES:
            raise ValueError(
                f"{strategy}: {field}={value!r}, expected one of {WIRE_DTYPES} or None. (float16 "
                "would overflow: gradients are summed before they are divided.)"
            )
    if names["reduce_dtype"] and mode != "manual":
        raise ValueError(
            f"{strategy}: reduce_dtype={names['reduce_dtype']!r} with mode={mode!r}, expected "
            "None: XLA chooses where it sums. Use mode='manual'."
        )
    wire = Wire(
        names["gather_dtype"],
        names["reduce_dtype"],
        axis_by_axis=options.get("axis_by_axis", False),
    )
    if wire.axis_by_axis and mode != "manual":
        raise ValueError(
            f"{strategy}: axis_by_axis=True with mode={mode!r}, expected False: XLA chooses how it "
            "sends. Use mode='manual'."
        )
    return names["param_dtype"], wire


def check_choice(builder: str, field: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Refuses a value that is none of the choices, in the name of a builder's field."""
    if isinstance(value, bool) is not isinstance(choices[0], bool) or value not in choices:
        raise ValueError(
            f"{builder}: {field}={value!r}, expected one of {', '.join(map(repr, choices))}."
        )


def check_names(builder: str, field: str, value: Any) -> None:
    """Refuses what is no tuple of names of parameters or modules."""
    if not isinstance(value, tuple) or not all(isinstance(x, str) for x in value):
        raise TypeError(
            f"{builder}: {field}={value!r}, expected a tuple of names of parameters or modules, "
            "such as ('head',)."
        )


def check_number(builder: str, field: str, value: Any, unit: str) -> None:
    """Refuses a number of some unit that is none, in the name of a builder's field."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{builder}: {field}={value!r}, expected a number of {unit}, 0 or more.")
