"""Attention on NVIDIA GPUs by a kernel of this package, which knows documents and soft caps.

cuDNN's kernel, as JAX calls it, needs an array `[B, 1, S, S]` for documents, and has no soft cap.
This kernel stores nothing of this size. It is FlashAttention-2 (Dao,
https://arxiv.org/abs/2307.08691) in Pallas, which Triton compiles. A program of the forward pass
has a tile of queries, and goes through tiles of keys. It computes only the tiles in which, by their
positions and documents, a query may see a key. It masks only those in which a query does not see
all keys. So documents that follow each other make attention cheaper than a causal mask does.

The backward pass computes the scores again, in two kernels: one gives a program a tile of keys, and
the other one a tile of queries. No two programs write the same place, so the gradients are the same
in each run.

JAX 0.12 announces that a later version will have no Triton. Then `triton_misfit` says so, and the
choice of the kind (`manualpar.layers.attention.causal_attention`) takes cuDNN or blocks in plain
JAX as before.

Symbols: `B` examples, `S` positions, `N` query heads, `K` key and value heads, `G` query heads that
share a key head, `H` features of a head.
"""

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from manualpar.layers.attention.blockwise_attention import ATTENDED, MASKED
from manualpar.layers.attention.splash_attention import run_on_each_device

LOG2E = math.log2(math.e)
# Compute capability -> the most features of a head. These are the GPUs whose cores have the shared
# memory that the tiles need: A100, H100 and H200, B200, B300. The tensor memory of the last two
# holds no gradients of keys and values with 256 features.
MOST_FEATURES = {"8.0": 256, "9.0": 256, "10.0": 128, "10.3": 128}
LENGTH = 128  # Lengths are padded to a multiple of this number, a multiple of all tiles.


class Tiles(NamedTuple):
    """The sizes of a kernel's tiles, and how it runs.

    Attributes:
      queries, keys: The positions of a tile.
      warps: The groups of 32 threads that share a tile.
      stages: The number of tiles that are being loaded or used at a time.
    """

    queries: int
    keys: int
    warps: int
    stages: int


class Kernels(NamedTuple):
    """The tiles of the forward kernel and of the two backward kernels."""

    forward: Tiles
    of_keys: Tiles
    of_queries: Tiles


NARROW = Kernels(Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 2), Tiles(128, 64, 8, 2))
WIDE = Kernels(Tiles(128, 32, 8, 2), Tiles(32, 64, 8, 1), Tiles(64, 32, 4, 2))
MOST_NARROW = 128  # The most features of a head for which the tiles are `NARROW`.


class _Options(NamedTuple):
    window: int | None
    soft_cap: float | None
    interpret: bool


def triton_misfit(
    compute_capability: str, query: jax.Array | jax.ShapeDtypeStruct, key: Any
) -> str | None:
    """Returns why the kernel cannot run on these arrays on a GPU, or `None`."""
    if compute_capability not in MOST_FEATURES:
        return (
            f"the compute capability of the GPU is {compute_capability!r}, not one of "
            f"{', '.join(MOST_FEATURES)}"
        )
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return f"JAX {jax.__version__} has no Triton any more"
    dtypes = sorted({str(query.dtype), str(key.dtype)})
    if dtypes not in (["bfloat16"], ["float16"]):
        return f"the dtype is {' and '.join(dtypes)}, not bfloat16 or float16"
    if query.shape[-1] > (most := MOST_FEATURES[compute_capability]):
        return f"head_size is {query.shape[-1]}, more than {most}"
    return None


