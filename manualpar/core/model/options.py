"""The options that every builder takes, and their checks.

`check_options` refuses what cannot be built, before anything is traced.
"""

import contextlib
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Required, TypedDict

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from manualpar.core.mesh.axes import AxisName
from manualpar.core.modes.strategy import MODES, ModeName, Stages
from manualpar.core.modes.variable_reduction import CollectionSync
from manualpar.core.parameters.annotations import Rules
from manualpar.core.parameters.comm_policy import CommPolicy, Format
from manualpar.core.parameters.quantized_collectives import BlockQuantizer

Nonfinite = Literal["ignore", "report", "skip"]
NONFINITE: tuple[Nonfinite, ...] = ("ignore", "report", "skip")
WIRE_DTYPES = ("bfloat16", "float32", "float64")
CODES = {"gather_code": (None, "int8"), "reduce_code": (None, "int8", "int4")}
ROUNDING = ("error_feedback", "stochastic_rounding")
STORED_OR_GATHERED = ("gather_dtype", "param_dtype", "frozen_dtype")
FLAGS = ("use_scan", "norm_metrics", "axis_by_axis", "eval_dropout", *ROUNDING)
_FLOATING = re.compile(r"\bb?float\d+\b")


class ProgramOptions(TypedDict, total=False):
    """The keyword arguments that every builder takes.

    Attributes:
      mesh: The devices, see `make_mesh`. On an abstract mesh, see `abstract_mesh`, a program can be
        traced but not run. Required.
      batch: An example batch, or a tree of `jax.ShapeDtypeStruct`, with global shapes `[B, ...]`.
        Only shapes and dtypes are read. It must have `.inputs`, like `manualpar.Batch`, unless
        `init_args` is given or the model is an NNX model. Required.
      init_args: The arguments that initialise a Linen model: a function of the batch that returns
        `(args, kwargs)`, such as `lambda batch: ((batch["source"], batch["target"]), {})`. The
        parameters are those of `model.init({"params": init_rng}, *args, **kwargs)`; other random
        streams of the model use that key too. All values in this batch are zero. If not given, the
        model is called with `batch.inputs`. NNX models are not called.
      axis_name: The mesh axis, or tuple of axes, that the batch is split over and that a strategy
        shards over; `"data"` if not given.
      axis_aliases: Modules of the model may have a field `axis_name` with a name that is no mesh
        axis. This option maps each such name to a mesh axis or tuple of axes: `{"batch": "data"}`
        for `nn.BatchNorm(axis_name="batch")`. `{}` if not given. In modes other than `"manual"`
        the batch is global, and names of the mesh's data axes need no alias.
      context_axis: The mesh axis, if any, that sequences are split over: dim 1 of all leaves of the
        batch except scalars. It also splits the batch, so parameters are sharded over it too. Each
        device has two half blocks of each sequence (`mesh.zigzag`). A model or a loss may mix
        positions only by `manualpar.layers.Context`; otherwise it is refused.
      pipeline: A `manualpar.Pipeline`, if any, which spreads the model's scanned layers over an
        axis of the mesh. The minibatches are its microbatches. For mode `"manual"`.
      num_minibatches: The number of minibatches into which a device splits its part of the batch;
        1 if not given. A device holds the activations of only one minibatch.
      use_scan: Whether the minibatches run in a `jax.lax.scan`, which is compiled once, or in a
        Python loop (the default).
      mode: Who writes the collectives. `"manual"` (the default): this package, inside `shard_map`.
        `"auto"`: XLA, from sharding constraints where a parameter is used. `"explicit"`: XLA, where
        the types require them. `"auto-unconstrained"`: XLA, from only the layout of the state.
        The docstrings of builders state the communication in mode `"manual"`.
      rules: The mesh axes of logical names in `nn.with_logical_partitioning`: pairs of a name and a
        mesh axis, a tuple of axes, or `None`.
      trainable: Globs over the paths of parameters, such as `("*/attention/*", "head/*")`; `*`
        matches `/` too. All other parameters are *frozen*: they stay the same, bit for bit, have no
        gradient and no optimizer state, and may be of any dtype. They are sharded and gathered like
        trained parameters. If not given, the model decides; most models train all parameters.
      param_dtype: The floating-point dtype, by name, in which parameters are stored and updated. If
        not given, the model's dtype.
      frozen_dtype: The dtype, by name, in which frozen parameters are stored. If not given,
        `param_dtype`.
      gather_dtype: The dtype in which parameters are gathered and computed with. If not given, the
        dtype in which they are stored. A frozen parameter whose stored dtype is as narrow or
        narrower is not cast.
      reduce_dtype: The dtype in which gradients are summed over devices. If not given,
        `gather_dtype`, and without that the dtype in which parameters are stored.
      gather_code: `"int8"`: parameters that are gathered over the axes of the batch are quantized,
        rounded to the nearest: to 8 bits for each number and 2 bytes for each block of 256 numbers
        (ZeRO++'s qwZ). The model computes with the quantized parameters, and the optimizer updates
        exact ones. ZeRO's new parameters are sent unquantized. If not given, nothing is quantized.
        For mode `"manual"`, like the next three options.
      reduce_code: `"int8"` or `"int4"`: gradients that are reduced over the axes of the batch are
        quantized (qgZ), and summed in float32. `hsdp` quantizes only the reduction over
        `replica_axis`. With `axis_by_axis` the reduction over each axis quantizes.
      error_feedback: Whether the error of quantizing a device's gradient is added to its gradient
        in the next step, see `manualpar.core.program.gradient_rounding`. For gradients that are
        reduced once a step.
      stochastic_rounding: Whether `reduce_code` rounds at random, so that the mean is exact.
      axis_by_axis: Whether a dimension that is sharded over a tuple of axes is gathered and
        scattered over one axis after the other, instead of over all axes at once. Gathers begin
        with the last axis. The bytes are the same, and there are more collectives. Use it on TPUs:
        if an axis, or a product of axes, fills a square torus, XLA turns reduce-scatters into
        all-reduces, and on large tori also all-gathers. This doubles the bytes. XLA does not do so
        if each axis is one side of the torus (`axis_name=("x", "y")` on a mesh of (16, 16)). If
        some links are slow, name their axis last. All-reduces always run over all axes at once.
        For mode `"manual"`.
      norm_metrics: Whether training reports `gradient_norm`, `update_norm` and `parameter_norm`,
        the global norms of the gradient, of the optimizer's update and of the new parameters.
      nonfinite: The reaction of a training step to a loss or a gradient that is not finite, on any
        device and in any minibatch. An optimizer's update of finite gradients is not checked.
        `"ignore"` (the default): nothing, at no cost.
        `"report"`: the metrics contain `nonfinite`, a pair whose sum is 1 in such a step and 0 in
        other steps, and whose count is 1. If this sum is 0, `metrics["loss"]` is finite. `"skip"`:
        like `"report"`, and such a step does not change, bit for bit, the parameters, the
        optimizer's state with its counters and schedules, and the model's other collections.
        `state.step` and `state.rng` advance, because they count steps and not updates. Norms are of
        the computed gradient, the computed update, and the unchanged parameters. The device
        decides, so the host does not wait. In mode `"manual"`, `"report"` and `"skip"` add no
        collective, but 8 bytes to the all-reduce of the metrics. This all-reduce then waits for the
        gradients and is not merged with their all-reduces. If parameters are sharded over other
        axes than the batch's, one all-reduce of 4 bytes is added. In the other modes XLA combines
        the results of all gradients. `"skip"` needs every gradient before the first parameter
        changes. If XLA does not fuse the optimizer into one loop, as on CPUs, this takes memory for
        up to two more shards of the parameters.
      sync_collections: How to synchronise variables outside `params` whose values differ between
        devices after a step, by collection or by path; the longest matching path wins:
        `{"stats": "sum", "stats/amax": "max"}`.
        `"mean"`, the mean over the devices, is right for running averages of means, such as those
        of `nn.BatchNorm`. `"sum"` is right for counters and other totals, also integers: the result
        is the value before the step plus all increments of all devices in all minibatches. `"max"`
        and `"min"` are right for running maxima and minima. None of them is right for a running
        average of *sums*, as in vector quantisers (`decay * old + (1 - decay) * total`): take
        `jax.lax.psum(total, axis)` in the model. `batch_stats` is averaged by default. If the type
        of another variable says that it differs, the variable is refused unless this option names
        it. If the type says that it does not differ, the variable stays as it is. A count taken
        from a shape (`seen += x.shape[0]`) does not differ by its type, so this option must name
        it. In modes other than `"manual"` a model gets the global batch, and no variable differs.
      eval_dropout: Whether `eval_step` leaves dropout on, as Monte Carlo dropout needs it. Batch
        statistics come from the state in any case, and a `Transformer` smooths no labels and adds
        no z-loss. Everything else that your model does only in training stays on too. If `False`
        (the default), training is turned off wherever a module is told to train: by an argument or
        a field `train`, `training` or `is_training`, by `deterministic`, by `use_running_average`,
        and in NNX by `eval()`. A module that draws from `rngs["dropout"]` and has no such switch is
        refused by its path. With dropout on, masks depend on the device, in a pipeline on the
        microbatch, and on `state.rng`, which changes in each step. To draw several samples of one
        state, replace its key: `state.replace(rng=key)`.
      compiler_options: XLA's options for the training and the evaluation step, by name, see
        `manualpar.core.mesh.compiler_options`; none if not given.
    """

    mesh: Required[Mesh | AbstractMesh]
    batch: Required[Any]
    init_args: Callable[[Any], tuple[Sequence[Any], Mapping[str, Any]]] | None
    axis_name: AxisName
    axis_aliases: Mapping[str, AxisName]
    context_axis: str | None
    pipeline: Stages | None
    num_minibatches: int
    use_scan: bool
    mode: ModeName
    rules: Rules
    trainable: Sequence[str] | None
    param_dtype: str | None
    frozen_dtype: str | None
    gather_dtype: str | None
    reduce_dtype: str | None
    gather_code: Literal["int8"] | None
    reduce_code: Literal["int8", "int4"] | None
    error_feedback: bool
    stochastic_rounding: bool
    axis_by_axis: bool
    norm_metrics: bool
    nonfinite: Nonfinite
    sync_collections: Mapping[str, CollectionSync]
    eval_dropout: bool
    compiler_options: Mapping[str, Any]


