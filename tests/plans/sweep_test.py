"""What a sweep compares, ranks and refuses."""

import dataclasses
import functools
import math

import ml_collections
import pytest

from manualpar.core.modes.layer_loops import CHOICES, planned_memory
from manualpar.core.tracing.jaxprs import all_equations
from manualpar.planner.roofline import estimate
from manualpar.planner.topology import Topology, parse_topology
from manualpar.plans.sweep import (
    Builder,
    Candidate,
    _bases,
    group_sizes,
    has_kernel,
    mesh_like,
    scaling_curves,
    split_sizes,
    sweep,
)
from manualpar.training.config import load_config
from manualpar.training.experiment import prepare
from manualpar.training.task import make_task
from tests.paths import ROOT

CONFIGS = ROOT / "configs"


@pytest.fixture(scope="module")
def builder():
    config = ml_collections.ConfigDict(load_config(CONFIGS / "fsdp.py").to_dict())
    config.model.hidden_size, config.model.num_layers = 32, 1
    config.data.batch_size, config.model.dropout_rate = 64, 0.0
    return Builder(config, make_task(config))


@pytest.fixture(scope="module")
def outcomes(builder):
    return sweep(builder, parse_topology("h100:16"), traced=2)


def test_the_fastest_that_fits_is_first_and_its_own_program_was_traced(outcomes):
    times = [each.seconds for each in outcomes]
    assert times == sorted(times)
    assert all(math.isfinite(time) for time in times)
    assert outcomes[0].is_traced
    assert outcomes[1].is_traced


def test_every_strategy_mesh_minibatch_and_dtype_is_there_once(outcomes):
    names = [each.candidate for each in outcomes]
    keys = {
        (x.strategy, tuple(x.mesh.items()), x.num_minibatches, x.gather_dtype, x.replica_mean)
        for x in names
    }
    assert len(keys) == len(names)
    assert {x.strategy for x in names} == {"dp", "zero1", "zero2", "fsdp", "hsdp"}
    assert {x.gather_dtype for x in names} == {"", "bfloat16"}
    assert {x.remat for x in names} == {""}  # A classifier has no choice.
    # A device has four examples.
    assert {x.num_minibatches for x in names if x.strategy == "fsdp"} == {1, 2, 4}
    assert {x.num_minibatches for x in names if x.strategy == "zero2"} == {2, 4}
    assert {tuple(x.mesh.values()) for x in names if x.strategy == "hsdp"} == {(2, 8)}
    assert {x.replica_mean for x in names if x.strategy == "hsdp"} == {"step", "backward"}
    assert {x.replica_mean for x in names if x.strategy != "hsdp"} == {""}


def test_a_plan_of_a_candidate_is_that_of_its_own_program(builder, outcomes):
    [scaled] = [
        each
        for each in outcomes
        if (each.candidate.strategy, each.candidate.num_minibatches) == ("fsdp", 2)
        and each.candidate.gather_dtype == "bfloat16"
    ]
    work = builder.read(scaled.candidate, parse_topology("h100:16"))
    assert work.num_minibatches == 2
    assert scaled.plan.bytes_sent == pytest.approx(
        float(sum(x.bytes_sent for x in work.collectives))
    )


def test_a_mean_in_the_backward_pass_hides_behind_it(outcomes):
    plans = {
        x.candidate.replica_mean: x.plan
        for x in outcomes
        if (x.candidate.strategy, x.candidate.num_minibatches) == ("hsdp", 2)
        and not x.candidate.gather_dtype
    }

    def between_nodes(plan):
        found = [x for x in plan.collectives if x.axes == ("replica",)]
        return sum(x.bytes_sent for x in found), sum(x.hidden_seconds for x in found)

    sent, hidden = between_nodes(plans["step"])
    assert hidden == 0
    again, hidden = between_nodes(plans["backward"])
    assert hidden > 0
    assert again == 2 * sent  # Once in each minibatch.