def triton_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None = None,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attends causally within documents.

    Lengths that are no multiple of `LENGTH` are padded after all queries, where no query sees the
    padding. Features are padded to a power of 2.

    Args:
      query: `[B, S, N, H]`, in 16 bits.
      key: `[B, S, K, H]`, of the dtype of `query`. `K` divides `N`.
      value: `[B, S, K, H]`, of the dtype of `query`.
      documents: `int32[B, S]`, the document number of each position, in any order. Documents that
        follow each other take least time. `None` if each sequence is one document.
      window: How many positions a query sees, including the query's position; `None` for all.
      soft_cap: Bounds scores: a score becomes `soft_cap * tanh(score / soft_cap)`; `None` for no
        bound.
      sinks: `float32[N]`, see `manualpar.layers.attention.attention`; `None` for none.
      interpret: Whether to run the kernel step by step in plain JAX, on any device.

    Returns:
      `[B, S, N, H]`, of the dtype of `query`.

    Communication:
      None, see `manualpar.layers.attention.splash_attention.run_on_each_device`.

    Gradient:
      The result and the logarithms of the sums of weights have the checkpoint name `ATTENDED`. With
      a policy that saves the name, the forward kernel does not run again.
    """
    options = _Options(window, soft_cap, interpret)

    def attend(query: Any, key: Any, value: Any, *rest: Any) -> jax.Array:
        given = iter(rest)
        own_documents = None if documents is None else next(given)
        own_sinks = None if sinks is None else next(given)
        return _attend_padded(query, key, value, own_documents, own_sinks, options)

    return run_on_each_device(attend, query, key, value, documents, sinks)


def _attend_padded(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    sinks: jax.Array | None,
    options: _Options,
) -> jax.Array:
    length, size = query.shape[1], query.shape[-1]
    longer, wider = -length % LENGTH, _power_of_2(size) - size

    def padded(x: jax.Array) -> jax.Array:
        features = ((0, 0), (0, wider)) if x.ndim == 4 else ()
        return jnp.pad(x, ((0, 0), (0, longer), *features)) if longer or wider else x

    query, key, value = (padded(x) for x in (query, key, value))
    documents = None if documents is None else padded(documents)
    out: jax.Array = _attend(query, key, value, documents, sinks, size**-0.5, options)
    return out[:, :length, :, :size]


def _power_of_2(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    sinks: jax.Array | None,
    scale: float,
    options: _Options,
) -> jax.Array:
    return _forward(query, key, value, documents, sinks, scale, options)[0]


def _attend_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    sinks: jax.Array | None,
    scale: float,
    options: _Options,
) -> tuple[jax.Array, Any]:
    found = _forward(query, key, value, documents, sinks, scale, options)
    out, log_weights = checkpoint_name(found, ATTENDED)
    return out, (query, key, value, documents, sinks, out, log_weights)


def _attend_backward(scale: float, options: _Options, residuals: Any, g: jax.Array) -> Any:
    query, key, value, documents, sinks, out, log_weights = residuals
    products = product_with_gradient(out, g)
    known = (g, log_weights, products)
    grads = _backward(query, key, value, documents, known, scale, options)
    of_sinks = None if sinks is None else gradient_of_sinks(sinks, log_weights, products)
    return *grads, None, of_sinks


_attend.defvjp(_attend_forward, _attend_backward)


# -------------------------------------------------------------------------------------------------
# Sinks, for any kernel that returns the logarithms of the sums of weights.
#
# A sink is a key whose value is 0. It only adds to the sum of weights. So the result of a kernel
# without sinks is multiplied by the share of the other keys. The kernel's backward pass weighs keys
# by the logarithm of the sum, and subtracts the product of the result and its gradient. With the
# sink in both arrays, it computes the gradients that the sink leaves.


def add_sinks(
    out: jax.Array, log_weights: jax.Array, sinks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Adds the sink of each head to a kernel's result.

    Args:
      out: `[B, S, N, H]`.
      log_weights: `float32[B, N, S]`, the logarithm of each query's sum of weights.
      sinks: `float32[N]`.

    Returns:
      The result, and the logarithms.
    """
    added = jnp.logaddexp(log_weights, sinks[None, :, None].astype(jnp.float32))
    share = jnp.exp(log_weights - added).swapaxes(1, 2)
    return (out * share[..., None]).astype(out.dtype), added


