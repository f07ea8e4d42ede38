"""The schedules: their events, bubbles and slots against formulas."""

import contextlib
import dataclasses
import itertools
import random

import numpy as np
import pytest

from manualpar.layers.pipeline.schedules import (
    Costs,
    Event,
    _table_of_events,
    check_table,
    describe_schedule,
    make_table,
)

SIZES = [*itertools.product((1, 2, 4), (1, 2, 3, 5, 8), (1, 2, 3))]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_is_that_of_the_formula(schedule):
    for stages, microbatches, chunks in SIZES:
        table = make_table(schedule, stages, microbatches, chunks)
        forward_ticks = chunks * microbatches + stages - 1
        # With fewer microbatches than stages all wait for the first to come around.
        forward_ticks += (chunks - 1) * max(stages - microbatches, 0)
        expected = 1 - chunks * microbatches / forward_ticks
        assert table.bubble == pytest.approx(expected), (stages, microbatches, chunks)
        assert make_table(
            schedule, stages, microbatches, chunks, backward=False
        ).bubble == pytest.approx(expected)


def test_1f1b_keeps_as_many_inputs_however_many_microbatches():
    for stages, rounds, chunks in itertools.product((1, 2, 4), (2, 3), (1, 2, 3)):
        table = make_table("1f1b", stages, rounds * stages, chunks)
        most = (chunks + 1) * stages - 1
        assert (table.activation_slots, table.gradient_slots) == (most, 1)
        assert table.in_flight == tuple(most - 2 * stage for stage in range(stages))


def test_gpipe_keeps_all_inputs_and_gradients():
    for stages, microbatches, chunks in SIZES:
        table = make_table("gpipe", stages, microbatches, chunks)
        assert table.activation_slots == chunks * microbatches
        assert set(table.in_flight) == {chunks * microbatches}
        assert chunks > 1 or table.gradient_slots == microbatches


def test_there_are_as_many_slots_as_values_at_one_time():
    """Counted tick by tick; the fewest possible."""
    for stages, microbatches, chunks in SIZES:
        table = make_table("1f1b", stages, microbatches, chunks)
        tick = {event[2:]: event.tick for event in table.events}
        last = stages * chunks - 1
        inputs, gradients = np.zeros((2, 3 * table.num_ticks, stages), int)
        for (kind, m, k), t in tick.items():
            end = 3 * tick["B", m, k] + 2
            if kind == "F":  # The phases of tick t are 3 t, 3 t + 1 and, for the hop, 3 t + 2.
                begin = 3 * tick["F", m, k - 1] + 2 if k else 3 * t
                inputs[begin:end, k % stages] += 1
            else:
                begin = 3 * tick["B", m, k + 1] + 2 if k < last else 3 * tick["F", m, k]
                gradients[begin:end, k % stages] += 1
        assert table.activation_slots == inputs.max()
        assert table.gradient_slots == gradients.max()


def test_rows_of_two_stages():
    table = make_table("1f1b", 2, 2)
    assert table.events == (
        Event(0, 0, "F", 0, 0),
        Event(1, 0, "F", 1, 0),
        Event(1, 1, "F", 0, 1),
        Event(1, 1, "B", 0, 1),
        Event(2, 0, "B", 0, 0),
        Event(2, 1, "F", 1, 1),
        Event(2, 1, "B", 1, 1),
        Event(3, 0, "B", 1, 0),
    )
    rows = {name: row.tolist() for name, row in table.rows.items()}
    none = -1
    assert rows == {
        "forward_microbatch": [[0, none], [1, 0], [none, 1], [none, none]],
        "forward_chunk": [[0, none], [0, 0], [none, 0], [none, none]],
        "forward_slot": [[0, none], [1, 0], [none, 0], [none, none]],
        "is_first": [[1, 0], [1, 0], [0, 0], [0, 0]],
        "is_last": [[0, 0], [0, 1], [0, 1], [0, 0]],
        "last_gradient_slot": [[none, none], [none, 0], [none, 0], [none, none]],
        "arriving_slot": [[none, 0], [none, 0], [none, none], [none, none]],
        "backward_microbatch": [[none, none], [none, 0], [0, 1], [1, none]],
        "backward_chunk": [[none, none], [none, 0], [0, 0], [0, none]],
        "backward_slot": [[none, none], [none, 0], [0, 0], [1, none]],
        "gradient_slot": [[none, none], [none, 0], [0, 0], [0, none]],
        "backward_is_first": [[0, 0], [0, 0], [1, 0], [1, 0]],
        "arriving_gradient_slot": [[none, none], [0, none], [0, none], [none, none]],
    }


