"""One end of a connection: messages, each a JSON object on a line, over a socket that never blocks.

Invariants: a link belongs to one thread. What the other end does not take waits here, so a process
that is stopped holds nobody up. Nothing that is received is executed or unpickled. Whatever the
other end sends, at worst the link closes: a line that is too long, too deep or no JSON object is
not one of ours.
"""

import json
import socket
from collections.abc import Mapping
from typing import Any

# Nothing that the processes say to each other comes near it.
MAX_LINE_BYTES = 2**20
RECEIVE_BYTES = 2**16

Message = dict[str, Any]


class Link:
    """Sends and receives messages.

    Attributes:
      is_open: Whether the other end is still there, as far as is known.
      max_line_bytes: The link closes when a line is longer.
    """

    def __init__(self, connection: socket.socket, *, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        """Takes over a connected socket."""
        connection.setblocking(False)
        self._socket = connection
        self._received = bytearray()
        self._waiting = bytearray()
        self.is_open = True
        self.max_line_bytes = max_line_bytes

    def fileno(self) -> int:
        """The file descriptor, for `selectors`."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message, or as much of it as the other end takes now."""
        self._waiting += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends on what waits."""
        while self.is_open and self._waiting:
            try:
                sent = self._socket.send(self._waiting)
            except BlockingIOError:
                return  # The other end reads nothing; the next flush tries again.
            except OSError:
                self.is_open = False
                return
            del self._waiting[:sent]

    def receive(self) -> list[Message]:
        """Takes what has arrived; empty if there is no whole message.

        What arrived before the other end closed is still returned.
        """
        while self.is_open and len(self._received) <= self.max_line_bytes:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.is_open = bool(data)
            self._received += data
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        messages: list[Message] = []
        if any(len(line) > self.max_line_bytes for line in (*lines, rest)):
            self.is_open = False
            return messages
        for line in lines:
            message = _parse(line)
            if message is None:
                self.is_open = False  # Whoever this is, it is none of our processes.
                break
            messages.append(message)
        return messages

    def close(self) -> None:
        """Closes this end."""
        self.is_open = False
        self._socket.close()


def _parse(line: bytes | bytearray) -> Message | None:
    """The message of a line; `None` if it is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # The second for `[[[[`: Python limits the depth.
        return None
    return message if isinstance(message, dict) else None
