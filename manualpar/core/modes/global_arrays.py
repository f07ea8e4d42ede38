"""The modes in which a step runs on global arrays and XLA derives the collectives.

- `auto`: a parameter is constrained to be replicated where it is used. Its gradient is constrained
  to be sharded like its optimizer state.
- `explicit`: the shardings are the same, but part of the arrays' types, and `reshard` changes them.
- `auto-unconstrained`: like `auto`, but without a constraint where a parameter is used. So XLA may
  send activations instead of the parameter.

In these modes batch statistics (`BatchNorm`) are computed over the global batch, and dropout draws
one mask for the global batch.
"""

import abc
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

from manualpar.core.mesh.axes import Names, axes_size, axis_tuple, names_to_spec, with_axis_types
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.mesh.splitting import check_minibatches
from manualpar.core.modes.gradients import Sums
from manualpar.core.modes.mode import Mode
from manualpar.core.modes.strategy import ModeName
from manualpar.core.modes.variable_reduction import Rule
from manualpar.core.parameters.placement import ParameterSharding, map_in_scopes
from manualpar.core.parameters.sharded_parameter import (
    ShardedParameter,
    boxed_axes,
    cast_floating,
    is_box,
    pad_leaf,
    unpad_leaf,
)
from manualpar.core.tracing.scopes import GATHER_SCOPE, NEW_PARAMS_SCOPE, SCATTER_SCOPE
from manualpar.core.trees import Batch, Collections, Params, Placements, Specs


class GlobalArrays(Mode):
    """Runs the operations of a step on global arrays; see `Mode` for the methods."""

    writes_collectives: ClassVar[bool] = False

    @abc.abstractmethod
    def constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Constrains the sharding of a global array."""

    @property
    def varying_axes(self) -> tuple[str, ...]:
        """Always `()`, because the code runs on the global batch."""
        return ()

    def run(
        self, function: Callable[..., Any], *, in_specs: Specs, out_specs: Specs
    ) -> Callable[..., Any]:
        """Wraps a function of global arrays so that its results are sharded by `out_specs`."""
        del in_specs

        def constrained(*args: Any) -> Any:
            out = function(*args)
            leaves, structure = jax.tree.flatten(out)
            specs = _broadcast(out_specs, out)
            leaves = [self.constrain(x, spec) for x, spec in zip(leaves, specs, strict=True)]
            return jax.tree.unflatten(structure, leaves)

        return constrained

    def fold(self, rng: jax.Array) -> jax.Array:
        """Returns the key unchanged, because the code runs on the global batch."""
        return rng

    def to_zigzag(self, batch: Batch, roles: AxisRoles) -> Any:
        """Returns the batch unchanged, because the code runs on full sequences."""
        del roles
        return batch

    def split(self, batch: Batch, num_minibatches: int, roles: AxisRoles) -> Any:
        """Splits a batch into minibatches without moving an example to another device.

        Each minibatch has an equal part of every device's examples.
        """
        axes = roles.batch_dims[0]  # The axes of dim 1 split sequences, not examples.
        devices = axes_size(self.mesh, axes)
        check_minibatches(batch, num_minibatches, devices=devices)

        def split(x: Any) -> jax.Array:
            if not x.ndim:
                return jnp.broadcast_to(x, (num_minibatches,))
            size, rest = x.shape[0] // devices // num_minibatches, x.shape[1:]
            names = roles.batch_spec[1 : x.ndim]
            shape = (devices, num_minibatches, size, *rest)
            x = self._reshape(x, shape, axes, None, None, *names)
            x = jnp.swapaxes(x, 0, 1)
            return self._reshape(x, (num_minibatches, devices * size, *rest), None, axes, *names)

        return jax.tree.map(split, batch)

    def _reshape(self, x: jax.Array, shape: tuple[int, ...], *names: Any) -> jax.Array:
        return self.constrain(jax.lax.reshape(x, shape), _full_spec(shape, names))

    def scatter(self, place: ParameterSharding, shard: Any, g: Any) -> Any:
        """Constrains a gradient to the sharding of its optimizer state, so that XLA scatters it."""
        if boxed_axes(g) == boxed_axes(shard):
            return g
        g = pad_leaf(g.value if is_box(g) else g, place.padding)
        return shard.replace(value=self.constrain(g, place.state_spec))

    def sync(self, place: ParameterSharding, shard: Any, g: Any) -> Any:
        """Returns the gradient unchanged, because it already covers the global batch."""
        del place, shard
        return g

    def sync_metrics(self, metrics: Sums) -> Sums:
        """Returns the metrics unchanged, because they count all examples."""
        return metrics

    def sync_collections(
        self, collections: Collections, before: Any, rules: Mapping[str, Rule]
    ) -> Any:
        """Returns the collections unchanged, because they are global arrays."""
        del before, rules
        return collections

    def replicate(self, placements: Placements, params: Params) -> Any:
        """Constrains updated parameters to the parameters' specs, so that XLA gathers them."""

        def gather(place: ParameterSharding, x: jax.Array) -> jax.Array:
            if place.state_names is None:
                return x
            with jax.named_scope(NEW_PARAMS_SCOPE):
                x = jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, place.spec))
                return unpad_leaf(x, place.padding)

        return map_in_scopes(gather, placements, params)

    def _make_box(self, x: jax.Array, names: Names, **fields: Any) -> ShardedParameter:
        return GlobalParameter(x, names, mode=self, **fields)

    def unshard(self, x: jax.Array, names: Names, stored_names: Names) -> jax.Array:
        """Constrains a stored parameter to the sharding `names`, so that XLA gathers it.

        It is stored sharded over more axes, `stored_names`.
        """
        del stored_names
        return self.constrain(x, names_to_spec(names))


