"""Variables that a step replaces by their gradients: scales of flax's FP8 products.

flax's FP8 products keep, for each operand, a scale and a history of the operand's largest absolute
values (*delayed scaling*). The variables are in the collection `_overwrite_with_gradient`. The
backward pass returns their new values as gradients. The newest entry of a history is a maximum over
elements of the operand, so it must become the maximum over all uses, minibatches and devices. All
other entries and the scale follow from the old history. So they are equal everywhere, and the
maximum does not change them.

Invariants: all minibatches of a step read the old values; a variable that no example uses keeps its
value.
"""

import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT, Fp8DotGeneralBase, fm32

from manualpar.core.parameters.collectives import cast_to_varying, cast_with_max, varying_axes
from manualpar.core.trees import Collections, Params, Variables

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
