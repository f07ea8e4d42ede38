"""What replicas send each other that train alone: their mean difference from common parameters.

Everything here runs inside a `jax.shard_map` over all axes of the mesh, on a device's shards. The
difference is encoded, if anything is, and never the parameters, whose codes would lose what a step
changes. What is returned does not vary over the replicas' axes by its type, so that copies which
are made of it are equal bit for bit.

A replica that has seen more examples counts for more: its difference is weighted by their number,
as a step weights minibatches and devices. After one step of plain gradient descent alone the mean
is therefore the gradient of the global mean, however the examples are masked.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from manualpar.core.modes.variable_reduction import KNOWN, CollectionSync, sync_collections
from manualpar.core.parameters.collectives import CommPolicy, cast_to_varying
from manualpar.core.parameters.placement import is_inside, path_name
from manualpar.core.tracing.scopes import COUNT_SCOPE, OUTER_SCOPE


def mean_difference(
    anchor: Any, local: Any, examples: jax.Array, axes: tuple[str, ...], wire: CommPolicy
) -> Any:
    """The mean over replicas of how far they have come from their common parameters.

    Args:
      anchor: A tree of shards of the parameters that the replicas began with, the same on all.
      local: The same of this replica's own parameters now.
      examples: `float32[]`, how many examples this replica has seen since then.
      axes: The mesh axes of the replicas.
      wire: The dtype and the code of what travels.

    Returns:
      The tree of means of `anchor - local`, weighted by the numbers of examples; the plain mean if
      nobody has seen any. It does not vary over `axes`.

    Communication:
      One all-reduce over `axes` for each leaf: `2 b P (R - 1) / R` bytes for a shard of `P` numbers
      on `R` replicas. With a code an all-to-all and an all-gather instead, where that is fewer
      bytes. And one all-reduce of 4 bytes.
    """
    size = jax.lax.axis_size(axes)
    with jax.named_scope(f"{OUTER_SCOPE}/{COUNT_SCOPE}"):
        mean = jax.lax.pmean(examples, axes)
    weight = jnp.where(mean > 0, examples / jnp.where(mean > 0, mean, 1), jnp.ones_like(mean))

    def mean_of(path: Any, before: jax.Array, now: jax.Array) -> jax.Array:
        dtype = wire.reduce_dtype or now.dtype
        # Sums in 16 bits are weighted before they are rounded.
        exact = jnp.promote_types(now.dtype, jnp.float32)
        difference = (before.astype(exact) - now.astype(exact)) * weight
        with jax.named_scope(f"{path_name(path)}/{OUTER_SCOPE}"):
            code = wire.reduce_quantizer(now.size / size, jnp.dtype(dtype), axes)
            if code and size > 1:
                total, _ = code.mean(difference, axes)
            else:
                total = jax.lax.pmean(difference.astype(dtype), axes)
        return total.astype(now.dtype)

    return jax.tree_util.tree_map_with_path(mean_of, anchor, local)


def mean_collections(
    before: Any, local: Any, axes: tuple[str, ...], rules: Mapping[str, CollectionSync]
) -> Any:
    """The collections that replicas have come to, as `sync_collections` reduces them.

    What no rule names is the same on all devices after a step, so that it differs between replicas
    by random numbers at most: the mean is taken, of integers the maximum.

    Communication:
      One all-reduce over `axes` for each leaf.
    """
    default = _default_rules(before, {**KNOWN, **rules})
    return sync_collections(local, axes, before=before, rules={**default, **rules})


def to_replica(tree: Any, axes: tuple[str, ...]) -> Any:
    """What all replicas have in common as each one's own, with a leading dimension of 1."""
    return jax.tree.map(lambda x: cast_to_varying(x, axes)[None], tree)


def _default_rules(collections: Any, names: Iterable[str]) -> Mapping[str, CollectionSync]:
    """Rules for the leaves that no name fits."""
    leaves = [(path_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(collections)]
    unnamed = [(path, x) for path, x in leaves if not any(is_inside(path, name) for name in names)]
    return {path: "mean" if jnp.issubdtype(x.dtype, jnp.inexact) else "max" for path, x in unnamed}
