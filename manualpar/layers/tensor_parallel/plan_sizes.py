"""Replaces numbers in a module's fields, such as the number of heads, by a device's share of them.

A module that reshapes the output of a `Column` to heads needs the number of heads. The number is in
a field, in an attribute that `setup` sets, or in the module's config. While one of the module's
methods runs on shards, the style `PerDevice` replaces the number by a `LocalSize`. `setup`, and
modules that are made during the call, get the undivided number, because the plan itself divides the
parameters of these modules.
"""

import contextlib
import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn

from manualpar.core.model.linen.linen_model import replace_fields
from manualpar.layers.tensor_parallel.plan_styles import PerDevice


class LocalSize(int):
    """This device's share of a number, for example of the number of heads.

    An undivided number divided by a `LocalSize` is divided by `whole`. So
    `hidden_size // num_heads` is still the size of a head. A multiple of a `LocalSize`, such as
    `num_heads * head_size`, is a `LocalSize` too.

    Attributes:
      whole: The number on all devices together.
    """

    whole: int

    def __new__(cls, share: int, whole: int) -> "LocalSize":
        """Makes a share of `whole`."""
        size = super().__new__(cls, share)
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
        """Divides an undivided number by `whole`."""
        return other // self.whole

    def __rtruediv__(self, other: Any) -> Any:
        """Divides an undivided number by `whole`."""
        return other / self.whole

    def __rmod__(self, other: Any) -> Any:
        """Returns the remainder of an undivided number divided by `whole`."""
        return other % self.whole


@contextlib.contextmanager
def local_sizes(where: str, module: nn.Module, style: PerDevice, devices: int) -> Iterator[None]:
    """Replaces the numbers that a `PerDevice` style names by shares, within a `with` block.

    Raises:
      ValueError: The module has no such number, or the devices do not divide it.
    """
    with contextlib.ExitStack() as stack:
        for name in style.names:
            try:
                whole = _look_up(module, name)
            except (AttributeError, KeyError):
                whole = None
            if isinstance(whole, LocalSize):  # One method of the module calls another.
                continue
            if not isinstance(whole, int):
                raise ValueError(
                    f"{where}: the module has no number {name}, expected a number "
                    "that the module has during a call: a field, an attribute that setup sets, or "
                    "an entry of a field or attribute, such as "
                    f"{', '.join(_numbers(module))}."
                )
            if whole % devices:
                raise ValueError(
                    f"{where}: {name} is {whole}, expected a multiple of the {devices} devices of "
                    "the axis. Use fewer devices along it, or leave this module and those in it "
                    "out of the plan."
                )
            field, _, rest = name.partition(".")
            before, share = getattr(module, field), LocalSize(whole // devices, whole)
            value = _replace_at(before, rest, share) if rest else share
            stack.enter_context(replace_fields(module, {field: value}))
            if _look_up(module, name) != share:
                raise ValueError(
                    f"{where}: {name} cannot be set in a copy of a {type(before).__name__}, "
                    "expected a dataclass, a dict, or another object whose attributes can be set. "
                    f"Let setup set an attribute, as in self.num_heads = self.{name}."
                )
        yield


def forget_shares(module: nn.Module) -> None:
    """Restores the undivided numbers in the fields of a module that was given `LocalSize`s."""
    for field in dataclasses.fields(module):
        value = getattr(module, field.name, None)
        if isinstance(value, LocalSize):
            object.__setattr__(module, field.name, value.whole)
        elif isinstance(value, tuple | list) and any(isinstance(x, LocalSize) for x in value):
            whole = [x.whole if isinstance(x, LocalSize) else x for x in value]
            object.__setattr__(module, field.name, tuple(whole))


def numbers_to_name(module: nn.Module, error: str, suffixes: tuple[str, ...] = ("",)) -> list[str]:
    """Finds the numbers of a module or its config that are in the new shape of a failed reshape.

    Args:
      module: The module that reshapes.
      error: The message of JAX, "cannot reshape array of shape (4, 8, 2) into shape (4, 8, 8)".
      suffixes: The endings of names to consider; `("",)` for all names.

    Returns:
      The names of the numbers: fields and attributes of the module if there are any, otherwise
      entries of its config.
    """
    shapes = [part.split(", ") for part in re.findall(r"shape \(([-\d, ]+)\)", error)]
    if len(shapes) < 2:
        return []
    # The dims before the split dim are equal in both shapes.
    same = [a == b for a, b in zip(*shapes, strict=False)][:-1]
    made = set(shapes[1][same.index(False) if False in same else len(same) :])
    found = [
        name
        for name, number in _numbers(module).items()
        if str(number) in made and not isinstance(number, LocalSize) and name.endswith(suffixes)
    ]
    return [name for name in found if "." not in name] or found


def _numbers(module: nn.Module) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, value in {"": module, **vars(module)}.items():
        is_config = not isinstance(value, nn.Module | int)
        if not name or (is_config and not name.startswith("_")):
            entries = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
            prefix = f"{name}." if name else ""
            found |= {f"{prefix}{k}": v for k, v in entries.items() if type(v) in (int, LocalSize)}
    return found


def _look_up(owner: Any, name: str) -> Any:
    for part in name.split("."):
        owner = owner[part] if isinstance(owner, Mapping) else getattr(owner, part)
    return owner


def _replace_at(owner: Any, name: str, value: Any) -> Any:
    """Copies an object, and replaces the attribute or entry at a dotted name in the copy."""
    part, _, rest = name.partition(".")
    if rest:
        value = _replace_at(_look_up(owner, part), rest, value)
    if isinstance(owner, Mapping):
        return {**owner, part: value}
    other = copy.copy(owner)
    try:
        setattr(other, part, value)
    except AttributeError:  # A frozen dataclass.
        object.__setattr__(other, part, value)
    return other
