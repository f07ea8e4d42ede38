"""The schedules: their events, bubbles and slots against closed forms."""

import itertools

import numpy as np
import pytest

from manualpar.layers.pipeline.schedules import Costs, Event, make_table

SIZES = [*itertools.product((1, 2, 4), (1, 2, 3, 5, 8), (1, 2, 3))]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_is_that_of_the_closed_form(schedule):
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
