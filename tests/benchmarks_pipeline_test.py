"""What the benchmark of pipelines reads off programs."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.pipeline import IN_MEMORY, IN_TIME, PROGRAMS, carried_bytes, slope
from benchmarks.pipeline_hops import find_hops

# A tick: a permute on, a branch of all stages, a permute back, one of the first stage, the ends.
TEXT = """HloModule jit_train, is_scheduled=true, num_partitions=3

%nothing (a: f32[]) -> f32[] {
  ROOT %a = f32[] parameter(0)
}

%work (b: f32[]) -> f32[] {
  %b = f32[] parameter(0)
  %c = f32[] negate(%b), backend_config={"estimated_cycles":"30"}
  ROOT %d = f32[] while(%c), condition=%test, body=%turn, backend_config={"known_trip_count":{"n":"2"}}
}

%test (e: f32[]) -> pred[] {
  ROOT %f = pred[] constant(true)
}

%turn (g: f32[]) -> f32[] {
  ROOT %h = f32[] negate(%g), backend_config={"estimated_cycles":"100"}
}

ENTRY %main (x: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %i = s32[] constant(0)
  %on = (f32[], f32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,2}}, metadata={op_name="jit(train)/pipeline/ppermute"}
  %y = f32[] conditional(%i, %x, %x), branch_computations={%nothing, %work}, metadata={op_name="jit(train)/ticks_8_8_8_in_10_of_12/cond"}
  %z = f32[] negate(%y), backend_config={"estimated_cycles":"7"}
  %back = (f32[], f32[]) collective-permute-start(%z), source_target_pairs={{1,0},{2,1}}, metadata={op_name="jit(train)/pipeline/ppermute"}
  %w = f32[] conditional(%i, %x, %x), branch_computations={%nothing, %work}, metadata={op_name="jit(train)/ticks_8_0_0_in_8_of_12/cond"}
  %end = f32[] collective-permute-done(%back)
  %v = f32[] negate(%end), backend_config={"estimated_cycles":"5"}
  ROOT %last = f32[] collective-permute-done(%on)
}
"""  # noqa: E501


def test_work_during_a_hop_is_counted_by_who_does_it():
    on, back = find_hops(TEXT)
    assert on._asdict() == {
        "name": "on",
        "is_on": True,
        "always": 12,
        "chunks": 230,
        "others": 230,
    }
    assert back._asdict() == {
        "name": "back",
        "is_on": False,
        "always": 0,
        "chunks": 0,
        "others": 230,
    }


def test_what_ticks_carry_is_read_from_their_scan():
    def run(x):
        def tick(carry, _):
            inner, _ = jax.lax.scan(lambda c, _: (c + 1, None), carry[0], length=3)
            return (inner, -carry[1]), None

        return jax.lax.scan(tick, (x, jnp.zeros((5, 2), jnp.bfloat16)), length=7)[0]

    jaxpr = jax.make_jaxpr(run)(jnp.zeros(4)).jaxpr
    assert carried_bytes(jaxpr, 7) == 4 * 4 + 5 * 2 * 2
    assert carried_bytes(jaxpr, 3) == 4 * 4
    assert carried_bytes(jaxpr, 2) == 0


def test_a_slope_is_what_one_more_adds():
    assert slope({8: 100, 32: 220, 16: 140}) == pytest.approx(5)
    assert slope({8: 100}) is None


def test_every_program_is_measured():
    assert set(IN_MEMORY) | set(IN_TIME) == set(PROGRAMS)
