"""Tells `flax.serialization` how to write and read a state with typed keys.

Flax cannot write a typed key. So the key's data and the name of its implementation are written.
"""

import dataclasses
from typing import Any

import flax.serialization
import jax

from manualpar.core.state.train_state import TrainState, is_key


def _to_state_dict(state: TrainState) -> dict[str, Any]:
    """Converts a state for `flax.serialization`; a typed key becomes data and implementation."""
    return {
        field.name: flax.serialization.to_state_dict(
            jax.tree.map(_without_type, getattr(state, field.name))
        )
        for field in _dynamic_fields(state)
    }


def _from_state_dict(target: TrainState, stored: dict[str, Any]) -> TrainState:
    """Reads a state from `flax.serialization`, with the structure of `target`."""
    values = {}
    for field in _dynamic_fields(target):
        like = getattr(target, field.name)
        plain = jax.tree.map(lambda x: {"key": x, "impl": x} if is_key(x) else x, like)
        read = flax.serialization.from_state_dict(
            plain, stored.get(field.name, {}), name=field.name
        )
        values[field.name] = jax.tree.map(_with_type, like, read)
    return target.replace(**values)


def _dynamic_fields(state: TrainState) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(state) if f.metadata.get("pytree_node", True)]


def _without_type(x: Any) -> Any:
    if not is_key(x):
        return x
    return {"key": jax.random.key_data(x), "impl": str(jax.random.key_impl(x))}


def _with_type(like: Any, x: Any) -> Any:
    if not is_key(like):
        return x
    key = jax.random.wrap_key_data(x["key"], impl=x["impl"])
    if key.dtype != like.dtype:
        raise ValueError(
            f"from_state_dict: a key is {key.dtype}, expected {like.dtype}. Set "
            "jax_default_prng_impl to the value with which the state was saved."
        )
    return key


# Overrides the registration by `flax.struct`, which cannot write typed keys.
flax.serialization.register_serialization_state(
    TrainState, _to_state_dict, _from_state_dict, override=True
)
