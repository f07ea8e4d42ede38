"""NNX models, called as Linen models are: with `init` and `apply`.

An `nnx.Module` holds its variables. Here it is split into its graph, which is static, and its
variables, which go by collection, named as in Linen: `nnx.Param` and its subclasses are `params`,
`nnx.BatchStat` is `batch_stats`, and so on. A path is that of the attributes. Applying the model
merges the two into a module that lives for one call.

Keys and counts of random streams are no variables in this sense: see `manualpar.nnx.streams`.

Invariants: nothing is materialised before `init`; parameters depend on the key alone, not on the
mesh; a variable that several modules share is listed once, at the first of its paths.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from manualpar.nnx.streams import stream_keys, stream_variable
from manualpar.nnx.variables import Path, annotate, gathering_variable, path_name
from manualpar.user_model.axis_names import AliasedLinen, AxisAliases
from manualpar.user_model.recurrence import vary_nnx_carries

# What every builder takes: a Linen module, an NNX one, or what makes one of `rngs`.
Model = nn.Module | nnx.Module | Callable[..., nnx.Module]
# The collection of arrays that are attributes of a module without a variable around them.
CONSTANTS = "constants"


def as_model(model: Any) -> Any:
    """Makes an NNX model one with `init` and `apply`; returns anything else as it is.

    Args:
      model: An `nnx.Module`, whose values are the initial ones whatever the key; or, so that
        nothing is materialised before it is sharded, its class or a function: whatever takes
        `rngs` and makes one. With a key, its parameters are those of `model(rngs=nnx.Rngs(key))`.

    Returns:
      An `NNXModel`; `model` itself if it is none of these.

    Raises:
      TypeError: A class cannot be constructed with `rngs` alone, a function makes something else,
        or an instance has no values.
    """
    if isinstance(model, NNXModel | nn.Module):
        return model
    if isinstance(model, nnx.Module):
        return _from_instance(model)
    is_nnx_class = isinstance(model, type) and issubclass(model, nnx.Module)
    if not is_nnx_class and (isinstance(model, type) or "rngs" not in _parameters(model)):
        return model
    name = getattr(model, "__name__", type(model).__name__)
    parameters = _parameters(model)
    if "rngs" not in parameters:
        raise TypeError(
            f"model: the class {name} takes no argument rngs, expected one: a program makes its "
            f"parameters from a key. Give it one, or the program an instance: {name}(...)."
        )
    missing = [
        key
        for key, parameter in parameters.items()
        if key != "rngs"
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if missing:
        raise TypeError(
            f"model: {name} takes {', '.join(missing)} besides rngs, expected what can be made "
            f"from rngs alone. Write lambda rngs: {name}({missing[0]}=..., rngs=rngs)."
        )
    return _checked(functools.partial(_construct, model, name))


def with_loop_dims(model: Any, loop_dims: Mapping[str, frozenset[int]]) -> Any:
    """The model, told which dimensions of its parameters loops run over; Linen's need not be.

    Args:
      model: Any model.
      loop_dims: The dimensions by a parameter's path.

    Returns:
      The model. Without this, a shard in a loop whose dimensions are of one size is ambiguous.
    """
    if not isinstance(model, NNXModel):
        return model
    return dataclasses.replace(model, loop_dims=dict(loop_dims))


def for_evaluation(model: Any, *, dropout: bool = False) -> Any:
    """The model with NNX's own switch set for evaluation, for dropout too or not."""
    if not isinstance(model, NNXModel):
        return model
    return dataclasses.replace(model, evaluated="dropout" if dropout else "all")


def class_of(model: Any) -> type:
    """The class in which the methods of a model are written."""
    return type(model.module if isinstance(model, NNXModel | AliasedLinen) else model)


