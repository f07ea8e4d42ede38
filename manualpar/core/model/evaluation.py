"""The arguments and fields that tell Linen's modules to train, and their values in evaluation.

A *switch* is such an argument (`model(x, train=True)`) or field (`MyModel(train=True)`,
`nn.Dropout(0.1, deterministic=False)` inside another module). A loss function passes the values for
training. In evaluation, switches get other values: in the arguments of every module's call, and in
a module's fields while the module runs.

Invariant: no module of a Linen model draws from the stream `dropout` in evaluation. Handwritten
dropout that has no switch is refused with its module's path.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from manualpar.core.model.interface import RunPhase

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
