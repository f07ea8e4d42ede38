import asyncio
import contextlib
import socket

import pytest

from manualpar.cluster.link import Link


def receive(*pieces, max_line_bytes=1000):
    """What a link receives that is sent some pieces, and whether it stays open."""

    async def run():
        messages = []
        one, other = socket.socketpair()
        link = Link(
            opened=lambda link: None,
            received=lambda link, message: messages.append(message),
            closed=lambda link: None,
            max_line_bytes=max_line_bytes,
        )
        loop = asyncio.get_running_loop()
        with other:
            await loop.create_connection(lambda: link, sock=one)
            other.setblocking(False)
            for data in pieces:
                with contextlib.suppress(ConnectionError):  # It closes while we still send.
                    await loop.sock_sendall(other, data)
                await asyncio.sleep(0.02)
        was_open = not link.is_closed.done()
        await asyncio.wait_for(link.is_closed, 60)  # The other end has closed by now.
        return messages, was_open

    return asyncio.run(run())


def test_lines_are_messages_also_in_pieces():
    messages, is_open = receive(b'{"a": 1}\n{"b"', b": [2]}\n")
    assert messages == [{"a": 1}, {"b": [2]}]
    assert is_open


# Besides what a parser refuses: what would take all memory, or all of Python's stack.
@pytest.mark.parametrize(
    "data",
    [
        b"[" * 900 + b"\n",
        b'{"a":' * 150 + b"\n",
        b"[" * 100_000 + b"\n",
        b"\x00\xff" * 300 + b"\n",
        b"a" * 1001,
        b"a" * 2_000_000,
        b'{"a": ' + b"1" * 900 + b"}x\n",
        b"1" * 900 + b"\n",
        b"[]\n",
        b"null\n",
        b"\n",
        b'"\\ud800"\n',
        b"GET / HTTP/1.0\r\n\r\n",
        b'{"a": "' + b"a" * 1000 + b'"}\n',
    ],
)
def test_what_is_no_message_closes_the_link_and_nothing_else(data):
    assert receive(data, b'{"a": 1}\n') == ([], False)


def test_a_depth_that_python_refuses_is_no_error():
    assert receive(b"[" * 50_000 + b"\n", max_line_bytes=2**20) == ([], False)


def test_messages_before_the_end_are_still_taken():
    assert receive(b'{"a": 1}\n{"b": 1}\n{"c')[0] == [{"a": 1}, {"b": 1}]
