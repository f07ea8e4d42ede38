"""JAX's three modes of parallelism, for one model and one layout.

- `manual`: inside `shard_map` every device runs the code on its own part, and every collective is
  one that this package wrote. The only mode in which a program says all that it sends.
- `auto`: the code is that of one device, on global arrays. A parameter is constrained to be whole
  where it is used and its gradient to be sharded as its state is; XLA derives the collectives.
- `explicit`: likewise, but the shardings are part of the types, and `reshard` is where they change.
- `auto-unconstrained`: `auto` with nothing said about use: XLA is free to move activations instead.

Only two things differ between them: how a function runs on the mesh, and what a parameter's box
does when it is asked for its parameter. In the last three the statistics of a batch (`BatchNorm`)
are those of the global batch, and dropout draws one mask for it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from manualpar.core.collectives import AS_STORED, GATHER_SCOPE, SCATTER_SCOPE, Wire
from manualpar.core.partitioning import ShardedParameter, cast_floating
from manualpar.core.strategy import Mode
from manualpar.sharding.annotations import Rules
from manualpar.sharding.layout import Placement, names_to_spec
from manualpar.sharding.mesh import axes_size, axis_tuple
from manualpar.sharding.mesh_context import no_mesh


class GlobalParameter(ShardedParameter, eq=False):
    """A parameter, sharded in global arrays, in a box that has it made whole where it is used.

    Attributes:
      mode: Any but `"manual"`.
      mesh: The mesh.
    """

    mode: Mode = flax.struct.field(default="auto", pytree_node=False)
    mesh: Any = flax.struct.field(default=None, pytree_node=False)

    def unbox(self, apply_constraint: bool = True) -> Any:
        """Constrains the parameter to be whole over the axes it is gathered over.

        Communication:
          None of ours; XLA gathers.
        """
        del apply_constraint
        return self.finish(self.gather_data_axes().value)

    def gather_data_axes(self) -> "GlobalParameter":
        """The same box of a parameter that is constrained to be whole."""
        # Types that shard a dim which a layer contracts would be ambiguous: explicit gathers all.
        gathered = {*self.gather_axes, *(self.storage_axes if self.mode == "explicit" else ())}
        names = tuple(None if set(axis_tuple(n)) & gathered else n for n in self.names)
        value = cast_floating(self.value, self.wire.gather_dtype)
        with jax.named_scope(GATHER_SCOPE):
            if self.mode == "auto":
                specs = (names_to_spec(names), names_to_spec(self.names))
                value = _make_whole(value, *(NamedSharding(self.mesh, spec) for spec in specs))
            else:
                value = constrain(self.mode, value, self.mesh, names_to_spec(names))
        return self.replace(value=self.unpad(value), names=names, sizes=())


def _constrain_whole(x: jax.Array, whole: Any, sharded: Any) -> jax.Array:
    del sharded
    return jax.lax.with_sharding_constraint(x, whole)


def _constrain_sharded(g: jax.Array, sharded: Any) -> jax.Array:
    with jax.named_scope(SCATTER_SCOPE):
        return jax.lax.with_sharding_constraint(g, sharded)


# By itself a constraint holds for the gradient too, which would be summed whole on every device.
_make_whole = jax.custom_vjp(_constrain_whole, nondiff_argnums=(1, 2))
_make_whole.defvjp(
    lambda x, whole, sharded: (_constrain_whole(x, whole, sharded), None),
    lambda whole, sharded, _, g: (_constrain_sharded(g, sharded),),
)


def box_parameter(
    mode: Mode,
    x: Any,
    place: Placement,
    *,
    as_state: bool,
    mesh: Mesh,
    data_axes: tuple[str, ...],
    wire: Wire = AS_STORED,
    keep_types: bool = False,
) -> Any:
    """Boxes a parameter, or a gradient, that is sharded or cast where it is used.

    Args:
      mode: The mode.
      x: The array: in mode `manual` a device's part of it.
      place: Where it lives.
      as_state: Whether it lies as gradients and the optimizer's state do, or as the parameter.
      mesh: The mesh.
      data_axes: The mesh axes that examples are split over.
      wire: The dtypes that travel, and which way.
      keep_types: Whether dims sharded over other axes than `data_axes` stay so where the parameter
        is used, because the model's own initialisers have typed it so.

    Returns:
      The box; `x` itself if there is nothing to do for one.
    """
    names = place.sharded_names if as_state else place.names
    padding = place.padding if as_state else place.parameter_padding
    axes = tuple(axis for name in names for axis in axis_tuple(name))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        wire = wire.uncast  # A complex parameter travels as it is.
    is_cast = wire.casts
    if not axes and not is_cast:
        return x
    sizes: tuple[int | None, ...] = ()
    if any(padding):
        shards = [axes_size(mesh, axis_tuple(n)) if mode == "manual" else 1 for n in names]
        sizes = tuple(
            size * count - width if width else None
            for size, count, width in zip(x.shape, shards, padding, strict=True)
        )
    arguments: dict[str, Any] = {
        "names": names,
        "gather_axes": data_axes,
        "storage_axes": tuple(a for a in axes if a not in data_axes and not keep_types),
        "sizes": sizes,
        "wire": wire,
    }
    if mode == "manual":
        return ShardedParameter(x, **arguments)
    return GlobalParameter(x, **arguments, mode=mode, mesh=mesh)


def constrain(mode: Mode, x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Says how a global array is to be sharded from here on; `auto-unconstrained` says nothing."""
    if mode == "auto":
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    return jax.sharding.reshard(x, spec) if mode == "explicit" else x


