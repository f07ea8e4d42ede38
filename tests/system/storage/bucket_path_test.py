"""Paths in buckets, without a server; `server_test` asks one."""

import dataclasses
import io
import os
import pathlib
import re

import pytest

from manualpar.data.dataset import find_in_bucket
from manualpar.system.storage import (
    BucketError,
    BucketPath,
    ContentError,
    FolderError,
    Version,
    as_path,
    bucket_path,
    copied_files,
    copied_folder,
    open_for_reading,
    user_cache,
    user_path,
)
from manualpar.system.storage.bucket_path import WAITS, ObjectPart, Page, request


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


LINES = b"".join(b"line %d\n" % number for number in range(999))


@pytest.fixture
def ranges(monkeypatch):
    """Every object holds `LINES`; the ranges that have been read."""
    read = []

    def read_part(scheme, bucket, key, *, limits, version):
        start, stop = limits or (0, len(LINES))
        read.append((start, stop))
        data = LINES[start:stop]
        return ObjectPart(data, len(data), version.tag, limits is not None, len(LINES))

    monkeypatch.setattr(bucket_path, "read_part", read_part)
    monkeypatch.setattr(BucketPath, "version", lambda self: Version(len(LINES), "1"))
    monkeypatch.setattr("manualpar.system.storage.bucket_path.BLOCK_BYTES", 100)
    return read


def test_a_folder_is_copied_in_pieces(ranges, monkeypatch, tmp_path):
    monkeypatch.setattr(BucketPath, "files", lambda self: dict.fromkeys(("x", "y/z"), len(LINES)))
    monkeypatch.setattr("manualpar.system.storage.copies.COPIED_BYTES", 1000)
    folder = copied_folder(as_path("s3://bucket/x"), tmp_path)
    assert {(folder / name).read_bytes() for name in ("x", "y/z")} == {LINES}
    assert str(folder).endswith("s3:/bucket/x"), "messages about files name the bucket"
    assert max(stop - start for start, stop in ranges) <= 1000
    ranges.clear()
    assert copied_folder(as_path("s3://bucket/x"), tmp_path) == folder
    assert not ranges
    # As a server that once sent nothing has left it.
    (folder / "x").write_bytes(b"")
    copied_folder(as_path("s3://bucket/x"), tmp_path)
    assert (folder / "x").read_bytes() == LINES


@pytest.fixture
def server(monkeypatch):
    """Objects by key, with what is to happen before a request for one of them is answered."""
    there, before = {}, []

    def version(self):
        if self.key not in there:
            raise FileNotFoundError(f"{self} does not exist")
        return Version(len(there[self.key]), f"tag of {there[self.key]}")

    def read_part(scheme, bucket, key, *, limits, version):
        wrong = before.pop(0)() if before else None
        data, tag = there[key], f"tag of {there[key]}"
        if wrong is not None:
            return wrong
        if version and version.tag != tag:
            raise ContentError(f"s3://{bucket}/{key} changed while it was read")
        start, stop = limits or (0, len(data))
        return ObjectPart(
            data[start:stop], len(data[start:stop]), tag, limits is not None, len(data)
        )

    def list_page(scheme, bucket, prefix, *, delimiter, token):
        keys = sorted(key for key in there if key.startswith(prefix) and key > token)
        return Page({key: len(there[key]) for key in keys[:1]}, [], not keys[1:], keys[0])

    monkeypatch.setattr(BucketPath, "version", version)
    monkeypatch.setattr(bucket_path, "read_part", read_part)
    monkeypatch.setattr(bucket_path, "list_page", list_page)
    return there, before


MODEL = BucketPath("s3", "bucket", "model")
EMPTY = ObjectPart(b"", 0, "", False, None)


def test_a_folder_that_changes_while_it_is_copied_is_copied_anew(server, tmp_path):
    there, before = server

    def put(state):
        there.update({f"model/{name}": f"{name} {state}".encode() for name in "abc"})

    put(1)
    # After the first file, and once more after the last one.
    before += [lambda: None, lambda: put(2)]
    copy = copied_folder(MODEL, tmp_path / "cache")
    assert {path.read_bytes() for path in copy.iterdir()} == {b"a 2", b"b 2", b"c 2"}
    before += [lambda: None, lambda: None, lambda: there.update({"model/a": b"another"})]
    put(3)
    copy = copied_folder(MODEL, tmp_path / "cache")
    assert {path.read_bytes() for path in copy.iterdir()} == {b"another", b"b 3", b"c 3"}
    before += [lambda: put(4), lambda: put(5), lambda: None, lambda: put(6), lambda: put(7)]
    put(0)
    with pytest.raises(ContentError, match=r"s3://bucket/model/\w changed (after|while)"):
        copied_folder(MODEL, tmp_path / "cache")
    before.clear()
    copy = copied_folder(MODEL, tmp_path / "cache")
    assert {path.read_bytes() for path in copy.iterdir()} == set(there.values())


