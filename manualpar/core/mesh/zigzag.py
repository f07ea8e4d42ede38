"""The zig-zag order of a sequence over the devices along a context axis.

Under a causal mask the first tokens of a sequence attend to few tokens and the last to many. If
each of `C` devices had a run of consecutive tokens, the last device would have most of the work. So
the sequence is cut into `2 C` half blocks, and device `c` gets half blocks `c` and `2 C - 1 - c`
(zig-zag). A step reorders its batch once, at the beginning, because the batch is small: it is
mostly integers. The model and the loss get the batch in zig-zag order.
"""

from typing import Any

import jax
import jax.numpy as jnp

from manualpar.core.tracing.scopes import CONTEXT_SCOPE
from manualpar.core.trees import Batch


def to_zigzag(batch: Batch, axis: str) -> Any:
    """Sends positions between devices, to turn consecutive runs into zig-zag half blocks.

    Leaves are `[B, S/axis, ...]`. Before the exchange, a leaf contains the device's run of each
    sequence. After the exchange, the leaf contains half block `c` and then half block
    `2 C - 1 - c`. Scalars do not change.

    Communication:
      Two collective permutes of half of each leaf.
    """
    if (size := jax.lax.axis_size(axis)) == 1:
        return batch

    def home(block: int) -> int:
        """Returns the index of the device that gets a half block."""
        return min(block, 2 * size - 1 - block)

    sends = [[(c, home(2 * c + half)) for c in range(size)] for half in (0, 1)]
    # Each device receives a half block with an even number and one with an odd number. On a device
    # with an odd index, the odd half block comes first.
    is_odd = jax.lax.axis_index(axis) % 2 == 1

    def exchange(x: jax.Array) -> jax.Array:
        if not jnp.ndim(x):
            return x
        even, odd = (
            jax.lax.ppermute(half, axis, perm)
            for half, perm in zip(jnp.split(x, 2, axis=1), sends, strict=True)
        )
        low, high = jnp.where(is_odd, odd, even), jnp.where(is_odd, even, odd)
        return jnp.concatenate([low, high], axis=1)

    with jax.named_scope(CONTEXT_SCOPE):
        return jax.tree.map(exchange, batch)
