"""The job: what every script of this folder trains, without what the script is about.

A script is called with a folder and a number of steps. It trains a classifier of `FEATURES`
numbers, with two hidden layers of `WIDTH`; parameters and optimizer are sharded over eight devices
or processes:

- batches of `BATCH` examples, in another order in each epoch;
- products in bfloat16, parameters in float32;
- gradients clipped to a global norm of 1, AdamW with `LEARNING_RATE`;
- every `LOG` steps a line `step N ... loss X ... accuracy Y`, and at the end one for `examples(1)`;
- a checkpoint every `SAVE` steps, and a second call with the same folder goes on from it, with the
  examples that come next.

A line that ends in `# not counted` only helps to check this.
"""

import os
from typing import Any

import numpy as np

FEATURES, WIDTH, CLASSES = 64, 1024, 10
EXAMPLES, BATCH, LEARNING_RATE = 1024, 64, 1e-3
LOG, SAVE = 8, 16
DEVICES = 8


def examples(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `float32[EXAMPLES, FEATURES]`, and the label of each row."""
    x = np.random.default_rng(seed).normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    return x, x[:, :CLASSES].argmax(-1).astype(np.int32)


def show_share(held: float, total: float) -> None:
    """Prints the part of the parameters and the optimizer's state that a device holds."""
    if os.environ.get("RANK", "0") == "0":
        print(f"a device holds {held / total:.3f} of the state", flush=True)


def show_jax_share(tree: Any) -> None:
    """Prints the part of a tree of `jax.Array`s that the first device holds."""
    import jax

    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    held = sum(x.addressable_shards[0].data.nbytes for x in arrays)
    show_share(held, sum(x.nbytes for x in arrays))


def show_torch_share(model: Any, optimizer: Any) -> None:
    """Prints the part of a model and its optimizer's state that this process holds."""
    tensors = list(model.parameters())
    tensors += [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    held = [getattr(x, "to_local", lambda x=x: x)().numel() for x in tensors]
    show_share(sum(held), sum(x.numel() for x in tensors))
