"""Replicas that train alone do what training by hand does, and meet as their outer step says."""

import functools
import itertools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from manualpar import Batch, data_parallel, diloco, fsdp, hsdp, make_mesh, zero
from manualpar.inspect import (
    bytes_by_axes,
    compiled_collectives,
    outer_step_bytes,
    parameter_collectives,
    state_bytes,
    step_bytes,
    step_memory,
    total_bytes,
    trace_collectives,
)
from manualpar.training.replicas import ReplicaSentinel
from tests.laws import all_axes
from tests.one_device import slow_unless

INNER = {
    "dp": data_parallel,
    "zero1": functools.partial(zero, stage=1, min_weight_size=4, pad=True),
    "zero2": functools.partial(zero, stage=2, min_weight_size=4),
    "fsdp": functools.partial(fsdp, min_weight_size=4, pad=True),
    "hsdp": functools.partial(hsdp, replica_axis="group", min_weight_size=4),
}
MESHES = {
    "2x4": {"replica": 2, "data": 4},
    "4x2": {"replica": 4, "data": 2},
    "8x1": {"replica": 8, "data": 1},
    "2x2x2": {"replica": 2, "group": 2, "data": 2},
}
CASES = [
    (inner, mesh) for inner in INNER for mesh in MESHES if (inner == "hsdp") == ("x2x" in mesh)
]
FAST = [("fsdp", "2x4")]


class Mlp(nn.Module):
    """Two layers, of which one does not divide over the devices; maybe with batch statistics."""

    normalize: bool = False
    width: int = 33

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(self.width)(x)
        if self.normalize:
            x = nn.BatchNorm(use_running_average=not train, axis_name="data")(x)
        return nn.Dense(8)(nn.relu(x))


def loss_fn(params, apply_fn, batch, rng):
    del rng
    logits = apply_fn({"params": params}, batch.inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    total, count = (losses * batch.mask).sum(), batch.mask.sum()
    return total / jnp.maximum(count, 1), {"loss": (total, count)}


def make_batches(number, *, seed=0):
    """Batches of 32, of whose first half only the first few examples count."""
    random = np.random.default_rng(seed)
    batches = []
    for _ in range(number):
        mask = (random.random(32) > 0.3).astype(np.float32)
        mask[4:16] = 0
        batches.append(
            Batch(random.normal(size=(32, 16)).astype(np.float32), random.integers(0, 8, 32), mask)
        )
    return batches


def build(mesh="2x4", inner="fsdp", *, tx=None, every=1, outer_tx=None, model=None, **options):
    options.setdefault("outer_tx", outer_tx or optax.sgd(1.0))
    return diloco(
        model or Mlp(),
        tx or optax.sgd(0.5),
        loss_fn,
        inner=INNER[inner],
        every=every,
        mesh=make_mesh(MESHES[mesh]),
        batch=make_batches(1)[0],
        **options,
    )


def train(program, batches, state=None):
    state = program.init(jax.random.key(0)) if state is None else state
    for batch in batches:
        state, metrics = program.train_step(state, batch)
    return state, metrics


@pytest.mark.parametrize(("inner", "mesh"), [slow_unless(FAST, *case) for case in CASES])
def test_meeting_after_each_step_of_sgd_is_data_parallelism(devices8, inner, mesh):
    """However the examples are masked: half of the replicas may have next to none."""
    batches = make_batches(3)
    whole = data_parallel(
        Mlp(), optax.sgd(0.5), loss_fn, mesh=make_mesh({"data": 8}), batch=batches[0]
    )
    expected = whole.init(jax.random.key(0))
    for batch in batches:
        expected, expected_metrics = whole.train_step(expected, batch)
    program = build(mesh, inner)
    state, metrics = train(program, batches)
    chex.assert_trees_all_close(program.whole(state), whole.whole(expected), atol=1e-6)
    chex.assert_trees_all_close(metrics["loss"], expected_metrics["loss"], rtol=1e-5)
    evaluated, wanted = program.eval_step(state, batches[0]), whole.eval_step(expected, batches[0])
    chex.assert_trees_all_close(evaluated, wanted, rtol=1e-5)


def train_by_hand(batches, *, replicas, every, tx, outer_tx, params, fragments=None, overlap=False):
    """The same on one device, replica by replica, with nothing of this package.

    `fragments` are paths of parameters, in the order in which they are exchanged.
    """
    model, anchor = Mlp(), flatten_dict(params)
    fragments = fragments or [list(anchor)]
    pick = [functools.partial(take, paths=paths) for paths in fragments]
    outer_states = [outer_tx.init(part(anchor)) for part in pick]
    local, states = [anchor] * replicas, [tx.init(params)] * replicas
    seen = np.zeros((replicas, len(fragments)))

    @jax.jit
    def step(flat, opt_state, batch):
        def loss(params):
            return loss_fn(params, lambda variables, x: model.apply(variables, x), batch, None)[0]

        params = unflatten_dict(flat)
        updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)
        return flatten_dict(optax.apply_updates(params, updates)), opt_state

    for number, batch in enumerate(batches, start=1):
        before, seen_before = list(local), seen.copy()
        for i in range(replicas):
            part = jax.tree.map(lambda x, i=i: np.split(x, replicas)[i], batch)
            local[i], states[i] = step(local[i], states[i], part)
            seen[i] += part.mask.sum()
        for f, part in enumerate(pick):
            if number % every != (f + 1) * every // len(fragments) % every:
                continue
            now, counts = (before, seen_before) if overlap else (local, seen)
            mean = functools.partial(
                jnp.average, axis=0, weights=counts[:, f] if counts[:, f].any() else None
            )
            delta = {
                path: x - mean(jnp.stack([p[path] for p in now]))
                for path, x in part(anchor).items()
            }
            updates, outer_states[f] = outer_tx.update(delta, outer_states[f], part(anchor))
            new = optax.apply_updates(part(anchor), updates)
            anchor = anchor | new
            for i in range(replicas):
                own = {
                    path: x + overlap * (local[i][path] - before[i][path])
                    for path, x in new.items()
                }
                local[i] = local[i] | own
            seen[:, f] -= counts[:, f]
    return unflatten_dict(anchor), [unflatten_dict(x) for x in local]


