"""Chooses the experts that compute each token, and balances the experts' load.

A router gives every token a score for each expert. The token goes to the `top_k` experts with the
highest scores. The scores of these experts, then called gates, are the weights in the sum of the
experts' outputs. The experts may form groups. A token then chooses a few groups, and only experts
in these groups, so that it is sent to few devices (DeepSeek-V2, https://arxiv.org/abs/2405.04434,
section 2.2.2). The capacity of an expert limits the tokens that the expert takes from each sequence
(Lepikhin et al., https://arxiv.org/abs/2006.16668). If an expert is full, further choices of this
expert are dropped.

Three things balance the load:

- a loss that rises if the load is unequal (Fedus et al., https://arxiv.org/abs/2101.03961),
- a bias that is added to the scores for the choice of experts, but not to the gates; the bias of an
  expert with too few tokens rises, without any gradient (Wang et al.,
  https://arxiv.org/abs/2408.15664),
- and a loss that keeps the logits small (Zoph et al., https://arxiv.org/abs/2202.08906).

Invariants: capacity, order of choices and losses are separate for each sequence. So they do not
depend on how sequences are divided among devices and minibatches, or on how the positions of a
sequence are divided (`Context`). Routing is computed in float32.

Symbols: `B` sequences, `S` positions, `E` experts, `K` choices of a token, `C` the capacity.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.state.metrics import Metrics
from manualpar.core.tracing.scopes import CONTEXT_SCOPE, EXPERT_SCOPE
from manualpar.layers.attention.context import Context

__all__ = [
    "BIAS",
    "COUNTS",
    "LOSSES",
    "Gates",
    "GroupScore",
    "auxiliary_loss",
]

# The collections of `MoE` for its losses, its counts and its balancing bias.
LOSSES, COUNTS, BIAS = "losses", "intermediates", "router"
LOAD_BALANCE, ROUTER_Z, CHOICES, DROPPED = "load_balance", "router_z", "choices", "dropped"

Gates = Literal["softmax", "sigmoid"]
GroupScore = Literal["best_two", "best"]
WHOLE_SEQUENCES = Context(None)


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
      chosen: `int32[B, S, K]`, the experts that a token has chosen, the best first; `E` if the
        token is masked.
      gates: `float32[B, S, K]`, the weights of these experts; 0 if the token is masked.
      scores: `float32[B, S, E]`, the scores of all experts.
    """

    chosen: jax.Array
    gates: jax.Array
    scores: jax.Array


def route(
    logits_BSE: jax.Array,
    *,
    top_k: int,
    gates: Gates = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    bias_E: jax.Array | None = None,
    groups: int = 1,
    groups_per_token: int = 1,
    group_score: GroupScore = "best_two",
    mask_BS: jax.Array | None = None,
) -> Routing:
    """Chooses the experts of each token.

    Args:
      logits_BSE: `float32[B, S, E]`, the logits of the router.
      top_k: The number of experts of a token, `K`.
      gates: How logits become scores: `"softmax"` over the experts, or `"sigmoid"` of each logit.
      normalize: Whether the gates of a token are divided by their sum; only with `top_k > 1`.
      bias_E: `float32[E]`, added to the scores only for the choice of experts; `None` for no bias.
      groups: The number of groups into which neighbouring experts are divided; 1 for no groups.
      groups_per_token: The number of groups that a token may use; groups with the highest scores
        win.
      group_score: The score of a group: the sum of its two best experts' scores (`"best_two"`), or
        its best expert's score (`"best"`). In both cases the bias is added to the experts' scores.
      mask_BS: `bool[B, S]`, which tokens are routed; `None` for all tokens.

    Returns:
      The choices. With `top_k > 1` and `normalize` the gates of a token sum to `scale`. A single
      gate is not normalized, because a gate that is always 1 would teach the router nothing.

    Communication:
      None.
    """
    num_experts = logits_BSE.shape[-1]
    score_BSE = jax.nn.softmax(logits_BSE) if gates == "softmax" else jax.nn.sigmoid(logits_BSE)
    preference_BSE = jax.lax.stop_gradient(score_BSE)
    if bias_E is not None:
        preference_BSE += bias_E[None, None]
    if groups > 1:
        best = 2 if group_score == "best_two" else 1
        preference_BSE = _within_groups(preference_BSE, groups, groups_per_token, best)
    _, chosen_BSK = jax.lax.top_k(preference_BSE, top_k)
    gate_BSK = jnp.take_along_axis(score_BSE, chosen_BSK, axis=-1)
    if top_k > 1 and normalize:
        gate_BSK /= gate_BSK.sum(-1, keepdims=True)
    if scale != 1:
        gate_BSK *= scale
    if mask_BS is not None:
        chosen_BSK = jnp.where(mask_BS[..., None], chosen_BSK, num_experts)
        gate_BSK = jnp.where(mask_BS[..., None], gate_BSK, 0)
    return Routing(chosen_BSK, gate_BSK, score_BSE)


