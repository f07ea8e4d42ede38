"""Messages between the processes and the hub, and the proof that a process belongs to the run.

A message consists of a length in four bytes and a JSON object of this length. Received bytes are
never executed or unpickled: the worst that they can do is end the connection. `asyncio` buffers
bytes that the other end does not read, so sending never waits.

The hub sends every new connection a challenge, a number that is used only once. The process answers
with a hello, and with an HMAC of the challenge and the hello; the key is the token that all
processes of the run share (`MANUALPAR_TOKEN`). The token itself is never sent, and somebody who
overhears an answer cannot use it again. Without a token, anybody who can reach the port can answer.
Every field of a hello is checked, because the sender may be a stranger until the proof is verified.
"""

import asyncio
import dataclasses
import hashlib
import hmac
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from types import NoneType
from typing import Any

from manualpar.system.storage.untrusted import parse_object

TOKEN_VARIABLE = "MANUALPAR_TOKEN"
# The messages of a run's processes are much shorter than this limit.
MAX_MESSAGE_BYTES = 2**20
MAX_HELLO_BYTES = 4096
MAX_NAME_CHARACTERS = 255
# The seconds of waiting after which the missing processes are named, and then between two notices.
FIRST_NOTICE_SECONDS = 5.0
NOTICE_SECONDS = 30.0

Message = dict[str, Any]
# The messages that an admitted process may send: for each kind, the names and types of its fields.
SAID: dict[str, dict[str, type]] = {
    "beat": {"progress": dict},
    "failed": {"error": str},
    "stop": {},
    "facts": {"value": dict},
    "share": {"value": dict, "wants": list},
    "held": {"value": int},
    "done": {"value": NoneType},
}


class NotMetError(ConnectionError):
    """The processes of a run have not met in time, or process 0 cannot be found."""


class NonsenseError(ConnectionError):
    """The other end sent a message that no process of a run would send."""

    def __init__(self) -> None:
        super().__init__("the program that answers there is no process of this run")


def send(writer: asyncio.StreamWriter, message: Message) -> None:
    """Sends a message; does nothing if the connection has ended."""
    send_to_all([writer], message)


def send_to_all(writers: Iterable[asyncio.StreamWriter], message: Message) -> None:
    """Sends several processes the same message, which is encoded once; see `send`."""
    data = json.dumps(message).encode()
    data = len(data).to_bytes(4, "big") + data
    for writer in writers:
        if not writer.is_closing():
            writer.write(data)


async def receive(reader: asyncio.StreamReader, *, max_bytes: int = MAX_MESSAGE_BYTES) -> Message:
    """Waits for the next message.

    Raises:
      ConnectionResetError: The connection has ended.
      NonsenseError: The received bytes are not a message, so the sender is no process of a run.
      OSError: The connection has failed in another way.
    """
    try:
        length = int.from_bytes(await reader.readexactly(4), "big")
        if length > max_bytes:
            raise ValueError("a message is shorter")
        return parse_object(await reader.readexactly(length))
    except EOFError:
        raise ConnectionResetError("the connection was closed") from None
    except ValueError:
        raise NonsenseError from None


def check_said(message: Message) -> None:
    """Raises a `NonsenseError` if a message is not one that a process may send to the hub."""
    kind = message.get("kind")
    fields = SAID.get(kind) if isinstance(kind, str) else None
    if fields is None or any(type(message.get(name)) is not fields[name] for name in fields):
        raise NonsenseError
    if kind == "facts" and any(type(value) is not str for value in message["value"].values()):
        raise NonsenseError
    if kind == "share" and any(type(process) is not int for process in message["wants"]):
        raise NonsenseError


async def beats(end: asyncio.Future[Any], timeout_seconds: float) -> AsyncIterator[float]:
    """Yields at regular intervals until `end` is done; a value is the seconds since the last one.

    The interval is at most an eighth of the timeout, so a process must miss several heartbeats
    before the timeout is over. If this process itself was stopped for a time, a value is at most
    two intervals, because the other end may have been alive in this time.
    """
    interval, last = min(timeout_seconds / 8, 1.0), time.monotonic()
    while not (await asyncio.wait([end], timeout=interval))[0]:
        now = time.monotonic()
        yield min(now - last, 2 * interval)
        last = now


def notice_times(timeout_seconds: float) -> Iterator[float]:
    """Yields the seconds of waiting after which to say who is missing: 5, 35, 65 and so on.

    The first notice comes after half of `timeout_seconds` if this is earlier.
    """
    return itertools.count(min(FIRST_NOTICE_SECONDS, timeout_seconds / 2), NOTICE_SECONDS)


@dataclasses.dataclass(frozen=True)
class Terms:
    """The settings with which a process joins a run."""

    process: int
    num_processes: int
    token: str
    timeout_seconds: float  # The time that a process may be silent before it counts as lost.
    join_seconds: float  # The time to wait until all processes have connected.


@dataclasses.dataclass(frozen=True)
class Hello:
    """A process's introduction: its number, its count of processes, its host and process id."""

    process: int
    num_processes: int
    host: str
    pid: int

    def prove(self, *, token: str, challenge: str) -> str:
        """Computes the proof that the sender knows the token: an HMAC of challenge and hello."""
        text = json.dumps([challenge, *dataclasses.astuple(self)])
        return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def make_hello(hello: Hello, *, token: str, challenge: str) -> Message:
    """Makes the message with which a process answers a challenge."""
    return {**dataclasses.asdict(hello), "proof": hello.prove(token=token, challenge=challenge)}


def read_hello(message: Message, *, token: str, challenge: str) -> Hello | None:
    """Reads the answer to a challenge; returns `None` if it is no hello or its proof is wrong."""
    values: list[Any] = [message.get(field.name) for field in dataclasses.fields(Hello)]
    if [type(value) for value in values] != [int, int, str, int]:
        return None
    hello = Hello(*values)
    proof = str(message.get("proof")).encode(errors="replace")
    is_right = hmac.compare_digest(proof, hello.prove(token=token, challenge=challenge).encode())
    return hello if is_right and len(hello.host) <= MAX_NAME_CHARACTERS else None
