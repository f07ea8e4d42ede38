"""The `apply_fn` of a loss: it keeps the collections of a state, and turns training off.

A loss calls `apply_fn({"params": params}, inputs, train=True, rngs=...)`. This `apply_fn` adds the
other collections to the variables and keeps their updates. In evaluation, `apply_fn` also overrides
switches such as `train`.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from manualpar.core.mesh.axes import naming_unbound_axes
from manualpar.core.model.interface import InitArgs, ModelInterface, RunPhase
from manualpar.core.model.loops import varying_loops
from manualpar.core.modes.variable_reduction import OVERWRITTEN
from manualpar.core.summary import leaf_types
from manualpar.core.trees import Batch, Variables

# -------------------------------------------------------------------------------------------------
# The arguments and fields that tell Linen's modules to train, and their values in evaluation.
#
# A *switch* is such an argument (`model(x, train=True)`) or field (`MyModel(train=True)`,
# `nn.Dropout(0.1, deterministic=False)` inside another module). A loss function passes the values
# for training. In evaluation, switches get other values: in the arguments of every module's call,
# and in a module's fields while the module runs.
#
# Invariant: no module of a Linen model draws from the stream `dropout` in evaluation. Handwritten
# dropout that has no switch is refused with its module's path.


DROPOUT_STREAM = "dropout"
EVAL_SWITCHES = {"train": False, "training": False, "is_training": False, "deterministic": True}
# The switch of `nn.BatchNorm`. With `eval_dropout`, statistics come from the state too.
_STATISTICS = {"use_running_average": True}
SWITCHES: Mapping[RunPhase, Mapping[str, bool]] = {
    "train": {},
    "eval": {**EVAL_SWITCHES, **_STATISTICS},
    "eval_dropout": _STATISTICS,
}
# A module's class may set an attribute with this name to the values of its fields in evaluation.
# These values also apply with `eval_dropout`, in which `train` stays on and would turn on more than
# dropout.
EVALUATION_FIELDS = "evaluation_fields"


def signature_of(module: Any, method: Any) -> inspect.Signature:
    """Returns the signature of a module's method (`__call__` for `None`) without `self`."""
    is_name = method is None or isinstance(method, str)
    function = getattr(module, method or "__call__", None) if is_name else method
    if not callable(function):
        raise TypeError(
            f"model: {type(module).__name__} has no method {method or '__call__'!r}, expected "
            "one to initialise it with. Name it with init_args=lambda batch: ((batch.inputs,), "
            "{'method': '...'})."
        )
    parameters = list(inspect.signature(function).parameters.values())
    parameters = parameters if is_name else parameters[1:]
    return inspect.Signature([x.replace(annotation=x.empty) for x in parameters])


def required(parameters: Mapping[str, inspect.Parameter]) -> dict[str, inspect.Parameter]:
    """Selects the parameters that have no default."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in variadic
    }


def overrule(
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    switches: Mapping[str, bool],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replaces those arguments of a call that are switches by their values in `switches`.

    A switch that is not passed is not added. A switch that is `None` stays `None`, so that a field
    of the module decides. `signature` is the signature of the called method, without `self`.
    """

    def switch(name: str, value: Any) -> Any:
        return value if value is None else switches.get(name, value)

    named = zip(signature.parameters, args, strict=False)
    switched = [switch(name, value) for name, value in named]
    kwargs = {name: switch(name, value) for name, value in kwargs.items()}
    return (*switched, *args[len(switched) :]), kwargs


# -------------------------------------------------------------------------------------------------


# Collections of sown values by their names. Values that a model sows into other collections are
# recorded, see `recording_sows`. The model's caller reads them; a state keeps no update of them.
SOWN_COLLECTIONS = frozenset({"intermediates", "losses", "perturbations"})
# The collections of the other models that a loss calls, by the models' names, see `OtherModel`.
OTHER_MODELS = "other_models"


def find_carried_collections(
    model: ModelInterface,
    variables: dict[str, Any],
    trace: Callable[[Callable[..., None], Any], None],
    init_args: InitArgs | None,
) -> dict[str, Any]:
    """Selects, from a model's abstract variables, the collections that a training state keeps.

    `variables` have no sown values. A state keeps all collections except `params`,
    `SOWN_COLLECTIONS`, and collections whose set of leaves changes when the model is applied.
    The variables of an NNX model are all kept, because the model has no calls without them.
    `trace(function, variables)` traces a function of variables, a key and a batch.
    """
    others = {name: tree for name, tree in variables.items() if name != "params"}
    paths = {name: leaf_types(tree).keys() for name, tree in others.items()}
    updated = dict(paths)

    def call(variables: Variables, rng: jax.Array, batch: Batch) -> None:
        args, kwargs = model.initial_call(batch, init_args)
        kwargs = {**kwargs, "rngs": {"params": rng}, "kept": list(others), "requested": ()}
        with naming_unbound_axes(), varying_loops():
            _, _, kept = model.apply_keeping(variables, *args, **kwargs)
        updated.update({name: leaf_types(tree).keys() for name, tree in kept.items()})

    if others and model.makes_variables_in_calls:
        trace(call, variables)
    return {
        name: tree
        for name, tree in others.items()
        if not model.makes_variables_in_calls
        or (name not in SOWN_COLLECTIONS and updated[name] == paths[name])
    }


