"""How a model is called: to initialise it, from a loss function, and for evaluation.

The framework asks nothing of a model but `init` and `apply`. What a program has to add to a user's
`apply_fn({"params": params}, inputs, train=True, rngs=...)` is done here: the other collections are
handed in and their updates kept, and evaluation turns training off.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from manualpar.nnx.model import NNXModel, class_of, for_evaluation
from manualpar.sharding.mesh import naming_unbound_axes
from manualpar.user_model.evaluation import EVAL_SWITCHES, evaluate_linen, overrule, switches_of
from manualpar.user_model.module_fields import leave_out_annotations
from manualpar.user_model.recurrence import varying_linen_carries

# Makes the arguments of a model's call from a batch.
InitArgs = Callable[[Any], tuple[Sequence[Any], Mapping[str, Any]]]


def init_variables(
    model: nn.Module, rng: jax.Array, batch: Any, init_args: InitArgs | None = None
) -> dict[str, Any]:
    """Initialises a model as `model.init({"params": rng}, *args, **kwargs)` does.

    Args:
      model: The Linen model, or an `NNXModel`.
      rng: The key for the parameters.
      batch: The global batch; only shapes and dtypes are read, every value is zero.
      init_args: How the model is called, see `initial_call`.

    Returns:
      The variables by collection.
    """
    zeros = jax.tree.map(jnp.zeros_like, batch)
    args, kwargs = initial_call(model, zeros, init_args)
    return dict(model.init({"params": rng}, *args, **kwargs))


def initial_call(
    model: nn.Module, batch: Any, init_args: InitArgs | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Finds the arguments that a model is called with to initialise it.

    Args:
      model: The Linen model, or an `NNXModel`, which is made without being called.
      batch: The batch.
      init_args: Makes `(args, kwargs)` of the batch; `kwargs` may name another `method` than
        `__call__`. If `None`, the model is called with `batch.inputs`.

    Returns:
      `args` and `kwargs`. Where the method has an argument `train` that is not given, it is
      `False`, and likewise each other one of `EVAL_SWITCHES` that has no default.

    Raises:
      TypeError: The method cannot be called like this.
    """
    if isinstance(model, NNXModel):
        return (), {}
    if init_args is None and not hasattr(batch, "inputs"):
        raise TypeError(
            f"batch is a {type(batch).__name__}, expected one with .inputs: manualpar.Batch. Or "
            f"say what the model is called with: {_example(_signature(model, None))}."
        )
    args, kwargs = _checked_pair(init_args(batch)) if init_args else ((batch.inputs,), {})
    method = kwargs.get("method")
    signature = _signature(model, method)
    given = {name: value for name, value in kwargs.items() if name != "method"}
    switches: dict[str, Any] = {}
    names: Mapping[str, Any] = signature.parameters
    try:
        names = signature.bind_partial(*args, **given).arguments
        switches = {
            name: value
            for name, value in EVAL_SWITCHES.items()
            if name in signature.parameters.keys() - names.keys()
            and (name == "train" or signature.parameters[name].default is inspect.Parameter.empty)
        }
        signature.bind(*args, **given, **switches)
    except TypeError as error:
        missing = [repr(name) for name in _required(signature) if name not in names]
        what = "what init_args returns" if init_args else "batch.inputs alone"
        called = method if isinstance(method, str) else getattr(method, "__name__", "__call__")
        raise TypeError(
            f"model: {class_of(model).__name__}.{called} cannot be called with {what} to "
            f"initialise the model: {'it also needs ' + ', '.join(missing) if missing else error}. "
            f"It takes {signature}. Say what it is called with, from the batch: "
            f"{_example(signature)}."
        ) from error
    return args, {**kwargs, **switches}


