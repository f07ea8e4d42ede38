"""Which checkpoints stay."""

import contextlib
import os
import threading

import pytest

from manualpar.training.checkpoints.manifest import write_manifest
from manualpar.training.checkpoints.retention import (
    Retention,
    delete_leftovers,
    delete_steps,
    find_leftovers,
    list_steps,
    put_in_place,
    read_metrics,
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
    assert list_steps(tmp_path) == [10]
    assert find_leftovers(tmp_path) == [tmp_path / "3.unfinished"]


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


def test_leftovers_go_while_a_write_that_failed_goes_on(tmp_path):
    """As tensorstore's threads write when one of them has failed: by name, some files at a time."""

    def write_on(folder):
        with contextlib.suppress(FileNotFoundError):
            for number in range(100_000):
                (folder / f"{number}").touch()
                (folder / f"{number - 10}").unlink(missing_ok=True)
                begun.release()

    for step in range(20):
        folder = tmp_path / f"{step}.unfinished" / "d"
        folder.mkdir(parents=True)
        (tmp_path / f"{step}.deleted").mkdir()
        begun = threading.Semaphore(0)
        writer = threading.Thread(target=write_on, args=[folder])
        writer.start()
        for _ in range(30):
            begun.acquire()
        delete_leftovers(tmp_path)
        writer.join()
        assert list(tmp_path.iterdir()) == []


def test_what_no_save_leaves_is_not_deleted_nor_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in ("7.unfinished", "7.unfinished.orbax-checkpoint-tmp", "7.deleted"):
        makers = {
            "link": lambda path: path.symlink_to(precious),
            "file": lambda path: path.write_text(""),
            "FIFO": os.mkfifo,
        }
        for kind, make in makers.items():
            make(folder / name)
            with pytest.raises(ValueError, match=f"{name} is a {kind}, but a save has to"):
                find_leftovers(folder)
            (folder / name).unlink()
    assert (precious / "file").read_text() == "keep"
    assert find_leftovers(tmp_path / "none") == []


def test_a_link_among_checkpoints_is_neither_read_nor_deleted(tmp_path):
    folder = tmp_path / "checkpoints"
    (tmp_path / "elsewhere").mkdir()
    write_manifest(tmp_path / "elsewhere", step=1, metrics={})
    folder.mkdir()
    put(folder, 2, 1)
    (folder / "1").symlink_to(tmp_path / "elsewhere")
    assert read_metrics(folder, [1, 2]) == {}
    (folder / "2.superseded-1").symlink_to("none")
    put(folder, 0, -1)
    assert sorted(path.name for path in folder.iterdir()) == [
        "0",
        "1.superseded-1",
        "2.superseded-1",
        "2.superseded-2",
    ]
    assert (tmp_path / "elsewhere" / "manifest.json").exists()
