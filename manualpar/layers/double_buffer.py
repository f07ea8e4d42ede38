"""The loops of `prefetched_scan`: over lists of arrays, with a gradient that is written by hand.

Forward, iteration `i` of the loop computes layer `i` with weights that it was handed, and gathers
those of layer `i + 1` for the next one, on which nothing else in it depends. Backward the same in
the other direction, with the scatter of layer `i`'s gradients besides.

Autodiff would keep what a loop hands on for each of its iterations: every layer's gathered weights.
So the forward loop keeps of each layer the arrays that `jax.vjp` of that layer returns a function
of, but for those that are known to be its weights, its keys, or what all layers share; the backward
loop puts these back in. Weights are known by being the very objects: what is made of them must not
be kept, which is for the policy of a `jax.checkpoint` around the layer to see to.

Symbols: `L` layers; `shards` is what a device holds of all layers' parameters, `[L, ...]` each.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial

from manualpar.core.collectives import cast_to_varying, varying_axes

Arrays = list[Any]
# How the profile, and the ledger, tell what is gathered again: as what a `jax.checkpoint` computes
# again.
REGATHERED_SCOPE = "rematted_computation"


class _Kept(NamedTuple):
    """Where the arrays are that a layer's gradient is a function of, and the function's structure.

    Attributes:
      places: For each array what it is, `"weights"`, `"keys"`, `"shared"` or `"kept"`, and its
        index among those.
      structure: The tree of the function, with these arrays for leaves.
    """

    places: tuple[tuple[str, int], ...]
    structure: Any

    def indices(self, name: str) -> tuple[int, ...]:
        """Which arrays of this name are among them, each once."""
        return tuple(sorted({index for place, index in self.places if place == name}))


class _Differentiated(NamedTuple):
    """Which leaves of the arguments have a gradient."""

    shards: tuple[bool, ...]
    carry: tuple[bool, ...]
    shared: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class DoubleBuffer:
    """A stack of layers whose weights are gathered one layer ahead.

    Attributes:
      layer: `layer(weights, keys, carry, shared) -> (carry, y)`, of lists of arrays: one layer's
        gathered weights and keys, what is handed from layer to layer, and what all layers share.
      gathers: For each weight what gathers a layer's `[...]` shard: a function that is linear, and
        whose transpose scatters.
      length: Layers, `L`.
      unroll: Layers in one iteration of a loop.
      scatter_late: Whether the backward pass scatters a layer's gradients while it computes the
        next one's, for which it holds them that long.
    """

    layer: Callable[[Arrays, Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
    gathers: Sequence[Callable[[jax.Array], jax.Array]]
    length: int
    unroll: int = 1
    scatter_late: bool = False

    def __call__(
        self, shards: Arrays, keys: Arrays, carry: Arrays, shared: Arrays
    ) -> tuple[Arrays, Arrays]:
        """Runs the layers.

        Args:
          shards: Each parameter of all layers as a device holds it, `[L, ...]`.
          keys: Keys for random numbers of all layers, `[L, ...]`.
          carry: What the first layer is handed.
          shared: What every layer is given; keys too, with arrays.

        Returns:
          What the last layer hands on, and what each layer returns besides, `[L, ...]`.
        """
        run = jax.custom_vjp(self._run)
        run.defvjp(self._forward, lambda backward, out: backward(*out), symbolic_zeros=True)
        out: tuple[Arrays, Arrays] = run(shards, keys, carry, shared)
        return out

    def _run(self, shards: Arrays, keys: Arrays, carry: Arrays, shared: Arrays) -> Any:
        """Without a gradient: every layer gathers its own, and none is gathered twice."""

        def iteration(carry: Arrays, i: jax.Array) -> Any:
            return self.layer(self._gather(shards, i), _at(keys, i), carry, shared)

        return jax.lax.scan(iteration, carry, jnp.arange(self.length), unroll=self.unroll)

    def _forward(self, *args: Any) -> Any:
        """The results, and the backward pass as a function of the results' gradients."""
        shards, keys, carry, shared = (
            [x.value for x in arg]  # What has no gradient by its dtype is boxed likewise.
            for arg in args
        )
        wanted = _Differentiated(
            tuple(x.perturbed and _is_float(x.value) for x in args[0]),
            tuple(_is_float(x) for x in carry),
            tuple(x.perturbed and _is_float(x.value) for x in args[3]),
        )
        found: dict[str, Any] = {}

        first, scatters = [], []
        for gather, shard, is_wanted in zip(self.gathers, shards, wanted.shards, strict=True):
            # It is linear: the transpose of the first layer's gather is that of all.
            weight, scatter = jax.vjp(gather, shard[0]) if is_wanted else (gather(shard[0]), None)
            first.append(weight)
            scatters.append(scatter)

        @_whole
        def loop(carry: Arrays, first: Arrays, shards: Arrays, keys: Arrays, shared: Arrays) -> Any:
            def iteration(state: Any, i: jax.Array) -> Any:
                carry, weights = state
                ahead = self._gather(shards, jnp.minimum(i + 1, self.length - 1))
                arguments = (weights, _at(keys, i), carry, shared)
                carry, y, vjp = self._differentiate(wanted, *arguments)
                leaves, structure = jax.tree.flatten(vjp)
                groups = (*arguments[:2], shared)
                known = {
                    id(x): (name, index)
                    for name, group in zip(("weights", "keys", "shared"), groups, strict=True)
                    for index, x in enumerate(group)
                }
                kept = [x for x in leaves if id(x) not in known]
                order = iter(range(len(kept)))
                places = tuple(known.get(id(x)) or ("kept", next(order)) for x in leaves)
                found["kept"] = _Kept(places, structure)
                return (carry, ahead), (y, kept)

            layers = jnp.arange(self.length)
            return jax.lax.scan(iteration, (carry, first), layers, unroll=self.unroll)

        (carry, weights), (ys, kept) = loop(carry, first, shards, keys, shared)
        needed = found["kept"].indices("weights")
        zeros = tuple(tuple(map(_Zeros.like, group)) for group in (carry, ys))
        plan = _Backward(self, wanted, found["kept"], *zeros)
        last = [weights[j] for j in needed]
        return (carry, ys), Partial(plan, shards, keys, shared, last, kept, scatters)

    def _gather(self, shards: Arrays, i: Any, wanted: Sequence[int] | None = None) -> Arrays:
        """The weights of layer `i`, or those of them that are wanted."""
        indices = range(len(shards)) if wanted is None else wanted
        return [self.gathers[j](_at(shards[j], i)) for j in indices]

    def _differentiate(
        self, wanted: _Differentiated, weights: Arrays, keys: Arrays, carry: Arrays, shared: Arrays
    ) -> tuple[Arrays, Arrays, Callable[..., Any]]:
        """A layer's results, and the function from their gradients to those of its arguments."""

        def layer(*arguments: Arrays) -> Any:
            new = list(map(_merge, (weights, carry, shared), wanted, arguments))
            out = self.layer(new[0], keys, new[1], new[2])
            return tuple(_select(group, [_is_float(x) for x in group]) for group in out), out

        arguments = map(_select, (weights, carry, shared), wanted)
        floats, vjp, out = jax.vjp(layer, *arguments, has_aux=True)
        is_float = [[_is_float(x) for x in group] for group in out]
        carry, y = map(_merge, out, is_float, floats)
        return carry, y, vjp


