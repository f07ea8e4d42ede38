"""Makes the arguments for a model's initialisation from a batch.

The model is called with `batch.inputs`, or with the arguments that the user's `init_args` returns;
switches such as `train` are added. A call that does not fit the method is refused, and the error
shows the `init_args` to write.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from manualpar.core.model.evaluation import EVAL_SWITCHES, required, signature_of
from manualpar.core.model.interface import InitArgs
from manualpar.core.trees import Batch


def initial_call(
    module: Any, batch: Batch, init_args: InitArgs | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the `args` and `kwargs` with which a module is initialised.

    The `kwargs` of `init_args` may name another `method` than `__call__`. If the method has an
    argument `train` and `init_args` does not set it, `train` is `False`. Other `EVAL_SWITCHES` are
    added if they have no default.

    Raises:
      TypeError: The method cannot be called with these arguments.
    """
    if init_args is None and not hasattr(batch, "inputs"):
        raise TypeError(
            f"batch is a {type(batch).__name__}, expected one with .inputs, such as "
            "manualpar.Batch. Or name the arguments of the model's call: "
            f"{_example(signature_of(module, None))}."
        )
    args, kwargs = _checked_pair(init_args(batch)) if init_args else ((batch.inputs,), {})
    method = kwargs.get("method")
    signature = signature_of(module, method)
    passed = {name: value for name, value in kwargs.items() if name != "method"}
    switches: dict[str, Any] = {}
    names: Mapping[str, Any] = signature.parameters
    try:
        names = signature.bind_partial(*args, **passed).arguments
        switches = {
            name: value
            for name, value in EVAL_SWITCHES.items()
            if name in signature.parameters.keys() - names.keys()
            and (name == "train" or signature.parameters[name].default is inspect.Parameter.empty)
        }
        signature.bind(*args, **passed, **switches)
    except TypeError as error:
        missing = [repr(name) for name in _required(signature) if name not in names]
        source = "the result of init_args" if init_args else "batch.inputs alone"
        called = method if isinstance(method, str) else getattr(method, "__name__", "__call__")
        raise TypeError(
            f"model: {type(module).__name__}.{called} cannot be called with {source} to initialise "
            f"the model: {'it also needs ' + ', '.join(missing) if missing else error}. It takes "
            f"{signature}. Make the arguments of the call from the batch: {_example(signature)}."
        ) from error
    return args, {**kwargs, **switches}


def _required(signature: inspect.Signature) -> dict[str, inspect.Parameter]:
    """Selects the arguments without a default, except switches."""
    found = required(signature.parameters)
    return {name: parameter for name, parameter in found.items() if name not in EVAL_SWITCHES}


def _example(signature: inspect.Signature) -> str:
    """Formats the `init_args` that a method may need, as a user would write it."""
    args, kwargs = "", []
    for name, parameter in _required(signature).items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            kwargs.append(f"'{name}': batch['{name}']")
        else:
            args += f"batch['{name}'], "
    args = args[:-1] if args.count(",") == 1 else args[:-2]
    return f"init_args=lambda batch: (({args}), {{{', '.join(kwargs)}}})"


def _checked_pair(returned: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = returned if isinstance(returned, tuple | list) and len(returned) == 2 else (0, 0)
    if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping):
        raise TypeError(
            f"init_args returned a {type(returned).__name__} that is not the pair (args, kwargs), "
            "expected a tuple of positional arguments and a dict of others, such as "
            "init_args=lambda batch: ((batch.inputs,), {})."
        )
    return tuple(args), dict(kwargs)
