"""How the processes find the hub: process 0 listens, and the others knock until it answers.

Where the coordinator's address is given, they meet there before JAX does: the hub listens on the
coordinator's own port, and frees it for JAX's coordination service when all have come. So one port
is enough, and no stranger can reach the hub while the run trains.
"""

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Sequence

from manualpar.cluster.admission import Hello, make_hello, receive_line
from manualpar.cluster.facts import DisagreementError

CONNECT_SECONDS = 5.0
KNOCK_SECONDS = 0.1
BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"


def listen(address: str, *, backlog: int) -> socket.socket:
    """Opens the port that the processes meet at, on that address only.

    Args:
      address: `host:port`, the host being this one.
      backlog: How many may connect at once.

    Returns:
      The socket, listening.

    Raises:
      ConnectionError: The address is not one of this host's, or its port is taken.
    """
    host, port = split_address(address)
    failure: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        failure, found = error, []
    for family, _, _, _, where in found:
        is_all = where[0] == "::" and socket.has_dualstack_ipv6()
        try:
            return socket.create_server(
                where[:2], family=family, backlog=max(backlog, 128), dualstack_ipv6=is_all
            )
        except OSError as error:
            failure = error
    if failure is not None and failure.errno == errno.EADDRINUSE:
        mend = "another program has that port; choose a free one"
    else:
        mend = (
            "expected an address of this host, because it is process 0; give its own address, or "
            f"set {BIND_VARIABLE} to the one to listen at, such as [::]:{port} for all"
        )
    raise ConnectionError(f"initialize: process 0 cannot listen at {address} ({failure}): {mend}")


def knock(
    hosts: Sequence[str],
    port: int,
    *,
    process: int,
    num_processes: int,
    token: str,
    warn_seconds: float,
    give_up_seconds: float,
    announce: Callable[[str], None],
) -> socket.socket:
    """Connects to the hub, as soon as it is there, and says who this is.

    Args:
      hosts: Names and addresses of process 0, any of which may work.
      port: The port of the hub.
      process: Which process this is.
      num_processes: How many it expects.
      token: The token of the run, or nothing.
      warn_seconds: After how long it is said that process 0 is not there yet.
      give_up_seconds: After how long it is given up.
      announce: Shows a sentence.

    Returns:
      The connection. The hub has admitted this process.

    Raises:
      ConnectionError: Process 0 was not there in time.
      DisagreementError: The number of processes differs.
      ValueError: Process 0 does not take this process for one of its own.
    """
    hello = Hello(process, num_processes, socket.gethostname(), os.getpid())
    began, has_warned = time.monotonic(), False
    while True:
        failures = []
        for host in dict.fromkeys(hosts):
            try:
                connection = socket.create_connection((host, port), CONNECT_SECONDS)
                try:
                    _introduce(connection, hello, token)
                except BaseException:
                    connection.close()
                    raise
            except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError) as error:
                failures.append(f"{host}: {error}")
            else:
                return connection
        waited, reasons = time.monotonic() - began, "; ".join(failures)
        if waited > give_up_seconds:
            raise ConnectionError(
                f"initialize: process 0 cannot be reached on its port {port} within "
                f"{give_up_seconds:g} s, expected an open network between the hosts of a run, and "
                f"all processes to be started with the same address ({reasons})"
            )
        if waited > warn_seconds and not has_warned:
            has_warned = True
            announce(
                f"process 0 is not there after {warn_seconds:g} s, at port {port} ({reasons}); "
                f"waiting up to {give_up_seconds:g} s"
            )
        time.sleep(KNOCK_SECONDS)


def _introduce(connection: socket.socket, hello: Hello, token: str) -> None:
    """Answers the hub's challenge, and waits to be admitted."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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


def split_address(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port of `host:port`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
