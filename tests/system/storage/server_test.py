"""Objects on a server of S3, through `BucketPath`."""

import json
import urllib.parse

import pytest

from manualpar.system.storage import BucketError, as_path, copied_folder, open_for_reading
from manualpar.system.storage import bucket_path as requests
from tests.system.storage.s3_server import SECRET, Proxy

pytestmark = pytest.mark.slow


def test_objects_and_folders(bucket_folder):
    assert not bucket_folder.exists()
    assert (bucket_folder.names(), bucket_folder.files(), bucket_folder.glob()) == ([], {}, {})
    path = bucket_folder / "a" / "x.txt"
    path.write_bytes(b"hello world")
    assert path.read_bytes() == b"hello world"
    assert (path.read_bytes(6), path.read_bytes(0, 5), path.read_bytes(3, 3)) == (
        b"world",
        b"hello",
        b"",
    )
    assert (path.size(), path.is_file(), path.is_dir(), path.exists()) == (11, True, False, True)
    assert (path.parent.is_file(), path.parent.is_dir()) == (False, True)
    path.write_bytes(b"another")  # Lists and sizes are not kept.
    (bucket_folder / "b").write_bytes(b"")
    assert bucket_folder.files() == {"a/x.txt": 7, "b": 0}
    assert bucket_folder.names() == ["a", "b"]
    assert (bucket_folder / "**" / "*.txt").glob() == {path: 7}
    assert (bucket_folder / "?").glob() == {bucket_folder / "b": 0}
    with open_for_reading(path) as file:
        assert (file.seek(2), file.read(3), file.read()) == (2, b"oth", b"er")
    # A neighbour whose name begins alike stays.
    neighbour = bucket_folder.parent / f"{bucket_folder.name}-2" / "x"
    neighbour.write_bytes(b"")
    bucket_folder.delete_files("b")
    assert not bucket_folder.exists()
    assert neighbour.exists()
    path.delete()
    with pytest.raises(FileNotFoundError, match=r"x.txt does not exist"):
        path.read_bytes()
    for missing in (path, bucket_folder):
        with pytest.raises(FileNotFoundError):
            missing.size()


def test_one_of_those_that_create_an_object_does(bucket_folder):
    path = bucket_folder / "lock"
    assert path.create(b"mine")
    assert not path.create(b"yours")
    assert path.read_bytes() == b"mine"
    assert path.create(b"mine"), "as if the answer had been lost"


def test_a_request_is_repeated_and_a_created_object_is_known_again(
    s3_port, use_s3, bucket_folder, caplog, monkeypatch
):
    monkeypatch.setattr(requests, "WAITS", (0.01, 0.02))
    faults = []
    with Proxy(s3_port, lambda method, path, number: faults.pop(0) if faults else None) as proxy:
        use_s3(port=proxy.port)
        faults[:] = [503, 500]
        (bucket_folder / "x").write_bytes(b"1")
        assert "the server answered 503; trying again in 0.01 s" in caplog.messages[0]
        assert len(caplog.records) == 2
        faults[:] = ["cut"] * 2  # The client itself opens a connection that was in use anew.
        assert (bucket_folder / "x").read_bytes() == b"1"
        assert not faults
        assert "the server cannot be reached" in caplog.messages[2]

        def lose_the_answer():
            raise ConnectionError  # It has been carried out.

        faults[:] = [lose_the_answer]
        assert (bucket_folder / "lock").create(b"mine")
        faults[:] = [503] * 3
        with pytest.raises(BucketError, match=r"answered 503, in each of 3 tries: check the net"):
            (bucket_folder / "x").read_bytes()


def test_a_bucket_that_is_not_there(use_s3):
    use_s3()
    with pytest.raises(BucketError, match=r"s3://no-bucket/x: there is no such bucket: check"):
        as_path("s3://no-bucket/x").write_bytes(b"")


def test_no_credentials(bucket_folder, monkeypatch, tmp_path):
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(BucketError, match="there are no credentials in the environment: set AWS_"):
        (bucket_folder / "x").write_bytes(b"")


