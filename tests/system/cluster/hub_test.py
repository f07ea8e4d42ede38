"""The hub and its processes over real sockets, in one process: who is let in, and who is not."""

import asyncio
import contextlib
import dataclasses
import errno
import json
import re
import resource
import socket
import threading
import time

import pytest

from manualpar.system.cluster import DisagreementError
from manualpar.system.cluster.cluster import Channel, knock
from manualpar.system.cluster.failure_detector import Pace, ProcessProgress
from manualpar.system.cluster.hub import MAX_STRANGERS, Hub
from manualpar.system.cluster.messages import Terms
from manualpar.system.cluster.startup import listen, split_address
from manualpar.system.cluster.stopping import StopGate
from manualpar.system.cluster.this_host import check_hub_limits, raise_limits
from tests.system.cluster.framing import framed

HANG_SECONDS = 60


def knock_and_leave(port, terms):
    """Connects as a process does, and closes the connection."""

    async def run():
        _, writer, _ = await knock(["127.0.0.1"], port, terms)
        writer.close()
        await writer.wait_closed()

    asyncio.run(run())


class Meeting:
    """A hub, and the processes that knock at it, each from a thread as from a process."""

    def __init__(self, num_processes=2, *, timeout_seconds=30.0, join_seconds=HANG_SECONDS):
        listener = listen("127.0.0.1:0")
        self.port = listener.getsockname()[1]
        self.terms = Terms(0, num_processes, "secret", timeout_seconds, join_seconds)
        self.lost, self.channels, self.gates = {}, {}, {}
        self.hub = Hub(listener, self.terms)

    def join(self, process, **others):
        self.channels[process] = Channel(
            ["127.0.0.1"],
            self.port,
            dataclasses.replace(self.terms, process=process, **others),
            gate=self.gates.setdefault(process, StopGate()),
            pace=Pace(),
            on_loss=lambda loss: self.lost.__setitem__(process, loss),
        )
        return self.channels[process]

    def join_all(self):
        for process in range(self.terms.num_processes):
            self.join(process)
        assert not self.lost

    def agree(self, facts):
        """Has every process say its facts; returns what each got to hear."""
        heard = {}

        def say(process):
            try:
                self.channels[process].agree(facts[process])
                heard[process] = None
            except DisagreementError as error:
                heard[process] = str(error)

        threads = [threading.Thread(target=say, args=(process,)) for process in facts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_SECONDS)
        return heard

    def end(self):
        for channel in self.channels.values():
            channel.send({"kind": "done", "value": None})
        self.hub.thread.join(HANG_SECONDS)
        assert not self.hub.thread.is_alive()


@pytest.fixture
def connect():
    """Connects strangers to a port."""
    with contextlib.ExitStack() as stack:
        yield lambda port: stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))


def test_processes_meet_agree_and_part(capfd):
    meeting = Meeting(3)
    meeting.join_all()
    same = {process: {"seed": "1"} for process in range(3)}
    assert meeting.agree(same) == dict.fromkeys(range(3))
    assert meeting.agree(same) == dict.fromkeys(range(3))
    meeting.end()
    assert not meeting.lost
    assert not capfd.readouterr().err


