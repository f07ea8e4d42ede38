"""Random streams of an NNX module. Each call restarts them from the keys that a loss passes.

A stream is a key and a count of the numbers drawn. A program does not keep streams between calls:
as in Linen, a loss passes keys, `rngs={"dropout": key}`. Each module's stream starts from the key
with the stream's name, into which the module's path is folded.

Invariants: no two streams share a key; the streams of a stack of layers have one key for each
layer; a stream without a key is an error only where its key is used. (`nnx.RNN` draws a key for its
initial carry, but a carry of zeros does not use the key.)

The key that a dropout layer draws differs along a model axis if the layer's input is split over
this axis, see `manualpar.core.model.split_dropout`.

A stream counts by `count[...] += 1`. For such an assignment flax reads `sharding` of both values.
Tracers lack this attribute, and to write the error message JAX searches all equations so far. So
the time to trace a model would be quadratic in the number of parameters. In the context of
`assigning_tracers` an assignment does not read the attribute.
"""

import contextlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from manualpar.core.model.nnx.variables import Path, path_text
from manualpar.core.model.split_dropout import SplitAttention, key_like
from manualpar.core.tracing.thread_patches import replaced_in_thread


def assigning_tracers() -> contextlib.AbstractContextManager[None]:
    """Makes `variable[...] = tracer` cheap in this thread, as a context manager.

    Variables get the same values as in flax.
    """

    def replacement(_: str, old: Callable[..., None]) -> Callable[..., None]:
        def set_item(variable: nnx.Variable[Any], index: Any, value: Any) -> None:
            before = variable.get_raw_value()
            if (
                index is ...
                and isinstance(before, jax.core.Tracer)
                and isinstance(value, jax.core.Tracer)
                and (before.shape, before.dtype) == (value.shape, value.dtype)
            ):
                variable.set_value(value)
            else:
                old(variable, index, value)

        return set_item

    return replaced_in_thread([(nnx.Variable, "__setitem__")], replacement)


def keys_by_stream(rngs: Any) -> dict[str, Any]:
    """Returns keys by the names of streams; `rngs` is a dict, an `nnx.Rngs`, or one key for all."""
    if isinstance(rngs, nnx.Rngs):
        return {name: stream() for name, stream in rngs.items()}
    return dict(rngs) if isinstance(rngs, Mapping) else {"default": rngs}


def call_rngs(keys: Mapping[str, Any]) -> nnx.Rngs:
    """Makes the streams for a call that takes `rngs`; see `stream_keys` for missing keys."""
    if len(keys) == 1 and "default" not in keys:
        (only,) = keys.values()
        keys = {**keys, "default": jax.random.fold_in(only, zlib.crc32(b"default"))}
    return nnx.Rngs(keys)


def stream_keys(module: nnx.Module, rngs: Mapping[str, Any]) -> dict[Path, Any]:
    """Finds the key of each random stream of a module.

    `rngs` maps names of streams to keys. A stream gets the key of its name. A stream without a name
    (`default`) gets the key that its module's `rng_collection` names. If there is no such key, the
    stream gets the key called `default`, or the only key.

    Returns:
      For each stream's path, its key; for a stream without a key, the error message.
    """
    nodes = list(nnx.iter_graph(module))
    modules = {path: node for path, node in nodes if isinstance(node, nnx.Module)}
    keys: dict[Path, Any] = {}
    for path, node in nodes:
        if not isinstance(node, nnx.RngStream):
            continue
        name = node.tag
        if name == "default":
            name = getattr(modules.get(path[:-1]), "rng_collection", name)
        only = rngs if len(rngs) == 1 else ()
        found = [rngs[key] for key in (name, "default", *only) if key in rngs]
        if found:
            keys[path] = jax.random.fold_in(found[0], zlib.crc32(path_text(path).encode()))
        else:
            keys[path] = (
                f"model: its random stream {path_text(path)!r} draws numbers and has no key; "
                f"expected a key in rngs={{{name!r}: key}}; the call was given "
                f"{sorted(rngs) or 'none'}."
            )
    return keys


def stream_variable(variable: nnx.Variable[Any], key: Any) -> nnx.Variable[Any]:
    """Makes the initial variable of a stream's key or count; `key` is as in `stream_keys`."""
    abstract, metadata = variable.get_raw_value(), variable.get_metadata()
    if not isinstance(variable, nnx.RngKey):
        count = jnp.zeros(abstract.shape, abstract.dtype)
        return type(variable).from_metadata(count, metadata)
    if isinstance(key, str):
        none = jnp.broadcast_to(jax.random.key(0), abstract.shape)
        return _NoKey.from_metadata(none, {**metadata, "reason": key})
    key = jax.random.split(key, abstract.shape) if abstract.shape else key
    return type(variable).from_metadata(key, metadata)


def mark_keyless(module: nnx.Module) -> None:
    """Makes streams that have no key return an object that refuses every use."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.RngStream) and isinstance(node.key, _NoKey):
            object.__setattr__(node, "__class__", _KeylessStream)


class SplitDropout(nnx.Dropout):
    """An `nnx.Dropout` whose key differs along the axes over which its input varies."""

    def __call__(
        self, inputs: jax.Array, *, deterministic: bool | None = None, rngs: Any = None
    ) -> jax.Array:
        """Calls `nnx.Dropout` with a key that differs along the axes over which `inputs` varies."""
        rngs = self.rngs if rngs is None else rngs
        is_off = self.deterministic if deterministic is None else deterministic
        if rngs is not None and not is_off and self.rate not in (0, 1):
            stream = rngs[self.rng_collection] if isinstance(rngs, nnx.Rngs) else rngs
            key = stream() if isinstance(stream, nnx.RngStream) else stream
            rngs = key_like(key, inputs)
        return super().__call__(inputs, deterministic=deterministic, rngs=rngs)


def split_dropout(module: nnx.Module) -> None:
    """Changes a module, for one call, so that each shard of split activations has its own mask."""
    if type(module) is nnx.Dropout:
        object.__setattr__(module, "__class__", SplitDropout)
    if isinstance(module, nnx.MultiHeadAttention):
        module.attention_fn = SplitAttention(module.attention_fn)


class _KeylessStream(nnx.RngStream):
    """A stream without a key."""

    def __call__(self) -> Any:
        """Returns an object that refuses every use."""
        return _MissingKey(self.key.get_metadata("reason"))

    def fork(self, **kwargs: Any) -> Any:
        """Returns the stream itself, because it has no key from which to make another stream."""
        del kwargs
        return self


class _MissingKey:
    """The result of a stream without a key; any use of it raises an error with the reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise ValueError(self._reason)


class _NoKey(nnx.RngKey):
    """The key variable of a stream without a key."""

    def get_value(self, **kwargs: Any) -> Any:
        """Raises the error about the missing key."""
        del kwargs
        raise ValueError(self.get_metadata("reason"))
