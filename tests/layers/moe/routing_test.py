"""Routers: choices, places, losses and the balancing bias, against loops over tokens."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from manualpar.core.mesh.mesh import make_mesh
from manualpar.core.tracing.scopes import CONTEXT_SCOPE, EXPERT_SCOPE
from manualpar.inspect import trace_collectives
from manualpar.layers import Context
from manualpar.layers.moe.routing import (
    auxiliary_loss,
    choices_per_expert,
    load_balance_loss,
    moved_bias,
    places,
    route,
    router_z_loss,
)

LOGITS = jax.random.normal(jax.random.key(0), (3, 5, 4)) * 2
MASK = jnp.arange(5)[None] < jnp.array([[5], [2], [0]])


@pytest.mark.parametrize(("gates", "top_k"), [("softmax", 2), ("sigmoid", 1)])
def test_a_token_goes_to_the_experts_of_its_highest_scores(gates, top_k):
    routing = route(LOGITS, top_k=top_k, gates=gates, mask_BS=MASK)
    for b, s in np.ndindex(3, 5):
        logits = np.asarray(LOGITS[b, s], np.float64)
        scores = 1 / (1 + np.exp(-logits))
        if gates == "softmax":
            scores = np.exp(logits) / np.exp(logits).sum()
        best = np.argsort(-scores)[:top_k]
        weights = scores[best] / (scores[best].sum() if top_k > 1 else 1)
        is_routed = bool(MASK[b, s])
        np.testing.assert_array_equal(routing.chosen[b, s], best if is_routed else 4)
        np.testing.assert_allclose(routing.gates[b, s], weights * is_routed, rtol=1e-5)
        np.testing.assert_allclose(routing.scores[b, s], scores, rtol=1e-5)


# Routers of DeepSeek-V2, of DeepSeek-V3, and of Qwen-MoE.
OF_FAMILIES = [
    {"normalize": False, "scale": 3.0, "groups": 4, "groups_per_token": 2, "group_score": "best"},
    {"gates": "sigmoid", "scale": 2.5, "groups": 3, "groups_per_token": 2},
    {"normalize": False},
]


@pytest.mark.parametrize("options", OF_FAMILIES)
def test_groups_scales_and_sums_are_those_of_a_loop_over_tokens(options):
    logits = np.asarray(jax.random.normal(jax.random.key(2), (4, 16, 12)) * 2, np.float64)
    bias = np.asarray(jax.random.normal(jax.random.key(3), (12,))) * ("sigmoid" in options.values())
    got = route(jnp.float32(logits), top_k=3, bias_E=jnp.float32(bias), **options)
    groups, best = options.get("groups", 1), 1 if options.get("group_score") == "best" else 2
    in_groups, outside = set(), 0
    for b, s in np.ndindex(4, 16):
        scores = 1 / (1 + np.exp(-logits[b, s]))
        if "gates" not in options:
            scores = np.exp(logits[b, s]) / np.exp(logits[b, s]).sum()
        preferred = (scores + bias).reshape(groups, -1)
        of_groups = np.sort(preferred)[:, -best:].sum(1)
        allowed = np.argsort(-of_groups)[: options.get("groups_per_token", 1)]
        masked = np.full_like(preferred, -np.inf)
        masked[allowed] = preferred[allowed]
        chosen = np.argsort(-masked.reshape(-1))[:3]
        gates = scores[chosen] * options.get("scale", 1)
        if options.get("normalize", True):
            gates /= scores[chosen].sum()
        np.testing.assert_array_equal(got.chosen[b, s], chosen)
        np.testing.assert_allclose(got.gates[b, s], gates, rtol=1e-5)
        in_groups |= {len(set(chosen // (12 // groups)))}
        outside += set(chosen) != set(np.argsort(-preferred.reshape(-1))[:3])
    assert max(in_groups) == options.get("groups_per_token", 1)
    assert bool(outside) == (groups > 1)  # Some of the best experts are in other groups.


def test_a_single_gate_teaches_the_router():
    grad = jax.jit(jax.grad(lambda x: route(x, top_k=1).gates.sum()))(LOGITS)
    assert float(jnp.abs(grad).min()) > 0


def test_a_bias_changes_the_choice_and_no_gate():
    bias = jnp.array([0.0, 10, 0, 0])
    routing = route(LOGITS, top_k=1, gates="sigmoid", bias_E=bias)
    np.testing.assert_array_equal(routing.chosen, 1)
    np.testing.assert_allclose(routing.gates[..., 0], jax.nn.sigmoid(LOGITS[..., 1]))


def test_first_choices_come_before_second_ones():
    chosen = jnp.array([[[0, 1], [1, 0], [0, 1]], [[1, 0], [2, 2], [1, 0]]])
    np.testing.assert_array_equal(
        places(chosen, 2), [[[0, 1], [0, 2], [1, 2]], [[0, 0], [0, 0], [1, 1]]]
    )
    np.testing.assert_array_equal(choices_per_expert(chosen, 2), [[3, 3], [2, 2]])


def test_losses_are_those_of_each_sequence_and_of_its_valid_tokens():
    logits = np.where(MASK[..., None], LOGITS, np.nan)
    routing = route(logits, top_k=2, mask_BS=MASK)
    got = load_balance_loss(routing, MASK), router_z_loss(logits, MASK)
    for b, valid in enumerate((5, 2, 0)):
        balance = z = 0.0
        if valid:
            chosen = np.asarray(routing.chosen[b, :valid])
            share = np.array([(chosen == e).mean() for e in range(4)])
            mean = np.asarray(routing.scores[b, :valid]).mean(0)
            balance = 4 * (share * mean).sum()
            z = (np.log(np.exp(LOGITS[b, :valid]).sum(-1)) ** 2).mean()
        np.testing.assert_allclose([x[b] for x in got], [balance, z], rtol=1e-5)


def test_queues_and_losses_are_those_of_sequences_that_are_split(devices8):
    logits = jax.random.normal(jax.random.key(1), (3, 8, 4)) * 2
    mask = jnp.arange(8)[None] < jnp.array([[8], [3], [0]])

    def run(context, logits, mask):
        routing = route(logits, top_k=2, mask_BS=mask)
        place = places(routing.chosen, 4, context)

        def loss(logits):
            routing = route(logits, top_k=2, mask_BS=mask)
            balance = load_balance_loss(routing, mask, context)
            z = router_z_loss(logits, mask, context) + router_z_loss(logits, context=context)
            return balance + z

        value, pullback = jax.vjp(loss, logits)
        return place * mask[..., None], value, pullback(jnp.arange(1.0, 4))[0]

    # Device 0 has half blocks 0 and 3, device 1 has 1 and 2.
    order = np.array([0, 1, 6, 7, 2, 3, 4, 5])
    split = P(None, "context")
    on_mesh = jax.shard_map(
        functools.partial(run, Context("context")),
        mesh=make_mesh({"context": 2}, devices8[:2]),
        in_specs=split,
        out_specs=(split, P(), split),
        check_vma=True,
    )
    place, value, grad = jax.jit(on_mesh)(logits[:, order], mask[:, order])
    expected = jax.jit(functools.partial(run, Context(None)))(logits, mask)
    np.testing.assert_array_equal(place, expected[0][:, order])
    np.testing.assert_allclose(value, expected[1], rtol=1e-5)
    np.testing.assert_allclose(grad, expected[2][:, order], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("gates", ["softmax", "sigmoid"])
def test_the_balance_loss_is_1_if_the_load_is_equal(gates):
    routing = route(jnp.zeros((1, 4, 4)), top_k=4, gates=gates)
    np.testing.assert_allclose(load_balance_loss(routing), 1, rtol=1e-6)


def test_the_bias_follows_the_load():
    moved = moved_bias(jnp.array([0.5, 0, 0, 0]), jnp.array([[3, 1, 0, 2], [3, 1, 2, 0]]), 0.25)
    np.testing.assert_array_equal(moved, [0.25, 0.25, 0.25, 0.25])
    np.testing.assert_array_equal(moved_bias(jnp.zeros(2), jnp.array([[3, 3]]), 0.1), [0, 0])


def test_the_bias_follows_the_load_of_all_devices_and_sends_once(devices8):
    del devices8
    count = jax.random.randint(jax.random.key(0), (8, 4), 0, 9)
    on_mesh = jax.shard_map(
        lambda bias, count: moved_bias(bias, count, 0.5),
        mesh=make_mesh({"data": 2, "expert": 2, "model": 2}),
        in_specs=(P(), P(("data", "expert"))),
        out_specs=P(),
        check_vma=True,
    )
    traced = jax.jit(on_mesh).trace(jnp.zeros(4), count)
    (sent,) = trace_collectives(traced)
    assert (sent.kind, sent.shape, sent.purpose) == ("all_reduce", (4,), EXPERT_SCOPE)
    got = traced.lower().compile()(jnp.zeros(4), count)
    np.testing.assert_array_equal(got, moved_bias(jnp.zeros(4), count, 0.5))
    assert np.abs(got).max() == 0.5


def test_what_layers_have_sown_becomes_a_loss_and_metrics():
    counts = jnp.array([[3.0, 1], [0, 4], [9, 9]])
    sown = {
        "losses": {
            "scanned": {"load_balance": (jnp.array([[1.0, 2, 9], [3, 4, 9]]),)},
            "last": {"load_balance": (jnp.array([5.0, 6, 9]),)},
            "router": {"router_z": (jnp.ones((3, 3)),), "of the user": (jnp.ones(()),)},
        },
        "intermediates": {"x": {"choices": (counts,), "dropped": (jnp.array([1.0, 2, 9]),)}},
    }
    loss, metrics = auxiliary_loss(sown, jnp.array([1, 3, 0]), load_balance=0.5, router_z=0.25)
    np.testing.assert_allclose(loss, (0.5 * (9 * 1 + 12 * 3) + 0.25 * 3 * 4) / 4)
    assert {name: (float(x), float(n)) for name, (x, n) in metrics.items()} == {
        "load_balance": (3 + 12, 4),
        "router_z": (4, 4),
        "dropped": (3, 8),
        "expert_0": (3, 8),
        "expert_1": (5, 8),
    }
    assert float(auxiliary_loss(sown, jnp.zeros(3))[0]) == 0
    assert "dropped" not in auxiliary_loss({"losses": sown["losses"]})[1]


def test_losses_of_sequences_that_are_split_are_weighed_by_the_tokens_of_all_devices(devices8):
    keys = jax.random.split(jax.random.key(0), 3)
    balance, z = jax.random.uniform(keys[0], (2, 3, 4))  # Of 3 layers and 4 sequences.
    # The tokens of the second sequence are all on one device; the last two have none.
    mask = jnp.arange(8)[None] < jnp.array([[8], [2], [0], [0]])
    chosen = jax.nn.one_hot(jax.random.randint(keys[1], (3, 4, 8), 0, 2), 2)
    dropped = jax.random.randint(keys[2], (3, 4, 8), 0, 2)

    def run(balance, z, mask, chosen, dropped, axes=None):
        def loss(balance, z):
            losses = {"load_balance": (balance,), "router_z": (z,)}
            counts = {"choices": (chosen.sum(2),), "dropped": (dropped.sum(2),)}
            sown = {"losses": losses, "intermediates": counts}
            mean, metrics = auxiliary_loss(sown, mask.sum(1), load_balance=0.3, router_z=0.1)
            count = metrics["load_balance"][1]
            metrics = {"loss": (mean * count, count)} | metrics
            if axes:
                metrics = jax.tree.map(lambda x: jax.lax.psum(x, axes), metrics)
            total, count = metrics["loss"]
            return total / count, metrics

        return jax.grad(loss, (0, 1), has_aux=True)(balance, z)

    del devices8
    axes = ("context", "other")
    whole, split = P(None, "data"), P(None, "data", axes)
    on_mesh = jax.shard_map(
        functools.partial(run, axes=("data", *axes)),
        mesh=make_mesh({"data": 2, "context": 2, "other": 2}),
        in_specs=(whole, whole, P("data", axes), split, split),
        out_specs=((whole, whole), P()),
        check_vma=True,
    )
    arrays = balance, z, mask, chosen, dropped
    traced = jax.jit(on_mesh).trace(*arrays)
    sent = [one.shape for one in trace_collectives(traced) if one.purpose == CONTEXT_SCOPE]
    assert sent == [(2,), (3, 2), (3, 2)]  # The weights, and backward the gradients of both losses.
    chex.assert_trees_all_close(traced.lower().compile()(*arrays), run(*arrays), rtol=1e-5)
