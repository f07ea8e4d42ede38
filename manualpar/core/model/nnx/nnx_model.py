"""Calls NNX models as Linen models are called: with `init` and `apply`.

An `nnx.Module` contains its variables. Here a module is split into its static graph and its
variables. The variables are grouped into collections with Linen's names: `nnx.Param` and its
subclasses are `params`, `nnx.BatchStat` is `batch_stats`, and so on. A path consists of the
attributes' names. Applying the model merges the graph and the variables into a module for one call.

Keys and counts of random streams do not belong to a collection: see
`manualpar.core.model.nnx.streams`.

Invariants: nothing is materialised before `init`; parameters depend only on the key, not on the
mesh; a variable that several modules share is listed once, at the first of its paths.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict

from manualpar.core.model.evaluation import required
from manualpar.core.model.interface import ModelInterface, register_interface
from manualpar.core.model.nnx.streams import (
    assigning_tracers,
    call_rngs,
    keys_by_stream,
    mark_keyless,
    split_dropout,
    stream_keys,
    stream_variable,
)
from manualpar.core.model.nnx.variables import Path, annotate, gathering_variable, path_text
from manualpar.core.model.recurrence import METHOD, vary_like, with_subclasses
from manualpar.core.parameters.array_box import ArrayBox

# The collection of bare arrays: attributes of a module that are in no variable.
CONSTANTS = "constants"
_NOT_GIVEN: Any = object()


@register_interface
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NNXModel(ModelInterface):
    """An NNX model with `init` and `apply`, the functions of Linen that this package calls.

    Attributes:
      module: The module with abstract values.
      make: Makes the module from a key.
    """

    make: Callable[[jax.Array], nnx.Module] = dataclasses.field(kw_only=True)

    def __repr__(self) -> str:
        return f"NNXModel({type(self.module).__name__})"

    @classmethod
    def wrap(cls, model: Any) -> Self | None:
        """Returns the interface of an NNX model; `None` for anything else.

        Args:
          model: An `nnx.Module`, the class of a module, or a function that makes a module from
            `rngs`. The values of an `nnx.Module` are the initial values for every key. With a class
            or a function, the parameters for a key are the parameters of
            `model(rngs=nnx.Rngs(key))`, and no array is materialised before it is sharded.

        Raises:
          TypeError: A class needs more arguments than `rngs`, a function does not make a module, or
            an instance has no values.
        """
        if isinstance(model, nnx.Module):
            make = _make_again(model)
        else:
            parameters = _parameters(model)
            is_nnx_class = isinstance(model, type) and issubclass(model, nnx.Module)
            if not is_nnx_class and (isinstance(model, type) or "rngs" not in parameters):
                return None
            name = getattr(model, "__name__", type(model).__name__)
            _check_takes_rngs_alone(name, parameters)
            make = functools.partial(_construct, model, name)
        module = nnx.eval_shape(lambda: make(jax.random.key(0)))
        _check_params(module)
        return cls(module, make=make)

    @classmethod
    def collections_of(cls, variables: Any) -> Mapping[str, Any] | None:
        """Returns the arrays of a module or an `nnx.State`, without the random streams."""
        if isinstance(variables, nnx.Module):
            variables = nnx.state(variables)
        if not isinstance(variables, nnx.State):
            return None
        return _by_collection(nnx.to_flat_state(variables))

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Makes the variables by collection from a key; annotated parameters are in boxes.

        The arguments of a Linen model's call are ignored.
        """
        del args, kwargs
        module = self.make(rngs["params"] if isinstance(rngs, Mapping) else rngs)
        return {"params": {}} | _by_collection(_leaves(module), box=annotate)

    def apply(
        self,
        variables: Mapping[str, Any],
        *args: Any,
        rngs: Any = _NOT_GIVEN,
        mutable: Any = False,
        method: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Calls the module as `flax.linen.Module.apply` does; `stream_keys` describes `rngs`.

        If the called method has an argument `rngs`, the method gets the keys as `nnx.Rngs`. A
        method with `**kwargs` gets these `nnx.Rngs` too if the module has no random streams for the
        keys. If the method has no argument `train`, a value passed as `train` calls
        `module.train()` or `module.eval()`.

        Raises:
          ValueError: A variable is missing, or the call makes a variable that `mutable` does not
            name, sets a sharded parameter, or draws random numbers without a key.
        """
        keys = {} if rngs is _NOT_GIVEN or rngs is None else keys_by_stream(rngs)
        module = self._merge(variables, keys)
        self._adjust_to_mesh(module, (args, kwargs))
        call = getattr(module, method or "__call__") if not callable(method) else method
        parameters = _parameters_of_call(call)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        known = {collection_of(leaf) for _, leaf in _leaves(self.module)}
        has_streams = None in known
        if rngs is not _NOT_GIVEN and ("rngs" in parameters or (takes_any and not has_streams)):
            kwargs["rngs"] = None if rngs is None else call_rngs(keys)
        if "train" in kwargs and "train" not in parameters and not takes_any:
            module.train() if kwargs.pop("train") else module.eval()
        if self.phase == "eval_dropout":
            module.set_attributes(use_running_average=True, raise_if_not_found=False)
        elif self.phase == "eval":
            module.eval()
        names = [mutable] if isinstance(mutable, str) else [] if mutable is True else mutable or []
        sown = [name for name in names if name not in known]
        types = [type_ for name in sown for type_ in _types_named(name)]
        bound = functools.partial(call, module) if callable(method) else call

        def run(module: nnx.Module) -> Any:
            del module
            with jax.named_scope(type(self).__name__):  # Flax puts Linen's modules in such scopes.
                return bound(*args, **kwargs)

        with assigning_tracers():
            out = nnx.capture(run, *types)(module)
        out, *states = out if types else (out,)
        made = None if mutable is True else frozenset(sown)
        captured = [leaf for state in states for leaf in nnx.to_flat_state(state)]
        kept = _by_collection([*self._kept(module, made), *captured])
        updates: dict[str, Any] = {name: {} for name in sown} | kept
        if mutable is False:
            return out
        names = updates if mutable is True else names
        return out, {name: updates[name] for name in names if name in updates}

    def _adjust_to_mesh(self, module: nnx.Module, inputs: Any) -> None:
        """Adapts a module to the mesh for one call: its axis names, cells' carries, and dropout."""
        vary = vary_like(inputs)

        def varying(initialize: Any) -> Any:
            return lambda *args, **kwargs: jax.tree.map(vary, initialize(*args, **kwargs))

        for _, part in nnx.iter_modules(module):
            for name, value in self.axis_aliases.resolve(part).items():
                setattr(part, name, value)
            cell: Any = part.cell if isinstance(part, nnx.RNN) else part
            if isinstance(part, nnx.RNN | nnx.RNNCellBase):
                setattr(cell, METHOD, varying(getattr(cell, METHOD)))
            split_dropout(part)

    def _merge(self, variables: Mapping[str, Any], rngs: Mapping[str, Any]) -> nnx.Module:
        """Makes a new module from variables, with its random streams restarted."""
        streams = stream_keys(self.module, rngs)
        known = {"params"}
        leaves = []
        for path, leaf in _leaves(self.module):
            name = collection_of(leaf)
            if name is None:
                leaves.append((path, stream_variable(leaf, streams[path[:-1]])))
                continue
            known.add(name)
            value = _find(variables, name, path)
            leaves.append((path, self._variable(path, leaf, value)))
        unknown = sorted(set(variables) - known)
        if unknown:
            raise ValueError(
                f"model: applied with collections {unknown}, expected only {sorted(known)}, the "
                f"collections of {type(self.module).__name__}."
            )
        module = nnx.merge(nnx.graphdef(self.module), nnx.from_flat_state(leaves))
        mark_keyless(module)
        return module

    def _variable(self, path: Path, leaf: Any, value: Any) -> Any:
        """Returns a leaf with a new value; for a boxed value, a variable that unboxes when read."""
        if not isinstance(leaf, nnx.Variable):
            return value
        if isinstance(value, nn.Partitioned):
            value = value.of_one_array() if isinstance(value, ArrayBox) else value
        if isinstance(value, nn.Partitioned):
            key = path_text(path)
            dims = None if self.loop_dims is None else self.loop_dims.get(key, frozenset())
            return gathering_variable(leaf, value, path=key, loop_dims=dims)
        return type(leaf).from_metadata(value, leaf.get_metadata())

    def _kept(self, module: nnx.Module, made: frozenset[str] | None) -> list[tuple[Path, Any]]:
        """Collects the variables of a module after a call, except parameters.

        `made` are the collections in which the call may make variables; `None` for all.
        """
        before = {path for path, _ in _leaves(self.module)}
        kept = []
        for path, leaf in _leaves(module):
            name = collection_of(leaf)
            if "__captures__" in path or name == "params":
                continue
            if path not in before and made is not None and name not in made:
                raise ValueError(
                    f"model: calling it makes a new variable {path_text(path)!r} of type "
                    f"{type(leaf).__name__}; expected none, because a training state has no place "
                    "for it. Make the variable in the module's __init__. If it is for the loss, "
                    "name its collection in the call of the model: out, made = apply_fn(..., "
                    f"mutable=[{name!r}])."
                )
            kept.append((path, leaf))
        return kept


def collection_of(leaf: Any) -> str | None:
    """Returns the collection of a module's leaf; `None` for the state of random streams."""
    if not isinstance(leaf, nnx.Variable):
        return CONSTANTS
    if isinstance(leaf, nnx.RngState):
        return None
    return _collection_of_type(type(leaf))


def _collection_of_type(type_: type[nnx.Variable[Any]]) -> str:
    if issubclass(type_, nnx.Param):
        return "params"
    try:
        return nnx.variable_name_from_type(type_)
    except ValueError:  # Flax has no Linen name for this type.
        return type_.__name__


def _types_named(collection: str) -> list[type[nnx.Variable[Any]]]:
    """Finds the variable types of a collection; registers a new type if there is none."""
    found = [x for x in with_subclasses(nnx.Variable) if _collection_of_type(x) == collection]
    return found or [nnx.variable_type_from_name(collection, allow_register=True)]


# Making a module from a key.


def _make_again(module: nnx.Module) -> Callable[[jax.Array], nnx.Module]:
    """Returns a function that makes a copy of a module from any key."""
    graphdef, state = nnx.split(module)
    leaves, structure = jax.tree.flatten(state)
    if not all(isinstance(x, jax.Array | np.ndarray) for x in leaves):
        raise TypeError(
            f"model: the {type(module).__name__} has no values, or values that are not arrays; "
            "expected an instance with arrays. Or pass the class, or a function of rngs: then the "
            "program makes the arrays sharded."
        )
    # Copies values to the host, because they may be on devices that the program does not use.
    values = [x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x) for x in leaves]

    def make(key: jax.Array) -> nnx.Module:
        del key
        arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in values]
        return nnx.merge(graphdef, jax.tree.unflatten(structure, arrays))

    return make


