"""Small models for `random_programs`, in plain flax, and what one device needs to run them.

`make_model` returns a model as builders take it, wrapped by plans, int8 bases and adapters as a
description says, and `Plain`: the same model without any of that, with functions that turn the
program's parameters into its own. Nothing of the package computes in `Plain`, but for `Transformer`,
which is a plain Linen module outside of a mesh.
"""

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from manualpar import Column, Row, Vocab, lora, quantized, tensor_parallel
from manualpar.models.transformer import Transformer

CLASSES, VOCABULARY, FEATURES = 6, 24, 12
Tree = Any

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


class Mlp(nn.Module):
    """Residual layers, in a loop or a scan, with norms, dropout and rules as asked for."""

    width: int = 8
    depth: int = 2
    act: str = "gelu"
    bias: bool = True
    norm: str = "layer"  # Or "none", "batch", "synced".
    scan: bool = False
    remat: bool = False
    dropout: float = 0.0
    annotated: bool = False
    counts: bool = False
    penalty: bool = False
    odd: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Returns logits."""
        kernel = nn.initializers.lecun_normal()
        if self.annotated:
            kernel = nn.with_logical_partitioning(kernel, ("features", "hidden"))
        x = nn.Dense(self.width, use_bias=self.bias, kernel_init=kernel, name="first")(x)
        if self.norm in ("batch", "synced"):
            axis = "batch" if self.norm == "synced" else None
            x = nn.BatchNorm(use_running_average=not train, axis_name=axis, name="batch")(x)
        if self.odd:  # A scalar, one that nothing reads, and integers.
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
        layer: Any = nn.remat(_Layer) if self.remat else _Layer
        args = self.width, self.act, self.dropout, train, self.norm == "layer"
        if self.scan:
            scanned = nn.scan(
                layer,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=self.depth,
            )
            x, _ = scanned(*args, name="layers")(x, None)
        else:
            for i in range(self.depth):
                x, _ = layer(*args, name=f"layer_{i}")(x, None)
        if self.penalty:
            self.sow("intermediates", "squares", jnp.square(x).mean(-1))
        return nn.Dense(CLASSES, name="head")(x)


class ConvNet(nn.Module):
    """Two convolutions, with statistics of the batch or of groups of channels."""

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
    """A causal language model of flax's own attention."""

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
    """A recurrent layer over features, and a head on what it ends with."""

    cell: str = "lstm"
    width: int = 8

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Returns logits."""
        cells: Any = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "simple": nn.SimpleCell}
        x = nn.RNN(cells[self.cell](self.width), name="rnn")(x)
        return nn.Dense(CLASSES, name="head")(x[:, -1])


class _XLayer(nnx.Module):
    def __init__(self, width: int, rate: float, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, width + 4, rngs=rngs)
        self.down = nnx.Linear(width + 4, width, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


class XMlp(nnx.Module):
    """NNX: residual layers, a list or a scan of them."""

    def __init__(
        self,
        width: int = 8,
        depth: int = 2,
        norm: str = "none",
        scan: bool = False,
        dropout: float = 0.0,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.first = nnx.Linear(FEATURES, width, rngs=rngs)
        axis = "batch" if norm == "synced" else None
        self.norm = norm
        if norm != "none":
            self.batch = nnx.BatchNorm(width, axis_name=axis, rngs=rngs)
        self.scan = scan
        if scan:

            @nnx.split_rngs(splits=depth)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def make(rngs: nnx.Rngs) -> _XLayer:
                return _XLayer(width, dropout, rngs=rngs)

            self.layers = make(rngs)
        else:
            self.layers = nnx.List([_XLayer(width, dropout, rngs=rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits."""
        x = self.first(x)
        if self.norm != "none":
            x = self.batch(x)
        if self.scan:

            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x: jax.Array, layer: _XLayer) -> jax.Array:
                return layer(x)

            x = run(x, self.layers)
        else:
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


class XText(nnx.Module):
    """NNX: attention over embedded tokens; the head may be the embedding."""

    def __init__(
        self, width: int = 16, tied: bool = False, lora: bool = False, *, rngs: nnx.Rngs
    ) -> None:
        self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)
        self.tied, self.lora = tied, lora
        if lora:
            self.low = nnx.LoRA(width, 2, 2 * width, rngs=rngs)
        if not tied:
            self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits."""
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(tokens))
        h = self.up(x) + self.low(x) if self.lora else self.up(x)
        x = x + self.down(nnx.gelu(h))
        return self.embed.attend(x) if self.tied else self.head(x)


KINDS: Mapping[str, Any] = {
    "mlp": Mlp,
    "conv": ConvNet,
    "text": TextModel,
    "rnn": Recurrent,
    "transformer": Transformer,
    "nnx_mlp": XMlp,
    "nnx_text": XText,
}


@dataclasses.dataclass(frozen=True)
class Plain:
    """A model on one device.

    Attributes:
      init: `init(key, inputs)` returns the variables by collection.
      apply: As `flax.linen.Module.apply`.
      to_plain: The parameters of this model, from those of the program.
    """

    init: Callable[[jax.Array, Any], Any]
    apply: Callable[..., Any]
    to_plain: Callable[[Tree], Tree]


def make_model(row: Mapping[str, Any]) -> tuple[Any, Plain]:
    """Returns the model that a description asks for, as builders take it, and the plain one."""
    kind, fields = KINDS[row["model"]], dict(row["fields"])
    if row["model"].startswith("nnx"):

        def make(rngs: nnx.Rngs) -> nnx.Module:
            module: nnx.Module = kind(**fields, rngs=rngs)
            return module

        return make, _plain_nnx(make)
    module: nn.Module = kind(**fields)
    bare = module
    if "norm" in fields and fields["norm"] == "synced":
        bare = kind(**{**fields, "norm": "batch"})
    model: Any = module
    if plan := row.get("plan"):
        model = tensor_parallel(module, plan_of(row), **plan)
    if row.get("quantized"):
        model = quantized(model, {"*kernel": row["quantized"]})
    if targets := row.get("lora"):
        model = lora(model, targets["targets"], alpha=targets["alpha"])

    def init(key: jax.Array, inputs: Any) -> Any:
        return nn.unbox(bare.init({"params": key}, inputs, train=False))

    return model, Plain(init, bare.apply, lambda params: _plain_params(row, params))


def plan_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the plan of a model: heads and hidden features are split."""
    if row["model"] == "mlp":
        return {"*/up": Column(), "*/down": Row()}
    plan: dict[str, Any] = {
        f"*/attention/{name}": Column(-2) for name in ("query", "key", "value")
    }
    plan |= {"*/attention/out": Row(-3), "*/up": Column(), "*/down": Row()}
    return plan | ({"embed": Vocab()} if row["fields"].get("tied") else {})