def test_what_differs_is_told_to_all_and_ends_the_hub_without_a_loss():
    meeting = Meeting(3)
    meeting.join_all()
    heard = meeting.agree({process: {"seed": str(process // 2)} for process in range(3)})
    assert set(heard) == {0, 1, 2}
    for sentence in heard.values():
        assert "seed is 0 in processes 0, 1 and 1 in process 2" in sentence
    meeting.hub.thread.join(HANG_SECONDS)
    assert not meeting.hub.thread.is_alive()
    assert not meeting.lost


def test_all_stop_in_the_call_after_the_largest_number():
    meeting, calls = Meeting(3), (4, 7, 5)
    meeting.join_all()
    for gate, number in zip(meeting.gates.values(), calls, strict=True):
        assert not any(gate.should_stop() for _ in range(number))
    meeting.channels[1].send({"kind": "stop"})
    meeting.channels[2].send({"kind": "stop"})
    # Every process has heard of it when all have agreed on something after it.
    assert meeting.agree({process: {} for process in range(3)}) == dict.fromkeys(range(3))
    for gate, number in zip(meeting.gates.values(), calls, strict=True):
        told = [gate.should_stop() for _ in range(9 - number)]
        assert told == [False] * (7 - number) + [True] * 2
    meeting.end()


def is_open(stranger):
    """Whether the hub has not closed the connection, besides what it has said on it."""
    stranger.setblocking(False)
    try:
        while stranger.recv(4096):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


STRANGERS = [
    b"GET / HTTP/1.0\r\n\r\n",
    b"a" * 2_000_000,
    b"\x00\xff\n" * 5,
    framed(b"[" * 4000),
    framed(b'{"a":' * 700),
    framed(b"null"),
    framed(b'{"kind":"stop"}'),
    framed(b'{"kind":"failed","error":"x"}'),
    framed(b'{"process":1}') + framed(b'{"kind":"done","value":null}'),
    framed(b'{"process":"1","num_processes":2,"host":[],"pid":{},"proof":1}'),
    framed(b'{"process":1,"num_processes":2,"host":"h","pid":1,"proof":"\\ud800"}'),
    framed(b'{"process":1,"num_processes":2,"host":"h","pid":1,"proof":"' + b"0" * 4096 + b'"}'),
]


def test_no_stranger_stops_the_hub(connect):
    meeting = Meeting()
    meeting.join(0)
    for data in STRANGERS:
        stranger = connect(meeting.port)
        with contextlib.suppress(ConnectionError):  # It is closed while it still talks.
            stranger.sendall(data)
    for _ in range(3):
        connect(meeting.port).sendall(framed(b'{"kind"')[:7])  # And says no more.
    meeting.join(1)
    meeting.end()
    assert not meeting.lost


def beat(**changes):
    """A beat whose progress has other fields."""
    progress = dataclasses.asdict(ProcessProgress()) | changes
    return framed(json.dumps({"kind": "beat", "progress": progress}).encode())


NONSENSE = [
    framed(b"null"),
    framed(b"[" * 4000),
    b"\xff" * 8,  # Longer than any message.
    framed(b"{}"),
    framed(b'{"kind":[]}'),
    framed(b'{"kind":"no such kind","value":1}'),
    framed(b'{"kind":"failed"}'),
    framed(b'{"kind":"held","value":"many"}'),
    framed(b'{"kind":"held","value":true}'),
    framed(b'{"kind":"facts","value":[]}'),
    framed(b'{"kind":"facts","value":{"seed":1}}'),
    framed(b'{"kind":"beat"}'),
    framed(b'{"kind":"beat","progress":{}}'),
    beat(count="1"),
    beat(stuck=None),
    beat(step=1.5),
    beat(more=1),
    beat(longest=10**400),
    framed(beat()[4:].replace(b"0.0", b"1e999")),  # Python takes it for infinity.
]


@pytest.mark.parametrize("said", NONSENSE)
def test_a_process_that_talks_nonsense_is_lost_in_a_sentence(said, capfd):
    meeting = Meeting(2)
    meeting.join(0)

    async def talk():
        _, writer, _ = await knock(
            ["127.0.0.1"], meeting.port, dataclasses.replace(meeting.terms, process=1)
        )
        writer.write(said)
        assert meeting.channels[0].is_over.wait(HANG_SECONDS)
        writer.close()

    asyncio.run(talk())
    meeting.hub.thread.join(HANG_SECONDS)
    assert re.fullmatch(
        r"process 1 on \S+ \(pid \d+\) was lost: it sent a message that no process of .*",
        str(meeting.lost[0]),
    )
    assert not capfd.readouterr().err


@pytest.mark.parametrize(
    "said",
    [b'{"kind":"stop"}', b'{"kind":"lost"}', b'{"kind":[]}', b'{"kin":1}', b"null", b"[" * 99],
)
def test_a_hub_that_talks_nonsense_is_lost_in_a_sentence(said, capfd):
    lost, admitted = [], b'{"kind":"admitted","host":"h","pid":7}'
    with listen("127.0.0.1:0") as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(framed(b'{"challenge":"c"}'))
                connection.recv(4096)
                connection.sendall(framed(admitted) + framed(said))
                while connection.recv(4096):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        channel = Channel(
            ["127.0.0.1"],
            listener.getsockname()[1],
            Terms(1, 2, "", 30.0, HANG_SECONDS),
            gate=StopGate(),
            pace=Pace(),
            on_loss=lost.append,
        )
        assert channel.is_over.wait(HANG_SECONDS)
        thread.join(HANG_SECONDS)
    (loss,) = lost
    assert str(loss) == (
        "process 0 on h (pid 7) was lost: it sent a message that no process of this run sends"
    )
    assert not capfd.readouterr().err


def test_a_process_that_cannot_get_memory_says_so_and_ends_all(monkeypatch):
    """Its main thread may wait for a thread that had no memory to begin with."""
    monkeypatch.setattr("manualpar.system.cluster.cluster.SHORT_OF_MEMORY_SECONDS", 0.3)
    meeting = Meeting(2, timeout_seconds=1.0)
    meeting.join_all()

    def refuse(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("manualpar.system.cluster.cluster.mmap.mmap", refuse)
    for channel in meeting.channels.values():
        assert channel.is_over.wait(HANG_SECONDS)
    for loss in meeting.lost.values():
        assert loss.is_failure
        assert "failed: it cannot allocate memory; raise its" in str(loss)
    assert set(meeting.lost) == {0, 1}


def test_a_crowd_of_strangers_keeps_nobody_out(connect):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    meeting = Meeting()
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 2048), hard))
    try:
        held = [connect(meeting.port) for _ in range(300)]
        meeting.join(0)
        assert 0 < sum(map(is_open, held)) <= MAX_STRANGERS + 2
        meeting.join(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    meeting.end()
    assert not meeting.lost


def test_a_stranger_without_the_token_is_told_and_the_run_says_it_once(capfd):
    meeting = Meeting()
    meeting.join(0)
    for token in ("", "wrong", "Secret"):
        with pytest.raises(ValueError, match="its MANUALPAR_TOKEN differs from process 0's"):
            meeting.join(1, token=token)
    said = capfd.readouterr().err
    assert said == "a connection with another MANUALPAR_TOKEN was refused\n"
    meeting.join(1)
    meeting.end()


def test_after_all_have_met_the_port_is_closed(connect):
    meeting = Meeting()
    meeting.join_all()
    with pytest.raises(ConnectionRefusedError):
        connect(meeting.port)
    listen(f"127.0.0.1:{meeting.port}").close()  # JAX's service takes it.
    meeting.end()


def test_another_process_of_the_same_number_is_refused():
    meeting = Meeting()
    meeting.join(0)
    with pytest.raises(ValueError, match=r"process 0 is connected already, on .* \(pid \d+\)"):
        meeting.join(0)
    with pytest.raises(ValueError, match="its number is 2, expected at most 1"):
        meeting.join(2)


def test_another_number_of_processes_ends_all_with_a_sentence():
    meeting = Meeting()
    first = meeting.join(0)
    with pytest.raises(DisagreementError, match="num_processes is 2 in process 0 and 3 in proces"):
        meeting.join(1, num_processes=3)
    with pytest.raises(DisagreementError, match="num_processes is 2 in process 0 and 3 in proces"):
        first.agree({})
    assert not meeting.lost


def test_who_came_and_died_before_the_others_is_named_at_once():
    meeting = Meeting(3)
    meeting.join(0)
    knock_and_leave(meeting.port, dataclasses.replace(meeting.terms, process=2))
    assert meeting.channels[0].is_over.wait(HANG_SECONDS)
    assert str(meeting.lost[0]).startswith("process 2 on ")
    assert str(meeting.lost[0]).endswith("was lost: its connection closed")


@pytest.mark.slow
def test_who_never_comes_is_named_first_and_given_up_later(capfd):
    meeting = Meeting(3, timeout_seconds=1.0, join_seconds=2.0)
    meeting.join(0)
    assert meeting.channels[0].is_over.wait(HANG_SECONDS)
    said = capfd.readouterr().err
    assert said == "processes 1, 2 of 3 not connected after 0.5 s; waiting up to 2 s\n"
    assert (
        str(meeting.lost[0]) == "process 1 was lost: it has not connected to process 0 within 2 s"
    )


def test_process_0_may_come_last(capfd):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    said, joined, terms = "", [], Terms(0, 2, "", 0.6, HANG_SECONDS)

    def join():
        knock_and_leave(port, dataclasses.replace(terms, process=1))
        joined.append(True)

    thread = threading.Thread(target=join)
    thread.start()
    deadline = time.monotonic() + HANG_SECONDS
    while not said and time.monotonic() < deadline:
        time.sleep(0.02)
        said = capfd.readouterr().err
    assert said.startswith(f"process 0 does not answer after 0.3 s, at port {port} (127.0.0.1: ")
    Hub(listen(f"127.0.0.1:{port}"), terms)
    thread.join(HANG_SECONDS)
    assert joined


def test_process_0_that_never_comes_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionError, match=f"cannot be reached on its port {port} within 0.2 s"):
        asyncio.run(knock(["127.0.0.1"], port, Terms(1, 2, "", 20.0, 0.2)))


def test_addresses():
    assert split_address("10.0.0.1:12") == ("10.0.0.1", 12)
    assert split_address("[::1]:12") == ("::1", 12)


def test_a_hub_without_enough_open_files_says_so(monkeypatch):
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, values: limits.append(values))
    raise_limits(100)
    assert limits == [(1024, 4096)]
    raise_limits(1000)
    assert limits[-1] == (2256, 4096)
    check_hub_limits(1000)
    raise_limits(8192)
    assert limits[-1] == (4096, 4096)
    with pytest.raises(ValueError, match=r"may open 4096 files, expected at least 16640 for 8192 "):
        check_hub_limits(8192)
