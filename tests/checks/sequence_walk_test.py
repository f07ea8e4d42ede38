"""What is right on some positions of a sequence, and what is not, by operation."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import Batch, assert_same_as_one_device, fsdp, make_mesh
from manualpar.checks import context_check
from manualpar.checks.context_check import SequenceWalk, SplitValue
from manualpar.core.tracing.scopes import CONTEXT_SCOPE, SEQUENCE_SCOPE

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


SPLIT = {
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


@pytest.mark.parametrize("name", SPLIT)
def test_what_treats_each_position_by_itself_is_right(name: str) -> None:
    (value,) = walk(SPLIT[name])
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
