"""Models and losses that are blind to a context axis are refused by path; others are not."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from manualpar import (
    Batch,
    abstract_mesh,
    assert_same_as_one_device,
    data_parallel,
    fsdp,
    gather_examples,
    make_mesh,
)
from manualpar.checks import context_check
from manualpar.checks.context_check import (
    SequenceWalk,
    SplitValue,
    check_context,
    is_mean,
    power_of_sum,
)
from manualpar.core.mesh.axes import is_axis_bound
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.model.options import PROGRAM_OPTIONS, with_defaults
from manualpar.core.model.trace_model import trace_model
from manualpar.core.modes.manual import Manual
from manualpar.core.tracing.scopes import CONTEXT_SCOPE, SEQUENCE_SCOPE
from manualpar.layers import Context
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.flat_fields import nest_fields
from manualpar.models.transformer import Transformer

AXES = {"data": 2, "context": 4}
TOKENS = jax.ShapeDtypeStruct((8, 16), "int32")
BATCH = Batch(TOKENS, TOKENS, mask=jax.ShapeDtypeStruct((8, 16), "float32"))
ROLES = AxisRoles({0: ("data",), 1: ("context",)})


def check(model: Any, loss: Any = language_model_loss, axes: dict[str, int] | None = None) -> None:
    """Checks a model and a loss on devices that nobody has."""
    mode = Manual(abstract_mesh(axes or AXES, num_devices=8), ROLES.data_axes)
    studied = trace_model(
        "fsdp",
        model,
        loss,
        BATCH,
        batch_specs=ROLES.batch_specs(BATCH),
        mode=mode,
        stored_dtypes=(None, None),
        options=with_defaults({}, PROGRAM_OPTIONS),
        is_gathered=lambda info: False,
        is_reduced=lambda info: False,
        gathers_in_loss=False,
    )
    check_context("fsdp", studied, BATCH, ROLES)


class Net(nn.Module):
    """A model that treats every position by itself, and something in the middle."""

    between: Any = lambda x: x

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        embed = nn.Embed(32, 16, name="embed")
        x = embed(tokens)
        x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return embed.attend(self.between(x))


class Layers(nn.Module):
    """A scanned stack."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(module: nn.Module, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            y = nn.gelu(nn.Dense(16)(nn.RMSNorm()(x)))
            return x + nn.Dropout(0.1, deterministic=False)(y), None

        rngs = {"params": True, "dropout": True}
        scan = nn.scan(layer, {"params": 0}, split_rngs=rngs, length=3)
        return scan(self, x, None)[0]


