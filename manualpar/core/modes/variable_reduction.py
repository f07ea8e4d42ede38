"""The variables outside `params` after a step: reduced over devices, or replaced by gradients.

Each device updates a model's collections other than `params` from the device's own examples. The
right reduction depends on a variable's meaning, which its type does not show. Running averages need
the mean, counters need the sum, and running maxima need the maximum. Only the rules of
`batch_stats` and of flax's FP8 products are known. The user gives the other rules.
"""

import difflib
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT, Fp8DotGeneralBase, fm32

from manualpar.core.mesh.axes import AxisName, axis_tuple, check_axes_bound
from manualpar.core.parameters.collectives import (
    cast_to_varying,
    cast_with_max,
    is_vma_checked,
    varying_axes,
)
from manualpar.core.tracing.scopes import COLLECTIONS_SCOPE
from manualpar.core.trees import Collections, Params, Variables

# -------------------------------------------------------------------------------------------------
# Variables that a step replaces by their gradients: scales of flax's FP8 products.
#
# flax's FP8 products keep, for each operand, a scale and a history of the operand's largest
# absolute values (*delayed scaling*). The variables are in the collection
# `_overwrite_with_gradient`. The backward pass returns their new values as gradients. The newest
# entry of a history is a maximum over elements of the operand, so it must become the maximum over
# all uses, minibatches and devices. All other entries and the scale follow from the old history.
# So they are equal everywhere, and the maximum does not change them.
#
# Invariants: all minibatches of a step read the old values; a variable that no example uses keeps
# its value.


OVERWRITTEN: str = OVERWRITE_WITH_GRADIENT
_SUFFIXES = ("amax_history", "scale")
_NAMES = [f"{x}_{y}" for x in ("input", "kernel", "output_grad") for y in _SUFFIXES]


class Trained(NamedTuple):
    """What a step differentiates if a model has overwritten variables."""

    params: Params
    overwritten: Variables


def as_maxima(overwritten: Variables) -> Variables:
    """Casts variables to flax's dtype `fm32`; autodiff takes the maximum of its gradients."""
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, fm32), overwritten)


def lowest(overwritten: Variables) -> Variables:
    """Returns minus infinity for each element: the maximum over no examples."""
    return jax.tree.map(
        lambda x: cast_to_varying(jnp.full(x.shape, -jnp.inf, x.dtype), varying_axes(x)),
        overwritten,
    )


@jax.custom_vjp
def use_without_examples(loss: jax.Array, overwritten: Variables, maxima: Variables) -> jax.Array:
    """Returns the loss; the gradient of `maxima` is `lowest`, and no gradient is a missing zero."""
    del overwritten, maxima
    return loss


use_without_examples.defvjp(
    lambda loss, overwritten, maxima: (loss, overwritten),
    lambda overwritten, g: (g, None, as_maxima(lowest(overwritten))),
)


def keep_unused(collections: Collections, before: Collections) -> Collections:
    """Returns the collections after a step, with the old values of unused variables."""
    if OVERWRITTEN not in collections:
        return collections
    kept = jax.tree.map(
        lambda new, old: jnp.where(jnp.isneginf(new), old, new),
        collections[OVERWRITTEN],
        before[OVERWRITTEN],
    )
    return {**collections, OVERWRITTEN: kept}


