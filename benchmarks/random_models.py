"""Small Linen models for `random_programs`, in plain flax."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

CLASSES, VOCABULARY, FEATURES = 6, 24, 12

_ACTIVATIONS: Mapping[str, Callable[..., jax.Array]] = {
    "relu": nn.relu,
    "gelu": nn.gelu,
    "tanh": jnp.tanh,
}


class _Layer(nn.Module):
    width: int
    act: str
    rate: float
    train: bool
    norm: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        h = nn.LayerNorm(name="norm")(x) if self.norm else x
        h = nn.Dense(self.width + 4, name="up")(h)
        h = nn.Dense(self.width, name="down")(_ACTIVATIONS[self.act](h))
        if self.rate:
            h = nn.Dropout(self.rate, deterministic=not self.train)(h)
        return x + h, None


class _Outer(nn.Module):
    """A layer that may be skipped, and that sows values."""

    args: tuple[Any, ...]
    sown: str
    drop: str
    branch: str
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, index: Any) -> tuple[jax.Array, None]:
        layer = _Layer(*self.args, name="layer")
        if not self.drop or self.is_initializing() or (self.drop == "random" and not self.train):
            after = layer(x, None)[0]
        else:
            after = self._maybe(layer, x, index)
        if self.sown:
            self._sow(after - x)
        return after, None

    def _maybe(self, layer: nn.Module, x: jax.Array, index: Any) -> Any:
        """Calls the layer, or skips it."""
        if self.drop == "random":
            is_kept: Any = jax.random.bernoulli(self.make_rng("dropout"), 0.6)
        else:
            is_kept = x[0].sum() > 0 if self.drop == "data" else index % 2 == 0
        skip, run = (lambda _, x: 0.9 * x), (lambda layer, x: layer(x, None)[0])
        if self.branch == "switch":
            return nn.switch(is_kept.astype(int), [skip, run], layer, x)
        if self.branch == "nested":
            # True for all finite numbers, because devices may have different first examples.
            inner = lambda layer, x: nn.cond(x[0, 0] > -jnp.inf, run, skip, layer, x)  # noqa: E731
            return nn.cond(is_kept, inner, skip, layer, x)
        return nn.cond(is_kept, run, skip, layer, x)

    def _sow(self, x: jax.Array) -> None:
        """Sows a value of each example and a mean, as flax does or by functions of its own."""
        each = jnp.square(x).mean(-1)
        how: dict[str, Any] = {}
        if self.sown != "tuple":
            how = {"init_fn": lambda: jnp.zeros(()), "reduce_fn": jnp.add}
            self.sow("aux", "each", 0.5 * x[:, 0], **how)
        if self.sown == "beside":
            calls = self.variable("aux", "calls", lambda: jnp.zeros((), jnp.int32))
            if not self.is_initializing():
                calls.value += 1
        self.sow("aux", "each", each, **how)
        self.sow("aux", "mean", each.mean(), **how)


class Mlp(nn.Module):
    """Residual layers, in a loop or a scan, with optional norms, dropout and annotations."""

    width: int = 8
    depth: int = 2
    act: str = "gelu"
    bias: bool = True
    norm: str = "layer"  # Or "none", "batch", "synced" (a batch norm over all devices).
    scan: bool = False
    remat: bool = False
    dropout: float = 0.0
    annotated: bool = False
    counts: bool = False
    penalty: bool = False
    odd: bool = False
    sown: str = ""  # What layers sow into "aux": "tuple", "reduced", "beside" (a variable there).
    drop: str = ""  # What decides that a layer is skipped: "random", "data" or its "index".
    branch: str = "cond"  # Or "switch", "nested".

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Returns logits."""
        kernel: Any = nn.initializers.lecun_normal()
        if self.annotated:
            kernel = nn.with_logical_partitioning(kernel, ("features", "hidden"))
        x = nn.Dense(self.width, use_bias=self.bias, kernel_init=kernel, name="first")(x)
        if self.norm in ("batch", "synced"):
            axis = "batch" if self.norm == "synced" else None
            x = nn.BatchNorm(use_running_average=not train, axis_name=axis, name="batch")(x)
        if self.odd:  # Adds a scalar, an unused parameter, and integers.
            x = x * self.param("gain", nn.initializers.ones, ())
            self.param("idle", nn.initializers.normal(), (5, 3))
            order = self.param("order", lambda _: jnp.arange(self.width)[::-1])
            x = x[:, order]
        if self.counts and not self.is_initializing():
            seen = self.variable("stats", "seen", jnp.zeros, ())
            largest = self.variable("stats", "largest", jnp.zeros, ())
            seen.value += x.shape[0]
            largest.value = jnp.maximum(largest.value, jnp.abs(x).max())
        elif self.counts:
            self.variable("stats", "seen", jnp.zeros, ())
            self.variable("stats", "largest", jnp.zeros, ())
        layer: Any = _Layer
        args: tuple[Any, ...] = (self.width, self.act, self.dropout, train, self.norm == "layer")
        if self.sown or self.drop:
            layer, args = _Outer, (args, self.sown, self.drop, self.branch, train)
        layer = nn.remat(layer) if self.remat else layer
        indices = jnp.arange(self.depth) if self.drop else [None] * self.depth
        if self.scan:
            axes: Any = {"params": 0, "aux": 0} if self.sown else {"params": 0}
            scanned = nn.scan(
                layer,
                variable_axes=axes,
                split_rngs={"params": True, "dropout": True},
                length=self.depth,
            )
            x, _ = scanned(*args, name="layers")(x, indices if self.drop else None)
        else:
            for i in range(self.depth):
                x, _ = layer(*args, name=f"layer_{i}")(x, indices[i])
        if self.penalty:
            self.sow("intermediates", "squares", jnp.square(x).mean(-1))
        return nn.Dense(CLASSES, name="head")(x)


