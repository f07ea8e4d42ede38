"""The table of programs that the laws are tested with: strategies, options and meshes.

A row is a strategy with options on a mesh. `laws_test` tests the same laws for every row, so a new
option needs one row here. Laws of only some rows have their own tests in this folder.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from manualpar import Batch, Pipeline, Program, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.models import Context, Transformer
from manualpar.models.cross_entropy import language_model_loss
from tests.tiny import Classifier, keep_gradients, loss_fn, make_batch

BUILDERS: Mapping[str, Callable[..., Program]] = {
    "dp": data_parallel,
    "zero": zero,
    "fsdp": fsdp,
    "hsdp": hsdp,
}


class Normed(nn.Module):
    """A model with a batch norm, whose statistics are means over the axis called `batch`."""

    axis_name: str | None = "batch"

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(32, name="input_dense")(x)
        x = nn.BatchNorm(use_running_average=not train, axis_name=self.axis_name)(x)
        return nn.Dense(5, name="output_dense")(nn.tanh(x))


class Named(nn.Module):
    """A model whose kernel has logical names."""

    @nn.compact
    def __call__(self, x, train):
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
        return nn.Dense(5)(nn.tanh(nn.Dense(32, kernel_init=init)(x)))


def normed_loss(params, apply_fn, batch, rng):
    """Computes the loss of `Normed`; the program keeps its running statistics."""

    def apply(variables, *args, **kwargs):
        return apply_fn(variables, *args, mutable=["batch_stats"], **kwargs)[0]

    return loss_fn(params, apply, batch, rng)


MASK = np.random.default_rng(7).random(64) < 0.7
ROWS = make_batch(mask=MASK.astype(np.float32))
TOKENS = np.random.default_rng(0).integers(0, 32, (16, 9), dtype=np.int32)
TEXT = Batch(TOKENS[:, :-1], TOKENS[:, 1:])
LAYERS = {"vocab_size": 32, "num_layers": 2, "hidden_size": 16, "mlp_size": 32, "num_heads": 2}
# A model, its loss and its batch, by the model's name.
MODELS: Mapping[str, tuple[nn.Module, Callable[..., Any], Batch]] = {
    "classifier": (Classifier(), loss_fn, ROWS),
    "normed": (Normed(), normed_loss, dataclasses.replace(ROWS, mask=None)),
    "named": (Named(), loss_fn, ROWS),
    "transformer": (Transformer(**LAYERS), language_model_loss, TEXT),
    "split sequences": (
        Transformer(**LAYERS, context=Context("context")),
        language_model_loss,
        TEXT,
    ),
}
# Options that only mode `manual` has. In the other modes XLA decides what they would set.
MANUAL_ONLY = frozenset(
    {
        "axis_by_axis",
        "error_feedback",
        "gather_code",
        "pipeline",
        "reduce_code",
        "reduce_dtype",
        "regather_axes",
        "replica_mean",
        "stochastic_rounding",
    }
)
# The allowed error of a gradient, divided by the largest entry of its array. In float32 devices add
# in another order. bfloat16 has 8 bits, and rounds in the forward pass and in each sum.
# Quantization to 8 (4) bits changes a number by up to half of 1/127 (1/7) of its block's largest
# number, on each device.
FLOAT32, BFLOAT16, INT8, INT4 = 2e-5, 0.04, 0.05, 0.6


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
      name: The strategy, a key of `BUILDERS`.
      mesh: The sizes of the mesh axes.
      options: The options of the builder.
      model: The model, a key of `MODELS`.
      tolerance: The allowed error of a gradient, divided by the largest entry of its array.
      slow: Whether its tests are slow ones, because a row with more options stands for it.
    """

    name: str
    mesh: Mapping[str, int]
    options: Mapping[str, Any]
    model: str = "classifier"
    tolerance: float = FLOAT32
    slow: bool = False

    def __str__(self) -> str:
        words = [f"{key}={getattr(x, '__name__', x)}" for key, x in self.options.items()]
        return "-".join([self.name, *(f"{axis}{n}" for axis, n in self.mesh.items()), *words])

    def build(self, **more: Any) -> Program:
        """Builds the program with `keep_gradients`: the optimizer's state is the last gradient."""
        model, loss, batch = MODELS[self.model]
        options = {} if self.name == "dp" else {"min_weight_size": 16}
        return BUILDERS[self.name](
            model,
            keep_gradients(),
            loss,
            mesh=make_mesh(self.mesh),
            batch=batch,
            **(options | dict(self.options) | more),
        )

    @property
    def batch(self) -> Batch:
        """The batch with which the program is built."""
        return MODELS[self.model][2]

    @property
    def state_type(self) -> tuple[Any, ...]:
        """If two cases have equal types, their programs can adopt each other's states."""
        stored = ("trainable", "param_dtype", "frozen_dtype")
        return MODELS[self.model][0].__class__, *map(self.options.get, stored)


