"""Finds all facts that a program needs about a model and its loss, by traces.

`trace_model` makes and initialises the model abstractly, traces its loss with a `LossTracer`, and
returns a `TracedModel`. No other module has to find these facts: the model's library, its call, the
collections that it updates, its annotations, and the dims that its loops run over.
"""

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from manualpar.core.mesh.axes import axes_size, axis_tuple, is_axis_bound
from manualpar.core.mesh.splitting import split_minibatches
from manualpar.core.model.apply_fn import (
    OTHER_MODELS,
    SOWN_COLLECTIONS,
    CarryingApply,
    check_shapes_of_collections,
    find_carried_collections,
)
from manualpar.core.model.interface import (
    InitArgs,
    Model,
    ModelInterface,
    RunPhase,
    SownPath,
    check_axis_aliases,
    interface_of,
    noting_declared,
    recording_sows,
    without_sown,
)
from manualpar.core.model.loops import find_loop_dims
from manualpar.core.model.loss_function import (
    LearnedCountError,
    LossFn,
    LossValue,
    Mean,
    call_loss,
    check_loss,
    check_scalar_loss,
    tracing_loss,
)
from manualpar.core.model.options import StoredDtypes
from manualpar.core.modes.mode import Mode
from manualpar.core.modes.variable_reduction import (
    OVERWRITTEN,
    CollectionSync,
    check_sync_collections,
    has_rule,
)
from manualpar.core.parameters.annotations import SplitParameter, take_shared
from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.parameters.placement import (
    Declared,
    ParameterInfo,
    added_dims,
    computed_specs,
    describe_parameters,
    is_trained,
    matrix_of,
    split_names,
    split_over_stages,
    strip_boxes,
)
from manualpar.core.parameters.sharded_parameter import (
    ArrayBox,
    ShardedParameter,
    cast_floating,
    is_box,
)
from manualpar.core.state.metrics import Metrics
from manualpar.core.summary import Summarized
from manualpar.core.tracing.jaxprs import in_scope, read_only_by
from manualpar.core.tracing.scopes import FLOAT8_SCOPE
from manualpar.core.trees import (
    Batch,
    Collections,
    Infos,
    Params,
    Specs,
    Variables,
    path_name,
)

# -------------------------------------------------------------------------------------------------
# Initialises and traces a model, on a mesh if the model needs one.
#
# Most models are made and initialised without a mesh. A model that constrains shardings, in its
# call (`with_sharding_constraint`) or in its initialisers (`out_sharding=`), may need a mesh. If
# the call of such a model fails without a mesh, the model is called on the mode's mesh. The values
# do not depend on the mesh.
#
# A sharded type of an initialiser's result counts as an annotation: the parameter is sharded over
# the axes of the type, as with `nn.with_partitioning`.


Init = Callable[[jax.Array], dict[str, Any]]


class TypedParameter(nn.Partitioned):
    """A parameter that its initialiser typed as sharded; `names` are the axes of the type."""


def init_variables(
    model: ModelInterface, rng: jax.Array, batch: Batch, init_args: InitArgs | None = None
) -> dict[str, Any]:
    """Makes the variables by collection: `model.init({"params": rng}, *args, **kwargs)`.

    `ModelInterface.initial_call` makes the arguments from a batch of zeros. Values that the model
    sows are left out, because they begin anew in each call.
    """
    args, kwargs = model.initial_call(jax.tree.map(jnp.zeros_like, batch), init_args)
    with recording_sows() as sown:
        variables = model.init({"params": rng}, *args, **kwargs)
    return without_sown(variables, sown)


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


def trace(
    mode: Mode,
    function: Callable[..., Any],
    in_specs: Specs,
    *args: Any,
    casts: bool = True,
) -> None:
    """Traces a function of abstract global arguments as a step would run it.

    The function's first argument is a tree of variables. With `casts`, it is cast to vary over
    devices.
    """

    def on_device(variables: Variables, *args: Any) -> None:
        with mode.context():
            axes = mode.varying_axes if casts else ()
            function(cast_to_varying(variables, axes), *args)

    jax.eval_shape(mode.run(on_device, in_specs=in_specs, out_specs=PartitionSpec()), *args)


# -------------------------------------------------------------------------------------------------
# Gives a loss full parameters although the model computes with parts (`split_parameter`).
#
# A penalty on experts covers all experts, as on one device. So a loss gets boxes that gather over
# all axes, including the axes of experts. `apply_fn` turns these boxes back into boxes that do not
# gather split dims. If the loss has gathered an array, `apply_fn` takes this device's part of the
# array.
#
# The type of a gathered array does not vary. If each device adds the array to its loss, the array
# is cast to varying, and the transpose of the cast sums the gradients over the devices. The
# gradient of experts is a sum over devices in any case.


def as_whole(params: Params) -> Any:
    """Makes boxes gather over all axes, for a loss that reads them."""
    return jax.tree.map(
        lambda x: x.replace(is_whole=True) if isinstance(x, ArrayBox) else x, params, is_leaf=is_box
    )


def boxed_parts(infos: Infos, params: Params) -> Any:
    """Boxes this device's shards of split parameters, unless they are in boxes already."""

    def box(info: Any, x: Any) -> Any:
        names = split_names(info)
        return x if is_box(x) or not any(names) else ShardedParameter(x, names)

    return jax.tree.map(box, infos, params)