def check_options(builder: str, options: Mapping[str, Any]) -> None:
    """Refuses options that are unknown, missing, or not among the choices."""
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
    choices_of: dict[str, Any] = {"mode": MODES, "nonfinite": NONFINITE, **CODES}
    choices_of |= dict.fromkeys(FLAGS, (True, False))
    for name, choices in choices_of.items():
        if name in options:
            check_choice(builder, name, options[name], choices)
    init_args = options.get("init_args")
    if init_args is not None and not callable(init_args):
        raise TypeError(
            f"{builder}: init_args={init_args!r}, expected a function of the batch that returns "
            "the model's (args, kwargs)."
        )
    for name, kind in (("context_axis", str), ("pipeline", Stages)):
        value = options.get(name)
        if value is not None and not isinstance(value, kind):
            expected = "the name of a mesh axis" if kind is str else "a manualpar.Pipeline"
            raise TypeError(f"{builder}: {name}={value!r}, expected {expected} or None.")
    trainable = options.get("trainable")
    is_names = isinstance(trainable, list | tuple) and all(isinstance(x, str) for x in trainable)
    if trainable is not None and not (trainable and is_names):
        raise TypeError(
            f"{builder}: trainable={trainable!r}, expected a tuple of one or more globs such as "
            "('head/*',), or None."
        )
    compiler_options = options.get("compiler_options", {})
    if not isinstance(compiler_options, Mapping):
        raise TypeError(
            f"{builder}: compiler_options={compiler_options!r}, expected a dict of names and "
            "values."
        )


