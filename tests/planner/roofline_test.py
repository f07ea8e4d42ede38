"""The roofline against times worked out by hand, and bounds that every estimate keeps."""

import dataclasses

import hypothesis
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st

from manualpar.core.tracing.scopes import ticks_scope
from manualpar.inspect.communication import Collective
from manualpar.inspect.flops import ROWS, Product, TickParts
from manualpar.inspect.memory import Memory
from manualpar.inspect.scope_parsing import LAYER_SCOPES
from manualpar.inspect.throughput import Throughput
from manualpar.layers.pipeline.schedules import make_table
from manualpar.planner.hardware import Chip, Network, chip_named
from manualpar.planner.roofline import compute_seconds, estimate
from manualpar.planner.step_work import PartWork, PipelineWork, StepWork
from manualpar.planner.timed_collectives import is_made_an_all_reduce
from manualpar.planner.topology import Topology, parse_topology, ring_over

# A chip with round numbers: 100 FLOP/s, 10 bytes/s of memory, 8 devices of a node that send a byte
# a second each; everything is reached, nothing waits.
NETWORK = Network(
    kind="nodes",
    bandwidth=1.0,
    latency=0.0,
    launch=0.0,
    slow_bandwidth=0.5,
    slow_latency=0.0,
    efficiency=1.0,
    node_size=8,
    names=("fast", "slow"),
)
CHIP = Chip(
    name="round",
    device_kind="round",
    flops={"float32": 100.0},
    hbm_bytes=1000,
    hbm_bandwidth=10.0,
    network=NETWORK,
    flops_efficiency=1.0,
    attention_efficiency=1.0,
    hbm_efficiency=1.0,
    clock=0.0,
    source="made up",
)
NODE = Topology(CHIP, (8,))
TICKS = TickParts(make_table("1f1b", 2, 2))
INSIDE = "minibatch_0/jvp(Model)/layer_{}/gather_params"
BACKWARD = "minibatch_0/transpose(jvp(Model))/layer_{}/scatter_gradients"
SCOPES = {
    "forward": "jvp(Model)",
    "backward": "transpose(jvp(Model))",
    "recomputed": "transpose(jvp(Model))/rematted_computation",
    "update": "optimizer",
}


def _collective(kind, elements, scope, times=1):
    """Of float32 over all eight devices."""
    return Collective(kind, ("data",), 8, (elements,), jnp.dtype("float32"), times, scope)


def _product(phase, flops, traffic=0.0, part=""):
    """A product in a phase of a step, or of a part of a tick of two stages."""
    scope = f"{TICKS.scope(part, together=False)}/{SCOPES[phase]}" if part else SCOPES[phase]
    return Product(scope, flops, traffic, "float32")


def _work(collectives=(), products=(), *, memory=(100, 0, 0, 0, 0, 0, 0), update=0, tokens=0):
    return StepWork(
        name="fsdp manual",
        mesh={"data": 8},
        throughput=Throughput(16, tokens or None, 50.0),
        num_minibatches=1,
        collectives=tuple(collectives),
        products=tuple(products),
        update_traffic=update,
        memory=Memory(*memory),
    )


def test_a_product_takes_the_longer_of_operations_and_bytes_and_what_is_around_it_a_pass():
    by_operations = _product("forward", 1000.0, 20.0)  # 10 s, and 2 s of memory
    by_bytes = _product("forward", 100.0, 50.0)  # 1 s and 5 s
    reduction = _product("backward", 0.0, 30.0)  # 3 s
    work = _work(products=(by_operations, by_bytes, reduction))
    assert compute_seconds(work.products, CHIP, ("forward",)) == pytest.approx(10 + 2 + 5 + 5)
    assert compute_seconds(work.products, CHIP, ("backward",)) == pytest.approx(3)
    plan = estimate(dataclasses.replace(work, update_traffic=40), NODE)
    assert plan.compute_seconds == pytest.approx(22 + 3 + 4)
    assert plan.hbm_seconds == pytest.approx(29 - 11)
    assert plan.step_seconds == plan.compute_seconds
    assert plan.examples_per_second == pytest.approx(16 / 29)
    assert plan.tokens_per_second is None
    assert plan.mfu == pytest.approx(16 * 50 / 29 / (8 * 100))


