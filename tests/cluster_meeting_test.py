import socket

import pytest

from manualpar.cluster.meeting import (
    MAX_HELLO_BYTES,
    Hello,
    listen,
    make_hello,
    read_hello,
    receive_line,
)

HELLO = Hello(1, 2, "node7", 1234)


def test_who_has_the_token_is_let_in():
    challenge = "c0ffee"
    message = make_hello(HELLO, token="secret", challenge=challenge)
    assert read_hello(message, token="secret", challenge=challenge) == HELLO
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
@pytest.mark.parametrize(
    "value", [None, [], {}, {"a": []}, 1.5, "1", True, -1, 10**30, "\ud800", "x" * 3000, "é"]
)
def test_whatever_a_stranger_says_is_refused_without_an_error(field, value):
    message = make_hello(HELLO, token="secret", challenge="c")
    if value == message[field]:
        return
    assert read_hello({**message, field: value}, token="secret", challenge="c") is None
    del message[field]
    assert read_hello(message, token="secret", challenge="c") is None


def test_small_messages_of_the_hub_are_not_held_back():
    with listen("127.0.0.1:0") as server:
        with socket.create_connection(server.getsockname()) as _:
            connection, _ = server.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_line_is_taken_alone_and_only_if_it_is_short():
    one, other = socket.socketpair()
    with one, other:
        other.sendall(b"first\nsecond\n")
        assert receive_line(one) == b"first\n"
        assert receive_line(one) == b"second\n"
        other.sendall(b"x" * (MAX_HELLO_BYTES + 1))
        with pytest.raises(ConnectionError, match="no process of this run"):
            receive_line(one)
    one, other = socket.socketpair()
    with one, other:
        other.sendall(b"half")
        other.close()
        with pytest.raises(ConnectionError, match="closed"):
            receive_line(one)
