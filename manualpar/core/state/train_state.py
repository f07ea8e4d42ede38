"""The arguments of a training step: the state and the batch.

Both are plain pytrees. In a `Program` the state holds *global* `jax.Array`s and no boxes, so optax
masks, checkpoints and `jax.device_get` see ordinary arrays. `flax.serialization` writes and reads a
state too, see `manualpar.core.state.state_serialization`.
"""

from collections.abc import Callable
from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from manualpar.core.trees import Params


class TrainState(train_state.TrainState):
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
        `core.program.gradient_rounding`; `{}` otherwise.
      apply_fn: The model's `apply` (static).
      tx: The optax optimizer (static).
    """

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
