"""The check of tables refuses every change that means something."""

import contextlib
import dataclasses
import itertools
import random

import numpy as np
import pytest

from manualpar.layers.pipeline.schedules import _table_of_events, check_table, make_table

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
