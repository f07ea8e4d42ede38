"""Models and losses that are blind to a context axis are refused by path; others are not."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from manualpar import Batch, abstract_mesh, data_parallel, gather_examples
from manualpar.checks.context_check import check_context
from manualpar.core.mesh.axes import is_axis_bound
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.model.options import PROGRAM_OPTIONS, with_defaults
from manualpar.core.model.trace_model import trace_model
from manualpar.core.modes.manual import Manual
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
