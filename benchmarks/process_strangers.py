"""What strangers may send to a port, for `benchmarks.process_faults`."""

import contextlib
import json
import socket
import time
from collections.abc import Callable

HELLO = {
    "kind": "hello",
    "process": 1,
    "num_processes": 2,
    "host": "h",
    "pid": 1,
    "proof": "0" * 64,
}
STRANGERS: dict[str, bytes] = {
    "deep JSON": b"[" * 100_000 + b"\n",
    "deep JSON in a short line": b"[" * 4000 + b"\n",
    "bytes that are no text": b"\x00\xff\n" * 50,
    "2 MB without a line": b"a" * 2_000_000,
    "HTTP": b"GET / HTTP/1.0\r\n\r\n",
    "a hello with a wrong proof": json.dumps(HELLO).encode() + b"\n",
    "a hello without fields": b'{"kind": "hello"}\n',
    "other kinds of messages": b'{"kind": "failed", "error": "x"}\n{"kind": "stop"}\n',
    "half a line, held": b'{"kind": "hel',
    "many connections, held": b"",
}
MANY = 400
AGAIN_SECONDS = 0.1
GIVE_UP_SECONDS = 120.0


def disturb(name: str, port: int, *, until: Callable[[], bool]) -> None:
    """Connects and talks again and again.

    Args:
      name: One of `STRANGERS`.
      port: The port, of this machine.
      until: Whether it is enough.
    """
    data, deadline = STRANGERS[name], time.monotonic() + GIVE_UP_SECONDS
    with contextlib.ExitStack() as held:
        while not until() and time.monotonic() < deadline:
            for _ in range(MANY if "many" in name else 1):
                try:
                    stranger = socket.create_connection(("127.0.0.1", port), 1.0)
                except OSError:
                    break
                with contextlib.suppress(OSError):
                    stranger.settimeout(1.0)
                    stranger.sendall(data)
                if "held" in name:
                    held.enter_context(stranger)
                else:
                    stranger.close()
            time.sleep(AGAIN_SECONDS)