# The dtypes in which floating-point parameters are stored: (frozen parameters, trained parameters).
StoredDtypes = tuple[str | None, str | None]


def check_wire(strategy: str, options: Mapping[str, Any]) -> tuple[StoredDtypes, CommPolicy]:
    """Reads the stored dtypes of parameters and their communication policy from the options."""
    mode = options.get("mode", "manual")
    names: dict[str, str | None] = {}
    for field in ("param_dtype", "frozen_dtype", "gather_dtype", "reduce_dtype"):
        value = options.get(field)
        try:
            names[field] = None if value is None else str(jnp.dtype(value))
        except TypeError:
            names[field] = repr(value)  # JAX does not know it, so it is refused below.
        if value is not None and names[field] not in WIRE_DTYPES:
            raise ValueError(
                f"{strategy}: {field}={value!r}, expected one of {WIRE_DTYPES} or None. (float16 "
                "would overflow: gradients are summed before they are divided.)"
            )
    if not options.get("reduce_code") and (rounding := [f for f in ROUNDING if options.get(f)]):
        raise ValueError(
            f"{strategy}: {rounding[0]}=True with no reduce_code, expected reduce_code='int8' or "
            "'int4'."
        )

    def format_of(way: str) -> Format:
        code = options.get(f"{way}_code")
        return Format(names[f"{way}_dtype"], BlockQuantizer(code) if code else None)

    axis_by_axis = options.get("axis_by_axis", False)
    comm = CommPolicy(format_of("gather"), format_of("reduce"), axis_by_axis)
    for field, got, expected, choice in (
        ("reduce_dtype", comm.reduce.dtype, None, "where it sums"),
        *((name, options.get(name), None, "what it sends") for name in CODES),
        ("axis_by_axis", comm.axis_by_axis, False, "how it sends"),
    ):
        if got and mode != "manual":
            raise ValueError(
                f"{strategy}: {field}={got!r} with mode={mode!r}, expected {expected}: XLA chooses "
                f"{choice}. Use mode='manual'."
            )
    return (names["frozen_dtype"] or names["param_dtype"], names["param_dtype"]), comm


