"""The numbers of the formulas of layers, as papers give them."""

from fractions import Fraction

import jax.numpy as jnp
import pytest

from manualpar.core.tracing.scopes import CAST_SCOPE, EXPERT_SCOPE, SEQUENCE_SCOPE, TENSOR_SCOPE
from manualpar.inspect import count_by_kind, total_bytes
from manualpar.inspect.layer_formulas import (
    LayerActivations,
    block_collectives,
    cross_entropy_collectives,
    expert_collectives,
    head_collectives,
    lookup_collectives,
)

SHAPE, N = (3, 8, 5), 4
A = 3 * 8 * 5 * 2  # Bytes, of 2 an element.
SHARE = Fraction(N - 1, N)


def activations(*, sequence=False):
    dtype = jnp.dtype("bfloat16")
    return LayerActivations(shape=SHAPE, dtype=dtype, axis="model", devices=N, sequence=sequence)


def of(purpose, sends):
    return [one for one in sends if one.purpose == purpose]


@pytest.mark.parametrize(
    ("recomputed", "reduces", "gathers", "scatters"), [(False, 4, 4, 4), (True, 5, 6, 5)]
)
def test_a_block(recomputed, reduces, gathers, scatters):
    plain = list(block_collectives(activations(), recomputed=recomputed))
    assert plain == of(TENSOR_SCOPE, plain)
    assert count_by_kind(plain) == {"all_reduce": reduces}
    assert total_bytes(plain) == reduces * 2 * A * SHARE
    split = list(block_collectives(activations(sequence=True), recomputed=recomputed))
    found = of(SEQUENCE_SCOPE, split)
    assert count_by_kind(found) == {"all_gather": gathers, "reduce_scatter": scatters}
    assert total_bytes(found) == (gathers + scatters) * A * SHARE
    # The scales of two norms, in float32.
    assert total_bytes(of(CAST_SCOPE, split)) == 2 * 2 * 5 * 4 * SHARE
    assert len(split) == len(found) + 1


@pytest.mark.parametrize("sequence", [False, True])
def test_the_vocabulary(sequence):
    x = activations(sequence=sequence)
    # An embedding is float32, twice as wide.
    assert total_bytes(lookup_collectives(x)) == 2 * 2 * A * SHARE
    scale = sequence * 2 * 5 * 4 * SHARE
    assert total_bytes(head_collectives(x)) == 2 * A * SHARE + scale
    labels = 3 * 8 * 4
    assert total_bytes(cross_entropy_collectives(x)) == labels * (3 * 2 * SHARE + 2 * (N - 1))


@pytest.mark.parametrize(("recomputed", "times"), [(False, 4), (True, 6)])
def test_experts(recomputed, times):
    sent = list(expert_collectives(activations(), num_experts=8, capacity=6, recomputed=recomputed))
    assert sent == of(EXPERT_SCOPE, sent)
    assert [(x.phase, x.times) for x in sent] == [("forward", times - 2), ("backward", 2)]
    assert count_by_kind(sent) == {"all_to_all": times}
    assert total_bytes(sent) == times * 3 * 6 * 8 * 5 * 2 * SHARE
