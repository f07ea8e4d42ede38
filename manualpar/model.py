"""How a model is called: to initialise it, from a loss function, and for evaluation.

The framework asks nothing of a model but `init` and `apply`. What a program has to add to a user's
`apply_fn({"params": params}, inputs, train=True, rngs=...)` is done here: the other collections are
handed in and their updates kept, and evaluation turns training off.
"""

import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from manualpar.collectives import cast_to_varying, varying_axes
from manualpar.nnx_model import class_of, for_evaluation

# Keyword arguments by which Linen models are told to train, and what they get in evaluation.
EVAL_SWITCHES = {"train": False, "training": False, "is_training": False, "deterministic": True}


def init_variables(model: nn.Module, rng: jax.Array, inputs: Any) -> dict[str, Any]:
    """Initialises a model as `model.init({"params": rng}, inputs, train=False)` does.

    Args:
      model: The Linen model; one whose `__call__` has no `train` argument is called without it, and
        one that requires another of `EVAL_SWITCHES` with that.
      rng: The key for the parameters.
      inputs: The inputs of the global batch; only shapes and dtypes are read.

    Returns:
      The variables by collection.
    """
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
    return dict(model.init({"params": rng}, zeros, **init_arguments(model)))


def init_arguments(model: nn.Module) -> dict[str, Any]:
    """The keyword arguments for initialisation: `train=False` if the model's `__call__` has it.

    Of the other `EVAL_SWITCHES` those that have no default.
    """
    parameters = inspect.signature(model.__call__).parameters
    return {
        name: value
        for name, value in EVAL_SWITCHES.items()
        if name in parameters
        and (name == "train" or parameters[name].default is inspect.Parameter.empty)
    }


def apply_model(model: nn.Module, variables: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """`model.apply`, where the zeros that `nn.RNN` starts from vary over devices as data does."""
    with nn.intercept_methods(_vary_initial_carry):
        return model.apply(variables, *args, **kwargs)


class CarryingApply:
    """A model's `apply` that hands in its other collections and keeps their updates.

    One is made for each trace of a loss function; it lives no longer than that.

    Attributes:
      collections: The collections after the latest call.
    """

    def __init__(self, model: nn.Module, collections: dict[str, Any], *, train: bool) -> None:
        """Wraps `model.apply`; without `train`, arguments in `EVAL_SWITCHES` are overruled.

        Args:
          model: The Linen model.
          collections: Its other collections to begin with.
          train: Whether arguments that say 'train' reach the model. Otherwise one that is passed,
            by keyword or position, says the opposite, and one that is not is left to the model.
        """
        self._model = model if train else for_evaluation(model)
        self._train = train
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
        if not self._train:
            args, kwargs = _overrule(self._model, method, args, kwargs)
        asked = _collection_names(mutable)
        kept = [name for name in self.collections if name not in variables]
        out, updates = apply_model(
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
            different = [
                f"{jax.tree_util.keystr(path)}: {x.dtype}{list(x.shape)} -> "
                f"{y.dtype}{list(y.shape)}"
                for (path, x), y in zip(
                    jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True
                )
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
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _vary_initial_carry(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Lets the zeros that `nn.RNN` starts from vary over devices as its inputs do.

    Its scan demands a carry of one type from beginning to end, and flax starts it from a constant.
    """
    rnn = context.module
    is_call = isinstance(rnn, nn.RNN) and context.method_name == "__call__"
    if is_call and kwargs.get("initial_carry") is None:
        inputs = args[0] if args else kwargs["inputs"]
        time_major = kwargs.get("time_major")
        time_major = rnn.time_major if time_major is None else time_major
        time_dim = 0 if time_major else inputs.ndim - rnn.cell.num_feature_axes - 1
        key = kwargs.get("init_key")
        carry = rnn.cell.initialize_carry(
            jax.random.key(0) if key is None else key,
            inputs.shape[:time_dim] + inputs.shape[time_dim + 1 :],
        )
        carry = cast_to_varying(carry, varying_axes(inputs))
        names = list(jax.typeof(inputs).sharding.spec)
        if any(names):  # Only where shardings are types.
            batch = [name for dim, name in enumerate(names) if dim != time_dim]
            batch = batch[: len(batch) - rnn.cell.num_feature_axes]
            carry = jax.tree.map(lambda x: jax.sharding.reshard(x, PartitionSpec(*batch)), carry)
        kwargs = {**kwargs, "initial_carry": carry}
    return next_fun(*args, **kwargs)


def _overrule(
    model: nn.Module, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with each of `EVAL_SWITCHES` set for evaluation."""
    owner: Any = class_of(model)
    function = getattr(owner, method) if isinstance(method, str) else method
    names = list(inspect.signature(function or owner.__call__).parameters)[1:]
    switched = [EVAL_SWITCHES.get(name, arg) for name, arg in zip(names, args, strict=False)]
    kwargs = {name: EVAL_SWITCHES.get(name, value) for name, value in kwargs.items()}
    return (*switched, *args[len(switched) :]), kwargs


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