def _construct(make: Callable[..., Any], name: str, key: jax.Array) -> nnx.Module:
    """Makes a module from a key without sharding its arrays, because the program shards them."""
    with nnx.use_eager_sharding(False), assigning_tracers():
        module = make(rngs=nnx.Rngs(key))
    if not isinstance(module, nnx.Module):
        raise TypeError(f"model: {name}(rngs=...) makes {module!r}, expected an nnx.Module.")
    for path, part in nnx.iter_modules(module):
        for attribute, value in vars(part).items():
            if isinstance(value, jax.core.Tracer):
                raise TypeError(
                    f"model: {path_text((*path, attribute))!r} is an array of shape {value.shape} "
                    "that is not in an nnx.Variable. Expected an nnx.Param if it is trained, "
                    "and otherwise another nnx.Variable or a NumPy array. Write "
                    f"self.{attribute} = nnx.Param(...)."
                )
    return module


def _check_takes_rngs_alone(name: str, parameters: Mapping[str, inspect.Parameter]) -> None:
    if "rngs" not in parameters:
        raise TypeError(
            f"model: the class {name} takes no argument rngs, expected one, because a program "
            "makes the parameters from a key. Give the class an argument rngs, or pass an instance "
            f"to the program: {name}(...)."
        )
    missing = [key for key in required(parameters) if key != "rngs"]
    if missing:
        raise TypeError(
            f"model: {name} needs {', '.join(missing)} in addition to rngs, expected no "
            f"other argument. Write lambda rngs: {name}({missing[0]}=..., rngs=rngs)."
        )