def test_a_cache_that_cannot_be_written_to_is_a_sentence(server, tmp_path, monkeypatch):
    there, _ = server
    there.update({"model/a": b"a"})
    (tmp_path / "file").touch()
    cache = re.escape(str(tmp_path / "file" / "cache"))
    message = f"^the cache {cache} cannot be written to .Not a directory.; set XDG_CACHE_HOME to a "
    with pytest.raises(FolderError, match=message):
        copied_folder(MODEL, tmp_path / "file" / "cache")
    with pytest.raises(FolderError, match=r"set config\.data\.cache to a folder"):
        copied_folder(MODEL, tmp_path / "file" / "cache", setting="config.data.cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name")
    for unknown in (user_cache, lambda: user_path("~nobody-of-this-name/x")):
        with pytest.raises(ValueError, match=r"^~nobody-of-this-name.*: the home folder is not kn"):
            unknown()


def test_small_files_of_two_states_are_not_copied(server):
    there, before = server
    there.update({"model/a": b"a 1", "model/c/b": b"b 1"})
    before += [lambda: None, lambda: there.update({"model/a": b"a 2"})]
    copy = copied_files(MODEL, ("a", "c/b", "none"))
    assert (copy / "a").read_bytes() == b"a 2"
    assert [path.read_bytes() for path in (copy / "c").iterdir()] == [b"b 1"]
    assert copied_files(MODEL / "a", ("a",)).read_bytes() == b"a 2"


def test_a_wrong_answer_is_asked_for_again_once(server, tmp_path):
    there, before = server
    there["model/a"] = b"content"
    file = MODEL / "a"
    for read in (
        lambda: file.read_bytes(),
        lambda: file.read_bytes(0, 7),
        lambda: (copied_folder(MODEL, tmp_path) / "a").read_bytes(),
    ):
        before[:] = [lambda: dataclasses.replace(EMPTY, is_range=True)]
        assert read() == b"content"
    before[:] = [lambda: EMPTY] * 9
    with pytest.raises(ContentError, match="s3://bucket/model/a: the server sent 0 bytes, exp"):
        copied_folder(MODEL, tmp_path / "new")
    assert {path.suffix for path in (tmp_path / "new").rglob("*") if path.is_file()} == {".lock"}


def test_a_server_without_ranges_is_told(server):
    there, before = server
    there["model/a"] = b"content"
    before[:] = [lambda: ObjectPart(b"", 7, "", False, None)] * 9
    with pytest.raises(
        BucketError, match=r"s3://.*/a: the server answers a request for 2 bytes with"
    ):
        (MODEL / "a").read_bytes(1, 3)


def list_with(monkeypatch, list_page):
    monkeypatch.setattr(bucket_path, "list_page", list_page)
    monkeypatch.setattr(bucket_path, "file_system", lambda scheme: None)  # s3fs may be missing.


@pytest.mark.parametrize(
    "token", [lambda n: "same", lambda n: f"{n % 3}", lambda n: f"{n}"], ids=["same", "ring", "new"]
)
def test_a_list_that_does_not_end_is_told(monkeypatch, token):
    asked = []

    def list_page(*args, **options):
        asked.append(options["token"])
        return Page({"model/a": 1}, [], False, token(len(asked)))

    list_with(monkeypatch, list_page)
    for read in (MODEL.names, MODEL.files, (MODEL / "*").glob):
        with pytest.raises(BucketError, match=r"s3://bucket/model.* does not end \(after"):
            read()
    monkeypatch.setattr(bucket_path, "MOST_PAGES", 50)
    with pytest.raises(BucketError, match=r"does not end"):
        MODEL.files()
    assert len(asked) < 500


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*", "a.txt"),
        ("*/b.*", "x/b.txt y/b.md"),
        ("x/*", "x/b.txt"),
        ("**/*.txt", "a.txt x/b.txt x/z/c.txt"),
        ("x/**", "x/b.txt x/z/c.txt"),
        ("[xw]/?/*.txt", "x/z/c.txt"),
        ("y*/**/b.md", "y/b.md"),
    ],
)
def test_a_pattern_finds_what_a_disk_gives(monkeypatch, pattern, found):
    keys = ("m/a.txt", "m/x/b.txt", "m/x/z/c.txt", "m/y/b.md")

    def list_page(scheme, bucket, prefix, *, delimiter, token):
        below = [key for key in keys if key.startswith(prefix)]
        rests = [key.removeprefix(prefix) for key in below]
        folders = {f"{prefix}{rest.split('/')[0]}/" for rest in rests if delimiter and "/" in rest}
        direct = [
            key for key, rest in zip(below, rests, strict=True) if not (delimiter and "/" in rest)
        ]
        return Page(dict.fromkeys(direct, 1), sorted(folders), True, "")

    list_with(monkeypatch, list_page)
    root = BucketPath("s3", "bucket", "m")
    paths = (root / pattern).glob()
    assert sorted(str(path.relative_to(root)) for path in paths) == found.split()


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