def apply_model(model: nn.Module, variables: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """`model.apply`, where the zeros that recurrences start from vary over devices as data does.

    Initializers, which flax calls for the shapes, leave out their annotations.
    """
    plain_initializers = nn.intercept_methods(leave_out_annotations)
    with naming_unbound_axes(), varying_linen_carries((args, kwargs)), plain_initializers:
        return model.apply(variables, *args, **kwargs)


class CarryingApply:
    """A model's `apply` that hands in its other collections and keeps their updates.

    One is made for each trace of a loss function; it lives no longer than that.

    Attributes:
      collections: The collections after the latest call.
    """

    def __init__(
        self,
        model: nn.Module,
        collections: dict[str, Any],
        *,
        train: bool,
        eval_dropout: bool = False,
    ) -> None:
        """Wraps `model.apply`; without `train`, whatever says 'train' is overruled.

        Args:
          model: The Linen model.
          collections: Its other collections to begin with.
          train: Whether arguments and fields that say 'train' count. Otherwise one that is given
            says the opposite, and one that is not is left to the model: see
            `manualpar.user_model.evaluation`.
          eval_dropout: Whether they count without `train` too, but for batch statistics, which come
            from the collections.
        """
        self._model = model if train else for_evaluation(model, dropout=eval_dropout)
        self._switches = {} if train else switches_of(eval_dropout=eval_dropout)
        self.collections = collections

    def __call__(
        self,
        variables: dict[str, Any],
        *args: Any,
        method: Any = None,
        mutable: Any = False,
        **kwargs: Any,
    ) -> Any:
        """As `model.apply`; collections that the caller names in `mutable` are returned too."""
        apply: Callable[..., Any] = apply_model
        if self._switches:
            args, kwargs = overrule(_signature(self._model, method), args, kwargs, self._switches)
            if not isinstance(self._model, NNXModel):
                apply = functools.partial(evaluate_linen, apply_model, self._switches)
        asked = _collection_names(mutable)
        kept = [name for name in self.collections if name not in variables]
        out, updates = apply(
            self._model,
            {**self.collections, **variables},
            *args,
            method=method,
            mutable=[*kept, *asked],
            **kwargs,
        )
        kept_updates = {name: updates[name] for name in kept if name in updates}
        self.collections = {**self.collections, **self._checked(kept_updates)}
        if mutable is False:
            return out
        return out, {name: updates[name] for name in asked if name in updates}

    def _checked(self, updates: dict[str, Any]) -> dict[str, Any]:
        """Refuses an update of another structure than the state has: a step must be repeatable."""
        for name, new in updates.items():
            old = self.collections[name]
            if leaf_paths(old) != leaf_paths(new):
                raise ValueError(
                    f"model: applying it changes what collection {name!r} consists of, from "
                    f"{leaf_paths(old)} to {leaf_paths(new)}; a training state keeps it. Create "
                    "the same variables when the model is initialised (train=False)."
                )
            leaves = zip(leaf_paths(old), jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
            different = [
                f"{path}: {x.dtype}{list(x.shape)} -> {y.dtype}{list(y.shape)}"
                for path, x, y in leaves
                if (x.shape, x.dtype) != (y.shape, y.dtype)
            ]
            if different:
                raise ValueError(
                    f"model: applying it changes shapes or dtypes in collection {name!r}: "
                    f"{', '.join(different)}; "
                    "a training state keeps them. Cast in the model before it stores them."
                )
        return updates


def leaf_paths(tree: Any) -> list[str]:
    """Where the leaves of a tree are, in order."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]


def _signature(model: nn.Module, method: Any) -> inspect.Signature:
    """What a method of a model takes beside the model; that of `__call__` for `None`."""
    owner = model.module if isinstance(model, NNXModel) else model
    is_name = method is None or isinstance(method, str)
    function = getattr(owner, method or "__call__", None) if is_name else method
    if not callable(function):
        raise TypeError(
            f"model: {class_of(model).__name__} has no method {method or '__call__'!r}, expected "
            "one to initialise it with. Name it with init_args=lambda batch: ((batch.inputs,), "
            "{'method': '...'})."
        )
    parameters = list(inspect.signature(function).parameters.values())
    parameters = parameters if is_name else parameters[1:]
    return inspect.Signature([x.replace(annotation=x.empty) for x in parameters])


def _required(signature: inspect.Signature) -> dict[str, inspect.Parameter]:
    """The arguments without a default that nobody but the caller gives."""
    return {
        name: parameter
        for name, parameter in signature.parameters.items()
        if name not in EVAL_SWITCHES
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def _example(signature: inspect.Signature) -> str:
    """The `init_args` that a method may need, as a user would write it."""
    args, kwargs = "", []
    for name, parameter in _required(signature).items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            kwargs.append(f"'{name}': batch['{name}']")
        else:
            args += f"batch['{name}'], "
    args = args[:-1] if args.count(",") == 1 else args[:-2]
    return f"init_args=lambda batch: (({args}), {{{', '.join(kwargs)}}})"


def _checked_pair(returned: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a user's `init_args` returns."""
    args, kwargs = returned if isinstance(returned, tuple | list) and len(returned) == 2 else (0, 0)
    if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping):
        raise TypeError(
            f"init_args returned a {type(returned).__name__} that is not the pair (args, kwargs), "
            "expected a tuple of positional arguments and a dict of others, such as "
            "init_args=lambda batch: ((batch.inputs,), {})."
        )
    return tuple(args), dict(kwargs)


def _collection_names(mutable: Any) -> tuple[str, ...]:
    """The collections that a caller's `mutable=` names."""
    if isinstance(mutable, str):
        return (mutable,)
    if isinstance(mutable, list | tuple | set | frozenset):
        return tuple(mutable)
    if mutable is False:
        return ()
    raise TypeError(
        f"apply_fn: mutable={mutable!r}, expected the names of collections such as ['losses']: the "
        "program keeps those of the "
        "training state itself."
    )