def take(flat, paths):
    return {path: flat[path] for path in paths}


def assert_as_by_hand(program, state, anchor, local):
    chex.assert_trees_all_close(program.whole(state)["params"], anchor, atol=2e-5)
    for path, x in flatten_dict(jax.device_get(state.local["params"])).items():
        for own, by_hand in zip(x, local, strict=True):
            wanted = np.asarray(flatten_dict(by_hand)[path])
            chex.assert_trees_all_close(own[tuple(map(slice, wanted.shape))], wanted, atol=2e-5)


@pytest.mark.parametrize(
    ("inner", "mesh"), [slow_unless([("zero1", "4x2")], *case) for case in CASES]
)
def test_any_optimizers_do_what_they_do_by_hand(devices8, inner, mesh):
    """Moments, momentum and weights by examples: Adam inside, Nesterov's momentum outside."""
    tx, outer_tx = optax.adam(1e-2), optax.sgd(0.7, momentum=0.9, nesterov=True)
    program = build(mesh, inner, tx=tx, outer_tx=outer_tx, every=2)
    replicas = MESHES[mesh]["replica"]
    initial = program.whole(program.init(jax.random.key(0)))["params"]
    batches = make_batches(5)
    state, _ = train(program, batches)
    anchor, local = train_by_hand(
        batches, replicas=replicas, every=2, tx=tx, outer_tx=outer_tx, params=initial
    )
    assert_as_by_hand(program, state, anchor, local)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner", "mesh", "number", "overlap"),
    [
        ("fsdp", "2x4", 2, True),
        ("fsdp", "4x2", 3, False),
        ("dp", "2x4", 1, True),
        ("zero1", "2x4", 3, True),
    ],
)
def test_fragments_are_exchanged_at_steps_of_their_own(devices8, inner, mesh, number, overlap):
    """Beside a step of training too, whose own work then stays with each replica."""
    tx, outer_tx = optax.adam(1e-2), optax.sgd(0.7, momentum=0.9, nesterov=True)
    streamed = {"outer_fragments": number, "outer_overlap": overlap}
    program = build(mesh, inner, tx=tx, outer_tx=outer_tx, every=4, **streamed)
    initial = program.whole(program.init(jax.random.key(0)))["params"]
    paths = list(flatten_dict(initial))
    fragments = [[] for _ in range(number)]
    for (info, _), fragment in zip(program.parameters, program.outer.fragments, strict=True):
        fragments[fragment].append(tuple(info.path.split("/")))
    assert sorted(itertools.chain(*fragments)) == sorted(paths)
    batches = make_batches(10)
    state, _ = train(program, batches)
    anchor, local = train_by_hand(
        batches,
        replicas=MESHES[mesh]["replica"],
        every=4,
        tx=tx,
        outer_tx=outer_tx,
        params=initial,
        fragments=fragments,
        overlap=overlap,
    )
    assert_as_by_hand(program, state, anchor, local)
    ReplicaSentinel(program.mesh, program.layout).check(state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "fragments", "overlap"), [(2, 1, False), (3, 2, False), (3, 2, True)]
)
def test_steps_may_be_numbered_restored_or_traced(devices8, every, fragments, overlap):
    """The state counts, whoever calls: the loop, a loop that goes on, or a scan."""
    streamed = {"outer_fragments": fragments, "outer_overlap": overlap}
    program = build(inner="dp", every=every, outer_tx=optax.sgd(0.7, 0.9), **streamed)
    batches = make_batches(5)
    state = program.init(jax.random.key(0))
    for number, batch in enumerate(batches, start=1):
        state, _ = program.step_at(number)(state, batch)
    numbered = jax.device_get(state)
    half, _ = train(program, batches[:2])
    # Read anew, and the counter with it.
    restored = jax.tree.map(lambda x: jax.device_put(jax.device_get(x), x.sharding), half)
    state, _ = train(program, batches[2:], restored)
    chex.assert_trees_all_equal(jax.device_get(state), numbered)
    met, _ = train(program, batches[: 4 if every == 3 else 2])
    assert program.outer.steps[0](met) is met
    if every == 3:
        scan = jax.jit(functools.partial(jax.lax.scan, program.train_step))
        stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
        state, _ = scan(program.init(jax.random.key(0)), stacked)
        found = jax.device_get((state.params, state.local))
        chex.assert_trees_all_close(found, (numbered.params, numbered.local), atol=1e-6)


