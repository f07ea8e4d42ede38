"""Frames of messages."""


def framed(data):
    return len(data).to_bytes(4, "big") + data