def collection_of(leaf: Any) -> str | None:
    """The collection that a leaf of a module belongs to; `None` for the state of random streams."""
    if not isinstance(leaf, nnx.Variable):
        return CONSTANTS
    if isinstance(leaf, nnx.RngState):
        return None
    if isinstance(leaf, nnx.Param):
        return "params"
    try:
        return nnx.variable_name_from_type(type(leaf))
    except ValueError:  # A type that flax has no name of Linen's for.
        return type(leaf).__name__


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NNXModel:
    """An NNX model with the two functions of a Linen module that this package calls.

    Attributes:
      module: The module with abstract values.
      make: Makes it from a key.
      loop_dims: See `with_loop_dims`.
      evaluated: What every call turns off as one of evaluation: nothing, all but `"dropout"`, or
        `"all"`.
      axis_aliases: What axis names in the module stand for.
    """

    module: nnx.Module
    make: Callable[[jax.Array], nnx.Module]
    loop_dims: Mapping[str, frozenset[int]] | None = None
    evaluated: Literal["", "dropout", "all"] = ""
    axis_aliases: AxisAliases | None = None

    def __repr__(self) -> str:
        return f"NNXModel({type(self.module).__name__})"

    @property
    def __call__(self) -> Callable[..., Any]:
        """The module's own call, for its signature."""
        call: Callable[..., Any] = self.module.__call__
        return call

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Makes the variables.

        Args:
          rngs: The key, or `{"params": key}`.
          *args: What a call would take; NNX modules need none of it to be made.
          **kwargs: Likewise.

        Returns:
          Nested dicts by collection; an annotated parameter is in an `NNXAnnotated`.
        """
        del args, kwargs
        module = self.make(rngs["params"] if isinstance(rngs, Mapping) else rngs)
        collections: dict[str, Any] = {"params": {}}
        for path, leaf in _leaves(module):
            name = collection_of(leaf)
            if name is not None:
                is_param = isinstance(leaf, nnx.Param)
                value = annotate(leaf, path_name(path)) if is_param else _raw(leaf)
                _insert(collections.setdefault(name, {}), path, value)
        return collections

    def apply(
        self,
        variables: Mapping[str, Any],
        *args: Any,
        rngs: Any = None,
        mutable: Any = False,
        method: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Calls the module with some variables.

        Args:
          variables: By collection, as `init` returns them; a parameter may be in a box.
          *args: What the module's call takes.
          rngs: Keys for its random streams by their names, or one key for all; see `stream_keys`.
          mutable: The collections to return, as in Linen; what a call does to others is forgotten.
          method: A method's name, or a function of the module; its `__call__` if `None`.
          **kwargs: What the call takes. A `train` that it does not take turns NNX's own switch:
            `module.train()` or `module.eval()`.

        Returns:
          What the call returns; if `mutable` is not `False`, with the collections it names.

        Raises:
          ValueError: A variable is missing, the call makes new ones, sets a parameter that is
            sharded, or asks for random numbers of which it was given no key.
        """
        module = self._merge(variables, rngs)
        if self.axis_aliases:
            self.axis_aliases.rename(module)
        vary_nnx_carries(module, (args, kwargs))
        call = getattr(module, method or "__call__") if not callable(method) else method
        names = _parameters(call)
        if "train" in kwargs and "train" not in names and not _takes_any_keyword(names):
            module.train() if kwargs.pop("train") else module.eval()
        if self.evaluated == "dropout":
            module.set_attributes(use_running_average=True, raise_if_not_found=False)
        elif self.evaluated:
            module.eval()
        known = {name for _, leaf in _leaves(self.module) if (name := collection_of(leaf))}
        sown = [name for name in _collection_names(mutable) if name not in known]
        types = [nnx.variable_type_from_name(name, allow_register=True) for name in sown]
        bound = functools.partial(call, module) if callable(method) else call

        def run(module: nnx.Module) -> Any:
            del module
            with jax.named_scope(type(self).__name__):  # Linen's modules are in such scopes.
                return bound(*args, **kwargs)

        out = nnx.capture(run, *types)(module)
        out, *states = out if types else (out,)
        updates = self._updates(module)
        if mutable is False:
            return out
        for name, state in zip(sown, states, strict=True):
            for path, leaf in nnx.to_flat_state(state):
                _insert(updates.setdefault(name, {}), path, _raw(leaf))
        asked = updates if mutable is True else _collection_names(mutable)
        return out, {name: updates[name] for name in asked if name in updates}

    def _merge(self, variables: Mapping[str, Any], rngs: Any) -> nnx.Module:
        """A module of its own with some variables, its streams at their beginning."""
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
                f"model: applied with collections {unknown}, expected only {sorted(known)}, which "
                f"are those of {type(self.module).__name__}."
            )
        return nnx.merge(nnx.graphdef(self.module), nnx.from_flat_state(leaves))

    def _variable(self, path: Path, leaf: Any, value: Any) -> Any:
        """The leaf at a path with a value."""
        if not isinstance(leaf, nnx.Variable):
            return value
        if isinstance(value, nn.Partitioned):
            key = path_name(path)
            dims = None if self.loop_dims is None else self.loop_dims.get(key, frozenset())
            return gathering_variable(leaf, value, path=key, loop_dims=dims)
        return type(leaf).from_metadata(value, leaf.get_metadata())

    def _updates(self, module: nnx.Module) -> dict[str, Any]:
        """The variables of a module after a call, by collection."""
        before = {path for path, _ in _leaves(self.module)}
        updates: dict[str, Any] = {}
        for path, leaf in _leaves(module):
            name = collection_of(leaf)
            if "__captures__" in path or name == "params":
                continue
            if path not in before:
                raise ValueError(
                    f"model: calling it makes a new variable {path_name(path)!r} of type "
                    f"{type(leaf).__name__}, which a training state has no place for; make it in "
                    "the module's __init__."
                )
            if name is not None:
                _insert(updates.setdefault(name, {}), path, _raw(leaf))
        return updates