def test_a_fragment_is_sent_alone_and_beside_a_step(devices8):
    program = build(every=4, outer_fragments=2, outer_overlap=True)
    total = outer_step_bytes(program)[("replica",)]
    for fragment, outer_step in enumerate(program.outer.steps):
        expected = outer_step_bytes(program, fragment=fragment)
        assert 0 < expected[("replica",)] < total
        outer = trace_collectives(outer_step.trace(program.abstract_state))
        assert sent_bytes(outer) == {axes: x for axes, x in expected.items() if x}
        args = program.abstract_state, program.abstract_batch
        alone, both = (
            sent_bytes(trace_collectives(step.trace(*args)))
            for step in (program.train_step, program.outer.overlapped_steps[fragment])
        )
        assert both == alone | {("replica",): expected[("replica",)]}


@pytest.mark.slow
@pytest.mark.parametrize("outer_code", [None, "int4"])
def test_replicas_differ_until_they_meet_and_then_are_equal_bit_for_bit(devices8, outer_code):
    program = build(tx=optax.adam(1e-2), every=3, outer_tx=optax.sgd(0.7), outer_code=outer_code)
    sentinel = ReplicaSentinel(program.mesh, program.layout)
    initial = program.init(jax.random.key(0))
    before = jax.device_get(initial.params)
    state, _ = train(program, make_batches(2), initial)
    sentinel.check(state)
    chex.assert_trees_all_equal(jax.device_get(state.params), before)
    kernel = np.asarray(state.local["params"]["Dense_0"]["kernel"])
    assert (kernel[0] != kernel[1]).any()
    state, _ = train(program, make_batches(1), state)
    sentinel.check(state)
    for x, anchor in zip(
        jax.tree.leaves(state.local["params"]), jax.tree.leaves(state.params), strict=True
    ):
        for copy in np.asarray(x):
            np.testing.assert_array_equal(copy, np.asarray(anchor))
    assert (np.asarray(state.params["Dense_0"]["kernel"]) != before["Dense_0"]["kernel"]).any()
    np.testing.assert_array_equal(state.local["examples"], np.zeros((2, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("field", ["inputs", "mask"])
def test_a_replica_leaves_out_its_own_steps_that_are_not_finite(devices8, field):
    """The others go on, and the one that has done nothing has no weight."""
    program = build(nonfinite="skip", every=1)
    (batch,) = make_batches(1)
    spoilt = Batch(batch.inputs.copy(), batch.labels, np.ones_like(batch.mask))
    getattr(spoilt, field)[0] = np.nan  # The first replica's.
    state, metrics = train(program, [spoilt])
    assert metrics["nonfinite"] == (1, 2)
    (initial,) = (program.whole(program.init(jax.random.key(0)))["params"],)
    half = jax.tree.map(lambda x: x[16:], spoilt)
    anchor, _ = train_by_hand(
        [half], replicas=1, every=1, tx=optax.sgd(0.5), outer_tx=optax.sgd(1.0), params=initial
    )
    chex.assert_trees_all_close(program.whole(state)["params"], anchor, atol=1e-6)


@pytest.mark.slow
def test_batch_statistics_meet_too(devices8):
    """Replicas normalise by their own examples, and the anchor has the mean of their averages."""
    program = build(model=Mlp(normalize=True), every=2, tx=optax.sgd(0.1))
    state, _ = train(program, make_batches(3))
    before = jax.device_get(state.collections)
    local = jax.device_get(state.local["collections"])
    mean = jax.tree.map(lambda x: x.mean(0), local)
    state = program.outer.steps[-1](state)
    chex.assert_trees_all_close(jax.device_get(state.collections), mean, rtol=1e-6)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(before, mean, rtol=1e-6)


@pytest.mark.slow
def test_frozen_parameters_are_the_anchors_alone(devices8):
    program = build(trainable=("Dense_1/*",), every=2, tx=optax.adam(1e-2))
    assert len(jax.tree.leaves(program.abstract_state.local["params"])) == 2
    initial = program.init(jax.random.key(0))
    frozen = jax.device_get(initial.params["Dense_0"])
    state, _ = train(program, make_batches(2), initial)
    chex.assert_trees_all_equal(jax.device_get(state.params["Dense_0"]), frozen)


def test_replicas_begin_with_given_parameters(devices8):
    program = build(every=2)
    given = jax.tree.map(lambda x: np.full(x.shape, 0.5, x.dtype), program.unpadded_state.params)
    state = program.init_from(given)
    for x in jax.tree.leaves(jax.device_get(state.local["params"])):
        assert set(np.unique(x)) <= {0.0, 0.5}  # 0 where it is padded.
        assert (x == 0.5).any()
    adopted = program.adopt(state)
    chex.assert_trees_all_equal(jax.device_get(adopted.local), jax.device_get(state.local))


def test_between_two_meetings_only_metrics_cross(devices8):
    program = build(every=2)
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    crossing = [c for c in trace_collectives(traced) if "replica" in c.axes]
    assert [c.purpose for c in crossing] == ["sync_metrics"]
    # The loss, and what the first step reads: four scalars.
    assert crossing[0].bytes_sent == 2 * 16 * (2 - 1) / 2


@pytest.mark.parametrize(
    ("inner", "mesh", "outer_code"),
    [
        slow_unless([("fsdp", "2x4", "int4")], *case, code)
        for case in CASES
        for code in (None, "int8", "int4")
    ],
)
def test_an_outer_step_sends_what_the_formula_says(devices8, inner, mesh, outer_code):
    options = {"model": Mlp(width=257), "tx": optax.adam(1e-2), "every": 2}
    program = build(mesh, inner, **options, outer_code=outer_code)
    outer = trace_collectives(program.outer.steps[-1].trace(program.abstract_state))
    expected = outer_step_bytes(program)
    assert sent_bytes(outer) == {axes: x for axes, x in expected.items() if x}
    purposes = {x.purpose for x in outer if "replica" in x.axes}
    assert purposes == {"outer_step", "count_examples"}
    exact = outer_step_bytes(build(mesh, inner, **options))[("replica",)]
    assert expected[("replica",)] < exact / 2 if outer_code else expected[("replica",)] == exact
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    sent, most = sent_bytes(trace_collectives(traced)), step_bytes(program)
    most = {axes: x for axes, x in most.items() if x}
    is_bound = program.strategy.reshard_after_forward  # Not all is gathered again.
    assert sent.keys() == most.keys() if is_bound else sent == most
    assert all(sent[axes] <= x for axes, x in most.items())


def sent_bytes(collectives):
    """What is sent for parameters, by axes; nothing is sent over an axis of size 1."""
    return {axes: x for axes, x in bytes_by_axes(parameter_collectives(collectives)).items() if x}


@pytest.mark.slow
@pytest.mark.optimized
def test_a_compiled_outer_step_sends_as_much(devices8):
    program = build("2x4", "zero1", tx=optax.adam(1e-2), every=2, outer_tx=optax.sgd(0.7, 0.9))
    traced = program.outer.steps[-1].trace(program.abstract_state)
    compiled = compiled_collectives(traced.lower().compile())
    assert total_bytes(compiled) == total_bytes(trace_collectives(traced))
    step = program.train_step.trace(program.abstract_state, program.abstract_batch)
    compiled = compiled_collectives(step.lower().compile())
    assert total_bytes(compiled) == total_bytes(trace_collectives(step))


def test_memory_is_that_of_a_replica_and_the_anchor(devices8):
    program = build(tx=optax.adam(1e-2), every=2, outer_tx=optax.sgd(0.7, 0.9))
    memory, alone = step_memory(program), step_memory(program.outer.inner)
    state = program.abstract_state
    assert memory.peak - alone.peak == state_bytes((state.params, state.opt_state))[0]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [4, 3], ids=["after a meeting", "between two"])
@pytest.mark.parametrize("mesh", ["4x2", "8x1"])
def test_other_numbers_of_replicas_go_on(devices8, mesh, steps):
    """The anchor and the outer optimizer's state stay, bit for bit; the inner state is averaged."""
    options = {"tx": optax.adam(1e-2), "every": 2, "outer_tx": optax.sgd(0.7, momentum=0.9)}
    few, many = build("2x4", **options), build(mesh, **options)
    state, _ = train(few, make_batches(steps))
    adopted = many.adopt(state)
    chex.assert_trees_all_equal(many.whole(adopted), few.whole(state))
    chex.assert_trees_all_close(
        many.train_step(many.adopt(state), make_batches(1)[0])[1]["loss"][1],
        make_batches(1)[0].mask.sum(),
    )
    for own, other in zip(
        jax.tree.leaves((state.params, state.opt_state)),
        jax.tree.leaves((adopted.params, adopted.opt_state)),
        strict=True,
    ):
        own, other = np.asarray(own), np.asarray(other)
        kept = tuple(map(slice, np.minimum(own.shape, other.shape)))
        np.testing.assert_array_equal(own[kept], other[kept])  # Padded otherwise.
    weights = np.asarray(state.local["examples"])[:, 0]
    assert weights.any() == (steps == 3)
    anchor = jax.tree.leaves(jax.device_get(state.params))
    for x, own, common in zip(
        jax.tree.leaves(jax.device_get(adopted.local["params"])),
        jax.tree.leaves(jax.device_get(state.local["params"])),
        anchor,
        strict=True,
    ):
        wanted = np.average(own, axis=0, weights=weights) if weights.any() else common
        kept = tuple(map(slice, np.minimum(x.shape[1:], common.shape)))
        for copy in x:
            np.testing.assert_allclose(
                copy[kept],
                wanted[kept],
                rtol=1e-6 if weights.any() else 0,
                atol=1e-7 * (steps == 3),
            )
    total = np.asarray(adopted.local["examples"]).sum()
    np.testing.assert_allclose(total, weights.sum(), rtol=1e-6)
    # The next exchange takes the anchor to where it would have come.
    np.testing.assert_allclose(
        np.asarray(many.outer.steps[-1](adopted).params["Dense_1"]["kernel"])[:33],
        np.asarray(few.outer.steps[-1](few.adopt(state)).params["Dense_1"]["kernel"])[:33],
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"replica": 2, "data": 2, "model": 2},
        {"replica": 2, "data": 1, "context": 2, "stage": 2},
        {"replica": 2, "data": 2, "expert": 2},
    ],
    ids=str,
)
def test_a_replica_may_have_axes_of_every_kind(devices8, sizes):
    """After one step of SGD alone replicas are where hsdp takes them."""
    alone = functools.partial(diloco, every=1, outer_tx=optax.sgd(1.0))
    programs = [
        all_axes.build(
            sizes, devices=devices8, builder=builder, num_minibatches=1 + ("stage" in sizes)
        )
        for builder in (hsdp, alone)
    ]
    batch, states = all_axes.BATCH, []
    for program in programs:
        state = program.init(jax.random.key(0))
        for number in (1, 2):
            state, _ = program.step_at(number)(state, batch)
        states.append(program.whole(state))
    chex.assert_trees_all_close(*states, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
def test_replicas_draw_numbers_of_their_own(devices8):
    """With the same examples everywhere, they differ by what the loss draws alone."""
    (batch,) = make_batches(1)
    same = jax.tree.map(lambda x: np.repeat(x[:1], len(x), 0), batch)

    def noisy(params, apply_fn, batch, rng):
        loss, metrics = loss_fn(params, apply_fn, batch, rng)
        return loss * jax.random.uniform(rng), metrics

    program = diloco(
        Mlp(),
        optax.sgd(0.1),
        noisy,
        every=2,
        outer_tx=optax.sgd(1.0),
        mesh=make_mesh(MESHES["8x1"]),
        batch=same,
    )
    state, _ = train(program, [same])
    kernels = np.asarray(state.local["params"]["Dense_1"]["kernel"])
    assert len({kernel.tobytes() for kernel in kernels}) == 8