@dataclasses.dataclass(frozen=True, eq=False)
class _Backward:
    """The backward pass of a stack, with all that is known before there are arrays.

    Attributes:
      stack: The stack.
      wanted: What has a gradient.
      kept: What the gradient of a layer is a function of.
      carry: The gradients of what the last layer hands on, where they are zero.
      ys: Likewise of what all layers return besides.
    """

    stack: DoubleBuffer
    wanted: _Differentiated
    kept: _Kept
    carry: tuple["_Zeros", ...]
    ys: tuple["_Zeros", ...]

    def __call__(
        self,
        shards: Arrays,
        keys: Arrays,
        shared: Arrays,
        weights: Arrays,
        kept: Arrays,
        scatters: Sequence[Any],
        d_carry: Arrays,
        d_ys: Arrays,
    ) -> tuple[Any, Any, Any, Any]:
        """The gradients of the stack's arguments; `None` for those that have none."""
        stack, wanted = self.stack, self.wanted
        needed = self.kept.indices("weights")
        is_late = stack.scatter_late and stack.length > 1
        d_carry = [
            zeros.fill(d) for zeros, d in zip(self.carry, d_carry, strict=True) if zeros.is_float
        ]
        d_ys = [zeros.fill(d) for zeros, d in zip(self.ys, d_ys, strict=True) if zeros.is_float]
        d_shards = [_Zeros.like(x).make() for x in _select(shards, wanted.shards)]
        d_shared = [_Zeros.like(x).make() for x in _select(shared, wanted.shared)]
        scatters = _select(scatters, wanted.shards)

        def layer(i: Any, d_carry: Arrays, d_shared: Arrays, weights: Arrays) -> Any:
            arrays = {
                "weights": dict(zip(needed, weights, strict=True)),
                "keys": _at(keys, i),
                "shared": shared,
                "kept": _at(kept, i),
            }
            leaves = [arrays[name][index] for name, index in self.kept.places]
            vjp = jax.tree.unflatten(self.kept.structure, leaves)
            d_weights, d_carry, d_more = vjp((d_carry, _at(d_ys, i)))
            return d_weights, d_carry, [d + more for d, more in zip(d_shared, d_more, strict=True)]

        def scatter(d_shards: Arrays, i: Any, d_weights: Arrays) -> Arrays:
            d_new = [scatter(d)[0] for scatter, d in zip(scatters, d_weights, strict=True)]
            return [
                jax.lax.dynamic_update_index_in_dim(d, new, i, 0)
                for d, new in zip(d_shards, d_new, strict=True)
            ]

        def iteration(state: Any, i: Any) -> Any:
            d_shards, d_carry, d_shared, weights, pending = state
            with jax.named_scope(REGATHERED_SCOPE):
                ahead = stack._gather(shards, i - 1, needed)
            if pending is not None:
                d_shards = scatter(d_shards, i + 1, pending)
            d_weights, d_carry, d_shared = layer(i, d_carry, d_shared, weights)
            if is_late:
                return (d_shards, d_carry, d_shared, ahead, d_weights), None
            return (scatter(d_shards, i, d_weights), d_carry, d_shared, ahead, None), None

        state: Any = (d_shards, d_carry, d_shared, weights, None)
        last = stack.length - 1
        if is_late:  # Of the last layer nothing is pending yet.
            state, _ = iteration(state, last)
            last -= 1
        state, _ = jax.lax.scan(iteration, state, jnp.arange(last, 0, -1), unroll=stack.unroll)
        d_shards, d_carry, d_shared, weights, pending = state
        if pending is not None:
            d_shards = scatter(d_shards, 1, pending)
        # The first layer has none before it.
        d_weights, d_carry, d_shared = layer(0, d_carry, d_shared, weights)
        d_shards = scatter(d_shards, 0, d_weights)
        nothing = [None] * len(keys)
        groups = ((d_shards, wanted.shards), (d_carry, wanted.carry), (d_shared, wanted.shared))
        shards, carry, shared = (_merge([None] * len(w), w, d) for d, w in groups)
        return shards, nothing, carry, shared


