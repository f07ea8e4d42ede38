"""What is counted of a step, against the ledger, arithmetic, and what else was traced."""

import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest

from manualpar import Batch, Pipeline, abstract_mesh, data_parallel, diloco, fsdp, hsdp, zero
from manualpar.core.parameters import placement as shard_rules
from manualpar.core.tracing.scopes import REDUCE_SCOPE, SCATTER_SCOPE
from manualpar.inspect import outer_step_bytes, state_bytes, trace_collectives
from manualpar.inspect.step_ledger import ledger
from manualpar.inspect.throughput import Throughput
from manualpar.models import Classifier, Transformer
from manualpar.models.cross_entropy import classification_loss, language_model_loss
from manualpar.models.flat_fields import nest_fields
from manualpar.models.transformer import flops_per_token
from manualpar.planner.roofline import estimate
from manualpar.planner.step_work import read_work, with_gather_dtype, with_minibatches
from manualpar.planner.topology import parse_topology
from manualpar.training.optimizer import weight_decay_mask

SEQUENCE, EXAMPLES = 16, 2
ADAMW = optax.adamw(1e-3, weight_decay=0.1, mask=weight_decay_mask)


def _transformer(**fields):
    sizes = {"vocab_size": 32, "num_layers": 2, "hidden_size": 32, "num_heads": 4, "mlp_size": 64}
    return Transformer(**nest_fields({**sizes, **fields, "attention": "xla"}))


def _language_model(*, remat="none", devices=8, **fields):
    model = _transformer(remat=remat, **fields)
    tokens = jax.ShapeDtypeStruct((EXAMPLES * devices, SEQUENCE), jnp.int32)
    program = fsdp(
        model,
        ADAMW,
        language_model_loss,
        mesh=abstract_mesh({"data": devices}, devices),
        batch=Batch(inputs=tokens, labels=tokens),
        min_weight_size=64,
    )
    flops = flops_per_token(model, SEQUENCE) * SEQUENCE
    return program, Throughput(EXAMPLES * devices, SEQUENCE, flops)


@pytest.fixture(scope="module")
def plain():
    return _language_model()


@pytest.fixture(scope="module")
def work(plain):
    return read_work(*plain)


def _by_phase(work):
    totals = dict.fromkeys(("forward", "backward", "recomputed", "update"), 0.0)
    for product in work.products:
        totals[product.phase] += product.flops
    return totals


def test_operations_are_those_of_the_ledger_and_of_the_model(plain, work):
    program, throughput = plain
    assert _by_phase(work) == pytest.approx(ledger(program).flops_by_phase())
    assert work.flops == pytest.approx(throughput.flops_per_example * EXAMPLES)
    assert work.dtype == "float32"


def test_recomputing_everything_is_one_more_forward_pass_of_the_layers(work):
    again = _by_phase(read_work(*_language_model(remat="full")))
    before = _by_phase(work)
    head = 2 * EXAMPLES * SEQUENCE * 32 * 32  # Outside of the layers.
    assert again["forward"] == pytest.approx(before["forward"])
    # What nobody needs again is not computed again: the last product of each layer's MLP.
    last = 2 * 2 * EXAMPLES * SEQUENCE * 64 * 32
    assert again["recomputed"] == pytest.approx(before["forward"] - head - last)


def test_collectives_are_those_that_the_program_sends(plain, work):
    program, _ = plain
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    expected = [(x.kind, x.shape, x.times, x.scope) for x in trace_collectives(traced)]
    assert [(x.kind, x.shape, x.times, x.scope) for x in work.collectives] == expected


def test_a_product_reads_its_operands_and_writes_its_result():
    model = Classifier(hidden_size=64, num_classes=8, num_layers=1, dropout_rate=0.0)
    batch = Batch(
        inputs=jax.ShapeDtypeStruct((32, 16), jnp.float32),
        labels=jax.ShapeDtypeStruct((32,), jnp.int32),
    )
    program = fsdp(
        model,
        ADAMW,
        classification_loss,
        mesh=abstract_mesh({"data": 8}, 8),
        batch=batch,
    )
    work = read_work(program, Throughput(32))
    products = sorted(
        (x.flops, x.traffic) for x in work.products if x.phase == "forward" and x.flops
    )
    rows, size = 32 // 8, jnp.dtype(model.dtype).itemsize
    layers = [(16, 64), (64, 8)]
    expected = sorted((2 * rows * a * b, size * (rows * a + a * b + rows * b)) for a, b in layers)
    assert [flops for flops, _ in products] == [flops for flops, _ in expected]
    assert [traffic for _, traffic in products] == [traffic for _, traffic in expected]