def product_with_gradient(out: jax.Array, g: jax.Array) -> jax.Array:
    """Returns the inner products of results and their gradients, `float32[B, N, S]`."""
    return (out.astype(jnp.float32) * g.astype(jnp.float32)).sum(-1).swapaxes(1, 2)


def gradient_of_sinks(sinks: jax.Array, log_weights: jax.Array, products: jax.Array) -> jax.Array:
    """Computes the gradient of the sinks, `float32[N]`, from arrays `[B, N, S]`."""
    return -(jnp.exp(sinks[None, :, None] - log_weights) * products).sum((0, 2))


# -------------------------------------------------------------------------------------------------
# Which tiles a kernel computes.


class Spans(NamedTuple):
    """For each tile on one side, the tiles on the other side, each `int32[B or 1, n]`.

    The tiles from `start` to `stop` are computed. Those from `full_start` to `full_stop` need no
    mask, because each query sees all keys.
    """

    start: jax.Array
    full_start: jax.Array
    full_stop: jax.Array
    stop: jax.Array


def pairs_of_tiles(
    length: int, tiles: Tiles, window: int | None, documents: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns in which pairs of tiles a query may see a key, and in which each sees all keys.

    Both arrays are `bool[B or 1, tiles of queries, tiles of keys]`. The lowest and the highest
    document numbers of tiles decide, so documents may be in any order.
    """
    first_query = jnp.arange(0, length, tiles.queries)[:, None]
    first_key = jnp.arange(0, length, tiles.keys)[None]
    last_query, last_key = first_query + tiles.queries - 1, first_key + tiles.keys - 1
    some, every = first_key <= last_query, last_key <= first_query
    if window is not None:
        some &= first_query - last_key < window
        every &= last_query - first_key < window
    some, every = some[None], every[None]
    if documents is None:
        return some, every

    def ends(size: int) -> tuple[jax.Array, jax.Array]:
        of_tiles = documents.reshape(documents.shape[0], -1, size)
        return of_tiles.min(-1), of_tiles.max(-1)

    low_query, high_query = (x[:, :, None] for x in ends(tiles.queries))
    low_key, high_key = (x[:, None] for x in ends(tiles.keys))
    some &= (low_query <= high_key) & (low_key <= high_query)
    every &= (low_query == high_key) & (low_key == high_query)
    return some, every


def spans_of_queries(some: jax.Array, every: jax.Array) -> Spans:
    """Returns the tiles of keys of each tile of queries; full tiles are the last ones that are."""
    tile = jnp.arange(some.shape[-1])[None, None]
    stop = jnp.where(some, tile + 1, 0).max(-1)
    start = jnp.minimum(jnp.where(some, tile, some.shape[-1]).min(-1), stop)
    full_stop = jnp.maximum(jnp.where(every, tile + 1, 0).max(-1), start)
    partial = jnp.where(~every & (tile < full_stop[..., None]), tile + 1, 0).max(-1)
    full_start = jnp.clip(partial, start, full_stop)
    return Spans(start, full_start, full_stop, stop)


def spans_of_keys(some: jax.Array, every: jax.Array) -> Spans:
    """Returns the tiles of queries of each tile of keys; full tiles are the first ones that are."""
    some, every = (jnp.flip(x.swapaxes(1, 2), -1) for x in (some, every))
    flipped = spans_of_queries(some, every)
    return Spans(*(some.shape[-1] - x for x in reversed(flipped)))


def _run_spans(spans_ref: Any, add: Callable[..., Any], carry: Any) -> Any:
    """Runs `add(tile, carry, is_masked)` for all tiles of a span."""
    start, full_start, full_stop, stop = (spans_ref[i] for i in range(4))
    for first, last, is_masked in (
        (start, full_start, True),
        (full_start, full_stop, False),
        (full_stop, stop, True),
    ):
        carry = jax.lax.fori_loop(first, last, functools.partial(add, is_masked=is_masked), carry)
    return carry


# -------------------------------------------------------------------------------------------------
# The kernels. Scores are logarithms to base 2, because GPUs compute powers of 2.


def _dot(x: jax.Array, y: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    numbers = (((contracted[0],), (contracted[1],)), ((), ()))
    out: jax.Array = jax.lax.dot_general(x, y, numbers, preferred_element_type=jnp.float32)
    return out


def _cap(
    products: jax.Array, scale: float, soft_cap: float | None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the scores of products, and the derivative of the soft cap."""
    if soft_cap is None:
        return products * (scale * LOG2E), None
    # XLA's tanh would be a long polynomial here.
    capped = 1 - 2 / (1 + jnp.exp2(products * (2 * LOG2E * scale / soft_cap)))
    return capped * (soft_cap * LOG2E), 1 - capped * capped


def _is_seen(
    queries: jax.Array, keys: jax.Array, window: int | None, documents: Sequence[jax.Array]
) -> jax.Array:
    """Returns which keys are seen; positions and documents are shaped so that they broadcast."""
    is_seen = queries >= keys
    if window is not None:
        is_seen &= queries - keys < window
    return is_seen & (documents[0] == documents[1]) if documents else is_seen


def _forward_kernel(
    spans_ref: Any,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    *refs: Any,
    tiles: Tiles,
    scale: float,
    options: _Options,
) -> None:
    *documents_ref, out_ref, log_ref = refs
    at, query = _place(documents_ref, tiles.queries, is_last_first=True), query_ref[...]

    def add(tile: Any, carry: Any, *, is_masked: bool) -> Any:
        values, weight, largest = carry
        there = _slice(tile, tiles.keys)
        scores, _ = _cap(_dot(query, key_ref[there, :], (1, 1)), scale, options.soft_cap)
        if is_masked:
            scores = jnp.where(_mask(at, tile, tiles.keys, options), scores, MASKED)
        # If the query has seen no key so far, its sums are meaningless. They are multiplied by 0
        # as soon as it sees a key; each query sees itself.
        new_largest = jnp.maximum(largest, scores.max(1))
        weights, fading = jnp.exp2(scores - new_largest[:, None]), jnp.exp2(largest - new_largest)
        new = _dot(weights.astype(value_ref.dtype), value_ref[there, :], (1, 0))
        return values * fading[:, None] + new, weight * fading + weights.sum(1), new_largest

    zeros = jnp.zeros((tiles.queries,), jnp.float32)
    none = jnp.zeros(query.shape, jnp.float32), zeros, zeros + MASKED
    values, weight, largest = _run_spans(spans_ref, add, none)
    out_ref[...] = (values / weight[:, None]).astype(out_ref.dtype)
    log_ref[...] = largest / LOG2E + jnp.log(weight)


def _of_queries_kernel(
    spans_ref: Any,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    *refs: Any,
    tiles: Tiles,
    scale: float,
    options: _Options,
) -> None:
    """Computes the gradient of a tile of queries."""
    *documents_ref, g_ref, log_ref, products_ref, out_ref = refs
    at = _place(documents_ref, tiles.queries, is_last_first=True)
    query, g = query_ref[...], g_ref[...]
    log_weights, products = log_ref[...][:, None] * LOG2E, products_ref[...][:, None]

    def add(tile: Any, total: jax.Array, *, is_masked: bool) -> jax.Array:
        there = _slice(tile, tiles.keys)
        key = key_ref[there, :]
        scores, slope = _cap(_dot(query, key, (1, 1)), scale, options.soft_cap)
        weights = jnp.exp2(scores - log_weights)
        if is_masked:
            weights = jnp.where(_mask(at, tile, tiles.keys, options), weights, 0.0)
        of_scores = weights * (_dot(g, value_ref[there, :], (1, 1)) - products)
        of_scores = of_scores if slope is None else of_scores * slope
        return total + _dot(of_scores.astype(key.dtype), key, (1, 0))

    total = _run_spans(spans_ref, add, jnp.zeros(query.shape, jnp.float32))
    out_ref[...] = (total * scale).astype(out_ref.dtype)


def _of_keys_kernel(
    spans_ref: Any,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    *refs: Any,
    tiles: Tiles,
    scale: float,
    options: _Options,
) -> None:
    """Computes the gradients of a tile of keys and values; the first dim of scores is keys."""
    *documents_ref, g_ref, log_ref, products_ref, key_out_ref, value_out_ref = refs
    at, key, value = _place(documents_ref, tiles.keys), key_ref[...], value_ref[...]

    def add(tile: Any, totals: Any, head: Any, *, is_masked: bool) -> Any:
        of_key, of_value = totals
        there = _slice(tile, tiles.queries)
        query, g = query_ref[there, head, :], g_ref[there, head, :]
        scores, slope = _cap(_dot(key, query, (1, 1)), scale, options.soft_cap)
        weights = jnp.exp2(scores - log_ref[head, there][None] * LOG2E)
        if is_masked:
            is_seen = _mask(at, tile, tiles.queries, options, are_keys_first=True)
            weights = jnp.where(is_seen, weights, 0.0)
        of_value += _dot(weights.astype(g.dtype), g, (1, 0))
        of_scores = weights * (_dot(value, g, (1, 1)) - products_ref[head, there][None])
        of_scores = of_scores if slope is None else of_scores * slope
        return of_key + _dot(of_scores.astype(query.dtype), query, (1, 0)), of_value

    def add_head(head: Any, totals: Any) -> Any:
        return _run_spans(spans_ref, functools.partial(add, head=head), totals)

    totals = (jnp.zeros(key.shape, jnp.float32),) * 2
    of_key, of_value = jax.lax.fori_loop(0, query_ref.shape[1], add_head, totals)
    key_out_ref[...] = (of_key * scale).astype(key_out_ref.dtype)
    value_out_ref[...] = of_value.astype(value_out_ref.dtype)


class _Place(NamedTuple):
    """The positions of a program's own tile, and their documents if there are any."""

    positions: jax.Array
    documents_ref: Sequence[Any]
    documents: Sequence[jax.Array]


def _place(documents_ref: Sequence[Any], size: int, *, is_last_first: bool = False) -> _Place:
    from jax.experimental import pallas as pl

    tile = pl.program_id(0)
    tile = pl.num_programs(0) - 1 - tile if is_last_first else tile
    documents = [ref[_slice(tile, size)] for ref in documents_ref]
    return _Place(tile * size + jnp.arange(size), documents_ref, documents)


def _slice(tile: Any, size: int) -> Any:
    from jax.experimental import pallas as pl

    return pl.ds(tile * size, size)


def _mask(
    at: _Place, tile: Any, size: int, options: _Options, *, are_keys_first: bool = False
) -> jax.Array:
    """Returns which keys are seen, of the program's own tile and another one `[own, other]`."""
    own, other = at.positions[:, None], (tile * size + jnp.arange(size))[None]
    documents = [
        x
        for own, ref in zip(at.documents, at.documents_ref, strict=True)
        for x in (own[:, None], ref[_slice(tile, size)][None])
    ]
    queries, keys = (other, own) if are_keys_first else (own, other)
    return _is_seen(queries, keys, options.window, documents)


# -------------------------------------------------------------------------------------------------
# Calls of the kernels.


def _kernels(size: int) -> Kernels:
    return NARROW if size <= MOST_NARROW else WIDE


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    sinks: jax.Array | None,
    scale: float,
    options: _Options,
) -> tuple[jax.Array, jax.Array]:
    """Returns the result, and the log of each query's sum of weights, `float32[B, N, S]`."""
    B, S, N, _ = query.shape
    log_weights = jax.ShapeDtypeStruct((B, N, S), jnp.float32)
    run = functools.partial(_run, documents=documents, scale=scale, options=options)
    tiles = _kernels(query.shape[-1]).forward
    out, log_weights = run(_forward_kernel, (query, key, value), (query, log_weights), tiles, 2)
    return (out, log_weights) if sinks is None else add_sinks(out, log_weights, sinks)


