"""What is read off programs of XLA's TPU compiler (libtpu 0.0.42), and how long they take.

The texts in `data/tpu` are programs without the tables of stack frames, all but the last whole:

- `gathers_v5e_2x2`: a scan of 3 layers, two products each, whose weights `[256, 4096]` and
  `[1024, 1024]` on a chip are gathered over four chips.
- `flat_v5e_4x4`: a scan of 3 layers of one product and its gradient, gathered again for it and
  scattered over 16 chips along one axis that fills the torus.
- `scattered_twice_v5e_4x4`: `[1024, 1024]` scattered over one axis of a (4, 4) mesh, then over the
  other.
- `windowed_v5e_2x4`: a product whose result is scattered, left to XLA, which makes a loop of it
  that permutes.
- `padded_v5e_2x4`: what became of scattering a gradient `[11008, 4096]`, an excerpt: it is padded
  so that a chip gets whole tiles, 1440 rows and not 1376, and then shifted to where it belongs.

libtpu 0.0.52 wrote `sparse_core_v6e_4x4`, after it had generated code: a scan of 8 layers of one
product and its gradient, with the options for v6e. SparseCores gather and scatter, in operations
that jaxlib 0.10.2 refuses to read.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from manualpar.inspect.compiled import Instruction, parse_module
from manualpar.planner.compiled_timeline import (
    SLICES,
    KernelRuns,
    Timeline,
    kind_of_transfer,
    on_all_links,
    read_timeline,
    slice_groups,
)

DATA = Path(__file__).parent / "tpu"
TWO_AXES = {"data": 4, "data_minor": 4}
# The products of `gathers_v5e_2x2` are of 2048 x 1024 x 4096; a chip multiplies 4 x 128 x 128 of
# those in a cycle.
PRODUCT_CYCLES = 2048 * 1024 * 4096 // (4 * 128 * 128)


def text_of(name: str) -> str:
    return (DATA / f"{name}.txt").read_text(encoding="utf-8")


def read(text: str, mesh: dict[str, int]) -> Timeline:
    """Follows a program whose collectives take no time; a cycle is a second."""
    return read_timeline(text, mesh, clock=1.0, wire=on_all_links(lambda collective: 0.0))


def sent(timeline: Timeline) -> list[Any]:
    """The collectives without their times."""
    return [timed.collective for timed in timeline.collectives]


@pytest.fixture
def gathers() -> Timeline:
    return read(text_of("gathers_v5e_2x2"), {"data": 4})


def test_collectives_count_as_often_as_their_loop_turns(gathers: Timeline) -> None:
    assert [(each.kind, each.axes, each.times) for each in sent(gathers)] == [
        ("all_gather", ("data",), 3),
        ("all_gather", ("data",), 3),
    ]
    # Both weights have 1024 x 4096 elements of two bytes on four chips.
    assert [each.operand_bytes for each in sent(gathers)] == [2 * 1024 * 1024] * 2
    assert [each.bytes_sent for each in sent(gathers)] == [3 * 3 * 2 * 1024 * 1024] * 2
    assert all(each.scope.endswith("closed_call/all_gather") for each in sent(gathers))
    assert all(each.dtypes == ("bf16",) for each in sent(gathers))


def test_fused_collective_is_asynchronous_and_the_product_it_is_fused_with_lies_between(
    gathers: Timeline,
) -> None:
    first, second = gathers.collectives
    assert not first.is_async
    assert first.cycles_between == 0
    assert second.is_async
    assert second.cycles_between > PRODUCT_CYCLES
    assert gathers.num_carried == 0


def test_a_sparse_core_gathers_and_scatters_while_layers_compute() -> None:
    timeline = read(text_of("sparse_core_v6e_4x4"), {"data": 16})
    found = {(x.collective.kind, x.collective.axes): x for x in timeline.collectives}
    assert set(found) == {("all_gather", ("data",)), ("reduce_scatter", ("data",))}
    for x in found.values():
        assert x.collective.times == 8
        assert x.collective.bytes_sent == 8 * 15 * 256 * 4096 * 2
        assert x.is_async
    # The products of a layer are of 2048 x 4096 x 4096; a chip multiplies 2 x 256 x 256 a cycle.
    assert timeline.compute_seconds > 8 * 2 * (2048 * 4096 * 4096) / (2 * 256 * 256)


def test_estimates_are_of_compute_alone() -> None:
    """No collective has one, and a product that carries one has that of the product alone."""
    module = parse_module(text_of("gathers_v5e_2x2"))
    collectives = [
        instruction
        for computation in module.computations.values()
        for instruction in computation.values()
        if instruction.opcode == "all-gather" or "AsyncCollective" in instruction.attributes
    ]
    assert len(collectives) > 3
    assert all(instruction.cycles is None for instruction in collectives)
    inside = set(_in_loops(text_of("gathers_v5e_2x2")))
    estimates = _estimates(text_of("gathers_v5e_2x2"))
    carrying, plain = sorted(cycles for name, cycles in estimates if name in inside)[-2:]
    assert PRODUCT_CYCLES < carrying <= plain < 1.2 * PRODUCT_CYCLES


def test_cycles_of_a_loop_count_as_often_as_it_turns(gathers: Timeline) -> None:
    estimates = re.findall(r'"estimated_cycles":"(\d+)"', text_of("gathers_v5e_2x2"))
    inside = set(_in_loops(text_of("gathers_v5e_2x2")))
    expected = sum(
        (3 if name in inside else 1) * cycles
        for name, cycles in _estimates(text_of("gathers_v5e_2x2"))
    )
    assert len(estimates) >= 4
    assert gathers.compute_cycles == expected


def _estimates(text: str) -> list[tuple[str, int]]:
    """The lines that have an estimate, but for those inside of fusions: name and cycles."""
    found, computation = [], ""
    for line in text.splitlines():
        if begins := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            computation = begins[1]
        cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
        if cycles and "fused_computation" not in computation and "fusion" not in computation:
            found.append((line.split(" = ")[0].strip(), int(cycles[1])))
    return found


def _in_loops(text: str) -> list[str]:
    """The names of the instructions in bodies of loops."""
    bodies = re.findall(r"body=%([\w.\-]+)", text)
    found, computation = [], ""
    for line in text.splitlines():
        if begins := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            computation = begins[1]
        elif computation in bodies:
            found.append(line.split(" = ")[0].strip())
    return found


def test_flat_axis_that_fills_a_torus_becomes_an_all_reduce() -> None:
    schedule = read(text_of("flat_v5e_4x4"), {"data": 16})
    kinds = [each.kind for each in sent(schedule)]
    assert kinds == ["all_gather", "all_gather", "all_reduce"]
    reduced = sent(schedule)[2]
    assert reduced.scope.endswith("reduce_scatter")  # As it was written.
    assert reduced.bytes_sent == 3 * 2 * 15 * (1024 * 1024 * 2) / 16


def test_scattered_over_one_axis_after_the_other_it_stays_a_reduce_scatter() -> None:
    schedule = read(text_of("scattered_twice_v5e_4x4"), TWO_AXES)
    found = [(each.kind, each.axes, each.group_size) for each in sent(schedule)]
    assert found == [("reduce_scatter", ("data",), 4), ("reduce_scatter", ("data_minor",), 4)]
    whole = 1024 * 1024 * 2
    assert [each.operand_bytes for each in sent(schedule)] == [whole, whole // 4]


def test_product_that_is_scattered_by_permutations_runs_them_behind_itself() -> None:
    schedule = read(text_of("windowed_v5e_2x4"), {"data": 8})
    assert {each.kind for each in sent(schedule)} == {"permute"}
    in_loop = [each for each in schedule.collectives if each.collective.times > 1]
    # Two directions, two steps a turn: a turn is four shards, so two turns make eight.
    assert [each.collective.times for each in in_loop] == [2] * 4
    assert all(each.is_async and each.cycles_between > 0 for each in in_loop)
    shard = 1024 * 1024 * 2 // 8
    assert all(each.collective.operand_bytes == shard for each in in_loop)


def test_padded_reduce_scatter_is_one_and_what_shifts_it_belongs_to_it() -> None:
    timeline = read(text_of("padded_v5e_2x4"), {"data": 8})
    scatter, shift = sent(timeline)
    assert (scatter.kind, scatter.axes) == ("reduce_scatter", ("data",))
    assert scatter.bytes_sent == 11520 * 4096 * 2 * 7 / 8
    assert (shift.kind, shift.axes) == ("permute", ("data",))
    assert not timeline.collectives[1].is_async
    assert shift.bytes_sent == 448 * 4096 * 2
    module = "mlp/down/scatter_gradients/add"
    assert [scatter.scope, shift.scope] == [module, module]


PAIR = """HloModule m, is_scheduled=true, num_partitions=2

