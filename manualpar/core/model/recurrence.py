"""Initial carries of recurrent cells, made to vary over devices as the inputs do.

A scan demands a carry of one type from beginning to end. A cell's `initialize_carry` makes a
constant, which is the same on all devices, but the first step makes it vary. The carry is therefore
cast while a model is called, in `nn.RNN` and in a user's own scan.

Linen's cells are made where they are used, and flax's interceptors do not see this method. So their
classes are changed, for the time of the call and for the calling thread alone.
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
    """Has Linen's cells make carries of the type that a scan over the inputs needs.

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
    """A function that gives a carry of leading dimension batch the type of the inputs.

    Args:
      inputs: Arrays of leading dimension batch, among other things. The carry varies over the
        devices that these vary over. Where shardings are types, it is sharded as these are along
        their leading dimension.
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
    """A class and all below it."""
    return {base}.union(*map(with_subclasses, base.__subclasses__()))
