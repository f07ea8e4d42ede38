"""A model's initialisation, where the model finds the mesh that it asks for.

Most models are made and initialised with no mesh around them. A model that says shardings itself,
in its call (`with_sharding_constraint`) or in its initialisers (`out_sharding=`), needs one: if it
cannot do without, it gets that of the mode. The values do not depend on it.

What an initialiser types counts as an annotation: the parameter is sharded over these axes, as one
of `nn.with_partitioning` is.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from manualpar.core.partitioning import cast_floating, is_box
from manualpar.core.strategy import Mode
from manualpar.modes.modes import on_explicit_axes
from manualpar.nnx.model import Model, as_model
from manualpar.sharding.mesh import axis_tuple, with_axis_types

Init = Callable[[jax.Array], dict[str, Any]]


class TypedParameter(nn.Partitioned):
    """A parameter that its initialiser has typed: the names are those of its type."""


def model_on_mesh(model: Model, *, mode: Mode, mesh: Any) -> Any:
    """Makes a model one with `init` and `apply`, see `as_model`, under the mesh if it needs one."""
    try:
        return as_model(model)
    except Exception:  # Whatever it is: if it was not the mesh, it is raised again.
        if mode not in ("auto", "explicit") or not isinstance(mesh, Mesh | AbstractMesh):
            raise
    axis_type = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    with jax.sharding.use_abstract_mesh(with_axis_types(mesh, axis_type).abstract_mesh):
        return as_model(model)


def initialisation(
    init_variables: Callable[..., dict[str, Any]],
    batch: Any,
    *,
    batch_specs: Any,
    mode: Mode,
    mesh: Mesh,
    dtype: str | None,
) -> tuple[Init, dict[str, Any]]:
    """Makes a model's initialisation a function of a key.

    Args:
      init_variables: Makes the variables of a key and a batch.
      batch: The abstract global batch.
      batch_specs: The spec of each leaf of it.
      mode: The mode.
      mesh: The mesh, all axes of `AxisType.Auto`.
      dtype: What floating-point parameters are cast to, if not `None`.

    Returns:
      A function from a key to the variables by collection, with parameters that are annotated or
      typed in boxes, and the abstract variables.
    """

    def init(rng: jax.Array, batch: Any = batch) -> dict[str, Any]:
        variables = init_variables(rng, batch)
        params = jax.tree.map(_box_typed, variables.get("params", {}), is_leaf=is_box)
        return variables | {
            "params": jax.tree.map(functools.partial(cast_floating, dtype=dtype), params)
        }

    def init_on_auto_axes(rng: jax.Array) -> dict[str, Any]:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return init(rng)

    def init_on_explicit_axes(rng: jax.Array) -> dict[str, Any]:
        specs = (PartitionSpec(), batch_specs)
        run = on_explicit_axes(init, mesh=mesh, in_specs=specs)
        return run(rng, jax.tree.map(jnp.zeros_like, batch))

    key = jax.eval_shape(lambda: jax.random.key(0))  # Abstract: building touches no device.
    try:
        return init, jax.eval_shape(init, key)
    except Exception:  # Whatever it is: if it was not the mesh, it is raised again.
        if mode not in ("auto", "explicit"):
            raise
    on_mesh = init_on_auto_axes if mode == "auto" else init_on_explicit_axes
    return on_mesh, jax.eval_shape(on_mesh, key)


def typed_specs(params: Any) -> Any:
    """The tree of parameters with the spec that its initialiser has typed each with."""
    return jax.tree.map(
        lambda x: PartitionSpec(*x.names) if isinstance(x, TypedParameter) else PartitionSpec(),
        params,
        is_leaf=is_box,
    )


def _box_typed(x: Any) -> Any:
    """A parameter, in a box if its type shards it."""
    names = () if is_box(x) else tuple(jax.typeof(x).sharding.spec)
    return TypedParameter(x, names=names) if any(map(axis_tuple, names)) else x