@dataclasses.dataclass(frozen=True)
class PartOfDevice:
    """Converts a loss's parameters to the parts with which the model computes.

    Attributes:
      infos: The tree of parameters with a `ParameterInfo` at each leaf.
      given: The parameters with which the loss is called. An array in this tree that is in no box
        is a part already.
    """

    infos: Infos
    given: Any

    def __call__(self, params: Params) -> Any:
        """Makes boxes stop gathering split dims; takes this device's part of gathered arrays.

        Communication:
          Forward: none. Backward: one all-reduce for the gradient of each array that the loss has
          gathered.
        """
        given = jax.tree_util.tree_leaves_with_path(self.given, is_leaf=is_box)
        boxed = {path_name(path) for path, x in given if is_box(x)}
        infos = {info.path: info for info in jax.tree.leaves(self.infos) if info.path in boxed}

        def part(path: Any, x: Any) -> Any:
            if isinstance(x, ArrayBox):
                return x.replace(is_whole=False)
            info = infos.get(path_name(path))
            if info is None or is_box(x) or getattr(x, "shape", None) != info.shape:
                return x
            names = split_names(info)
            named = {axis for name in (*names, *info.shared_names) for axis in axis_tuple(name)}
            if not all(map(is_axis_bound, named)):
                return x  # The model computes with global arrays.
            x = cast_to_varying(x, frozenset(named))  # One cast, so that there is one all-reduce.
            for dim, name in enumerate(names):
                if axes := axis_tuple(name):
                    size = x.shape[dim] // jax.lax.axis_size(axes)
                    start = jax.lax.axis_index(axes) * size
                    x = jax.lax.dynamic_slice_in_dim(x, start, size, axis=dim)
            return take_shared(x, info.shared_names)

        return jax.tree_util.tree_map_with_path(part, params, is_leaf=is_box)


# -------------------------------------------------------------------------------------------------
# Other models that a loss calls, such as the discriminator in the loss of a generator.
#
# Each training has its own program, and a step of one program gets the states of the others. In the
# step, the parameters of another model are frozen parameters under the model's name:
# `{**params, "discriminator": its_params}`. So they are placed, cast, gathered, and gathered again
# as frozen parameters are. Its other collections are in the collection `OTHER_MODELS`, by the
# model's name. A loss gets neither: it gets a function for each model.
#
# Invariants: a step returns nothing of another model, so what a call changes in the model's
# variables (such as `batch_stats`) is lost; a state of the program has no part of another model.


@dataclasses.dataclass(frozen=True)
class OtherModel:
    """A model that a loss calls beside its own.

    Attributes:
      interface: The interface of the model.
      variables: The abstract variables by collection; annotated parameters are in boxes.
      infos: The tree of its parameters with a `ParameterInfo` at each leaf, if its own program
        places them; `None` if the program of the loss places them.
      placements: The tree of its parameters with a `ParameterSharding` at each leaf, or `None`
        likewise.
      sends: How often its own strategy sends a parameter, see `Strategy.sends`, or `None` likewise.
    """

    interface: ModelInterface
    variables: Variables
    infos: Any = None
    placements: Any = None
    sends: Callable[..., Any] | None = None


class CallOther:
    """The function with which a loss calls another model: `discriminator(x, train=True)`.

    It takes the arguments of the model's call, and `method`, `rngs` and `mutable` of flax's
    `apply`. `params` are the model's parameters, sharded ones in boxes.
    """

    def __init__(self, name: str, apply: CarryingApply, params: Params) -> None:
        """Binds the model called `name` to its parameters."""
        self._name, self._apply, self.params = name, apply, params

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model; its parameters have no gradient."""
        with jax.named_scope(self._name):
            return self._apply({"params": self.params}, *args, **kwargs)


def bind_other_models(
    loss_fn: LossFn, interface: ModelInterface, others: Mapping[str, OtherModel]
) -> LossFn:
    """Makes a loss of four arguments from a loss that also takes a function for each other model.

    The parameters that the result takes contain those of the other models.
    """
    if not others:
        return interface.adapt_loss(loss_fn)

    def loss(params: Any, apply_fn: CarryingApply, batch: Any, rng: jax.Array) -> Any:
        functions = {
            name: CallOther(name, apply_fn.for_other(name, other.interface), params[name])
            for name, other in others.items()
        }
        adapted = interface.adapt_loss(functools.partial(loss_fn, **functions))
        return adapted(without(params, others), apply_fn, batch, rng)

    return loss


def without(tree: Any, names: Collection[str]) -> Any:
    """Returns a tree of parameters without those of the models `names`."""
    return {name: x for name, x in tree.items() if name not in names} if names else tree


class _Finder:
    """Stands in for another model in a trace of a loss, to find how the loss calls the model.

    Attributes:
      variables: The abstract variables of the model that its first call makes.
    """

    def __init__(self, interface: ModelInterface, variables: Variables | None = None) -> None:
        """Wraps a model; `variables` are its abstract variables if they are known."""
        self.interface, self._known = interface, variables or {}
        self.variables: Variables = self._known

    def forget_call(self) -> None:
        """Forgets the variables that a call has made."""
        self.variables = self._known

    def __call__(self, *args: Any, rngs: Any = None, mutable: Any = False, **kwargs: Any) -> Any:
        """Initialises the model with these arguments and calls it, with parameters of zero."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(x, jax.Array) for x in leaves]

        def init(arrays: list[Any]) -> Any:
            given = iter(arrays)
            pairs = zip(leaves, is_array, strict=True)
            args, kwargs = jax.tree.unflatten(
                structure, [next(given) if y else x for x, y in pairs]
            )
            model = self.interface
            return init_variables(model, jax.random.key(0), None, lambda _: (args, kwargs))

        if not self.variables:
            arrays = [x for x, y in zip(leaves, is_array, strict=True) if y]
            abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
            self.variables = jax.eval_shape(init, abstract)
        variables = self._zeros(varying_axes((args, kwargs)))
        params = {"params": variables.pop("params", {})}
        apply = CarryingApply(self.interface, variables)
        return apply(params, *args, rngs=rngs, mutable=mutable, **kwargs)

    @property
    def params(self) -> Any:
        """The parameters, all zero, as the loss reads them from a `CallOther`."""
        if not self.variables:
            raise ValueError(
                "other_models: the loss reads the parameters of a model before it calls the model, "
                "expected the call first, because the call shows how the model is initialised. Or "
                "give the program of the model."
            )
        return self._zeros(frozenset())["params"]

    def _zeros(self, axes: frozenset[str]) -> dict[str, Any]:
        def zeros(x: Any) -> Any:
            return cast_to_varying(jnp.zeros(x.shape, x.dtype), axes)

        made: dict[str, Any] = jax.tree.map(zeros, strip_boxes(self.variables))
        return made


