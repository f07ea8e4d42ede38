"""Value numbering: values that a program computes in the same way get the same number.

A trace repeats a computation that the code repeats, such as the count `mask.sum()`. So two
variables may be the same count. Value numbers show whether a loss divides by the count that it
returns (https://en.wikipedia.org/wiki/Value_numbering). The sum of all entries of an array has one
number, whatever the order of summation: `mask.sum()` and `mask.sum(-1).sum()` have the same number.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

# These operations keep the sum of all entries of their operand.
_SUM_PRESERVING = frozenset({"reduce_sum", "reshape", "squeeze", "transpose"})


class ValueNumbers:
    """The value numbers of all values that a walk through a program has visited."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._expressions: dict[Any, int] = {}
        # For a result of `_SUM_PRESERVING` operations, the number of the array to which these
        # operations were applied.
        self._sum_of: dict[int, int] = {}
        self._scalars: set[int] = set()
        self._constants: dict[int, float] = {}
        self._fresh = itertools.count(1)

    def fresh(self) -> int:
        """Returns a value number that no value has yet."""
        return next(self._fresh)

    def of(self, variable: Any) -> int:
        """Returns the value number of a variable or a constant."""
        if not isinstance(variable, Literal):
            return self._numbers.setdefault(variable, self.fresh())
        number = self._of_expression(("literal", str(variable.aval), str(variable.val)))
        if not np.ndim(variable.val):
            self._scalars.add(number)
            if np.isrealobj(variable.val):
                self._constants[number] = float(variable.val)
        return number

    def set(self, variable: Any, number: int) -> None:
        """Gives a variable the number of another value, to which it is equal."""
        self._numbers[variable] = number

    def set_result(self, variable: Any, eqn: Any, index: int, numbers: Sequence[int]) -> None:
        """Sets the number of an operation's `index`-th result; `numbers` belong to its operands."""
        name = eqn.primitive.name
        expression: Any = (name, str(eqn.params), index, *numbers)
        terms = self._sum_of.get(numbers[0], numbers[0]) if name in _SUM_PRESERVING else None
        if name == "reduce_sum" and not variable.aval.shape:
            expression = ("sum of all", terms)
        number = self._of_expression(expression)
        if terms is not None:
            self._sum_of[number] = terms
        if math.prod(variable.aval.shape) == 1:
            self._scalars.add(number)
        self._numbers[variable] = number

    def is_scalar(self, number: int) -> bool:
        """Returns whether the value with a number is a scalar or a broadcast scalar."""
        return number in self._scalars

    def constant(self, number: int) -> float | None:
        """Returns the scalar constant that has a number; `None` if it belongs to no constant."""
        return self._constants.get(number)

    def _of_expression(self, expression: Any) -> int:
        return self._expressions.setdefault(expression, self.fresh())
