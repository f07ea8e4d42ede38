"""Attention in blocks: its types under a mesh, what it computes and holds, and what is saved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import make_mesh
from manualpar.core.tracing.jaxprs import all_equations
from manualpar.layers.attention import attention, blockwise_attention
from manualpar.layers.attention.blockwise_attention import ATTENDED, Scoring, seen_pairs, spans

SHARED = P()  # By both devices along `data`.
HEADS = P("data", None, "model")
SPECS = {
    "keys and documents are shared": (P("data"), SHARED, P("data"), SHARED),
    "one key head for the heads of all devices": (HEADS, P("data"), P("data"), P("data")),
    "only documents differ": (SHARED, SHARED, SHARED, P("data")),
}


def arrays(B=2, S=12, N=4, K=2, H=4):
    keys = jax.random.split(jax.random.key(0), 3)
    heads = (jax.random.normal(k, (B, S, n, H)) for k, n in zip(keys, (N, K, K), strict=True))
    return *heads, jnp.asarray(np.arange(B * S).reshape(B, S) // 5 % 2, jnp.int32)


def loss_of(*given, kind):
    return jnp.sin(attention(*given, kind=kind).astype(jnp.float32)).sum()


@pytest.mark.parametrize("name", SPECS)
def test_arguments_may_vary_over_different_axes(devices8, monkeypatch, name):
    """The gradient of an argument that several devices share is summed over them."""
    monkeypatch.setattr(blockwise_attention, "CPU_BLOCK", 5)
    specs = SPECS[name]
    given = [x if spec else x[:2] for x, spec in zip(arrays(B=4, K=1), specs, strict=True)]

    def on_device(*given):
        def loss(*heads):
            total = loss_of(*heads, given[3], kind="blockwise")
            return jax.lax.psum(total, tuple(jax.typeof(total).mat.varying))

        return jax.value_and_grad(loss, (0, 1, 2))(*given[:3])

    def of_all(*heads):
        whole = [
            x if spec else jnp.concatenate([x, x])
            for x, spec in zip((*heads, given[3]), specs, strict=True)
        ]
        return loss_of(*whole, kind="xla")

    run = jax.shard_map(
        on_device,
        mesh=make_mesh({"data": 2, "model": 2}, devices8[:4]),
        in_specs=specs,
        out_specs=(P(), specs[:3]),
        check_vma=True,
    )
    loss, grads = jax.jit(run)(*given)
    expected, wanted = jax.jit(jax.value_and_grad(of_all, (0, 1, 2)))(*given[:3])
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for got, want in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_pairs_of_which_no_query_sees_a_key_are_left_out():
    blocks = spans(10, 4)  # 0 to 3, 4 to 7, 8 and 9.
    assert blocks.tolist() == [[0, 3], [4, 7], [8, 9]]
    below = [[0, 0], [1, 0], [1, 1], [2, 0], [2, 1], [2, 2]]
    assert seen_pairs(blocks, blocks).tolist() == below
    assert seen_pairs(blocks, blocks, Scoring(6)).tolist() == below  # 8 sees 3.
    assert seen_pairs(blocks, blocks, Scoring(5)).tolist() == [x for x in below if x != [2, 0]]
    assert seen_pairs(blocks, blocks, Scoring(1)).tolist() == [[0, 0], [1, 1], [2, 2]]
    # Chunks from 0 to 4 and from 5 to 9.
    assert seen_pairs(blocks, blocks, Scoring(chunk=5)).tolist() == [
        x for x in below if x != [2, 0]
    ]
    assert seen_pairs(blocks, blocks, Scoring(chunk=4)).tolist() == [[0, 0], [1, 1], [2, 2]]


def test_nothing_is_as_large_as_the_scores(monkeypatch):
    """And a policy that saves the result has it computed once."""
    monkeypatch.setattr(blockwise_attention, "CPU_BLOCK", 8)
    given = arrays(S=64)

    def read(policy):
        """How many loops there are, and the elements of the largest array."""
        loss = jax.checkpoint(lambda *x: loss_of(*x, kind="blockwise"), policy=policy)
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*given)
        eqns = list(all_equations(jaxpr.jaxpr))
        sizes = [v.aval.size for eqn in eqns for v in eqn.outvars]
        return [eqn.primitive.name for eqn in eqns].count("scan"), max(sizes)

    policies = jax.checkpoint_policies
    saved, largest = read(policies.save_only_these_names(ATTENDED))
    assert (saved, read(policies.nothing_saveable)[0]) == (2, 3)
    assert largest <= 2 * 64 * 4 * 8  # `[B, N, S, 8]`, where the scores are `[B, N, S, S]`.