def test_fused_attention_computes_half_of_the_scores_and_never_writes_them(plain, work):
    fused = read_work(*plain, fused_attention=True)
    # Two products forward and four backward, of 2 H S^2 operations a head, all of them halved.
    scores = EXAMPLES * 4 * SEQUENCE**2
    layers, head = 2, 8
    assert work.flops - fused.flops == pytest.approx(layers * 6 * 2 * head * scores / 2)
    spared = sum(x.traffic for x in work.products) - sum(x.traffic for x in fused.products)
    assert spared >= layers * 6 * scores * 4
    assert fused.memory == work.memory


def test_the_update_reads_and_writes_the_state(plain, work):
    program, _ = plain
    parameters, optimizer = (
        state_bytes(x)[0] for x in (program.abstract_state.params, program.abstract_state.opt_state)
    )
    assert work.update_traffic == 3 * parameters + 2 * optimizer
    assert work.memory.parameters == parameters


def test_an_unrolled_model_has_the_same_work(work):
    unrolled = read_work(*_language_model(scan_layers=False))
    assert unrolled.flops == pytest.approx(work.flops)
    assert len(unrolled.products) <= len(work.products) + 8  # What is alike is added up.


# Work that was scaled, against the same work traced.

BUILDERS = {
    "dp": data_parallel,
    "zero1": lambda *parts, **options: zero(*parts, stage=1, min_weight_size=64, **options),
    "zero2": lambda *parts, **options: zero(*parts, stage=2, min_weight_size=64, **options),
    "fsdp": lambda *parts, **options: fsdp(*parts, min_weight_size=64, **options),
    "hsdp": lambda *parts, **options: hsdp(*parts, min_weight_size=64, **options),
    "split": lambda *parts, **options: fsdp(*parts, min_weight_size=64, **options),
}
MESHES = {"hsdp": {"replica": 2, "data": 4}, "split": {"data": 2, "model": 4}}


@functools.cache
def _read(strategy, **options):
    is_split = strategy == "split"
    split = {"split_axis": "model", "sequence_parallel": True} if is_split else {}
    model = _transformer(remat="full", **split)
    tokens = jax.ShapeDtypeStruct((32, 16), jnp.int32)
    axes = MESHES.get(strategy, {"data": 8})
    program = BUILDERS[strategy](
        model,
        ADAMW,
        language_model_loss,
        mesh=abstract_mesh(axes, 8),
        batch=Batch(inputs=tokens, labels=tokens),
        **options,
    )
    return read_work(program, Throughput(32, 16, 1.0))


FAST = ("fsdp",)


@pytest.fixture(
    scope="module",
    params=[x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in BUILDERS],
)
def base(request):
    return request.param, _read(request.param)


def _sent(work):
    """Everything that is sent, with how often; count and metrics have no part in minibatches."""
    counts = Counter()
    for x in work.collectives:
        size = math.prod(x.shape)
        counts[x.kind, x.axes, size, str(x.dtype), x.purpose, x.phase] += x.times
    return counts


def test_more_minibatches_and_another_dtype_on_the_wire_are_exact(base):
    strategy, work = base
    reduce_dtype = "float32" if strategy in ("fsdp", "dp") else ""
    # The rows of a split embedding are summed as they are gathered, which is not scaled.
    dtype = "" if strategy == "split" else "bfloat16"
    traced = _read(
        strategy, num_minibatches=2, gather_dtype=dtype or None, reduce_dtype=reduce_dtype or None
    )
    scaled = with_gather_dtype(with_minibatches(work, 2), dtype, reduce_dtype=reduce_dtype)
    assert scaled.flops == pytest.approx(traced.flops)
    # The cotangents of what all positions share have the minibatch's shape, so others may differ.
    sent, expected = (
        {key: n for key, n in _sent(each).items() if key[4] != "other"} for each in (scaled, traced)
    )
    if strategy == "zero1":  # One minibatch scatters the layers of a loop one by one.
        sent, expected = _numbers(sent), _numbers(expected)
        assert scaled.memory.gradients >= traced.memory.parameters
    assert sent == expected
    assert scaled.num_minibatches == traced.num_minibatches == 2


def _numbers(sent):
    """How many numbers are sent, by kind, axes, dtype, purpose and phase."""
    numbers = Counter()
    for (kind, axes, size, dtype, purpose, phase), times in sent.items():
        # Reductions after the loop are outside of the minibatch's backward pass.
        is_reduction = purpose in (SCATTER_SCOPE, REDUCE_SCOPE)
        numbers[kind, axes, dtype, purpose, not is_reduction and phase] += size * times
    return numbers