def test_gathers_hide_behind_compute_but_for_the_first_layers():
    # Each of four gathers sends 7 x 4 bytes: 28 s, 112 s together.
    gathers = [_collective("all_gather", 1, INSIDE.format(i)) for i in range(4)]
    long = _product("forward", 20_000.0)  # 200 s
    plan = estimate(_work(gathers, (long,)), NODE)
    assert plan.exposed_seconds == pytest.approx(28)
    assert plan.overlapped_seconds == pytest.approx(112 - 28)
    assert plan.step_seconds == pytest.approx(200 + 28)
    short = _product("forward", 5_000.0)  # 50 s
    plan = estimate(_work(gathers, (short,)), NODE)
    assert plan.exposed_seconds == pytest.approx(112 - 50)
    assert plan.step_seconds == pytest.approx(112)
    # A loop's four rounds are four layers.
    scanned = [_collective("all_gather", 1, INSIDE.format("s"), times=4)]
    assert estimate(_work(scanned, (long,)), NODE).exposed_seconds == pytest.approx(28)


def test_the_passes_do_not_hide_one_anothers_collectives():
    scatter = _collective("reduce_scatter", 8, BACKWARD.format(0))  # 7/8 x 32 bytes: 28 s
    forward = _product("forward", 20_000.0)
    assert estimate(_work([scatter], [forward]), NODE).overlapped_seconds == 0
    backward = _product("recomputed", 20_000.0)
    others = [_collective("reduce_scatter", 8, BACKWARD.format(1)), scatter]
    plan = estimate(_work(others, [backward]), NODE)
    assert plan.overlapped_seconds == pytest.approx(28)


@pytest.mark.parametrize("scope", ["sync_gradients", "optimizer/gather_new_params", "sync_metrics"])
def test_what_stands_outside_of_the_model_is_exposed(scope):
    long = _product("backward", 1e6)
    others = [_collective("all_reduce", 8, f"{scope}/{name}") for name in "ab"]
    plan = estimate(_work(others, [long]), NODE)
    assert plan.exposed_seconds == pytest.approx(2 * 2 * 28)
    assert plan.overlapped_seconds == 0
    [planned] = plan.collectives
    assert planned.seconds == pytest.approx(2 * 56)
    assert planned.hidden_seconds == 0


SPLIT = "minibatch_0/jvp(Model)/layer_0/{}"


@pytest.mark.parametrize("purpose", LAYER_SCOPES)
def test_layers_wait_for_activations_but_not_for_the_steps_of_a_ring(purpose):
    long = _product("forward", 20_000.0)  # 200 s
    sums = [_collective("all_reduce", 8, SPLIT.format(purpose), times=2)]  # 56 s each
    plan = estimate(_work(sums, [long]), NODE)
    assert (plan.exposed_seconds, plan.overlapped_seconds) == pytest.approx((112, 0))
    [note] = plan.notes
    assert "wait 112 s of a step for activations" in note
    ring = [_collective("permute", 8, SPLIT.format(purpose), times=4)]  # 32 s each
    plan = estimate(_work(ring, [long]), NODE)
    assert (plan.exposed_seconds, plan.overlapped_seconds) == pytest.approx((32, 3 * 32))
    # Gathers hide all the same.
    gathers = [_collective("all_gather", 1, INSIDE.format(i)) for i in range(2)]
    plan = estimate(_work([*gathers, *sums], [long]), NODE)
    assert plan.overlapped_seconds == pytest.approx(28)


