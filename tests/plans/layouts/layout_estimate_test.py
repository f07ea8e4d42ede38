"""The formula of a step on many devices, against programs that are traced for them."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manualpar.core.tracing.scopes import PIPELINE_SCOPE
from manualpar.inspect.communication import summed
from manualpar.layers.pipeline.schedules import make_table
from manualpar.models import Transformer
from manualpar.models.flat_fields import nest_fields, with_fields
from manualpar.planner.roofline import estimate
from manualpar.planner.step_work import read_work
from manualpar.planner.topology import parse_topology
from manualpar.plans.layouts.layout import Layout, find_obstacle, sizes_on_device
from manualpar.plans.layouts.layout_estimate import LayoutEstimator, estimate_layout
from manualpar.plans.layouts.layout_search import (
    config_of_layout,
    factorisations,
    fastest_of_each_mesh,
    layout_fields,
    rank_layouts,
)
from manualpar.plans.layouts.layout_work import (
    activation_slots,
    layer_products,
    state_elements,
    step_memory_of,
)
from manualpar.plans.sweep import throughput_of
from manualpar.training.config import load_config
from manualpar.training.experiment import prepare
from manualpar.training.task import make_task
from tests.models.transformer_families import GEMMA, QWEN
from tests.paths import ROOT

CONFIGS = ROOT / "configs" / "plan"
P = Layout
WEIGHTS = {"min_weight_size": load_config(CONFIGS / "llama3_8b.py").parallel.min_weight_size}


class XlaLayout(Layout):
    """Of attention that is taken as a kernel whose result remat computes again."""

    remats: ClassVar = {
        name: again | {"scores": 1.0} if again else again for name, again in Layout.remats.items()
    }


X = XlaLayout


def _model(name):
    return make_task(load_config(CONFIGS / f"{name}.py")).model


def _traced(name, layout, *, length=0):
    """The model, its batch, and the work of a program with this layout."""
    config = config_of_layout(load_config(CONFIGS / f"{name}.py"), layout)
    config.data.sequence_length = length or config.data.sequence_length
    if isinstance(layout, XlaLayout):
        config.model.attention = "xla"
    if layout.stage > 1:
        config.data.batch_size = 256
    experiment = prepare(config, devices=layout.num_devices)
    throughput = throughput_of(config, experiment.task)
    work = read_work(experiment.program, throughput, fused_attention=True)
    sizes = {"examples": config.data.batch_size, "positions": config.data.sequence_length}
    return experiment.task.model, sizes, work


def _check(name, topology, layout):
    """Holds time and memory of the formula against the traced program's."""
    model, sizes, work = _traced(name, layout)
    assert not find_obstacle(model, layout, **sizes)
    x = sizes_on_device(model, layout, **sizes)
    assert 4 * state_elements(x, layout) == pytest.approx(work.memory.parameters, rel=1e-3)
    plan = estimate_layout(model, layout, parse_topology(topology), **sizes, **WEIGHTS)
    read = estimate(work, parse_topology(topology))
    assert plan.step_seconds == pytest.approx(read.step_seconds, rel=0.03)
    assert plan.exposed_seconds == pytest.approx(read.exposed_seconds, rel=0.03, abs=0.005)
    assert plan.mfu == pytest.approx(read.mfu, rel=0.03)