%gather (p: f32[4]) -> f32[8] {
  %p = f32[4] parameter(0)
  ROOT %all-gather.1 = f32[8] all-gather(%p), channel_id=1, replica_groups={}, dimensions={0}
}

ENTRY %main (x: f32[4]) -> f32[8] {
  %x = f32[4] parameter(0)
  %begin = ((f32[4]), f32[8], u32[]) async-start(%x), calls=%gather
  %busy = f32[4] negate(%x), backend_config={"window_config":{"estimated_cycles":"70"}}
  %more = ((f32[4]), f32[8], u32[]) async-update(%begin)
  %work = f32[4] negate(%busy), backend_config={"window_config":{"estimated_cycles":"7"}}
  ROOT %end = f32[8] async-done(%more)
}
"""


def test_wrapped_pair_is_asynchronous_too() -> None:
    (gather,) = read(PAIR, {"data": 2}).collectives
    found = gather.collective
    assert (found.kind, found.name, found.operand_bytes) == ("all_gather", "begin", 16)
    assert (gather.is_async, gather.cycles_between) == (True, 77)


CARRIED = """HloModule m, is_scheduled=true, num_partitions=2

%start (p: f32[4]) -> (f32[4], f32[8]) {
  %p = f32[4] parameter(0)
  %g.1 = f32[8] all-gather(%p), channel_id=3, GROUPS
  ROOT %c.1 = (f32[4], f32[8]) custom-call(%g.1), custom_call_target="AsyncCollectiveStart"
}