def test_without_backward_passes_one_input_is_kept():
    for schedule, stages in itertools.product(("gpipe", "1f1b"), (1, 2, 4)):
        table = make_table(schedule, stages, 2 * stages, 3, backward=False)
        assert (table.activation_slots, table.gradient_slots) == (1, 0)
        assert not table.has_backward
        assert set(table.in_flight) == {1}
        assert (table.rows["backward_microbatch"] == -1).all()
        assert (table.rows["last_gradient_slot"] == -1).all()


def test_idle_shares_count_what_is_around_the_layers():
    table = make_table("1f1b", 2, 2)
    costs = Costs(forward=1, backward=3, before=0.5, before_backward=0.25, after=10)
    np.testing.assert_array_equal(
        table.busy(costs),
        [
            [[1.5, 0], [1.5, 11], [0, 11], [0, 0]],
            [[0, 0], [0, 3], [3.25, 3], [3.25, 0]],
        ],
    )
    np.testing.assert_array_equal(table.tick_times(costs), [1.5, 14, 14, 3.25])
    assert table.idle_share(costs) == pytest.approx(1 - (9.5 + 28) / 2 / (1.5 + 14 + 14 + 3.25))


def test_where_a_row_has_something():
    table = make_table("1f1b", 2, 2)
    assert table.is_run("is_first").tolist() == [[1, 0], [1, 0], [0, 0], [0, 0]]
    assert table.is_run("forward_slot").tolist() == [[1, 0], [1, 1], [0, 1], [0, 0]]
    together = table.is_run("forward_slot", together=True)
    assert together.tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]


def test_tables_are_equal_where_their_events_are():
    assert make_table("1f1b", 2, 3) == make_table("1f1b", 2, 3)
    assert hash(make_table("1f1b", 2, 3)) == hash(make_table("1f1b", 2, 3))
    assert make_table("1f1b", 2, 3) != make_table("1f1b", 2, 4)


# -------------------------------------------------------------------------------------------------
# The check of tables refuses every change that means something.


SMALL = [
    ("1f1b", 3, 4, 1, True),
    ("1f1b", 2, 3, 2, True),
    ("gpipe", 2, 3, 1, True),
    ("1f1b", 3, 3, 2, False),
]


def _make(schedule, stages, microbatches, chunks, backward):
    return make_table(schedule, stages, microbatches, chunks, backward=backward)


def _change_rows(table, name, row):
    return dataclasses.replace(table, rows={**table.rows, name: row})


def test_every_table_is_accepted():
    sizes = itertools.product((1, 2, 3), (1, 2, 3, 7), (1, 2, 3), (True, False))
    for size in sizes:
        for schedule in ("gpipe", "1f1b"):
            check_table(_make(schedule, *size))


@pytest.mark.parametrize("size", SMALL)
def test_every_changed_entry_of_a_row_is_refused(size):
    table = _make(*size)
    for name, row in table.rows.items():
        for place in np.ndindex(row.shape):
            for value in {-1, 0, 1, row[place] - 1, row[place] + 1} - {row[place]}:
                if _means_nothing(table, name, place, value):
                    continue
                changed = row.copy()
                changed[place] = value
                with pytest.raises(ValueError, match=f"^{table.name} table"):
                    check_table(_change_rows(table, name, changed))