# -------------------------------------------------------------------------------------------------
# What is tried again, what is said about it, and what is not.


PATH = as_path("s3://bucket/key")


class AnswerError(OSError):
    """An error that holds a server's answer, as botocore's has it."""

    def __init__(self, status, code, text="hush in the answer"):
        super().__init__(text)
        self.response = {
            "Error": {"Code": code, "Message": text},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


class NoCredentialsError(Exception):
    """Of the same name as botocore's."""


def named(name, module):
    """An exception class of a name, in a package."""
    return type(name, (Exception,), {"__module__": module})


@pytest.fixture
def slept(monkeypatch):
    seconds = []
    monkeypatch.setattr("time.sleep", seconds.append)
    return seconds


def failing(*errors):
    """An action that fails with each of the errors and then succeeds."""
    left = list(errors)

    def act():
        if left:
            raise left.pop(0)
        return "done"

    return act


@pytest.mark.parametrize(
    "error",
    [
        AnswerError(503, "SlowDown"),
        AnswerError(500, "InternalError"),
        AnswerError(409, "ConditionalRequestConflict"),
        AnswerError(429, "TooManyRequests"),
        ConnectionResetError(104, "reset"),
        TimeoutError(),
        named("ConnectionError", "botocore.exceptions")(),
        named("ClientError", "aiohttp.client_exceptions")(),
    ],
    ids=repr,
)
def test_what_may_pass_is_tried_again_and_told(error, slept, caplog):
    assert request(PATH, failing(error, error)) == "done"
    assert slept == list(WAITS[:2])
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert caplog.messages[0].startswith("s3://bucket/key: the server ")
    assert caplog.messages[0].endswith("; trying again in 0.5 s")
    assert "hush" not in caplog.text


def test_the_tries_have_an_end(slept):
    error = AnswerError(503, "SlowDown")
    with pytest.raises(BucketError) as raised:
        request(PATH, failing(*[error] * 99))
    assert str(raised.value) == (
        "s3://bucket/key: the server answered SlowDown, in each of 7 tries: check the network, and "
        "AWS_ENDPOINT_URL, which is for servers other than Amazon's"
    )
    assert slept == list(WAITS)
    assert raised.value.__suppress_context__


def test_a_cause_is_looked_at(slept):
    outer = OSError(5, "hush")
    outer.__cause__ = AnswerError(502, "BadGateway")
    assert request(PATH, failing(outer)) == "done"
    assert len(slept) == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            AnswerError(404, "NoSuchBucket"),
            "there is no such bucket: check its name, and AWS_ENDPOINT",
        ),
        (
            AnswerError(403, "403"),
            r"access is refused \(403\): check AWS_ACCESS_KEY_ID and AWS_SECRET_",
        ),
        (PermissionError("hush"), "access is refused"),
        (NoCredentialsError("hush"), "there are no credentials in the environment: set AWS_ACC"),
        (AnswerError(400, "InvalidRequest"), r"the request failed \(InvalidRequest\)"),
        (AnswerError(400, "hush <xml>"), r"the request failed \(400\)|\(AnswerError\)"),
        (KeyError("hush"), r"the request failed \(KeyError\)"),
    ],
)
def test_what_stays_wrong_is_one_sentence_without_the_answer(error, said, slept):
    with pytest.raises(BucketError, match=said) as raised:
        request(PATH, failing(error))
    assert not slept
    assert "hush" not in str(raised.value)
    assert str(raised.value).startswith("s3://bucket/key: ")


def test_a_missing_object_and_one_in_the_way(slept):
    with pytest.raises(FileNotFoundError, match="s3://bucket/key does not exist"):
        request(PATH, failing(FileNotFoundError("hush")))
    with pytest.raises(FileExistsError, match="s3://bucket/key exists"):
        request(PATH, failing(FileExistsError("hush")))
    assert not slept


def test_a_server_of_google_is_told_by_its_own_names(slept):
    refused = named("HttpError", "gcsfs.retry")("hush")
    refused.code = 403
    with pytest.raises(BucketError, match="GOOGLE_APPLICATION_CREDENTIALS"):
        request(as_path("gs://bucket/key"), failing(refused))
    busy = named("HttpError", "gcsfs.retry")()
    busy.code = 503
    assert request(as_path("gs://bucket/key"), failing(busy)) == "done"
    assert len(slept) == 1
