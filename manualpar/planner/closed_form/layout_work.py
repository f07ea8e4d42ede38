"""What a device computes and holds in a step, in closed form, for a layout that nobody has traced.

The products are those that the traced program has, forward and backward, with attention as one
fused kernel that keeps its scores to itself and computes the half that a causal mask leaves.
`tests/planner_pod_work_test.py` holds them against `read_work`.

Memory is what is held at the fullest moment: the state, what the layers keep for their backward
pass, and what the loss or one layer makes in it. A pipeline of `S` stages with `v` chunks each
keeps that of `(v + 1) S - 1` chunks (1F1B), or their inputs and what one of them makes again.
"""

from collections.abc import Iterator
from typing import NamedTuple

from manualpar.inspect.memory import Memory
from manualpar.layers.head_loss import FEWEST_COLUMNS, default_chunk
from manualpar.planner.closed_form.layout import DeviceSizes, Layout

HALF, SINGLE = 2, 4  # Bytes of an element: computed with and sent in bfloat16; stored in float32.
STATE = 2  # Adam's averages.
# How often the loss reads the logits: for the largest, the sum, the label's and the accuracy.
LOGIT_READS = 4


class Product(NamedTuple):
    """So many alike products of `[m, k]` with `[k, n]`; `flops` are those of all.

    A reduction has none. `traffic` are the bytes that they read and write. `part` is that of the
    layer, by which `Layout.recomputed` says what remat runs again in the backward pass; "" is
    never run again.
    """

    flops: float
    traffic: float
    part: str = ""


def layer_products(x: DeviceSizes, layout: Layout) -> Iterator[Product]:
    """The products of a layer forward, in a minibatch; backward there are two for each."""
    T, D = x.tokens, x.D
    yield Product(0.0, SINGLE * x.norms * T * D / layout.model, "norms")
    query, key = x.N * x.H, x.K * x.H
    yield _product(T, D, query)._replace(part="in")
    yield _product(T, D, key, 2)._replace(part="in")
    # The scores, and their product with the values. All keys of a sequence pass by.
    keys = x.B * x.positions
    flops = 2 * T * x.seen * query
    yield Product(flops, HALF * 2 * (T * query + keys * key), "scores")
    yield _product(T, query, D)._replace(part="out")
    if not x.own_experts:
        yield _product(T, D, x.F, 2)._replace(part="mlp")
        yield _product(T, x.F, D)
        return
    rows = x.R // x.own_experts
    # The products of several experts have a batch dimension, and `dots` does not keep these.
    part = "experts" if x.own_experts > 1 else "mlp"
    yield _product(rows, D, x.F, 2 * x.own_experts)._replace(part=part)
    yield _product(rows, x.F, D, x.own_experts)._replace(part=part)
    # What weighs the outputs of the experts, and the router.
    yield Product(2 * T * D * x.R / max(T, 1), HALF * x.R * D, "experts")
    yield Product(2 * T * D * x.router, SINGLE * (T * D + T * x.router), "mlp")