@pytest.mark.slow
def test_a_step_is_that_of_the_traced_program():
    _check("llama3_8b", "h100:128", X(data=16, model=8, num_minibatches=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "topology", "layout"),
    [
        ("llama3_8b", "h100:128", X(data=32, model=4, remat="dots")),
        ("llama3_70b", "h100:1024", X(data=128, model=8, num_minibatches=8, communicate="step")),
        (
            "llama3_70b",
            "h100:1024",
            X(data=128, model=8, num_minibatches=4, communicate="gather-step"),
        ),
        ("llama3_70b", "h100:1024", X(replica=4, data=64, model=4)),
        ("llama3_70b", "v5p:16x16x16", X(data=1024, model=4)),
        ("llama3_70b", "4xv5e:16x16", X(data=256, model=4)),
        ("llama3_405b", "h100:16384", X(data=2048, model=8)),
        ("mixtral_8x22b", "h100:1024", X(data=128, expert=8)),
        ("mixtral_8x22b", "h100:1024", X(data=64, expert=4, model=4)),
        ("llama3_8b", "h100:128", X(replica=16, data=8, gather_code="int8", reduce_code="int4")),
        (
            "llama3_70b",
            "h100:1024",
            X(
                data=128,
                model=8,
                num_minibatches=8,
                communicate="step",
                gather_code="int8",
                reduce_code="int4",
            ),
        ),
        (
            "mixtral_8x22b",
            "h100:1024",
            X(data=128, expert=8, gather_code="int8", reduce_code="int8"),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, X) else value,
)
def test_a_step_of_any_axes_is_that_of_the_traced_program(name, topology, layout):
    _check(name, topology, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        X(stage=4, data=16, model=2, num_minibatches=8),
        X(stage=4, data=16, model=2, num_minibatches=8, chunks=2, communicate="step"),
        X(stage=4, data=16, model=2, num_minibatches=16, remat="none", keep="inputs"),
    ],
    ids=lambda value: value.details,
)
def test_a_step_in_stages_is_nearly_that_of_the_traced_program(layout):
    model, sizes, work = _traced("llama3_8b", layout)
    topology = parse_topology("h100:128")
    plan = estimate_layout(model, layout, topology, **sizes, **WEIGHTS)
    read = estimate(work, topology)
    assert plan.step_seconds == pytest.approx(read.step_seconds, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama3_8b", P(data=16, model=8)),
        ("llama3_8b", P(data=16, model=4, num_minibatches=4, communicate="step")),
        ("llama3_8b", P(data=16, model=4, num_minibatches=4, communicate="gather-step")),
        ("llama3_8b", P(data=16, model=4, remat="dots")),
        ("mixtral_8x22b", P(data=32, expert=8)),
        ("mixtral_8x22b", P(data=16, expert=4, model=4)),
        ("llama3_8b", P(data=16, context=4)),
        ("llama3_8b", P(stage=4, data=8, num_minibatches=8, communicate="step")),
        ("llama3_8b", P(stage=4, data=8, num_minibatches=8, chunks=2, communicate="step")),
        (
            "llama3_8b",
            P(stage=4, data=8, num_minibatches=8, remat="none", keep="inputs", communicate="step"),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, P) else value,
)
def test_memory_is_nearly_that_of_the_traced_program(name, layout):
    """With few positions: attention in blocks holds sums that one kernel does not."""
    model, sizes, work = _traced(name, layout, length=256 * layout.context)
    x = sizes_on_device(model, layout, **sizes)
    memory = step_memory_of(x, layout)
    assert memory.parameters == pytest.approx(work.memory.parameters, rel=1e-3)
    assert memory.optimizer == pytest.approx(work.memory.optimizer, rel=1e-3)
    assert memory.batch == pytest.approx(work.memory.batch)
    assert memory.peak == pytest.approx(work.memory.peak, rel=0.2)
    if layout.stage == 1:  # And no scores are computed again.
        flops = summed((product.phase, product.flops) for product in work.products)
        shares = layout.recomputed
        again = x.L * sum(shares.get(p.scope, 0.0) * p.flops for p in layer_products(x, layout))
        assert layout.num_minibatches * again == pytest.approx(flops["recomputed"], rel=1e-3)


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(4, 8, 2), (8, 16, 1), (2, 6, 4)])
def test_bubble_slots_and_hops_are_those_of_the_schedule(stages, microbatches, chunks):
    """For a model whose head is too small to matter: it has no bubble."""
    model = _model("llama3_70b").clone(num_layers=32, vocab_multiple=260, bos_token=-1)
    data, topology = 64 // stages, parse_topology("h100:64")
    layout = P(stage=stages, data=data, num_minibatches=microbatches, chunks=chunks)
    layout = dataclasses.replace(layout, communicate="step")
    table = make_table("1f1b", stages, microbatches, chunks)
    assert activation_slots(layout) == table.activation_slots
    sizes = {"examples": data * microbatches, "positions": 8192}
    plan = estimate_layout(model, layout, topology, **sizes)
    idle = plan.bubble_seconds / (plan.bubble_seconds + plan.compute_seconds)
    assert idle == pytest.approx(table.bubble, rel=0.1)
    more = dataclasses.replace(layout, num_minibatches=2 * microbatches)
    doubled = estimate_layout(model, more, topology, **sizes | {"examples": 2 * sizes["examples"]})
    ticks = make_table("1f1b", stages, 2 * microbatches, chunks).num_ticks

    def hops(plan):
        found = [x for x in plan.collectives if x.purpose == PIPELINE_SCOPE]
        return sum(x.times for x in found if x.kind == "permute") - chunks_exchanged

    chunks_exchanged = 2 * chunks * 9 if chunks > 1 else 0
    assert hops(plan) == 2 * table.num_ticks
    assert hops(doubled) == 2 * ticks


def test_chunks_that_run_again_take_time_and_save_memory():
    model, topology = _model("llama3_70b"), parse_topology("h100:1024")
    sizes = {"examples": 2048, "positions": 8192}
    layout = P(stage=8, data=16, model=8, num_minibatches=32, remat="none", communicate="step")
    kept = estimate_layout(model, layout, topology, **sizes)
    again = estimate_layout(model, dataclasses.replace(layout, keep="inputs"), topology, **sizes)
    assert again.memory["activations"] < kept.memory["activations"] / 5
    assert 1.2 < again.step_seconds / kept.step_seconds < 1.4


