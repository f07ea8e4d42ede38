"""One end of a connection: messages, each a JSON object on a line.

Nothing that is received is executed or unpickled. Whatever the other end sends, the worst that
happens is that the link closes: a line that is too long, too deep or no JSON object does not come
from one of our processes. `asyncio` keeps what the other end does not read, so sending never waits.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

# The messages of our own processes are far shorter.
MAX_LINE_BYTES = 2**20

Message = dict[str, Any]


class Link(asyncio.Protocol):
    """Sends and receives messages; belongs to one event loop.

    Attributes:
      max_line_bytes: The link closes when a line is longer.
      is_closed: A future that is done when the link is closed.
    """

    def __init__(
        self,
        *,
        opened: Callable[["Link"], None],
        received: Callable[["Link", Message], None],
        closed: Callable[["Link"], None],
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        """Makes a link for `asyncio` to connect; it calls the functions from the event loop."""
        self._opened, self._received, self._closed = opened, received, closed
        self._rest = b""
        self.max_line_bytes = max_line_bytes
        self.is_closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message, unless the link is closed."""
        if not self._transport.is_closing():
            self._transport.write(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Closes this end at once."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by `asyncio`: there is a connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._opened(self)

    def data_received(self, data: bytes) -> None:
        """Called by `asyncio`: takes what has arrived."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            message = _parse(line) if len(line) <= self.max_line_bytes else None
            if message is None:
                self.close()
            elif not self._transport.is_closing():
                self._received(self, message)
        if len(self._rest) > self.max_line_bytes:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by `asyncio`: the connection has ended."""
        self.is_closed.set_result(None)
        self._closed(self)


async def beats(
    end: asyncio.Future[Any], *, timeout_seconds: float
) -> AsyncIterator[tuple[float, float]]:
    """Until `end` is done, yields the time and the seconds since the beat before.

    There are so many beats that several must go missing before the timeout. Seconds in which this
    process itself was stopped are left out: its own sleep is nobody else's silence.
    """
    interval, last = min(timeout_seconds / 8, 1.0), time.monotonic()
    while not (await asyncio.wait([end], timeout=interval))[0]:
        now = time.monotonic()
        yield now, min(now - last, 2 * interval)
        last = now


def _parse(line: bytes) -> Message | None:
    """The message on a line; `None` if there is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # The second for `[[[[`: Python limits the depth.
        return None
    return message if isinstance(message, dict) else None
