"""The collections besides `params` that a training state carries from step to step.

A loss calls `apply_fn({"params": params}, inputs, train=True, rngs=...)`. Its `apply_fn` hands in
the other collections and keeps their updates. In evaluation, it overrules switches such as `train`.
"""

from collections.abc import Callable
from typing import Any

import jax

from manualpar.core.mesh.axes import naming_unbound_axes
from manualpar.core.model.evaluation import SWITCHES, overrule, signature_of
from manualpar.core.model.interface import InitArgs, ModelInterface
from manualpar.core.model.varying_loops import varying_loops
from manualpar.core.state.state_arrays import leaf_types

# Collections that flax and its users sow values into, to be read where the model is applied.
SOWN_COLLECTIONS = frozenset({"intermediates", "losses", "perturbations"})


def find_carried_collections(
    model: ModelInterface,
    variables: dict[str, Any],
    trace: Callable[[Callable[..., None], Any], None],
    init_args: InitArgs | None,
) -> dict[str, Any]:
    """Picks, from a model's abstract variables, the collections that a training state carries.

    Those are all but `params` and the sown ones: `SOWN_COLLECTIONS`, and collections that grow
    whenever the model is applied. `trace` traces a function of variables, a key and a batch.
    """
    others = {name: tree for name, tree in variables.items() if name != "params"}
    paths = {name: leaf_types(tree).keys() for name, tree in others.items()}
    updated = dict(paths)

    def call(variables: Any, rng: jax.Array, batch: Any) -> None:
        args, kwargs = model.initial_call(batch, init_args)
        kwargs = {**kwargs, "rngs": {"params": rng}, "mutable": list(others)}
        with naming_unbound_axes(), varying_loops():
            _, updates = model.apply(variables, *args, **kwargs)
        updated.update({name: leaf_types(tree).keys() for name, tree in updates.items()})

    if others and model.makes_variables_in_calls:
        trace(call, variables)
    return {
        name: tree
        for name, tree in others.items()
        if name not in SOWN_COLLECTIONS and updated[name] == paths[name]
    }


class CarryingApply:
    """A model's `apply` that hands in its other collections and keeps their updates.

    One is made for each trace of a loss function, and lives no longer than that.

    Attributes:
      module: The model's module.
      collections: The collections after the latest call.
    """

    def __init__(
        self,
        model: ModelInterface,
        collections: dict[str, Any],
        own_part: Callable[[Any], Any] = lambda params: params,
    ) -> None:
        """Wraps `model.apply`, with the collections to begin with.

        `own_part` makes what the model computes with of the parameters that the loss has.
        """
        self._model, self.module, self._own_part = model, model.module, own_part
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
        if switches := SWITCHES[self._model.phase]:
            signature = signature_of(self._model.module, method)
            args, kwargs = overrule(signature, args, kwargs, switches)
        if "params" in variables:
            variables = {**variables, "params": self._own_part(variables["params"])}
        asked = _collection_names(mutable)
        kept = [name for name in self.collections if name not in variables]
        out, updates = self._model.apply(
            {**self.collections, **variables},
            *args,
            method=method,
            mutable=[*kept, *asked],
            **kwargs,
        )
        new = {name: updates[name] for name in kept if name in updates}
        for name, tree in new.items():
            _check_update(name, self.collections[name], tree)
        self.collections = {**self.collections, **new}
        if mutable is False:
            return out
        return out, {name: updates[name] for name in asked if name in updates}


def _check_update(name: str, old: Any, new: Any) -> None:
    """Refuses a collection that changes its structure, because a step must be repeatable."""
    before, after = leaf_types(old), leaf_types(new)
    if before.keys() != after.keys():
        raise ValueError(
            f"model: applying it changes what collection {name!r} consists of, from "
            f"{list(before)} to {list(after)}; a training state keeps it. Create "
            "the same variables when the model is initialised (train=False)."
        )
    different = [f"{path}: {x} -> {after[path]}" for path, x in before.items() if x != after[path]]
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