def test_what_does_not_fit_comes_last_and_says_why(builder):
    topology = parse_topology("h100:16")
    small = dataclasses.replace(topology.chip, hbm_bytes=1000)
    outcomes = sweep(builder, Topology(small, topology.shape), traced=1)
    assert all(each.seconds == math.inf for each in outcomes)
    for each in outcomes:
        assert "too much: " in each.reason
        assert not each.plan.fits


def test_a_batch_that_no_mesh_divides_is_a_reason(builder):
    config = ml_collections.ConfigDict(builder.config.to_dict())
    config.data.batch_size = 60
    outcomes = sweep(Builder(config, builder.task), parse_topology("h100:8"), traced=1)
    assert {each.plan for each in outcomes} == {None}
    for each in outcomes:
        assert "config.data.batch_size is 60, expected a multiple of 8" in each.reason


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("h100:8", []),  # One node: no groups.
        ("h100:16", [8]),
        ("h100:128", [8, 32]),
        ("v5e:16x16", [16]),
        ("v5p:8x8x4", [32, 4]),
        ("2xv5e:16x16", [256, 16]),
    ],
)
def test_groups_lie_in_a_node_or_a_slice(name, sizes):
    assert group_sizes(parse_topology(name)) == sizes


def test_a_curve_has_as_many_examples_on_each_device(builder, monkeypatch):
    monkeypatch.setattr("manualpar.plans.sweep.CHIP_COUNTS", (8, 32))
    candidate = Candidate("hsdp", {"replica": 2, "data": 8}, 1, "", "")
    curves = scaling_curves(builder, parse_topology("h100:16"), {"hsdp": candidate})
    [(first, small), (second, large)] = [*curves["hsdp"], *[(None, None)] * 2][:2]
    assert (first, second, large) == (32, None, None)  # Eight devices are one node.
    assert small.mesh == {"replica": 4, "data": 8}
    assert small.examples_per_second * small.step_seconds == pytest.approx(4 * 32)


def test_meshes_of_other_strategies_are_flat():
    topology = parse_topology("v5e:4x8")
    assert mesh_like({}, topology) == {"data": 32}
    assert mesh_like({"replica": 2, "data": 2}, topology) == {"replica": 4, "data": 8}


@pytest.fixture(scope="module")
def language_builder():
    config = ml_collections.ConfigDict(load_config(CONFIGS / "tp_lm.py").to_dict())
    config.model.hidden_size, config.model.mlp_size, config.model.num_layers = 32, 64, 1
    config.parallel.sequence, config.data.batch_size = True, 8
    return Builder(config, make_task(config))


DATA = {"data": 8}
KERNELS = [
    # On TPUs splash, whatever the dtype and the soft cap.
    ("v5e:2x4", {}, {}, True),
    ("v5e:2x4", {"attention_soft_cap": 30.0}, {}, True),
    ("v5e:2x4", {"attention": "blockwise"}, {}, False),
    # On GPUs triton, because there are documents, where it can run.
    ("h100:8", {"dtype": "float32"}, {}, False),
    ("h100:8", {"dtype": "bfloat16"}, {}, True),
    ("h100:8", {"dtype": "bfloat16", "attention_soft_cap": 30.0}, {}, True),
    ("h100:8", {"dtype": "bfloat16", "attention": "blockwise"}, {}, False),
    ("h100:8", {"dtype": "bfloat16", "head_size": 4}, {}, True),
    ("h100:8", {"dtype": "bfloat16", "head_size": 256}, {}, True),
    ("b200:8", {"dtype": "bfloat16", "head_size": 256}, {}, False),
    # Only exchanged heads make whole sequences, of which a kernel on GPUs computes the attention.
    ("h100:8", {"dtype": "bfloat16"}, {"context_attention": "ulysses"}, True),
    ("h100:8", {"dtype": "bfloat16"}, {"context_attention": "ring"}, False),
    ("h100:8", {"dtype": "bfloat16"}, {"context_attention": "auto"}, True),
    (
        "h100:8",
        {"dtype": "bfloat16", "num_heads": 1, "num_kv_heads": 1},
        {"context_attention": "auto"},
        False,
    ),
    ("v5e:2x4", {}, {"context_attention": "ring"}, False),
]