def test_what_is_alike_is_one_line_and_the_longest_is_first():
    collectives = [
        _collective("all_reduce", 1, "sync_metrics"),
        *(_collective("all_gather", 2, INSIDE.format(i)) for i in range(3)),
    ]
    first, second = estimate(_work(collectives), NODE).collectives
    assert (first.kind, first.purpose, first.times) == ("all_gather", "gather_params", 3)
    assert first.bytes_sent == 3 * 7 * 8
    assert second.purpose == "sync_metrics"


def test_what_does_not_fit_says_by_how_much_and_why():
    plan = estimate(_work(memory=(100, 50, 200, 10, 800, 5, 5)), NODE)
    assert (plan.fits, plan.peak_bytes, plan.spare_bytes) == (False, 1170, -170)
    assert plan.memory["activations"] == 800
    assert sum(plan.memory.values()) == 1170
    [note] = [note for note in plan.notes if note.startswith("Does not fit")]
    assert "activations" in note
    assert "remat" in note
    assert estimate(_work(memory=(1000, 0, 0, 0, 0, 0, 0)), NODE).fits


def test_too_few_tokens_a_device_are_called_communication_bound():
    gathers = [_collective("all_gather", 1, INSIDE.format(i)) for i in range(4)]  # 112 s
    few = estimate(_work(gathers, [_product("forward", 2_800.0)], tokens=4), NODE)
    [note] = [note for note in few.notes if note.startswith("Communication-bound")]
    # 16 examples of 4 tokens on 8 devices, and 112 s to 28 s: four times as many.
    assert "with 8 tokens a device" in note
    assert "With about 32, both would" in note
    many = estimate(_work(gathers, [_product("forward", 28_000.0)], tokens=4), NODE)
    assert not many.notes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v5e:4x4", True),
        ("v5e:8x8", True),
        ("v5e:16x16", True),
        ("v6e:16x16", True),
        ("v5p:4x4x8", True),
        ("v5e:2x4", False),
        ("v5e:4x8", False),
        ("v5e:8x16", False),
        ("h100:16", False),
    ],
)
def test_a_flat_axis_that_fills_a_torus_is_reduced_whole(name, expected):
    # As libtpu 0.0.42 was seen to compile them.
    topology = parse_topology(name)
    ring = ring_over(topology, {"data": topology.num_devices}, ("data",))
    assert is_made_an_all_reduce(topology, ring) is expected


@pytest.mark.parametrize(
    ("name", "is_whole"), [("v5e:4x4", False), ("v6e:8x8", False), ("v5e:8x8", True)]
)
def test_options_that_are_chosen_keep_scatters(name, is_whole):
    topology = parse_topology(name)
    scatter = _collective("reduce_scatter", 8, BACKWARD.format(0))
    work = dataclasses.replace(_work([scatter]), mesh={"data": topology.num_devices})
    notes = estimate(work, topology).notes
    assert any("Reduce-scatters over an axis that fills" in note for note in notes) == is_whole
    notes = estimate(dataclasses.replace(work, overlap="none"), topology).notes
    assert any("Reduce-scatters over an axis that fills" in note for note in notes)


def test_one_dimension_at_a_time_is_not_reduced_whole():
    topology = parse_topology("v5e:16x16")
    mesh = {"replica": 16, "data": 16}
    assert not is_made_an_all_reduce(topology, ring_over(topology, mesh, ("data",)))
    assert is_made_an_all_reduce(topology, ring_over(topology, mesh, ("replica", "data")))


_COLLECTIVES = st.builds(
    _collective,
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    st.integers(1, 100).map(lambda n: 8 * n),
    st.sampled_from([INSIDE.format(0), INSIDE.format(1), BACKWARD.format(1), "sync_gradients"]),
    st.integers(1, 5),
)
_PRODUCTS = st.builds(_product, st.sampled_from(list(SCOPES)), st.floats(0, 1e6), st.floats(0, 1e5))


