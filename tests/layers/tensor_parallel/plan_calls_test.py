"""Models that say how many heads they have, in the form of transformers' Flax models."""

import dataclasses
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from manualpar import (
    Column,
    PerDevice,
    Row,
    Vocab,
    abstract_mesh,
    assert_same_as_one_device,
    data_parallel,
    fsdp,
    make_mesh,
    tensor_parallel,
)
from manualpar.layers.tensor_parallel.plan_calls import local_sizes
from tests.layers.tensor_parallel.language import VOCAB, loss_fn, make_batch

random = nn.initializers.normal(0.3)


@dataclasses.dataclass(frozen=True)
class Config:
    """The names of transformers."""

    hidden_size: int = 48
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    intermediate_size: int = 32
    scan: bool = False
    remat: bool = False


def dense(features: int, **options: Any) -> nn.Dense:
    return nn.Dense(features, kernel_init=random, bias_init=random, **options)


class BertSelfAttention(nn.Module):
    """Reads the number of heads from its config when it is called."""

    config: Config

    def setup(self) -> None:
        self.head_dim = self.config.hidden_size // self.config.num_attention_heads
        self.query = dense(self.config.hidden_size)
        self.key = dense(self.config.hidden_size)
        self.value = dense(self.config.hidden_size)
        self.output = dense(self.config.hidden_size)

    def _split_heads(self, x: jax.Array) -> jax.Array:
        return x.reshape((*x.shape[:2], self.config.num_attention_heads, self.head_dim))

    def __call__(self, x_BSD: jax.Array, mask: jax.Array) -> jax.Array:
        q, k, v = (self._split_heads(f(x_BSD)) for f in (self.query, self.key, self.value))
        bias = jnp.where(mask, 0.0, -1e9)
        weights = nn.dot_product_attention_weights(q, k, bias=bias)
        y = jnp.einsum("...hqk,...khd->...qhd", weights, v)
        return self.output(y.reshape((*y.shape[:2], -1)))