def _from_instance(module: nnx.Module) -> NNXModel:
    """A model whose initial values are those of a module."""
    graphdef, state = nnx.split(module)
    leaves, structure = jax.tree.flatten(state)
    if not all(isinstance(x, jax.Array | np.ndarray) for x in leaves):
        raise TypeError(
            f"model: the {type(module).__name__} has no values, or such as are no arrays; expected "
            "one that has been made. Give the class, or a function of rngs, and the program makes "
            "it sharded."
        )
    # On the host: the values may lie on other devices than the program's.
    values = [x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x) for x in leaves]

    def make(key: jax.Array) -> nnx.Module:
        del key
        arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in values]
        return nnx.merge(graphdef, jax.tree.unflatten(structure, arrays))

    return _checked(make)


def _checked(make: Callable[[jax.Array], nnx.Module]) -> NNXModel:
    """A model of what a function makes, if its parameters are arrays that nobody else changes."""
    module = nnx.eval_shape(lambda: make(jax.random.key(0)))
    for path, leaf in _leaves(module):
        if not isinstance(leaf, nnx.Param):
            continue
        if not isinstance(leaf.get_raw_value(), jax.ShapeDtypeStruct):
            raise TypeError(
                f"model: parameter {path_name(path)!r} holds a "
                f"{type(leaf.get_raw_value()).__name__}, expected an array; make an nnx.Param of "
                "each of its arrays."
            )
        if leaf.hijax or leaf.ref:
            raise TypeError(
                f"model: parameter {path_name(path)!r} is a reference (hijax or ref), expected a "
                "plain variable: a step is a function of arrays. Make it without nnx.var_defaults."
            )
    return NNXModel(module, make)


def _construct(make: Callable[..., Any], name: str, key: jax.Array) -> nnx.Module:
    """Makes a module from a key; where it lies is not for its annotations to say."""
    with nnx.use_eager_sharding(False):
        module = make(rngs=nnx.Rngs(key))
    if not isinstance(module, nnx.Module):
        raise TypeError(f"model: {name}(rngs=...) makes {module!r}, expected an nnx.Module.")
    for path, part in nnx.iter_modules(module):
        for attribute, value in vars(part).items():
            if isinstance(value, jax.core.Tracer):
                raise TypeError(
                    f"model: {path_name((*path, attribute))!r} is an array of shape {value.shape} "
                    "that no variable holds, expected an nnx.Param if it is to be trained, and "
                    "otherwise another nnx.Variable, or an array of numpy. Write "
                    f"self.{attribute} = nnx.Param(...)."
                )
    return module


def _leaves(module: nnx.Module) -> Iterable[tuple[Path, Any]]:
    """The variables and bare arrays of a module with their paths."""
    leaves: Iterable[tuple[Path, Any]] = nnx.to_flat_state(nnx.state(module))
    return leaves


def _raw(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _insert(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Puts a value into nested dicts."""
    *parents, last = map(str, path)
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[last] = value


def _find(variables: Mapping[str, Any], collection: str, path: Path) -> Any:
    """The value at a path of a collection."""
    tree: Any = variables.get(collection, {})
    for name in map(str, path):
        if not isinstance(tree, Mapping) or name not in tree:
            raise ValueError(
                f"model: applied without the variable {path_name(path)!r} of collection "
                f"{collection!r}, expected all that init makes."
            )
        tree = tree[name]
    return tree


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function or a class, none of what is neither."""
    if not callable(function):
        return {}
    given: tuple[Any, ...] = ()
    if isinstance(function, functools.partial):
        function, given = function.func, (function.args, function.keywords)
    if isinstance(function, type):  # NNX's classes take anything, and hand it to __init__.
        constructor: Any = function
        function = functools.partial(constructor.__init__, None)
    if given:
        function = functools.partial(function, *given[0], **given[1])
    return inspect.signature(function).parameters


def _takes_any_keyword(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _collection_names(mutable: Any) -> tuple[str, ...]:
    """The collections that `mutable` names."""
    if isinstance(mutable, bool):
        return ()
    return (mutable,) if isinstance(mutable, str) else tuple(mutable)
