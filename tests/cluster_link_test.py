import socket

import pytest

from manualpar.cluster.link import Link


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    with one, other:
        yield Link(one, max_line_bytes=1000), other


def test_lines_are_messages_also_in_pieces(ends):
    link, other = ends
    other.sendall(b'{"a": 1}\n{"b"')
    assert link.receive() == [{"a": 1}]
    other.sendall(b": [2]}\n")
    assert link.receive() == [{"b": [2]}]
    assert link.is_open


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
    ],
)
def test_what_is_no_message_closes_the_link_and_nothing_else(ends, data):
    link, other = ends
    other.setblocking(False)
    try:
        other.sendall(data)
    except BlockingIOError:
        assert len(data) > 100_000
    assert link.receive() == []
    assert not link.is_open
    assert link.receive() == []


def test_a_depth_that_python_refuses_is_no_error(ends):
    one, other = socket.socketpair()
    with one, other:
        link = Link(one)
        other.sendall(b"[" * 50_000 + b"\n")
        assert link.receive() == []
        assert not link.is_open


def test_messages_before_the_end_are_still_taken(ends):
    link, other = ends
    other.sendall(b'{"a": 1}\n')
    other.close()
    assert link.receive() == [{"a": 1}]
    assert not link.is_open
