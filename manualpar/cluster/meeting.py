"""How the processes find the hub, and prove that they belong to the run.

Process 0 listens, and every process knocks until the hub answers. Where the coordinator's address
is given, they meet there before JAX does: the hub listens on the coordinator's own port, and frees
it for JAX's coordination service when all processes have come. So one port is enough, and no
stranger can reach the hub while the run trains.

The hub sends every new connection a challenge, a number that it uses once. The process answers with
an HMAC of it under the token that all processes of the run share (`MANUALPAR_TOKEN`). The token
itself never travels, and an overheard answer is useless. Without a token, anybody who can reach the
port may answer. Until its proof is right, a hello comes from a stranger: every field is checked.
"""

import dataclasses
import errno
import hashlib
import hmac
import json
import os
import socket
import time
from collections.abc import Sequence

from manualpar.cluster.facts import DisagreementError, announce
from manualpar.cluster.link import Message

TOKEN_VARIABLE = "MANUALPAR_TOKEN"
BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
MAX_HELLO_BYTES = 4096
MAX_NAME_CHARACTERS = 255
CONNECT_SECONDS = 5.0
KNOCK_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Terms:
    """On which terms a process joins a run.

    Attributes:
      process: Its number.
      num_processes: How many processes it expects.
      token: The token of the run, or nothing.
      timeout_seconds: How long a process may be silent.
      join_seconds: How long to wait for all processes to connect.
    """

    process: int
    num_processes: int
    token: str
    timeout_seconds: float
    join_seconds: float


@dataclasses.dataclass(frozen=True)
class Hello:
    """What a process says of itself: its number, how many it expects, its host and process id."""

    process: int
    num_processes: int
    host: str
    pid: int


def make_hello(hello: Hello, *, token: str, challenge: str) -> Message:
    """The message with which a process answers a challenge."""
    proof = _prove(hello, token, challenge)
    return {"kind": "hello", **dataclasses.asdict(hello), "proof": proof}


def read_hello(message: Message, *, token: str, challenge: str) -> Hello | None:
    """The answer to a challenge; `None` if it is not a hello, or its proof is wrong."""
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


def listen(address: str) -> socket.socket:
    """Opens the port `host:port` that the processes meet at, on that address only.

    Raises:
      ConnectionError: The address is not one of this host's, or its port is taken.
    """
    host, port = split_address(address)
    failures = []
    try:
        for family, _, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            is_all = where[0] == "::" and socket.has_dualstack_ipv6()
            try:
                server = socket.create_server(where[:2], family=family, dualstack_ipv6=is_all)
                # Its connections inherit this: asyncio sets it only for those that it makes itself.
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return server
            except OSError as error:
                failures.append(error)
    except OSError as error:  # No such host.
        failures.append(error)
    mend = (
        "expected an address of this host, because it is process 0; give its own address, or set "
        f"{BIND_VARIABLE} to the one to listen at, such as [::]:{port} for all"
    )
    if failures[-1].errno == errno.EADDRINUSE:
        mend = "another program has that port; choose a free one"
    raise ConnectionError(
        f"initialize: process 0 cannot listen at {address} ({failures[-1]}): {mend}"
    )


def knock(hosts: Sequence[str], port: int, terms: Terms) -> socket.socket:
    """Connects to the hub as soon as it is there, on any of the hosts, and says who this is.

    Returns the connection on which the hub has admitted this process. If that takes half the
    timeout, it announces that process 0 is not there.

    Raises:
      ConnectionError: Process 0 was not there in time.
      DisagreementError: The number of processes differs.
      ValueError: Process 0 does not take this process for one of its own.
    """
    hello = Hello(terms.process, terms.num_processes, socket.gethostname(), os.getpid())
    began, has_warned, warn_seconds = time.monotonic(), False, terms.timeout_seconds / 2
    while True:
        failures = []
        for host in dict.fromkeys(hosts):
            try:
                connection = socket.create_connection((host, port), CONNECT_SECONDS)
                try:
                    _introduce(connection, hello, terms.token)
                except BaseException:
                    connection.close()
                    raise
            except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError) as error:
                failures.append(f"{host}: {error}")
            else:
                return connection
        waited, reasons = time.monotonic() - began, "; ".join(failures)
        if waited > terms.join_seconds:
            raise ConnectionError(
                f"initialize: process 0 cannot be reached on its port {port} within "
                f"{terms.join_seconds:g} s, expected an open network between the hosts of a run, "
                f"and all processes to be started with the same address ({reasons})"
            )
        if waited > warn_seconds and not has_warned:
            has_warned = True
            announce(
                f"process 0 is not there after {warn_seconds:g} s, at port {port} ({reasons}); "
                f"waiting up to {terms.join_seconds:g} s"
            )
        time.sleep(KNOCK_SECONDS)


def receive_line(connection: socket.socket) -> bytes:
    """Takes one line from a blocking socket, and nothing that comes after it.

    Raises:
      OSError: The connection ended, it timed out, or the line is too long.
    """
    with connection.makefile("rb", buffering=0) as stream:
        line = stream.readline(MAX_HELLO_BYTES + 1)
    if len(line) > MAX_HELLO_BYTES:
        raise ConnectionError("what answers there is no process of this run")
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the connection was closed")
    return line


def split_address(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port of `host:port`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _introduce(connection: socket.socket, hello: Hello, token: str) -> None:
    """Answers the hub's challenge, and waits to be admitted."""
    challenge = json.loads(receive_line(connection))["challenge"]
    message = make_hello(hello, token=token, challenge=str(challenge))
    connection.sendall(json.dumps(message).encode() + b"\n")
    answer = json.loads(receive_line(connection))
    if answer["kind"] == "differences":
        raise DisagreementError([str(line) for line in answer["differences"]])
    if answer["kind"] == "refused":
        raise ValueError(
            f"initialize: process 0 refuses process {hello.process}: {answer['reason']}; start all "
            "processes with the same token, and each with a number of its own."
        )


def _prove(hello: Hello, token: str, challenge: str) -> str:
    text = f"{challenge} {hello.process} {hello.num_processes} {hello.pid} {hello.host}"
    return hmac.new(token.encode(), text.encode(errors="replace"), hashlib.sha256).hexdigest()