class ConvNet(nn.Module):
    """Two convolutions, optionally normalised over the batch or over groups of channels."""

    channels: int = 8
    norm: str = "none"
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Returns logits."""
        for i, stride in enumerate((1, 2)):
            x = nn.Conv(self.channels, (3, 3), strides=stride, name=f"conv_{i}")(x)
            if self.norm in ("batch", "synced"):
                axis = "batch" if self.norm == "synced" else None
                x = nn.BatchNorm(use_running_average=not train, axis_name=axis)(x)
            elif self.norm == "group":
                x = nn.GroupNorm(num_groups=2)(x)
            x = nn.relu(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(x.mean((1, 2)))
        return nn.Dense(CLASSES, name="head")(x)


class _Block(nn.Module):
    heads: int
    rate: float
    bias: bool
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, mask: Any) -> tuple[jax.Array, None]:
        width = x.shape[-1]
        of_attention: Any = {"num_heads": self.heads, "use_bias": self.bias, "name": "attention"}
        x = x + nn.MultiHeadDotProductAttention(**of_attention)(nn.LayerNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(2 * width, use_bias=self.bias, name="up")(nn.LayerNorm()(x)))
        h = nn.Dense(width, use_bias=self.bias, name="down")(h)
        return x + nn.Dropout(self.rate, deterministic=not self.train)(h), None


class TextModel(nn.Module):
    """A causal language model with flax's own attention."""

    width: int = 16
    heads: int = 4
    depth: int = 2
    tied: bool = False
    bias: bool = True
    scan: bool = False
    remat: bool = False
    dropout: float = 0.0
    places: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        """Returns logits."""
        embed = nn.Embed(VOCABULARY, self.width, name="embed")
        x, mask = embed(tokens), nn.make_causal_mask(tokens)
        if self.places:
            x = x + self.param("places", nn.initializers.normal(), (1, *x.shape[1:]))
        block: Any = nn.remat(_Block) if self.remat else _Block
        args = self.heads, self.dropout, self.bias, train
        if self.scan:
            scanned = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=self.depth,
            )
            x, _ = scanned(*args, name="blocks")(x, mask)
        else:
            for i in range(self.depth):
                x, _ = block(*args, name=f"block_{i}")(x, mask)
        x = nn.LayerNorm(name="last")(x)
        return embed.attend(x) if self.tied else nn.Dense(VOCABULARY, name="head")(x)


class Recurrent(nn.Module):
    """A recurrent layer over a sequence of features, and a head on its last state."""

    cell: str = "lstm"
    width: int = 8

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Returns logits."""
        cells: Any = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "simple": nn.SimpleCell}
        out: Any = nn.RNN(cells[self.cell](self.width), name="rnn")(x)
        return nn.Dense(CLASSES, name="head")(out[:, -1])
