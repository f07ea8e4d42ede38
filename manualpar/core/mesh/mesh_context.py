"""Calls functions with no mesh set, and explains errors about shardings that a mode refuses.

Under `jax.set_mesh(mesh)` the type of every traced array names that mesh, but a program has a mesh
of its own. So no mesh is set while a program is built and while its functions are called, even if
the caller has set a mesh. Each mode sets a mesh for the model if it needs one.

Some ways to state a sharding belong to one mode: `with_sharding_constraint` is for automatic axes,
`out_sharding=` for explicit axes. In the other mode JAX refuses such a statement, with various
messages. This module replaces these messages by one sentence that names the mode to use.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from manualpar.core.trees import Specs

__all__ = [
    "no_mesh",
    "with_auto_axes",
]

# A pattern in JAX's message, the construct that JAX refuses, and the mode that allows it.
_CONSTRUCTS = (
    (r"with_sharding_constraint", "jax.lax.with_sharding_constraint", "auto"),
    (r"`manual_axis_type` field", "a NamedSharding of the whole mesh", "auto"),
    (r"passed to device_put", "jax.device_put to a PartitionSpec", "auto"),
    (r"mesh passed to shard_map", "jax.shard_map over a mesh", "auto"),
    (r"PartitionSpec passed to (\S+) cannot contain", "a sharding in {}", "explicit"),
    (
        r"PartitionSpec when you are not under a mesh",
        "a PartitionSpec (out_sharding=, reshard)",
        "explicit",
    ),
    (r"Going from `Manual` AxisType", "jax.sharding.auto_axes or explicit_axes", "explicit"),
)
# Errors about a sharding of a kind that the mode allows: a pattern in JAX's message, and how to
# correct the sharding.
_MENDS = (
    (r"does not evenly divide the dimension", "Shard a dim that divides, or build another mesh"),
    (r"ambiguous how the output should be", "Say so with out_sharding= there, or use mode='auto'"),
)
_REASONS = {
    "manual": "every device runs the model only on its part of the batch",
    "explicit": "the types of arrays say how they are sharded",
    "auto": "XLA decides how arrays are sharded, and their types do not say it",
    "auto-unconstrained": "only XLA decides how arrays are sharded",
}
_UNKNOWN_AXIS = re.compile(r"Resource axis: (\S+) of (.*) is not found in mesh: (\(.*?\))")


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """Opens a context in which no mesh is set, whatever `jax.set_mesh` has set outside."""
    if jax.sharding.get_abstract_mesh().empty:
        yield  # Opening a context would make jit's caches miss.
        return
    try:
        context: Any = jax.set_mesh(Mesh(np.empty((), object), ()))
    except ValueError:  # Inside a trace only an abstract mesh can be set.
        context = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    with context:
        yield


class JittedOutsideMesh:
    """A jitted function that is called, traced and lowered with no mesh set around it.

    Attributes:
      jitted: The function that `jax.jit` made.
    """

    def __init__(self, jitted: Any, abstract_others: Any = None) -> None:
        """Wraps a function; `abstract_others` is its third argument in traces, if it has one."""
        self.jitted, self._abstract_others = jitted, abstract_others

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the jitted function with no mesh set."""
        with no_mesh():
            return self.jitted(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.jitted, name)
        if name not in ("eval_shape", "lower", "trace"):
            return value
        others = (self._abstract_others,) if self._abstract_others else ()

        def call(*args: Any, **kwargs: Any) -> Any:
            return value(*args, *(others if len(args) == 2 else ()), **kwargs)

        return no_mesh()(call)

    def __reduce__(self) -> NoReturn:
        raise cannot_pickle("a program's step")


def cannot_pickle(name: str) -> TypeError:
    """Returns the error for an object that belongs to the devices of one process."""
    return TypeError(
        f"cannot pickle {name}, because it belongs to the devices of this process; pickle the "
        "arguments of the builder (model, optimizer, loss and options, without mesh) or the "
        "config, and build the program again. Save its state with Checkpoints."
    )


def with_auto_axes(
    function: Callable[..., Any], *, mesh: Mesh, out_specs: Specs
) -> Callable[..., Any]:
    """Wraps a function to run on automatic axes, even if the axes of `mesh` are explicit.

    No mesh is set inside the function. All axes of `mesh` must have the same type. `out_specs` are
    the shardings of the results if the axes are explicit.
    """
    if AxisType.Explicit not in mesh.axis_types:
        return function

    untyped = no_mesh()(function)

    def run(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            axes = mesh.axis_names
            return jax.sharding.auto_axes(untyped, axes=axes, out_sharding=out_specs)(*args)

    return run


@contextlib.contextmanager
def explain_shardings(strategy: str, mode: str) -> Iterator[None]:
    """Explains JAX's errors about shardings in a model; a context manager.

    Other errors stay as they are.
    """
    try:
        yield
    except Exception as error:
        message = str(error).strip()
        unknown = _UNKNOWN_AXIS.search(message)
        if unknown:
            axis, spec, axes = unknown.groups()
            raise ValueError(
                f"{strategy}: the model or the loss shards an array as {spec}, but the mesh has "
                f"the axes {axes}, and {axis!r} is none of them. Name one of these axes, or build "
                "the mesh with the axis."
            ) from error
        first_line = message.partition("\n")[0]
        for pattern, mend in _MENDS:
            if re.search(pattern, message):
                raise ValueError(
                    f"{strategy}: the model or the loss shards an array in a way that does not fit "
                    f"mode={mode!r}: {first_line} {mend}."
                ) from error
        for pattern, construct, needed in _CONSTRUCTS:
            found = re.search(pattern, message)
            if found and needed != mode:
                name = construct.format(*found.groups())
                raise ValueError(
                    f"{strategy}: the model or the loss uses {name} with mode={mode!r}; expected "
                    f"none, because {_REASONS[mode]}. Use mode={needed!r}, or remove it. (JAX "
                    f"says: {first_line})"
                ) from error
        raise