def test_a_refused_request_does_not_repeat_what_was_signed(s3_port, use_s3, bucket_folder):
    with Proxy(s3_port, lambda method, path, number: 403) as proxy:
        use_s3(port=proxy.port)
        with pytest.raises(BucketError, match=r"access is refused \(403\): check AWS_") as raised:
            (bucket_folder / "x").write_bytes(b"")
    shown = json.dumps([str(raised.value), repr(raised.value.__cause__)])
    assert SECRET not in shown
    assert raised.value.__suppress_context__


def test_what_is_copied_is_asked_for_by_its_tag(s3_port, use_s3, bucket_folder, tmp_path):
    for name in ("x", "empty"):
        (bucket_folder / name).write_bytes(b"12345" if name == "x" else b"")
    with Proxy(s3_port) as proxy:
        use_s3(port=proxy.port)
        copy = copied_folder(bucket_folder, tmp_path)
        (bucket_folder / "x").read_bytes()
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == {
        "x": b"12345",
        "empty": b"",
    }
    gets = [heard for method, path, heard in proxy.heard if method == "GET" and "list" not in path]
    assert len(gets) == 2
    assert all(heard.get("If-Match") for heard in gets)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(s3_port, use_s3, bucket_folder, status):
    path = bucket_folder / "x"
    path.write_bytes(b"1")

    def redirect(method, path, number):
        return status, [("Location", f"http://localhost:{other.port}{path}")], b""

    with Proxy(s3_port) as other, Proxy(s3_port, redirect) as proxy:
        use_s3(port=proxy.port)
        for ask in (path.read_bytes, path.parent.files, lambda: path.write_bytes(b"2")):
            with pytest.raises(BucketError, match=rf"redirects to another .* \({status}\)"):
                ask()
        assert not other.heard
        assert len(proxy.heard) == 3


def test_a_server_that_ignores_ranges_or_sends_nothing(s3_port, use_s3, bucket_folder, tmp_path):
    path = bucket_folder / "x"
    path.write_bytes(b"12345")
    tag = ("ETag", path.version().tag)
    answers = []

    def answer(method, path, number):
        is_read = method == "GET" and "list-type" not in path
        return answers.pop(0) if is_read and answers else None

    with Proxy(s3_port, answer) as proxy:
        use_s3(port=proxy.port)
        answers[:] = [(200, [tag], b"12345")]
        with pytest.raises(BucketError, match=r"a request for 2 bytes with the whole object"):
            path.read_bytes(1, 3)
        answers[:] = [(200, [tag], b"")]
        assert (copied_folder(bucket_folder, tmp_path) / "x").read_bytes() == b"12345"
        answers[:] = [(200, [("ETag", '"another"')], b"54321")] * 2
        with pytest.raises(BucketError, match=r"/x changed after reading began \(its ETag"):
            path.read_bytes()
        answers[:] = [412] * 2
        with pytest.raises(BucketError, match=r"/x changed after reading began"):
            path.read_bytes()


def test_a_list_in_pages_and_one_that_does_not_end(s3_port, use_s3, bucket_folder):
    page = (
        "<ListBucketResult><IsTruncated>{}</IsTruncated><NextContinuationToken>{}"
        "</NextContinuationToken><Contents><Key>{}/{}</Key><Size>3</Size></Contents>"
        "</ListBucketResult>"
    )
    pages = []

    def answer(method, path, number):
        token = dict(urllib.parse.parse_qsl(path)).get("continuation-token", "0")
        body = pages[int(token)].format(bucket_folder.key, token)
        return 200, [("Content-Type", "application/xml")], body.encode()

    with Proxy(s3_port, answer) as proxy:
        use_s3(port=proxy.port)
        pages[:] = [page.format("true", 1, "{}", "{}"), page.format("false", "", "{}", "{}")]
        assert bucket_folder.files() == {"0": 3, "1": 3}
        pages[1] = page.format("true", 1, "{}", "{}")
        with pytest.raises(BucketError, match=r"server's list of objects does not end \(after 2"):
            bucket_folder.names()
