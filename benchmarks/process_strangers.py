"""Sends bytes to the coordinator's port, as a stranger may, for `benchmarks.process_faults`."""

import contextlib
import json
import socket
import time
from collections.abc import Callable


def frame(data: bytes) -> bytes:
    """Returns a message after its length in 4 bytes, the format of the processes' messages."""
    return len(data).to_bytes(4, "big") + data


HELLO = {"process": 1, "num_processes": 2, "host": "h", "pid": 1, "proof": "0" * 64}
STRANGERS: dict[str, bytes] = {
    "deep JSON": frame(b"[" * 100_000),
    "deep JSON in a short message": frame(b"[" * 4000),
    "bytes that are no text": frame(b"\x00\xff\n" * 50),
    "2 MB": b"a" * 2_000_000,
    "HTTP": b"GET / HTTP/1.0\r\n\r\n",
    "a hello with a wrong proof": frame(json.dumps(HELLO).encode()),
    "a hello without fields": frame(b'{"proof": ""}'),
    "other kinds of messages": frame(b'{"kind": "failed", "error": "x"}')
    + frame(b'{"kind": "stop"}'),
    "half a message, held": frame(b'{"kind": "hello"}')[:10],
    "many connections, held": b"",
}
MANY = 400
AGAIN_SECONDS = 0.1
GIVE_UP_SECONDS = 120.0


def disturb(name: str, port: int, *, until: Callable[[], bool]) -> None:
    """Connects to a port and sends bytes, again and again.

    Args:
      name: One of `STRANGERS`.
      port: The port on this machine.
      until: Returns whether to stop.
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
