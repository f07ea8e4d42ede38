"""How a Linen model is called: to initialise it, from a loss function, and for evaluation.

The framework asks nothing of a model but `init` and `apply`. What a program has to add to a user's
`apply_fn({"params": params}, inputs, train=True, rngs=...)` is done here: the other collections are
handed in and their updates kept, and evaluation turns training off.
"""

import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

# Keyword arguments by which Linen models are told to train, and what they get in evaluation.
EVAL_SWITCHES = {"train": False, "training": False, "is_training": False, "deterministic": True}


def init_variables(model: nn.Module, rng: jax.Array, inputs: Any) -> dict[str, Any]:
    """Initialises a model as `model.init({"params": rng}, inputs, train=False)` does.

    Args:
      model: The Linen model; one whose `__call__` has no `train` argument is called without it.
      rng: The key for the parameters.
      inputs: The inputs of the global batch; only shapes and dtypes are read.

    Returns:
      The variables by collection.
    """
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
    return dict(model.init({"params": rng}, zeros, **train_argument(model, train=False)))


def train_argument(model: nn.Module, *, train: bool) -> dict[str, Any]:
    """The keyword argument `train`, if the model's `__call__` names it; `**kwargs` does not."""
    takes_train = "train" in inspect.signature(model.__call__).parameters
    return {"train": train} if takes_train else {}


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
        self._model = model
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
        out, updates = self._model.apply(
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


def _overrule(
    model: nn.Module, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with each of `EVAL_SWITCHES` set for evaluation."""
    function = getattr(type(model), method) if isinstance(method, str) else method
    names = list(inspect.signature(function or type(model).__call__).parameters)[1:]
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
