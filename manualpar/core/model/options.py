"""The options that every builder takes, and the dtypes and quantizers that options choose."""

import collections.abc
import contextlib
import dataclasses
import difflib
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Required, TypedDict, TypeVar, get_args, get_origin

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from manualpar.core.mesh.axes import AxisName
from manualpar.core.model.loops import MISMATCH
from manualpar.core.modes.layer_loops import Remat
from manualpar.core.modes.strategy import ModeName, Stages
from manualpar.core.modes.variable_reduction import CollectionSync
from manualpar.core.parameters.annotations import Rules
from manualpar.core.parameters.collectives import (
    Format,
    GatherCode,
    GatherQuantizer,
    MixedPrecisionPolicy,
    ReduceCode,
)
from manualpar.errors import check_choice

# -------------------------------------------------------------------------------------------------
# Tables of the options of builders, the functions such as `manualpar.fsdp` that build a program.
#
# A builder checks its arguments with its table, a config derives fields from the table, and `help`
# prints the table. An option is one entry of a `TypedDict` such as `ProgramOptions`: its
# annotation gives the type and an `Option`, and the docstring of the class explains the option. So
# a new option is written in one place.


_Explained = TypeVar("_Explained", bound=Callable[..., Any])
_SEQUENCES = (tuple, collections.abc.Sequence)
_ENTRY = re.compile(r"^  (\w+): (.*(?:\n    .*)*)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Option:
    """A keyword argument of a builder, such as `num_minibatches` of `manualpar.fsdp`.

    The annotation of an entry contains an `Option` with the first group of attributes;
    `option_table` adds the second group.

    Attributes:
      default: The value of an option that is not given.
      field: The dotted name of the config field that sets the option; `""` if no config sets it.
      minimum: The smallest number, or the fewest members of a sequence.
      expected: The allowed values in words, for messages. An option without words is checked here
        only if its type lists all values, as `bool` and `Literal` do.
      config_choices: The strings that a config may set, if the annotation does not list them.
      xla_chooses: What XLA chooses in modes other than `"manual"`, in words for messages. In these
        modes the option must have its default. `""` if the option is for all modes.

      name: The name of the keyword argument.
      kind: The type in the annotation, without `Required` and `Annotated`.
      required: Whether the option must be given.
      meaning: The first sentence of the option's entry in the docstring.
    """

    default: Any = None
    field: str = ""
    minimum: int | None = None
    expected: str = ""
    config_choices: tuple[str, ...] = ()
    xla_chooses: str = ""

    name: str = ""
    kind: Any = None
    required: bool = False
    meaning: str = ""

    @property
    def choices(self) -> tuple[Any, ...]:
        """All allowed values if the type lists them, otherwise `()`."""
        members = _members(self.kind)
        if members == (bool,):
            return (True, False)
        literals = [value for member in members for value in get_args(member)]
        if not all(get_origin(member) is Literal for member in members if member is not type(None)):
            return ()
        return ((None,) if type(None) in members else ()) + tuple(literals)

    @property
    def holds_names(self) -> bool:
        """Whether the value is a sequence of strings."""
        sequences = [x for x in _members(self.kind) if get_origin(x) in _SEQUENCES]
        return any(get_args(x)[0] is str for x in sequences)

    def check(self, builder: str, value: Any) -> None:
        """Refuses a value that is not allowed; `builder` begins the message."""
        if self.choices:
            check_choice(builder, self.name, value, self.choices)
        elif self.expected and not self._allows(value):
            error = ValueError if self.kind is int else TypeError
            raise error(f"{builder}: {self.name}={value!r}, expected {self.expected}.")

    def _allows(self, value: Any) -> bool:
        if not any(_is_of(value, member) for member in _members(self.kind)):
            return False
        if value is None or self.minimum is None:
            return True
        return (len(value) if isinstance(value, list | tuple) else value) >= self.minimum

    def describe(self) -> str:
        """Describes the option: its name, type, default and meaning."""
        kinds = " | ".join(map(_name, _members(self.kind)))
        default = "" if self.required else f" = {self.default!r}"
        return f"{self.name}: {kinds}{default}. {self.meaning}"


OptionTable = Mapping[str, Option]


def option_table(options: type, *, beyond: OptionTable = types.MappingProxyType({})) -> OptionTable:
    """Reads the options of a `TypedDict`, by name.

    Args:
      options: The `TypedDict`. Each annotation is `Annotated[kind, Option(...)]`.
      beyond: Options to leave out, such as those of the class that `options` extends.
    """
    meanings = first_sentences(options)
    table = {}
    for name, annotation in typing.get_type_hints(options, include_extras=True).items():
        if name in beyond:
            continue
        required = get_origin(annotation) is typing.Required
        kind, option = get_args(get_args(annotation)[0] if required else annotation)
        table[name] = dataclasses.replace(
            option, name=name, kind=kind, required=required, meaning=meanings.get(name, "")
        )
    return table


def first_sentences(documented: object) -> dict[str, str]:
    """Returns the first sentence of each entry in the `Attributes:` or `Args:` of a docstring."""
    return {
        name: re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]
        for name, text in _ENTRY.findall(inspect.getdoc(documented) or "")
    }


