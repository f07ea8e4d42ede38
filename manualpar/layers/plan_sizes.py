"""The numbers of a module of which a planned call gets this device's share.

A module that reshapes what a `Column` makes to heads says how many there are: by a field, by an
attribute that its `setup` has set, or by its config. While one of its methods runs on shards, the
number is a `LocalSize`. `setup` and the modules that are made in a call get the whole number,
because the plan divides their parameters itself.
"""

import contextlib
import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn

from manualpar.layers.plan_styles import PerDevice
from manualpar.linen.linen_model import replace_fields


class LocalSize(int):
    """This device's share of a number.

    A number that it divides is a whole one: `hidden_size // num_heads` is the size of a head. Its
    multiples are shares too: `num_heads * head_size`.

    Attributes:
      whole: The number on all devices together.
    """

    whole: int

    def __new__(cls, local: int, whole: int) -> "LocalSize":
        """A share of `whole`."""
        size = super().__new__(cls, local)
        size.whole = whole
        return size

    def __mul__(self, other: Any) -> Any:
        """Returns a share of the product."""
        product = super().__mul__(other)
        return LocalSize(product, self.whole * other) if type(other) is int else product

    def __rmul__(self, other: Any) -> Any:
        """Returns a share of the product."""
        return self * other

    def __rfloordiv__(self, other: Any) -> Any:
        """Divides a whole number."""
        return other // self.whole

    def __rtruediv__(self, other: Any) -> Any:
        """Divides a whole number."""
        return other / self.whole

    def __rmod__(self, other: Any) -> Any:
        """Returns what is left of a whole number."""
        return other % self.whole


@contextlib.contextmanager
def local_sizes(where: str, module: nn.Module, style: PerDevice, devices: int) -> Iterator[None]:
    """Gives a module this device's share of the numbers that its style names, for a while.

    Raises:
      ValueError: The module has no such number, or the devices do not divide it.
    """
    with contextlib.ExitStack() as stack:
        for name in style.names:
            try:
                whole = _look_up(module, name)
            except (AttributeError, KeyError):
                whole = None
            if isinstance(whole, LocalSize):  # One of its methods calls another one.
                continue
            if not isinstance(whole, int):
                raise ValueError(
                    f"{where}: {name} is {whole}, expected a number that the module has when it is "
                    "called: a field, an attribute that setup sets, or one of these with an "
                    f"attribute behind a dot{_such_as(numbers_of_heads(module))}."
                )
            if whole % devices:
                raise ValueError(
                    f"{where}: {name} is {whole}, which does not divide over the {devices} devices "
                    f"of the axis, expected a multiple of {devices}. Use fewer devices along it, or "
                    "leave this module and those in it out of the plan."
                )
            field, _, rest = name.partition(".")
            before, share = getattr(module, field), LocalSize(whole // devices, whole)
            value = _with(before, rest, share) if rest else share
            stack.enter_context(replace_fields(module, {field: value}))
            if _look_up(module, name) != share:
                raise ValueError(
                    f"{where}: {name} cannot be set in a copy of a {type(before).__name__}, "
                    "expected one of a dataclass, a dict, or another object whose attributes can "
                    f"be set. Have setup set an attribute, as in self.num_heads = self.{name}."
                )
        yield


def forget_shares(module: nn.Module) -> None:
    """Gives the fields of a module that was made of shares the whole numbers."""
    for field in dataclasses.fields(module):
        value = getattr(module, field.name, None)
        if isinstance(value, LocalSize):
            object.__setattr__(module, field.name, value.whole)
        elif isinstance(value, tuple | list) and any(isinstance(x, LocalSize) for x in value):
            whole = [x.whole if isinstance(x, LocalSize) else x for x in value]
            object.__setattr__(module, field.name, tuple(whole))


def numbers_of_heads(module: nn.Module) -> list[str]:
    """Names the numbers of a module, or of its config, that count heads by their names."""
    return [name for name in _numbers(module) if name.endswith(("head", "heads"))]


def numbers_in(module: nn.Module, text: str) -> list[str]:
    """Names the whole numbers of a module, or of its config, that stand in a text."""
    in_text = set(re.findall(r"\d+", text))
    found = _numbers(module).items()
    return [name for name, n in found if str(n) in in_text and not isinstance(n, LocalSize)]


def _numbers(module: nn.Module) -> dict[str, int]:
    found: dict[str, int] = {}
    owners = {"": module} | {f"{name}.": value for name, value in vars(module).items()}
    for prefix, owner in owners.items():
        if not isinstance(owner, nn.Module) or owner is module:
            values = owner if isinstance(owner, Mapping) else getattr(owner, "__dict__", {})
            numbers = {k: v for k, v in values.items() if type(v) in (int, LocalSize)}
            found |= {f"{prefix}{name}": value for name, value in numbers.items()}
    return found


def _such_as(names: list[str]) -> str:
    return f", such as {', '.join(names)}" if names else ""


def _look_up(owner: Any, name: str) -> Any:
    for part in name.split("."):
        owner = owner[part] if isinstance(owner, Mapping) else getattr(owner, part)
    return owner


def _with(owner: Any, name: str, value: Any) -> Any:
    """A copy of an object in which an attribute, or an entry, is another one."""
    part, _, rest = name.partition(".")
    if rest:
        value = _with(_look_up(owner, part), rest, value)
    if isinstance(owner, Mapping):
        return {**owner, part: value}
    other = copy.copy(owner)
    try:
        setattr(other, part, value)
    except AttributeError:  # A frozen dataclass.
        object.__setattr__(other, part, value)
    return other
