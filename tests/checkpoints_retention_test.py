"""Which checkpoints stay."""

import pytest

from manualpar.checkpoints.retention import (
    Retention,
    delete_leftovers,
    delete_steps,
    list_steps,
    put_in_place,
)

LOSSES = {1: {"loss": 4.0}, 2: {"loss": 1.0}, 3: {"loss": 2.0}, 4: {}, 5: {"loss": 3.0}}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, 0, "", "min"), {5}),
        ((2, 0, "", "min"), {4, 5}),
        ((9, 0, "", "min"), {1, 2, 3, 4, 5}),
        ((1, 2, "", "min"), {2, 4, 5}),
        ((1, 0, "loss", "min"), {2, 5}),
        ((1, 0, "loss", "max"), {1, 5}),
        ((1, 0, "accuracy", "max"), {5}),
        ((1, 3, "loss", "min"), {2, 3, 5}),
    ],
)
def test_what_stays(arguments, expected):
    assert Retention(*arguments).choose(LOSSES) == expected


def test_of_equals_the_newest_is_the_best():
    metrics = {step: {"loss": 1.0} for step in (10, 20, 30)} | {40: {"loss": 2.0}}
    for mode, best in (("min", 30), ("max", 40)):
        assert Retention(1, 0, "loss", mode).choose(metrics) == {best, 40}
    assert Retention(1, 0, "loss", "min").choose({}) == set()


def test_only_numbers_are_checkpoints(tmp_path):
    assert list_steps(tmp_path / "none") == []
    for name in ("10", "9", "0", "007", "-1", "1.5", "x", "²", "3.unfinished", "4.superseded-1"):
        (tmp_path / name).mkdir()
    assert list_steps(tmp_path) == [0, 9, 10]
    delete_steps(tmp_path, [0, 9])
    delete_leftovers(tmp_path)
    assert list_steps(tmp_path) == [10]
    assert (tmp_path / "4.superseded-1").exists()
    assert not (tmp_path / "3.unfinished").exists()


def put(folder, step, after, content=""):
    (folder / f"{step}.unfinished").mkdir()
    (folder / f"{step}.unfinished" / content).mkdir(exist_ok=True)
    put_in_place(folder, step, after=after)


def test_checkpoints_of_another_course_are_set_aside_not_deleted(tmp_path):
    for after, step in enumerate((1, 2, 3, 4)):
        put(tmp_path, step, after, "first")
    assert list_steps(tmp_path) == [1, 2, 3, 4]
    put(tmp_path, 3, 1, "second")
    assert list_steps(tmp_path) == [1, 3]
    assert (tmp_path / "3" / "second").exists()
    for step in (2, 3, 4):
        assert (tmp_path / f"{step}.superseded-1" / "first").exists()
    put(tmp_path, 2, 1)
    assert list_steps(tmp_path) == [1, 2]
    assert (tmp_path / "3.superseded-2" / "second").exists()
    put(tmp_path, 0, -1)
    assert list_steps(tmp_path) == [0]