class _Zeros(NamedTuple):
    """An array of zeros that is yet to be made.

    Attributes:
      shape: Its shape.
      dtype: Its dtype.
      varying: The mesh axes over which it varies by its type.
    """

    shape: tuple[int, ...]
    dtype: Any
    varying: frozenset[str]

    @classmethod
    def like(cls, x: Any) -> "_Zeros":
        """Zeros of the type of an array."""
        return cls(x.shape, x.dtype, varying_axes(x))

    @property
    def is_float(self) -> bool:
        """Whether it can be a gradient."""
        return jnp.issubdtype(self.dtype, jnp.floating)

    def make(self) -> jax.Array:
        """The zeros."""
        zeros: jax.Array = cast_to_varying(jnp.zeros(self.shape, self.dtype), self.varying)
        return zeros

    def fill(self, d: Any) -> Any:
        """A gradient; the zeros if it is known to be zero."""
        return self.make() if isinstance(d, SymbolicZero) else d


def _at(arrays: Any, i: Any) -> Any:
    """Layer `i` of stacked arrays."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), arrays)


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function one whole to the `jax.checkpoint` around it: all it returns may be kept.

    A checkpoint (that of `regather_for_backward` is one) takes a loop apart otherwise, and makes
    another of it that copies what is kept of each iteration, gathered weights too if they are
    handed on. What has a rule of its own for `jax.vmap` is not taken apart; the rule is the usual.
    """
    call = jax.custom_batching.custom_vmap(function)

    @call.def_vmap
    def batch(size: int, is_batched: Any, *args: Any) -> Any:
        in_axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(is_batched))
        out = jax.vmap(function, in_axes, axis_size=size)(*args)
        return out, jax.tree.map(lambda _: True, out)

    run: Callable[..., Any] = call
    return run


def _is_float(x: Any) -> bool:
    """Whether an array can have a gradient."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def _select(arrays: Sequence[Any], wanted: Sequence[bool]) -> Arrays:
    """Those of the arrays that are wanted."""
    return [x for x, is_wanted in zip(arrays, wanted, strict=True) if is_wanted]


def _merge(arrays: Sequence[Any], wanted: Sequence[bool], new: Sequence[Any]) -> Arrays:
    """The arrays with others for those that are wanted: undoes `_select`."""
    rest = iter(new)
    return [next(rest) if is_wanted else x for x, is_wanted in zip(arrays, wanted, strict=True)]
