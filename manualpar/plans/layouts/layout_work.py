"""The products and the memory of a device in a step, by formula, for an untraced layout.

The formula lists the products that a traced program has, forward and backward. Attention is one
fused kernel, which keeps its scores on the chip and computes the half that a causal mask leaves.
`tests/plans/layouts/layout_law_test.py` compares the products with `read_work`.

Memory is the memory at the fullest moment: the state, the activations that layers keep for their
backward pass, and the arrays that the loss or one layer makes in its backward pass. A pipeline of
`P` stages with `v` chunks each keeps the activations of `(v + 1) P - 1` runs of chunks (1F1B), or
the inputs of these chunks and the activations of the chunk that is run again.
"""

import dataclasses
import functools
from collections.abc import Iterator

from manualpar.inspect.flops import Product, TickParts
from manualpar.inspect.layer_formulas import BACKWARD, FORWARD, RECOMPUTED
from manualpar.inspect.memory import Memory
from manualpar.layers.head_loss import FEWEST_COLUMNS, default_chunk
from manualpar.plans.layouts.layout import DeviceSizes, Layout

HALF, SINGLE = 2, 4  # Bytes of an element: bfloat16 (computed and sent) and float32 (stored).
STATE = 2  # The number of Adam's averages of a parameter.
# The loss reads the logits four times: to find the largest logit, the sum, the label's logit, and
# the accuracy.
LOGIT_READS = 4


def layer_products(x: DeviceSizes, layout: Layout) -> Iterator[Product[float]]:
    """Yields a layer's products in the forward pass of a minibatch.

    For each of these products, the backward pass has two. The scope of a product names its part of
    the layer, a key of `Layout.recomputed`, which says how much of the part the backward pass
    computes again. The part "" is never computed again.
    """
    T, D = x.tokens, x.D
    yield Product("norms", 0.0, SINGLE * x.norms * T * D / layout.model)
    query, key = x.N * x.H, x.K * x.H
    yield _product("in", (T, D, query))
    yield _product("in", (T, D, key), 2)
    # The scores, and their product with the values. All keys of a sequence are read.
    keys = x.B * x.positions
    flops = 2 * T * x.seen * query
    yield Product("scores", flops, HALF * 2 * (T * query + keys * key), is_fused=True)
    yield _product("out", (T, query, D))
    if not x.experts_per_device:
        yield _product("mlp", (T, D, x.F), 2)
        # Only a norm after the layer's last product needs the result of this product again.
        yield _product("out" if x.post_norms else "", (T, x.F, D))
        return
    rows = x.R // x.experts_per_device
    # The products of several experts have a batch dimension, and remat `dots` does not keep the
    # results of such products.
    part = "experts" if x.experts_per_device > 1 else "mlp"
    yield _product(part, (rows, D, x.F), 2 * x.experts_per_device)
    yield _product(part, (rows, x.F, D), x.experts_per_device)
    # The weighted sum of the experts' outputs, which is no product of matrices.
    yield Product("experts", 0.0, HALF * x.R * D)
    T //= layout.model  # The router reads the positions that a device has between layers.
    yield Product("mlp", 2 * T * D * x.router, SINGLE * (T * D + T * x.router))