def _backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    known: tuple[jax.Array, jax.Array, jax.Array],
    scale: float,
    options: _Options,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of query, key and value.

    `known` is the gradient of the result, the logarithms, and the products with the gradient.
    """
    kernels, arrays = _kernels(query.shape[-1]), (query, key, value, *known)
    run = functools.partial(_run, documents=documents, scale=scale, options=options)
    (of_query,) = run(_of_queries_kernel, arrays, (query,), kernels.of_queries, 2)
    of_key, of_value = run(_of_keys_kernel, arrays, (key, value), kernels.of_keys, 3)
    return of_query, of_key, of_value


def _run(
    kernel: Callable[..., None],
    arrays: Sequence[jax.Array],
    outputs: Sequence[Any],
    tiles: Tiles,
    products: int,
    *,
    documents: jax.Array | None,
    scale: float,
    options: _Options,
) -> Any:
    """Runs a kernel.

    Args:
      arrays: Query, key, value; the backward kernels also have the gradient of the result, the
        logarithms of the sums of weights, and the products of the result and its gradient.
      products: How many products of the size of scores count. The scores and the gradients of
        weights that both backward kernels compute count once, as in kernels that compute both
        gradients.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (B, S, N, H), K = arrays[0].shape, arrays[1].shape[2]
    is_by_keys, G = kernel is _of_keys_kernel, N // K
    size, heads = (tiles.keys, K) if is_by_keys else (tiles.queries, N)
    count = S // size
    spans_of = spans_of_keys if is_by_keys else spans_of_queries
    spans = jnp.stack(spans_of(*pairs_of_tiles(S, tiles, options.window, documents)), -1)

    def tile_of(i: Any) -> Any:
        # The last queries see most keys, and the first keys are seen by most queries. Programs
        # start in this order, so that the last programs to run are short.
        return i if is_by_keys else count - 1 - i

    own = pl.BlockSpec((None, size, None, H), lambda i, n, b: (b, tile_of(i), n, 0))
    if is_by_keys:
        queries = pl.BlockSpec((None, S, G, H), lambda i, n, b: (b, 0, n, 0))
        rows, keys = pl.BlockSpec((None, G, S), lambda i, n, b: (b, n, 0)), own
        results = (own, own)
    else:
        queries, keys = own, pl.BlockSpec((None, S, None, H), lambda i, n, b: (b, 0, n // G, 0))
        rows = pl.BlockSpec((None, None, size), lambda i, n, b: (b, n, tile_of(i)))
        results = (own, rows)
    of_spans = pl.BlockSpec(
        (None, None, 4), lambda i, n, b: (0 if spans.shape[0] == 1 else b, tile_of(i), 0)
    )
    of_documents = pl.BlockSpec((None, S), lambda i, n, b: (b, 0))
    known = (queries, rows, rows)[: len(arrays) - 3]
    pairs = S * S // 2 if options.window is None else min(S * S // 2, S * options.window)
    call = pl.pallas_call(
        functools.partial(kernel, tiles=tiles, scale=scale, options=options),
        grid=(count, heads, B),
        in_specs=[of_spans, queries, keys, keys]
        + [of_documents] * (documents is not None)
        + list(known),
        out_specs=results[: len(outputs)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        cost_estimate=pl.CostEstimate(
            flops=products * 2 * B * N * H * pairs,
            transcendentals=B * N * pairs,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*arrays, *outputs)),
        ),
        interpret=options.interpret,
        name=kernel.__name__.strip("_"),
    )
    given = () if documents is None else (documents,)
    return call(spans, *arrays[:3], *given, *arrays[3:])
