"""What differs between two ledgers is found, and what does not differ is not."""

import copy
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from manualpar.inspect.ledger_difference import NOTHING, bytes_more, compare_ledgers


def _collective(purpose: str, module: str, **fields) -> dict:
    return {
        "kind": "all_gather",
        "axes": "data",
        "purpose": purpose,
        "module": module,
        "times": 2,
        "bytes": 64,
        "shape": [4, 2],
        "dtype": "float32",
        **fields,
    }


def _ledger(*collectives: dict, **fields) -> dict:
    return {
        "bytes": {"total": sum(found["bytes"] for found in collectives)},
        "counts": {"all_gather": sum(found["times"] for found in collectives)},
        "collectives": list(collectives),
        "flops": {"total": 30, "by_phase": {"forward": 10, "backward": 20}},
        "memory": {"parameters": 100, "peak": 100},
        "compiled": None,
        **fields,
    }


BEFORE = _ledger(
    _collective("gather_params", "up"),
    _collective("gather_params", "up", shape=[2]),
    _collective("gather_params", "down"),
    _collective("scatter_gradients", "up", kind="reduce_scatter"),
    _collective("sync_metrics", "", kind="all_reduce", bytes=3.5),
)


def test_nothing_differs_from_itself_in_whatever_order():
    other = json.loads(json.dumps(BEFORE))
    other["collectives"].reverse()
    assert compare_ledgers(BEFORE, other).is_empty


def test_added_removed_and_changed_are_told_apart_the_largest_first():
    after = _ledger(
        _collective("gather_params", "up", dtype="bfloat16", bytes=32),
        _collective("gather_params", "up", shape=[2]),
        _collective("gather_params", "down"),
        _collective("regather_params", "up", bytes=500),
        _collective("sync_metrics", "", kind="all_reduce", bytes=3.5),
    )
    found = compare_ledgers(BEFORE, after).collectives
    assert list(found) == [
        ("regather_params", "up", "all_gather", "data"),
        ("scatter_gradients", "up", "reduce_scatter", "data"),
        ("gather_params", "up", "all_gather", "data"),
    ]
    added, removed, changed = found.values()
    assert (added[0], bytes_more(*added)) == (NOTHING, 500)
    assert (removed[1], bytes_more(*removed)) == (NOTHING, -64)
    assert bytes_more(*changed) == -32
    before, after = changed
    assert before.dtypes == ("float32",)
    assert after.dtypes == ("bfloat16", "float32")
    assert after.times == 4


@pytest.mark.parametrize(
    "fields", [{"times": 3}, {"dtype": "float16"}, {"shape": [8]}, {"bytes": 65}]
)
def test_whatever_differs_is_a_change(fields):
    after = copy.deepcopy(BEFORE)
    after["collectives"][2] |= fields
    [(names, changed)] = compare_ledgers(BEFORE, after).collectives.items()
    assert names[1] == "down"
    assert NOTHING not in changed


@pytest.mark.parametrize("fields", [{"axes": "replica"}, {"module": "gate"}, {"purpose": "other"}])
def test_what_is_called_something_else_is_another(fields):
    after = copy.deepcopy(BEFORE)
    after["collectives"][2] |= fields
    found = compare_ledgers(BEFORE, after).collectives
    assert [pair.index(NOTHING) for pair in found.values()] == [0, 1]


def test_numbers_stand_side_by_side_and_unknown_ones_are_none():
    compiled = {"bytes": 7, "counts": {"all_gather": 1}, "temporaries": 40, "peak": 140}
    after = BEFORE | {"memory": None, "compiled": compiled}
    found = compare_ledgers(BEFORE, after)
    assert found.totals["bytes sent"] == (259.5, 259.5)
    assert found.totals["FLOPs backward"] == (20, 20)
    assert found.totals["memory: peak"] == (100, None)
    assert found.totals["compiled: temporaries"] == (None, 40)
    assert found.totals["compiled: collectives"] == (None, 1)
    assert not found.is_empty


collectives = st.builds(
    _collective,
    purpose=st.sampled_from(["gather_params", "other"]),
    module=st.sampled_from(["up", "down"]),
    bytes=st.integers(0, 9999).map(lambda eighths: eighths / 8),
)


@hypothesis.given(st.lists(collectives), st.lists(collectives))
def test_the_changes_add_up_to_the_difference_of_the_totals(first, second):
    before, after = _ledger(*first), _ledger(*second)
    found = compare_ledgers(before, after)
    back = compare_ledgers(after, before)
    more = sum(bytes_more(*pair) for pair in found.collectives.values())
    assert more == after["bytes"]["total"] - before["bytes"]["total"]
    assert more == -sum(bytes_more(*pair) for pair in back.collectives.values())
