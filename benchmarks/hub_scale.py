"""Measures the hub with thousands of simulated processes, and counts what it sends.

    python -m benchmarks.hub_scale --processes 64 1024 4096

The hub runs in a process of its own, as in process 0 of a run. A second process, the crowd, opens a
connection of loopback for each simulated process, proves the token, sends a heartbeat every second,
and counts the messages and bytes that arrive. So a simulated process needs no interpreter of its
own. The scenes are:

    connect   all connect, while the hub already listens
    beats     a heartbeat of each process every second, for `--seconds`
    facts     all compare their facts
    share     each process gives a value, and gets the values of its peers, as preflight does
    one lost  one connection closes; the time until the last of the others has its name
    all lost  the crowd is killed; the time until the hub has ended
    all back  all knock before the hub listens; the time from then until all are admitted

`--table` prints only what a start, a second of training and an end send, from 8 to 16,384
processes. The numbers are computed by `count_messages`, and a test compares them with the messages
that are counted in a crowd. The hub listens at 127.0.0.1 only, and everything ends by itself after
`--limit` seconds.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.turns import table
from manualpar.system.cluster.failure_detector import MOST_TOLD, ProcessProgress
from manualpar.system.cluster.hub import Hub
from manualpar.system.cluster.messages import (
    MAX_HELLO_BYTES,
    Hello,
    Message,
    Terms,
    make_hello,
    receive,
    send,
)
from manualpar.system.cluster.preflight import peers
from manualpar.system.cluster.this_host import check_hub_limits, raise_limits

LOOPBACK = "127.0.0.1"
TIMEOUT_SECONDS = 60.0  # Nothing is lost because this machine is busy with both ends.
KNOCK_SECONDS = 0.5
AT_ONCE = 256  # Connections that the crowd opens at one time.
SHARED_BYTES = 300  # A process's report in preflight.
FACTS = {f"config.field_{number}": "a value" for number in range(200)}
SIZES = (8, 64, 512, 4096, 16384)

Pipe = Any  # A `multiprocessing.connection.Connection`; its types differ between Pythons.


def count_messages(count: int) -> dict[str, int]:
    """Counts the messages and connections of a run of `count` processes, in all processes.

    `share` is the exchange of preflight: a message to the hub from each process, the values of its
    peers, and a message after the last of them. Process 0 gets the values of all.
    """
    wanted = count + sum(len(peers(process, count)) for process in range(1, count))
    return {
        "connections to the hub": count,
        "connect": 3 * count,
        "facts": 2 * count,
        "share": wanted + 2 * count,
        "preflight's connections": sum(len(peers(process, count)) for process in range(count)),
        "beats in a second": 2 * count,
        "one lost": count - 1,
        "stop": 4 * count + 1,
    }


def beat_bytes(count: int) -> int:
    """Returns the bytes of a heartbeat that the hub sends to one of `count` training processes."""
    told = [[count - 1, 100_000, 1234.5]] * min(count, MOST_TOLD)
    return 4 + len(json.dumps({"kind": "beat", "steps": told}))


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, and prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hub_scale")
    parser.add_argument("--processes", type=int, nargs="*", default=[64, 1024, 4096])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--limit", type=float, default=300.0)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args(argv)
    print("\n".join(grown_rows(SIZES)))
    if args.table:
        return
    for count in args.processes:
        measured = measure(count, seconds=args.seconds, limit=args.limit)
        print("\n".join(["", f"{count:,} processes", *measured_rows(measured)]))


def grown_rows(sizes: Sequence[int]) -> list[str]:
    """Makes the table of what grows with the number of processes."""
    counts = [count_messages(size) for size in sizes]
    lines = [[name, *(f"{one[name]:,}" for one in counts)] for name in counts[0]]
    per_second = [f"{size * beat_bytes(size) / 1e6:,.2f}" for size in sizes]
    lines.append(["MB that the hub sends in a second", *per_second])
    return table(["messages", *(f"{size:,}" for size in sizes)], lines)


def measured_rows(scenes: dict[str, dict[str, float]]) -> list[str]:
    """Makes the table of a measurement."""
    lines = [
        [
            name,
            f"{scene['seconds']:.2f}",
            f"{scene['hub']:.2f}",
            f"{scene['memory'] / 1e6:,.0f}",
            f"{scene['messages']:,.0f}",
            f"{scene['bytes'] / 1e6:.2f}",
        ]
        for name, scene in scenes.items()
    ]
    headers = ["scene", "seconds", "hub's CPU s", "hub's MB", "messages received", "MB received"]
    return table(headers, lines)


def measure(count: int, *, seconds: float = 10.0, limit: float = 300.0) -> dict[str, Any]:
    """Runs the scenes with `count` simulated processes; returns the numbers of each scene.

    Raises:
      TimeoutError: Not all was over after `limit` seconds.
    """
    raise_limits(count)
    check_hub_limits(count)
    until = time.monotonic() + limit
    scenes: dict[str, Any] = {}
    with _children(count, limit) as (hub, crowd):
        port = _ask(hub, "listen", until)["port"]

        def scene(name: str, *command: Any) -> None:
            before, began = _ask(hub, "cost", until), time.monotonic()
            found = _ask(crowd, (*command, port), until)
            after = _ask(hub, "cost", until)
            spent = {"hub": after["cpu"] - before["cpu"], "memory": after["memory"]}
            scenes[name] = {"seconds": time.monotonic() - began, **spent, **found}

        scene("connect", "connect")
        scene("beats", "beat", seconds)
        scene("facts", "facts")
        scene("share", "share")
        scene("one lost", "lose one")
        _ask(hub, "join", until)
        port = _ask(hub, "listen", until)["port"]
        scene("connect again", "connect")
        before, began = _ask(hub, "cost", until), time.monotonic()
        _ask(crowd, ("kill", port), until, answers=False)
        _ask(hub, "join", until)
        after = _ask(hub, "cost", until)
        spent = {"hub": after["cpu"] - before["cpu"], "memory": after["memory"]}
        scenes["all lost"] = {
            "seconds": after["ended"] - began,
            **spent,
            "messages": 0,
            "bytes": 0,
        }
    with _children(count, limit) as (hub, crowd):
        with socket.create_server((LOOPBACK, 0)) as chosen:
            port = chosen.getsockname()[1]
        crowd.send(("connect", port))
        time.sleep(min(seconds, 3.0))
        before, began = _ask(hub, "cost", until), time.monotonic()
        _ask(hub, ("listen", port), until)
        found = _answer(crowd, until)
        after = _ask(hub, "cost", until)
        spent = {"hub": after["cpu"] - before["cpu"], "memory": after["memory"]}
        scenes["all back"] = {"seconds": time.monotonic() - began, **spent, **found}
    return scenes


@contextlib.contextmanager
def _children(count: int, limit: float) -> Any:
    """Starts the hub's process and the crowd's; kills both at the end. Yields a pipe to each."""
    context = multiprocessing.get_context("spawn")
    token, pipes, processes = secrets.token_hex(16), [], []
    try:
        for target in (_serve_hub, _serve_crowd):
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, count, token, limit))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _ask(pipe: Pipe, command: Any, until: float, *, answers: bool = True) -> Any:
    with contextlib.suppress(BrokenPipeError):
        pipe.send(command)
    return _answer(pipe, until) if answers else None


def _answer(pipe: Pipe, until: float) -> Any:
    if not pipe.poll(max(until - time.monotonic(), 0.0)):
        raise TimeoutError("the hub or the crowd did not answer before --limit")
    return pipe.recv()


def _serve_hub(pipe: Pipe, count: int, token: str, limit: float) -> None:
    """Runs hubs as the parent asks for them."""
    signal.alarm(int(limit) + 30)  # Ends this process even if the parent was killed.
    terms, hub, ended = Terms(0, count, token, TIMEOUT_SECONDS, limit), None, 0.0
    while True:
        match pipe.recv():
            case "listen" | ("listen", _) as command:
                port = command[1] if isinstance(command, tuple) else 0
                listener = socket.create_server((LOOPBACK, port))
                hub = Hub(listener, terms)
                pipe.send({"port": listener.getsockname()[1]})
            case "join":
                assert hub is not None
                hub.thread.join()
                ended = time.monotonic()
                pipe.send({})
            case "cost":
                memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                pipe.send({"cpu": time.process_time(), "memory": memory, "ended": ended})


def _serve_crowd(pipe: Pipe, count: int, token: str, limit: float) -> None:
    signal.alarm(int(limit) + 30)
    asyncio.run(_Crowd(pipe, count, token).serve())


class _Crowd:
    """The simulated processes."""

    def __init__(self, pipe: Pipe, count: int, token: str) -> None:
        self._pipe, self._count, self._token = pipe, count, token
        self._members: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._received: Counter[str] = Counter()
        self._bytes = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: dict[str, asyncio.Event] = {}
        self._needed: dict[str, int] = {}

    async def serve(self) -> None:
        """Runs the scenes as the parent asks for them."""
        loop = asyncio.get_running_loop()
        scenes: dict[str, Callable[..., Any]] = {
            "connect": self._connect,
            "beat": self._beat,
            "facts": self._compare,
            "share": self._share,
            "lose one": self._lose_one,
            "kill": self._kill,
        }
        while True:
            name, *options, port = await loop.run_in_executor(None, self._pipe.recv)
            before, size = self._received.copy(), self._bytes
            await scenes[name](*options, port)
            received = dict(self._received - before)
            self._pipe.send(
                {
                    "messages": sum(received.values()),
                    "bytes": self._bytes - size,
                    "kinds": received,
                }
            )

    async def _connect(self, port: int) -> None:
        for task in self._tasks:
            task.cancel()
        self._members.clear()
        gate = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(self._knock(x, port, gate) for x in range(self._count)))
        self._tasks = [asyncio.create_task(self._hear(x)) for x in range(self._count)]
        self._tasks.append(asyncio.create_task(self._keep_beating()))

    async def _knock(self, process: int, port: int, gate: asyncio.Semaphore) -> None:
        hello = Hello(process, self._count, f"n{process}", os.getpid())
        while True:
            try:
                async with gate:
                    reader, writer = await asyncio.open_connection(
                        LOOPBACK, port, limit=MAX_HELLO_BYTES
                    )
                    challenge = (await self._receive(reader))["challenge"]
                    send(writer, make_hello(hello, token=self._token, challenge=challenge))
                    assert (await self._receive(reader))["kind"] == "admitted"
                self._members[process] = (reader, writer)
                return
            except OSError:
                await asyncio.sleep(KNOCK_SECONDS)

    async def _receive(self, reader: asyncio.StreamReader) -> Message:
        message = await receive(reader)
        self._received[message["kind"]] += 1
        self._bytes += 4 + len(json.dumps(message))
        if event := self._waiting.get(message["kind"]):
            self._needed[message["kind"]] -= 1
            if not self._needed[message["kind"]]:
                event.set()
        return message

    async def _hear(self, process: int) -> None:
        reader, writer = self._members[process]
        with contextlib.suppress(OSError):
            while (await self._receive(reader))["kind"] not in ("lost", "end"):
                pass
        writer.transport.abort()

    async def _keep_beating(self) -> None:
        """Sends a heartbeat of each process every second, at times that are spread evenly."""
        progress = vars(ProcessProgress(step=100_000, phase="in a step", is_known=True))
        rounds, began = 0, time.monotonic()
        while True:
            for number, (_, writer) in enumerate(list(self._members.values())):
                send(writer, {"kind": "beat", "progress": progress})
                if number % 64 == 63:
                    due = began + rounds + number / self._count
                    await asyncio.sleep(max(due - time.monotonic(), 0))
            rounds += 1
            await asyncio.sleep(max(began + rounds - time.monotonic(), 0))

    async def _beat(self, seconds: float, port: int) -> None:
        del port
        await asyncio.sleep(seconds)

    async def _all(self, kind: str, count: int) -> None:
        self._waiting[kind], self._needed[kind] = asyncio.Event(), count
        await self._waiting[kind].wait()
        del self._waiting[kind]

    async def _compare(self, port: int) -> None:
        del port
        for _, writer in self._members.values():
            send(writer, {"kind": "facts", "value": FACTS})
        await self._all("agreed", self._count)

    async def _share(self, port: int) -> None:
        del port
        value = {"host": "x" * SHARED_BYTES}
        for process, (_, writer) in self._members.items():
            wants = peers(process, self._count) if process else range(self._count)
            send(writer, {"kind": "share", "value": value, "wants": list(wants)})
        await self._all("shared all", self._count)

    async def _lose_one(self, port: int) -> None:
        del port
        self._members[self._count // 2][1].transport.abort()
        await self._all("lost", self._count - 1)

    async def _kill(self, port: int) -> None:
        del port
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