def _with_mesh(builder, **mesh):
    config = ml_collections.ConfigDict(builder.config.to_dict())
    config.model.head_size, config.parallel.sequence = 8, False
    config.parallel.mesh = mesh
    return config


@pytest.fixture(scope="module")
def programs(language_builder):
    """Programs by topology and by whether sequences are split."""

    @functools.cache
    def build(topology, is_split):
        config = _with_mesh(language_builder, **({"data": 4, "context": 2} if is_split else DATA))
        return prepare(config, devices=parse_topology(topology).abstract_devices).program

    return build


@pytest.mark.parametrize(("topology", "model", "parallel", "expected"), KERNELS)
def test_the_chips_say_whether_attention_is_a_kernel(
    language_builder, programs, topology, model, parallel, expected
):
    program = programs(topology, bool(parallel))
    config = _with_mesh(language_builder, **program.mesh.shape)
    config.model.update(model)
    config.parallel.update(parallel)
    chip = parse_topology(topology).chip
    assert has_kernel(make_task(config).model, program, chip) == expected


@pytest.mark.parametrize("topology", ["v5e:2x4", "h100:8"])
def test_a_plan_without_a_compiler_chooses_layers_as_the_chip_would(language_builder, topology):
    """A plan for TPUs took those of a CPU: layers that keep everything."""
    config = _with_mesh(language_builder, **DATA)
    config.model.remat, config.model.scan_layers = "auto", True
    with planned_memory(2**40):
        program = prepare(config, devices=parse_topology(topology).abstract_devices).program
        jaxpr = program.train_step.trace(program.abstract_state, program.abstract_batch).jaxpr
    expected = CHOICES["tpu" if topology.startswith("v5e") else "gpu"][0]
    assert program.layer_choice == expected._replace(why=program.layer_choice.why)
    # Attention stays in blocks, from which the roofline reads what it computes.
    assert not any(eqn.primitive.name == "pallas_call" for eqn in all_equations(jaxpr.jaxpr))


def test_documents_of_long_sequences_are_a_kernel_that_needs_no_mask(language_builder):
    config = _with_mesh(language_builder, data=8)
    config.model.dtype, config.data.sequence_length = "bfloat16", 16_384
    model, program = make_task(config).model, prepare(config, devices=8).program
    h100 = parse_topology("h100:8").chip
    assert has_kernel(model, program, dataclasses.replace(h100, hbm_bytes=2**30))
    old = dataclasses.replace(h100, compute_capability="8.6")
    assert has_kernel(model, program, old)  # cuDNN's mask and its gradient have 512 MiB each.
    small = dataclasses.replace(old, hbm_bytes=2**33 - 1)
    assert not has_kernel(model, program, small)
    whole = model.clone(bos_token=-1)  # Each sequence is one document, so there is no mask.
    assert has_kernel(whole, program, small)


@pytest.mark.parametrize(("attention", "is_fused"), [("", True), ("blockwise", False)])
def test_a_candidate_is_timed_with_the_kernel(language_builder, attention, is_fused):
    config = ml_collections.ConfigDict(language_builder.config.to_dict())
    config.model.attention = attention
    builder = Builder(config, make_task(config))
    work = builder.read(Candidate("fsdp", {"data": 8}, 1, "none", ""), parse_topology("v5e:2x4"))
    assert any(product.is_fused for product in work.products) == is_fused


