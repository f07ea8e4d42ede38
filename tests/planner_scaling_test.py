"""Work that was scaled, against the same work traced."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from manualpar import Batch, abstract_mesh, data_parallel, fsdp, hsdp, zero
from manualpar.models import Transformer
from manualpar.planner.scaling import with_gather_dtype, with_minibatches
from manualpar.planner.work import Task, read_work
from manualpar.training.losses import language_model_loss
from manualpar.training.optimizer import adamw

BUILDERS = {
    "dp": data_parallel,
    "zero1": lambda *parts, **options: zero(*parts, stage=1, min_weight_size=64, **options),
    "zero2": lambda *parts, **options: zero(*parts, stage=2, min_weight_size=64, **options),
    "fsdp": lambda *parts, **options: fsdp(*parts, min_weight_size=64, **options),
    "hsdp": lambda *parts, **options: hsdp(*parts, min_weight_size=64, **options),
}


def _read(strategy, **options):
    model = Transformer(
        vocab_size=32, num_layers=2, hidden_size=32, num_heads=4, mlp_size=64, remat="full"
    )
    tokens = jax.ShapeDtypeStruct((32, 16), jnp.int32)
    axes = {"replica": 2, "data": 4} if strategy == "hsdp" else {"data": 8}
    program = BUILDERS[strategy](
        model,
        adamw(1e-3, weight_decay=0.1),
        language_model_loss,
        mesh=abstract_mesh(axes, 8),
        batch=Batch(inputs=tokens, labels=tokens),
        **options,
    )
    return read_work(program, Task(32, 16, 1.0))


@pytest.fixture(scope="module", params=BUILDERS)
def base(request):
    return request.param, _read(request.param)


def _sent(work):
    """Everything that is sent, with how often; count and metrics have no part in minibatches."""
    counts = Counter()
    for x in work.collectives:
        counts[x.kind, x.axes, x.shape, str(x.dtype), x.purpose, x.phase] += x.times
    return counts


def test_minibatches_are_exact_in_what_is_computed_and_sent(base):
    strategy, work = base
    minibatches = 2
    traced = _read(strategy, num_minibatches=minibatches)
    scaled = with_minibatches(work, minibatches)
    assert scaled.flops == pytest.approx(traced.flops)
    sent, expected = _sent(scaled), _sent(traced)
    # The cotangents of what all positions share have the minibatch's shape.
    assert {key: n for key, n in sent.items() if key[4] != "other"} == {
        key: n for key, n in expected.items() if key[4] != "other"
    }
    assert scaled.num_minibatches == traced.num_minibatches == minibatches


def test_another_dtype_on_the_wire_is_exact(base):
    strategy, work = base
    reduce_dtype = "float32" if strategy in ("fsdp", "dp") else ""
    traced = _read(strategy, gather_dtype="bfloat16", reduce_dtype=reduce_dtype or None)
    scaled = with_gather_dtype(work, "bfloat16", reduce_dtype=reduce_dtype)
    assert _sent(scaled) == _sent(traced)
    assert scaled.flops == pytest.approx(traced.flops)


def test_nothing_changed_is_the_same_work(base):
    _, work = base
    assert with_minibatches(work, 1) is work
    assert with_gather_dtype(work, "") is work