def places(
    chosen_BSK: jax.Array, num_experts: int, context: Context = WHOLE_SEQUENCES
) -> jax.Array:
    """Computes the place of each choice in its expert's queue, `int32[B, S, K]`, from 0.

    Each sequence has separate queues. All first choices come before all second choices, so that a
    full expert drops second choices first. All first choices are in the order of their positions,
    and so are all second choices.

    Communication:
      With a context axis, an all-gather of `[2, B, K, E]` counts and an all-reduce of `[B, K, E]`
      counts.
    """
    is_chosen_BSKE = jax.nn.one_hot(chosen_BSK, num_experts, dtype=jnp.int32)
    count_BKE = context.total(is_chosen_BSKE.sum(1))
    before_BKE = jnp.cumsum(count_BKE, axis=1) - count_BKE
    place_BSKE = context.cumsum(is_chosen_BSKE) - 1 + before_BKE[:, None]
    return (place_BSKE * is_chosen_BSKE).sum(-1)


def choices_per_expert(chosen_BSK: jax.Array, num_experts: int) -> jax.Array:
    """Counts the tokens of each sequence that chose each expert, `int32[B, E]`."""
    return jax.nn.one_hot(chosen_BSK, num_experts, dtype=jnp.int32).sum((1, 2))


def load_balance_loss(
    routing: Routing, mask_BS: jax.Array | None = None, context: Context = WHOLE_SEQUENCES
) -> jax.Array:
    """Computes the balance loss of each sequence, `float32[B]`.

    It is `E sum_e f_e p_e`, where `f_e` is the share of the choices that fall on expert `e`, and
    `p_e` is the mean of this expert's scores, normalised over the experts. The loss is 1 if all
    experts have the same `f_e` and the same `p_e` (Fedus et al., https://arxiv.org/abs/2101.03961).
    Only the scores have a gradient.

    Communication:
      With a context axis, all-reduces of `[B, E]` choices, `[B, E]` scores and `[B]` token counts.
    """
    score_BSE = routing.scores / routing.scores.sum(-1, keepdims=True)
    num_experts = score_BSE.shape[-1]
    count_BE = context.total(choices_per_expert(routing.chosen, num_experts)).astype(jnp.float32)
    share_BE = count_BE / jnp.maximum(count_BE.sum(-1, keepdims=True), 1)
    return num_experts * (share_BE * _mean_over_tokens(score_BSE, mask_BS, context)).sum(-1)


def router_z_loss(
    logits_BSE: jax.Array, mask_BS: jax.Array | None = None, context: Context = WHOLE_SEQUENCES
) -> jax.Array:
    """Computes the mean square of `logsumexp(logits)` of each sequence, `float32[B]`.

    This loss keeps logits small, because large logits are rounded coarsely (Zoph et al.,
    https://arxiv.org/abs/2202.08906).

    Communication:
      With a context axis, all-reduces of `[B]` sums and `[B]` token counts.
    """
    z_BS = jnp.square(jax.nn.logsumexp(logits_BSE, axis=-1))
    return _mean_over_tokens(z_BS[..., None], mask_BS, context)[..., 0]


def moved_bias(bias_E: jax.Array, count_BE: jax.Array, rate: float) -> jax.Array:
    """Returns the balancing bias after a minibatch.

    The bias of experts with less than the mean load rises by `rate`, and the bias of experts with
    more load falls by `rate` (Wang et al., https://arxiv.org/abs/2408.15664, algorithm 1).

    Args:
      bias_E: `float32[E]`, the same on all devices.
      count_BE: `int32[B, E]`, this device's choices, see `choices_per_expert`.
      rate: The change of the bias in a minibatch, such as 0.001.

    Returns:
      `float32[E]`, the same on all devices.

    Communication:
      One all-reduce of `E` integers, over the axes over which the type of the choices varies.
    """
    count_E = count_BE.sum(0)
    if axes := tuple(sorted(varying_axes(count_E))):
        with jax.named_scope(EXPERT_SCOPE):
            count_E = jax.lax.psum(count_E, axes)
    load_E = count_E.astype(jnp.float32)
    return bias_E + rate * jnp.sign(load_E.mean() - load_E)


