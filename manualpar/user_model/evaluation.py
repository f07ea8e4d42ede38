"""How a model is evaluated: with training turned off, wherever a module of it is told to train.

Linen modules are told by arguments (`model(x, train=True)`) or by fields (`MyModel(train=True)`,
`nn.Dropout(0.1, deterministic=False)` inside of another module). A loss function says what it says
in training; in evaluation the arguments of every module's call, and its fields while it runs, say
the opposite. NNX models have a switch of their own, see `manualpar.nnx.model`.

Invariant: nothing in a Linen model draws from the stream `dropout` in evaluation. What cannot be
switched, such as dropout that is written by hand, is refused with its module's path.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
from flax.errors import InvalidRngError

from manualpar.user_model.module_fields import replace_fields

# By what names Linen's models are told to train, and what they get in evaluation.
EVAL_SWITCHES = {"train": False, "training": False, "is_training": False, "deterministic": True}
# The switch of `nn.BatchNorm`: statistics come from the state.
_STATISTICS = {"use_running_average": True}
_STREAM = "dropout"


def switches_of(*, eval_dropout: bool) -> dict[str, bool]:
    """What each switch is set to in evaluation, by name; with dropout left on if that is asked."""
    return _STATISTICS if eval_dropout else {**EVAL_SWITCHES, **_STATISTICS}


def overrule(
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    switches: Mapping[str, bool],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Sets those arguments of a call that are switches.

    Args:
      signature: What is called takes.
      args: The positional arguments.
      kwargs: The keyword arguments.
      switches: What each switch is set to, by name.

    Returns:
      The arguments. A switch that is not passed is not added, and one that is `None` is left to a
      field of the module.
    """

    def switch(name: str, value: Any) -> Any:
        return value if value is None else switches.get(name, value)

    named = zip(signature.parameters, args, strict=False)
    switched = [switch(name, value) for name, value in named]
    kwargs = {name: switch(name, value) for name, value in kwargs.items()}
    return (*switched, *args[len(switched) :]), kwargs


def evaluate_linen(
    apply: Callable[..., Any], switches: Mapping[str, bool], *args: Any, **kwargs: Any
) -> Any:
    """Applies a Linen model with switches set in every module, whatever calls it.

    Args:
      apply: Applies the model.
      switches: See `switches_of`. If dropout is among them, its key is withheld.
      *args: What `apply` takes.
      **kwargs: Likewise; the keys of random streams are `rngs`.

    Returns:
      What `apply` returns.

    Raises:
      ValueError: A module draws from the stream that is withheld.
    """
    withheld = False
    if "deterministic" in switches and isinstance(rngs := kwargs.get("rngs"), Mapping):
        withheld = _STREAM in rngs
        kwargs["rngs"] = {name: key for name, key in rngs.items() if name != _STREAM}

    def switch(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, signature = context.module, inspect.signature(context.orig_method)
        args, kwargs = overrule(signature, args, kwargs, switches)
        names = [field.name for field in dataclasses.fields(module) if field.name in switches]
        fields = {n: switches[n] for n in names if isinstance(getattr(module, n, None), bool)}
        try:
            with replace_fields(module, fields):
                return next_fun(*args, **kwargs)
        except InvalidRngError as error:
            if not withheld:
                raise
            kind = type(module).__name__
            raise ValueError(
                f"model: {'/'.join(module.path) or kind!r} ({kind}) draws from rngs[{_STREAM!r}] "
                "in evaluation, and has no argument or field by which it is told not to; expected "
                f"one of {', '.join(EVAL_SWITCHES)}. Give it one, or another stream if it is no "
                "dropout, or leave dropout on in evaluation: eval_dropout=True."
            ) from error

    with nn.intercept_methods(switch):
        return apply(*args, **kwargs)