def run_on_mesh(
    mode: Mode, function: Callable[..., Any], *, mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Runs a function on a mesh: on every device's part of its arguments, or on all of them.

    Args:
      mode: The mode.
      function: Of pytrees of arrays: in mode `manual` the local ones, else the global ones.
      mesh: The mesh, all axes of `AxisType.Auto`.
      in_specs: The specs of the arguments.
      out_specs: The specs of the results.

    Returns:
      A function of global arrays.
    """
    if mode == "manual":
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True
        )

    def constrained(*args: Any) -> Any:
        out = function(*args)
        leaves, structure = jax.tree.flatten(out)
        specs = _broadcast(out_specs, out)
        constrained = [constrain(mode, x, mesh, s) for x, s in zip(leaves, specs, strict=True)]
        return jax.tree.unflatten(structure, constrained)

    if mode != "explicit":
        return constrained

    return on_explicit_axes(constrained, mesh=mesh, in_specs=in_specs)


def on_explicit_axes(
    function: Callable[..., Any], *, mesh: Mesh, in_specs: Any
) -> Callable[..., Any]:
    """Runs a function of global arrays where their types say how they are sharded.

    Args:
      function: The function.
      mesh: The mesh, all axes of `AxisType.Auto`; they are explicit inside.
      in_specs: The specs of the arguments.

    Returns:
      A function of the same global arrays.
    """

    def run(*args: Any) -> Any:
        specs = jax.tree.unflatten(jax.tree.structure(args), _broadcast(in_specs, args))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.sharding.explicit_axes(function, axes=mesh.axis_names, in_sharding=specs)(
                *args
            )

    return run


def on_auto_axes(function: Callable[..., Any], *, mesh: Mesh, out_specs: Any) -> Callable[..., Any]:
    """Runs a function on automatic axes, of global arrays whose mesh may have explicit ones.

    Args:
      function: The function; it finds no mesh around it.
      mesh: The mesh of its arguments and of its results, all axes of one type.
      out_specs: The specs of the results.

    Returns:
      A function of the same global arrays; `function` itself if the axes are automatic already.
    """
    if AxisType.Explicit not in mesh.axis_types:
        return function

    def untyped(*args: Any) -> Any:
        with no_mesh():
            return function(*args)

    def run(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.sharding.auto_axes(untyped, axes=mesh.axis_names, out_sharding=out_specs)(
                *args
            )

    return run


@contextlib.contextmanager
def model_context(mode: Mode, mesh: Mesh, rules: Rules) -> Iterator[None]:
    """What a model needs around its application in a mode."""
    is_auto = mode == "auto"
    with contextlib.ExitStack() as stack:
        if mode == "explicit":
            stack.enter_context(nn.intercept_methods(keep_dropout_sharded))
        if is_auto:
            # Without a mesh flax's constraints on activations do nothing.
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
        # Elsewhere they must do nothing: axes are manual, or types say it, or nobody is to.
        stack.enter_context(nn.logical_axis_rules(rules if is_auto else ()))
        yield


def split_global_minibatches(
    mode: Mode, batch: Any, num_minibatches: int, mesh: Mesh, axes: tuple[str, ...]
) -> Any:
    """Splits a global batch so that every device's examples stay where they are.

    Returns:
      `[B, ...]` leaves as `[M, B/M, ...]` for `M` minibatches, each with an equal part of every
      device's examples; scalars repeated.
    """
    devices = axes_size(mesh, axes)

    def reshape(x: jax.Array, shape: tuple[int, ...], *names: Any) -> jax.Array:
        spec = PartitionSpec(*names, *(None,) * (len(shape) - len(names)))
        if mode == "explicit":
            return jax.lax.reshape(x, shape, out_sharding=spec)
        return constrain(mode, jax.lax.reshape(x, shape), mesh, spec)

    def split(x: Any) -> jax.Array:
        if not x.ndim:
            return jnp.broadcast_to(x, (num_minibatches,))
        part, rest = x.shape[0] // devices // num_minibatches, x.shape[1:]
        x = reshape(x, (devices, num_minibatches, part, *rest), axes)
        x = jnp.swapaxes(x, 0, 1)
        return reshape(x, (num_minibatches, devices * part, *rest), None, axes)

    return jax.tree.map(split, batch)


def keep_dropout_sharded(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Lets `nn.Dropout`, which draws an unsharded mask, run where shardings are types.

    An interceptor for `flax.linen.intercept_methods`.
    """
    if not isinstance(context.module, nn.Dropout) or context.method_name != "__call__":
        return next_fun(*args, **kwargs)
    dropout, (inputs, *rest) = context.module, args
    given = dict(zip(("deterministic", "rng"), rest, strict=False)) | kwargs
    inactive = nn.merge_param("deterministic", dropout.deterministic, given.get("deterministic"))
    if inactive or dropout.rate in (0, 1):
        return next_fun(*args, **kwargs)
    # The key is an argument too: what a function closes over keeps its explicit type.
    rng = given.pop("rng", None)
    rng = dropout.make_rng(dropout.rng_collection) if rng is None else rng
    sharding = jax.typeof(inputs).sharding
    function = functools.partial(_call_with_rng, next_fun, given)
    return jax.sharding.auto_axes(function, out_sharding=sharding)(inputs, rng)


def _call_with_rng(function: Any, options: Any, inputs: Any, rng: Any) -> Any:
    """A call of a dropout layer with its key."""
    return function(inputs, **options, rng=rng)


def _broadcast(specs: Any, tree: Any) -> list[PartitionSpec]:
    """A spec for each leaf of a tree, from a prefix of it."""
    leaves: list[PartitionSpec] = []
    jax.tree.map(
        lambda spec, part: leaves.extend([spec] * len(jax.tree.leaves(part))),
        specs,
        tree,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    return leaves
