"""Where a program runs the model. All that a model's call needs to know of the mode is here."""

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

    def trace(self, function: Callable[..., Any], in_specs: Any, *args: Any) -> None:
        """Traces a function as a step would run it.

        Args:
          function: Its first argument is a tree of variables, which is made to vary over devices.
          in_specs: The specs of the arguments.
          *args: The abstract global arguments.
        """

        def on_device(variables: Any, *args: Any) -> None:
            varying = cast_to_varying(variables, self.data_axes) if self.is_manual else variables
            with self.context():
                function(varying, *args)

        specs = {"in_specs": in_specs, "out_specs": PartitionSpec()}
        jax.eval_shape(run_on_mesh(self.mode, on_device, mesh=self.mesh, **specs), *args)

    def with_mesh_if_needed(self, call: Callable[[], Any], call_on_mesh: Callable[[], Any]) -> Any:
        """Calls the first function; the second if that fails in the mode "auto" or "explicit"."""
        try:
            return call()
        except Exception:  # Whatever it is: if it was not the mesh, it is raised again.
            if self.mode not in ("auto", "explicit"):
                raise
        return call_on_mesh()

    def on_mesh(self, function: Callable[..., Any], in_specs: Any) -> Callable[..., Any]:
        """A function of global arrays that finds the mesh of the mode around it."""
        if self.mode == "explicit":
            return on_explicit_axes(function, mesh=self.mesh, in_specs=in_specs)
        return self.under_mesh(function)

    def under_mesh(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that finds the mesh of the mode around it and takes no sharded arrays."""
        axis_type = AxisType.Explicit if self.mode == "explicit" else AxisType.Auto

        def run(*args: Any) -> Any:
            mesh = with_axis_types(self.mesh, axis_type).abstract_mesh
            with jax.sharding.use_abstract_mesh(mesh):
                return function(*args)

        return run
