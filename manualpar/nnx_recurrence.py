"""The zeros that `nnx.RNN` starts from, made to vary over devices as its inputs do.

Its scan demands a carry of one type from beginning to end, and NNX starts it from a constant.
"""

from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from manualpar.collectives import cast_to_varying, varying_axes


def vary_initial_carries(module: nnx.Module, inputs: Any) -> None:
    """Has each cell of an `nnx.RNN` in a module make carries of the type that its scan needs.

    Args:
      module: A module that lives for one call; its cells are changed.
      inputs: What it is called with, arrays of leading dimension batch among it: carries vary over
        the devices that these vary over, and are sharded along their leading dimension as these
        are where shardings are types.

    Communication:
      None.
    """
    arrays = [x for x in jax.tree.leaves(inputs) if isinstance(x, jax.Array)]
    axes = tuple(sorted({axis for x in arrays for axis in varying_axes(x)}))
    batch = next((name for x in arrays for name in jax.typeof(x).sharding.spec[:1] if name), None)

    def spread(carry: jax.Array) -> jax.Array:
        carry = cast_to_varying(carry, axes)
        if batch is None or not jax.sharding.get_abstract_mesh().explicit_axes:
            return carry
        return jax.sharding.reshard(carry, PartitionSpec(batch))

    for _, part in nnx.iter_modules(module):
        if isinstance(part, nnx.RNN):
            cell: Any = part.cell
            cell.initialize_carry = _mapped(cell.initialize_carry, spread)


def _mapped(initialize: Any, spread: Any) -> Any:
    """A cell's method, with something done to each array of the carry."""
    return lambda *args, **kwargs: jax.tree.map(spread, initialize(*args, **kwargs))
