"""Refuses traced programs with mistakes that the types of `check_vma=True` do not catch.

A collective waits for all devices along its axes. If a `cond` or a `while` contains the collective
and its condition varies over such an axis, some devices may not call the collective. Then the
program hangs, or matches one device's collective with another collective of the same size and
computes nonsense. JAX's types allow such a collective. But the type of the condition names the axes
over which the condition varies, so this module can refuse the collective. A permutation
(`ppermute`) waits for more devices: in XLA it is one operation of all devices of the program. So it
is refused if the condition varies over any axis. Other collectives may run inside a branch if the
condition varies only over other axes: a pipeline's stages branch on their index, and gather
parameters over the data axes inside a branch.

The gather of a parameter has a gradient written by hand (`custom_vjp`): the mean over the devices.
If the model or the loss itself differentiates a gather (`jax.vjp`), the trace has a plain
all-gather in its place. The gradient that the step takes of this all-gather is the sum over the
devices instead of the mean. The check looks for such an all-gather in programs that the step has
not differentiated: the evaluation step, and the training loss without its gradient.
"""

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.core.primitives import mul_p

from manualpar.core.program.step import check_derivatives
from manualpar.core.tracing.jaxprs import (
    TYPE_CASTS,
    all_equations,
    in_scope,
    inner_jaxprs,
    read_only_by,
)
from manualpar.core.tracing.scopes import (
    CODES_SCOPE,
    EXAMPLES_SCOPE,
    FLOAT8_SCOPE,
    GATHER_SCOPE,
    REGATHER,
    SCATTER_SCOPE,
    purpose_of,
)

# Primitives that name mesh axes but send nothing.
SILENT_PRIMITIVES = TYPE_CASTS | {"axis_index", "shard_map"}


def check_traced_steps(
    name: str,
    train: ClosedJaxpr,
    evaluate: ClosedJaxpr,
    loss: ClosedJaxpr | None,
    *,
    data_axes: tuple[str, ...],
) -> None:
    """Refuses traced steps in which collectives or derivatives of gathers would be wrong.

    They would be wrong if some devices wait in a collective for ever, if the model constrains the
    sharding of an array inside `shard_map`, if examples are gathered in another order than the
    batch's order, if the model differentiates a gathered parameter, or if something other than
    products in float8 reads activations that were gathered as float8 codes.

    Args:
      loss: The training loss without its gradient, see `Step.loss_only`. `None` if the training
        step has no gather whose derivative could be wrong (see `gathers_parameters`), or has
        checked its own loss.
    """
    for closed in (train, evaluate):
        _check_codes(name, closed.jaxpr)
        for eqn in all_equations(closed.jaxpr):
            _check_condition(name, eqn)
            _check_constraint(name, eqn)
            _check_gathered_order(name, eqn, data_axes)
    for undifferentiated in (evaluate, loss):
        if undifferentiated is not None:
            check_derivatives(name, undifferentiated.jaxpr)


def gathers_parameters(train: ClosedJaxpr) -> bool:
    """Returns whether a traced training step gathers a parameter or scatters its gradient.

    If the step does neither, its loss differentiates no gather, so `check_derivatives` can be left
    out.
    """
    purposes = (GATHER_SCOPE, REGATHER, SCATTER_SCOPE)
    return any(
        purpose_of(str(eqn.source_info.name_stack)) in purposes
        for eqn in all_equations(train.jaxpr)
        if _communication_axes(eqn)
    )


def _check_codes(name: str, jaxpr: Jaxpr) -> None:
    """Refuses activations that are gathered as float8 codes, and not read by such products alone.

    The products find the codes again. Anything else would get rounded numbers.
    """
    is_decoded = in_scope(CODES_SCOPE)
    if not any(map(is_decoded, all_equations(jaxpr))):
        return
    read = read_only_by(
        jaxpr, in_scope(FLOAT8_SCOPE), lambda eqn: eqn.primitive is mul_p and is_decoded(eqn)
    )
    if others := [scope for scope, dtypes in read.items() if not dtypes]:
        raise ValueError(
            f"{name}: activations are gathered as float8 codes ({others[0]}), and something else "
            "than products in float8 reads them, expected none, because only these products find "
            "the same codes again. Call enter and leave without float8, or leave out "
            "gather_code='float8'."
        )