def _means_nothing(table, name, place, value):
    """Without backward passes nobody reads where the input of the first chunk would be kept."""
    is_free = not table.has_backward and table.rows["is_first"][place]
    return is_free and name == "forward_slot" and 0 <= value < table.activation_slots


@pytest.mark.parametrize("size", SMALL)
def test_every_changed_event_is_refused(size):
    table = _make(*size)
    for index, event in enumerate(table.events):
        others = [event._replace(kind="FB"[event.kind == "F"])]
        for field in ("tick", "stage", "microbatch", "chunk"):
            value = getattr(event, field)
            others += [event._replace(**{field: value + by}) for by in (-1, 1)]
        for other in (*([other] for other in others), [], [event, event]):
            events = (*table.events[:index], *other, *table.events[index + 1 :])
            with pytest.raises(ValueError, match="is not in both the events and the rows"):
                check_table(dataclasses.replace(table, events=events))


@pytest.mark.parametrize("size", SMALL)
def test_slots_are_as_many_as_it_takes(size):
    table = _make(*size)
    for field, by in itertools.product(("activation_slots", "gradient_slots"), (-1, 1)):
        with pytest.raises(ValueError, match=f"into slot|{field}=.* slots are used at a time"):
            check_table(dataclasses.replace(table, **{field: getattr(table, field) + by}))


def test_an_input_over_one_that_is_needed_is_refused_by_its_name():
    table = make_table("1f1b", 2, 4)
    slots = table.rows["forward_slot"].copy()
    slots[1, 0] = slots[0, 0]
    with pytest.raises(
        ValueError,
        match="1f1b table, tick 1, stage 0: puts microbatch 1 of chunk 0 into slot 0, where "
        "microbatch 0 of chunk 0 is still needed",
    ):
        check_table(_change_rows(table, "forward_slot", slots))


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("forward_microbatch", 3, "there is no F of microbatch 3, chunk 0 of the stage"),
        ("forward_chunk", 1, "there is no F of microbatch 1, chunk 1 of the stage"),
        ("forward_microbatch", 0, "F of microbatch 0 of chunk 0 comes again"),
    ],
)
def test_a_pass_that_there_is_not_is_refused_by_its_name(name, value, sentence):
    table = make_table("1f1b", 2, 3)
    row = table.rows[name].copy()
    row[1, 0] = value
    with pytest.raises(ValueError, match=f"1f1b table, tick 1, stage 0: {sentence}"):
        check_table(_change_rows(table, name, row))


def test_a_backward_pass_before_its_forward_pass_is_refused_by_its_name():
    table = make_table("1f1b", 1, 2)
    row = table.rows["backward_microbatch"].copy()
    row[0, 0] = 1
    with pytest.raises(ValueError, match="B of microbatch 1 of chunk 0 comes before its F"):
        check_table(_change_rows(table, "backward_microbatch", row))


def test_a_microbatch_that_nobody_computes_is_refused():
    events = make_table("1f1b", 2, 2).events
    with pytest.raises(ValueError, match="8 F and B in all, expected 12"):
        _table_of_events("changed", events, 2, 3, 1)


def test_rows_of_another_form_are_refused():
    table = make_table("1f1b", 2, 3)
    fewer = {name: row for name, row in table.rows.items() if name != "is_last"}
    with pytest.raises(ValueError, match=r"rows are .*, expected "):
        check_table(dataclasses.replace(table, rows=fewer))
    row = table.rows["is_last"]
    with pytest.raises(ValueError, match=r"rows\['is_last'\] is int64\[5, 2\], expected int32"):
        check_table(_change_rows(table, "is_last", row.astype(np.int64)))
    with pytest.raises(ValueError, match=r"rows\['is_last'\] is int32\[4, 2\], expected int32"):
        check_table(_change_rows(table, "is_last", row[:-1]))