def check_options(builder: str, options: Mapping[str, Any], table: OptionTable) -> None:
    """Refuses options that are unknown, missing or not allowed."""
    for name in options:
        if name not in table:
            near = difflib.get_close_matches(name, table, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise TypeError(
                f"{builder}: {name!r} is not an option, expected some of {', '.join(table)}, or "
                f"the builder's own{hint}"
            )
    for option in table.values():
        if option.name in options:
            option.check(builder, options[option.name])
        elif option.required:
            raise TypeError(
                f"{builder}: {option.name}= is missing, expected it as a keyword argument."
            )


def with_defaults(options: Mapping[str, Any], table: OptionTable) -> dict[str, Any]:
    """Returns the options of `table`, with the default of each option that is not given."""
    return {name: options.get(name, option.default) for name, option in table.items()}


def explain_options(builder: _Explained, table: OptionTable) -> _Explained:
    """Adds a list of options to a builder's docstring, which `help` prints."""
    wrap = textwrap.TextWrapper(
        96, initial_indent="  ", subsequent_indent="    ", break_long_words=False
    )
    lines = [wrap.fill(option.describe()) for option in table.values()]
    text = inspect.cleandoc(builder.__doc__ or "")
    builder.__doc__ = "\n".join([text, "", "Options:", *lines])
    return builder


def _members(kind: Any) -> tuple[Any, ...]:
    """Returns the members of a union; for any other type, a tuple of only this type."""
    return get_args(kind) if get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _is_of(value: Any, kind: Any) -> bool:
    """Returns whether a value is of a type; members of lists and tuples are checked too."""
    origin = get_origin(kind) or kind
    if origin in _SEQUENCES:
        allowed = (list, tuple) if origin is collections.abc.Sequence else (tuple,)
        member = get_args(kind)[0]
        return isinstance(value, allowed) and all(_is_of(each, member) for each in value)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin)


def _name(kind: Any) -> str:
    """Returns a type as a user writes it, without the modules of its names."""
    if kind is type(None):
        return "None"
    if get_origin(kind) is Literal:
        return " | ".join(map(repr, get_args(kind)))
    if isinstance(kind, type) and not get_args(kind):
        return kind.__name__
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", str(kind))


# -------------------------------------------------------------------------------------------------


Nonfinite = Literal["ignore", "report", "skip"]
WIRE_DTYPES = ("bfloat16", "float32", "float64")
_DTYPES = ("bfloat16", "float32")  # Configs have no float64, because commands run JAX without it.
STORED_OR_GATHERED = ("gather_dtype", "param_dtype", "frozen_dtype")
_FLOATING = re.compile(r"\bb?float\d+\b")