@pytest.mark.slow
@hypothesis.given(st.lists(_COLLECTIVES, max_size=6), st.lists(_PRODUCTS, max_size=6))
def test_a_step_takes_no_less_than_its_parts_and_no_more_than_all_in_a_row(collectives, products):
    plan = estimate(_work(collectives, products), NODE)
    sent = sum(each.seconds for each in plan.collectives)
    assert plan.exposed_seconds + plan.overlapped_seconds == pytest.approx(sent)
    assert plan.step_seconds == pytest.approx(plan.compute_seconds + plan.exposed_seconds)
    assert plan.step_seconds >= max(plan.compute_seconds, sent) * (1 - 1e-9)
    assert plan.overlapped_seconds <= plan.compute_seconds * (1 + 1e-9)
    faster = dataclasses.replace(NETWORK, bandwidth=2.0)
    other = estimate(
        _work(collectives, products), Topology(dataclasses.replace(CHIP, network=faster), (8,))
    )
    assert other.step_seconds <= plan.step_seconds * (1 + 1e-9)


def test_every_plan_says_that_it_is_a_model_and_what_it_assumes():
    plan = estimate(_work(), NODE)
    assert plan.is_model
    assert plan.source == "roofline"
    assert len(plan.assumptions) == 5
    assert "100% of 0.0 TFLOP/s in float32, memory" in plan.assumptions[0]


def test_a_fused_kernel_has_a_share_of_its_own():
    chip = dataclasses.replace(CHIP, attention_efficiency=0.5)
    products = [_product("forward", 1000.0), _product("forward", 1000.0)]
    assert estimate(_work((), products), Topology(chip, (8,))).compute_seconds == pytest.approx(20)
    fused = [products[0], products[1]._replace(is_fused=True)]
    plan = estimate(_work((), fused), Topology(chip, (8,)))
    assert plan.compute_seconds == pytest.approx(10 + 20)
    assert "a kernel of attention 50%" in plan.assumptions[0]


@pytest.mark.parametrize(
    ("name", "dtype", "gain", "transposes"),
    [
        ("h200", "float8_e4m3fn", 1.79, True),
        ("b200", "float8_e5m2", 1.79, False),
        ("b200", "int8", 1.79, False),
        ("a100", "float8_e4m3fn", 1.0, False),  # It has none, and multiplies in bfloat16.
        ("a100", "int8", 1.79, False),
        ("v5e", "float8_e4m3fn", 1.0, False),
        ("v6e", "int8", 1.79, False),
        ("v4", "int8", 1.0, False),  # Its peak is that of bfloat16.
    ],
)
def test_products_in_eight_bits_have_peaks_of_their_own(name, dtype, gain, transposes):
    chip = chip_named(name)
    wide = Product("jvp(Model)/up", 1e15, 0.0, "bfloat16")
    took = compute_seconds([wide], chip, ["forward"])
    assert took / compute_seconds([wide._replace(dtype=dtype)], chip, ["forward"]) == (
        pytest.approx(gain, rel=0.01)
    )
    turned = Product("jvp(Model)/up", 0.0, 2e9, dtype, change="transposed")
    expected = 2e9 / 0.377e12 if transposes else 0.0
    assert compute_seconds([turned], chip, ["forward"]) == pytest.approx(expected)


