"""What each mesh axis is for.

A *data* axis splits the examples of a batch, a *context* axis another of its dimensions. Devices
along either run the same program on different data, so gradients are averaged over both. Devices
along any other axis see the same data. A *storage* axis only shares the memory: what is sharded
over it is gathered where it is used. Over a *model* axis the model computes with its shards.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

Role = Literal["data", "context", "storage", "model"]


@dataclasses.dataclass(frozen=True)
class AxisRoles:
    """The roles of a mesh's axes.

    Attributes:
      batch_dims: For each dimension of a batch's leaves that is split, the mesh axes that split it.
      others: The role of each axis that splits no dimension of the batch; `"storage"` by default.
    """

    batch_dims: Mapping[int, tuple[str, ...]]
    others: Mapping[str, Role] = dataclasses.field(default_factory=dict)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which devices see different data."""
        return tuple(axis for axes in self.batch_dims.values() for axis in axes)

    def role_of(self, axis: str) -> Role:
        """The role of a mesh axis."""
        for dim, axes in self.batch_dims.items():
            if axis in axes:
                return "context" if dim else "data"
        return self.others.get(axis, "storage")

    def batch_specs(self, batch: Any) -> Any:
        """The tree of a batch with a `PartitionSpec` at each leaf; scalars are replicated."""
        last = max(self.batch_dims)
        entries = [self.batch_dims.get(dim) for dim in range(last + 1)]
        return jax.tree.map(lambda x: PartitionSpec(*entries[: jnp.ndim(x)]), batch)