def _check_params(module: nnx.Module) -> None:
    """Refuses parameters that are not arrays or that are references."""
    for path, leaf in _leaves(module):
        if not isinstance(leaf, nnx.Param):
            continue
        if not isinstance(leaf.get_raw_value(), jax.ShapeDtypeStruct):
            raise TypeError(
                f"model: parameter {path_text(path)!r} holds a "
                f"{type(leaf.get_raw_value()).__name__}, expected an array; make an nnx.Param of "
                "each of its arrays."
            )
        if leaf.hijax or leaf.ref:
            raise TypeError(
                f"model: parameter {path_text(path)!r} is a reference (hijax or ref), expected a "
                "plain variable: a step is a function of arrays. Make it without nnx.var_defaults."
            )


# Variables by path.


def _leaves(module: nnx.Module) -> Iterable[tuple[Path, Any]]:
    """Flattens a module into its variables and bare arrays with their paths."""
    leaves: Iterable[tuple[Path, Any]] = nnx.to_flat_state(nnx.state(module))
    return leaves


def _by_collection(
    leaves: Iterable[tuple[Path, Any]], box: Callable[[Any, str], Any] | None = None
) -> dict[str, Any]:
    """Nests the values of variables in dicts by collection; applies `box` to parameters."""
    values = {}
    for path, leaf in leaves:
        name = collection_of(leaf)
        if name is not None:
            value = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
            boxed = box(leaf, path_text(path)) if box and name == "params" else value
            values[name, *map(str, path)] = boxed
    collections: dict[str, Any] = unflatten_dict(values)
    return collections


