"""A server of S3 on the loopback, moto's, and a proxy before it at which requests go wrong.

`moto` answers as Amazon does, conditional requests included. The proxy counts the requests that
change something, and can answer them with an error, cut the connection, wait, or kill a process
before or after a request is carried out.
"""

import contextlib
import http.client
import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request

from tests.system.cluster.processes import free_port

BUCKET = "bucket"
SECRET = "hush-hush-a-secret-of-the-environment"
KEY_ID = "AKIAKEYOFTHETESTS"
CHANGES = ("PUT", "POST", "DELETE")
START_SECONDS = 60.0


def environment_of(port):
    """The environment of a process that talks to the server, or a proxy, at a port."""
    return {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def use_server(monkeypatch, port):
    """Sets the environment of this process, as long as the test lasts."""
    import s3fs

    # Clients are kept by their options, and took the address when they were made.
    s3fs.S3FileSystem.clear_instance_cache()
    for name, value in environment_of(port).items():
        monkeypatch.setenv(name, value)


def upload(folder, target):
    """Copies the files of a folder into one in a bucket."""
    for path in folder.rglob("*"):
        if path.is_file():
            (target / path.relative_to(folder)).write_bytes(path.read_bytes())


def download(folder, target, left_out=lambda name: False):
    """Copies a folder in a bucket to a disk, in place of what is there."""
    shutil.rmtree(target, ignore_errors=True)
    for name in folder.files():
        if not left_out(name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((folder / name).read_bytes())
    return target


@contextlib.contextmanager
def s3_server():
    """Starts moto's server, with an empty bucket, while the context lasts; yields its port."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ)
    ) as process:
        try:
            until = time.monotonic() + START_SECONDS
            while True:
                assert process.poll() is None, "the server ended by itself"
                assert time.monotonic() < until, "the server does not answer"
                with contextlib.suppress(OSError):
                    url = f"http://127.0.0.1:{port}/{BUCKET}"
                    urllib.request.urlopen(urllib.request.Request(url, method="PUT")).close()
                    break
                time.sleep(0.1)
            yield port
        finally:
            process.kill()


class Proxy:
    """Passes requests on to a server. `fault(method, path, number)` may act in between.

    `number` counts the requests that change something, from one; for others it is 0. What `fault`
    returns decides: None passes the request on; a number is the status to answer with; "cut" ends
    the connection; a function is called after the request has been carried out, before its answer;
    a triple of a status, headers and a body is the answer. `heard` are the headers of requests.
    """

    def __init__(self, port, fault=lambda method, path, number: None):
        self.fault = fault
        self.changes = []  # Method and path of each.
        self.heard = []
        lock = threading.Lock()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                del args

            def answer(self):
                if self.headers.get("Expect"):
                    self.send_response_only(100)
                    self.end_headers()
                body = self.body()
                number = 0
                with lock:
                    proxy.heard.append((self.command, self.path, dict(self.headers)))
                    if self.command in CHANGES:
                        proxy.changes.append((self.command, self.path))
                        number = len(proxy.changes)
                    what = proxy.fault(self.command, self.path, number)
                if what == "cut":
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if isinstance(what, int):
                    self.reply(what, [], b"")
                    return
                if isinstance(what, tuple):
                    self.reply(*what)
                    return
                upstream = http.client.HTTPConnection("127.0.0.1", port)
                headers = {
                    name: value
                    for name, value in self.headers.items()
                    if name.lower() not in ("expect", "transfer-encoding", "content-length")
                }
                upstream.request(self.command, self.path, body, headers)
                found = upstream.getresponse()
                data = found.read()
                upstream.close()
                if what is not None:
                    what()
                self.reply(found.status, found.getheaders(), data)

            def body(self):
                if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
                    parts = []
                    while size := int(self.rfile.readline().split(b";")[0], 16):
                        parts.append(self.rfile.read(size))
                        self.rfile.readline()
                    self.rfile.readline()
                    return b"".join(parts)
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))

            def reply(self, status, headers, data):
                with contextlib.suppress(OSError):  # The client may have been killed.
                    self.send_response_only(status)
                    left_out = ("connection", "transfer-encoding")
                    lengths = [v for name, v in headers if name.lower() == "content-length"]
                    for name, value in headers:
                        if name.lower() not in (*left_out, "content-length"):
                            self.send_header(name, value)
                    # Of a HEAD it is the object's.
                    is_head = self.command == "HEAD"
                    length = lengths[0] if lengths and is_head else str(len(data))
                    self.send_header("Content-Length", length)
                    self.end_headers()
                    if not is_head:
                        self.wfile.write(data)

        for method in ("GET", "HEAD", *CHANGES):
            setattr(Handler, f"do_{method}", Handler.answer)

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request, client_address):
                del request, client_address  # A killed client's.

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        del error
        self._server.shutdown()
        self._server.server_close()