def test_layers_are_split_over_parts_of_a_node(language_builder, builder):
    topology = parse_topology("h100:16")
    assert split_sizes(topology) == [2, 4, 8]
    assert split_sizes(parse_topology("v5e:4x4")) == [2, 4, 8, 16]
    bases = [x for x in _bases(topology, language_builder) if x.remat == "none"]
    split = [(x.strategy, tuple(x.mesh.values())) for x in bases if "model" in x.mesh]
    # With two replicas of eight and `model=8` nothing would be left to shard over.
    assert split == [
        *(("dp", sizes) for sizes in [(8, 2), (4, 4), (2, 8)]),
        *(("fsdp", sizes) for sizes in [(8, 2), (4, 4), (2, 8)]),
        # The mean over replicas, after the backward pass or in it.
        *(("hsdp", sizes) for sizes in [(2, 4, 2), (2, 4, 2), (2, 2, 4), (2, 2, 4)]),
    ]
    assert not any("model" in x.mesh for x in _bases(topology, builder))  # A classifier.
    hsdp = {"replica": 2, "data": 2, "model": 4}
    assert mesh_like(hsdp, parse_topology("h100:32")) == {"replica": 4, "data": 2, "model": 4}
    assert mesh_like({"data": 1, "model": 16}, parse_topology("h100:8")) is None


def test_experts_are_divided_over_parts_of_a_node(language_builder):
    config = ml_collections.ConfigDict(language_builder.config.to_dict())
    config.model.num_experts, config.data.batch_size = 4, 16
    builder, topology = Builder(config, make_task(config)), parse_topology("h100:16")
    bases = [x for x in _bases(topology, builder) if x.remat == "none" and "expert" in x.mesh]
    assert [tuple(x.mesh.values()) for x in bases if x.strategy == "fsdp"] == [
        (8, 2),
        (4, 4),
        (2, 8),
    ]
    *_, four, eight = (x for x in bases if x.strategy == "dp")
    assert "does not divide over the 8 devices along 'expert'" in (
        builder.outcome(eight, topology).reason
    )
    found = builder.outcome(four, topology)
    assert found.reason == ""
    assert {x.axes for x in found.plan.collectives if x.kind == "all_to_all"} == {("expert",)}
    assert mesh_like(four.mesh, parse_topology("h100:32")) == {"data": 8, "expert": 4}


def test_a_sweep_says_why_layers_cannot_be_split(language_builder):
    topology = parse_topology("h100:16")
    config = ml_collections.ConfigDict(language_builder.config.to_dict())
    config.model.vocab_multiple, config.model.num_heads, config.model.num_kv_heads = 8, 4, 2

    def outcome(**fields):
        config.model.update(fields)
        mesh = {"data": 2, "model": 8}
        candidate = Candidate("fsdp", mesh, 1, "none", "")
        return Builder(config, make_task(config)).outcome(candidate, topology)

    assert "attention/out/kernel' of shape (4, 8, 32)" in outcome().reason
    assert "vocab_multiple=8" in outcome(vocab_multiple=1).reason
    found = outcome(vocab_multiple=8, num_heads=8)
    assert (found.reason, found.plan.mesh) == ("", {"data": 2, "model": 8})
    # The same builder plans without an axis too: eight examples do not go over 16 devices.
    whole = language_builder.outcome(Candidate("fsdp", {"data": 16}, 1, "none", ""), topology)
    assert "config.data.batch_size is 8, expected a multiple of 16" in whole.reason


def test_a_torus_is_sharded_over_one_side_after_the_other_too(builder):
    topology = parse_topology("v5e:8x8")
    bases = list(_bases(topology, builder))
    assert [x.mesh for x in bases if x.strategy == "fsdp"] == [
        {"data": 64},
        {"data": 8, "data_minor": 8},
    ]
    flat, by_axis = (builder.read(x, topology) for x in bases if x.strategy == "fsdp")
    scatters = [x.axes for x in by_axis.collectives if x.purpose == "scatter_gradients"]
    assert {("data",), ("data_minor",)} == set(scatters)
    notes = estimate(flat, topology).notes, estimate(by_axis, topology).notes
    assert [any("count twice" in note for note in each) for each in notes] == [True, False]