%carry (p.2: f32[4]) -> f32[4] {
  %p.2 = f32[4] parameter(0)
  %g.2 = f32[8] all-gather(%p.2), channel_id=3, GROUPS
  ROOT %product = f32[4] convolution(%p.2, %p.2)
}

%done (p.3: f32[4]) -> f32[8] {
  %p.3 = f32[4] parameter(0)
  %g.3 = f32[8] all-gather(%p.3), channel_id=3, GROUPS
  ROOT %c.3 = f32[8] custom-call(%g.3), custom_call_target="AsyncCollectiveDone"
}

%turn (y: f32[4]) -> f32[4] {
  %y = f32[4] parameter(0)
  ROOT %work = f32[4] fusion(%y), kind=kOutput, calls=%carry, \
backend_config={"window_config":{"estimated_cycles":"5"}}
}

%test (z: f32[4]) -> pred[] {
  %z = f32[4] parameter(0)
  ROOT %t = pred[] custom-call(), custom_call_target="Mine"
}

ENTRY %main (x: f32[4]) -> f32[8] {
  %x = f32[4] parameter(0)
  %begin = (f32[4], f32[8]) fusion(%x), kind=kCustom, calls=%start
  %window = f32[4] while(%x), condition=%test, body=%turn, \
backend_config={"known_trip_count":{"n":"8"}}
  ROOT %end = f32[8] fusion(%window), kind=kCustom, calls=%done
}
""".replace("GROUPS", 'replica_groups={{0,1}}, frontend_attributes={chain_id="1"}')


@pytest.mark.parametrize(("wire", "exposed"), [(30, 0), (50, 10)])
def test_fused_collective_that_a_loop_of_products_carries_is_one(wire: int, exposed: int) -> None:
    schedule = read_timeline(
        CARRIED, {"data": 2}, clock=1.0, wire=on_all_links(lambda collective: wire)
    )
    (gather,) = schedule.collectives
    assert (gather.collective.name, gather.collective.times) == ("begin", 1)
    assert gather.cycles_between == 40
    assert schedule.exposed_seconds == exposed


def test_what_is_carried_into_the_next_turn_is_counted_and_said() -> None:
    begun = PAIR.replace("ROOT %end = f32[8] async-done(%more)", "ROOT %end = f32[4] copy(%work)")
    schedule = read(begun, {"data": 2})
    assert schedule.num_carried == 1
    assert schedule.collectives[0].cycles_between == 77  # It ends with the turn.


def test_work_without_an_estimate_is_listed() -> None:
    large = '  %large = f32[1048576] custom-call(%x), custom_call_target="Mine"\n'
    text = PAIR.replace("  %busy =", f"{large}  %busy =")
    assert read(text, {"data": 2}).unestimated == {"custom-call Mine": 1}


def test_branch_that_computes_the_most_counts() -> None:
    text = """HloModule m, is_scheduled=true, num_partitions=2

