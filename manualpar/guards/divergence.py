"""Refuses programs in which devices could miss each other.

A collective waits for all devices along its axes. Inside a `cond` or a `while` whose condition
varies over such an axis some devices would take part and others not: the program then hangs, or
matches one device's collective with another's of the same size and computes nonsense. The types of
`check_vma=True` do not forbid it, but they say where it can happen.
"""

import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from manualpar.jaxprs import all_equations, inner_jaxprs
from manualpar.purposes import EXAMPLES_SCOPE, GATHER_SCOPE

# Primitives that name mesh axes and send nothing.
SILENT_PRIMITIVES = frozenset(
    {
        "axis_index",
        "preduced",
        "pvary",
        "reduced_vary_cast_p",
        "shard_map",
        "vary_unreduced_cast_p",
    }
)


def check_traced_steps(
    name: str, train: ClosedJaxpr, evaluate: ClosedJaxpr, *, data_axes: tuple[str, ...]
) -> None:
    """Refuses the traced steps of a program if they are wrong in a way that types do not see.

    Args:
      name: The program's name, for messages.
      train: The traced training step.
      evaluate: The traced evaluation step.
      data_axes: The mesh axes that split the batch, in order.

    Raises:
      ValueError: See the checks below.
    """
    for closed in (train, evaluate):
        check_conditions(name, closed.jaxpr)
        check_constraints(name, closed.jaxpr)
        check_gathered_order(name, closed.jaxpr, EXAMPLES_SCOPE, data_axes)
    check_derivatives(name, evaluate.jaxpr, GATHER_SCOPE)


def check_conditions(name: str, jaxpr: Jaxpr) -> None:
    """Refuses collectives under a condition that differs between the devices they wait for.

    Args:
      name: The program's name, for messages.
      jaxpr: The traced program.

    Raises:
      ValueError: There is one; the message says where.
    """
    for eqn in all_equations(jaxpr):
        varying = _varying_condition(eqn)
        for inner in _equations_inside(eqn) if varying else ():
            shared = sorted(varying & _communication_axes(inner))
            if shared:
                where = f"{eqn.source_info.name_stack}/{inner.source_info.name_stack}".strip("/")
                raise ValueError(
                    f"{name}: a {eqn.primitive.name} contains a {inner.primitive.name} ({where}), "
                    f"and its condition differs between the devices along "
                    f"{shared}: some would wait there for the others for ever. A sharded parameter "
                    "is gathered where it is used: call the module outside of the branch or loop "
                    "and choose with jnp.where, make the condition the same on all devices "
                    "(jax.lax.pmax), or use data_parallel."
                )


def check_constraints(name: str, jaxpr: Jaxpr) -> None:
    """Refuses sharding constraints to axes along which every device has its own part already.

    Args:
      name: The program's name, for messages.
      jaxpr: The traced program.

    Raises:
      ValueError: There is one, which JAX refuses when it lowers the program and not before.
    """
    for eqn in all_equations(jaxpr):
        if eqn.primitive.name != "sharding_constraint":
            continue
        sharding = eqn.params["sharding"]
        manual = set(getattr(getattr(sharding, "mesh", None), "manual_axes", ()))
        if manual & set(jax.tree.leaves(tuple(getattr(sharding, "spec", ())))):
            raise ValueError(
                f"{name}: the model or the loss constrains an array to {sharding.spec} with "
                "mode='manual', maybe by jax.vmap(..., spmd_axis_name=...); expected no constraint,"
                " because every device runs the model on its own part of the batch alone. Use "
                "mode='auto', or take it out."
            )


def check_gathered_order(name: str, jaxpr: Jaxpr, scope: str, data_axes: tuple[str, ...]) -> None:
    """Refuses examples that are gathered over other axes, or in another order, than they are split.

    Args:
      name: The program's name, for messages.
      jaxpr: The traced program.
      scope: The named scope in which examples are gathered.
      data_axes: The mesh axes that examples are split over, in their order.

    Raises:
      ValueError: Examples are gathered so.
    """
    for eqn in all_equations(jaxpr):
        if scope not in re.split(r"[/()]", str(eqn.source_info.name_stack)):
            continue
        axes = tuple(jax.tree.leaves(eqn.params.get("axis_name"))) or data_axes
        if axes != tuple(axis for axis in data_axes if axis in axes):
            raise ValueError(
                f"{name}: {scope} gathers over {axes}, but the batch is split over {data_axes}, in "
                f"this order; expected the same. Pass axis_name={data_axes!r} to it."
            )


def check_derivatives(name: str, jaxpr: Jaxpr, scope: str) -> None:
    """Refuses losses in which gathered parameters are differentiated, as a step does once more.

    The gradient of a gather is written by hand, and JAX takes the bare gather for it where a loss
    differentiates: the gradient of that is the sum over the devices, and not the mean.

    Args:
      name: The program's name, for messages.
      jaxpr: The traced evaluation, in which nothing else is differentiated.
      scope: The named scope in which parameters are gathered.

    Raises:
      ValueError: There is a gather without its gradient; the message says where.
    """
    for eqn in jaxpr.eqns:
        scopes = re.split(r"[/()]", str(eqn.source_info.name_stack))
        if eqn.primitive.name == "all_gather" and scope in scopes:
            raise ValueError(
                f"{name}: a parameter that is gathered ({eqn.source_info.name_stack}) is "
                "differentiated within the model or the loss (jax.vjp, nn.vjp), expected one that "
                "is whole: take nn.unbox(params) in the loss, and for a module that differentiates "
                "its own parameters use replicate= or data_parallel."
            )
        if "custom_vjp" not in eqn.primitive.name:
            for _, inner in inner_jaxprs(eqn):
                check_derivatives(name, inner, scope)


def _varying_condition(eqn: Any) -> frozenset[str]:
    """The mesh axes that the condition of a branch or a loop varies over."""
    if eqn.primitive.name == "cond":
        return _varying(eqn.invars[0])
    if eqn.primitive.name == "while":
        return _varying(eqn.params["cond_jaxpr"].jaxpr.outvars[0])
    return frozenset()


def _varying(variable: Any) -> frozenset[str]:
    """The mesh axes that a variable or a literal of a jaxpr varies over."""
    return frozenset(getattr(variable.aval, "mat", jax.typeof(0).mat).varying)


def _equations_inside(eqn: Any) -> Iterator[Any]:
    for _, inner in inner_jaxprs(eqn):
        yield from all_equations(inner)


def _communication_axes(eqn: Any) -> frozenset[str]:
    """The mesh axes that an equation sends something along."""
    if eqn.primitive.name in SILENT_PRIMITIVES:
        return frozenset()
    names = [eqn.params.get("axis_name"), *(eqn.params.get("axes") or ())]
    flat = jax.tree.leaves(names)
    return frozenset(axis for axis in flat if isinstance(axis, str))