def head_products(
    x: DeviceSizes, layout: Layout
) -> tuple[tuple[Product, ...], tuple[Product, ...]]:
    """The products of the head, forward and backward; the logits are float32."""
    tokens, weights, logits = x.tokens * x.D, x.D * x.V, x.tokens * x.V
    flops = 2 * tokens * x.V
    reads = Product(0.0, SINGLE * LOGIT_READS * logits)
    if layout.keeps_logits or not is_head_chunked(x):
        once = (Product(flops, HALF * (tokens + weights) + SINGLE * logits), reads)
        return once, 2 * once
    # Every chunk of columns reads all tokens, and adds to the gradient of all.
    chunks = -(-x.V // default_chunk(x.tokens))
    again = Product(flops, HALF * (chunks * tokens + weights) + SINGLE * logits)
    of_tokens = Product(flops, HALF * (logits + weights) + SINGLE * chunks * tokens)
    of_weights = Product(flops, HALF * (logits + chunks * tokens) + SINGLE * weights)
    return (again, reads), (again, of_tokens, of_weights)


def is_head_chunked(x: DeviceSizes) -> bool:
    """Whether logits are computed by chunks, and once more backward; see `head_cross_entropy`."""
    return x.V > FEWEST_COLUMNS


def _product(m: int, k: int, n: int, times: int = 1) -> Product:
    return Product(2 * m * k * n * times, HALF * times * (m * k + k * n + m * n))


def state_elements(x: DeviceSizes, layout: Layout) -> float:
    """Parameters that a device stores."""
    shards = layout.data * layout.context
    dense = x.L * x.dense_weights + x.outer_weights
    return dense / (shards * layout.expert) + x.L * x.expert_weights / shards


def activation_slots(layout: Layout) -> int:
    """Of how many chunks and microbatches a device keeps something at once, see `make_table`."""
    fewest = (layout.chunks + 1) * layout.stage - 1
    return min(fewest, layout.chunks * layout.num_minibatches)


def step_memory_of(x: DeviceSizes, layout: Layout) -> Memory:
    """The bytes that a device holds at the fuller of two moments, by class.

    The moments are the backward pass of the loss, and that of the first layer.
    """
    stored, layer = state_elements(x, layout), x.dense_weights + x.expert_weights
    whole = x.L * layer + x.outer_weights
    between = HALF * x.tokens * x.D // layout.model  # Positions are split over `model`.
    kept = _kept_by_layer(x, layout)
    chunk = x.L // layout.chunks * kept
    activations = chunk
    if layout.runs_chunks_again:
        activations += activation_slots(layout) * between
    elif layout.stage > 1:
        activations *= activation_slots(layout)
    # Gradients that are held all the time, and those of the moment.
    summed = SINGLE * stored if layout.num_minibatches > 1 else 0.0
    made = SINGLE * layer
    if layout.communicate == "step":
        summed = SINGLE * whole if layout.num_minibatches > 1 else 0.0
        # A stage adds the gradients of a chunk to those that it has.
        made = SINGLE * (x.L // layout.chunks * layer if layout.stage > 1 else whole)
    elif layout.communicate == "gather-step":
        made += HALF * whole
    is_held = layout.communicate != "minibatch"
    logits, head = SINGLE * x.tokens * min(x.V, default_chunk(x.tokens)), x.D * x.V
    # Logits and their gradient, or that and the head's; of chunks all three.
    of_head = SINGLE * head if is_head_chunked(x) else max(SINGLE * head - logits, 0)
    at_loss = (
        HALF * (whole if is_held else head),
        summed + of_head,
        activations + 2 * logits + 2 * between,
    )
    at_layer = (
        HALF * (whole if is_held else layer),
        summed + made + SINGLE * stored,
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
    """The bytes that a layer keeps for its backward pass."""
    between, again = HALF * x.tokens * x.D // layout.model, layout.recomputed
    sizes = {
        "in": HALF * x.tokens * x.H * (x.N + 2 * x.K),  # query, key, value
        "scores": HALF * x.tokens * x.H * x.N,  # What attention returns.
        # What a checkpoint keeps is the product's own result, which is not yet scattered.
        "out": HALF * x.tokens * x.D if again else between,
        "mlp": 0 if x.own_experts else HALF * 2 * x.tokens * x.F,
    }
    if x.own_experts == 1:
        sizes["mlp"] = HALF * x.R * (2 * x.F + x.D)
    kept = between + int(sum((1 - again.get(part, 0.0)) * size for part, size in sizes.items()))
    return kept if again else kept + _made_by_layer(x, layout)


def _made_by_layer(x: DeviceSizes, layout: Layout) -> int:
    """The bytes that a layer's backward pass holds besides what was kept."""
    entered = HALF * 2 * x.tokens * x.D  # The inputs of attention and MLP, whole.
    attention = HALF * x.tokens * x.H * (2 * x.N + 2 * x.K)  # Rotated, and their gradients.
    rows = x.R if x.own_experts else x.tokens
    mlp = HALF * rows * 4 * x.F + (HALF * 2 * x.R * x.D if x.own_experts else 0)
    norms = SINGLE * x.norms * x.tokens * x.D // layout.model
    return entered + attention + mlp + norms