# -------------------------------------------------------------------------------------------------
# Traces a model's loss as a step will call it, before any parameter is sharded.
#
# Each method answers one question with one trace. A trace computes nothing and touches no device.


class LossTracer:
    """Traces the loss of a model on a mode's mesh.

    Attributes:
      boxed_params: The abstract parameters; annotated and typed parameters are in boxes.
      params: The abstract parameters without boxes.
      infos: The tree of parameters with a `ParameterInfo` at each leaf, made before the dims of
        loops are known.
      collections: The collections that a training state keeps, see `find_collections`.
      describe: `describe(params, loop_dims)` makes a tree like `infos`.
    """

    def __init__(
        self,
        interface: ModelInterface,
        loss_fn: LossFn,
        variables: Variables,
        batch: Batch,
        *,
        batch_specs: Specs,
        mode: Mode,
        others: Mapping[str, OtherModel] = types.MappingProxyType({}),
    ) -> None:
        """Describes the parameters, and traces nothing.

        Args:
          variables: The abstract variables by collection; parameters may be in boxes.
          batch_specs: The tree of the batch with a `PartitionSpec` at each leaf.
          mode: The mode, which decides who writes the collectives.
          others: The other models of the loss, whose parameters are among `variables`.
        """
        self._interface, self._loss_fn, self._mode = interface, loss_fn, mode
        self._batch, self._batch_specs = batch, batch_specs
        self._key = jax.eval_shape(lambda: jax.random.key(0))
        self._variables: Variables = strip_boxes(variables)
        self.boxed_params: Params = variables["params"]
        self.params: Params = self._variables["params"]
        self.collections: Collections = {}
        describe = functools.partial(
            describe_parameters, mesh=mode.mesh, rules=mode.rules, data_axes=mode.data_axes
        )
        known = {name: other.infos for name, other in others.items() if other.infos is not None}

        def describe_all(params: Params, loop_dims: Any) -> Any:
            infos = describe(params, loop_dims)
            return {**infos, **known} if known else infos

        self.describe: Callable[..., Infos] = describe_all
        # Leaves out annotations: they may name dims of loops, which are not known yet.
        unannotated = jax.tree.map(
            lambda x: x if isinstance(x, SplitParameter) else strip_boxes(x),
            self.boxed_params,
            is_leaf=is_box,
        )
        self.infos: Infos = self.describe(unannotated, {})
        typed = typed_specs(self.boxed_params)
        self._param_specs = computed_specs(self.infos) if mode.writes_collectives else typed

    def find_collections(self, init_args: InitArgs | None) -> None:
        """Finds the collections that a state keeps; traces a call if the call may add some."""
        self.collections = find_carried_collections(
            self._interface, self._variables, self._trace_call, init_args
        )

    def check_model(self) -> None:
        """Refuses a model that would give wrong results on the mesh, see `ModelInterface.check`."""
        self._interface.check(lambda model: self.trace_loss(self.params, _as_is, model))

    def stacked(self, pipeline: Any) -> frozenset[str]:
        """Returns the paths of the parameters that `pipeline` splits over stages."""
        found: list[frozenset[str]] = []
        paths = [info.path for info in jax.tree.leaves(self.infos)]
        num_stages = self._mode.mesh.shape[pipeline.axis]

        def on_device(
            params: Params, collections: Collections, rng: jax.Array, batch: Batch
        ) -> None:
            def loss(params: Params) -> Any:
                apply_fn = CarryingApply(self._interface, collections)
                return call_loss(self._loss_fn, params, apply_fn, batch, rng)

            closed = jax.make_jaxpr(loss)(self._model_shards(params))
            found.append(pipeline.stacked(closed, paths, num_stages))

        self._trace(on_device, self.params)
        return found[0]

    def read_in_float8(self, gather_dtype: str | None) -> dict[str, bool]:
        """Returns the parameters that only products in float8 read, by path.

        The value is whether a product gets a parameter as `gather_dtype` has it. Otherwise it casts
        the parameter to a narrower dtype, and codes of the cast parameter are others.
        """
        infos = jax.tree.leaves(self.infos)
        found: list[dict[str, bool]] = []

        def is_exact(dtype: Any, read: frozenset[Any]) -> bool:
            sent = dtype, gather_dtype or dtype
            return all(any(jnp.promote_types(x, y) == y for x in sent) for y in read)

        def on_device(
            params: Params, collections: Collections, rng: jax.Array, batch: Batch
        ) -> None:
            def loss(params: Params) -> Any:
                given = as_whole(boxed_parts(self.infos, params))
                part = PartOfDevice(self.infos, given)
                apply_fn = CarryingApply(self._interface, collections, part)
                return call_loss(self._loss_fn, given, apply_fn, batch, rng)

            closed = jax.make_jaxpr(loss)(self._model_shards(params))
            read = read_only_by(closed.jaxpr, in_scope(FLOAT8_SCOPE))
            pairs = [(info, read[i]) for i, info in enumerate(infos) if read[i]]
            found.append({info.path: is_exact(info.dtype, dtypes) for info, dtypes in pairs})

        self._trace(on_device, self.params)
        return found[0]

    def loop_dims(
        self,
        strategy: str,
        is_gathered: Callable[[ParameterInfo], bool],
        is_reduced: Callable[[ParameterInfo], bool],
        *,
        gathers_in_loss: bool,
    ) -> dict[str, frozenset[int]]:
        """Finds the dims that loops run over, by path, for each parameter that may be sharded.

        Args:
          is_gathered: Returns whether a parameter without an annotation may be in a box.
          is_reduced: As in `trace_model`.
          gathers_in_loss: As in `find_loop_dims`.
        """
        boxed = jax.tree.map(
            lambda x, info: is_box(x) or is_gathered(info),
            self.boxed_params,
            self.infos,
            is_leaf=is_box,
        )
        optional = jax.tree.map(is_reduced, self.infos)
        if not any(jax.tree.leaves((boxed, optional))):
            return {}
        return find_loop_dims(
            strategy,
            self.trace_loss,
            self.params,
            boxed,
            optional,
            gathers_in_loss=gathers_in_loss,
        )

    def computed_from_parameters(
        self, rules: Mapping[str, Any], num_minibatches: int
    ) -> frozenset[str]:
        """Finds the variables that the loss computes from parameters and constants alone.

        A step casts parameters to vary over the devices. So the type of an average of parameters (a
        teacher) says that it differs between devices. Here parameters are not cast, so the types
        tell which variables depend on examples or on random numbers.

        Returns:
          The names of the variables, without the variables for which `rules` has a rule.
        """
        names = [
            path_name(path)
            for path, _ in jax.tree_util.tree_leaves_with_path(self.collections)
            if not has_rule(path_name(path), rules)
        ]
        if not names or not self._mode.writes_collectives:
            return frozenset()
        axes = self._mode.data_axes
        differ: list[set[str]] = []

        def differing(params: Params, collections: Collections, *args: Any) -> set[str]:
            """Returns the variables that differ between devices after all minibatches."""
            found: set[str] = set()
            while True:
                after = self._call_loss(params, collections, *args)
                leaves = jax.tree_util.tree_leaves_with_path(after)
                now = {path_name(path) for path, x in leaves if varying_axes(x) & set(axes)}
                if now <= found or num_minibatches == 1:
                    return now

                def cast(path: Any, x: Any, now: set[str] = now) -> Any:
                    return cast_to_varying(x, axes) if path_name(path) in now else x

                collections = jax.tree_util.tree_map_with_path(cast, collections)
                found = now

        def on_device(
            params: Params, collections: Collections, rng: jax.Array, batch: Batch
        ) -> None:
            differ.append(differing(params, collections, self._mode.fold(rng), batch))

        self._trace(on_device, self.params)
        found = differ[-1].intersection(names)
        if found:
            self._trace(on_device, self.params, casts=False)
        return frozenset(found - differ[-1])

    def _call_loss(
        self, params: Params, collections: Collections, rng: jax.Array, batch: Batch
    ) -> Collections:
        """Calls the loss with parameters on a device; returns the collections after the call."""
        params = as_whole(boxed_parts(self.infos, self._model_shards(params)))
        apply_fn = CarryingApply(self._interface, collections, PartOfDevice(self.infos, params))
        call_loss(self._loss_fn, params, apply_fn, batch, rng)
        return apply_fn.collections

    def trace_loss(
        self, params: Params, box: Callable[[Any], Any], model: ModelInterface | None = None
    ) -> None:
        """Traces the loss with `box(params)` as its parameters; `model`, if given, is the model."""
        mode, model = self._mode, model or self._interface

        def on_device(
            params: Params, collections: Collections, rng: jax.Array, batch: Batch
        ) -> None:
            rng, params = mode.fold(rng), box(self._model_shards(params))
            if mode.writes_collectives:
                params = as_whole(boxed_parts(self.infos, params))
            apply_fn = CarryingApply(model, collections, PartOfDevice(self.infos, params))
            call_loss(self._loss_fn, params, apply_fn, batch, rng)

        self._trace(on_device, params)

    def trace_as_on_one_device(self, finders: Sequence[_Finder]) -> None:
        """Traces the loss of the whole batch without a mesh, so that `finders` see its calls.

        So a model that computes with shards computes with complete parameters. A loss that needs
        the mesh, for a collective over its axes, is traced on the mesh.
        """

        def loss(
            params: Params, collections: Collections, rng: jax.Array, batch: Batch
        ) -> tuple[()]:
            apply_fn = CarryingApply(self._interface, collections)
            call_loss(self._loss_fn, params, apply_fn, batch, rng)
            return ()

        try:
            jax.eval_shape(loss, self.params, self.collections, self._key, self._batch)
        except Exception:  # If the missing mesh is not the cause, the second trace fails too.
            for finder in finders:
                finder.forget_call()
            self.trace_loss(self.params, _as_is)

    def _trace(self, on_device: Callable[..., None], params: Params, *, casts: bool = True) -> None:
        """Traces `on_device(params, collections, rng, batch)` as one device of the mesh runs it.

        With `casts`, the parameters are cast to vary over devices.
        """
        replicated = PartitionSpec()
        in_specs = (self._param_specs, replicated, replicated, self._batch_specs)
        args = params, self.collections, self._key, self._batch
        trace(self._mode, on_device, in_specs, *args, casts=casts)

    def _trace_call(self, call: Callable[..., None], variables: Mapping[str, Any]) -> None:
        """Traces `call(variables, rng, batch)` as one device of the mesh runs it."""

        def with_shards(variables: Any, *args: Any) -> None:
            call({**variables, "params": self._model_shards(variables["params"])}, *args)

        replicated = PartitionSpec()
        variable_specs = dict.fromkeys(variables, replicated) | {"params": self._param_specs}
        in_specs = (variable_specs, replicated, self._batch_specs)
        trace(self._mode, with_shards, in_specs, variables, self._key, self._batch)

    def _model_shards(self, params: Params) -> Params:
        """Takes this device's slice of each parameter with shared entries, see `take_shared`."""
        if not self._mode.writes_collectives:
            return params
        return jax.tree.map(lambda info, x: take_shared(x, info.shared_names), self.infos, params)