def check_shapes_of_collections(
    builder: str,
    collections: dict[str, Any],
    init: Callable[[Batch], Any],
    whole: Batch,
    part: Batch,
) -> None:
    """Refuses variables whose shapes depend on the number of examples or positions.

    Args:
      collections: The collections that a state keeps, made from the batch `whole`.
      init: Makes a model's variables from a batch.
    """
    leaves = zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True)
    changed = {a for x, y in leaves for a, b in zip(x.shape, y.shape, strict=True) if a != b}
    if not any(changed.intersection(x.shape) for x in jax.tree.leaves(collections)):
        return  # Saves a trace: no shape has the batch's number.
    try:
        made = leaf_types(jax.eval_shape(init, part))
    except Exception:  # The model does not take such a batch: its own error is raised later.
        return
    for name, of_whole in leaf_types(collections).items():
        of_part = made.get(name, of_whole)
        if of_part != of_whole:
            raise ValueError(
                f"{builder}: the variable {name!r} of the model is {of_whole} for the global batch "
                f"and {of_part} for the part that a device computes at once; expected the same "
                "shape, because a training state keeps the variable, whoever holds its examples. "
                "If the value is for the loss, sow it (self.sow): sown values begin anew in each "
                "call. If it belongs to examples, pass it in the batch. Or reduce it over the "
                "examples before the model stores it."
            )


class CarryingApply:
    """A model's `apply` that also passes collections outside `params` and keeps their updates.

    Each trace of a loss function makes a new object.

    Attributes:
      interface: The model.
      module: The model's module.
      collections: The collections after the last call.
    """

    def __init__(
        self,
        model: ModelInterface,
        collections: dict[str, Any],
        model_part: Callable[[Any], Any] = lambda params: params,
    ) -> None:
        """Wraps `model.apply`; `collections` are the initial collections.

        `model_part` converts the loss's parameters to the parameters with which the model computes.
        """
        self.interface, self.module, self._model_part = model, model.module, model_part
        self.collections = collections

    def __call__(
        self,
        variables: dict[str, Any],
        *args: Any,
        method: Any = None,
        mutable: Any = False,
        **kwargs: Any,
    ) -> Any:
        """Calls `model.apply`; also returns the collections that the caller names in `mutable`."""
        if switches := SWITCHES[self.interface.phase]:
            signature = signature_of(self.interface.module, method)
            args, kwargs = overrule(signature, args, kwargs, switches)
        if "params" in variables:
            variables = {**variables, "params": self._model_part(variables["params"])}
        requested = _collection_names(mutable)
        own = {name: tree for name, tree in self.collections.items() if name != OTHER_MODELS}
        # A step replaces overwritten variables by their gradients, so a call may not change them.
        kept = [name for name in own if name not in (*variables, OVERWRITTEN)]
        out, updates, new = self.interface.apply_keeping(
            {**own, **variables},
            *args,
            method=method,
            kept=[name for name in kept if name not in SOWN_COLLECTIONS],
            requested=requested,
            **kwargs,
        )
        for name, tree in new.items():
            _check_update(name, self.collections[name], tree)
        self.collections = {**self.collections, **new}
        return out if mutable is False else (out, updates)

    def for_other(self, name: str, model: ModelInterface) -> "CarryingApply":
        """Returns the `apply` of another model that the loss calls, in the same phase."""
        return CarryingApply(
            dataclasses.replace(model, phase=self.interface.phase),
            self.collections.get(OTHER_MODELS, {}).get(name, {}),
            lambda params: self._model_part({name: params})[name],
        )


def _check_update(name: str, old: Any, new: Any) -> None:
    """Refuses a collection that changes its structure, because all steps need one structure."""
    before, after = leaf_types(old), leaf_types(new)
    if before.keys() != after.keys():
        raise ValueError(
            f"model: applying it changes what collection {name!r} consists of, from {list(before)} "
            f"to {list(after)}; expected the same variables, because a training state keeps the "
            "collection. Create the same variables when the model is initialised (train=False)."
        )
    different = [f"{path}: {x} -> {after[path]}" for path, x in before.items() if x != after[path]]
    if different:
        raise ValueError(
            f"model: applying it changes shapes or dtypes in collection {name!r}: "
            f"{', '.join(different)}; expected no change, because a training state keeps these "
            "arrays. Cast values in the model before it stores them."
        )


def _collection_names(mutable: Any) -> tuple[str, ...]:
    if isinstance(mutable, str):
        return (mutable,)
    if isinstance(mutable, list | tuple | set | frozenset):
        return tuple(mutable)
    if mutable is False:
        return ()
    raise TypeError(
        f"apply_fn: mutable={mutable!r}, expected the names of collections such as ['losses']. The "
        "collections of the training state need no name here, because the program keeps them."
    )
