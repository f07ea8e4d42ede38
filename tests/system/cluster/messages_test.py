import asyncio
import contextlib
import socket

import pytest

from manualpar.system.cluster.messages import Hello, make_hello, read_hello, receive
from manualpar.system.cluster.startup import listen
from tests.system.cluster.framing import framed

HELLO = Hello(1, 2, "node7", 1234)


def received(*pieces, max_bytes=1000):
    """The messages that come out of some pieces, and the error that ends them."""

    async def run():
        messages = []
        one, other = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=one)

        async def feed():
            with other:
                for data in pieces:
                    with contextlib.suppress(OSError):  # It closes while we still send.
                        await asyncio.to_thread(other.sendall, data)
                    await asyncio.sleep(0.02)

        feeding = asyncio.create_task(feed())
        try:
            while True:
                messages.append(await asyncio.wait_for(receive(reader, max_bytes=max_bytes), 60))
        except ConnectionError as error:
            writer.transport.abort()
            await feeding
            return messages, str(error)

    return asyncio.run(run())


def test_messages_come_whole_also_in_pieces():
    data = framed(b'{"a": 1}') + framed(b'{"b": [2]}')
    expected = [{"a": 1}, {"b": [2]}], "the connection was closed"
    assert received(data[:2], data[2:15], data[15:]) == expected


# Besides what a parser refuses: what would take all memory, or all of Python's stack.
@pytest.mark.parametrize(
    "data",
    [
        framed(b"[" * 900),
        framed(b'{"a":' * 150),
        framed(b"\x00\xff" * 300),
        b"a" * 1001,
        b"a" * 2_000_000,
        framed(b'{"a": ' + b"1" * 900 + b"}x"),
        framed(b"1" * 900),
        framed(b"[]"),
        framed(b"null"),
        framed(b""),
        framed(b'"\\ud800"'),
        b"GET / HTTP/1.0\r\n\r\n",
        framed(b'{"a": "' + b"a" * 1000 + b'"}'),
    ],
)
def test_what_is_no_message_ends_the_connection_and_nothing_else(data):
    expected = [], "the program that answers there is no process of this run"
    assert received(data, framed(b'{"a": 1}')) == expected


def test_a_depth_that_python_refuses_is_no_error():
    messages, reason = received(framed(b"[" * 50_000), max_bytes=2**20)
    assert not messages
    assert "no process of this run" in reason


def test_messages_before_the_end_are_still_taken():
    data = framed(b'{"a": 1}') + framed(b'{"b": 1}') + framed(b'{"c": 1}')[:-2]
    assert received(data)[0] == [{"a": 1}, {"b": 1}]


def test_who_has_the_token_is_let_in():
    message = make_hello(HELLO, token="secret", challenge="c0ffee")
    assert read_hello(message, token="secret", challenge="c0ffee") == HELLO
    assert "secret" not in str(message)


def test_an_answer_is_of_no_use_for_another_challenge_token_or_process():
    challenge = "c0ffee"
    message = make_hello(HELLO, token="secret", challenge=challenge)
    assert read_hello(message, token="other", challenge=challenge) is None
    assert read_hello(message, token="", challenge=challenge) is None
    assert read_hello(message, token="secret", challenge="c0ffe") is None
    for field, value in (("process", 0), ("num_processes", 3), ("host", "x"), ("pid", 1)):
        assert read_hello({**message, field: value}, token="secret", challenge=challenge) is None


@pytest.mark.parametrize("field", ["process", "num_processes", "host", "pid", "proof"])
def test_whatever_a_stranger_says_is_refused_without_an_error(field):
    message = make_hello(HELLO, token="secret", challenge="c")
    for value in (None, [], {}, {"a": []}, 1.5, "1", True, -1, 10**30, "\ud800", "x" * 3000, "é"):
        assert read_hello({**message, field: value}, token="secret", challenge="c") is None
    del message[field]
    assert read_hello(message, token="secret", challenge="c") is None


def test_a_hello_with_a_right_proof_has_right_fields():
    for host in ("h" * 256, 7):
        hello = Hello(1, 2, host, 1234)
        message = make_hello(hello, token="", challenge="c")
        assert read_hello(message, token="", challenge="c") is None


def test_small_messages_of_the_hub_are_not_held_back():
    with listen("127.0.0.1:0") as server:
        with socket.create_connection(server.getsockname()) as _:
            connection, _ = server.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
