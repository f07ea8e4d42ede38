"""The outer gradient: the replicas' mean difference from the common parameters.

The functions run inside a `jax.shard_map` over all axes of the mesh, on a device's shards. Only the
difference may be quantized, never the parameters: quantized parameters would be too coarse for the
change of a few steps. The types show that the results do not vary over the replicas' axes, so all
replicas have the same bits.

A replica's difference is weighted by the number of examples that the replica has seen. A step
weights minibatches and devices in the same way. So after one inner step of plain gradient descent
the mean difference is proportional to the gradient of the global mean loss, also with masked
examples.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from manualpar.core.modes.variable_reduction import KNOWN, CollectionSync, sync_collections
from manualpar.core.parameters.collectives import cast_to_varying
from manualpar.core.parameters.comm_policy import CommPolicy
from manualpar.core.parameters.shard_rules import is_inside
from manualpar.core.tracing.scopes import COUNT_SCOPE, OUTER_SCOPE
from manualpar.core.trees import path_name


def mean_difference(
    common: Any, replica: Any, examples: jax.Array, axes: tuple[str, ...], comm: CommPolicy
) -> Any:
    """Returns the mean over replicas of `common - replica`.

    Args:
      common: A tree of shards of the common parameters, with which all replicas began.
      replica: A tree of the same shards of this replica's parameters.
      examples: `float32[]`, the number of examples that this replica has seen since it began with
        `common`.
      axes: The mesh axes of the replicas.
      comm: The dtype and the quantizer to send with.

    Returns:
      The tree of means, weighted by the numbers of examples; unweighted means if no replica has
      seen an example. The means do not vary over `axes`.

    Communication:
      One all-reduce over `axes` for each leaf: `2 b P (R - 1) / R` bytes for a shard of `P` numbers
      on `R` replicas. A quantizer uses an all-to-all and an all-gather instead, if that saves
      bytes. One further all-reduce of 4 bytes.
    """
    size = jax.lax.axis_size(axes)
    with jax.named_scope(f"{OUTER_SCOPE}/{COUNT_SCOPE}"):
        mean = jax.lax.pmean(examples, axes)
    weight = jnp.where(mean > 0, examples / jnp.where(mean > 0, mean, 1), jnp.ones_like(mean))

    def mean_of(path: Any, before: jax.Array, now: jax.Array) -> jax.Array:
        dtype = comm.reduce.dtype or now.dtype
        # If the sum is in 16 bits, weight each term before it is rounded.
        exact = jnp.promote_types(now.dtype, jnp.float32)
        difference = (before.astype(exact) - now.astype(exact)) * weight
        with jax.named_scope(f"{path_name(path)}/{OUTER_SCOPE}"):
            quantizer = comm.reduce_quantizer(now.size / size, jnp.dtype(dtype), axes)
            if quantizer and size > 1:
                mean_delta, _ = quantizer.mean(difference, axes)
            else:
                mean_delta = jax.lax.pmean(difference.astype(dtype), axes)
        return mean_delta.astype(now.dtype)

    return jax.tree_util.tree_map_with_path(mean_of, common, replica)


def mean_collections(
    before: Any, after: Any, axes: tuple[str, ...], rules: Mapping[str, CollectionSync]
) -> Any:
    """Reduces the collections of all replicas to common collections.

    A variable without a rule is equal on all devices of a replica after a step. Replicas can differ
    in such a variable only because they have different random keys. So a floating-point variable
    becomes the mean over the replicas, and an integer becomes the maximum.

    Communication:
      One all-reduce over `axes` for each leaf.
    """
    default = _default_rules(before, {**KNOWN, **rules})
    return sync_collections(after, axes, before=before, rules={**default, **rules})


def to_replica(tree: Any, axes: tuple[str, ...]) -> Any:
    """Makes per-replica arrays, which vary over `axes` and have a leading dimension of 1."""
    return jax.tree.map(lambda x: cast_to_varying(x, axes)[None], tree)


def _default_rules(collections: Any, names: Iterable[str]) -> Mapping[str, CollectionSync]:
    """Makes rules for the leaves that no name in `names` covers: mean for floats, else maximum."""
    leaves = [(path_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(collections)]
    unnamed = [(path, x) for path, x in leaves if not any(is_inside(path, name) for name in names)]
    return {path: "mean" if jnp.issubdtype(x.dtype, jnp.inexact) else "max" for path, x in unnamed}