def overwritten_on_mesh(module: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the variables of one of flax's FP8 products, varying over the operands' mesh axes.

    Along an axis that splits layers the operands are parts, so the newest entry of a history is the
    maximum over the axis. Along axes of the batch the variables vary already, and a step takes one
    maximum at its end.

    Communication:
      Backward: an all-reduce of each variable over the axes that split the layer.
    """
    found: dict[str, Any] = {}
    axes = varying_axes([x for x in args if isinstance(x, jax.Array)])
    if not axes or not isinstance(module, Fp8DotGeneralBase):
        return found
    for name in _NAMES:
        value = getattr(module, name).value
        if missing := tuple(sorted(axes - varying_axes(value))):
            if value.dtype == fm32:
                value = cast_with_max(value, missing)
            else:
                value = cast_to_varying(value, missing)
            found[name] = types.SimpleNamespace(value=value)
    return found


# -------------------------------------------------------------------------------------------------


CollectionSync = Literal["mean", "sum", "max", "min"]
# "parameters" is a rule that no user gives: a step computes the variable apart, from parameters.
Rule: TypeAlias = CollectionSync | Literal["parameters"]
COLLECTION_SYNCS: tuple[CollectionSync, ...] = ("mean", "sum", "max", "min")
# flax's names: the running averages of its normalisation layers, in Linen and in NNX, and the
# scales of its FP8 products.
KNOWN: Mapping[str, CollectionSync] = {"batch_stats": "mean", OVERWRITTEN: "max"}


def check_sync_collections(
    builder: str, rules: Any, collections: Collections, sown: Iterable[tuple[str, ...]] = ()
) -> Mapping[str, CollectionSync]:
    """Checks that each rule is known and that its name, a collection or a path, fits a variable."""
    if not isinstance(rules, Mapping):
        raise TypeError(
            f"{builder}: sync_collections={rules!r}, expected a dict such as {{'stats': 'sum'}}."
        )
    names = {
        "/".join(parts[: length + 1])
        for path, _ in jax.tree_util.tree_leaves_with_path(collections)
        for parts in [_name(path).split("/")]
        for length in range(len(parts))
    }
    for name, rule in rules.items():
        if rule not in COLLECTION_SYNCS:
            raise ValueError(
                f"{builder}: sync_collections[{name!r}]={rule!r}, expected one of "
                f"{', '.join(map(repr, COLLECTION_SYNCS))}."
            )
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            if any("/".join((*path, "")).startswith(f"{name}/") for path in sown):
                raise ValueError(
                    f"{builder}: sync_collections names {name!r}, which the model sows; expected "
                    "no rule, because sown values begin anew in each call, on each device. Leave "
                    "the rule out; the loss gets the values by apply_fn(..., mutable=["
                    f"{name.partition('/')[0]!r}])."
                )
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(
                f"{builder}: sync_collections names {name!r}, which the model does not carry from "
                f"step to step; expected names from {sorted(names)}{hint}"
            )
    return rules


def sync_collections(
    collections: Collections,
    axis_names: AxisName,
    *,
    before: Any,
    rules: Mapping[str, Rule],
) -> Any:
    """Reduces collections outside `params` whose types vary, so that all devices' values are equal.

    Args:
      collections: The collections after a step, by name.
      axis_names: The mesh axis, or tuple of axes, over which examples are split.
      before: The collections before the step, which are equal on all devices.
      rules: The reduction of each variable, by collection or path, see `check_sync_collections`.

    Communication:
      One all-reduce for each leaf whose type varies or whose rule is `"sum"`. Other leaves need no
      all-reduce, because they are already equal on all devices. A leaf whose rule is `"parameters"`
      is returned as it was before the step.
    """
    axes = axis_tuple(axis_names)
    check_axes_bound("sync_collections", axes)

    def sync(path: Any, x: Any, old: Any) -> Any:
        is_typed = is_vma_checked(axes[0])
        if others := varying_axes(x) - varying_axes(old) - set(axes):
            raise ValueError(
                f"sync_collections: collections{jax.tree_util.keystr(path)} differs between the "
                f"devices along {sorted(others)}, which have the same examples. Compute it from "
                "complete activations (after layers.leave), or apply jax.lax.pmean to it."
            )
        differing = tuple(a for a in axes if not is_typed or a in varying_axes(x))
        rule = choose_sync(path, x, rules, differing)
        if rule == "parameters":
            return old
        # With "sum", equal values are summed too, because each device may have added a constant,
        # such as `x.shape[0]`.
        if rule == "sum":
            return old + jax.lax.psum(cast_to_varying(x - old, axes), axes)
        if not differing:
            return x
        if rule == "mean":
            return jax.lax.pmean(x, differing)
        return jax.lax.pmax(x, differing) if rule == "max" else jax.lax.pmin(x, differing)

    with jax.named_scope(COLLECTIONS_SCOPE):
        return jax.tree_util.tree_map_with_path(sync, collections, before)


def has_rule(name: str, rules: Mapping[str, CollectionSync]) -> bool:
    """Returns whether a rule fits the variable `name`, such as `batch_stats/norm/mean`."""
    return any(f"{name}/".startswith(f"{rule}/") for rule in {**KNOWN, **rules})


def choose_sync(path: Any, x: Any, rules: Mapping[str, Rule], axes: tuple[str, ...]) -> Rule:
    """Chooses the rule for a variable whose type varies over `axes`: the longest fitting name wins.

    If no name fits and `axes` is empty, the rule is `"mean"`, which changes nothing. If no name
    fits a variable that varies, or if its dtype does not allow the rule, the variable is refused.
    """
    name, rules = _name(path), {**KNOWN, **rules}
    fits = max((rule for rule in rules if f"{name}/".startswith(f"{rule}/")), key=len, default="")
    if not fits and not axes:
        return "mean"
    variable = f"sync_collections: collections{jax.tree_util.keystr(path)} has dtype {x.dtype}"
    if not fits:
        raise ValueError(
            f"{variable}, differs between the devices along {axes}, and has no rule. Build the "
            f"program with sync_collections={{{name!r}: ...}}, where ... is 'mean' (averages), "
            "'sum' (counters), 'max' or 'min'. Or make it equal in the model (jax.lax.psum)."
        )
    is_number, has_mean, is_complex = (
        jnp.issubdtype(x.dtype, kind) for kind in (jnp.number, jnp.inexact, jnp.complexfloating)
    )
    rule = rules[fits]
    fitting = {"mean": has_mean or not axes, "sum": is_number, "parameters": True}
    if not fitting.get(rule, is_number and not is_complex):
        raise ValueError(
            f"{variable}, which has no {rule!r} over devices; expected another rule than "
            f"sync_collections={{{fits!r}: {rule!r}}}."
        )
    return rule


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
