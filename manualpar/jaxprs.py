"""Walks through traced programs."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


def all_equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Every equation of a program, outer ones before those inside them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from all_equations(inner)


def inner_jaxprs(eqn: Any) -> Iterator[Jaxpr]:
    """The programs that are parameters of an equation."""
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, ClosedJaxpr):
                yield inner.jaxpr
            elif isinstance(inner, Jaxpr):
                yield inner
