"""The keys of a `config.json`, which are read one by one, and the errors that name them."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from manualpar.errors import printable

LARGEST = 2**31  # Every size in a config must be smaller.


class Keys:
    """The keys of a `config.json` that have not been read yet."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.left, self.where = dict(config), where

    def get(self, key: str, default: Any) -> Any:
        """Returns the value of a key, which stays unread."""
        return self.left.get(key, default)

    def take(self, key: str, *default: Any) -> Any:
        """Reads a key; without a default the key is required."""
        if key not in self.left and not default:
            raise ValueError(f"{self.where} has no {key}, expected a number.")
        return self.left.pop(key, *default)

    def refuse(self, key: str, got: Any, expected: str) -> ValueError:
        """Returns the error for a value that is not supported."""
        shown = repr(got)
        shown = shown if len(shown) < 200 else f"{shown[:200]}..."
        return ValueError(f"{self.where}: {printable(key)} is {shown}, expected {expected}.")

    def check(
        self, key: str, value: Any, kind: type, allows: Callable[[Any], bool], expected: str
    ) -> Any:
        """Returns a value as `kind`, and refuses a value of another type or out of range."""
        kinds = (int, float) if kind is float else kind
        is_of_kind = isinstance(value, kinds) and (kind is bool or not isinstance(value, bool))
        # Refuses infinity, NaN, and integers that are too large for a float.
        if not is_of_kind or not abs(value) <= sys.float_info.max or not allows(value):
            raise self.refuse(key, value, expected)
        return kind(value)
