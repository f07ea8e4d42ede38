"""Paths in buckets, without a server; `storage_server_test` asks one."""

import io
import os
import pathlib

import pytest

from manualpar.data.places import find_in_bucket
from manualpar.storage import BucketPath, as_path, copied_folder, open_for_reading


def test_a_path_is_local_unless_it_says_otherwise(tmp_path):
    assert as_path("runs/1") == pathlib.Path("runs/1")
    assert as_path(tmp_path) == tmp_path
    path = as_path("s3://bucket/runs//1/")
    assert path == BucketPath("s3", "bucket", "runs/1")
    assert as_path(path) is path
    assert str(as_path("gs://bucket")) == "gs://bucket"
    assert str(as_path("s3://bucket/a@b:c/d")) == "s3://bucket/a@b:c/d"


def test_the_parts_of_a_path():
    path = as_path("s3://bucket/runs") / "1" / "metrics.jsonl"
    assert str(path) == "s3://bucket/runs/1/metrics.jsonl"
    assert (path.name, path.parts) == ("metrics.jsonl", ("runs", "1", "metrics.jsonl"))
    assert str(path.parent.parent.parent) == "s3://bucket"
    assert path.parent.parent.parent.parent == as_path("s3://bucket")
    assert path.relative_to(as_path("s3://bucket/runs")) == pathlib.PurePosixPath("1/metrics.jsonl")
    for above in ("../x", "/x"):
        with pytest.raises(ValueError, match="expected a path below s3://bucket/runs/1/metrics"):
            path / above
    with pytest.raises(ValueError, match="is not below gs://"):
        path.relative_to(as_path("gs://bucket/runs"))


def test_no_function_of_the_system_takes_it_for_a_local_path():
    path = as_path("s3://bucket/x")
    for function in (os.fspath, pathlib.Path, open, os.mkdir):
        with pytest.raises(TypeError):
            function(path)


@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIAUSER:hush@bucket/x",
        "s3://AKIAUSER:hu/sh@bucket/x",
        "gs://AKIAUSER@bucket/x",
        "s3://",
        "s3:///hush",
        "s3://../hush",
        "https://AKIAUSER:hush@bucket/x",
        "file:///hush",
    ],
)
def test_passwords_and_other_schemes_are_refused_and_not_repeated(text):
    with pytest.raises(ValueError, match=r"expected (s3|gs)://") as refused:
        as_path(text)
    assert "hush" not in str(refused.value)
    assert "AKIA" not in str(refused.value)


@pytest.mark.parametrize("text", ["s3://bucket/a/../b", "s3://bucket/a\0b", "gs://bucket/a\nb"])
def test_keys_that_mean_something_else_are_refused(text):
    with pytest.raises(ValueError, match=r"holds '..' or what cannot be printed"):
        as_path(text)


def test_a_bucket_needs_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for path, package in (("s3://bucket/x", "s3fs"), ("gs://bucket/x", "gcsfs")):
        with pytest.raises(ImportError, match=rf"{package}, .*'manualpar\[buckets\]'"):
            as_path(path).read_bytes()


LINES = b"".join(b"line %d\n" % number for number in range(999))


@pytest.fixture
def ranges(monkeypatch):
    """Every object holds `LINES`; the ranges that have been read."""
    read = []

    def read_bytes(self, start=0, stop=None):
        read.append((start, stop or len(LINES)))
        return LINES[start:stop]

    monkeypatch.setattr(BucketPath, "read_bytes", read_bytes)
    monkeypatch.setattr(BucketPath, "version", lambda self: (len(LINES), "1"))
    monkeypatch.setattr("manualpar.storage.bucket_path.BLOCK_BYTES", 100)
    return read


def test_a_folder_is_copied_in_pieces(ranges, monkeypatch, tmp_path):
    monkeypatch.setattr(BucketPath, "files", lambda self: dict.fromkeys(("x", "y/z"), len(LINES)))
    monkeypatch.setattr("manualpar.storage.copies.COPIED_BYTES", 1000)
    folder = copied_folder(as_path("s3://bucket/x"), tmp_path)
    assert {(folder / name).read_bytes() for name in ("x", "y/z")} == {LINES}
    assert max(stop - start for start, stop in ranges) <= 1000
    ranges.clear()
    assert copied_folder(as_path("s3://bucket/x"), tmp_path) == folder
    assert not ranges


def test_a_pattern_leaves_hidden_files_out_as_on_a_disk(monkeypatch):
    names = ("a.txt", ".b.txt", ".c/d.txt")
    found = {as_path(f"s3://bucket/x/{name}"): 1 for name in names}
    monkeypatch.setattr(BucketPath, "glob", lambda self: found)

    def find(pattern):
        return [name for _, name, _ in find_in_bucket(as_path(f"s3://bucket/x/{pattern}"), ())]

    assert find("**/*.txt") == ["a.txt"]
    assert find(".*/*.txt") == list(names)


def test_an_object_is_read_as_a_file(ranges, tmp_path):
    """Whatever is sought and read, it is what the same file on a disk gives."""
    local = tmp_path / "lines"
    local.write_bytes(LINES)
    with open_for_reading(as_path("s3://bucket/x")) as file, open_for_reading(local) as expected:
        for seek, read in (
            ((5, os.SEEK_SET), 30),
            ((-20, os.SEEK_END), 90),
            ((-7, os.SEEK_CUR), 3),
        ):
            assert file.seek(*seek) == expected.seek(*seek)
            assert file.read(read) == expected.read(read)
        assert file.seek(0) == expected.seek(0)
        assert file.readlines() == expected.readlines()
        assert file.read() == b""
        with pytest.raises(ValueError, match=r"negative|at least 0"):
            file.seek(-1)
        with pytest.raises(io.UnsupportedOperation):
            file.write(b"x")
    # All but the last are blocks.
    assert max(stop - start for start, stop in ranges) <= len(LINES)
    assert (0, 100) in ranges