def pooled(total: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    def call(x: jax.Array) -> jax.Array:
        # Outside of a shard_map a model is initialised.
        return x + (total(x.sum(1, keepdims=True)) / 16 if is_axis_bound("context") else 0 * x)

    return call


class Begins(nn.Module):
    """A loop that begins with a parameter, which varies over devices by its type as `x` does."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        begin = self.param("begin", nn.initializers.normal(), (16,))
        begin = jnp.broadcast_to(begin[None, None], x.shape)
        return jax.lax.fori_loop(0, 3, lambda _, total: total + x, begin)


class Adapts(nn.Module):
    """Adds a gradient with respect to a parameter, which each device computes of its positions."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shift = self.param("shift", nn.initializers.normal(), (16,))
        shift = jnp.broadcast_to(shift[None, None], x.shape)
        return x - 0.1 * jax.grad(lambda shift: jnp.square(x + shift).sum())(shift)


def turned(x: jax.Array) -> jax.Array:
    """Multiplies by a number and an angle, whose type varies over the context axis alone."""
    angles = jnp.sin(Context("context").positions(x.shape[1]).astype(jnp.float32))
    return x * (2 * angles)[None, :, None]


RIGHT = {
    "a position by itself": Net(),
    "scanned": Net(nn.remat(Layers)()),
    "pooled": Net(pooled(Context("context").total)),
    "synchronised statistics": Net(
        nn.BatchNorm(use_running_average=False, axis_name=("data", "context"))
    ),
    "a loop from a parameter": Net(Begins()),
    "a gradient with respect to a parameter": Net(Adapts()),
    "a kernel of one": Net(nn.Conv(16, (1,))),
    "a number times an angle": Net(turned),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_treats_positions_by_themselves_is_not_refused(name: str) -> None:
    check(RIGHT[name])


class Positions(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Embed(64, 16, name="table")(jnp.arange(x.shape[1])[None])


class DropPath(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jax.random.bernoulli(self.make_rng("dropout"), 0.9, (len(x), 1, 1))


BLIND = {
    "attention": (nn.MultiHeadDotProductAttention(4), "'Net/between' at .*both split.*Context"),
    "positions": (Positions(), r"'Net/between' at .*iota along dim 0.*Context\(axis\).positions"),
    "statistics": (nn.BatchNorm(use_running_average=False), "'Net/between' .*BatchNorm.*axis_name"),
}
MORE_BLIND = {
    "masked attention": (
        lambda x: nn.MultiHeadDotProductAttention(4)(x, mask=nn.make_causal_mask(x[..., 0])),
        "iota",
    ),
    "recurrence": (nn.RNN(nn.LSTMCell(16)), "'Net/between' .*loops over a split dim"),
    "causal convolution": (nn.Conv(16, (3,), padding="CAUSAL"), "'Net/between' .*pad"),
    "convolution": (nn.Conv(16, (3,)), "conv_general_dilated along dim 1"),
    "norm of groups": (nn.GroupNorm(4), "'Net/between' .*square to a mean over positions"),
    "statistics of some axes": (
        nn.BatchNorm(use_running_average=False, axis_name="data"),
        "square to a mean over positions",
    ),
    "pooled by half": (pooled(lambda x: x), "add to a part of a sum"),
    "pool": (lambda x: nn.avg_pool(x, (3,), padding="SAME"), "reduce_window_sum along dim 1"),
    "a path dropped": (DropPath(), "'Net/between' .*random numbers that positions share"),
    "dropped together": (
        lambda x: nn.Dropout(0.5, broadcast_dims=(1,), deterministic=False)(x),
        "random numbers that positions share",
    ),
    "attention in a stack": (
        lambda x: jax.checkpoint(jax.jit(lambda x: jax.nn.softmax(x @ x.mT) @ x))(x),
        "dot_general to an array .*both split",
    ),
}


@pytest.mark.parametrize("name", BLIND)
def test_what_mixes_positions_is_refused_by_its_module(name: str) -> None:
    between, expected = BLIND[name]
    with pytest.raises(ValueError, match=f"fsdp: with context_axis='context' module .*{expected}"):
        check(Net(between))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_BLIND)
def test_more_of_what_mixes_positions_is_refused(name: str) -> None:
    between, expected = MORE_BLIND[name]
    with pytest.raises(ValueError, match=f"fsdp: with context_axis='context' module .*{expected}"):
        check(Net(between))


class Evaluated(nn.Module):
    """A model that mixes positions in evaluation alone."""

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        logits = Net(name="net")(tokens, train)
        return logits if train else jnp.cumsum(logits, 1)


def test_evaluation_is_checked_too() -> None:
    with pytest.raises(ValueError, match="cumsum along dim 1"):
        check(Evaluated())


class Centred(nn.Module):
    """Subtracts a running average, which it updates with a statistic of the positions."""

    statistic: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        average = self.variable("batch_stats", "average", lambda: jnp.zeros(16))
        y = x - average.value[None, None]
        if not self.is_initializing() and self.is_mutable_collection("batch_stats"):
            average.value = 0.9 * average.value + 0.1 * self.statistic(x)
        return y


def updating(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
    rngs = {"dropout": rng}
    variables: Any = {"params": params}
    logits, _ = apply_fn(variables, batch.inputs, train=True, rngs=rngs, mutable=["batch_stats"])
    losses = cross_entropy(logits, batch.labels)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


def test_what_a_model_carries_is_an_average_of_positions() -> None:
    check(Net(Centred(lambda x: x.mean((0, 1)))), updating)
    with pytest.raises(ValueError, match=r"\['average'\] becomes a part of a sum|add to a part of"):
        check(Net(Centred(lambda x: x.sum((0, 1)))), updating)


class NNXNet(nnx.Module):
    """The same with NNX."""

    def __init__(self, between: Any = None, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.norm, self.dropout = nnx.LayerNorm(16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
        self.between = between(rngs) if between else None

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))
        return self.embed.attend(self.between(x) if self.between else x)


def nnx_loss(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
    logits = apply_fn({"params": params}, batch.inputs, rngs={"dropout": rng})
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


NNX_BLIND = {
    "attention": (
        lambda rngs: nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs),
        "at context_check_test.py:.*both split",
    ),
    "recurrence": (lambda rngs: nnx.RNN(nnx.GRUCell(16, 16, rngs=rngs)), "loops over"),
    "convolution": (
        lambda rngs: nnx.Conv(16, 16, (3,), padding="CAUSAL", rngs=rngs),
        "pad to an array",
    ),
    "norm of groups": (lambda rngs: nnx.GroupNorm(16, 4, rngs=rngs), "square to a mean over"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NNX_BLIND)
def test_nnx_models_that_mix_positions_are_refused(name: str) -> None:
    between, expected = NNX_BLIND[name]
    with pytest.raises(ValueError, match=f"with context_axis='context' .*{expected}"):
        check(lambda rngs: NNXNet(between, rngs=rngs), nnx_loss)


def test_an_nnx_model_of_positions_is_not_refused() -> None:
    check(lambda rngs: NNXNet(rngs=rngs), nnx_loss)


def loss_of(measure: Callable[[jax.Array, Batch], Any]) -> Any:
    def loss(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
        rngs = {"dropout": rng}
        return measure(apply_fn({"params": params}, batch.inputs, train=True, rngs=rngs), batch)

    return loss


cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def shifted(logits: jax.Array, batch: Batch) -> Any:
    losses = cross_entropy(logits[:, :-1], batch.inputs[:, 1:])
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


def summed(logits: jax.Array, batch: Batch) -> Any:
    losses = cross_entropy(logits, batch.labels)
    return losses.sum(), {"loss": (losses.sum(), losses.size)}


def other_count(logits: jax.Array, batch: Batch) -> Any:
    assert batch.mask is not None
    total, count = (cross_entropy(logits, batch.labels) * batch.mask).sum(), batch.mask.sum()
    return total / jnp.where(count > 0, count, 1), {"loss": (total, batch.labels.size)}


def counted_sequences(logits: jax.Array, batch: Batch) -> Any:
    losses = cross_entropy(logits, batch.labels)
    right = (logits.argmax(-1) == batch.labels).sum()
    return losses.mean(), {"loss": (losses.sum(), losses.size), "right": (right, len(logits))}


def coupled(logits: jax.Array, batch: Batch) -> Any:
    losses = cross_entropy(*gather_examples((logits, batch.labels)))
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


WRONG_LOSSES = {
    "shifts labels": (shifted, r"the loss at .*slice to an array.*labels.*in the batch"),
    "a sum": (summed, "the loss is a part of a sum .* expected sum / count"),
    "another count": (
        other_count,
        "the loss is a mean .* expected sum / count, where count is the count of",
    ),
    "sequences": (counted_sequences, r"metrics\['right'\] is the pair of a part of a sum"),
    "coupled": (coupled, r"sends by all_gather over 'context'.* gather_examples\(x, axis_name="),
}


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_losses_that_devices_cannot_add_up_are_refused(name: str) -> None:
    measure, expected = WRONG_LOSSES[name]
    with pytest.raises(ValueError, match=f"fsdp: with context_axis='context' .*{expected}"):
        check(Net(), loss_of(measure))


def right_loss(logits: jax.Array, batch: Batch) -> Any:
    """Sums of masked losses, means over the devices, penalties."""
    assert batch.mask is not None
    losses = cross_entropy(logits.reshape(-1, 32), batch.labels.reshape(-1))
    mask = batch.mask.reshape(-1)
    total, count = jnp.vdot(losses, mask), mask.sum()
    penalty = jax.lax.pmean(jnp.square(logits).mean(), ("data", "context")) ** 2
    right = logits.argmax(-1) == batch.labels
    metrics = {"loss": (total, count), "penalty": (penalty, 1), "right": (right.mean(), 1)}
    return total / jnp.where(count > 0, count, 1) + 0.1 * penalty, metrics


def test_a_loss_of_sums_is_not_refused() -> None:
    check(Net(), loss_of(right_loss))
    check(Net(), loss_of(shifted), {"data": 8, "context": 1})  # Every device has all positions.


def transformer(**fields: Any) -> Transformer:
    sizes = {"vocab_size": 32, "num_layers": 2, "hidden_size": 32, "num_heads": 4, "mlp_size": 64}
    return Transformer(
        **nest_fields({**sizes, "context_axis": "context", "bos_token": 1, **fields})
    )


SPLIT = {"split_axis": "model", "vocab_multiple": 2, "sequence_parallel": True}


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["ring", "ulysses", "gather"])
@pytest.mark.parametrize(
    "fields",
    [
        {"dropout_rate": 0.1, "remat": "dots", "tied_head": True, "dtype": "bfloat16"},
        {"scan_layers": False, "num_kv_heads": 2},
        {**SPLIT},
        {**SPLIT, "overlap": "ring", "num_kv_heads": 1},
    ],
)
def test_the_transformer_knows_of_the_axis(attention: Any, fields: Any) -> None:
    axes = {"data": 2, "context": 2, "model": 2}
    check(transformer(context_attention=attention, **fields), axes=axes)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["", "context_", "data"])
def test_a_transformer_that_knows_of_another_axis_is_refused(axis: str) -> None:
    message = r"is split over \['data'\]" if axis == "data" else "iota along dim 0"
    with pytest.raises(ValueError, match=f"module 'Transformer' .*{message}"):
        check(transformer(context_axis=axis))


def test_what_is_right_for_reasons_of_its_own_says_so() -> None:
    def by_hand(x: jax.Array) -> jax.Array:
        with jax.named_scope("context_parallel"):
            return jnp.fft.ifft(jnp.fft.fft(x, axis=1), axis=1).real

    check(Net(by_hand))


def test_a_program_is_checked() -> None:
    mesh = abstract_mesh(AXES, num_devices=8)
    options: Any = {"mesh": mesh, "batch": BATCH, "context_axis": "context"}
    with pytest.raises(ValueError, match=r"data_parallel: .* 'Net/between' at .*_test.py:\d+ "):
        data_parallel(
            Net(nn.MultiHeadDotProductAttention(4)), optax.sgd(1.0), language_model_loss, **options
        )


def test_leaves_that_are_no_sequences_are_refused() -> None:
    mesh = abstract_mesh(AXES, num_devices=8)

    def build(labels: Any) -> None:
        batch = Batch(TOKENS, jax.ShapeDtypeStruct(labels, "int32"))
        options: Any = {"mesh": mesh, "batch": batch, "context_axis": "context"}
        data_parallel(Net(), optax.sgd(1.0), language_model_loss, **options)

    with pytest.raises(ValueError, match=r"labels has shape \(8,\), but context_axis='context'"):
        build((8,))
    with pytest.raises(ValueError, match=r"labels has 12, expected|different numbers of entries"):
        build((8, 12))


# -------------------------------------------------------------------------------------------------
# What is right on some positions of a sequence, and what is not, by operation.


DEVICES = 4
KEY = jax.random.key(0)
TABLE = np.arange(64.0, dtype=np.float32).reshape(32, 2) / 64


def walk(function: Callable[..., Any]) -> list[SplitValue]:
    """What a function of `x` `[2, S, 2]`, `mask` `[2, S]` and a device's key returns."""

    def with_own_key(x: jax.Array, mask: jax.Array, key: jax.Array) -> Any:
        return function(x, mask, jax.random.fold_in(key, jax.lax.axis_index("context")))

    def traced(length: int, devices: int) -> Any:
        shapes = [((2, length, 2), "float32"), ((2, length), "int32")]
        args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        key = jax.eval_shape(lambda: jax.random.key(0))
        axes = [("context", devices), ("data", 2)]
        return jax.make_jaxpr(with_own_key, axis_env=axes)(*args, key)

    mends = context_check._MENDS
    found = SequenceWalk("context", DEVICES, mends, "fsdp:").outputs(
        traced(16 // DEVICES, DEVICES), traced(16, 1)
    )
    return [value for value, _ in found]


def total(x: jax.Array) -> jax.Array:
    with jax.named_scope(CONTEXT_SCOPE):
        return jax.lax.psum(x, "context")


def convolved(x: jax.Array, size: int) -> jax.Array:
    names = ("NWC", "WIO", "NWC")
    kernel = jnp.ones((size, 2, 2))
    return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=names)


def flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, 2)


WALK_SPLIT = {
    "elementwise": lambda x, m, k: jax.nn.gelu(x) * jnp.where(x > 0, x, jnp.zeros_like(x)) - 1,
    "norm of features": lambda x, m, k: x / jnp.linalg.norm(x, axis=-1, keepdims=True),
    "product": lambda x, m, k: jnp.einsum("bsd,de->bse", x, jnp.ones((2, 3))),
    "all tokens in one dim": lambda x, m, k: jnp.tanh(flat(x) @ jnp.ones((2, 2)) + 1).reshape(
        x.shape
    ),
    "constants of one dim": lambda x, m, k: flat(x) + jnp.zeros(len(flat(x)))[:, None],
    "positions first": lambda x, m, k: x.swapaxes(0, 1).swapaxes(0, 1),
    "heads": lambda x, m, k: jax.nn.softmax(x.reshape(*x.shape[:2], 2, 1), -1),
    "rows of a table": lambda x, m, k: jnp.asarray(TABLE)[m],
    "rows of a device": lambda x, m, k: jnp.take_along_axis(x, m[..., None], -1),
    "one of some": lambda x, m, k: jax.nn.one_hot(m, 5),
    "chosen features": lambda x, m, k: jax.lax.top_k(x, 1)[0] + x.argmax(-1, keepdims=True),
    "layers": lambda x, m, k: jax.lax.scan(lambda c, _: (jnp.tanh(c), None), x, None, length=3)[0],
    "stacked": lambda x, m, k: jax.lax.scan(lambda c, _: (c, 2 * c), x, None, length=3)[1],
    "a kernel of one": lambda x, m, k: convolved(x, 1),
    "each position": lambda x, m, k: jax.vmap(jax.vmap(jnp.cumsum))(x),
    "recomputed": lambda x, m, k: jax.checkpoint(jax.jit(jax.nn.relu))(x),
    "the same noise everywhere": lambda x, m, k: x + jax.random.normal(KEY, (1, 1, 2)),
    "noise": lambda x, m, k: x + jax.random.normal(jax.random.split(k)[0], x.shape),
    "tiled": lambda x, m, k: jnp.tile(
        jnp.stack([x, x], 1).reshape(2, 2, *x.shape[1:]), (1, 1, 1, 2)
    ),
    "a branch": lambda x, m, k: jax.lax.cond(jnp.ones(()) > 0, jnp.sin, jnp.cos, x),
    "a loop": lambda x, m, k: jax.lax.fori_loop(0, 3, lambda i, x: x / 2 + i, x),
    "nothing is used": lambda x, m, k: (jnp.arange(x.shape[1]), x)[1],
}


@pytest.mark.parametrize("name", WALK_SPLIT)
def test_what_treats_each_position_by_itself_is_right(name: str) -> None:
    (value,) = walk(WALK_SPLIT[name])
    assert (value.kind, value.power, value.count) == ("split", 0, None)


def attended(x: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(*[x.reshape(*x.shape[:2], 1, 2)] * 3).reshape(x.shape)


OF_POSITIONS = r"Context\(axis\).positions\(length\)"
TO_ATTENTION = r"attention of manualpar.layers.Context\(axis\)"
WRONG = {
    "attention": (lambda x, m, k: attended(x), f"are both split.*{TO_ATTENTION}"),
    "linear attention": (
        lambda x, m, k: x @ jnp.einsum("bsd,bse->bde", x, x),
        "dot_general to a part",
    ),
    "other positions": (
        lambda x, m, k: jnp.einsum("bsd,st->btd", x, jnp.ones((x.shape[1],) * 2)),
        "both split",
    ),
    "convolution": (lambda x, m, k: convolved(x, 3), "conv_general_dilated along dim 1"),
    "repeated": (lambda x, m, k: jnp.tile(x, (1, 2, 1)), "tile along dim 1"),
    "pooling": (
        lambda x, m, k: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 3, 1), (1, 1, 1), "SAME"),
        TO_ATTENTION,
    ),
    "cumsum": (
        lambda x, m, k: jnp.cumsum(x, 1),
        f"cumsum along dim 1 of an array .*{OF_POSITIONS}",
    ),
    "scanned": (lambda x, m, k: jax.lax.associative_scan(jnp.add, x, axis=1), "slice along dim 1"),
    "recurrence": (
        lambda x, m, k: jax.lax.scan(lambda h, y: (h + y, h), jnp.ones((2, 2)), x.swapaxes(0, 1))[
            1
        ],
        "loops over a split dim",
    ),
    "a number for each position": (
        lambda x, m, k: jax.lax.fori_loop(0, x.shape[1], lambda i, x: x * 0.9, x),
        "loops over a split dim",
    ),
    "mean": (
        lambda x, m, k: x - x.mean(1, keepdims=True),
        r"sub to .* mean over positions.*\.total",
    ),
    "statistics": (lambda x, m, k: x / x.std(), "square to .* mean over positions|sub to"),
    "norm": (lambda x, m, k: x / jnp.sqrt((x**2).sum()), "sqrt to a part of a sum over positions"),
    "of a mean": (lambda x, m, k: jnp.tanh(x.mean()), "tanh to a mean over positions"),
    "softmax": (lambda x, m, k: jax.nn.softmax(x, 1), "reduce_max along dim 1"),
    "maximum": (lambda x, m, k: x.max(1), "reduce_max along dim 1"),
    "arange": (
        lambda x, m, k: x + jnp.arange(x.shape[1])[None, :, None],
        f"iota along dim 0.*{OF_POSITIONS}",
    ),
    "constants of numpy": (
        lambda x, m, k: x + TABLE[: x.shape[1]][None],
        "a constant that depends on the size",
    ),
    "first rows": (lambda x, m, k: x + jnp.asarray(TABLE)[: x.shape[1]][None], "slice along dim 0"),
    "a matrix of positions": (lambda x, m, k: jnp.tril(jnp.ones((x.shape[1],) * 2)), "both split"),
    "scaled": (lambda x, m, k: x * x.shape[1] ** -0.5, "constant that depends on the size"),
    "share": (lambda x, m, k: jnp.exp(x / x.shape[1]), "exp to a number that depends on how many"),
    "rolled": (lambda x, m, k: jnp.roll(x, 1, 1), "slice along dim 1"),
    "turned": (lambda x, m, k: x[:, ::-1], "rev along dim 1"),
    "shifted": (
        lambda x, m, k: x[:, 1:],
        r"slice to an array \[2, 3, 2\] in the place of \[2, 15, 2\]",
    ),
    "padded": (lambda x, m, k: jnp.pad(x, ((0, 0), (1, 0), (0, 0))), "pad to an array"),
    "one more": (lambda x, m, k: jnp.concatenate([x[:, :1] * 0, x], 1), "slice along dim 1"),
    "sorted": (lambda x, m, k: jnp.sort(x, 1), "sort along dim 1"),
    "first": (lambda x, m, k: x + x[:, :1], "slice along dim 1"),
    "picked": (lambda x, m, k: x[:, jnp.array([2, 3])], "depends on how many positions"),
    "set": (
        lambda x, m, k: x.at[:, 0].set(0),
        r"scatter to a split array.*named_scope\('context_parallel'\)",
    ),
    "unstacked": (lambda x, m, k: sum(jnp.unstack(x, axis=1)), "unstack"),
    "fft": (lambda x, m, k: jnp.fft.fft(x, axis=1).real, "fft to a split array. It is not known"),
    "pairs": (lambda x, m, k: x.reshape(2, -1, 2, 2).sum(2), "by reshape. Keep all positions in"),
    "one order and another": (
        lambda x, m, k: flat(x) + flat(x.swapaxes(0, 1)),
        "add to positions in different orders",
    ),
    "shared noise": (
        lambda x, m, k: x * jax.random.normal(k, (2, 1, 2)),
        "random numbers that positions share",
    ),
    "same noise": (
        lambda x, m, k: x + jax.random.normal(jax.random.key(0), x.shape),
        "the same random numbers",
    ),
    "index": (
        lambda x, m, k: x + jax.lax.axis_index("context"),
        "add to a device's own index or key and to a split array",
    ),
    "by index": (
        lambda x, m, k: jnp.where(jax.lax.axis_index("context") > 0, 1.0, 2.0),
        "select_n to a device's own index",
    ),
    "gathered by hand": (
        lambda x, m, k: jax.lax.all_gather(x, "context"),
        "sends by all_gather over 'context'",
    ),
    "sum of the same": (lambda x, m, k: jnp.exp(total(jnp.ones(()))), "exp to a number"),
    "sum of a constant": (lambda x, m, k: jnp.exp(total(jnp.float32(2))), "exp to a number"),
    "sum of a quotient": (lambda x, m, k: total(x.sum() / m.sum()), "sums a mean over a device's"),
    "layers over the axis": (
        lambda x, m, k: jax.named_scope(SEQUENCE_SCOPE)(jax.lax.all_gather)(x, "context"),
        "splits layers over 'context'",
    ),
    "another axis": (
        lambda x, m, k: jax.named_scope(CONTEXT_SCOPE)(jax.lax.psum)(x, "data"),
        r"is split over \['data'\] in Context.* that context_axis names",
    ),
    "a part of a sum in Context": (
        lambda x, m, k: jax.named_scope(CONTEXT_SCOPE)(jnp.exp)(x.sum()),
        "gives a part of a sum over positions",
    ),
    "sum of means": (
        lambda x, m, k: jnp.tanh(jax.lax.psum(x.mean(), "context")),
        "depends on how many",
    ),
    "sum of positions": (lambda x, m, k: jax.lax.psum(x, "context"), "sums a split array over"),
    "a branch": (
        lambda x, m, k: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
        "decides by .* in a cond",
    ),
    "a loop": (
        lambda x, m, k: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: 2 * x, x),
        "lt to a part of a sum",
    ),
    "in a loop": (
        lambda x, m, k: jax.lax.scan(lambda c, _: (c * c, None), x.sum(), None, 2)[0],
        "mul to a part",
    ),
    "later in a loop": (
        lambda x, m, k: jax.lax.scan(lambda c, _: (c * c + x.sum(), None), 0.0, None, 2)[0],
        "mul to a part",
    ),
    "another program": (
        lambda x, m, k: jnp.sin(x) if x.shape[1] < 9 else jnp.cos(x),
        "sin to shards and cos to",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_mixes_positions_is_refused(name: str) -> None:
    function, expected = WRONG[name]
    with pytest.raises(ValueError, match=f"fsdp: the loss.*{expected}"):
        walk(function)


def where(count: jax.Array) -> jax.Array:
    return jnp.where(count > 0, count, 1)


def test_sums_and_means_over_positions_are_told_apart() -> None:
    def function(x: jax.Array, mask: jax.Array, key: jax.Array) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(x, mask)
        one, other = losses.sum(), losses.reshape(-1) @ mask.reshape(-1).astype(float)
        total, _ = jax.lax.scan(lambda c, _: (c + losses.sum(), None), 0.0, None, length=2)
        return one, other + total, -2 * one / 3, losses.mean(), losses.mean(1).mean(), losses.size

    found = [(value.kind, value.power) for value in walk(function)]
    assert found == [("sum", 0)] * 3 + [("sum", 1)] * 2 + [("same", -1)]


def test_a_sum_over_the_devices_is_the_same_everywhere() -> None:
    def function(x: jax.Array, mask: jax.Array, key: jax.Array) -> Any:
        is_part = x.shape[1] < 16
        mean = jax.lax.pmean(x.mean(1, keepdims=True), "context")
        return jnp.exp(total(x.sum()) if is_part else x.sum()), jnp.tanh(x - mean)

    assert [value.kind for value in walk(function)] == ["same", "split"]


MEANS = {
    "guarded": lambda x, m: (x * m).sum() / where(m.sum()),
    "as one sum": lambda x, m: (x * (m / where(m.sum()))).sum(),
    "at least 1": lambda x, m: (x * m).sum() / jnp.maximum(m.sum(), 1),
    "of weights": lambda x, m: (x * m).sum() / jnp.maximum(1.0, (m * 0.5).sum()),
    "at least a little": lambda x, m: (x * m).sum() / jnp.clip(m.sum(), min=1e-6),
    "a little more": lambda x, m: (x * m).sum() / (m.sum() + 1e-8),
    "or one": lambda x, m: (x * m).sum() * (1 / (m.sum() + (m.sum() == 0))),
    "with jnp.mean": lambda x, m: x.mean(where=m > 0),
    "with jnp.average": lambda x, m: jnp.average(x, weights=m),
    "zero": lambda x, m: jnp.where(m.sum() == 0, 0.0, (x * m).sum() / where(m.sum())),
    "of two means": lambda x, m: x.mean() / m.mean(),
    "and a penalty": lambda x, m: (x * m).sum() / where(m.sum()) + 3.0,
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_valid_positions_knows_its_count(name: str) -> None:
    def function(x: jax.Array, mask: jax.Array, key: jax.Array) -> Any:
        mask = (mask > 0).astype("float32")
        return MEANS[name](x.sum(-1), mask)

    (mean,) = walk(function)
    assert (mean.kind, mean.power, mean.count is None) == ("sum", 0, False)


COUNTS = {
    "again": lambda m: m.sum(),
    "cast": lambda m: m.astype("float32").sum(),
    "of each sequence": lambda m: m.sum(-1).sum(),
    "of one dim": lambda m: m.reshape(-1).sum(),
    "of another order": lambda m: m.T.sum(1).sum(),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_mean_times_its_count_is_a_sum_again(name: str) -> None:
    def function(x: jax.Array, mask: jax.Array, key: jax.Array) -> Any:
        return x.sum() / where(mask.sum()) * COUNTS[name](mask)

    assert [(value.kind, value.count) for value in walk(function)] == [("sum", None)]


def test_a_mean_times_another_count_is_refused() -> None:
    for count in (
        lambda m: m[:, :, None].sum(1).max(),
        lambda m: (m * m).sum(),
        lambda m: m[0].sum(),
    ):
        with pytest.raises(ValueError, match=r"(mul|reduce_max) to a .*(sum|mean) over"):
            walk(lambda x, mask, key, count=count: x.sum() / where(mask.sum()) * count(mask))


def ints(x: jax.Array) -> jax.Array:
    return x.astype("int32")


NO_MEANS = {
    "one more": (lambda x, m: x.sum() / (m.sum() + 1), "add to a part of a sum"),
    "a little less": (lambda x, m: x.sum() / (m.sum() - 1e-8), "sub to a part of a sum"),
    "at least 0": (lambda x, m: x.sum() / jnp.maximum(m.sum(), 0), "max to a part of a sum"),
    "or one of another": (
        lambda x, m: x.sum() / (m.sum() + ((2 * m).sum() == 0)),
        "add to a part of a sum .* and to a count",
    ),
    "of rounded weights": (
        lambda x, m: x.sum() / where(x.sum()) * ints(x).sum(),
        "mul to .* mean over a device's valid|mul to a part",
    ),
    "a rounded sum": (lambda x, m: ints(x.sum()), "convert_element_type to a part of a sum"),
    "at least 2": (lambda x, m: x.sum() / jnp.maximum(m.sum(), 2), "max to a part of a sum"),
    "of another count": (
        lambda x, m: x.sum() / jnp.where(m.sum() > 0, (2 * m).sum(), 1),
        "select_n to a count",
    ),
    "or all positions": (
        lambda x, m: x.sum() / jnp.where(m.sum() > 0, m.sum(), m.shape[1]),
        "select_n to a count",
    ),
    "the wrong way": (
        lambda x, m: x.sum() / jnp.where(m.sum() > 0, 1, m.sum()),
        "select_n to a count",
    ),
    "of rounded counts": (lambda x, m: x.sum() / ints(where(x.sum())), "to a count of a device's"),
    "of several counts": (
        lambda x, m: x.sum() / where(m.sum(1)).sum(),
        "reduce_sum to a count of a device's positions",
    ),
    "of each sequence": (lambda x, m: (x.sum(1) / where(m.sum(1))).mean(), "to a count of a"),
    "of two counts": (
        lambda x, m: x.sum() / where(m.sum()) + x.sum() / where((m * m * 2).sum()),
        "add to a mean over a device's valid positions and to",
    ),
    "exp": (lambda x, m: jnp.exp(x.sum() / where(m.sum())), "exp to a mean over a device's valid"),
}


@pytest.mark.parametrize("name", NO_MEANS)
def test_other_quotients_are_refused(name: str) -> None:
    function, expected = NO_MEANS[name]
    with pytest.raises(ValueError, match=expected):
        walk(lambda x, mask, key: function(x.sum(-1), mask))


@pytest.mark.slow
@pytest.mark.parametrize(
    "guarded",
    [
        lambda count: jnp.maximum(count, 1),
        lambda count: count + 1e-8,
        lambda count: jnp.clip(count, min=1e-6),
        where,
    ],
)
@pytest.mark.parametrize("axes", [{"data": 2, "context": 4}, {"data": 8}])
def test_a_part_without_a_token_counts_for_nothing(devices8, axes, guarded) -> None:
    def loss(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
        logits = apply_fn({"params": params}, batch.inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        total, count = (losses * batch.mask).sum(), batch.mask.sum()
        return total / guarded(count), {"loss": (total, count)}

    tokens = jax.random.randint(jax.random.key(1), (8, 16), 0, 8)
    mask = jnp.ones((8, 16)).at[:, 5:].set(0.0).at[2].set(0.0)  # And of a device's one sequence.
    batch = Batch(tokens, jnp.roll(tokens, 1, 1), mask)
    options = {"context_axis": "context"} if "context" in axes else {}
    model = nn.Sequential([nn.Embed(8, 16), nn.tanh, nn.Dense(8)])
    options = {"mesh": make_mesh(axes), "batch": batch, "min_weight_size": 8, **options}
    program = fsdp(model, optax.sgd(1.0), loss, **options)
    assert_same_as_one_device(program, batch, jax.random.key(0))


# -------------------------------------------------------------------------------------------------
# Which results a step may put together from devices with other positions.


SIZE = SplitValue("same", -1)  # How many positions a device has.
EXAMPLES = SplitValue("same")  # How many sequences.
VALID = SplitValue("sum")  # How many positions are valid; its number is 7.
TOTAL = SplitValue("sum")
EQUAL_MEAN = SplitValue("sum", 1)
VALID_MEAN = SplitValue("sum", count=7)


@pytest.mark.parametrize("count", [SIZE, EXAMPLES, VALID, SplitValue("zero")])
def test_what_is_the_same_everywhere_is_its_own_mean(count: SplitValue) -> None:
    assert is_mean(SplitValue("same"), count, 7)
    assert is_mean(SplitValue("zero"), count, 7)
    assert not is_mean(SIZE, count, 7)
    assert not is_mean(TOTAL, count, 7)
    assert not is_mean(SplitValue("device"), count, 7)


def test_a_mean_over_equally_many_positions_needs_equal_counts() -> None:
    assert is_mean(EQUAL_MEAN, SIZE, 7)
    assert is_mean(EQUAL_MEAN, EXAMPLES, 7)
    assert not is_mean(EQUAL_MEAN, VALID, 7)


def test_a_mean_over_valid_positions_needs_its_own_count() -> None:
    assert is_mean(VALID_MEAN, VALID, 7)
    assert not is_mean(VALID_MEAN, VALID, 8)
    assert not is_mean(SplitValue("sum", 1, count=7), VALID, 7)
    assert not is_mean(SplitValue("same", count=7), VALID, 7)


def test_a_metric_and_its_count_are_added_up_alike() -> None:
    assert power_of_sum(TOTAL) == power_of_sum(VALID) == power_of_sum(SIZE) == 0
    assert power_of_sum(EQUAL_MEAN) == power_of_sum(EXAMPLES) == 1
    assert power_of_sum(VALID_MEAN) is None
    assert power_of_sum(SplitValue("device")) is None
