"""Small NNX models for `random_programs`, and their `init` and `apply` on one device."""

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from benchmarks.random_models import CLASSES, FEATURES, VOCABULARY


class Seen(nnx.Variable):
    """A variable into which models sow."""


class _XLayer(nnx.Module):
    def __init__(self, width: int, rate: float, *, rngs: nnx.Rngs, drop: str = "") -> None:
        self.drop = drop
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, width + 4, rngs=rngs)
        self.down = nnx.Linear(width + 4, width, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.drop:
            return self._run(x)
        is_kept = x[0].sum() > 0
        if self.drop == "lax":
            return jax.lax.cond(is_kept, lambda: self._run(x), lambda: 0.9 * x)
        skip, run = (lambda _, x: 0.9 * x), (lambda layer, x: layer._run(x))
        return nnx.cond(is_kept, run, skip, self, x)

    def _run(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


class XMlp(nnx.Module):
    """Residual layers in NNX, in a list or a scan."""

    def __init__(
        self,
        width: int = 8,
        depth: int = 2,
        norm: str = "none",
        scan: bool = False,
        dropout: float = 0.0,
        sown: str = "",  # Whether it sows a "tuple", or "reduced" values.
        drop: str = "",  # Whether "lax" or "nnx" skips layers, because of the data.
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.sown = sown
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
                return _XLayer(width, dropout, rngs=rngs, drop=drop)

            self.layers: Any = make(rngs)
        else:
            layers = [_XLayer(width, dropout, rngs=rngs, drop=drop) for _ in range(depth)]
            self.layers = nnx.List(layers)
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
        if self.sown:
            each = jnp.square(x).mean(-1)
            how: dict[str, Any] = {}
            if self.sown == "reduced":
                how = {"init_fn": lambda: jnp.zeros(()), "reduce_fn": jnp.add}
                self.sow(Seen, "each", 0.5 * x[:, 0], **how)
            self.sow(Seen, "each", each, **how)
            self.sow(Seen, "mean", each.mean(), **how)
        return self.head(x)


class XText(nnx.Module):
    """Attention over embedded tokens in NNX; the head may be the embedding."""

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


def run_plainly(
    make: Callable[[nnx.Rngs], nnx.Module],
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns functions of an NNX model that are called like a Linen model's `init` and `apply`."""

    def make_new(rngs: nnx.Rngs) -> nnx.Module:
        module = make(rngs)
        nnx.pop(module, Seen)  # What qwix's own call of the model has sown.
        return module

    def collections(module: nnx.Module) -> dict[str, Any]:
        found: dict[str, Any] = {"params": {}}
        names = {nnx.Param: "params", nnx.BatchStat: "batch_stats", Seen: "Seen"}
        for path, variable in nnx.to_flat_state(nnx.state(module)):
            for kind, name in names.items():
                if isinstance(variable, kind):
                    found.setdefault(name, {})[tuple(map(str, path))] = variable.get_value()
        return {name: unflatten_dict(flat) for name, flat in found.items()}

    def init(key: jax.Array, inputs: Any) -> Any:
        del inputs
        return collections(make_new(nnx.Rngs(key)))

    def value(path: tuple[str, ...], variable: Any, given: Any, rngs: Any) -> Any:
        if isinstance(variable, nnx.RngKey) and rngs:
            # The package folds a stream's path into the call's key, so the reference does too.
            key = jax.random.fold_in(rngs["dropout"], zlib.crc32("/".join(path[:-1]).encode()))
            return jax.random.split(key, variable.shape) if variable.shape else key
        if isinstance(variable, nnx.RngCount):
            return jnp.zeros_like(variable.get_value())
        return given.get(path, variable.get_value())

    def apply(
        variables: Any, *args: Any, train: bool, mutable: Any = False, rngs: Any = None
    ) -> Any:
        module = make_new(nnx.Rngs(0))
        graph, state = nnx.split(module)
        given = {path: x for tree in variables.values() for path, x in flatten_dict(tree).items()}
        flat = [
            (path, v.replace(value(tuple(map(str, path)), v, given, rngs)))
            for path, v in nnx.to_flat_state(state)
        ]
        module = nnx.merge(graph, nnx.from_flat_state(flat))
        module.train() if train else module.eval()
        module.set_attributes(axis_name=None, raise_if_not_found=False)
        out = module(*args)
        updates = {k: v for k, v in collections(module).items() if k != "params"}
        return (out, updates) if mutable is not False else out

    return init, apply
