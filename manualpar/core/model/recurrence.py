"""Initial carries of recurrent cells, made to vary over devices as the inputs do.

A scan needs a carry of the same type in all iterations. A cell's `initialize_carry` makes a
constant, which is the same on all devices, but the first iteration makes it vary. Therefore the
carry is cast while a model is called, in `nn.RNN` and in a user's own scan.

Linen's cells are made where they are used, and flax's interceptors do not see `initialize_carry`.
So the cells' classes are patched during the call, in the calling thread only.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec

from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.tracing.thread_patches import replaced_in_thread

METHOD = "initialize_carry"


def varying_linen_carries(inputs: Any) -> contextlib.AbstractContextManager[None]:
    """Casts carries of Linen's cells to the type that a scan over the inputs needs.

    Args:
      inputs: The arguments of the model's call, see `vary_like`.

    Communication:
      None.
    """
    vary = vary_like(inputs)

    def casting(_: str, initialize: Any) -> Any:
        return lambda *args, **kwargs: jax.tree.map(vary, initialize(*args, **kwargs))

    cells = [cell for cell in with_subclasses(nn.RNNCellBase) if METHOD in vars(cell)]
    return replaced_in_thread([(cell, METHOD) for cell in cells], casting)


def vary_like(inputs: Any) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that casts a carry `[B, ...]` to vary as the inputs do.

    Args:
      inputs: A tree with arrays `[B, ...]`. The carry varies over the axes over which these arrays
        vary. With explicit axes, dim 0 of the carry is sharded like dim 0 of the arrays.
    """
    arrays = [x for x in jax.tree.leaves(inputs) if isinstance(x, jax.Array)]
    axes = varying_axes(arrays)
    batches = {x.shape[0]: name for x in arrays for name in jax.typeof(x).sharding.spec[:1] if name}

    def vary(carry: jax.Array) -> jax.Array:
        carry = cast_to_varying(carry, axes)
        batch = batches.get(carry.shape[0]) if carry.ndim else None
        if batch is None or not jax.sharding.get_abstract_mesh().explicit_axes:
            return carry
        return jax.sharding.reshard(carry, PartitionSpec(batch))

    return vary


def with_subclasses(base: Any) -> set[Any]:
    """Returns a class and all its subclasses."""
    return {base}.union(*map(with_subclasses, base.__subclasses__()))