def head_products(
    x: DeviceSizes, layout: Layout
) -> tuple[tuple[Product[float], ...], tuple[Product[float], ...]]:
    """Returns the products of the head, forward and backward; the logits are float32."""
    head = functools.partial(Product, "head")
    tokens, weights, logits = x.tokens * x.D, x.D * x.V, x.tokens * x.V
    flops = 2 * tokens * x.V
    reads = head(0.0, SINGLE * LOGIT_READS * logits)
    if layout.keeps_logits or not is_head_chunked(x):
        forward = (head(flops, HALF * (tokens + weights) + SINGLE * logits), reads)
        return forward, 2 * forward
    # Every chunk of columns reads all tokens, and adds to the gradient of all tokens.
    chunks = -(-x.V // default_chunk(x.tokens))
    logits_again = head(flops, HALF * (chunks * tokens + weights) + SINGLE * logits)
    of_tokens = head(flops, HALF * (logits + weights) + SINGLE * chunks * tokens)
    of_weights = head(flops, HALF * (logits + chunks * tokens) + SINGLE * weights)
    return (logits_again, reads), (logits_again, of_tokens, of_weights)


def is_head_chunked(x: DeviceSizes) -> bool:
    """Returns whether logits are computed in chunks, and again in the backward pass.

    See `manualpar.layers.head_loss.head_cross_entropy`.
    """
    return x.V > FEWEST_COLUMNS


def _product(part: str, sizes: tuple[int, int, int], times: int = 1) -> Product[float]:
    """Returns `times` products of `[m, k]` with `[k, n]` in a part of a layer."""
    m, k, n = sizes
    return Product(part, 2 * m * k * n * times, HALF * times * (m * k + k * n + m * n))


def step_products(
    x: DeviceSizes, layout: Layout, *, ticks: TickParts | None = None, chunk_runs: int = 0
) -> tuple[Product[float], ...]:
    """Returns the products of a step; their scopes say in which pass each of them runs.

    With stages, the scopes also name the part of a tick, from `ticks`, and a stage runs chunks
    `chunk_runs` times. The backward pass of a chunk may first run the chunk's forward pass again.
    The head's forward and backward pass are in the same part of a tick.
    """
    m = layout.num_minibatches
    layers = (chunk_runs or m * layout.chunks) * x.L // layout.chunks
    found = []

    def add(scope: str, product: Product[float], times: float, part: str) -> None:
        if times:
            scope = f"{ticks.scope(part, together=False)}/{scope}" if ticks else scope
            of_all = times * product.flops, times * product.traffic
            found.append(Product(scope, *of_all, "bfloat16", product.is_fused))

    halves = 2 if layout.layer_overlap == "dual_batch" else 1
    of_half = dataclasses.replace(x, B=x.B // halves, R=x.R // halves)
    layers *= halves
    for product in layer_products(of_half, layout):
        again = layout.recomputed.get(product.scope, 0.0) + layout.runs_chunks_again
        add(FORWARD, product, layers, "forward")
        add(RECOMPUTED, product, layers * again, "backward")
        add(BACKWARD, product, 2 * layers, "backward")
    forward, backward = head_products(x, layout)
    for product in forward:
        add(FORWARD, product, m, "after")
    for product in backward:
        add(BACKWARD, product, m, "after")
    return tuple(found)


def state_elements(x: DeviceSizes, layout: Layout) -> float:
    """Counts the parameters that a device stores."""
    shards = layout.data * layout.context
    dense = x.L * x.dense_weights + x.outer_weights
    return dense / (shards * layout.expert) + x.L * x.expert_weights / shards


def activation_slots(layout: Layout) -> int:
    """Counts the runs of chunks whose activations a stage keeps at once, see `make_table`."""
    fewest = (layout.chunks + 1) * layout.stage - 1
    return min(fewest, layout.chunks * layout.num_minibatches)


def kept_for_backward(x: DeviceSizes, layout: Layout) -> int:
    """Counts the bytes that the loops over layers keep for the backward passes of a step."""
    return layout.num_minibatches * x.L * _kept_by_layer(x, layout)


def step_memory_of(x: DeviceSizes, layout: Layout) -> Memory:
    """Computes the bytes that a device holds at the fuller of two moments, by class.

    The moments are the backward pass of the loss, and the backward pass of the first layer.
    """
    stored, layer = state_elements(x, layout), x.dense_weights + x.expert_weights
    all_weights = x.L * layer + x.outer_weights
    layer_input = HALF * x.tokens * x.D // layout.model  # Positions are split over `model`.
    kept = _kept_by_layer(x, layout)
    chunk = x.L // layout.chunks * kept
    activations = chunk
    if layout.runs_chunks_again:
        activations += activation_slots(layout) * layer_input
    elif layout.stage > 1:
        activations *= activation_slots(layout)
    # `summed`: the gradients that are held all the time; `gradients_now`: others at the peak.
    summed = SINGLE * stored if layout.num_minibatches > 1 else 0.0
    gradients_now = SINGLE * layer
    if layout.communicate == "step":
        summed = SINGLE * all_weights if layout.num_minibatches > 1 else 0.0
        # A stage adds the gradients of a chunk to its earlier gradients.
        gradients_now = SINGLE * (x.L // layout.chunks * layer if layout.stage > 1 else all_weights)
    elif layout.communicate == "gather-step":
        gradients_now += HALF * all_weights
    is_gathered_once = layout.communicate != "minibatch"
    logits, head = SINGLE * x.tokens * min(x.V, default_chunk(x.tokens)), x.D * x.V
    # Without chunks of logits, the peak has the logits and their gradient, or the gradients of
    # logits and head. With chunks it has all three arrays.
    of_head = SINGLE * head if is_head_chunked(x) else max(SINGLE * head - logits, 0)
    at_loss = (
        HALF * (all_weights if is_gathered_once else head),
        summed + of_head,
        activations + 2 * logits + 2 * layer_input,
    )
    at_layer = (
        HALF * (all_weights if is_gathered_once else layer),
        summed + gradients_now + SINGLE * stored,
        activations + _made_by_layer(x, layout),
    )
    gathered, gradients, activations = max(at_loss, at_layer, key=sum)
    tokens = layout.num_minibatches * x.tokens
    return Memory(
        parameters=int(SINGLE * stored),
        gradients=int(gradients),
        optimizer=int(STATE * SINGLE * stored),
        gathered=int(gathered),
        activations=int(activations),
        batch=3 * SINGLE * tokens,
        other=0,
    )


def _kept_by_layer(x: DeviceSizes, layout: Layout) -> int:
    """Counts the bytes that a layer keeps for its backward pass."""
    layer_input, again = HALF * x.tokens * x.D // layout.model, layout.recomputed
    sizes = {
        "in": HALF * x.tokens * x.H * (x.N + 2 * x.K),  # query, key, value
        "scores": HALF * x.tokens * x.H * x.N,  # The output of attention.
        # With remat, the result of the output product is kept before the reduce-scatter.
        "out": HALF * x.tokens * x.D if again else layer_input,
        "mlp": 0 if x.experts_per_device else HALF * 2 * x.tokens * x.F,
    }
    if x.experts_per_device == 1:
        sizes["mlp"] = HALF * x.R * (2 * x.F + x.D)
    kept = layer_input + int(sum((1 - again.get(part, 0.0)) * size for part, size in sizes.items()))
    return kept if again else kept + _made_by_layer(x, layout)


def _made_by_layer(x: DeviceSizes, layout: Layout) -> int:
    """Counts the bytes that a layer's backward pass holds in addition to the kept activations."""
    entered = HALF * 2 * x.tokens * x.D  # The gathered inputs of attention and MLP.
    # Rotated queries and keys, and their gradients.
    attention = HALF * x.tokens * x.H * (2 * x.N + 2 * x.K)
    rows = x.R if x.experts_per_device else x.tokens
    mlp = HALF * rows * 4 * x.F + (HALF * 2 * x.R * x.D if x.experts_per_device else 0)
    norms = SINGLE * x.norms * x.tokens * x.D // layout.model
    return entered + attention + mlp + norms
