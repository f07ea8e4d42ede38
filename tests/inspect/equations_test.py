from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.sharding import PartitionSpec as P

from manualpar.core.tracing.scopes import ticks_scope
from manualpar.inspect import (
    compiled_collectives,
    count_by_kind,
    ledger,
    total_bytes,
    trace_collectives,
)
from manualpar.inspect.compiled import Reading, parse_module


def on_devices(function, mesh, **kwargs):
    spec = P(tuple(mesh.axis_names))
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, **kwargs)


X = jax.ShapeDtypeStruct((64, 8), jnp.float32)  # A device of eight has [8, 8], 256 bytes.
PRODUCT = 2 * 8**3


def search(x):
    """A loop of unknown length with a product and a sum inside, and a sum in its condition."""

    def go_on(x):
        return jax.lax.pmax(x.sum(), ("data", "model")) < 9

    def body(x):
        return jax.lax.pmean(x @ x, ("data", "model"))

    with jax.named_scope("search"):
        return jax.lax.while_loop(go_on, body, x)


def test_a_loop_of_unknown_length_is_bounded(mesh42):
    function = on_devices(search, mesh42, check_vma=False)
    with pytest.raises(ValueError, match=r"ledger: a while \(scope: search\) contains all_reduce"):
        ledger(function, X)
    found = ledger(function, X, while_trips=5)
    assert found.counts() == {"all_reduce": 5 + 6}
    once = Fraction(2 * 7, 8)
    assert found.total_bytes == once * (5 * 256 + 6 * 4)
    assert found.total_flops == 5 * PRODUCT
    assert found.notes == ("while (scope: search): 5 rounds are counted, as while_trips says",)
    never = ledger(function, X, while_trips=0)
    assert (never.counts(), never.total_flops) == ({"all_reduce": 1}, 0)
    traced = jax.jit(function).trace(X)
    assert total_bytes(trace_collectives(traced, while_trips=5)) == found.total_bytes


def test_a_loop_that_only_computes_is_refused_too(mesh42):
    def compute(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x)

    function = on_devices(compute, mesh42)
    with pytest.raises(ValueError, match=r"while \(scope: none\) contains products .*while_trips="):
        ledger(function, X)
    assert ledger(function, X, while_trips=3).total_flops == 3 * PRODUCT
    assert trace_collectives(jax.jit(function).trace(X)) == ()
    # One that does neither has nothing to be counted.
    silent = on_devices(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, jnp.exp, x), mesh42)
    assert ledger(silent, X).notes == ()


def test_each_reading_has_its_own_dearest_branch(mesh42):
    def sends(x):
        return jax.lax.pmean(x, "data")

    def computes(x):
        return x @ x @ x

    def step(x):
        with jax.named_scope("choice"):
            return jax.lax.cond(x[0, 0] > 0, sends, computes, x)

    found = ledger(on_devices(step, mesh42, check_vma=False), X)
    assert (found.counts(), found.total_flops) == ({"all_reduce": 1}, 2 * PRODUCT)
    assert found.notes == (
        "cond (scope: choice): only the branch that sends most is counted, of 2",
        "cond (scope: choice): only the branch that computes most is counted, of 2",
    )
    three = [lambda x: x @ x, lambda x: x @ x @ x @ x, lambda x: x @ x @ x]
    dearest = on_devices(lambda x: jax.lax.switch(jnp.int32(x[0, 0]), three, x), mesh42)
    assert ledger(dearest, X).total_flops == 3 * PRODUCT
    alike = on_devices(lambda x: jax.lax.cond(x[0, 0] > 0, computes, computes, x), mesh42)
    assert ledger(alike, X).notes == ()


def test_loops_multiply_what_is_inside(mesh42):
    def inner(x, _):
        return jax.lax.pmean(x @ x, "data"), None

    def outer(x, _):
        return jax.lax.scan(inner, x, None, length=5)[0] @ x, None

    function = on_devices(
        lambda x: jax.lax.scan(outer, x, None, length=3)[0], mesh42, check_vma=False
    )
    found = ledger(function, X)
    assert found.counts() == {"all_reduce": 15}
    assert found.total_flops == (15 + 3) * PRODUCT


def test_calls_of_all_kinds_are_looked_into(mesh42):
    @jax.custom_vjp
    def by_hand(x):
        return jax.lax.pmean(x @ x, "data")

    by_hand.defvjp(lambda x: (by_hand(x), x), lambda x, g: (g @ x @ x @ x,))

    @jax.custom_jvp
    def forward_mode(x):
        return x @ x

    forward_mode.defjvp(lambda x, t: (forward_mode(*x), 2 * t[0] @ x[0]))
    for call in (jax.jit, jax.checkpoint, lambda f: f, jax.remat):
        mapped = on_devices(call(lambda x: forward_mode(by_hand(x))), mesh42, check_vma=False)
        found = ledger(mapped, X)
        assert (found.counts(), found.total_flops) == ({"all_reduce": 1}, 2 * PRODUCT)
    mapped = on_devices(jax.grad(lambda x: by_hand(x).sum()), mesh42, check_vma=False)
    phases = ledger(mapped, X).flops_by_phase()
    assert (phases["forward"], phases["backward"]) == (PRODUCT, 3 * PRODUCT)


def test_a_kernel_is_what_it_says_of_itself(mesh42):
    def kernel(x_ref, out_ref):
        def body(x):
            return x @ x

        out_ref[...] = jax.lax.while_loop(lambda x: x.sum() < 9, body, x_ref[...])

    def call(x, estimate=None):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(kernel, out_shape=shape, cost_estimate=estimate)(x)

    silent = ledger(on_devices(call, mesh42, check_vma=False), X)
    assert silent.total_flops == 0
    assert silent.notes == ("FLOPs of pallas_call are unknown and not counted",)
    estimate = pallas.CostEstimate(flops=123, bytes_accessed=0, transcendentals=0)
    known = ledger(on_devices(lambda x: call(x, estimate), mesh42, check_vma=False), X)
    assert (known.total_flops, known.notes) == (123, ())


