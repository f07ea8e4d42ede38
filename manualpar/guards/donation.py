"""Arrays that are gone: said in words, before JAX is asked for them.

A train step donates its state: the state that it returns takes over the memory. Whoever uses the
old state again, by running a notebook's cell twice for instance, hands deleted arrays to JAX. On
several simulated devices that ends the process without a Python error.
"""

from typing import Any

import jax

_MENDS = {
    "state": "a train step donates its state, so that the one it returns can take over the memory. "
    "Use the returned one, `state, metrics = program.train_step(state, batch)`. In a notebook, "
    "run the cells again from the one that makes the state.",
    "batch": "an earlier call donated it or its delete() was called. Make the batch again before "
    "every step that donates it, or do not donate it.",
}


def check_alive(function: str, **trees: Any) -> None:
    """Refuses trees with arrays that have been donated or deleted.

    Args:
      function: In whose name to raise.
      **trees: Trees of arrays, by the name of the argument. Leaves that are no arrays of JAX's, or
        that are being traced, pass.

    Raises:
      ValueError: An array has been deleted; the message names it.
    """
    for name, tree in trees.items():
        if not any(map(is_deleted, jax.tree.leaves(tree))):
            continue
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if is_deleted(x):
                raise ValueError(
                    f"{function}: {name}{jax.tree_util.keystr(path)} has been deleted, expected "
                    f"arrays that are alive: {_MENDS.get(name, _MENDS['state'])}"
                )


def is_deleted(x: Any) -> bool:
    """Whether a leaf is an array whose memory is gone; false while it is being traced."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()
