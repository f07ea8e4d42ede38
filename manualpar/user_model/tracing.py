"""How the model is traced and initialised: as a step would run it, with a mesh if it needs one."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from manualpar.core.collectives import cast_to_varying
from manualpar.modes.manual import Manual


def trace(mode: Manual, function: Callable[..., Any], in_specs: Any, *args: Any) -> None:
    """Traces a function as a step would run it.

    Args:
      mode: The mode.
      function: Its first argument is a tree of variables, which is made to vary over devices.
      in_specs: The specs of the arguments.
      *args: The abstract global arguments.
    """

    def on_device(variables: Any, *args: Any) -> None:
        with mode.context():
            function(cast_to_varying(variables, mode.varying_axes), *args)

    jax.eval_shape(mode.run(on_device, in_specs=in_specs, out_specs=PartitionSpec()), *args)


def with_mesh_if_needed(
    mode: Manual, call: Callable[[], Any], call_on_mesh: Callable[[], Any]
) -> Any:
    """Calls the first function; the second if that fails and the mode has a mesh for models."""
    try:
        return call()
    except Exception:  # Whatever it is: if it was not the mesh, it is raised again.
        if mode.model_mesh is None:
            raise
    return call_on_mesh()
