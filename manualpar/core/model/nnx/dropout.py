"""NNX's dropout for inputs that may be split over a model axis, see `core.model.split_dropout`."""

from typing import Any

import jax
from flax import nnx

from manualpar.core.model.split_dropout import SplitAttention, key_like


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
