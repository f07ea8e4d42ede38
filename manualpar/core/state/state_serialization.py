"""How `flax.serialization` writes and reads a state, keys included.

Of a typed key, which flax cannot write, it stores the data and the implementation's name.
"""

import dataclasses
from typing import Any

import flax.serialization
import jax

from manualpar.core.state.train_state import TrainState, is_key


def _to_state_dict(state: TrainState) -> dict[str, Any]:
    """What `flax.serialization` writes of a state: of a typed key its data and implementation."""
    return {
        field.name: flax.serialization.to_state_dict(
            jax.tree.map(_without_type, getattr(state, field.name))
        )
        for field in _dynamic_fields(state)
    }


def _from_state_dict(target: TrainState, stored: dict[str, Any]) -> TrainState:
    """What `flax.serialization` reads, with the structure of another state."""
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
            f"from_state_dict: a key is {key.dtype}, expected {like.dtype}. Set the same "
            "jax_default_prng_impl as where it was saved."
        )
    return key


# As `flax.struct` itself does for the class, but for typed keys, which flax cannot write.
flax.serialization.register_serialization_state(
    TrainState, _to_state_dict, _from_state_dict, override=True
)
