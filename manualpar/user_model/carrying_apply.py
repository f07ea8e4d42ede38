"""The `apply_fn` of a loss function, which carries the model's other collections along.

A loss calls `apply_fn({"params": params}, inputs, train=True, rngs=...)`. The other collections are
handed in and their updates are kept; in evaluation, arguments that say 'train' are overruled.
"""

from typing import Any

import jax

from manualpar.user_model.adapter import ModelAdapter
from manualpar.user_model.call_arguments import signature_of
from manualpar.user_model.evaluation import SWITCHES, overrule


class CarryingApply:
    """A model's `apply` that hands in its other collections and keeps their updates.

    One is made for each trace of a loss function, and lives no longer than that.

    Attributes:
      collections: The collections after the latest call.
    """

    def __init__(self, model: ModelAdapter, collections: dict[str, Any]) -> None:
        """Wraps `model.apply`, with the collections to begin with."""
        self._model = model
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
        switches = SWITCHES[self._model.phase]
        if switches:
            args, kwargs = overrule(
                signature_of(self._model.module, method), args, kwargs, switches
            )
        asked = _collection_names(mutable)
        kept = [name for name in self.collections if name not in variables]
        out, updates = self._model.apply(
            {**self.collections, **variables},
            *args,
            method=method,
            mutable=[*kept, *asked],
            **kwargs,
        )
        for name in kept:
            if name in updates:
                _check_update(name, self.collections[name], updates[name])
        kept_updates = {name: updates[name] for name in kept if name in updates}
        self.collections = {**self.collections, **kept_updates}
        if mutable is False:
            return out
        return out, {name: updates[name] for name in asked if name in updates}


def leaf_paths(tree: Any) -> list[str]:
    """The paths of a tree's leaves, in order."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]


def _check_update(name: str, old: Any, new: Any) -> None:
    """Refuses a collection that changes its structure: a step must be repeatable."""
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


def _collection_names(mutable: Any) -> tuple[str, ...]:
    if isinstance(mutable, str):
        return (mutable,)
    if isinstance(mutable, list | tuple | set | frozenset):
        return tuple(mutable)
    if mutable is False:
        return ()
    raise TypeError(
        f"apply_fn: mutable={mutable!r}, expected the names of collections such as ['losses']: the "
        "program keeps those of the training state itself."
    )
