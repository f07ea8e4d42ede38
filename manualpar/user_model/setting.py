"""Where a program runs the model: on which mesh, in which mode, with which meaning of names.

All that a model's call needs to know of the mode is here.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from manualpar.core.collectives import cast_to_varying
from manualpar.core.strategy import Mode
from manualpar.modes.modes import model_context, on_explicit_axes, run_on_mesh
from manualpar.sharding.annotations import Rules
from manualpar.sharding.mesh import with_axis_types


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a program runs the model.

    Attributes:
      mesh: The mesh, all axes of `AxisType.Auto`.
      mode: Who writes the collectives.
      data_axes: The mesh axes that examples are split over.
      rules: The mesh axes that logical names mean.
    """

    mesh: Mesh
    mode: Mode
    data_axes: tuple[str, ...]
    rules: Rules

    @property
    def is_manual(self) -> bool:
        """Whether every device runs the model on its own part of the batch."""
        return self.mode == "manual"

    def context(self) -> contextlib.AbstractContextManager[None]:
        """The context that the model needs around its call."""
        return model_context(self.mode, self.mesh, self.rules)

    def vary(self, tree: Any) -> Any:
        """Types arrays as varying over the devices, as parameters are in a step."""
        return cast_to_varying(tree, self.data_axes) if self.is_manual else tree

    def trace(self, function: Callable[..., Any], in_specs: Any, *args: Any) -> None:
        """Traces a function for what it notes on the way, as a step would run it."""

        def in_context(*args: Any) -> None:
            with self.context():
                function(*args)

        run = run_on_mesh(
            self.mode, in_context, mesh=self.mesh, in_specs=in_specs, out_specs=PartitionSpec()
        )
        jax.eval_shape(run, *args)

    @property
    def has_mesh_for_models(self) -> bool:
        """Whether the mode has a mesh that a model may name axes of, outside of `shard_map`."""
        return self.mode in ("auto", "explicit")

    def on_mesh(self, function: Callable[..., Any], in_specs: Any) -> Callable[..., Any]:
        """A function of global arrays that finds the mesh around it."""
        if self.mode == "explicit":
            return on_explicit_axes(function, mesh=self.mesh, in_specs=in_specs)

        def run(*args: Any) -> Any:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return function(*args)

        return run

    def make_model(self, make: Callable[[], Any]) -> Any:
        """Makes a model, with the mesh around it only if the model cannot do without."""
        try:
            return make()
        except Exception:  # Whatever it is: if it was not the mesh, it is raised again.
            if not self.has_mesh_for_models:
                raise
        axis_type = AxisType.Explicit if self.mode == "explicit" else AxisType.Auto
        with jax.sharding.use_abstract_mesh(with_axis_types(self.mesh, axis_type).abstract_mesh):
            return make()
