"""The role of each mesh axis.

A *data* axis splits the examples of a batch. A *context* axis splits another dimension of the
batch, the positions of its sequences. Devices along either axis run the same program on different
data, so gradients are averaged over both. Devices along any other axis see the same data. A
*shard-only* axis only saves memory: a parameter that is sharded over it is gathered where it is
used. A parameter that is sharded over a *model* axis is not gathered: the model computes with the
shards. A pipeline splits its layers over a *stage* axis. A parameter that all stages use gets a
part of its gradient on each stage.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from manualpar.core.trees import Batch

Role = Literal["data", "context", "shard_only", "model", "stage"]


@dataclasses.dataclass(frozen=True)
class AxisRoles:
    """The roles of a mesh's axes.

    Attributes:
      batch_dims: For each dimension of the batch's leaves, the mesh axes that split it.
      others: The role of each axis that splits no dimension of the batch; by default
        `"shard_only"`.
    """

    batch_dims: Mapping[int, tuple[str, ...]]
    others: Mapping[str, Role] = dataclasses.field(default_factory=dict)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which devices see different data."""
        return tuple(axis for axes in self.batch_dims.values() for axis in axes)

    @property
    def context_axis(self) -> str | None:
        """The axis that splits sequences, dim 1 of the batch, if there is one."""
        return next(iter(self.batch_dims.get(1, ())), None)

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The axes along which devices have different layers."""
        return tuple(axis for axis, role in self.others.items() if role == "stage")

    def role_of(self, axis: str) -> Role:
        """Returns the role of a mesh axis."""
        for dim, axes in self.batch_dims.items():
            if axis in axes:
                return "context" if dim else "data"
        return self.others.get(axis, "shard_only")

    def batch_specs(self, batch: Batch) -> Any:
        """Returns the `PartitionSpec` of each leaf of a batch; scalars are replicated."""
        return jax.tree.map(lambda x: PartitionSpec(*self.batch_spec[: jnp.ndim(x)]), batch)

    @property
    def batch_spec(self) -> PartitionSpec:
        """The `PartitionSpec` of a leaf that has all dimensions that the mesh splits."""
        return PartitionSpec(*map(self.batch_dims.get, range(max(self.batch_dims) + 1)))
