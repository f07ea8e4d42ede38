"""The hub with simulated processes: what is counted is what the table says."""

import math

import pytest

from benchmarks.hub_scale import SIZES, beat_bytes, count_messages, measure, measured_rows


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, 64])
def test_the_counted_messages_are_those_of_the_table(count):
    scenes = measure(count, seconds=3.0, limit=100.0)
    expected = count_messages(count)
    kinds = {name: scene.get("kinds", {}) for name, scene in scenes.items()}
    for name in ("connect", "connect again", "all back"):
        # A hello of each process is a message too, which the hub receives.
        answered = kinds[name]["challenge"] + kinds[name]["admitted"]
        assert answered + count == expected["connect"]
    assert kinds["facts"]["agreed"] + count == expected["facts"]
    shared = kinds["share"]["shared"] + kinds["share"]["shared all"]
    assert shared + count == expected["share"]
    assert kinds["one lost"]["lost"] == expected["one lost"]
    beats = kinds["beats"]["beat"]
    assert 2 * count <= beats <= 4 * count
    assert scenes["beats"]["bytes"] <= beats * beat_bytes(count)
    assert len(measured_rows(scenes)) == len(scenes) + 2


def test_nothing_grows_faster_than_n_log_n():
    for size in SIZES:
        for name, number in count_messages(size).items():
            assert number <= 3 * size * math.log2(size), name
        assert beat_bytes(size) < 600