class ProgramOptions(TypedDict, total=False):
    """The keyword arguments that every builder takes.

    Attributes:
      mesh: The devices, see `make_mesh`. On an abstract mesh, see `abstract_mesh`, a program can be
        traced but not run. Required.
      batch: An example batch, or a tree of `jax.ShapeDtypeStruct`, with global shapes `[B, ...]`.
        Only shapes and dtypes are read. Required.
      init_args: A function of the batch that returns the `(args, kwargs)` that initialise a Linen
        model. An example is `lambda batch: ((batch["source"], batch["target"]), {})`. The
        parameters are those of `model.init({"params": init_rng}, *args, **kwargs)`; other random
        streams of the model use that key too. All values in this batch are zero. If not given, the
        model is called with `batch.inputs`, or as the loss calls it if the batch has none. NNX
        models are not called.
      other_models: Other models that the loss calls and that are trained elsewhere, by the name of
        the loss's argument: `{"discriminator": model}`. The loss then gets a function
        `discriminator(x)`, and a step gets the state of that model, `train_step(state, batch,
        discriminator=its_state)`. A value is a program, whose placements are used, or a model,
        which is placed like the program's own: so two programs may name each other. The
        parameters are gathered like frozen ones, and have no gradient; what a call changes in
        other collections is lost. Not with `pipeline`, nor in `manualpar.diloco`.
      axis_name: The mesh axis, or tuple of axes, that the batch is split over and that a strategy
        shards over.
      axis_aliases: The mesh axes of axis names in the model's modules: a dict from a module's
        `axis_name`, which the mesh lacks, to a mesh axis or a tuple of axes. An example is
        `{"batch": "data"}` for `nn.BatchNorm(axis_name="batch")`. In modes other than `"manual"`
        the batch is global, and names of the mesh's data axes need no alias.
      context_axis: The mesh axis, if any, that sequences are split over: dim 1 of all leaves of the
        batch except scalars. This axis also splits the batch, so parameters are sharded over it
        too. Each device has two half blocks of each sequence (`mesh.zigzag`). A model or a loss
        that mixes positions in other ways than by `manualpar.layers.Context` is refused.
      pipeline: A `manualpar.Pipeline`, if any, which spreads the model's scanned layers over an
        axis of the mesh. The minibatches are the pipeline's microbatches. For mode `"manual"`.
      num_minibatches: The number of minibatches into which a device splits its part of the batch. A
        device holds the activations of only one minibatch.
      use_scan: Whether the minibatches run in a `jax.lax.scan`, which is compiled once, instead of
        a Python loop.
      mode: Who writes the collectives: this package (`"manual"`), or XLA (the other modes).
        `"manual"`: this package, inside `shard_map`.
        `"auto"`: XLA, from sharding constraints where a parameter is used. `"explicit"`: XLA, where
        the types require them. `"auto-unconstrained"`: XLA, from only the layout of the state.
        The docstrings of builders state the communication in mode `"manual"`.
      rules: The mesh axes of logical names in `nn.with_logical_partitioning`: pairs of a name and a
        mesh axis, a tuple of axes, or `None`.
      trainable: Globs over the paths of the parameters to train, such as `("*/attention/*",
        "head/*")`; by default the model decides. Most models train all parameters. `*` matches `/`
        too. All other parameters are *frozen*: they stay the same, bit for bit, have no gradient
        and no optimizer state, and may be of any dtype. They are sharded and gathered like trained
        parameters.
      param_dtype: The floating-point dtype, by name, in which parameters are stored and updated; by
        default the model's dtype.
      frozen_dtype: The dtype, by name, in which frozen parameters are stored; by default
        `param_dtype`.
      gather_dtype: The dtype in which parameters are gathered and computed with; by default the
        dtype in which they are stored. A frozen parameter whose stored dtype is as narrow or
        narrower is not cast.
      reduce_dtype: The dtype in which gradients are summed over devices; by default `gather_dtype`,
        and without that the dtype in which parameters are stored.
      gather_code: The quantizer of parameters that are gathered over the axes of the batch: qwZ of
        ZeRO++. `"int8"` rounds to the nearest, and sends 8 bits for each number and 2 bytes for
        each block of 256 numbers. The model computes with the quantized parameters, and the
        optimizer updates exact ones. ZeRO's new parameters are sent unquantized. `"float8"` sends
        e4m3 codes of the parameters that only products in float8 read, see
        `manualpar.layers.float8_dot_general`, and other parameters as without a code. These
        products find the same codes again, so no bit of a result changes. It also sends codes of
        the activations that sequence parallelism gathers for such products. For mode `"manual"`,
        like the next three options.
      reduce_code: The format in which gradients are sent to be summed in float32, over the axes of
        the batch: the codes of qgZ of ZeRO++, or `"bfloat16"`. The latter sends as many bytes as
        `reduce_dtype="bfloat16"`, which also rounds after every addition. `hsdp` quantizes only the
        reduction over `replica_axis`. With `axis_by_axis` gradients are quantized again for each
        axis.
      error_feedback: Whether the error of quantizing a device's gradient is added to the device's
        gradient in the next step, see `manualpar.quantization.gradient_rounding`. For gradients
        that are reduced once a step.
      stochastic_rounding: Whether `reduce_code` rounds up or down at random, so that the expected
        rounding error is 0.
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
        `"ignore"`: nothing, at no cost. `"report"`: the metrics contain `nonfinite`, a pair whose
        sum is 1 in such a step and 0 in other steps, and whose count is 1. If this sum is 0,
        `metrics["loss"]` is finite. `"skip"`: like `"report"`, and such a step does not change, bit
        for bit, the parameters, the optimizer's state with its counters and schedules, and the
        model's other collections. `state.step` and `state.rng` advance, because they count steps
        and not updates. Norms are of the computed gradient, the computed update, and the unchanged
        parameters. The device decides whether to skip, so the host does not wait. In mode
        `"manual"`, `"report"` and `"skip"` add no collective, but 8 bytes to the all-reduce of the
        metrics. This all-reduce then waits for the gradients and is not merged with the all-reduces
        of gradients. If parameters are sharded over other axes than the batch's, one all-reduce of
        4 bytes is added. In the other modes XLA combines the results of all gradients. `"skip"`
        needs every gradient before the first parameter changes. If XLA does not fuse the optimizer
        into one loop, as on CPUs, this takes memory for up to two more shards of the parameters.
      sync_collections: How to synchronise variables outside `params` whose values differ between
        devices after a step, by collection or by path. The longest matching path wins:
        `{"stats": "sum", "stats/amax": "max"}`. `"mean"`, the mean over the devices, is right for
        running averages of means, such as those of `nn.BatchNorm`. `"sum"` is right for counters
        and other totals, also integers: the result is the value before the step plus all increments
        of all devices in all minibatches. `"max"` and `"min"` are right for running maxima and
        minima. None of them is right for a running average of *sums*, as in vector quantisers
        (`decay * old + (1 - decay) * total`): take `jax.lax.psum(total, axis)` in the model.
        `batch_stats` is averaged by default. A variable that the model computes from parameters
        alone (a teacher's moving average) is computed once more, apart from the gradients; XLA
        gathers the shards that it needs. Another variable whose type varies over devices is
        refused unless this option names the variable. A variable whose type does not vary stays as
        it is. The type of a count taken from a shape (`seen += x.shape[0]`) does not vary, so this
        option must name such a count. In modes other than `"manual"` a model gets the global batch,
        and no variable differs.
      eval_dropout: Whether `eval_step` leaves dropout on, as Monte Carlo dropout needs it. Batch
        statistics come from the state in any case, and a `Transformer` smooths no labels and adds
        no z-loss. Everything else that your model does only in training stays on too. If `False`
        (the default), training is turned off wherever a module is told to train: by an argument or
        a field `train`, `training` or `is_training`, by `deterministic`, by `use_running_average`,
        and in NNX by `eval()`. A module that draws from `rngs["dropout"]` and has no such switch is
        refused by its path. With dropout on, masks depend on the device, in a pipeline on the
        microbatch, and on `state.rng`, which changes in each step. To draw several samples of one
        state, replace its key: `state.replace(rng=key)`.
      remat: What the backward pass computes again in the model's loops over layers (`nn.scan`,
        `nnx.scan` and `jax.lax.scan` over parameters). `"model"`: what the model says, by
        `jax.checkpoint`; a loop without it keeps every intermediate array, also float32 copies.
        `"auto"`: on GPUs and TPUs, the program chooses for each loop without a checkpoint what is
        fastest and fits into the device's memory, see `manualpar.core.modes.layer_loops`; on CPUs
        nothing changes. A `Transformer` chooses by its own field `remat`, and a pipeline by its
        `keep`.
      compiler_options: XLA's options for the training and the evaluation step, by name, see
        `manualpar.core.mesh.compiler_options`.
    """

    mesh: Required[Annotated[Mesh | AbstractMesh, Option()]]
    batch: Required[Annotated[Any, Option()]]
    init_args: Annotated[
        Callable[[Any], tuple[Sequence[Any], Mapping[str, Any]]] | None,
        Option(
            expected="a function of the batch that returns the model's (args, kwargs)",
        ),
    ]
    other_models: Annotated[
        Mapping[str, Any],
        Option({}, expected="a dict of programs or models by the names of the loss's arguments"),
    ]
    axis_name: Annotated[AxisName, Option("data")]
    axis_aliases: Annotated[Mapping[str, AxisName], Option({})]
    context_axis: Annotated[str | None, Option(expected="the name of a mesh axis or None")]
    pipeline: Annotated[Stages | None, Option(expected="a manualpar.Pipeline or None")]
    num_minibatches: Annotated[int, Option(1, "optimizer.num_minibatches", minimum=1)]
    use_scan: Annotated[bool, Option(False)]
    mode: Annotated[ModeName, Option("manual", "parallel.mode")]
    rules: Annotated[Rules, Option((), "parallel.rules")]
    trainable: Annotated[
        Sequence[str] | None,
        Option(
            field="optimizer.trainable",
            minimum=1,
            expected="a tuple of one or more globs such as ('head/*',), or None",
        ),
    ]
    param_dtype: Annotated[str | None, Option(None, "parallel.param_dtype", config_choices=_DTYPES)]
    frozen_dtype: Annotated[
        str | None, Option(None, "parallel.frozen_dtype", config_choices=_DTYPES)
    ]
    gather_dtype: Annotated[
        str | None, Option(None, "parallel.gather_dtype", config_choices=_DTYPES)
    ]
    reduce_dtype: Annotated[
        str | None,
        Option(
            None,
            "parallel.reduce_dtype",
            config_choices=_DTYPES,
            xla_chooses="where it sums",
        ),
    ]
    gather_code: Annotated[
        GatherCode | None,
        Option(None, "parallel.gather_code", xla_chooses="what it sends"),
    ]
    reduce_code: Annotated[
        ReduceCode | None,
        Option(None, "parallel.reduce_code", xla_chooses="what it sends"),
    ]
    error_feedback: Annotated[
        bool, Option(False, "parallel.error_feedback", xla_chooses="how it rounds")
    ]
    stochastic_rounding: Annotated[
        bool, Option(False, "parallel.stochastic_rounding", xla_chooses="how it rounds")
    ]
    axis_by_axis: Annotated[
        bool, Option(False, "parallel.axis_by_axis", xla_chooses="how it sends")
    ]
    norm_metrics: Annotated[bool, Option(False, "training.norm_metrics")]
    nonfinite: Annotated[Nonfinite, Option("ignore")]
    sync_collections: Annotated[Mapping[str, CollectionSync], Option({})]
    eval_dropout: Annotated[bool, Option(False)]
    remat: Annotated[Remat, Option("model")]
    compiler_options: Annotated[
        Mapping[str, Any], Option({}, expected="a dict of names and values")
    ]


