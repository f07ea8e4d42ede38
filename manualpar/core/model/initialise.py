"""Initialises and traces a model, on a mesh if the model needs one.

Most models are made and initialised without a mesh. A model that constrains shardings, in its call
(`with_sharding_constraint`) or in its initialisers (`out_sharding=`), may need a mesh. If the call
of such a model fails without a mesh, the model is called on the mode's mesh. The values do not
depend on the mesh.

A sharded type of an initialiser's result counts as an annotation: the parameter is sharded over the
axes of the type, as with `nn.with_partitioning`.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from manualpar.core.mesh.axes import axis_tuple
from manualpar.core.model.interface import InitArgs, ModelInterface
from manualpar.core.modes.mode import Mode
from manualpar.core.parameters.collectives import cast_to_varying
from manualpar.core.parameters.sharded_parameter import is_box
from manualpar.core.trees import Batch, Params, Specs, Variables

Init = Callable[[jax.Array], dict[str, Any]]


class TypedParameter(nn.Partitioned):
    """A parameter that its initialiser typed as sharded; `names` are the axes of the type."""


def init_variables(
    model: ModelInterface, rng: jax.Array, batch: Batch, init_args: InitArgs | None = None
) -> dict[str, Any]:
    """Makes the variables by collection: `model.init({"params": rng}, *args, **kwargs)`.

    `ModelInterface.initial_call` makes the arguments from a batch of zeros.
    """
    args, kwargs = model.initial_call(jax.tree.map(jnp.zeros_like, batch), init_args)
    return model.init({"params": rng}, *args, **kwargs)


def initialisation(
    model: ModelInterface,
    batch: Batch,
    batch_specs: Specs,
    mode: Mode,
    *,
    init_args: InitArgs | None,
    cast: Callable[[Any], Any],
) -> tuple[Init, dict[str, Any]]:
    """Makes the function that initialises a model from a key, and traces it once.

    Returns:
      A function from a key to the variables by collection, and the abstract variables. Both have
      parameters to which `cast` was applied. Annotated and typed parameters are in boxes.
    """

    def init(rng: jax.Array, batch: Batch = batch) -> dict[str, Any]:
        variables = init_variables(model, rng, batch, init_args)
        params = jax.tree.map(_box_typed, variables.get("params", {}), is_leaf=is_box)
        return variables | {"params": cast(params)}

    def init_on_mesh(rng: jax.Array) -> dict[str, Any]:
        run = mode.under_mesh(init, (PartitionSpec(), batch_specs))
        variables: dict[str, Any] = run(rng, jax.tree.map(jnp.zeros_like, batch))
        return variables

    key = jax.eval_shape(lambda: jax.random.key(0))  # Abstract, so that no device is used.
    found: tuple[Init, dict[str, Any]] = with_mesh_if_needed(
        mode,
        lambda: (init, jax.eval_shape(init, key)),
        lambda: (init_on_mesh, jax.eval_shape(init_on_mesh, key)),
    )
    return found


def typed_specs(params: Params) -> Any:
    """Returns, for each parameter, the `PartitionSpec` in the type that its initialiser gave it."""
    return jax.tree.map(
        lambda x: PartitionSpec(*x.names) if isinstance(x, TypedParameter) else PartitionSpec(),
        params,
        is_leaf=is_box,
    )


def _box_typed(x: Any) -> Any:
    """Boxes a parameter that is sharded by its type."""
    names = () if is_box(x) else tuple(jax.typeof(x).sharding.spec)
    return TypedParameter(x, names=names) if any(map(axis_tuple, names)) else x


def with_mesh_if_needed(
    mode: Mode, call: Callable[[], Any], call_on_mesh: Callable[[], Any]
) -> Any:
    """Calls `call`; if it fails and the mode has a mesh for models, calls `call_on_mesh`."""
    try:
        return call()
    except Exception:  # If the missing mesh is not the cause, the second call fails too.
        if mode.model_mesh is None:
            raise
    return call_on_mesh()


def trace(mode: Mode, function: Callable[..., Any], in_specs: Specs, *args: Any) -> None:
    """Traces a function of abstract global arguments as a step would run it.

    The function's first argument is a tree of variables, which is cast to vary over devices.
    """

    def on_device(variables: Variables, *args: Any) -> None:
        with mode.context():
            function(cast_to_varying(variables, mode.varying_axes), *args)

    jax.eval_shape(mode.run(on_device, in_specs=in_specs, out_specs=PartitionSpec()), *args)
