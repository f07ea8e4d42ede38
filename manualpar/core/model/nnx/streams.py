"""Random streams of an NNX module, begun anew for each call from the keys that it is given.

A stream is a key and a count of the numbers drawn. Between the calls of a training they are not
kept: as in Linen a loss gives keys, `rngs={"dropout": key}`, and the stream of each module starts
from a key of its own, folded with the module's path from the one of that name.

Invariants: no two streams share a key; a stack's streams have as many keys as it has layers; a
stream without a key is an error only where its key is used. `nnx.RNN` draws a key for a carry of
zeros, which does not use it.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from manualpar.core.model.nnx.variables import Path, path_text


def keys_by_stream(rngs: Any) -> dict[str, Any]:
    """Returns keys by the names of streams, from a dict or an `nnx.Rngs`, or one key for all."""
    if isinstance(rngs, nnx.Rngs):
        return {name: stream() for name, stream in rngs.items()}
    return dict(rngs) if isinstance(rngs, Mapping) else {"default": rngs}


def call_rngs(given: Mapping[str, Any]) -> nnx.Rngs:
    """Makes the streams for a call that takes `rngs`; other names fall back as in `stream_keys`."""
    if len(given) == 1 and "default" not in given:
        (only,) = given.values()
        given = {**given, "default": jax.random.fold_in(only, zlib.crc32(b"default"))}
    return nnx.Rngs(given)


def stream_keys(module: nnx.Module, given: Mapping[str, Any]) -> dict[Path, Any]:
    """Finds for each random stream of a module, by path, a key or why it has none, in a sentence.

    `given` are keys by the names of streams. A stream takes the key of its name. One without a name
    of its own (`default`) takes that of its module's `rng_collection`. If there is no such key, it
    takes the one called `default`, or the only one.
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
        only = given if len(given) == 1 else ()
        found = [given[key] for key in (name, "default", *only) if key in given]
        if found:
            keys[path] = jax.random.fold_in(found[0], zlib.crc32(path_text(path).encode()))
        else:
            keys[path] = (
                f"model: its random stream {path_text(path)!r} is asked for numbers and has no "
                f"key, expected one in rngs={{{name!r}: key}}; the call was given "
                f"{sorted(given) or 'none'}."
            )
    return keys


def stream_variable(variable: nnx.Variable[Any], key: Any) -> nnx.Variable[Any]:
    """The variable of a stream's key or count at its beginning, by its entry of `stream_keys`."""
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
    """Lets the streams of a module that were given no key return what must not be used as one."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.RngStream) and isinstance(node.key, _NoKey):
            object.__setattr__(node, "__class__", _KeylessStream)


class _KeylessStream(nnx.RngStream):
    """A stream that was given no key."""

    def __call__(self) -> Any:
        """Returns an object that refuses every use."""
        return _MissingKey(self.key.get_metadata("reason"))

    def fork(self, **kwargs: Any) -> Any:
        """Returns the stream itself, which has no numbers to begin another with."""
        del kwargs
        return self


class _MissingKey:
    """What a stream without a key returns; whoever looks at it gets the reason as an error."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise ValueError(self._reason)


class _NoKey(nnx.RngKey):
    """The key of a stream that was given none."""

    def get_value(self, **kwargs: Any) -> Any:
        """Says what is missing."""
        del kwargs
        raise ValueError(self.get_metadata("reason"))