%small (a: f32[4]) -> f32[4] {
  %a = f32[4] parameter(0)
  ROOT %r = f32[4] all-reduce(%a), channel_id=1, replica_groups={}
}

%large (b: f32[4]) -> f32[4] {
  %b = f32[4] parameter(0)
  ROOT %n = f32[4] negate(%b), backend_config={"window_config":{"estimated_cycles":"9"}}
}

ENTRY %main (p: pred[], x: f32[4]) -> f32[4] {
  %p = pred[] parameter(0)
  %x = f32[4] parameter(1)
  ROOT %c = f32[4] conditional(%p, %x, %x), true_computation=%small, false_computation=%large
}
"""
    schedule = read(text, {"data": 2})
    assert schedule.collectives == ()
    assert schedule.compute_cycles == 9
    # Of branches that compute alike, the one that sends.
    equal = read(text.replace('"9"', '"0"'), {"data": 2})
    assert [each.kind for each in sent(equal)] == ["all_reduce"]


def test_the_clock_runs_in_the_ticks_in_which_any_stage_computes() -> None:
    text = """HloModule m, is_scheduled=true, num_partitions=2

%more (e: f32[4]) -> f32[4] {
  ROOT %e = f32[4] parameter(0)
}

%work (a: f32[4]) -> f32[4] {
  %a = f32[4] parameter(0)
  %s = f32[4] all-reduce(%a), channel_id=1, replica_groups={}
  ROOT %n = f32[4] negate(%s), backend_config={"window_config":{"estimated_cycles":"8"}}
}

%turn (x: f32[4]) -> f32[4] {
  %x = f32[4] parameter(0)
  %p = pred[] custom-call(), custom_call_target="Mine"
  ROOT %c = f32[4] conditional(%p, %x, %x), true_computation=%work, false_computation=%more, SCOPE
}

%test (y: f32[4]) -> pred[] {
  %y = f32[4] parameter(0)
  ROOT %t = pred[] custom-call(), custom_call_target="Mine"
}

ENTRY %main (z: f32[4]) -> f32[4] {
  %z = f32[4] parameter(0)
  ROOT %w = f32[4] while(%z), condition=%test, body=%turn, LOOP
}
"""
    text = text.replace("LOOP", 'backend_config={"known_trip_count":{"n":"8"}}')
    scope = 'metadata={op_name="jit(f)/while/body/ticks_2_3_in_4_of_8/cond"}'
    in_ticks = read(text.replace("SCOPE", scope), {"data": 2})
    assert [one.times for one in sent(in_ticks)] == [4]
    assert in_ticks.compute_cycles == 4 * 8
    always = read(text.replace("SCOPE", ""), {"data": 2})
    assert [one.times for one in sent(always)] == [8]
    assert always.compute_cycles == 8 * 8


def test_what_sends_an_unknown_amount_is_refused() -> None:
    text = PAIR.replace("f32[4] negate(%x)", "f32[4] collective-broadcast(%x)")
    with pytest.raises(ValueError, match=r"read_timeline: .* contains collective-broadcast"):
        read(text, {"data": 2})
    # Nobody knows how long a host takes, so what it is sent is refused here too.
    text = PAIR.replace("f32[4] negate(%x)", "f32[4] send(%x), is_host_transfer=true")
    with pytest.raises(ValueError, match=r"read_timeline: .* contains send"):
        read(text, {"data": 2})


def test_end_of_what_the_turn_before_began_is_passed_over() -> None:
    done = "  %late = f32[8] all-gather-done(%elsewhere)\n"
    text = PAIR.replace("  %busy =", f"{done}  %busy =")
    assert read(text, {"data": 2}) == read(PAIR, {"data": 2})


def test_loop_that_does_not_count_is_refused() -> None:
    loop = """