def test_a_longer_context_is_split_and_its_ring_hides():
    model, topology = _model("llama3_8b"), parse_topology("h100:128")
    sizes = {"examples": 16, "positions": 131_072}
    plan = estimate_layout(model, P(data=16, context=8), topology, **sizes)
    assert plan.fits
    assert plan.exposed_seconds < 0.02 * plan.step_seconds


def test_every_layout_that_is_tried_has_all_devices_and_divides():
    model, topology = _model("mixtral_8x22b"), parse_topology("h100:64")
    sizes = {"examples": 128, "positions": 4096}
    axes = ("replica", "stage", "context", "expert", "model")
    layouts = list(factorisations(model, topology, axes=axes, **sizes))
    assert {layout.num_devices for layout in layouts} == {64}
    assert len(set(layouts)) == len(layouts)
    assert {layout.stage for layout in layouts} == {1, 2, 4, 7, 8, 14, 28} & {1, 2, 4, 8}
    assert max(layout.model for layout in layouts) == 8  # A node has no more.
    assert not any(find_obstacle(model, layout, **sizes) for layout in layouts)


def test_split_layers_run_two_halves_on_gpus_alone():
    model, sizes = _model("llama3_8b").clone(num_layers=8), {"examples": 64, "positions": 4096}

    def fastest(name, **changes):
        estimator = LayoutEstimator(model, parse_topology(name), **sizes | changes)
        outcomes = rank_layouts(estimator, axes=("context", "model"))
        found = [outcome.candidate for outcome in fastest_of_each_mesh(outcomes)]
        return {(x.model, x.context): x.layer_overlap for x in found}

    on_gpus = fastest("h100:8")
    assert {on_gpus[n, 1] for n in (2, 4)} == {"dual_batch"}
    assert {how for (n, context), how in on_gpus.items() if n == 1 or context > 1} == {"none"}
    small = fastest("h100:8", examples=8, positions=512)  # A half fills no GPU.
    assert {*small.values(), *fastest("v5e:2x4").values()} == {"none"}


def test_the_fastest_layout_comes_first_and_all_fit():
    model, topology = _model("llama3_70b").clone(num_layers=10), parse_topology("h100:16")
    estimator = LayoutEstimator(model, topology, examples=16, positions=2048)
    outcomes = rank_layouts(estimator, axes=("replica", "model"))
    assert all(outcome.plan.fits for outcome in outcomes)
    seconds = [outcome.seconds for outcome in outcomes]
    assert seconds == sorted(seconds)
    layouts = {outcome.candidate for outcome in outcomes}
    assert len(layouts) == len(outcomes)
    names = [outcome.candidate.name for outcome in fastest_of_each_mesh(outcomes)]
    assert len(names) == len(set(names)) < len(outcomes)
    assert names[0] == outcomes[0].candidate.name
    for layout in layouts:
        less = {"none": None, "dots": "none", "full": "dots"}[layout.remat]
        if less:  # It would not fit.
            other = dataclasses.replace(layout, remat=less)
            sizes = {"examples": 16, "positions": 2048}
            assert not estimate_layout(model, other, topology, **sizes).fits


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (P(data=16, stage=8), "126 layers do not divide by stage x chunks = 8"),
        (P(data=8, model=16), ""),
        (P(data=3), "2,048 examples do not divide by replica x data x expert x minibatches = 3"),
        (P(data=8, chunks=2), "chunks without stages"),
        (P(data=8, expert=2), "1 experts do not divide by expert = 2"),
    ],
    ids=lambda value: value.name if isinstance(value, P) else "",
)
def test_what_does_not_divide_is_named(layout, message):
    found = find_obstacle(_model("llama3_405b"), layout, examples=2048, positions=8192)
    assert found == message


def test_parameters_and_windows_of_other_families_are_counted():
    model = Transformer(
        **nest_fields(GEMMA | QWEN) | {"num_layers": 6}, hidden_size=32, num_heads=4
    )
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    sizes = {"examples": 1, "positions": 64}
    x = sizes_on_device(model, P(), **sizes)
    assert state_elements(x, P()) == sum(leaf.size for leaf in jax.tree.leaves(params))
    windows = np.arange(64) + 1
    expected = 2 * np.mean([np.minimum(windows, 3), windows])
    assert x.seen == pytest.approx(expected, rel=0.02)
    chunked = with_fields(model, attention_window=0, attention_chunk=24)
    of_chunks = sizes_on_device(chunked, P(), **sizes).seen
    assert of_chunks == (64 + (2 * 24**2 + 16**2) / 64) / 2  # Two chunks, and the rest.
    stages = P(stage=2, num_minibatches=1)
    message = "6 layers do not divide by stage x chunks x global_every = 4"
    assert find_obstacle(model, stages, **sizes) == message


def test_a_layout_is_a_strategy_whose_steps_are_those_of_one_device():
    assert layout_fields(Layout(data=8))["parallel.strategy"] == "fsdp"
    assert layout_fields(Layout(replica=2, data=4))["parallel.strategy"] == "hsdp"