@pytest.mark.slow
def test_means_in_a_loop_are_after_it_with_several_minibatches(monkeypatch):
    monkeypatch.setattr(shard_rules, "OVERLAPS_MEANS", {""})
    monkeypatch.setattr(shard_rules, "MIN_MEAN_SIZE", 0)
    work = _read.__wrapped__("dp")
    assert any(x.purpose == REDUCE_SCOPE and x.phase == "backward" for x in work.collectives)
    scaled = _sent(with_minibatches(work, 2))
    assert _numbers(scaled) == _numbers(_sent(_read("dp", num_minibatches=2)))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_codes_stay_codes(strategy):
    codes = {"gather_code": "int8", "reduce_code": "int4"}
    work = _read(strategy, **codes)
    scaled = with_gather_dtype(with_minibatches(work, 2), "bfloat16", reduce_dtype="float32")
    traced = _read(
        strategy, num_minibatches=2, gather_dtype="bfloat16", reduce_dtype="float32", **codes
    )
    sent, expected = (
        {key: n for key, n in _sent(each).items() if key[4] != "other"} for each in (scaled, traced)
    )
    assert sent == expected
    assert any(dtype == "uint8" for _, _, _, dtype, *_ in sent)


def test_devices_that_split_layers_share_their_work():
    split, whole = _read("split"), _read("fsdp")
    assert split.flops == pytest.approx(whole.flops)
    # A device holds parts of a layer's activations, of four times as many examples.
    assert split.memory.activations < 2 * whole.memory.activations
    assert split.memory.parameters == pytest.approx(whole.memory.parameters, rel=0.02)


def test_nothing_changed_is_the_same_work(base):
    _, work = base
    assert with_minibatches(work, 1) is work
    assert with_gather_dtype(work, "") is work


def test_the_stages_of_a_pipeline_compute_layers_alike_and_the_last_one_the_head():
    tokens = jax.ShapeDtypeStruct((16, SEQUENCE), jnp.int32)
    program = data_parallel(
        _transformer(),
        ADAMW,
        language_model_loss,
        mesh=abstract_mesh({"data": 2, "stage": 2}, 4),
        batch=Batch(inputs=tokens, labels=tokens),
        num_minibatches=4,
        pipeline=Pipeline(),
    )
    work = read_work(program, Throughput(16, SEQUENCE, 1.0))
    # Looking up tokens and the gradient of that have no products, and nothing is sent for it.
    assert set(work.pipeline.works) == {"forward", "backward", "after"}
    assert {part.runs for part in work.pipeline.works.values()} == {4}
    flops = {
        name: sum(x.flops for x in part.products) for name, part in work.pipeline.works.items()
    }
    tokens_of_device = 16 * SEQUENCE // 2
    assert flops["after"] == 3 * 2 * tokens_of_device * 32 * 32
    weights = 4 * 32 * 32 + 3 * 32 * 64  # Of the one layer of a stage.
    attention = 2 * SEQUENCE * 32  # The scores and the mixing of values.
    assert flops["forward"] == 2 * tokens_of_device * (weights + attention)
    assert flops["backward"] == 2 * flops["forward"]
    # All stages send the same, and the first of them is read.
    assert work.flops == flops["forward"] + flops["backward"]


def test_a_step_has_its_share_of_an_outer_step():
    """Between nodes a step sends what an outer step does, divided by the steps between two."""
    batch = Batch(
        inputs=jax.ShapeDtypeStruct((32, 64), jnp.float32),
        labels=jax.ShapeDtypeStruct((32,), jnp.int32),
    )

    def plan(every):
        program = diloco(
            Classifier(hidden_size=1024, dropout_rate=0.0),
            ADAMW,
            classification_loss,
            every=every,
            outer_tx=optax.sgd(0.7, momentum=0.9),
            mesh=abstract_mesh({"replica": 2, "data": 8}, 16),
            batch=batch,
        )
        work = read_work(program, Throughput(32), order=("replica", "data"))
        [sent] = outer_step_bytes(program).values()
        return estimate(work, parse_topology("h100:16")), float(sent)

    (ten, sent), (fifty, _) = plan(10), plan(50)
    assert ten.slow_bytes == pytest.approx(sent / 10, rel=0.01)  # And metrics.
    assert fifty.slow_bytes == pytest.approx(sent / 50, rel=0.01)
    assert ten.compute_seconds == fifty.compute_seconds
    # Nothing hides it.
    assert ten.step_seconds - fifty.step_seconds == pytest.approx(
        ten.slow_seconds - fifty.slow_seconds
    )