%test (c: f32[4]) -> pred[] {
  %c = f32[4] parameter(0)
  ROOT %more = pred[] custom-call(%c), custom_call_target="More"
}

%turn (t: f32[4]) -> f32[4] {
  ROOT %t = f32[4] parameter(0)
}

ENTRY"""
    while_ = '%while.1 = f32[4] while(%x), condition=%test, body=%turn, metadata={op_name="scan"}'
    text = PAIR.replace("\nENTRY", loop).replace("  %busy =", f"  {while_}\n  %busy =")
    with pytest.raises(ValueError, match=r"loop while\.1 \(scope: scan\).*Write it as a jax\.lax"):
        read(text, {"data": 2})


# How long it takes, against arithmetic by hand: a cycle is a second.

Event = int | str | tuple[int, list["Event"]]


def program(events: list[Event]) -> str:
    """A program of one device that computes so many cycles, starts and waits, and repeats events.

    An event is a number of cycles, `start 0`, `wait 0`, or turns with the events of one.
    """
    computations: list[str] = []

    def written(name: str, events: list[Event]) -> None:
        lines = ["%x = f32[8] parameter(0)"]
        for i, event in enumerate(events):
            if isinstance(event, int):
                estimate = f'backend_config={{"window_config":{{"estimated_cycles":"{event}"}}}}'
                lines.append(f"%c{i} = f32[8] negate(%x), {estimate}")
            elif isinstance(event, tuple):
                turns, body = event
                written(f"{name}.{i}", body)
                known = f'backend_config={{"known_trip_count":{{"n":"{turns}"}}}}'
                loop = f"condition=%silent, body=%{name}.{i}, {known}"
                lines.append(f"%w{i} = f32[8] while(%x), {loop}")
            elif event.startswith("start"):
                gather = "all-gather-start(%x), channel_id=1, replica_groups={}"
                lines.append(f"%g{event[6:]} = f32[16] {gather}")
            else:
                lines.append(f"%d{i} = f32[16] all-gather-done(%g{event[5:]})")
        head = "ENTRY %main" if name == "main" else f"%{name}"
        computations.append(f"{head} (x: f32[8]) -> f32[8] {{\n  " + "\n  ".join(lines) + "\n}\n")

    written("silent", [])
    written("main", events)
    return "HloModule m, is_scheduled=true, num_partitions=2\n\n" + "\n".join(computations)


def times(*events: Event, wire: list[float]) -> Timeline:
    """Follows events whose collectives take so long."""
    return read_timeline(
        program(list(events)),
        {"data": 2},
        clock=1.0,
        wire=on_all_links(lambda collective: wire[int(collective.name[1:])]),
    )


def test_collective_that_is_waited_for_at_once_is_exposed() -> None:
    found = times(3, "start 0", "wait 0", 4, wire=[5])
    assert (found.compute_seconds, found.exposed_seconds, found.step_seconds) == (7, 5, 12)
    assert found.collectives[0].hidden_seconds == 0


@pytest.mark.parametrize(("compute", "exposed"), [(0, 5), (2, 3), (5, 0), (9, 0)])
def test_compute_between_hides_as_much_as_there_is(compute: int, exposed: int) -> None:
    found = times("start 0", compute, "wait 0", wire=[5])
    assert found.exposed_seconds == exposed
    assert found.hidden_seconds == 5 - exposed


def test_links_carry_one_collective_at_a_time() -> None:
    # The second is on the wire from 5 to 9, and two seconds of compute are over at 2.
    found = times("start 0", "start 1", 2, "wait 1", "wait 0", wire=[5, 4])
    assert found.exposed_seconds == 7
    assert found.step_seconds == 9
    # One that is waited for at once waits for that before it as well.
    found = times("start 0", "start 1", "wait 1", 3, "wait 0", wire=[5, 4])
    assert found.step_seconds == 12


def test_turns_of_a_loop_add_up_also_of_loops_in_loops() -> None:
    inner: Event = (3, [2, "start 0", 1, "wait 0"])
    found = times((2, [inner, 10]), 7, wire=[4])
    assert found.compute_seconds == 2 * (3 * 3 + 10) + 7
    assert found.exposed_seconds == 6 * 3
    assert found.collectives[0].seconds == 24
    assert found.collectives[0].hidden_seconds == 6


def test_loop_runs_behind_what_was_begun_before_it_and_its_collectives_delay_what_follows() -> None:
    found = times("start 0", (4, [1]), "wait 0", wire=[5])
    assert found.exposed_seconds == 1
    assert found.collectives[0].cycles_between == 4
    found = times((2, ["start 1", "wait 1"]), "start 0", "wait 0", wire=[5, 3])
    assert found.step_seconds == 11


@pytest.mark.parametrize("compute", [0, 3, 7])
def test_rounding_hides_nothing(compute: int) -> None:
    found = times(compute, (10, [compute, "start 0", "wait 0"]), wire=[0.1])
    assert found.hidden_seconds == 0


def calling(events: list[Event], branch: list[Event]) -> str:
    """A program whose computation of no cycles is a call of other events."""
    called = program(branch).partition("\n\n")[2].replace("ENTRY %main", "%branch")
    text = program(events).replace("\nENTRY", f"\n{called}\nENTRY")
    return re.sub(r'negate\(%x\).*"0"}}', "call(%x), to_apply=%branch", text)


@pytest.mark.parametrize("between", [2, 4, 9])
def test_what_is_called_takes_the_time_of_its_caller(between: int) -> None:
    text = calling([3, "start 0", 0, 1, "wait 0"], [between - 1])
    found = read_timeline(text, {"data": 2}, clock=1.0, wire=on_all_links(lambda collective: 5.0))
    assert found.compute_cycles == 3 + between
    assert found.exposed_seconds == max(0, 5 - between)


def test_what_is_called_shares_the_links_of_its_caller() -> None:
    # Each takes 5 seconds: the call's own ends at 3 + 10, the last at 3 + 15.
    text = calling([3, "start 0", 0, "start 1", "wait 1", "wait 0"], ["start 7", 2, "wait 7"])
    found = read_timeline(text, {"data": 2}, clock=1.0, wire=on_all_links(lambda collective: 5.0))
    assert found.step_seconds == 18
    assert [one.cycles_between for one in found.collectives] == [2, 2, 0]


def test_what_is_noted_of_a_loop_counts_as_often_as_it_turns() -> None:
    large = '  %large = f32[1048576] custom-call(%x), custom_call_target="Mine"\n'
    text = program([(3, ["start 0", 2])]).replace("  %c1", f"{large}  %c1")
    found = read(text, {"data": 2})
    assert found.unestimated == {"custom-call Mine": 3}
    assert found.num_carried == 1


def test_kernels_of_a_loop_count_as_often_as_it_turns() -> None:
    metadata = 'metadata={op_name="scan/mine/pallas_call"}'
    kernel = f'  %large = f32[8] custom-call(%x), custom_call_target="Mine", {metadata}\n'
    text = program([1, (3, [2])]).replace("  %c0", f"{kernel}  %c0")
    found = read_timeline(
        text,
        {"data": 2},
        clock=1.0,
        wire=on_all_links(lambda collective: 0.0),
        kernel_seconds=lambda one, _: 7.0 if one.target else None,
    )
    # Each computation of the program has one, and the loop's runs three times.
    assert found.kernels == (KernelRuns("mine", 4, 28.0),)
    assert found.compute_seconds == 1 + 7 + 3 * (2 + 7)


# -------------------------------------------------------------------------------------------------
# Transfers between slices: how a program of several slices is read, and how long they take.
# `data/tpu/two_slices_v5e_2x2` is a scan of 3 layers of one product, compiled by libtpu 0.0.52 for
# two slices. Backward the gradient `[1024, 1024]` is scattered over four chips in bfloat16, and
# its mean over the slices is taken in float32. XLA sends the mean of a layer while the next layer
# computes: it runs 2 of the 3 transfers in a loop, and the last one behind the loop.


TEXT = (Path(__file__).parent / "tpu" / "two_slices_v5e_2x2.txt").read_text(encoding="utf-8")
MESH = {"replica": 2, "data": 4}
SQUARE = '"{1,2,3,4}x{0:1}"'
LISTED = "{{100000,300000},{100001,300001},{200000,400000},{200001,400001}}"
PERMUTED = "{{100000->200000},{200000->100000},{100001->200001},{200001->100001}}"


def read_slices(seconds: float, *, text: str = TEXT, in_slice: float = 0.0) -> Timeline:
    return read_timeline(
        text,
        MESH,
        clock=1.5e9,
        wire=on_all_links(lambda collective: in_slice),
        between_slices=lambda transfer: seconds,
    )


def test_transfers_are_collectives_over_the_axes_that_cross_slices() -> None:
    found = [x.collective for x in read_slices(0.0).collectives if x.network == SLICES]
    assert {(x.kind, x.axes, x.group_size, x.dtypes) for x in found} == {
        ("all_reduce", ("replica",), 2, ("f32",))
    }
    assert sum(x.times for x in found) == 3
    assert sum(x.bytes_sent for x in found) == 3 * 1024 * 1024 // 4 * 4
    others = [x.collective for x in read_slices(0.0).collectives if x.network != SLICES]
    assert {(x.kind, x.axes) for x in others} == {("reduce_scatter", ("data",))}


def test_a_transfer_runs_behind_the_next_layer_but_the_last_is_exposed() -> None:
    seconds = 10e-6
    timeline = read_slices(seconds)
    *in_loop, last = [x for x in timeline.collectives if x.network == SLICES]
    assert [x.is_async for x in in_loop] == [True] * len(in_loop)
    assert last.hidden_seconds < seconds / 2
    assert timeline.exposed_seconds == pytest.approx(seconds - last.hidden_seconds)
    # A layer computes for less than a second, so nothing hides transfers of that length.
    assert read_slices(1.0).exposed_seconds > 2.9


def test_slices_have_a_clock_of_their_own() -> None:
    """Collectives in a slice do not wait for transfers, which take long here, nor the reverse."""
    scatters = [x for x in read_slices(5e-6, in_slice=5e-6).collectives if x.network != SLICES]
    alone = [x for x in read_slices(0.0, in_slice=5e-6).collectives if x.network != SLICES]
    assert [x.hidden_seconds for x in scatters] == [x.hidden_seconds for x in alone]


def send(target: str, kind: str = "ALL_REDUCE") -> Instruction:
    attributes = (
        '_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target='
        f'{target},_xla_megascale_transfer_type="{kind}"}}'
    )
    return Instruction("send.1", "(f32[8], u32[], token[])", "send", ("x", "token"), attributes)


def test_groups_are_read_in_each_form() -> None:
    """As libtpu 0.0.52 writes them for four slices, here of two chips."""
    assert slice_groups(send(SQUARE), 2) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert slice_groups(send(LISTED), 2) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert slice_groups(send(PERMUTED), 2) == ((0, 2), (2, 0), (1, 3), (3, 1))


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (lambda: slice_groups(send("everything"), 2), "send.1 has the target everything"),
        (lambda: kind_of_transfer(send(SQUARE, "ONE_TO_ALL")), "of type 'ONE_TO_ALL', expected"),
    ],
)
def test_other_forms_are_refused(of, words) -> None:
    with pytest.raises(ValueError, match=words):
        of()


def test_without_a_clock_of_slices_transfers_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("read_timeline: the program contains send")):
        read_timeline(TEXT, MESH, clock=1.0, wire=on_all_links(lambda collective: 0.0))