def test_a_plan_says_how_fast_eight_bits_are_and_names_the_layers_that_they_slow_down():
    """An MFU stays relative to the peak of bfloat16, so that programs can be compared."""
    dtype, topology = "float8_e4m3fn", parse_topology("h200:8")

    def layer(name, flops, rounded):
        scope = f"jvp(Model)/{name}"
        made = Product(scope, 0.0, rounded, dtype, change="rounded")
        return Product(scope, flops, 0.0, dtype), made

    head = Product("jvp(Model)/head", 1e12, 0.0, "bfloat16")
    work = _work((), [head, *layer("up", 1e15, 1e9), *layer("key", 1e12, 1e10)])
    plan = estimate(work, topology)
    [said] = [x for x in plan.assumptions if "in float8_e4m3fn" in x]
    assert "1,316 TFLOP/s" in said
    assert "rounded at 1.7 TB/s, and weights in float8 transposed at 0.38 TB/s" in said
    [note] = [x for x in plan.notes if "take longer than with products in bfloat16" in x]
    assert "key" in note
    assert "up (" not in note
    one = estimate(_work((), [head._replace(flops=2.001e15 - 1e15)]), topology)
    assert plan.mfu * plan.step_seconds == pytest.approx(one.mfu * one.step_seconds)
    without = estimate(work, parse_topology("a100:8"))
    assert any("as bfloat16: a100 has no such products" in x for x in without.assumptions)


def _stages(*products, collectives=()):
    """Two stages and two microbatches; what they do is that of both runs of a part."""
    of_part = {part: [x for x in products if TICKS.part_of(x.scope) == part] for part in ROWS}
    works = {
        part: PartWork(
            2,
            tuple(one for one in collectives if TICKS.part_of(one.scope) == part),
            tuple(of_part[part]),
        )
        for part in ROWS
        if of_part[part]
    }
    return dataclasses.replace(_work(collectives, products), pipeline=PipelineWork(TICKS, works))


FORWARD = _product("forward", 2 * 1000.0, 0.0, "forward")  # 10 s a run
STAGE_PRODUCTS = (
    FORWARD,
    _product("backward", 2 * 2000.0, 0.0, "backward"),  # 20 s
    _product("backward", 2 * 500.0, 0.0, "after"),  # 5 s, of the last stage
)


def test_a_tick_lasts_as_long_as_its_slowest_stage():
    #  stage 0  F   F       B   B
    #  stage 1      F L B   F L B
    plan = estimate(_stages(*STAGE_PRODUCTS), NODE)
    assert plan.step_seconds == pytest.approx(10 + 35 + 35 + 20)
    assert plan.compute_seconds == pytest.approx((2 * 30 + 2 * 35) / 2)
    assert plan.bubble_seconds == pytest.approx(100 - 65)
    assert any("Stages wait 35 s of a step for each other" in note for note in plan.notes)
    # What all stages do once a step comes to that, and nothing is counted twice.
    once = _product("forward", 300.0)
    longer = estimate(_stages(*STAGE_PRODUCTS, once), NODE)
    assert longer.step_seconds == pytest.approx(100 + 3)
    assert longer.bubble_seconds == plan.bubble_seconds
    assert estimate(_work(products=STAGE_PRODUCTS[:2]), NODE).bubble_seconds is None


def test_what_a_stage_waits_for_others_wait_for_too():
    forward = f"{ticks_scope(make_table('1f1b', 2, 2).is_run('forward_microbatch'))}/layers"
    # 28 s each, of two layers in two runs; those of each run's first layer are exposed.
    gathers = [_collective("all_gather", 1, f"{forward}/gather_params", times=4)]
    long = FORWARD._replace(flops=2 * 10_000.0)
    plan = estimate(_stages(long, *STAGE_PRODUCTS[1:], collectives=gathers), NODE)
    assert (plan.exposed_seconds, plan.overlapped_seconds) == (56, 56)
    # A forward pass takes 128 s.
    assert plan.step_seconds == pytest.approx(128 + 153 + 153 + 20)
    [planned] = plan.collectives
    assert planned.hidden_seconds == 56
    # Hops are exposed, and count once for all stages.
    hop = _collective("permute", 7, "pipeline", times=4)
    hopping = estimate(_stages(*STAGE_PRODUCTS, collectives=[hop]), NODE)
    assert hopping.exposed_seconds == 4 * 28
    assert hopping.step_seconds == pytest.approx(100 + 4 * 28)
