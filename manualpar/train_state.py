"""What a training step carries: the state and the batch.

Both are plain pytrees. Under a `Program` the state holds *global* `jax.Array`s and no boxes, so
optax masks, checkpoints and `jax.device_get` see ordinary arrays. `flax.serialization` writes and
reads a state too; of a typed key it stores the data and the implementation's name.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state


class TrainState(train_state.TrainState):
    """Flax's train state with the training loop's key and the model's other collections.

    Attributes:
      step: `int32[]`, the number of steps taken, those included whose update was left out because
        something was not finite.
      params: The tree of parameters.
      opt_state: The state of `tx`.
      rng: A key; every step splits it.
      collections: The model's variables outside `params` by collection, e.g. `{"batch_stats":
        ...}`; `{}` if it has none.
      apply_fn: The model's `apply` (static).
      tx: The optax optimizer (static).
    """

    rng: jax.Array
    collections: dict[str, Any] = flax.struct.field(default_factory=dict)

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: Any,
        tx: optax.GradientTransformation,
        **kwargs: Any,
    ) -> Self:
        """Makes a state at step 0; `kwargs` are further fields (`rng=`, `collections=`)."""
        state = super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)
        return state.replace(step=jnp.zeros((), jnp.int32))


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
        read = flax.serialization.from_state_dict(plain, stored[field.name], name=field.name)
        values[field.name] = jax.tree.map(_with_type, like, read)
    return target.replace(**values)


def _dynamic_fields(state: TrainState) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(state) if f.metadata.get("pytree_node", True)]


def is_key(x: Any) -> bool:
    """Whether something is an array of typed keys, concrete or abstract."""
    return jnp.issubdtype(getattr(x, "dtype", None) or object, jax.dtypes.prng_key)


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


@flax.struct.dataclass
class Batch:
    """A batch of examples; every leaf has the examples along its leading dimension.

    Attributes:
      inputs: What the model is applied to, `[B, ...]` (or a pytree of such).
      labels: What it should say, `[B, ...]`.
      mask: Optional `[B, ...]`: 0 for padding, 1 for a real example, any weight in between.
    """

    inputs: Any
    labels: Any
    mask: Any = None
