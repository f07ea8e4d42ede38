"""Context parallelism: the positions of each sequence are split over devices.

A sequence is cut into `2 C` half-blocks. Each of the `C` devices along the context axis has two of
them: device `c` has half-blocks `c` and `2 C - 1 - c` (zig-zag). So under a causal mask all devices
have equal work.
Code that treats each position separately needs no change. Attention and sums along the sequence
have to use the methods of `Context`.

Outside of a `shard_map` that binds the axis, these methods compute as on one device. Inside, they
compute in the named scope of context parallelism. The check of a model trusts this scope, see
`manualpar.checks.context_check`.

Symbols: `C` devices along the axis, `B` examples, `S` positions of a device, `N` query heads, `K`
key and value heads, `H` features of a head.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from manualpar.core.mesh.axes import is_axis_bound
from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.tracing.scopes import CONTEXT_SCOPE
from manualpar.layers.attention.blockwise_attention import (
    ATTENDED,
    Keys,
    Pairs,
    Queries,
    Scoring,
    Seen,
    Sums,
    attend,
    attend_backward,
    block_size,
    cut_keys,
    cut_queries,
    gradient_of_sinks,
    join_heads,
    no_sums,
    seen_of,
    seen_pairs,
    spans,
)
from manualpar.layers.attention.causal_attention import AttentionKind, attention, check_attention
from manualpar.layers.attention.chunked_attention import attend_from_half_blocks
from manualpar.layers.attention.splash_attention import (
    attend_part,
    attend_part_backward,
    fits_parts,
)
from manualpar.layers.boundaries import bound_axes, has_lost_types, platform_traced_for
from manualpar.layers.model_fields import FieldGroup, flat_field, refuse_unknown
from manualpar.layers.ring import shift

# How attention combines queries with the keys of other devices.
ContextAttention = Literal["auto", "ring", "ulysses", "gather"]
CONTEXT_ATTENTIONS: tuple[ContextAttention, ...] = get_args(ContextAttention)


def _in_scope(method: Any) -> Any:
    @functools.wraps(method)
    def call(context: "Context", *args: Any, **kwargs: Any) -> Any:
        with context.scope():
            return method(context, *args, **kwargs)

    return call


@dataclasses.dataclass(frozen=True, repr=False)
class Context(FieldGroup):
    """How sequences are sharded along a mesh axis, and attention across it.

    Attributes:
      axis: The mesh axis; `None` for none. If the mesh lacks the axis, sequences are not split.
      how: The communication of attention: `"ring"` sends keys and values around a ring while each
        device computes, `"ulysses"` gives each device all positions of some heads, `"gather"`
        gives it all keys and values, and `"auto"` takes `"ulysses"` on GPUs if the devices divide
        the heads, because GPUs have a kernel for complete sequences, and `"ring"` otherwise. With
        `"ring"` memory does not grow with the length of the sequence. `"ulysses"` is by Jacobs et
        al., https://arxiv.org/abs/2309.14509.
    """

    axis: str | None = flat_field(None, "context_axis")
    how: ContextAttention = flat_field("auto", "context_attention")

    def __post_init__(self) -> None:
        refuse_unknown(self, "how", CONTEXT_ATTENTIONS)

    @property
    def size(self) -> int:
        """The number of devices along the axis, `C`; 1 if the axis is not bound."""
        axes = bound_axes("Context", self.axis)
        return jax.lax.axis_size(axes) if axes else 1

    def on_platform(
        self, platform: str | None, devices: int, num_heads: int, num_groups: int
    ) -> "Context":
        """Returns the context with the communication that `"auto"` stands for.

        Args:
          platform: JAX's name of the platform, such as `"gpu"`.
          devices: The number of devices along the axis.
          num_heads: A device's query heads before they are exchanged, `N`.
          num_groups: Likewise of key heads, `K`.
        """
        if self.how != "auto":
            return self
        is_divided = _divides_heads(devices, num_heads, num_groups)
        how: ContextAttention = "ulysses" if platform == "gpu" and is_divided else "ring"
        return dataclasses.replace(self, how=how)

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Returns the named scope of context parallelism, if the axis is bound.

        Checks trust the code in this scope, because its author handles the axis.
        """
        if self.axis is not None and is_axis_bound(self.axis):
            return jax.named_scope(CONTEXT_SCOPE)
        return contextlib.nullcontext()

    def check_split(self, x: jax.Array) -> None:
        """Refuses a sequence that is not split over the axis, if the axis is bound.

        Call it at the beginning of a model, because `nn.scan` may trace the loop over layers
        without the varying axes of types.

        Args:
          x: This device's part of sequences, `[B, S/axis, ...]`.

        Raises:
          ValueError: By its type, `x` is the same on all devices along the axis; or a device has an
            odd number of positions.
        """
        if self.size == 1:
            return
        axes = (str(self.axis),)
        if not varying_axes(x) & set(axes) and not has_lost_types(x, axes):
            raise ValueError(
                f"Context: x of shape {x.shape} is the same on all devices along {self.axis!r} by "
                "its type, expected this device's part of a sequence. Build the program with "
                f"context_axis={self.axis!r}, or split dim 1 of the batch over the axis."
            )
        self._check_length("check_split", x.shape[1])

    @_in_scope
    def positions(self, length: int) -> jax.Array:
        """Returns the positions that this device has in the sequence.

        Args:
          length: The number of this device's positions, `S`. It must be an even number if the axis
            has several devices.

        Returns:
          `int32[S]`, ascending.

        Raises:
          ValueError: `length` is odd.

        Communication:
          None.
        """
        if self.size == 1:
            return jnp.arange(length, dtype=jnp.int32)
        self._check_length("positions", length)
        return zigzag_positions(jax.lax.axis_index(self.axis), length, self.size)

    @_in_scope
    def cumsum(self, x: jax.Array) -> jax.Array:
        """Sums, for each position, the entries up to this position in the full sequence.

        Args:
          x: `[B, S/axis, ...]`, numbers or booleans.

        Returns:
          The inclusive sums along dim 1, of the shape of `x`.

        Raises:
          ValueError: A device has an odd number of positions.

        Communication:
          One all-gather of two sums for each column of `x`.
        """
        if self.size == 1:
            return self._sum_up_global(x)
        self._check_length("cumsum", x.shape[1])
        halves = jnp.stack(jnp.split(x, 2, axis=1))
        of_devices = self._gather(halves.sum(2))  # [C, 2, B, ...]
        # The sums before each half-block, in the order of the sequence; 0 before the first.
        sums = jnp.concatenate([of_devices[:, 0], of_devices[::-1, 1]])
        before = jnp.cumsum(jnp.concatenate([jnp.zeros_like(sums[:1]), sums[:-1]]), axis=0)
        low = jax.lax.axis_index(self.axis)
        before_halves = jnp.stack([before[low], before[2 * self.size - 1 - low]])
        first, second = jnp.cumsum(halves, axis=2) + before_halves[:, :, None]
        return jnp.concatenate([first, second], axis=1)

    def total(self, x: jax.Array) -> jax.Array:
        """Sums `x` over the devices along the axis.

        Args:
          x: This device's part of the sum, such as the sum over its positions.

        Returns:
          The sum, the same on all devices along the axis.

        Communication:
          One all-reduce of `x`; backward none.
        """
        if self.size == 1:
            return x
        with jax.named_scope(CONTEXT_SCOPE):
            return jax.lax.psum(x, self.axis)

    @_in_scope
    def attention(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        documents: jax.Array | None = None,
        *,
        kind: AttentionKind = "",
        window: int | None = None,
        soft_cap: float | None = None,
        chunk: int | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Attends causally within documents.

        Args:
          query: `[B, S/axis, N, H]`.
          key: `[B, S/axis, K, H]`. `K` divides `N`, and groups of query heads share a key head.
          value: `[B, S/axis, K, H]`, of the dtype of `key`.
          documents: `int32[B, S/axis]`, the document number of each position. A query sees only
            keys with the query's number. `None` if each sequence is one document.
          kind: The implementation, see `manualpar.layers.attention.attention`. `"ring"` and
            `"gather"` compute in blocks; on TPUs JAX's kernel computes the blocks of a ring if the
            kernel supports these blocks.
          window: How many positions a query sees, including the query's position; `None` for all.
          soft_cap: Bounds scores; `None` for none. This argument and the next two are those of
            `manualpar.layers.attention.attention`.
          chunk: The length of the chunks; `None` for none.
          sinks: `float32[N]`, the sinks; `None` for none.

        Returns:
          `[B, S/axis, N, H]`.

        Raises:
          ValueError: A device has an odd number of positions, or the number of devices does not
            divide the number of heads.

        Communication:
          `n = B S K H` is the number of elements of a device's keys. `"ring"`: see
          `ring_attention`. `"gather"`: an all-gather of keys and an all-gather of values, in each
          of which a device sends `(C - 1) n` elements, and two reduce-scatters backward.
          `"ulysses"`: four all-to-alls forward (queries, keys, values and the result) and four
          backward. In each a device sends `(C - 1) / C` of the elements of its array. If there are
          fewer key heads than devices, a device sends a key head several times. Documents cost an
          all-gather of `int32[B, S]`.

        Gradient:
          Written by hand for `"ring"`, see `ring_attention`.
        """
        scoring = Scoring(window, soft_cap, chunk)
        attend = functools.partial(attention, kind=kind, **scoring._asdict())
        if self.size == 1:
            return self._attend_to_global(attend, query, key, value, documents, sinks)
        self._check_length("attention", query.shape[1])
        check_attention(query, key, value, documents, scoring)
        heads = query.shape[2], key.shape[2]
        how = self.on_platform(platform_traced_for(), self.size, *heads).how
        if how == "ulysses":
            return self._exchange_heads(attend, query, key, value, documents, sinks)
        if kind not in ("", "blockwise"):
            raise ValueError(
                f"Context: kind (a model's field attention) is {kind!r}, expected '' or "
                f"'blockwise' with how={how!r}, because 'ring' and 'gather' always compute in "
                "blocks; or choose how='ulysses'."
            )
        if how == "gather":
            return self._gather_keys(query, key, value, documents, scoring, sinks)
        of_all = None if documents is None else self._gather(documents)
        by_kernel = not kind and fits_parts(query, key, query.shape[1] // 2, scoring)
        by: Any = {"by_kernel": by_kernel and sinks is None, "sinks": sinks}
        return ring_attention(query, key, value, of_all, str(self.axis), scoring, **by)

    def _sum_up_global(self, x: jax.Array) -> jax.Array:
        """Computes a cumulative sum along dim 1 of an array that its type may shard there."""
        spec = jax.typeof(x).sharding.spec
        if spec[1] is None:
            return jnp.cumsum(x, axis=1)
        x = jax.sharding.reshard(x, PartitionSpec(spec[0], None, *spec[2:]))
        return jax.sharding.reshard(jnp.cumsum(x, axis=1), spec)

    def _attend_to_global(
        self,
        attend: Callable[..., jax.Array],
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        documents: jax.Array | None,
        sinks: jax.Array | None,
    ) -> jax.Array:
        """Attends on arrays with full sequences.

        In modes `auto` and `explicit` these sequences may be sharded along the axis, and no kind of
        attention runs on sharded sequences: cuDNN's kernel refuses them, and in mode `explicit` the
        axis would be merged with the examples' axes. So each device along the axis computes some of
        the heads, or all heads if the axis does not divide the number of key heads.
        """
        mesh = jax.sharding.get_abstract_mesh()
        axis = self.axis
        if axis not in {*mesh.auto_axes, *mesh.explicit_axes} or mesh.shape[axis] == 1:
            return attend(query, key, value, documents, sinks=sinks)
        free: Any = PartitionSpec.UNCONSTRAINED
        constrain: Any = jax.lax.with_sharding_constraint
        by_positions = PartitionSpec(free, axis, free, free)
        if axis in mesh.explicit_axes:
            constrain = jax.sharding.reshard
            by_positions = jax.typeof(query).sharding.spec
        examples = by_positions[0]
        heads = None if key.shape[2] % mesh.shape[axis] else axis
        by_heads = PartitionSpec(examples, None, heads, None)
        query, key, value = (constrain(x, by_heads) for x in (query, key, value))
        if documents is not None:
            documents = constrain(documents, PartitionSpec(examples, None))
        if sinks is not None:
            sinks = constrain(sinks, PartitionSpec(heads))
        return constrain(attend(query, key, value, documents, sinks=sinks), by_positions)

    def _exchange_heads(
        self,
        attend: Callable[..., jax.Array],
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        documents: jax.Array | None,
        sinks: jax.Array | None,
    ) -> jax.Array:
        size, num_heads, num_groups = self.size, query.shape[2], key.shape[2]
        repeats = max(1, size // num_groups)
        if not _divides_heads(size, num_heads, num_groups):
            raise ValueError(
                f"Context: {num_heads} query heads and {num_groups} key heads do not divide over "
                f"the {size} devices along {self.axis!r}; expected multiples of {size}, or for key "
                f"heads a divisor of {size}. Choose other numbers of heads, or how='ring'."
            )
        key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
        query, key, value = (
            _reordered(self._exchange(x, 2, 1), np.argsort(self._half_blocks()))
            for x in (query, key, value)
        )
        if sinks is not None:
            start, count = jax.lax.axis_index(self.axis) * query.shape[2], query.shape[2]
            sinks = jax.lax.dynamic_slice_in_dim(sinks, start, count)
        out = attend(query, key, value, self._gather_in_order(documents), sinks=sinks)
        return self._exchange(_reordered(out, self._half_blocks()), 1, 2)

    def _gather_keys(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        documents: jax.Array | None,
        scoring: Scoring,
        sinks: jax.Array | None,
    ) -> jax.Array:
        key, value, of_keys = map(self._gather_in_order, (key, value, documents))
        positions, axis = self.positions(query.shape[1]), str(self.axis)
        return attend_from_half_blocks(
            query, key, value, positions, (documents, of_keys), axis, scoring, sinks
        )

    def _gather_in_order(self, x: Any) -> Any:
        """Gathers full sequences `[B, C S, ...]`, with positions in order; keeps `None`."""
        if x is None:
            return None
        whole = jnp.concatenate(self._gather(x), axis=1)
        return _reordered(whole, np.argsort(self._half_blocks()))

    def _gather(self, x: jax.Array) -> jax.Array:
        """Gathers `x` from all devices, `[C, ...]`."""
        with jax.named_scope(CONTEXT_SCOPE):
            return jax.lax.all_gather(x, self.axis)

    def _exchange(self, x: jax.Array, split_dim: int, concat_dim: int) -> jax.Array:
        with jax.named_scope(CONTEXT_SCOPE):
            return jax.lax.all_to_all(x, self.axis, split_dim, concat_dim, tiled=True)

    def _half_blocks(self) -> np.ndarray:
        """Returns the numbers of the half-blocks, `[2 C]`: two for each device, in their order."""
        devices = np.arange(self.size)
        return np.stack([devices, 2 * self.size - 1 - devices], axis=1).ravel()

    def _check_length(self, function: str, length: int) -> None:
        if length % 2:
            raise ValueError(
                f"Context.{function}: a device has {length} positions, expected an even number, "
                f"because it holds two half-blocks of the sequence. Make the sequence a multiple "
                f"of {2 * self.size}, two times the devices along {self.axis!r}."
            )


def _divides_heads(devices: int, num_heads: int, num_groups: int) -> bool:
    """Returns whether each device can attend with equally many heads; key heads may be repeated."""
    repeats = max(1, devices // num_groups)
    return num_heads % devices == 0 and num_groups * repeats % devices == 0


def _reordered(x: jax.Array, blocks: np.ndarray) -> jax.Array:
    """Puts the half-blocks of a sequence into another order."""
    halves = x.reshape(x.shape[0], len(blocks), -1, *x.shape[2:])
    return halves[:, blocks].reshape(x.shape)


# -------------------------------------------------------------------------------------------------
# Causal attention over a sequence that is split over devices: keys and values go around a ring.
#
# Each device computes with the keys and values that it has while it sends them to the next device
# (Liu et al., https://arxiv.org/abs/2310.01889). The `2 C` half-blocks of the sequence are in zig-
# zag: device `c` has half-blocks `c` and `2 C - 1 - c`, an early and a late one. This device's
# queries see these keys of another device:
#
# - the late queries see the early keys;
# - if the other device has a smaller number, the early queries see the early keys too; otherwise
#   the late queries see the late keys.
#
# So in each step after the first, every device computes attention for two pairs of half-blocks.
# That is half the work of all queries with all keys. `jnp.where` chooses the half-blocks, because
# devices that wait for each other in a permute may not be in different branches of a `cond`.
#
# Symbols: `C` devices along the axis, `B` examples, `S` positions of a device, `N` query heads,
# `K` key and value heads, `G` query heads that share a key head, `H` features of a head.


Tree = TypeVar("Tree")


def zigzag_positions(device: jax.Array | int, length: int, devices: int) -> jax.Array:
    """Returns the positions that `device` has in the sequence, `int32[length]`."""
    half = jnp.arange(length // 2, dtype=jnp.int32)
    blocks = (device, 2 * devices - 1 - device)
    return jnp.concatenate([block * (length // 2) + half for block in blocks])


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    axis: str,
    scoring: Scoring,
    *,
    by_kernel: bool = False,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attends causally within documents.

    Args:
      query: `[B, S, N, H]`, at this device's positions.
      key: `[B, S, K, H]`, where `K` divides `N`.
      value: `[B, S, K, H]`, of the dtype of `key`.
      documents: `int32[C, B, S]`, the documents of the positions of every device; `None` if each
        sequence is one document.
      axis: The mesh axis over which the sequence is split in zig-zag. `S` is even.
      scoring: Which keys a query sees, and the cap of scores. Keys that no query sees are sent too.
      by_kernel: Whether JAX's kernel for TPUs computes the half-blocks, see `splash_ring`.
      sinks: `float32[N]`, see `manualpar.layers.attention.attention`; `None` for none.

    Returns:
      `[B, S, N, H]`, of the dtype of `value`.

    Communication:
      Forward `C - 1` permutes of keys and values together, `2 B S K H` elements in their dtype.
      Backward the same permutes, and `C` permutes of the gradients of keys and values in float32.

    Gradient:
      Written by hand: it computes the scores again, from the arguments and the result. The result
      has the checkpoint name `ATTENDED`. With a policy that saves the name, the forward pass is not
      run again in the backward pass.
    """
    arrays = (query, key, value, sinks, documents)
    return _ring(
        *cast_to_varying(arrays, varying_axes(arrays) | {axis}), _Rule(axis, scoring, by_kernel)
    )


class _Rule(NamedTuple):
    """The static arguments of the ring; `ring_attention` describes them."""

    axis: str
    scoring: Scoring
    by_kernel: bool


class _Here:
    """This device's blocks of queries, and the computations with the keys of any device."""

    def __init__(
        self,
        query: jax.Array,
        key: jax.Array,
        documents: jax.Array | None,
        rule: _Rule,
    ) -> None:
        axis, self.scoring, self.by_kernel = rule
        self.axis, self.documents = axis, documents
        self.length, self.num_groups = query.shape[1], key.shape[2]
        half = self.length // 2
        self.size = half if self.by_kernel else block_size(half)
        blocks = spans(half, self.size)
        self.pairs = seen_pairs(blocks + half, blocks)  # All pairs of blocks of two half-blocks.
        self.causal_pairs = seen_pairs(blocks, blocks)
        self.device = jax.lax.axis_index(axis)
        self.queries = _halves(
            cut_queries(
                query,
                *self._labels(self.device),
                num_groups=self.num_groups,
                size=self.size,
                parts=2,
            )
        )

    def keys(self, pair: jax.Array, step: Any) -> tuple[tuple[Keys, Keys], jax.Array]:
        """Returns a step's early and late keys, and whether the keys' device has a lower number."""
        device = (self.device - step) % jax.lax.axis_size(self.axis)
        keys = cut_keys(pair[0], pair[1], *self._labels(device), size=self.size, parts=2)
        return _halves(keys), device < self.device

    def add(self, sums: Sums, queries: Queries, keys: Keys, pairs: Pairs) -> Sums:
        """Adds, for each pair of blocks, the pair's keys to the sums of the pair's queries."""
        if self.by_kernel:
            is_causal = pairs is self.causal_pairs
            return attend_part(sums, queries, keys, self.scoring, is_causal=is_causal)
        return attend(sums, queries, keys, pairs, self.scoring)

    def differentiate(self, queries: Queries, seen: Seen, keys: Keys, pairs: Pairs) -> Any:
        """Computes the terms of `pairs` in the gradients of queries, and of keys and values."""
        if self.by_kernel:
            is_causal = pairs is self.causal_pairs
            of_query, *of_pair = attend_part_backward(
                queries, seen, keys, self.scoring, is_causal=is_causal
            )
        else:
            of_query, *of_pair = attend_backward(queries, seen, keys, pairs, self.scoring)
        return of_query, jnp.stack(of_pair, 1)

    def _labels(self, device: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        positions = zigzag_positions(device, self.length, jax.lax.axis_size(self.axis))
        if self.documents is None:
            return positions, None
        return positions, jax.lax.dynamic_index_in_dim(self.documents, device, keepdims=False)

    def join(self, blocks: jax.Array) -> jax.Array:
        """Joins this device's blocks `[n, B, K, G, S, H]` to `[B, S, N, H]`."""
        return join_heads(blocks, self.length, parts=2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _ring(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    documents: jax.Array | None,
    rule: _Rule,
) -> jax.Array:
    return _forward(query, key, value, sinks, documents, rule)[0]


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    documents: jax.Array | None,
    rule: _Rule,
) -> tuple[jax.Array, jax.Array]:
    """Returns the result, and the log of each query's sum of weights, `float32[n, B, K, G, S]`."""
    axis, here = rule.axis, _Here(query, key, documents, rule)
    early, late = here.queries

    def step(sums: tuple[Sums, Sums], pair: jax.Array, index: Any) -> tuple[Sums, Sums]:
        of_early, of_late = sums
        keys, is_before = here.keys(pair, index)
        of_late = here.add(of_late, late, keys[0], here.pairs)
        chosen = _pick(is_before, of_early, of_late)
        queries, chosen_keys = _pick(is_before, early, late), _pick(is_before, *keys)
        chosen = here.add(chosen, queries, chosen_keys, here.pairs)
        return _pick(is_before, chosen, of_early), _pick(is_before, of_late, chosen)

    pair = jnp.stack([key, value])
    first_keys, _ = here.keys(pair, 0)
    of_early = here.add(no_sums(early, sinks), early, first_keys[0], here.causal_pairs)
    of_late = here.add(no_sums(late, sinks), late, first_keys[0], here.pairs)
    of_late = here.add(of_late, late, first_keys[1], here.causal_pairs)
    of_early, of_late = _go_around(step, (of_early, of_late), pair, axis)
    sums: Sums = jax.tree.map(_join, of_early, of_late)
    out = here.join(sums.values / sums.weights[..., None]).astype(value.dtype)
    return out, sums.largest + jnp.log(sums.weights)


def _ring_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    documents: jax.Array | None,
    rule: _Rule,
) -> tuple[jax.Array, Any]:
    found = _forward(query, key, value, sinks, documents, rule)
    out, log_weights = checkpoint_name(found, ATTENDED)
    return out, (query, key, value, sinks, documents, out, log_weights)


def _ring_backward(rule: _Rule, residuals: Any, g: jax.Array) -> tuple[Any, Any, Any, Any, None]:
    query, key, value, sinks, documents, out, log_weights = residuals
    axis, here = rule.axis, _Here(query, key, documents, rule)
    early, late = here.queries
    of_out = {"num_groups": here.num_groups, "size": here.size, "parts": 2}
    of_all = seen_of(log_weights, out, g, **of_out)
    seen = _halves(of_all)

    def join_pair(early: jax.Array, late: jax.Array) -> jax.Array:
        """Joins two half-blocks' gradients `[n, 2, B, K, S, H]` to the shape that is sent."""
        blocks = _join(early, late)[:, :, :, :, None]
        return jnp.stack([here.join(blocks[:, 0]), here.join(blocks[:, 1])])

    def step(grads: Any, pair: jax.Array, index: Any) -> Any:
        of_query, of_pair = grads
        of_pair = _shift(of_pair, axis)  # Each gradient ends on the keys' device.
        keys, is_before = here.keys(pair, index)
        of_late, of_early_pair = here.differentiate(late, seen[1], keys[0], here.pairs)
        queries, chosen_seen = _pick(is_before, early, late), _pick(is_before, *seen)
        chosen_keys = _pick(is_before, *keys)
        of_chosen, of_chosen_pair = here.differentiate(
            queries, chosen_seen, chosen_keys, here.pairs
        )
        of_query += _join(_pick(is_before, of_chosen, 0), of_late + _pick(is_before, 0, of_chosen))
        first = of_early_pair + _pick(is_before, of_chosen_pair, 0)
        return of_query, of_pair + join_pair(first, _pick(is_before, 0, of_chosen_pair))

    pair = jnp.stack([key, value])
    first_keys, _ = here.keys(pair, 0)
    of_early, of_early_pair = here.differentiate(early, seen[0], first_keys[0], here.causal_pairs)
    of_late, of_same_pair = here.differentiate(late, seen[1], first_keys[0], here.pairs)
    of_late_too, of_late_pair = here.differentiate(late, seen[1], first_keys[1], here.causal_pairs)
    of_query = _join(of_early, of_late + of_late_too)
    of_pair = join_pair(of_early_pair + of_same_pair, of_late_pair)
    of_query, of_pair = _go_around(step, (of_query, of_pair), pair, axis)
    of_key, of_value = _shift(of_pair, axis)
    of_query = here.join(of_query).astype(query.dtype)
    of_sinks = None if sinks is None else gradient_of_sinks(of_all, sinks)
    return of_query, of_key.astype(key.dtype), of_value.astype(value.dtype), of_sinks, None


_ring.defvjp(_ring_forward, _ring_backward)


def _go_around(
    step: Callable[[Tree, jax.Array, Any], Tree], carry: Tree, pair: jax.Array, axis: str
) -> Tree:
    """Runs `step(carry, pair, index)` on the keys and values of each other device.

    A device sends the pair before it computes with it, so that sending and computing overlap.
    """
    size = jax.lax.axis_size(axis)
    pair = _shift(pair, axis)

    def hand_on(state: tuple[Tree, jax.Array], index: jax.Array) -> Any:
        carry, pair = state
        following = _shift(pair, axis)
        return (step(carry, pair, index), following), None

    if size > 2:
        (carry, pair), _ = jax.lax.scan(hand_on, (carry, pair), jnp.arange(1, size - 1))
    return step(carry, pair, size - 1)


def _shift(x: jax.Array, axis: str) -> jax.Array:
    return shift(x, (axis,), 1, scope=CONTEXT_SCOPE)


def _halves(tree: Tree) -> tuple[Tree, Tree]:
    """Splits this device's blocks into its early and its late half-block."""

    def half(which: int) -> Tree:
        return jax.tree.map(lambda x: jnp.split(x, 2)[which], tree)

    return half(0), half(1)


def _join(early: jax.Array, late: jax.Array) -> jax.Array:
    return jnp.concatenate([early, late])


def _pick(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(functools.partial(jnp.where, condition), yes, no)
