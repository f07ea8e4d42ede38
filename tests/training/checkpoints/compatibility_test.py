"""Which changes of the config a run may go on with."""

import json

import pytest

from manualpar.training.checkpoints import check_resumable
from manualpar.training.checkpoints.compatibility import ADDED, REMOVED, RENAMED

SAVED = {
    "seed": 0,
    "data.source": "text",
    "data.batch_size": 32,
    "data.prefetch": 2,
    "model.hidden_size": 128,
    "model.dropout_rate": 0.0,
    "parallel.mesh": {"data": 8},
    "parallel.param_dtype": "",
    "parallel.rules": (("embed", None), ("mlp", ("data", "model"))),
    "parallel.strategy": "fsdp",
    "training.num_steps": 100,
}


def test_the_same_config_as_json_gives_it_back():
    assert check_resumable(SAVED, SAVED) == []
    assert check_resumable(json.loads(json.dumps(SAVED)), SAVED) == []


def test_what_may_change_is_listed():
    changes = {
        "data.batch_size": 64,
        "data.prefetch": 4,
        "parallel.mesh": {"data": 2},
        "parallel.strategy": "dp",
        "training.num_steps": 200,
    }
    assert check_resumable(SAVED, SAVED | changes | {"debug.new": True}) == [
        "data.batch_size: 32 -> 64",
        "data.prefetch: 2 -> 4",
        "debug.new: (absent) -> True",
        "parallel.mesh: {'data': 8} -> {'data': 2}",
        "parallel.strategy: 'fsdp' -> 'dp'",
        "training.num_steps: 100 -> 200",
    ]


def test_a_field_that_was_added_had_the_value_of_what_was_done_then():
    current = SAVED | ADDED
    assert check_resumable(SAVED, current) == []
    assert check_resumable(SAVED, current | {"parallel.sequence": True}) == [
        "parallel.sequence: False -> True"
    ]


def test_a_removed_field_that_did_nothing_is_passed_over():
    unused = {name: value for name, (value, _) in REMOVED.items()}
    assert check_resumable(SAVED | unused, SAVED) == []
    assert check_resumable(SAVED, SAVED | unused) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("model.prefetch", True), ("model.scan_unroll", 2), ("parallel.combine_bytes", 2**20)],
)
def test_a_removed_field_that_was_in_use_is_explained(name, value):
    changed = SAVED | {"training.num_steps": 200}
    assert check_resumable(SAVED | {name: value}, changed) == [
        f"{name} was {value!r} and has been removed: {REMOVED[name][1]}",
        "training.num_steps: 100 -> 200",
    ]


def test_a_value_that_was_renamed_counts_as_its_new_name():
    for name, values in RENAMED.items():
        for old, new in values.items():
            assert check_resumable(SAVED | {name: old}, SAVED | {name: new}) == []
    assert check_resumable(
        SAVED | {"parallel.overlap": "default"}, SAVED | {"parallel.overlap": "auto"}
    ) == ["parallel.overlap: 'none' -> 'auto'"]