class Conv1D(nn.Module):
    """A dense layer that transposes its kernel."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", random, (self.features, x.shape[-1]))
        bias = self.param("bias", random, (self.features,))
        return (
            jax.lax.dot_general(x, kernel.T, (((x.ndim - 1,), (0,)), ((), ()))) + bias[None, None]
        )


class GPT2Attention(nn.Module):
    """Makes query, key and value by one product."""

    config: Config

    def setup(self) -> None:
        self.embed_dim = self.config.hidden_size
        self.num_heads = self.config.num_attention_heads
        self.head_dim = self.embed_dim // self.num_heads
        self.c_attn = Conv1D(3 * self.embed_dim)
        self.c_proj = Conv1D(self.embed_dim)

    def __call__(self, x_BSD: jax.Array, mask: jax.Array) -> jax.Array:
        q, k, v = self.parts(self.c_attn(x_BSD))
        y = nn.dot_product_attention(q, k, v, mask=mask)
        return self.c_proj(y.reshape((*y.shape[:2], self.embed_dim)))

    def parts(self, qkv: jax.Array) -> list[jax.Array]:
        shape = (*qkv.shape[:2], self.num_heads, self.head_dim)
        return [x.reshape(shape) for x in jnp.split(qkv, 3, axis=2)]


class NeoXAttention(GPT2Attention):
    """Makes query, key and value of a head, one head after the other."""

    def parts(self, qkv: jax.Array) -> list[jax.Array]:
        x = qkv.reshape((*qkv.shape[:2], self.num_heads, 3 * self.head_dim))
        return jnp.split(x, 3, axis=-1)


class LlamaAttention(nn.Module):
    """Repeats key heads by a number that it has computed in setup."""

    config: Config

    def setup(self) -> None:
        config = self.config
        self.embed_dim = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.head_dim = self.embed_dim // self.num_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.q_proj = dense(self.num_heads * self.head_dim)
        self.k_proj = dense(self.num_key_value_heads * self.head_dim)
        self.v_proj = dense(self.num_key_value_heads * self.head_dim)
        self.o_proj = dense(self.embed_dim)

    def _split_heads(self, x: jax.Array, num_heads: int) -> jax.Array:
        return x.reshape((*x.shape[:2], num_heads, self.head_dim))

    def __call__(self, x_BSD: jax.Array, mask: jax.Array) -> jax.Array:
        q = self._split_heads(self.q_proj(x_BSD), self.num_heads)
        k = self._split_heads(self.k_proj(x_BSD), self.num_key_value_heads)
        v = self._split_heads(self.v_proj(x_BSD), self.num_key_value_heads)
        k, v = (jnp.repeat(x, self.num_key_value_groups, axis=2) for x in (k, v))
        y = nn.dot_product_attention(q, k, v, mask=mask)
        return self.o_proj(y.reshape((*y.shape[:2], self.embed_dim)))


class CompactAttention(nn.Module):
    """Has fields, and makes its layers of them where it is called."""

    num_heads: int
    features: int

    @nn.compact
    def __call__(self, x_BSD: jax.Array, mask: jax.Array) -> jax.Array:
        head_dim = x_BSD.shape[-1] // self.num_heads
        general = nn.DenseGeneral((self.num_heads, head_dim), bias_init=random, name="query")
        k, v = (dense(self.features, name=name)(x_BSD) for name in ("key", "value"))
        k, v = (x.reshape(*x.shape[:2], self.num_heads, head_dim) for x in (k, v))
        y = nn.dot_product_attention(general(x_BSD), k, v, mask=mask)
        y = y.reshape(*y.shape[:2], self.num_heads * head_dim)
        return nn.remat(nn.Dense)(self.num_heads * head_dim, bias_init=random, name="out")(y)


class Block(nn.Module):
    """A layer of attention and MLP."""

    kind: str
    config: Config

    @nn.compact
    def __call__(self, x_BSD: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        config = self.config
        if self.kind == "Compact":
            attention: Any = CompactAttention(16, config.hidden_size, name="attention")
        else:
            attention = KINDS[self.kind](config, name="attention")
        x_BSD = x_BSD + attention(nn.LayerNorm(name="norm")(x_BSD), mask)
        if self.kind == "GPT2":
            up, down = (Conv1D(n, name=f"c_{n}") for n in (64, 48))
            return x_BSD + down(nn.gelu(up(x_BSD))), None
        return x_BSD, None


KINDS = {
    "Bert": BertSelfAttention,
    "GPT2": GPT2Attention,
    "NeoX": NeoXAttention,
    "Llama": LlamaAttention,
}


class Model(nn.Module):
    """A language model."""

    kind: str
    config: Config = Config()

    @nn.compact
    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        x_BSD = nn.Embed(VOCAB, self.config.hidden_size, name="embed")(tokens_BS)
        mask = nn.make_causal_mask(tokens_BS)
        block: Any = nn.remat(Block) if self.config.remat else Block
        if self.config.scan:
            options: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            block = nn.scan(block, in_axes=nn.broadcast, length=2, **options)
            x_BSD, _ = block(self.kind, self.config, name="h")(x_BSD, mask)
        else:
            for index in range(2):
                x_BSD, _ = block(self.kind, self.config, name=f"h_{index}")(x_BSD, mask)
        return dense(VOCAB, name="head")(nn.LayerNorm(name="last_norm")(x_BSD))


AROUND = {"embed": Vocab(), "head": Column()}
TRANSPOSED = Column(-2, bias_dim=-1)
PLANS: Any = {
    "Bert": {
        "*/query": Column(),
        "*/key": Column(),
        "*/value": Column(),
        "*/output": Row(),
        "h*/attention": PerDevice("config.num_attention_heads"),
    },
    "GPT2": {"*/c_64": TRANSPOSED, "*/c_48": Row(-1)},
    "NeoX": {
        "*/c_attn": TRANSPOSED,
        "*/c_proj": Row(-1),
        "h*/attention": PerDevice("num_heads", "embed_dim"),
    },
    "Llama": {
        "*/[qkv]_proj": Column(),
        "*/o_proj": Row(),
        "h*/attention": PerDevice("num_heads", "num_key_value_heads", "embed_dim"),
    },
    "Compact": {
        "*/query": Column(-2),
        "*/key": Column(),
        "*/value": Column(),
        "*/out": Row(),
        "h*/attention": PerDevice("num_heads"),
    },
}
D24, D42 = {"data": 2, "model": 4}, {"data": 4, "model": 2}


ALL = {"scan": True, "remat": True}
CASES: dict[tuple[str, str], Any] = {
    ("Bert", "plain"): (D24, False, {}),
    ("Bert", "sequence scan remat"): (D42, True, ALL),
    ("GPT2", "plain"): (D24, False, {}),
    ("NeoX", "scan"): (D42, False, {"scan": True}),
    ("NeoX", "sequence remat"): (D24, True, {"remat": True}),
    ("Llama", "sequence"): (D24, True, {}),
    ("Llama", "scan remat"): (D42, False, ALL),
    ("Compact", "sequence scan"): (D42, True, {"scan": True}),
    ("Compact", "remat"): (D24, False, {"remat": True}),
}
FAST = ("Llama", "sequence")


@pytest.mark.parametrize(
    "case", [case if case == FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_model_that_says_how_many_heads_it_has_is_that_of_one_device(
    devices8: list[jax.Device], case: tuple[str, str]
) -> None:
    del devices8
    axes, sequence, changes = CASES[case]
    plan, batch = {**AROUND, **PLANS[case[0]]}, make_batch()
    model = tensor_parallel(Model(case[0], Config(**changes)), plan, sequence=sequence)
    options: Any = {"mesh": make_mesh(axes), "batch": batch, "min_weight_size": 16}
    program = fsdp(model, optax.sgd(1.0), loss_fn, **options)
    assert_same_as_one_device(program, batch, jax.random.key(0))


def refused(kind: str, expected: str, change: Any, **fields: Any) -> tuple[Any, ...]:
    plan = {key: style for key, style in {**PLANS[kind], **change}.items() if style is not None}
    return Model(kind, Config(**fields)), {**AROUND, **plan}, expected


KEYS_WHOLE = {"*/[qkv]_proj": None, "*/q_proj": Column()}
HEADS = "num_heads", "num_key_value_heads"
AT = "h*/attention"
REFUSED = {
    "no style, from the config": refused(
        "Bert",
        r"'h_0/attention' .* cannot reshape .*style PerDevice\('config.num_attention_heads'\), by",
        {AT: None},
    ),
    "no style, from setup": refused("Llama", r"the style PerDevice\('num_heads'\), by", {AT: None}),
    "heads merged to what is whole": refused(
        "Llama",
        r"Name in PerDevice the other numbers, such as 'embed_dim'",
        {AT: PerDevice(*HEADS)},
    ),
    "one product for all": refused("GPT2", "applies split along dim 2 of ", PLANS["NeoX"]),
    "heads do not divide": refused(
        "Bert",
        "num_attention_heads is 2, expected a multiple of the 4 devices",
        {},
        num_attention_heads=2,
    ),
    "key heads do not divide": refused(
        "Llama",
        "num_key_value_heads is 2, expected a multiple",
        {},
        num_attention_heads=12,
        num_key_value_heads=2,
    ),
    "key heads whole": refused(
        "Llama", "q, k, v num_heads must match", {**KEYS_WHOLE, AT: PerDevice("num_heads")}
    ),
    "groups for key heads": refused(
        "Llama",
        "h_0/attention' .*reshape along dim 3 of",
        {**KEYS_WHOLE, AT: PerDevice("num_heads", "embed_dim", "num_key_value_groups")},
        num_key_value_heads=4,
    ),
    "no such number": refused(
        "Bert",
        "no number num_heads, .* such as head_dim, config.hidden_size",
        {AT: PerDevice("num_heads")},
    ),
    "no number": refused("Bert", "no number query, expected", {AT: PerDevice("query")}),
    "no such module": refused(
        "Bert", r"'h\*/attn' .* matches no module, .*'h_1/attention'", {"h*/attn": PerDevice("x")}
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_do_not_fit_are_refused(name: str) -> None:
    model, plan, expected = REFUSED[name]
    mesh = abstract_mesh(D24, num_devices=8)
    with pytest.raises(ValueError, match=expected):
        data_parallel(
            tensor_parallel(model, plan), optax.sgd(1.0), loss_fn, mesh=mesh, batch=make_batch()
        )


def test_a_share_is_taken_back() -> None:
    attention = CompactAttention(8, 16)
    style = PerDevice("num_heads", "features")
    with local_sizes("here", attention, style, 4):
        heads = attention.num_heads
        with local_sizes("here", attention, style, 4):  # A method that another one calls.
            assert attention.num_heads == 2
        assert (heads, 16 // heads, 16 / heads, 17 % heads, attention.features) == (2, 2, 2, 1, 4)
        share: Any = 3 * (heads * 3)
        assert (share, share.whole) == (18, 72)
    assert type(attention.num_heads) is int
    with pytest.raises(RuntimeError):
        raise_within(local_sizes("here", attention, style, 4))
    assert attention == CompactAttention(8, 16)


def test_names_that_cannot_be_given_are_refused() -> None:
    with pytest.raises(ValueError, match=r"names=\(\), expected names"):
        PerDevice()
    fixed: Any = Fixed()
    with pytest.raises(ValueError, match="cannot be set in a copy of a Fixed"):
        raise_within(local_sizes("here", BertSelfAttention(fixed), PerDevice("config.heads"), 4))


def raise_within(context: AbstractContextManager[None]) -> None:
    with context:
        raise RuntimeError


class Fixed:
    """A config that computes what it is asked for."""

    def __getattr__(self, name: str) -> int:
        if name.startswith("_"):
            raise AttributeError(name)
        return 8

    def __setattr__(self, name: str, value: Any) -> None:
        del name, value