def test_global_arrays_are_shared_by_all_devices(mesh42):
    def inside(x):
        return x @ x.T

    def step(x):
        local = on_devices(inside, mesh42)(x)
        return local @ local.T

    found = ledger(jax.jit(step), jax.ShapeDtypeStruct((64, 8), jnp.float32))
    assert found.total_flops == 2 * 8**3 + 2 * 64 * 64 * 8 // 8
    [note] = found.notes
    assert note.startswith("FLOPs on global arrays are assumed to be spread evenly over 8 devices")


def test_axes_that_are_left_to_xla_share_too(mesh42):
    def inside(x):  # [16, 8], of which a device has half along some dim.
        return jax.lax.pmean(x.T @ x, "data")

    mapped = jax.shard_map(
        inside, mesh=mesh42, in_specs=P("data"), out_specs=P(), axis_names={"data"}
    )
    found = ledger(jax.jit(mapped), X)
    assert found.total_flops == 2 * 8 * 8 * 16 // 2
    assert "along axes left to XLA" in found.notes[0]
    assert count_by_kind(found.collectives) == {"all_reduce": 1}


# In which ticks each of two stages computes: four and three of five,
COMPUTES = np.array([[1, 0], [1, 1], [1, 1], [1, 0], [0, 1]], bool)
# and in which the first one does more.
EMBEDS = np.array([[1, 0], [1, 0], [0, 0], [0, 0], [0, 0]], bool)
TICKS = len(COMPUTES)


def ticks(x):
    """A loop of ticks as a pipeline runs it, with a condition in a condition and a loop in it."""
    stage = jax.lax.axis_index("model")

    def more(x):
        with jax.named_scope("embed"):
            return jax.lax.pmean(x @ x @ x, "data")

    def layers(x):
        with jax.named_scope(ticks_scope(EMBEDS)):
            x = jax.lax.cond(stage == 0, more, lambda x: x, x)

        def layer(x, _):  # The branches of a model's own condition.
            x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x)
            return jax.lax.pmean(x, "data"), None

        return jax.lax.scan(layer, x, None, length=3)[0]

    def tick(x, index):
        with jax.named_scope(ticks_scope(COMPUTES)):
            x = jax.lax.cond(index < 4, layers, lambda x: x, x)
        return jax.lax.ppermute(x, "model", [(0, 1)]), None

    def rounds(x, _):
        return jax.lax.scan(tick, x, jnp.arange(TICKS))[0], None

    return jax.lax.scan(rounds, x, None, length=2)[0]


def test_what_is_in_ticks_counts_as_often_as_a_stage_runs_it(mesh42):
    function = on_devices(ticks, mesh42, check_vma=False)
    first, second = (ledger(function, X, stage=stage) for stage in (0, 1))
    assert first.counts() == {"all_reduce": 2 * (2 + 3 * 4), "permute": 2 * TICKS}
    assert first.total_flops == 2 * (2 * 2 + 3 * 4) * PRODUCT
    assert second.counts() == {"all_reduce": 2 * 3 * 3, "permute": 2 * TICKS}
    assert second.total_flops == 2 * 3 * 3 * PRODUCT
    # The module is that of the model, in which there are no ticks.
    assert set(first.bytes_by_module()) == {"embed", ""}
    assert set(second.bytes_by_module()) == {""}
    assert first.notes == (
        "the numbers are of stage 0 of 2, as requested",
        "cond (scope: ticks_4_3_in_5_of_5): only the branch that computes most is counted, of 2",
    )


def test_the_stage_that_sends_the_most_is_read(mesh42):
    function = on_devices(ticks, mesh42, check_vma=False)
    found = ledger(function, X)
    assert (found.stage, found.to_json()["stage"]) == (0, 0)
    assert found.collectives == ledger(function, X, stage=0).collectives
    assert found.notes[0] == "the numbers are of stage 0 of 2, the one that sends the most"
    traced = jax.jit(function).trace(X)
    for stage, sent in ((None, found.collectives), (1, ledger(function, X, stage=1).collectives)):
        assert total_bytes(trace_collectives(traced, stage=stage)) == total_bytes(sent)
    for read in (ledger, trace_collectives):
        with pytest.raises(ValueError, match=r"stage=2, expected a stage from 0 to 1, or None"):
            read(traced, stage=2)


def test_a_program_without_ticks_has_one_stage(mesh42):
    function = on_devices(lambda x: jax.lax.pmean(x, "data"), mesh42, check_vma=False)
    assert ledger(function, X).stage is None
    assert ledger(function, X, stage=0).collectives == ledger(function, X).collectives
    with pytest.raises(ValueError, match=r"ledger: stage=1, expected a stage from 0 to 0"):
        ledger(function, X, stage=1)


def test_what_is_in_ticks_counts_as_often_once_it_is_compiled(mesh42):
    traced = jax.jit(on_devices(ticks, mesh42, check_vma=False)).trace(X)
    text = traced.lower().compile().as_text()
    for stage in (0, 1, None):
        written = trace_collectives(traced, stage=stage)
        found = compiled_collectives(text, stage=stage)
        assert count_by_kind(found) == count_by_kind(written)
        assert total_bytes(found) == total_bytes(written)
    # By the clock some stage computes in every tick.
    module = parse_module(text)
    together = Reading(module, module.entry, 1).collectives
    assert count_by_kind(together) == {"all_reduce": 2 * (2 + 3 * TICKS), "permute": 2 * TICKS}
