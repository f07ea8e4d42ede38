"""A scan over layers that gathers the next layer's weights while it computes with this one's.

In `nn.scan` over layers whose parameters gather themselves an iteration begins with a gather that
nothing can hide: the compute of the iteration waits for it, and the compute of the one before is
over. Here the loop carries the gathered weights instead. Iteration `i` computes with those of layer
`i`, which iteration `i - 1` has gathered, and gathers those of layer `i + 1`, on which nothing in
it depends. The backward pass is a loop of its own in the other direction: it carries the weights of
layer `i`, gathers those of layer `i - 1`, and scatters the gradients of layer `i`. Two layers'
weights are held instead of one's.

Autodiff would keep what a loop carries for each of its iterations: every layer's gathered weights.
So the gradient is written by hand. The forward loop keeps of each layer what its own `jax.vjp`
needs, but for what it knows to be the weights, the keys or what all layers share; the backward loop
puts these back in.

Symbols: `L` layers; `shards` is what a device holds of all layers' parameters, `[L, ...]` each.

Invariants: parameters, their tree and their initial values are those of `nn.scan`, and so are the
results. `2 L` gathers in a step of training: `L + 1` forward, of which the last one is the last
layer's again, in whose hands the backward pass begins, and `L - 1` backward.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import lift, meta
from flax.linen import transforms

from manualpar.core.partitioning import ShardedParameter, is_box
from manualpar.layers.double_buffer import DoubleBuffer
from manualpar.modes.remat import drop_gathered
from manualpar.sharding.mesh import is_axis_bound


def prefetched_scan(
    target: type[nn.Module],
    *,
    length: int,
    policy: Callable[..., bool] | None = None,
    unroll: int = 1,
    scatter_late: bool = False,
    split_rngs: Mapping[str, bool] | None = None,
    metadata_params: Mapping[Any, Any] | None = None,
) -> Any:
    """Stacks a block `length` times and gathers each one's weights while the one before computes.

    Like `nn.scan(nn.remat(target, policy=policy), variable_axes={"params": 0},
    in_axes=nn.broadcast, ...)`, and just that wherever no parameter gathers itself: outside of
    `shard_map`, at initialisation, in strategies that do not shard. Evaluation gathers as that does
    too.

    Args:
      target: A Linen module class, not rematerialised itself, whose `__call__(carry, *shared)`
        returns `(carry, y)`: `carry` of the same types, `y` anything, such as `None`. `shared` is
        the same for every layer. It has parameters and draws keys, others than in `nn.scan`;
        variables of other collections are refused.
      length: Layers, `L`.
      policy: What of a layer is kept for its backward pass, see `jax.checkpoint`; `None` for all
        but what is gathered, and what is made of that by casts, transposes and reshapes.
      unroll: Layers in one iteration of the loops.
      scatter_late: Whether the backward pass scatters a layer's gradients while it computes those
        of the layer before, for which it holds them that long, whole.
      split_rngs: As for `nn.scan`; by default `params` and `dropout` differ from layer to layer.
      metadata_params: As for `nn.scan`.

    Returns:
      A class with the constructor of `target`, whose `__call__` returns the last carry and all
      `y`, `[L, ...]`.

    Raises:
      ValueError: `length` or `unroll` is not positive; when it is called: the block has variables
        of a collection that is not `params`.

    Communication:
      `L + 1` times what a layer gathers in a forward pass that is differentiated, `L` in one that
      is not; backward `L - 1` times what of it the layer's backward pass needs, and one
      reduce-scatter for each gather of a layer.
    """
    for name, value in (("length", length), ("unroll", unroll)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"prefetched_scan: {name}={value!r}, expected a positive integer.")
    options = {
        "length": length,
        "unroll": unroll,
        "split_rngs": {"params": True, "dropout": True} if split_rngs is None else split_rngs,
        "metadata_params": dict(metadata_params or {}),
    }
    return transforms.lift_transform(
        _lifted, target, policy=policy, options=options, scatter_late=scatter_late
    )


def _lifted(
    fn: Callable[..., Any],
    *,
    policy: Callable[..., bool] | None,
    options: dict[str, Any],
    scatter_late: bool,
) -> Callable[..., Any]:
    """The transformation of a function of scopes, in the manner of `flax.core.lift.scan`."""
    # With a policy that keeps everything flax's checkpoint would only be in the way.
    layer = lift.checkpoint(fn, policy=policy, prevent_cse=False) if policy else fn
    plain = lift.scan(layer, variable_axes={"params": 0}, in_axes=nn.broadcast, **options)
    rngs = tuple(options["split_rngs"])

    def run(scopes: Any, carry: Any, *shared: Any) -> Any:
        collections: dict[str, Any] = {}
        for scope in jax.tree.leaves(scopes):
            collections |= scope.variables()
        boxes = jax.tree.leaves(collections.pop("params", {}), is_leaf=is_box)
        if not any(map(_gathers, boxes)):
            return plain(scopes, carry, *shared)
        if others := [name for name, tree in collections.items() if jax.tree.leaves(tree)]:
            raise ValueError(
                f"prefetched_scan: the block has variables of the collections {others}, expected "
                "parameters only. Stack it with nn.scan."
            )
        # What is gathered outside of the modules is told to be theirs.
        names = {scope.name for scope in jax.tree.leaves(scopes)}
        name = names.pop() if len(names) == 1 else None
        inner = functools.partial(_run, fn, policy, options, scatter_late, name)
        ahead = lift.pack(inner, ("params",), ("params",), rngs, name="prefetched_scan")
        return ahead(scopes, carry, *shared)

    return run


def _run(
    fn: Callable[..., Any],
    policy: Callable[..., bool] | None,
    options: dict[str, Any],
    scatter_late: bool,
    name: str | None,
    scope_fn: Callable[..., Any],
    repack_fn: Callable[..., Any],
    variables: Any,
    keys: Any,
    carry: Any,
    *shared: Any,
) -> Any:
    """Runs the stack with the variables and keys of its scopes, as `lift.pack` hands them over."""
    length, is_split = options["length"], tuple(options["split_rngs"].values())

    def split(key: jax.Array) -> jax.Array:
        return jax.random.split(jax.random.clone(key), length)

    split_keys = [lift.tree_map_rngs(split, k) for k, s in zip(keys, is_split, strict=True) if s]
    same_keys = [k for k, s in zip(keys, is_split, strict=True) if not s]
    params = meta.remove_axis(variables, 0, options["metadata_params"])
    leaves, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_box)
    shards = [x.value if is_box(x) else x for _, x in leaves]
    gathers = [_gather_of(name, path, x) for path, x in leaves]
    flat_keys, keys_tree = jax.tree.flatten(split_keys)
    flat_shared, shared_tree = jax.tree.flatten((same_keys, shared))
    carry_tree: Any = jax.tree.structure(carry)
    y_tree: Any = None
    counters: dict[int, dict[Any, int]] = {}

    def layer(weights: Any, keys: Any, carry: Any, shared: Any) -> Any:
        nonlocal y_tree
        same, arguments = jax.tree.unflatten(shared_tree, shared)
        groups = {True: iter(jax.tree.unflatten(keys_tree, keys)), False: iter(same)}
        scopes = scope_fn(
            jax.tree.unflatten(structure, weights), tuple(next(groups[s]) for s in is_split)
        )
        for scope in jax.tree.leaves(scopes):
            # It draws the same whenever it is traced, and others the next time it is called.
            first = counters.setdefault(id(scope.rng_counters), dict(scope.rng_counters))
            scope.rng_counters.clear()
            scope.rng_counters.update(first)
        new, y = fn(scopes, jax.tree.unflatten(carry_tree, carry), *arguments)
        repack_fn(scopes)
        if jax.tree.structure(new) != carry_tree:
            raise ValueError(
                f"prefetched_scan: the block returns a carry {jax.tree.structure(new)}, expected "
                f"one like its argument, {carry_tree}."
            )
        y, y_tree = jax.tree.flatten(y)
        return jax.tree.leaves(new), y

    if policy is None:
        boxed = [(gather, x) for gather, (_, x) in zip(gathers, leaves, strict=True) if _gathers(x)]
        policy = drop_gathered(
            frozenset(jax.eval_shape(gather, x.value[0]).size for gather, x in boxed)
        )
    # Inside of a loop nothing can be merged across iterations.
    layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    stack = DoubleBuffer(layer, gathers, length, options["unroll"], scatter_late)
    carry, ys = stack(shards, flat_keys, jax.tree.leaves(carry), flat_shared)
    out = jax.tree.unflatten(carry_tree, carry), jax.tree.unflatten(y_tree, ys)
    return out, tuple(tuple({} for _ in group) for group in variables)


def _gathers(x: Any) -> bool:
    """Whether a leaf of the parameters is a box that would gather now."""
    axes = (*x.gather_axes, *x.storage_axes) if isinstance(x, ShardedParameter) else ()
    return any(map(is_axis_bound, axes))


def _gather_of(name: str | None, path: Any, x: Any) -> Callable[[jax.Array], jax.Array]:
    """What gathers a layer's parameter of this path in the stack of this name from its shard."""
    # The path begins with the numbers of group and scope and the collection.
    names = [str(getattr(key, "key", key)) for key in path[3:-1]]
    module = "/".join([*([name] if name else []), *names])

    def gather(shard: jax.Array) -> jax.Array:
        with jax.named_scope(module) if module else contextlib.nullcontext():
            whole: jax.Array = x.replace_boxed(shard).unbox() if is_box(x) else shard
            return whole

    return gather
