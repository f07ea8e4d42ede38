"""Numbers of the values in a program: what is computed in the same way has the same number.

A count is computed again and again, `mask.sum()`, because a trace leaves nothing out. So variables
do not tell whether a loss is divided by the count that it is returned with, and numbers do
(https://en.wikipedia.org/wiki/Value_numbering). The sum of all of an array is the same in whatever
order, `mask.sum(-1).sum()`.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

_OF_SAME_TERMS = frozenset({"reduce_sum", "reshape", "squeeze", "transpose"})


class ValueNumbers:
    """The numbers of the values that a walk through a program has come across."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._expressions: dict[Any, int] = {}
        # For what only arranges or adds up the numbers of an array, the number of that array.
        self._terms: dict[int, int] = {}
        self._scalars: set[int] = set()
        self._constants: dict[int, float] = {}
        self._fresh = itertools.count(1)

    def fresh(self) -> int:
        """A number that nothing has."""
        return next(self._fresh)

    def of(self, variable: Any) -> int:
        """The number of a variable or a constant."""
        if not isinstance(variable, Literal):
            return self._numbers.setdefault(variable, self.fresh())
        number = self._of_expression(("literal", str(variable.aval), str(variable.val)))
        if not np.ndim(variable.val):
            self._scalars.add(number)
            if np.isrealobj(variable.val):
                self._constants[number] = float(variable.val)
        return number

    def set(self, variable: Any, number: int) -> None:
        """Gives a variable the number of another value that it has."""
        self._numbers[variable] = number

    def set_result(self, variable: Any, eqn: Any, index: int, numbers: Sequence[int]) -> None:
        """Gives the `index`-th result of an operation its number; `numbers` are the operands'."""
        name = eqn.primitive.name
        expression: Any = (name, str(eqn.params), index, *numbers)
        terms = self._terms.get(numbers[0], numbers[0]) if name in _OF_SAME_TERMS else None
        if name == "reduce_sum" and not variable.aval.shape:
            expression = ("sum of all", terms)
        number = self._of_expression(expression)
        if terms is not None:
            self._terms[number] = terms
        if math.prod(variable.aval.shape) == 1:
            self._scalars.add(number)
        self._numbers[variable] = number

    def is_scalar(self, number: int) -> bool:
        """Whether a value is a single number, maybe broadcast."""
        return number in self._scalars

    def constant(self, number: int) -> float | None:
        """The constant that a value is; `None` if it is none."""
        return self._constants.get(number)

    def _of_expression(self, expression: Any) -> int:
        return self._expressions.setdefault(expression, self.fresh())
