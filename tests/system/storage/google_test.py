"""Objects on a server of Google's interface, through `BucketPath`."""

import contextlib
import http.server
import json
import threading
import urllib.parse

import pytest

from manualpar.system.storage import BucketPath, ContentError, copied_folder
from manualpar.system.storage import bucket_path as requests

pytestmark = pytest.mark.slow

FOLDER = BucketPath("gs", "bucket", "a")


@pytest.fixture
def objects(monkeypatch):
    """A server on the loopback with these objects, a page of its lists for each."""
    gcsfs = pytest.importorskip("gcsfs", reason="pip install -e '.[interop]'")
    there = {}  # By key the generation and the content.

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args):
            del args

        def do_GET(self):
            parts = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(parts.query))
            key = urllib.parse.unquote(parts.path.partition("/b/bucket/o")[2].removeprefix("/"))
            if not key:
                self.reply(200, list_page(**query))
            elif key not in there or query.get("generation", there[key][0]) != there[key][0]:
                self.reply(404, {"error": {"code": 404}})
            elif query.get("alt") != "media":
                self.reply(200, described(key))
            elif found := self.headers.get("Range"):
                first, last = map(int, found.removeprefix("bytes=").split("-"))
                self.reply(206, there[key][1][first : last + 1], first)
            else:
                self.reply(200, there[key][1])

        def reply(self, status, body, first=None):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            if first is not None:
                self.send_header("Content-Range", f"bytes {first}-{first + len(data) - 1}/99")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def described(key):
        generation, data = there[key]
        return {"name": key, "size": str(len(data)), "etag": generation, "generation": generation}

    def list_page(prefix="", pageToken="", **query):
        del query
        keys = sorted(key for key in there if key.startswith(prefix) and key > pageToken)
        page = {"kind": "storage#objects", "items": [described(key) for key in keys[:1]]}
        return page | ({"nextPageToken": keys[0]} if keys[1:] else {})

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(requests, "WAITS", (0.01,))
    gcsfs.GCSFileSystem.clear_instance_cache()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with contextlib.closing(server.socket):
        yield there
        server.shutdown()


def test_objects_are_listed_in_pages_and_read_of_one_version(objects, tmp_path):
    objects |= {"a/x": ("1", b"0123456789"), "a/y": ("1", b""), "b": ("1", b"")}
    assert FOLDER.files() == {"x": 10, "y": 0}
    assert FOLDER.names() == ["x", "y"]
    path = FOLDER / "x"
    assert (path.read_bytes(), path.read_bytes(2, 4)) == (b"0123456789", b"23")
    copy = copied_folder(FOLDER, tmp_path)
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == {
        "x": b"0123456789",
        "y": b"",
    }
    before = path.version()
    objects["a/x"] = ("2", b"abcdefghij")
    with pytest.raises(ContentError, match="gs://bucket/a/x changed or was deleted after"):
        path.read_bytes(2, 4, version=before)
    assert path.read_bytes(2, 4) == b"cd"
    with pytest.raises(FileNotFoundError, match="gs://bucket/a/z does not exist"):
        (FOLDER / "z").read_bytes()