def _check_condition(name: str, eqn: Any) -> None:
    """Refuses collectives in a `cond` or `while` whose condition differs between their devices."""
    varying = _varying_condition(eqn)
    jaxprs = inner_jaxprs(eqn) if varying else ()
    for inner in (inner for _, jaxpr in jaxprs for inner in all_equations(jaxpr)):
        is_permutation = inner.primitive.name == "ppermute"
        missed = sorted(varying if is_permutation else varying & _communication_axes(inner))
        if missed:
            where = f"{eqn.source_info.name_stack}/{inner.source_info.name_stack}".strip("/")
            found = f"{name}: a {eqn.primitive.name} contains a {inner.primitive.name} ({where}), "
            differs = f"and its condition differs between the devices along {missed}: "
            if is_permutation:
                over = sorted(_communication_axes(inner))
                raise ValueError(
                    f"{found}over {over}, {differs}a permutation waits for all devices of the "
                    "program, whatever its axis, so some devices would wait for ever. "
                    "Compute it outside of the branch or loop (a ring of attention or of products "
                    "too) and choose with jnp.where, or make the condition the same on all devices "
                    "(jax.lax.pmax)."
                )
            raise ValueError(
                f"{found}{differs}some devices would wait for the others for ever. A loop within "
                "the branch gathers the slices of a sharded parameter: put the condition into the "
                "loop, call the module outside of the branch and choose with jnp.where, make the "
                "condition the same on all devices (jax.lax.pmax), name the module in "
                "keep_gathered=, or use data_parallel."
            )


def _check_constraint(name: str, eqn: Any) -> None:
    """Refuses a sharding constraint on manual axes, before JAX refuses it in lowering."""
    if eqn.primitive.name != "sharding_constraint":
        return
    sharding = eqn.params["sharding"]
    manual = set(getattr(getattr(sharding, "mesh", None), "manual_axes", ()))
    if manual & set(jax.tree.leaves(tuple(getattr(sharding, "spec", ())))):
        raise ValueError(
            f"{name}: the model or the loss constrains an array to {sharding.spec} with "
            "mode='manual', maybe by jax.vmap(..., spmd_axis_name=...); expected no constraint, "
            "because every device runs the model only on its part of the batch. Use mode='auto', "
            "or remove the constraint."
        )


def _check_gathered_order(name: str, eqn: Any, data_axes: tuple[str, ...]) -> None:
    """Refuses a gather of examples unless its axes are data axes, in the order of `data_axes`."""
    axes = tuple(jax.tree.leaves(eqn.params.get("axis_name")))
    if not axes or purpose_of(str(eqn.source_info.name_stack)) != EXAMPLES_SCOPE:
        return
    if axes != tuple(axis for axis in data_axes if axis in axes):
        raise ValueError(
            f"{name}: {EXAMPLES_SCOPE} gathers over {axes}, but the batch is split over "
            f"{data_axes}, in this order; expected the same. Pass axis_name={data_axes!r} to it."
        )


def _varying_condition(eqn: Any) -> frozenset[str]:
    """Returns the mesh axes over which the condition of a branch or a loop varies."""
    if eqn.primitive.name == "cond":
        condition = eqn.invars[0]
    elif eqn.primitive.name == "while":
        condition = eqn.params["cond_jaxpr"].jaxpr.outvars[0]
    else:
        return frozenset()
    return frozenset(getattr(condition.aval, "mat", jax.typeof(0).mat).varying)


def _communication_axes(eqn: Any) -> frozenset[str]:
    """Returns the mesh axes over which an equation communicates."""
    if eqn.primitive.name in SILENT_PRIMITIVES:
        return frozenset()
    names = [eqn.params.get("axis_name"), *(eqn.params.get("axes") or ())]
    flat = jax.tree.leaves(names)
    return frozenset(axis for axis in flat if isinstance(axis, str))