def _is_possible(events, stages, microbatches, chunks):
    """Whether events depend on earlier ones only, each once, and at most one F and B at a time."""
    last = stages * chunks - 1
    tick = {event[2:]: event.tick for event in events}
    places = {event[:3] for event in events}
    if not len(events) == len(tick) == len(places) == 2 * (last + 1) * microbatches:
        return False
    return all(
        (k == 0 or tick["F", m, k - 1] < t)
        if kind == "F"
        else tick["F", m, k] <= t and (k == last or tick["B", m, k + 1] < t)
        for (kind, m, k), t in tick.items()
    )


def test_orders_that_contradict_what_depends_on_what_are_refused():
    """Two events change places, or one moves; slots are found anew where there are any."""
    chance = random.Random(0)
    outcomes = {True: 0, False: 0}
    for _ in range(300):
        stages, microbatches, chunks = (chance.randint(1, most) for most in (3, 4, 2))
        schedule = chance.choice(["gpipe", "1f1b"])
        events = list(make_table(schedule, stages, microbatches, chunks).events)
        one, two = chance.randrange(len(events)), chance.randrange(len(events))
        first, second = events[one], events[two]
        if chance.random() < 0.5:
            events[one] = first._replace(tick=max(first.tick + chance.choice([-1, 1, 2]), 0))
        elif (first.stage, first.kind) == (second.stage, second.kind):
            events[one] = second._replace(tick=first.tick)
            events[two] = first._replace(tick=second.tick)
        expected = _is_possible(events, stages, microbatches, chunks)
        outcomes[expected] += 1
        is_right = contextlib.nullcontext()
        is_refused = pytest.raises(ValueError, match=r"^changed table")
        with is_right if expected else is_refused:
            _table_of_events("changed", events, stages, microbatches, chunks)
    assert min(outcomes.values()) > 50


# -------------------------------------------------------------------------------------------------
# Schedules as text.


INTERLEAVED = """\
1f1b: 2 stages of 2 chunks, 4 microbatches, 12 ticks, bubble 11.1%
slots: 5 for inputs, 1 for gradients; inputs in flight by stage: 5 3

tick       0  1  2  3  4  5  6  7  8  9 10 11
stage 0 F 0a 1a 0b 1b 2a 3a 2b 3b  .  .  .  .
        B  .  .  .  . 0b 1b 0a 1a 2b 3b 2a 3a
stage 1 F  . 0a 1a 0b 1b 2a 3a 2b 3b  .  .  .
        B  .  .  . 0b 1b 0a 1a 2b 3b 2a 3a  ."""


def test_a_line_for_what_each_stage_does():
    assert describe_schedule(make_table("1f1b", 2, 4, 2)) == INTERLEAVED


def test_ticks_that_do_not_fit_follow_below():
    lines = describe_schedule(make_table("gpipe", 2, 3), width=17).splitlines()
    assert lines[3:] == [
        "tick      0 1 2 3",
        "stage 0 F 0 1 2 .",
        "        B . . . .",
        "stage 1 F . 0 1 2",
        "        B . . . 0",
        "",
        "tick      4 5 6",
        "stage 0 F . . .",
        "        B 0 1 2",
        "stage 1 F . . .",
        "        B 1 2 .",
    ]


def test_a_forward_pass_alone_has_one_line():
    lines = describe_schedule(make_table("1f1b", 2, 2, backward=False)).splitlines()
    assert lines[3:] == ["tick      0 1 2", "stage 0 F 0 1 .", "stage 1 F . 0 1"]


def test_more_chunks_than_letters_have_numbers():
    text = describe_schedule(make_table("1f1b", 1, 1, 27), width=10_000)
    assert text.splitlines()[4].split()[3:6] == ["0.0", "0.1", "0.2"]
