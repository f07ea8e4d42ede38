"""Paths in buckets, without a server; `storage_server_test` asks one."""

import io
import os
import pathlib

import pytest

from manualpar.storage import BucketPath, as_path, open_for_reading


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


def test_an_object_is_read_as_a_file(monkeypatch, tmp_path):
    """Whatever is sought and read, it is what the same file on a disk gives."""
    lines = b"".join(b"line %d\n" % number for number in range(999))
    ranges = []

    def read_bytes(self, start=0, stop=None):
        ranges.append((start, stop))
        return lines[start:stop]

    monkeypatch.setattr(BucketPath, "read_bytes", read_bytes)
    monkeypatch.setattr(BucketPath, "size", lambda self: len(lines))
    monkeypatch.setattr("manualpar.storage.bucket_path.BLOCK_BYTES", 100)
    local = tmp_path / "lines"
    local.write_bytes(lines)
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
    assert max(stop - start for start, stop in ranges) <= len(lines)
    assert (0, 100) in ranges