def _find(variables: Mapping[str, Any], collection: str, path: Path) -> Any:
    """Looks up the value at a path of a collection."""
    tree: Any = variables.get(collection, {})
    for name in map(str, path):
        if not isinstance(tree, Mapping) or name not in tree:
            raise ValueError(
                f"model: applied without the variable {path_text(path)!r} of collection "
                f"{collection!r}, expected every variable that init makes."
            )
        tree = tree[name]
    return tree


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function or a class; `{}` for anything else."""
    if not callable(function):
        return {}
    partial = function if isinstance(function, functools.partial) else functools.partial(function)
    called = partial.func
    if isinstance(called, type):  # NNX's metaclass takes any arguments and passes them on.
        constructor: Any = called
        called = functools.partial(constructor.__init__, None)
    called = functools.partial(called, *partial.args, **partial.keywords)
    return inspect.signature(called).parameters


def _parameters_of_call(call: Any) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a module's call, in `nnx.Sequential` of the first layer's call."""
    module = getattr(call, "__self__", None)
    if not (isinstance(module, nnx.Sequential) and call == module.__call__ and module.layers):
        return _parameters(call)
    first = module.layers[0]
    first = first.__call__ if isinstance(first, nnx.Module) else first
    return {**_parameters_of_call(first), "rngs": _parameters(call)["rngs"]}
