"""What a planned model computes wrongly on shards is refused by its path; what is right is not."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import Batch, Column, Row, Vocab, abstract_mesh, data_parallel, tensor_parallel
from manualpar.core.parameters.annotations import SplitParameter
from manualpar.layers import MoE, SplitDense, enter
from manualpar.layers.tensor_parallel.plan import TensorParallelInterface
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.flat_fields import nest_fields

PLAN = {"embed": Vocab(), "up": Column(), "down": Row()}


class Net(nn.Module):
    """Two products with something between them, and something before."""

    between: Any = nn.relu
    before: Any = lambda x, tokens: x

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(16, 8, name="embed")
        x = self.before(embed(tokens), tokens)
        y = self.between(nn.Dense(32, name="up")(x))
        return embed.attend(x + nn.Dense(8, name="down")(y))


def check(model: nn.Module, sequence: bool = False) -> None:
    """Traces a checked call on devices that nobody has."""
    planned = TensorParallelInterface.wrap(tensor_parallel(model, PLAN, sequence=sequence))
    assert planned is not None
    interface = dataclasses.replace(planned, is_checked=True)
    tokens = jax.ShapeDtypeStruct((4, 8), "int32")
    boxed = jax.eval_shape(lambda: interface.init(jax.random.key(0), jnp.zeros((4, 8), int)))

    def is_split(x: Any) -> bool:
        return isinstance(x, SplitParameter)

    specs = jax.tree.map(lambda x: P(*x.names) if is_split(x) else P(), boxed, is_leaf=is_split)

    def call(variables: Any, tokens: jax.Array, key: jax.Array) -> None:
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        interface.apply(variables, tokens, rngs={"dropout": key, "noise": key})

    mesh = abstract_mesh({"data": 2, "model": 4}, num_devices=8)
    run = jax.shard_map(call, mesh=mesh, in_specs=(specs, P("data"), P()), out_specs=P())
    jax.eval_shape(run, nn.unbox(boxed), tokens, jax.eval_shape(lambda: jax.random.key(0)))


def heads(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:2], -1, 4)


def flat(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:2], -1)


class Noise(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.random.normal(self.make_rng("noise"), x.shape)


RIGHT = {
    "elementwise": lambda x: nn.gelu(x) * nn.silu(x) + jnp.where(x > 0, x, jnp.zeros_like(x)),
    "heads": lambda x: flat(jax.nn.dot_product_attention(heads(x), heads(x), heads(x))),
    "norm of a head": lambda x: flat(nn.LayerNorm()(heads(x))),
    "softmax over tokens": lambda x: nn.softmax(x, axis=1),
    "a loop over tokens": lambda x: jax.lax.scan(
        lambda c, y: (c + y, c), jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1)
    )[1].swapaxes(0, 1),
    "other tokens": lambda x: jnp.roll(x[:, ::-1], 1, 1) + jnp.cumsum(x, 1)[:, jnp.arange(8)],
    "dropout": nn.Dropout(0.5, deterministic=False),
    "recomputed": jax.checkpoint(jax.jit(nn.relu)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_on_shards_is_not_refused(name: str) -> None:
    check(Net(RIGHT[name]))


ARRAY = r"of an array \[2, 8, 32\]"
WRONG = {
    "norm": (nn.LayerNorm(use_scale=False, use_bias=False), "/between' .*reduce_sum along dim 2"),
    "mean": (lambda x: x - x.mean(-1, keepdims=True), f"reduce_sum along dim 2 {ARRAY}"),
    "softmax": (nn.softmax, f"reduce_max along dim 2 {ARRAY}.* put it behind a Row"),
    "recomputed": (jax.checkpoint(jax.jit(nn.softmax)), "reduce_max along dim 2"),
    "argmax": (lambda x: x * x.argmax(-1, keepdims=True), "argmax along dim 2"),
    "sorted": (lambda x: jnp.sort(x), "sort along dim 2"),
    "summed up": (lambda x: jnp.cumsum(x, -1), "cumsum along dim 2"),
    "turned": (lambda x: x[..., ::-1], "rev along dim 2"),
    "shifted": (lambda x: jnp.roll(x, 1, -1), "slice along dim 2"),
    "halves": (lambda x: jnp.tile(nn.glu(x), 2), "split along dim 2 .*parts"),
    "features before heads": (
        lambda x: flat(x.reshape(*x.shape[:2], 4, -1) ** 2),
        r"reshape along dim 2 .* It makes \[2, 8, 4, 8\] .*reshape\(..., -1, head_size\)",
    ),
    "pairs": (lambda x: (x[..., None] * x[..., None, :]).sum(-1), r"dims \[2, 3\] are both split"),
    "product": (lambda x: x * (x @ x.swapaxes(1, 2)).sum(-1, keepdims=True), "dot_general along"),
    "positions": (
        lambda x: x * jnp.arange(x.shape[-1], dtype=x.dtype)[None, None],
        "iota along dim 0",
    ),
    "constant": (lambda x: x * np.ones((1, 1, x.shape[-1]), x.dtype), "mul with a constant"),
    "size": (
        lambda x: x / np.float32(x.shape[-1]),
        "div with a constant that is computed from the size",
    ),
    "picked": (lambda x: x + x[..., jnp.zeros(1, int)], "add with a constant"),
    "noise": (Noise(), "draws random numbers for a split array.* nn.Dropout"),
    "unknown": (lambda x: jnp.fft.fft(x).real, "fft to a split array. This check does not know"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_on_shards_is_refused_by_its_module(name: str) -> None:
    between, expected = WRONG[name]
    with pytest.raises(ValueError, match=f"on shards along 'model' module 'Net.*{expected}"):
        check(Net(between))


TABLE = np.ones((1, 16, 8), np.float32)
OF_A_SEQUENCE = {
    "positions": (lambda x, tokens: x + TABLE[:, : x.shape[1]], "add with a constant"),
    "sliced": (lambda x, tokens: x + jnp.asarray(TABLE)[:, : x.shape[1]], "slice along dim 1"),
    "pooled": (lambda x, tokens: x - x.mean(1, keepdims=True), "reduce_sum along dim 1"),
    "attended": (
        lambda x, tokens: jax.nn.dot_product_attention(*[heads(x)] * 3).reshape(x.shape),
        r"dims \[3, 4\] are both split|dims \[2, 4\]|both split",
    ),
    "a mask of all": (
        lambda x, tokens: jnp.where(jnp.ones((1, 8, 1), bool), x, 0),
        r"Incompatible shapes for broadcasting: .*\. With sequence=True modules",
    ),
    "a quarter": (
        lambda x, tokens: x + 8 % (x.shape[1] // 4),
        "cannot compute with what the plan splits: .*zero. With sequence=True modules",
    ),
    "first token": (lambda x, tokens: x + x[:, :1], "slice along dim 1"),
}


@pytest.mark.parametrize("name", OF_A_SEQUENCE)
def test_between_layers_a_sequence_is_split(name: str) -> None:
    before, expected = OF_A_SEQUENCE[name]
    check(Net(before=before))
    with pytest.raises(ValueError, match=f"module 'Net.*{expected}"):
        check(Net(before=before), sequence=True)


def experts(x: jax.Array, tokens: jax.Array) -> jax.Array:
    del tokens
    options: Any = {"num_experts": 4, "mlp_size": 8, "axis": None, "num_shared": 1}
    return x + nn.remat(MoE)(**options, model_axis="model", sequence=True)(x)


def dense(x: jax.Array, tokens: jax.Array) -> jax.Array:
    del tokens
    y = SplitDense((8, 16), (None, "model"))(enter(x, "model", 1))
    return x + SplitDense((16, 8), ("model", None), sequence_dim=1)(y)


def test_layers_that_split_sequences_themselves_are_compared_or_refused() -> None:
    check(Net(before=experts), sequence=True)
    with pytest.raises(ValueError, match=r"fails: enter: x of shape (?s:.*)pass verify=False"):
        check(Net(before=dense), sequence=True)


@pytest.mark.slow
def test_attention_over_a_context_axis_is_not_refused() -> None:
    batch = Batch(*(jax.ShapeDtypeStruct((8, 8), "int32") for _ in range(2)))
    fields: Any = {"vocab_size": 16, "num_layers": 1, "hidden_size": 16, "mlp_size": 32}
    context: Any = {"context_axis": "context", "context_attention": "gather"}
    model = Transformer(**nest_fields({**fields, **context}), num_heads=8)
    columns = dict.fromkeys(["*/query", "*/key", "*/value"], Column(-2))
    planned = tensor_parallel(model, {**columns, "*/out": Row(-3)})
    mesh = abstract_mesh({"data": 2, "context": 2, "model": 2}, num_devices=8)
    options: Any = {"mesh": mesh, "batch": batch, "context_axis": "context"}
    data_parallel(planned, optax.sgd(1.0), language_model_loss, **options)


class Product(nn.Module):
    """A dense layer of somebody's own, and something behind its product."""

    behind: Any
    features: int = 8

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        kernel = self.param("kernel", init, (32 if self.features == 8 else 8, self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return self.behind(jnp.einsum("bsd,df->bsf", x, kernel) * 2 + bias[None, None])


class OwnNet(nn.Module):
    up: Any = lambda x: x
    down: Any = lambda x: x

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(16, 8, name="embed")
        y = nn.relu(Product(self.up, 32, name="up")(embed(tokens)))
        return embed.attend(Product(self.down, name="down")(y))


def test_modules_of_the_plan_that_are_no_layers_of_flax_are_looked_into() -> None:
    check(OwnNet())
    check(OwnNet(up=nn.gelu), sequence=True)
    with pytest.raises(ValueError, match=r"'OwnNet/up' .*reduce_max along dim 2"):
        check(OwnNet(up=nn.softmax))
    for wrong in (nn.relu, jax.checkpoint(jnp.tanh), lambda x: x * x):
        with pytest.raises(ValueError, match=r"'OwnNet/down' .* a term of a sum.* only a product"):
            check(OwnNet(down=wrong))


def test_a_program_checks_a_plan_unless_told_not_to() -> None:
    def build(**options: Any) -> None:
        batch = Batch(*(jax.ShapeDtypeStruct((8, 8), "int32") for _ in range(2)))
        mesh = abstract_mesh({"data": 2, "model": 4}, num_devices=8)
        planned = tensor_parallel(Net(nn.softmax), {"up": Column(), "down": Row()}, **options)
        data_parallel(planned, optax.sgd(1.0), loss_fn, mesh=mesh, batch=batch)

    def loss_fn(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
        del rng
        logits = apply_fn({"params": params}, batch.inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        return losses.mean(), {"loss": (losses.sum(), losses.size)}

    with pytest.raises(ValueError, match=r"at plan_check_test.py:\d+ .*verify=False"):
        build()
    build(verify=False)
