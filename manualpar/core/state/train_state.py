"""The arguments of a training step: the state and the batch.

Both are plain pytrees. In a `Program` the state holds *global* `jax.Array`s and no boxes, so optax
masks, checkpoints and `jax.device_get` see ordinary arrays.

`flax.serialization` writes and reads a state too. It cannot write a typed key, so the key's data
and the name of its implementation are written.
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

from manualpar.core.summary import Summarized, describe_shapes, describe_tree
from manualpar.core.trees import Params


class TrainState(Summarized, train_state.TrainState, repr=False):
    """Flax's train state with the training loop's key and the model's other collections.

    Attributes:
      step: `int32[]`, the number of steps taken, including steps whose update was skipped because a
        value was not finite.
      params: The tree of parameters.
      opt_state: The state of `tx`.
      rng: The key that every step splits.
      collections: The model's variables outside `params` by collection, e.g. `{"batch_stats":
        ...}`; `{}` if it has none.
      local: Per-replica and per-device arrays: the states of DiLoCo's replicas, see
        `strategies.diloco`, and the `"residuals"` of error feedback, see
        `quantization.gradient_rounding`; `{}` otherwise.
      apply_fn: The model's `apply` (static).
      tx: The optax optimizer (static).
    """

    # Flax declares these as `int | jax.Array` and as a `FrozenDict`.
    step: jax.Array
    params: Params
    rng: jax.Array
    collections: dict[str, Any] = flax.struct.field(default_factory=dict)
    local: dict[str, Any] = flax.struct.field(default_factory=dict)

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: Params,
        tx: optax.GradientTransformation,
        **kwargs: Any,
    ) -> Self:
        """Makes a state at step 0; `kwargs` are further fields (`rng=`, `collections=`)."""
        state = super().create(apply_fn=apply_fn, params=params, tx=tx, **kwargs)
        return state.replace(step=jnp.zeros((), jnp.int32))

    def _summary(self) -> tuple[str, dict[str, str]]:
        trees = ("params", "opt_state", "collections", "local")
        lines = {name: describe_tree(getattr(self, name)) for name in trees}
        return f"TrainState(step={self.step!r})", lines


def is_key(x: Any) -> bool:
    """Returns whether `x` is an array of typed keys, concrete or abstract."""
    return jnp.issubdtype(getattr(x, "dtype", None) or object, jax.dtypes.prng_key)


@flax.struct.dataclass
class Batch:
    """A batch of examples; every leaf has the examples along its leading dimension.

    Attributes:
      inputs: The model's inputs, `[B, ...]` (or a pytree of such arrays).
      labels: The labels of the examples, `[B, ...]`.
      mask: Optional weights, `[B, ...]`: 0 for padding, 1 for a real example, or any weight
        between.
    """

    inputs: Any
    labels: Any
    mask: Any = None

    def __repr__(self) -> str:
        """Returns the shapes and dtypes of the arrays."""
        names = ("inputs", "labels", "mask")
        return f"Batch({', '.join(f'{x}={describe_shapes(getattr(self, x))}' for x in names)})"


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
