"""How a process proves to the hub that it belongs to the run, and how the hub treats strangers.

The hub sends every new connection a number that it uses once, and a process answers with an HMAC of
it under the token that all processes of the run have (`MANUALPAR_TOKEN`). So the token itself never
travels, and an answer that somebody overheard is of no use. Without a token anybody who can reach
the port may answer.

Everything in a hello comes from a stranger until its proof is right, so every field is checked.
"""

import dataclasses
import hashlib
import hmac
import secrets
import socket
from typing import Any

from manualpar.cluster.link import Message

TOKEN_VARIABLE = "MANUALPAR_TOKEN"
# A stranger may send so much, take so long and be one of so many besides the processes.
MAX_HELLO_BYTES = 4096
STRANGER_SECONDS = 10.0
MAX_STRANGERS = 64
MAX_NAME_CHARACTERS = 255


@dataclasses.dataclass(frozen=True)
class Hello:
    """What a process says of itself when it connects.

    Attributes:
      process: Its number.
      num_processes: How many processes it expects.
      host: The name of its host.
      pid: Its process id there.
    """

    process: int
    num_processes: int
    host: str
    pid: int


def make_challenge() -> str:
    """A number for one use, as text."""
    return secrets.token_hex(16)


def make_hello(hello: Hello, *, token: str, challenge: str) -> dict[str, Any]:
    """The message with which a process answers a challenge."""
    fields = dataclasses.asdict(hello)
    return {"kind": "hello", **fields, "proof": _prove(hello, token, challenge)}


def read_hello(message: Message, *, token: str, challenge: str) -> Hello | None:
    """Reads the answer to a challenge.

    Args:
      message: Whatever has come.
      token: The token of this run.
      challenge: What the connection was sent.

    Returns:
      Who it is; `None` if the message is no hello, or its proof is not right.
    """
    process, count = message.get("process"), message.get("num_processes")
    host, pid, proof = message.get("host"), message.get("pid"), message.get("proof")
    if type(process) is not int or type(count) is not int or type(pid) is not int:
        return None
    if not isinstance(host, str) or len(host) > MAX_NAME_CHARACTERS or not isinstance(proof, str):
        return None
    hello = Hello(process, count, host, pid)
    expected = _prove(hello, token, challenge)
    is_right = hmac.compare_digest(proof.encode(errors="replace"), expected.encode())
    return hello if is_right else None


def receive_line(connection: socket.socket) -> bytes:
    """Takes one line from a socket that blocks, and nothing that comes after it.

    Raises:
      OSError: The connection ended or was silent for the socket's timeout before the line did, or
        the line is too long.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        data = connection.recv(1)
        if not data:
            raise ConnectionResetError("the connection was closed")
        line += data
        if len(line) > MAX_HELLO_BYTES:
            raise ConnectionError("what answers there is no process of this run")
    return bytes(line)


def _prove(hello: Hello, token: str, challenge: str) -> str:
    """The HMAC that shows that who says hello has the token."""
    text = f"{challenge} {hello.process} {hello.num_processes} {hello.pid} {hello.host}"
    return hmac.new(token.encode(), text.encode(errors="replace"), hashlib.sha256).hexdigest()