class Auto(GlobalArrays):
    """Mode `auto`: constrains the shardings of parameters and gradients; types have none."""

    name: ClassVar[ModeName] = "auto"

    def constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Constrains the sharding of a global array."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Sets the mesh and the rules for a model's constraints on activations."""
        # Flax's constraints on activations have an effect only under a mesh.
        mesh = self.mesh.abstract_mesh
        with jax.sharding.use_abstract_mesh(mesh), nn.logical_axis_rules(self.rules):
            yield

    @property
    def model_mesh(self) -> AbstractMesh | None:
        """The mesh, with automatic axes."""
        return self.mesh.abstract_mesh

    def under_mesh(self, function: Callable[..., Any], in_specs: Specs) -> Callable[..., Any]:
        """Wraps a function so that it runs under the mesh."""
        del in_specs

        def run(*args: Any) -> Any:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return function(*args)

        return run

    def unshard(self, x: jax.Array, names: Names, stored_names: Names) -> jax.Array:
        """Constrains a parameter to `names`, and its gradient to `stored_names`."""
        # A plain constraint would also apply to the gradient, and XLA would all-reduce it.
        shardings = [NamedSharding(self.mesh, names_to_spec(n)) for n in (names, stored_names)]
        return _unshard(x, *shardings)


class Unconstrained(GlobalArrays):
    """Mode `auto-unconstrained`: lets XLA choose all shardings inside a step."""

    name: ClassVar[ModeName] = "auto-unconstrained"

    def constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Returns the array unchanged."""
        del spec
        return x


class Explicit(GlobalArrays):
    """Mode `explicit`: the type of each array has its sharding, and `reshard` changes it."""

    name: ClassVar[ModeName] = "explicit"

    def constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Reshards an array, which changes its type."""
        return jax.sharding.reshard(x, spec)

    def run(
        self, function: Callable[..., Any], *, in_specs: Specs, out_specs: Specs
    ) -> Callable[..., Any]:
        """Wraps a function of explicitly sharded arrays so that it accepts any global arrays."""
        constrained = super().run(function, in_specs=in_specs, out_specs=out_specs)
        return self.under_mesh(constrained, in_specs)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Lets `nn.Dropout` run on arrays with explicit shardings, see `_keep_dropout_sharded`."""
        with nn.logical_axis_rules(()), nn.intercept_methods(_keep_dropout_sharded):
            yield

    @property
    def model_mesh(self) -> AbstractMesh | None:
        """The mesh, with explicit axes."""
        mesh: AbstractMesh = with_axis_types(self.mesh, AxisType.Explicit).abstract_mesh
        return mesh

    def under_mesh(self, function: Callable[..., Any], in_specs: Specs) -> Callable[..., Any]:
        """Wraps a function so that its arguments have explicit shardings, `in_specs`."""

        def run(*args: Any) -> Any:
            specs = jax.tree.unflatten(jax.tree.structure(args), _broadcast(in_specs, args))
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return jax.sharding.explicit_axes(
                    function, axes=self.mesh.axis_names, in_sharding=specs
                )(*args)

        return run

    def box(self, place: ParameterSharding, x: jax.Array, *, as_state: bool = False) -> Any:
        """Boxes a parameter so that it is gathered over `place.split_axes` too.

        In this mode layers do not compute with shards, because their products would contract a dim
        that is sharded by its type.
        """
        names = place.names if place.split_axes else ()
        split_axes = [a for name in names for a in axis_tuple(name) if a in place.split_axes]
        shard_only_axes = (*place.shard_only_axes, *split_axes)
        return super().box(
            dataclasses.replace(place, shard_only_axes=shard_only_axes), x, as_state=as_state
        )

    def _reshape(self, x: jax.Array, shape: tuple[int, ...], *names: Any) -> jax.Array:
        return jax.lax.reshape(x, shape, out_sharding=_full_spec(shape, names))


class GlobalParameter(ShardedParameter, eq=False, repr=False):
    """Boxes a sharded global array and unshards the parameter where it is used.

    Attributes:
      mode: The mode, whose methods constrain shardings.
    """

    mode: Any = flax.struct.field(default=None, pytree_node=False)

    def to_array(self) -> Any:
        """Constrains the parameter to be replicated over `gather_axes`.

        Communication:
          XLA adds the gathers; this package adds none.
        """
        gathered = self.gather_data_axes()
        return gathered.finish(gathered.value)

    def gather_data_axes(self) -> "GlobalParameter":
        """Returns the box with its value constrained to be replicated over `gather_axes`."""
        # In mode `explicit` a layer must not contract a dim that is sharded by its type, so this
        # gathers over all axes.
        axes = {*self.gather_axes}
        if isinstance(self.mode, Explicit):
            axes |= {*self.shard_only_axes}
        names = tuple(None if set(axis_tuple(n)) & axes else n for n in self.names)
        value = cast_floating(self.value, self.comm.gather.dtype)
        with jax.named_scope(GATHER_SCOPE):
            value = self.mode.unshard(value, names, self.names)
        return self.replace(value=unpad_leaf(value, self.padding), names=names, padding=())


def _constrain_value(x: jax.Array, sharding: Any, stored: Any) -> jax.Array:
    del stored
    return jax.lax.with_sharding_constraint(x, sharding)


def _constrain_gradient(g: jax.Array, stored: Any) -> jax.Array:
    with jax.named_scope(SCATTER_SCOPE):
        return jax.lax.with_sharding_constraint(g, stored)


_unshard = jax.custom_vjp(_constrain_value, nondiff_argnums=(1, 2))
_unshard.defvjp(
    lambda x, sharding, stored: (_constrain_value(x, sharding, stored), None),
    lambda sharding, stored, _, g: (_constrain_gradient(g, stored),),
)


def _keep_dropout_sharded(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Runs `nn.Dropout` on automatic axes, because the mask that it draws has no sharding.

    This is an interceptor for `flax.linen.intercept_methods`.
    """
    if not isinstance(context.module, nn.Dropout) or context.method_name != "__call__":
        return next_fun(*args, **kwargs)
    dropout, (inputs, *rest) = context.module, args
    options = dict(zip(("deterministic", "rng"), rest, strict=False)) | kwargs
    inactive = nn.merge_param("deterministic", dropout.deterministic, options.get("deterministic"))
    if inactive or dropout.rate in (0, 1):
        return next_fun(*args, **kwargs)
    # The key is an argument too, because a value that a function closes over keeps its explicit
    # type.
    rng = options.pop("rng", None)
    rng = dropout.make_rng(dropout.rng_collection) if rng is None else rng
    sharding = jax.typeof(inputs).sharding
    function = functools.partial(_call_with_rng, next_fun, options)
    return jax.sharding.auto_axes(function, out_sharding=sharding)(inputs, rng)


def _call_with_rng(function: Any, options: Any, inputs: Any, rng: Any) -> Any:
    return function(inputs, **options, rng=rng)


def _full_spec(shape: tuple[int, ...], names: tuple[Any, ...]) -> PartitionSpec:
    return PartitionSpec(*names, *(None,) * (len(shape) - len(names)))


def _broadcast(specs: Specs, tree: Any) -> list[PartitionSpec]:
    """Returns a spec for each leaf of `tree`; `specs` is a prefix of the tree."""
    leaves: list[PartitionSpec] = []
    jax.tree.map(
        lambda spec, subtree: leaves.extend([spec] * len(jax.tree.leaves(subtree))),
        specs,
        tree,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    return leaves