def auxiliary_loss(
    sown: Any,
    weight_B: jax.Array | None = None,
    *,
    load_balance: float = 0.01,
    router_z: float = 0.001,
) -> tuple[jax.Array, Metrics]:
    """Computes a loss and metrics from the values that a model's `MoE` layers have sown.

    ```python
    logits, sown = apply_fn(
        {"params": params}, batch.inputs, mutable=["losses", "intermediates"]
    )
    auxiliary, metrics = auxiliary_loss(sown, batch.mask.sum(-1))
    ```

    Args:
      sown: The collections `losses` and, for metrics of the load, `intermediates`. Other values in
        these collections are ignored.
      weight_B: `[B]`, the weight of each sequence in the main loss. If the main loss is a mean over
        valid tokens, the weight is the number of valid tokens of each sequence. With other weights
        the sum of the main and the balance loss would depend on how tokens are divided among
        devices and minibatches. Sequences of weight 0 are not counted in any metric. `None` stands
        for equal weights.
      load_balance: The factor of `load_balance_loss`.
      router_z: The factor of `router_z_loss`.

    Returns:
      The loss and the metrics. The loss is the sum of both losses times their factors, summed over
      the layers and averaged over this device's sequences. Each metric is `(sum, count)`, averaged
      over the layers: `load_balance` and `router_z` without their factors; `dropped`, the share of
      choices that no expert had room for; and `expert_0`, `expert_1`, ..., the share of the choices
      that fall on each expert.

    Raises:
      ValueError: `sown` has no values of a `MoE` layer.

    Communication:
      None, unless the positions of a sequence are split. Then forward an all-reduce of `[B]`
      weights, and backward an all-reduce of `[L, B]` gradients for each of the two losses.
    """
    balance_LB, z_LB = _sown(sown, LOAD_BALANCE, ndim=1), _sown(sown, ROUTER_Z, ndim=1)
    if balance_LB is None or z_LB is None:
        raise ValueError(
            f"auxiliary_loss: sown has no {LOAD_BALANCE!r} of a MoE layer, expected the "
            f"collections that apply_fn returns with mutable=[{LOSSES!r}, {COUNTS!r}]. Layers in "
            "nn.scan sow only into collections that variable_axes names: {'params': 0, "
            f"{LOSSES!r}: 0, {COUNTS!r}: 0}}."
        )
    choices_LBE, dropped_LB = _sown(sown, CHOICES, ndim=2), _sown(sown, DROPPED, ndim=1)
    weight_B = jnp.ones_like(balance_LB[0]) if weight_B is None else weight_B.astype(jnp.float32)
    # Losses belong to complete sequences. If counts vary over more axes than the losses, the counts
    # belong to parts of sequences.
    axes = tuple(sorted(varying_axes((weight_B, choices_LBE)) - varying_axes(balance_LB)))
    whole_weight_B = weight_B
    if axes:
        with jax.named_scope(CONTEXT_SCOPE):
            balance_LB, z_LB = (jax.lax.pcast(x, axes, to="varying") for x in (balance_LB, z_LB))
            weight_B = cast_to_varying(weight_B, axes)
            whole_weight_B = jax.lax.psum(weight_B, axes)
    total = weight_B.sum()
    count = jnp.where(total == 0, 1, total)
    loss_B = (load_balance * balance_LB + router_z * z_LB).sum(0)
    metrics: Metrics = {
        name: ((x_LB.mean(0) * weight_B).sum(), total)
        for name, x_LB in ((LOAD_BALANCE, balance_LB), (ROUTER_Z, z_LB))
    }
    if choices_LBE is not None and dropped_LB is not None:
        counts_B = (whole_weight_B > 0).astype(jnp.float32)
        choices_E = (choices_LBE * counts_B[None, :, None]).sum((0, 1))
        metrics[DROPPED] = ((dropped_LB * counts_B[None]).sum(), choices_E.sum())
        for index in range(len(choices_E)):
            metrics[f"expert_{index}"] = (choices_E[index], choices_E.sum())
    return (loss_B * weight_B).sum() / count, jax.lax.stop_gradient(metrics)


def _sown(sown: Any, name: str, ndim: int) -> jax.Array | None:
    """Stacks the values that layers have sown under a name, `[L, ...]`; `None` without values."""
    found = [
        x.reshape(-1, *x.shape[x.ndim - ndim :])  # A scan adds a dim of layers in front.
        for path, x in jax.tree_util.tree_leaves_with_path(sown)
        if jax.tree_util.DictKey(name) in path
    ]
    return jnp.concatenate(found) if found else None


def _within_groups(score_BSE: jax.Array, groups: int, count: int, best: int) -> jax.Array:
    """Keeps the scores of the `count` best groups, and sets all other scores to -inf.

    Groups are compared by the sums of their `best` best scores.
    """
    B, S, E = score_BSE.shape
    score_BSGE = score_BSE.reshape(B, S, groups, E // groups)
    of_group_BSG = jax.lax.top_k(score_BSGE, best)[0].sum(-1)
    _, chosen_BSN = jax.lax.top_k(of_group_BSG, count)
    is_chosen_BSG = jax.nn.one_hot(chosen_BSN, groups, dtype=jnp.bool_).any(-2)
    return jnp.where(is_chosen_BSG[..., None], score_BSGE, -jnp.inf).reshape(B, S, E)


def _mean_over_tokens(x_BSX: jax.Array, mask_BS: jax.Array | None, context: Context) -> jax.Array:
    """Averages over the valid tokens of each sequence; 0 for a sequence without valid tokens."""
    if mask_BS is None:
        return context.total(x_BSX.sum(1)) / (x_BSX.shape[1] * context.size)
    weight_BS1 = mask_BS[..., None].astype(x_BSX.dtype)
    count_B1 = context.total(weight_BS1.sum(1))
    sum_BX = jnp.where(weight_BS1 == 0, 0, x_BSX * weight_BS1).sum(1)  # Padding may be NaN.
    return context.total(sum_BX) / jnp.maximum(count_B1, 1)
