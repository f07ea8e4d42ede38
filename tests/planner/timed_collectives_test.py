"""Collectives with their seconds, traced and compiled, and the lines of a plan that they make."""

import dataclasses

import jax.numpy as jnp

from manualpar.inspect.communication import Collective
from manualpar.inspect.compiled import CompiledCollective
from manualpar.planner.timed_collectives import TimedCollective, planned_collectives

SCOPE = "jvp(Model)/layer_{}/gather_params"
GATHER = Collective("all_gather", ("data",), 4, (2,), jnp.dtype("float32"), 3, SCOPE.format(0))


def test_collectives_that_differ_only_in_numbers_are_one_line_and_the_longest_is_first():
    first = TimedCollective(GATHER, 0.5, "links", slow_bytes=2.0, hidden_seconds=0.25)
    longer = dataclasses.replace(GATHER, times=1, shape=(4,), scope=SCOPE.format(1))
    second = TimedCollective(longer, 2.0, "links", hidden_seconds=0.5, share=0.5)
    again = dataclasses.replace(GATHER, scope=f"transpose(jvp(Model))/{SCOPE.format(0)}")
    other = TimedCollective(again, 1.0, "links")
    merged, alone = planned_collectives([other, first, second])
    assert (merged.kind, merged.axes, merged.network) == ("all_gather", ("data",), "links")
    assert (merged.purpose, merged.phase) == ("gather_params", "forward")
    assert (merged.times, merged.bytes_sent, merged.slow_bytes) == (4, 3 * 3 * 8 + 0.5 * 3 * 16, 2)
    assert (merged.seconds, merged.hidden_seconds, merged.is_async) == (2.5, 0.75, None)
    assert (alone.phase, alone.times, alone.seconds) == ("backward", 3, 1.0)


def test_a_compiled_collective_has_the_names_of_its_first_source_and_may_be_asynchronous():
    scope = "jit(f)/(jvp(Model)/up/gather_params/all_gather:jvp(Model)/down/gather_params/x)"
    found = CompiledCollective("all_gather", 4, ((2,),), ("f32",), 3, scope, "begin", ("data",))
    assert (found.purpose, found.module, found.phase) == ("gather_params", "Model/up", "forward")
    waited, hidden = (TimedCollective(found, 1.0, cycles_between=cycles) for cycles in (0, 7))
    lines = planned_collectives([waited, hidden])
    assert [(line.axes, line.purpose, line.is_async) for line in lines] == [
        (("data",), "gather_params", False),
        (("data",), "gather_params", True),
    ]
    assert planned_collectives([TimedCollective(found, 1.0)])[0].is_async is None
    nameless = dataclasses.replace(found, scope="")
    assert (nameless.purpose, nameless.module, nameless.phase) == ("other", "", "forward")