@contextlib.contextmanager
def explain_dtypes(strategy: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Explains JAX's error about two floating-point dtypes if an option gives one of them.

    Raises:
      TypeError: An operation of the model or the loss combines a dtype that an option gives with
        another. Other errors pass.
    """
    try:
        yield
    except TypeError as error:
        said = str(error).strip()
        dtypes = set(_FLOATING.findall(said))
        if len(dtypes) < 2 or said.startswith(f"{strategy}:"):
            raise
        values = {name: options.get(name) for name in STORED_OR_GATHERED}
        causes = [f"{key}={x!r}" for key, x in values.items() if x and str(jnp.dtype(x)) in dtypes]
        if not causes:
            raise
        raise TypeError(
            f"{strategy}: with {' and '.join(causes)} the model or the loss combines arrays of the "
            f"dtypes {' and '.join(sorted(dtypes))}, expected one. Layers without a dtype compute "
            "in the dtype of their parameters: give the model a dtype, or cast arrays that it adds "
            f"to activations to their dtype. (JAX says: {' '.join(said.split())})"
        ) from error


def check_choice(builder: str, field: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Refuses a value that is not among the choices."""
    if isinstance(value, bool) is not isinstance(choices[0], bool) or value not in choices:
        raise ValueError(
            f"{builder}: {field}={value!r}, expected one of {', '.join(map(repr, choices))}."
        )