def init_args(batch: Batch) -> tuple[tuple[Any], dict[str, Any]]:
    """Returns the arguments with which a classifier is initialised."""
    return (batch.inputs,), {"train": False}


DATA, TWO, GROUPS = {"data": 8}, {"a": 4, "b": 2}, {"replica": 2, "data": 4}
BOTH = {"axis_name": ("a", "b")}
INSIDE = {"replica_mean": "backward"}
HEAD = {"trainable": ("output_dense/*",)}
CASES = (
    Case("dp", DATA, {}),
    Case("dp", {"data": 1}, {"num_minibatches": 4}, slow=True),
    Case("dp", {"a": 2, "b": 4}, {**BOTH, "num_minibatches": 2, "use_scan": True}),
    Case("dp", DATA, {"init_args": init_args, "norm_metrics": True}),
    Case("dp", DATA, {"nonfinite": "skip", "eval_dropout": True, "remat": "auto"}),
    Case("dp", DATA, {"reduce_code": "int8"}, tolerance=INT8),
    Case("dp", DATA, {"reduce_code": "int4", "error_feedback": True}, tolerance=INT4),
    Case("dp", DATA, {"axis_aliases": {"batch": "data"}}, "normed"),
    Case(
        "dp",
        DATA,
        {"axis_aliases": {"batch": "data"}, "sync_collections": {"batch_stats": "max"}},
        "normed",
    ),
    Case("dp", TWO, {**BOTH, "axis_by_axis": True, "gather_dtype": "bfloat16"}, tolerance=BFLOAT16),
    Case("zero", DATA, {"stage": 1}, slow=True),
    Case("zero", {"a": 2, "b": 4}, {**BOTH, "stage": 2, "num_minibatches": 2, "pad": True}),
    Case("zero", TWO, {**BOTH, "stage": 1, "axis_by_axis": True}),
    Case("zero", DATA, {"stage": 2, "replicate": ("output_dense",)}),
    Case("zero", DATA, {"stage": 1, **HEAD}),
    Case("zero", DATA, {"gather_dtype": "bfloat16"}, tolerance=BFLOAT16),
    Case("fsdp", DATA, {}, slow=True),
    Case("fsdp", DATA, {"num_minibatches": 2, "use_scan": True, "pad": True}),
    Case("fsdp", DATA, {"reshard_after_forward": False, "nonfinite": "report"}),
    Case("fsdp", DATA, {"communicate_every": "step", "num_minibatches": 2}),
    Case("fsdp", DATA, {"communicate_every": "gather-step", "num_minibatches": 2}),
    Case("fsdp", DATA, {"keep_gathered": ("output_dense", "input_dense/kernel")}),
    Case("fsdp", DATA, {"compiler_options": {"xla_cpu_enable_fast_math": False}}),
    Case("fsdp", {"b": 2, "a": 4}, {"axis_name": ("a", "b")}, slow=True),
    Case("fsdp", {"data": 4, "others": 2}, {"num_minibatches": 2}),
    Case("fsdp", TWO, {**BOTH, "axis_by_axis": True, "pad": True}),
    Case("fsdp", {"a": 1, "b": 8}, {**BOTH, "axis_by_axis": True}, slow=True),
    Case(
        "fsdp",
        {"a": 2, "b": 4},
        {
            **BOTH,
            "axis_by_axis": True,
            "communicate_every": "gather-step",
            "keep_gathered": ("output_dense", "input_dense/kernel"),
            "num_minibatches": 2,
            "pad": True,
        },
    ),
    Case("fsdp", TWO, {**BOTH, "regather_axes": ("a",)}, slow=True),
    Case("fsdp", {"a": 8, "b": 1}, {**BOTH, "regather_axes": ("a",), "reduce_dtype": "float32"}),
    Case("fsdp", {"a": 2, "b": 4}, {**BOTH, "regather_axes": ("a",), "num_minibatches": 2}),
    Case("fsdp", DATA, {**HEAD, "frozen_dtype": "bfloat16"}, tolerance=BFLOAT16),
    Case("fsdp", DATA, {"param_dtype": "bfloat16"}, tolerance=BFLOAT16),
    Case("fsdp", DATA, {"gather_dtype": "bfloat16"}, tolerance=BFLOAT16, slow=True),
    Case(
        "fsdp",
        DATA,
        {"gather_dtype": "bfloat16", "reduce_dtype": "float32"},
        tolerance=BFLOAT16,
    ),
    Case("fsdp", DATA, {"gather_code": "int8"}, tolerance=INT8),
    Case("fsdp", DATA, {"reduce_code": "int8", "stochastic_rounding": True}, tolerance=2 * INT8),
    Case("fsdp", DATA, {"reduce_code": "bfloat16", "num_minibatches": 2}, tolerance=BFLOAT16),
    Case(
        "fsdp",
        DATA,
        {"reduce_code": "bfloat16", "gather_dtype": "bfloat16", "stochastic_rounding": True},
        tolerance=BFLOAT16,
        slow=True,
    ),
    Case("fsdp", {"data": 4, "model": 2}, {"rules": (("in", None), ("out", "model"))}, "named"),
    Case("fsdp", {"data": 4, "context": 2}, {"context_axis": "context"}, "split sequences"),
    Case(
        "fsdp",
        {"data": 4, "stage": 2},
        {"pipeline": Pipeline(), "num_minibatches": 2},
        "transformer",
    ),
    Case("hsdp", GROUPS, {}, slow=True),
    Case("hsdp", {"replica": 4, "data": 2}, {"num_minibatches": 2, "pad": True}),
    Case("hsdp", {"replica": 1, "data": 8}, {"num_minibatches": 4, "use_scan": True}),
    Case("hsdp", {"node": 8, "data": 1}, {"replica_axis": "node"}, slow=True),
    Case("hsdp", {"replica": 2, "a": 2, "b": 2}, {**BOTH, "axis_by_axis": True}),
    Case("hsdp", GROUPS, INSIDE, slow=True),
    Case("hsdp", {"replica": 4, "data": 2}, {**INSIDE, "num_minibatches": 2, "pad": True}),
    Case(
        "hsdp",
        {"replica": 1, "data": 8},
        {**INSIDE, "num_minibatches": 4, "use_scan": True},
        slow=True,
    ),
    Case("hsdp", {"node": 8, "data": 1}, {**INSIDE, "replica_axis": "node", **HEAD}, slow=True),
    Case(
        "hsdp",
        {"pod": 2, "replica": 2, "a": 2, "b": 1},
        {**INSIDE, **BOTH, "replica_axis": ("pod", "replica"), "reshard_after_forward": False},
    ),
    Case(
        "hsdp",
        {"replica": 2, "a": 2, "b": 2},
        {**INSIDE, **BOTH, "axis_by_axis": True, "regather_axes": ("a",), "nonfinite": "skip"},
    ),
    Case("hsdp", GROUPS, {**INSIDE, "keep_gathered": ("output_dense",), "use_scan": True}),
    Case(
        "hsdp",
        {"replica": 2, "data": 2, "model": 2},
        {**INSIDE, "rules": (("in", None), ("out", "model"))},
        "named",
        slow=True,
    ),
    Case(
        "hsdp",
        {"replica": 2, "data": 2, "context": 2},
        {**INSIDE, "context_axis": "context"},
        "split sequences",
        slow=True,
    ),
    Case(
        "hsdp",
        GROUPS,
        {**INSIDE, "reduce_code": "int8", "stochastic_rounding": True},
        tolerance=2 * INT8,
        slow=True,
    ),
    Case(
        "hsdp",
        GROUPS,
        {**INSIDE, "gather_dtype": "bfloat16", "gather_code": "int8"},
        tolerance=INT8,
        slow=True,
    ),
    Case("hsdp", GROUPS, {"reduce_code": "int8", "error_feedback": True}, tolerance=INT8),
    Case(
        "hsdp",
        GROUPS,
        {"gather_dtype": "bfloat16", "reduce_dtype": "float32"},
        tolerance=BFLOAT16,
    ),
)


@functools.cache
def one_device(model: str, gather_dtype: str | None) -> Callable[[Any, Any], Any]:
    """Returns a function `(params, collections) -> (loss, gradient)` by flax on one device."""
    module, loss, batch = MODELS[model]
    module = {"split sequences": Transformer(**LAYERS), "normed": Normed(axis_name=None)}.get(
        model, module
    )

    def mean_loss(params: Any, collections: Any) -> jax.Array:
        if gather_dtype:
            params = jax.tree.map(lambda x: x.astype(gather_dtype), params)

        def apply_fn(variables: Any, *args: Any, mutable: Any = False, **kwargs: Any) -> Any:
            return module.apply({**collections, **variables}, *args, mutable=mutable, **kwargs)

        return loss(params, apply_fn, batch, jax.random.key(0))[0].astype(jnp.float32)

    return jax.jit(jax.value_and_grad(mean_loss))