PROGRAM_OPTIONS = option_table(ProgramOptions)
_Builder = TypeVar("_Builder", bound=Callable[..., Any])


def lists_options(own: OptionTable) -> Callable[[_Builder], _Builder]:
    """Returns a decorator that lists `PROGRAM_OPTIONS` and `own` in a builder's docstring."""
    return functools.partial(explain_options, table={**PROGRAM_OPTIONS, **own})


# The dtypes in which floating-point parameters are stored: (frozen parameters, trained parameters).
StoredDtypes = tuple[str | None, str | None]


def choose_formats(
    strategy: str,
    options: Mapping[str, Any],
    make_quantizer: Callable[[ReduceCode | GatherCode | None], GatherQuantizer | None],
) -> tuple[StoredDtypes, MixedPrecisionPolicy]:
    """Returns the dtypes in which parameters are stored, and the policy of their communication."""
    names: dict[str, str | None] = {}
    for field in ("param_dtype", "frozen_dtype", "gather_dtype", "reduce_dtype"):
        value = options[field]
        try:
            names[field] = None if value is None else str(jnp.dtype(value))
        except TypeError:
            names[field] = repr(value)  # JAX does not know this dtype, so it is refused below.
        if value is not None and names[field] not in WIRE_DTYPES:
            raise ValueError(
                f"{strategy}: {field}={value!r}, expected one of {WIRE_DTYPES} or None. (float16 "
                "would overflow: gradients are summed before they are divided.)"
            )
    for field in ("error_feedback", "stochastic_rounding"):
        if options[field] and not options["reduce_code"]:
            raise ValueError(
                f"{strategy}: {field}=True with no reduce_code, expected reduce_code='int8', "
                "'int4' or 'bfloat16'."
            )
    for option in PROGRAM_OPTIONS.values():
        got = names.get(option.name, options[option.name])
        if option.xla_chooses and got != option.default and options["mode"] != "manual":
            raise ValueError(
                f"{strategy}: {option.name}={got!r} with mode={options['mode']!r}, expected "
                f"{option.default!r}: XLA chooses {option.xla_chooses}. Use mode='manual'."
            )

    def format_of(way: str) -> Format:
        code = options[f"{way}_code"]
        return Format(names[f"{way}_dtype"], make_quantizer(code))

    comm = MixedPrecisionPolicy(format_of("gather"), format_of("reduce"), options["axis_by_axis"])
    return (names["frozen_dtype"] or names["param_dtype"], names["param_dtype"]), comm


@contextlib.contextmanager
def explain_dtypes(strategy: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Explains JAX's error about two floating-point dtypes if an option gives one of them.

    Other errors pass, also those about axes over which arrays vary, which name dtypes too.
    """
    try:
        yield
    except TypeError as error:
        said = str(error).strip()
        dtypes = set(_FLOATING.findall(said))
        if len(dtypes) < 2 or MISMATCH in said or said.startswith(f"{strategy}:"):
            raise
        values = {name: options[name] for name in STORED_OR_GATHERED}
        causes = [f"{key}={x!r}" for key, x in values.items() if x and str(jnp.dtype(x)) in dtypes]
        if not causes:
            raise
        raise TypeError(
            f"{strategy}: with {' and '.join(causes)} the model or the loss combines arrays of the "
            f"dtypes {' and '.join(sorted(dtypes))}, expected one. Layers without a dtype compute "
            "in the dtype of their parameters: give the model a dtype, or cast arrays that it adds "
            f"to activations to their dtype. (JAX says: {' '.join(said.split())})"
        ) from error
