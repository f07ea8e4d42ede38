"""The modes in which a step runs on global arrays and XLA derives the collectives.

- `auto`: a parameter is constrained to be whole where it is used, and its gradient to be sharded as
  its optimizer state is.
- `explicit`: the same, but the shardings are part of the types, and `reshard` changes them.
- `auto-unconstrained`: as `auto` without a constraint where a parameter is used, so that XLA may
  move activations instead.

Here the statistics of a batch (`BatchNorm`) are those of the global batch, and dropout draws one
mask for it.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from manualpar.core.mesh.axes import Names, axes_size, axis_tuple, with_axis_types
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.mesh.splitting import check_minibatches
from manualpar.core.modes.manual import Manual, register_mode
from manualpar.core.modes.strategy import ModeName
from manualpar.core.modes.variable_reduction import CollectionSync
from manualpar.core.parameters.placement import Placement, map_in_scopes, names_to_spec
from manualpar.core.parameters.sharded_parameter import (
    ShardedParameter,
    boxed_axes,
    cast_floating,
    is_box,
    pad_leaf,
    unpad_leaf,
)
from manualpar.core.state.metrics import Metrics
from manualpar.core.tracing.scopes import GATHER_SCOPE, NEW_PARAMS_SCOPE, SCATTER_SCOPE


class GlobalArrays(Manual):
    """How a step runs on global arrays; the methods are those of `Manual`."""

    writes_collectives: ClassVar[bool] = False

    def constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Says how a global array is sharded from here on."""
        raise NotImplementedError

    @property
    def varying_axes(self) -> tuple[str, ...]:
        """None: the code sees all examples."""
        return ()

    def run(
        self, function: Callable[..., Any], *, in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Makes a function of global arrays one whose results have the given specs."""
        del in_specs

        def constrained(*args: Any) -> Any:
            out = function(*args)
            leaves, structure = jax.tree.flatten(out)
            specs = _broadcast(out_specs, out)
            leaves = [self.constrain(x, spec) for x, spec in zip(leaves, specs, strict=True)]
            return jax.tree.unflatten(structure, leaves)

        return constrained

    def fold(self, rng: jax.Array) -> jax.Array:
        """The key as it is: the code sees all examples."""
        return rng

    def to_zigzag(self, batch: Any, roles: AxisRoles) -> Any:
        """The batch: each sequence is whole."""
        del roles
        return batch

    def split(self, batch: Any, num_minibatches: int, roles: AxisRoles) -> Any:
        """Splits a batch so that every device's examples stay where they are.

        Each minibatch has an equal part of every device's examples.
        """
        axes = roles.batch_dims[0]  # Those of sequences divide no examples.
        devices = axes_size(self.mesh, axes)
        check_minibatches(batch, num_minibatches, devices=devices)

        def split(x: Any) -> jax.Array:
            if not x.ndim:
                return jnp.broadcast_to(x, (num_minibatches,))
            part, rest = x.shape[0] // devices // num_minibatches, x.shape[1:]
            names = roles.batch_spec[1 : x.ndim]
            shape = (devices, num_minibatches, part, *rest)
            x = self._reshape(x, shape, axes, None, None, *names)
            x = jnp.swapaxes(x, 0, 1)
            return self._reshape(x, (num_minibatches, devices * part, *rest), None, axes, *names)

        return jax.tree.map(split, batch)

    def _reshape(self, x: jax.Array, shape: tuple[int, ...], *names: Any) -> jax.Array:
        return self.constrain(jax.lax.reshape(x, shape), _full_spec(shape, names))

    def scatter(self, place: Placement, shard: Any, g: Any) -> Any:
        """Has XLA leave each device its shard of a gradient."""
        if boxed_axes(g) == boxed_axes(shard):
            return g
        g = pad_leaf(g.value if is_box(g) else g, place.padding)
        return shard.replace(value=self.constrain(g, place.state_spec))

    def sync(self, place: Placement, shard: Any, g: Any) -> Any:
        """The gradient as it is: that of the global batch."""
        del place, shard
        return g

    def sync_metrics(self, metrics: Metrics) -> Metrics:
        """The metrics as they are."""
        return metrics

    def sync_collections(
        self, collections: Any, before: Any, rules: Mapping[str, CollectionSync]
    ) -> Any:
        """The collections as they are."""
        del before, rules
        return collections

    def replicate(self, placements: Any, params: Any) -> Any:
        """Has XLA gather parameters that every device keeps whole."""

        def gather(place: Placement, x: jax.Array) -> jax.Array:
            if place.state_names is None:
                return x
            with jax.named_scope(NEW_PARAMS_SCOPE):
                whole = jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, place.spec))
                return unpad_leaf(whole, place.padding)

        return map_in_scopes(gather, placements, params)

    def _make_box(self, x: jax.Array, names: Names, **fields: Any) -> ShardedParameter:
        return GlobalParameter(x, names, mode=self, **fields)

    def make_whole(self, x: jax.Array, names: Names, sharded: Names) -> jax.Array:
        """Constrains a parameter to be sharded only over `names`, where it was over `sharded`."""
        del sharded
        return self.constrain(x, names_to_spec(names))


@register_mode
class Auto(GlobalArrays):
    """Mode `auto`."""

    name: ClassVar[ModeName] = "auto"

    def constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """A constraint for XLA."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """The mesh and the rules for constraints on activations."""
        # Without a mesh flax's constraints on activations do nothing.
        mesh = self.mesh.abstract_mesh
        with jax.sharding.use_abstract_mesh(mesh), nn.logical_axis_rules(self.rules):
            yield

    @property
    def model_mesh(self) -> AbstractMesh | None:
        """The mesh, with automatic axes."""
        return self.mesh.abstract_mesh

    def under_mesh(self, function: Callable[..., Any], in_specs: Any) -> Callable[..., Any]:
        """A function that finds the mesh around it."""
        del in_specs

        def run(*args: Any) -> Any:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return function(*args)

        return run

    def make_whole(self, x: jax.Array, names: Names, sharded: Names) -> jax.Array:
        """A constraint, and one for the gradient."""
        # By itself a constraint holds for the gradient too, which would be summed whole everywhere.
        shardings = [NamedSharding(self.mesh, names_to_spec(n)) for n in (names, sharded)]
        return _make_whole(x, *shardings)


@register_mode
class Unconstrained(GlobalArrays):
    """Mode `auto-unconstrained`."""

    name: ClassVar[ModeName] = "auto-unconstrained"

    def constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """The array as it is."""
        del spec
        return x


@register_mode
class Explicit(GlobalArrays):
    """Mode `explicit`."""

    name: ClassVar[ModeName] = "explicit"

    def constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """An array of another type."""
        return jax.sharding.reshard(x, spec)

    def run(
        self, function: Callable[..., Any], *, in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Makes a function of typed global arrays one of untyped ones."""
        constrained = super().run(function, in_specs=in_specs, out_specs=out_specs)
        return self.under_mesh(constrained, in_specs)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """A way for dropout to run where shardings are types."""
        with nn.logical_axis_rules(()), nn.intercept_methods(_keep_dropout_sharded):
            yield

    @property
    def model_mesh(self) -> AbstractMesh | None:
        """The mesh, with explicit axes."""
        mesh: AbstractMesh = with_axis_types(self.mesh, AxisType.Explicit).abstract_mesh
        return mesh

    def under_mesh(self, function: Callable[..., Any], in_specs: Any) -> Callable[..., Any]:
        """A function of arrays that are typed with the given specs."""

        def run(*args: Any) -> Any:
            specs = jax.tree.unflatten(jax.tree.structure(args), _broadcast(in_specs, args))
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return jax.sharding.explicit_axes(
                    function, axes=self.mesh.axis_names, in_sharding=specs
                )(*args)

        return run

    def box(self, place: Placement, x: jax.Array, *, as_state: bool = False) -> Any:
        """A box that makes the parameter whole: layers that know of no axis cannot compute with it.

        (Their global products would contract dims that types shard.)
        """
        names = place.names if place.split_axes else ()
        split = [axis for name in names for axis in axis_tuple(name) if axis in place.split_axes]
        storage_axes = (*place.storage_axes, *split)
        return super().box(
            dataclasses.replace(place, storage_axes=storage_axes), x, as_state=as_state
        )

    def _reshape(self, x: jax.Array, shape: tuple[int, ...], *names: Any) -> jax.Array:
        return jax.lax.reshape(x, shape, out_sharding=_full_spec(shape, names))


class GlobalParameter(ShardedParameter, eq=False):
    """A parameter, sharded in global arrays, in a box that has it made whole where it is used.

    Attributes:
      mode: The mode.
    """

    mode: Any = flax.struct.field(default=None, pytree_node=False)

    def unbox(self, apply_constraint: bool = True) -> Any:
        """Constrains the parameter to be whole over the axes it is gathered over.

        Communication:
          None of ours; XLA gathers.
        """
        del apply_constraint
        gathered = self.gather_data_axes()
        return gathered.finish(gathered.value)

    def gather_data_axes(self) -> "GlobalParameter":
        """The same box of a parameter that is constrained to be whole."""
        # Types that shard a dim which a layer contracts would be ambiguous: explicit gathers all.
        gathered = {*self.gather_axes}
        if isinstance(self.mode, Explicit):
            gathered |= {*self.storage_axes}
        names = tuple(None if set(axis_tuple(n)) & gathered else n for n in self.names)
        value = cast_floating(self.value, self.wire.gather_dtype)
        with jax.named_scope(GATHER_SCOPE):
            value = self.mode.make_whole(value, names, self.names)
        return self.replace(value=unpad_leaf(value, self.padding), names=names, padding=())


def _constrain_whole(x: jax.Array, whole: Any, sharded: Any) -> jax.Array:
    del sharded
    return jax.lax.with_sharding_constraint(x, whole)


def _constrain_sharded(g: jax.Array, sharded: Any) -> jax.Array:
    with jax.named_scope(SCATTER_SCOPE):
        return jax.lax.with_sharding_constraint(g, sharded)


_make_whole = jax.custom_vjp(_constrain_whole, nondiff_argnums=(1, 2))
_make_whole.defvjp(
    lambda x, whole, sharded: (_constrain_whole(x, whole, sharded), None),
    lambda whole, sharded, _, g: (_constrain_sharded(g, sharded),),
)


def _keep_dropout_sharded(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
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
    return function(inputs, **options, rng=rng)


def _full_spec(shape: tuple[int, ...], names: tuple[Any, ...]) -> PartitionSpec:
    return PartitionSpec(*names, *(None,) * (len(shape) - len(names)))


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