def _plain_params(row: Mapping[str, Any], params: Tree) -> Tree:
    """Kernels that are decoded and merged, as the formulas say."""
    flat = flatten_dict(params, sep="/")
    for path in [path for path in flat if path.endswith("_codes")]:
        codes, scales = flat.pop(path), flat.pop(path.replace("_codes", "_scales"))
        block = -(-codes.shape[-1] // scales.shape[-1])
        each = jnp.repeat(scales, block, axis=-1)[..., : codes.shape[-1]]
        flat[path.removesuffix("_codes")] = codes.astype(scales.dtype) * each
    if targets := row.get("lora"):
        for path in [path for path in flat if path.endswith("lora_a")]:
            module = path.rpartition("/")[0]
            a, b = flat.pop(path), flat.pop(f"{module}/lora_b")
            rank = next(r for g, r in targets["targets"].items() if fnmatch.fnmatchcase(module, g))
            kernel = flat[f"{module}/kernel"]
            multiply = functools.partial(jnp.tensordot, axes=1)
            if a.ndim + b.ndim - 2 > kernel.ndim:  # The layers of a scan come first in both.
                multiply = jax.vmap(multiply)
            product = multiply(a, b)
            flat[f"{module}/kernel"] = kernel + product * (targets["alpha"] / rank)
    return unflatten_dict(flat, sep="/")


def _plain_nnx(make: Callable[[nnx.Rngs], nnx.Module]) -> Plain:
    def collections(module: nnx.Module) -> dict[str, Any]:
        found: dict[str, Any] = {"params": {}}
        for path, variable in nnx.to_flat_state(nnx.state(module)):
            name = "params" if isinstance(variable, nnx.Param) else "batch_stats"
            if isinstance(variable, nnx.Param | nnx.BatchStat):
                found.setdefault(name, {})[tuple(map(str, path))] = variable[...]
        return {name: unflatten_dict(flat) for name, flat in found.items()}

    def init(key: jax.Array, inputs: Any) -> Any:
        del inputs
        return collections(make(nnx.Rngs(key)))

    def apply(variables: Any, *args: Any, train: bool, mutable: Any = False, **_: Any) -> Any:
        module = make(nnx.Rngs(0))
        graph, state = nnx.split(module)
        given = {path: x for tree in variables.values() for path, x in flatten_dict(tree).items()}
        flat = [
            (path, v.replace(given.get(tuple(map(str, path)), v.get_value())))
            for path, v in nnx.to_flat_state(state)
        ]
        module = nnx.merge(graph, nnx.from_flat_state(flat))
        module.train() if train else module.eval()
        module.set_attributes(axis_name=None, raise_if_not_found=False)
        out = module(*args)  # type: ignore[operator]
        updates = {k: v for k, v in collections(module).items() if k != "params"}
        return (out, updates) if mutable is not False else out

    return Plain(init, apply, lambda params: params)


def make_batches(row: Mapping[str, Any], number: int) -> list[dict[str, np.ndarray | Any]]:
    """Returns batches: `inputs`, `labels` and maybe `mask`, as NumPy arrays."""
    random = np.random.default_rng(row["data_seed"])
    size, length, kind = row["batch"], row["length"], row["model"]
    shapes = {"mlp": (FEATURES,), "nnx_mlp": (FEATURES,), "conv": (6, 6, 3), "rnn": (5, 4)}
    batches = []
    for _ in range(number):
        if kind in shapes:
            inputs: Any = random.normal(size=(size, *shapes[kind])).astype(np.float32)
            labels = random.integers(0, CLASSES, size)
        else:
            tokens = random.integers(0, VOCABULARY, (size, length + 1))
            inputs, labels = tokens[:, :-1].astype(np.int32), tokens[:, 1:]
            if row.get("packed"):
                borders = random.random((size, length)) < 0.3
                inputs = {"tokens": inputs, "documents": borders.cumsum(1).astype(np.int32)}
        batch = {"inputs": inputs, "labels": labels.astype(np.int32)}
        if row["loss"] == "masked":
            mask = random.random(labels.shape) > 0.3
            mask[size // 4 : size // 2 + 1] = False  # Some devices have nothing.
            batch["mask"] = mask.astype(np.float32)
        elif row["loss"] == "weights":
            batch["mask"] = random.uniform(0.2, 3, labels.shape).astype(np.float32)
        batches.append(batch)
    return batches