def _as_is(params: Params) -> Params:
    return params


# -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False)
class TracedModel(Summarized):
    """A model and its loss, as a program calls them.

    Attributes:
      apply_fn: The model's `apply`, for the training state.
      parameters: The tree of parameters with a `ParameterInfo` at each leaf.
      trainable: Globs over the paths of the trained parameters.
      stored_dtypes: The dtypes, if given, in which frozen and trained parameters are stored.
      keeps_types: Whether an initialiser gives a parameter a type that is sharded.
      sync_collections: How collections that differ between devices are reduced.
      of_parameters: The names of the variables that a step computes from parameters alone.
      sown: The paths of the values that the model sows when it is initialised.
      variables: The abstract variables, with those of `others`.
      others: The other models that the loss calls, by name.
      mode: The mode, which decides who writes the collectives.
      interface: The interface of the model.
      learns_counts: Whether the counts of the loss may depend on parameters.
    """

    apply_fn: Callable[..., Any]
    parameters: Any
    trainable: tuple[str, ...]
    stored_dtypes: StoredDtypes
    keeps_types: bool
    sync_collections: Mapping[str, CollectionSync]
    of_parameters: frozenset[str]
    sown: frozenset[SownPath]
    variables: dict[str, Any]
    mode: Mode
    interface: ModelInterface
    _eval_phase: RunPhase
    _init: Init
    _loss_fn: LossFn
    others: Mapping[str, OtherModel] = dataclasses.field(default_factory=dict)
    learns_counts: bool = False

    def own(self, params: Params) -> Any:
        """Returns a tree like `parameters` without the parameters of the other models."""
        return without(params, self.others)

    def own_collections(self, collections: Collections) -> Any:
        """Returns the collections without those of the other models."""
        return without(collections, (OTHER_MODELS,) if self.others else ())

    @property
    def own_variables(self) -> dict[str, Any]:
        """The abstract variables that `create_variables` makes."""
        collections: dict[str, Any] = self.own_collections(self.variables)
        return collections | {"params": self.own(self.variables["params"])}

    def with_others(
        self, params: Params, collections: Collections, others: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Adds the variables of the other models, by name, to parameters and collections."""
        if not self.others:
            return params, collections
        params = {**params, **{name: x["params"] for name, x in others.items()}}
        rest = {name: without(x, ("params",)) for name, x in others.items()}
        return params, {**collections, OTHER_MODELS: rest}

    def create_variables(self, key: jax.Array) -> dict[str, Any]:
        """Creates the initial variables by collection: `params`, and collections of the state.

        The variables are unsharded and not in boxes. Parameters have the dtypes in which they are
        stored.
        """
        variables = strip_boxes(self._init(key))
        return {name: variables[name] for name in self.own_variables}

    def train_loss(
        self, params: Any, collections: Any, batch: Any, rng: jax.Array
    ) -> tuple[LossValue, Metrics, Any]:
        """Calls the user's loss; sharded parameters are in boxes.

        Returns:
          The loss, the checked metrics, and the collections after the call, without variables that
          their gradients replace. Only the loss has a gradient: otherwise the backward pass would
          multiply the derivatives of metrics and collections by zeros, and an infinite derivative
          would make the gradient NaN.

        Raises:
          LearnedCountError: While the loss is differentiated, if a count depends on what is
            differentiated, and not `learns_counts`.
        """
        before = {id(x) for x in jax.tree.leaves(collections)}
        apply_fn = CarryingApply(self.interface, collections, PartOfDevice(self.parameters, params))
        with self.mode.context(), tracing_loss():
            result = self._loss_fn(as_whole(params), apply_fn, batch, rng)
            if not isinstance(result, tuple | Mapping) and self.interface.phase == "train":
                self._check_scalar(params, collections, batch, rng)
        loss, metrics = check_loss(result, batch)
        _check_same_along_model_axes(loss, metrics, varying_axes((batch, rng)))
        if not self.learns_counts:
            loss = _with_fixed_counts(loss)
        updated = {k: x for k, x in apply_fn.collections.items() if k != OVERWRITTEN}
        # A variable that the loss does not change stays the same array: pipelines need this.
        metrics, collections = jax.tree.map(
            lambda x: x if id(x) in before else jax.lax.stop_gradient(x),
            (metrics, updated),
        )
        return loss, metrics, collections

    def _check_scalar(self, params: Any, collections: Any, batch: Any, rng: jax.Array) -> None:
        """Refuses a scalar loss that is a mean over only the valid examples of a share."""

        def loss(batch: Any) -> Any:
            part = PartOfDevice(self.parameters, params)
            apply_fn = CarryingApply(self.interface, collections, part)
            return self._loss_fn(as_whole(params), apply_fn, batch, rng)

        check_scalar_loss(jax.make_jaxpr(loss)(batch).jaxpr)

    def eval_metrics(self, params: Any, collections: Any, batch: Any, rng: jax.Array) -> Metrics:
        """Calls `train_loss` with training turned off, and returns its metrics."""
        interface = dataclasses.replace(self.interface, phase=self._eval_phase)
        in_evaluation = dataclasses.replace(self, interface=interface)
        return in_evaluation.train_loss(params, collections, batch, rng)[1]


def trace_model(
    strategy: str,
    model: Model,
    loss_fn: LossFn,
    batch: Any,
    *,
    batch_specs: Any,
    mode: Mode,
    stored_dtypes: StoredDtypes,
    options: Mapping[str, Any],
    is_gathered: Callable[[ParameterInfo], bool],
    is_reduced: Callable[[ParameterInfo], bool],
    gathers_in_loss: bool,
    earlier_sows: frozenset[SownPath] = frozenset(),
) -> TracedModel:
    """Traces a model and its loss; computes nothing and touches no device.

    Args:
      batch_specs: The tree of the batch with a `PartitionSpec` at each leaf.
      mode: The mode, which decides who writes the collectives.
      options: The `ProgramOptions`; only options of the model are read.
      is_gathered: Returns whether the program would shard a parameter, or cast it where it is used,
        if the parameter had no annotation and no loop ran over its dims.
      is_reduced: Returns whether the gradient of a parameter that is not gathered should be
        reduced where the model uses the parameter, if the loss allows this.
      gathers_in_loss: Whether parameters are gathered where the loss reads them.
      earlier_sows: The paths of values that earlier calls have left in an instance, from which the
        model was made without them.
    """
    interface = _interface_of(strategy, model, mode, options)
    finders = {
        name: _Finder(x.interface, x.variables)
        if isinstance(x, OtherModel)
        else _Finder(_interface_of(f"{strategy}: other_models[{name!r}]", x, mode, options))
        for name, x in options["other_models"].items()
    }
    _check_arguments_of_loss(strategy, loss_fn, finders)
    finding_loss = interface.adapt_loss(
        functools.partial(loss_fn, **finders) if finders else loss_fn
    )
    trainable = tuple(options["trainable"] or interface.trainable)
    init_args = options["init_args"]
    if init_args is None and not hasattr(batch, "inputs"):
        init_args = interface.first_call(finding_loss, batch)
    with recording_sows() as sown, noting_declared() as noted:
        init, variables = initialisation(
            interface,
            batch,
            batch_specs,
            mode,
            init_args=init_args,
            cast=functools.partial(_cast, stored_dtypes, trainable),
        )
    if not jax.tree.leaves(variables["params"]):
        expected = "expected some to train; in NNX those that an nnx.Param holds"
        raise ValueError(f"{strategy}: model {interface!r} has no parameters, {expected}.")
    make_tracer = functools.partial(LossTracer, interface, batch_specs=batch_specs, mode=mode)
    tracer = make_tracer(finding_loss, variables, batch)

    def init_with(batch: Any) -> Any:
        return init_variables(interface, jax.random.key(0), batch, init_args)

    def check_shapes(collections: Any) -> None:
        if jax.tree.leaves(collections):
            part = _part_of_batch(batch, batch_specs, mode, options["num_minibatches"])
            check_shapes_of_collections(strategy, collections, init_with, whole=batch, part=part)

    try:
        tracer.find_collections(init_args)
    except Exception:  # The shapes may be the cause; otherwise this error is the model's own.
        check_shapes({name: tree for name, tree in variables.items() if name != "params"})
        raise
    check_shapes(tracer.collections)
    of_instances = {
        name: finder.interface
        for name, finder in finders.items()
        if not isinstance(options["other_models"][name], OtherModel)
    }
    if any(x.may_hold_sown for x in (interface, *of_instances.values())):
        tracer.trace_as_on_one_device(tuple(finders.values()))
        cleaned, found = interface.without_earlier_sows()
        cleaned_others = {name: x.without_earlier_sows() for name, x in of_instances.items()}
        if found or any(paths for _, paths in cleaned_others.values()):
            anew = {name: x for name, (x, _) in cleaned_others.items()}
            # A model that reads what it sows has declared it, and needs it.
            with contextlib.suppress(AttributeError):
                return trace_model(
                    strategy,
                    cleaned,
                    loss_fn,
                    batch,
                    batch_specs=batch_specs,
                    mode=mode,
                    stored_dtypes=stored_dtypes,
                    options={**options, "other_models": {**options["other_models"], **anew}},
                    is_gathered=is_gathered,
                    is_reduced=is_reduced,
                    gathers_in_loss=gathers_in_loss,
                    earlier_sows=found,
                )
    others: dict[str, OtherModel] = {}
    if finders:
        tracer.trace_as_on_one_device(tuple(finders.values()))
        others = _found_models(strategy, options["other_models"], finders, variables["params"])
        others = {name: _stored_as(stored_dtypes, other) for name, other in others.items()}
        collections = tracer.collections
        params = {name: x.variables["params"] for name, x in others.items()}
        rest = {name: without(x.variables, ("params",)) for name, x in others.items()}
        union = variables | {"params": {**variables["params"], **params}}
        bound = bind_other_models(loss_fn, interface, others)
        tracer = make_tracer(bound, union, batch, others=others)
        tracer.collections = {**collections, OTHER_MODELS: strip_boxes(rest)}
    tracer.check_model()
    pipeline = options["pipeline"]
    if pipeline and OVERWRITTEN in tracer.collections:
        raise ValueError(
            f"{strategy}: the model has a collection {OVERWRITTEN!r} (flax's FP8 products), "
            "expected none in a pipeline, because no stage has its layers' part of the collection. "
            "Use products without state, such as those of qwix."
        )
    stacked = tracer.stacked(pipeline) if pipeline else frozenset[str]()
    by_path = {info.path: info for info in jax.tree.leaves(tracer.infos)}
    declared = interface.declared(noted, by_path)
    # Stacked layers of a pipeline are in boxes, whether they are gathered or not.
    loop_dims = tracer.loop_dims(
        strategy,
        lambda info: is_gathered(info) or info.path in stacked,
        lambda info: is_reduced(info) or _may_have_loops(info, declared.get(info.path)),
        gathers_in_loss=gathers_in_loss and mode.writes_collectives,
    )
    infos = tracer.describe(tracer.boxed_params, loop_dims)
    if pipeline:
        infos = split_over_stages(infos, stacked, pipeline.axis)
    of_float8 = dict[str, bool]()
    if options["gather_code"] == "float8":
        if pipeline:
            raise ValueError(
                f"{strategy}: gather_code='float8' with a pipeline, expected None or 'int8': the "
                "scales are those of whole parameters, which no stage has."
            )
        of_float8 = tracer.read_in_float8(options["gather_dtype"])
        if narrowed := [path for path, is_exact in of_float8.items() if not is_exact]:
            raise ValueError(
                f"{strategy}: gather_code='float8' with gather_dtype={options['gather_dtype']!r}, "
                f"expected the dtype in which the products of {narrowed[0]!r} compute: they cast "
                "the parameter to a narrower dtype, and find other codes than those that were sent."
            )
        if not of_float8:
            raise ValueError(
                f"{strategy}: gather_code='float8' with a model that multiplies no parameter in "
                "float8, expected one that does, because these products alone find the same codes "
                "again. Set matmul='float8' of a Transformer, or give layers "
                "dot_general=manualpar.layers.float8_dot_general, or use gather_code='int8'."
            )
    infos = jax.tree.map(
        lambda info: dataclasses.replace(
            info,
            trainable=is_trained(info.path, trainable),
            matrix=matrix_of(info, declared.get(info.path)),
            is_float8=info.path in of_float8,
        ),
        infos,
    )
    for name in others:
        infos[name] = jax.tree.map(_frozen_info, infos[name])
        dims = {x.path.removeprefix(f"{name}/"): x.loop_dims for x in jax.tree.leaves(infos[name])}
        with_dims = dataclasses.replace(others[name].interface, loop_dims=dims)
        others[name] = dataclasses.replace(others[name], interface=with_dims)
    all_dims = {info.path: info.loop_dims for info in jax.tree.leaves(without(infos, others))}
    sown |= earlier_sows
    sync = check_sync_collections(strategy, options["sync_collections"], tracer.collections, sown)
    return TracedModel(
        apply_fn=interface.apply_fn,
        parameters=infos,
        trainable=trainable,
        stored_dtypes=stored_dtypes,
        keeps_types=any(jax.tree.leaves(typed_specs(tracer.boxed_params))),
        sync_collections=sync,
        of_parameters=tracer.computed_from_parameters(sync, options["num_minibatches"]),
        sown=frozenset(sown),
        variables={"params": tracer.params, **tracer.collections},
        interface=dataclasses.replace(interface, loop_dims=all_dims),
        _eval_phase="eval_dropout" if options["eval_dropout"] else "eval",
        _init=init,
        _loss_fn=bind_other_models(loss_fn, interface, others),
        others=others,
        mode=mode,
    )


def _check_arguments_of_loss(strategy: str, loss_fn: LossFn, models: Collection[str]) -> None:
    """Refuses a loss with other arguments, and names of models that are none of its arguments."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # A callable without a signature.
        return
    takes, named = f"({', '.join(signature.parameters)})", dict.fromkeys(models)

    def fits(number: int) -> bool:
        try:
            signature.bind(*range(number), **named)
        except TypeError:
            return False
        return True

    if fits(4) or fits(2):
        return
    for name in models:
        if not any(x.kind is x.VAR_KEYWORD for x in signature.parameters.values()) and (
            name not in list(signature.parameters)[2:] or name in ("batch", "rng")
        ):
            raise TypeError(
                f"{strategy}: other_models has {name!r}, expected the name of an argument of "
                f"loss_fn beside its own, which takes {takes}. Give the loss an argument of this "
                f"name: a function that calls the model, {name}(x)."
            )
    raise TypeError(
        f"{strategy}: loss_fn takes {takes}, expected (params, apply_fn, batch, rng), or (model, "
        f"batch) for an NNX model{', and ' + ', '.join(models) if models else ''}. If an argument "
        "is a model that is trained elsewhere, name it in other_models."
    )


def _found_models(
    strategy: str, given: Mapping[str, Any], finders: Mapping[str, _Finder], params: Params
) -> dict[str, OtherModel]:
    """Returns the other models of a loss after a trace with `finders`; refuses unused ones."""
    models: dict[str, OtherModel] = {}
    for name, finder in finders.items():
        if not jax.tree.leaves(finder.variables.get("params", {})):
            raise ValueError(
                f"{strategy}: other_models has {name!r}, expected a model with parameters that "
                "loss_fn calls. Call it in the loss, or leave it out."
            )
        if name in params:
            raise ValueError(
                f"{strategy}: other_models has {name!r}, but the model has parameters of this name "
                "too; expected another name, because the paths of all parameters differ."
            )
        kept = {k: x for k, x in finder.variables.items() if k not in SOWN_COLLECTIONS}
        is_placed = isinstance(given[name], OtherModel)
        models[name] = given[name] if is_placed else OtherModel(finder.interface, kept)
    return models


def _stored_as(stored_dtypes: StoredDtypes, other: OtherModel) -> OtherModel:
    """Casts the parameters of a model that this program places to its dtype of trained ones."""
    if other.infos is not None:
        return other
    cast = functools.partial(_cast, stored_dtypes, ("*",))
    params = jax.eval_shape(cast, other.variables["params"])
    return dataclasses.replace(other, variables={**other.variables, "params": params})


def _may_have_loops(info: ParameterInfo, declared: Declared | None) -> bool:
    """Returns whether only a trace can tell which dims of a possible matrix loops run over."""
    if declared is not None and (declared.matrix is None or declared.shape is not None):
        return bool(declared.matrix) and len(added_dims(info.shape, declared.shape or ())) > 1
    return len(info.shape) > 1


def _frozen_info(info: ParameterInfo) -> ParameterInfo:
    return dataclasses.replace(info, trainable=False)


def _part_of_batch(batch: Any, batch_specs: Any, mode: Mode, num_minibatches: int) -> Any:
    """Returns the abstract part of a batch that one call of the loss gets."""

    def of_device(x: Any, spec: Any) -> Any:
        axes = [*spec, *(None,) * (len(x.shape) - len(spec))] if mode.writes_collectives else []
        sizes = [axes_size(mode.mesh, axis_tuple(of_dim)) for of_dim in axes]
        shape = [n // size for n, size in zip(x.shape, sizes, strict=True)] if sizes else x.shape
        return jax.ShapeDtypeStruct(shape, x.dtype)

    part = jax.tree.map(of_device, batch, batch_specs)
    return jax.eval_shape(
        lambda x: jax.tree.map(lambda x: x[0], split_minibatches(x, num_minibatches)), part
    )


def _cast(stored_dtypes: StoredDtypes, trainable: tuple[str, ...], params: Any) -> Any:
    """Casts parameters to the dtypes in which they are stored."""

    def cast_one(path: Any, x: Any) -> Any:
        dtype = stored_dtypes[is_trained(path_name(path), trainable)]
        return jax.tree.map(lambda x: cast_floating(x, dtype), x)

    return jax.tree_util.tree_map_with_path(cast_one, params, is_leaf=is_box)


def _with_fixed_counts(loss: LossValue) -> LossValue:
    """Makes the differentiation of a count raise a `LearnedCountError`."""
    if isinstance(loss, Mean):
        return loss._replace(weight=_fixed("loss", loss.weight))
    return {name: (total, _fixed(name, count)) for name, (total, count) in loss.items()}


def _fixed(name: str, count: jax.Array) -> jax.Array:
    if not jnp.issubdtype(count.dtype, jnp.floating):
        return count  # Integers have no derivative.
    fixed = jax.custom_vjp(lambda x: x)

    def forward(x: Any) -> tuple[jax.Array, None]:
        if x.perturbed:
            raise LearnedCountError(
                f"loss_fn: the count of {name!r} depends on parameters, expected a count of the "
                "batch. If the count should have no gradient, return jax.lax.stop_gradient(count)."
            )
        return x.value, None

    def backward(_: None, g: Any) -> tuple[Any]:
        raise AssertionError("a count without a derivative has no backward pass")

    fixed.defvjp(forward, backward, symbolic_zeros=True)
    return fixed(count)


def _check_same_along_model_axes(loss: Any, metrics: Metrics, data_axes: frozenset[str]) -> None:
    """Refuses a loss or a metric that differs along axes that do not split the batch.

    Autodiff would take the gradient of the sum of the loss over the devices along these axes.
    """
    named = {f"metrics[{name!r}]": metric for name, metric in metrics.items()}
    for name, value in {"the loss": loss, **named}.items():
        if axes := varying_axes(value) - data_axes:
            raise ValueError(
                f"loss_fn: {name} has a type that varies over {sorted(axes)}, expected the same "
                "value on all devices along axes that do not split the batch. Where logits are "
                "split, call split_cross_entropy and split_argmax of manualpar.layers. Where each "
                "device has a part of a sum, call manualpar.layers.leave(part, axis)."
            )


def _interface_of(
    strategy: str, model: Any, mode: Mode, options: Mapping[str, Any]
) -> ModelInterface:
    """Makes the model's interface; a function that makes a model runs on a mesh if needed."""
    aliases = check_axis_aliases(
        strategy,
        options["axis_aliases"],
        mesh=mode.mesh,
        data_axes=mode.data_axes,
        on_global_arrays=not mode.writes_collectives,
    )

    def make_on_mesh() -> Any:
        assert mode.model_mesh is not None
        with jax.sharding.use_abstract_mesh(mode.model_mesh):
            return interface_of(model)

    interface = with_mesh_if_needed(mode, lambda: interface_of(model), make_on_mesh)
    if isinstance(interface, ModelInterface):
        gathers_float8 = options["gather_code"] == "float8"
        return dataclasses.replace(interface, axis_aliases=aliases, gathers_float8=gathers_float8)
    hint = " Pass its .module." if isinstance(getattr(model, "module", None), nn.Module) else ""
    raise TypeError(
        f"{strategy}: model is {model!r}, expected an instance of a flax.linen.Module, or an "
        f"nnx.Module or what makes one of rngs.{hint}"
    )
