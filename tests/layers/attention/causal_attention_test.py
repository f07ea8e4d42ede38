"""What is kept of cuDNN's attention, with a kernel in its place that runs anywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manualpar.layers.attention import causal_attention as cudnn
from manualpar.layers.attention.blockwise_attention import ATTENDED

real = jax.nn.dot_product_attention


def stand_in(query, key, value, *, mask, implementation, **options):
    """Attention whose forward pass returns what cuDNN's does; `exp2` says how often it runs."""
    assert implementation == "cudnn"

    def plain(query, key, value, mask):
        return real(query, key, value, mask=mask, **options)

    kernel = jax.custom_vjp(plain)

    def forward(query, key, value, mask):
        sums = jnp.exp2(query.sum(-1)).swapaxes(1, 2)
        out = plain(query, key, value, mask) + 0 * sums.sum()
        return out, (query, key, value, mask, sums)

    def backward(kept, g):
        *given, mask, sums = kept
        of_query, *rest = jax.vjp(lambda *x: plain(*x, mask), *given)[1](g)
        return of_query + 0 * sums.sum(), *rest, None

    kernel.defvjp(forward, backward)
    return kernel(query, key, value, mask)


@pytest.mark.parametrize("packed", [True, False])
def test_the_kernel_runs_once_under_a_policy_that_saves_its_results(monkeypatch, packed):
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    keys = jax.random.split(jax.random.key(0), 3)
    heads = [jax.random.normal(k, (2, 8, n, 4)) for k, n in zip(keys, (4, 2, 2), strict=True)]
    documents = jnp.asarray([[0, 0, 1, 1, 1, 0, 0, 2]] * 2, jnp.int32) if packed else None

    def gradient(policy):
        def attend(*heads):
            return cudnn.cudnn_attention(*heads, documents, window=3)

        attend = jax.checkpoint(attend, policy=policy)
        return jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), (0, 1, 2)), attend

    policies = jax.checkpoint_policies
    runs = [
        str(jax.make_jaxpr(gradient(policy)[0])(*heads)).count("exp2 ")
        for policy in (policies.save_only_these_names(ATTENDED), policies.nothing_saveable)
    ]
    assert runs == [1, 2]
    grad, attend = gradient(policies.save_only_these_names(ATTENDED))
    kept = jax.tree.leaves(jax.eval_shape(lambda *x: jax.vjp(attend, *x)[1], *heads))
    assert not any(x.shape[-2:] == (8, 8) for x in kept)  # The mask is made again.

    def of_xla(*heads):
        out = cudnn.dot_product_attention(*heads, documents, 3, "xla")
        return jnp.sin(out).sum()

    found = jax.jit(grad)(*heads)
    monkeypatch.undo()
    expected = jax.jit(jax.grad(of_xla, (0, 1, 2)))(*heads)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
