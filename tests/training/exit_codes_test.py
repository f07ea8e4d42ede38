"""Errors that end all processes, also where nothing else works any more."""

import pytest

from manualpar.training import exit_codes as ending


class Ended(BaseException):
    """Stands for the end of the process."""


class TwoProcesses:
    num_processes = 2

    def __init__(self):
        self.told = []

    def explain_failure(self, error):
        return None

    def failed(self, error):
        self.told.append(error)


def test_a_process_that_cannot_even_print_its_error_tells_the_others_and_ends(monkeypatch):
    def refuse(*_):
        raise MemoryError

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(ending.traceback, "print_exception", refuse)
    monkeypatch.setattr(ending.os, "_exit", end)
    cluster, error = TwoProcesses(), MemoryError()
    with pytest.raises(Ended, match=r"^1$"), ending.ending_all(cluster):
        raise error
    assert cluster.told == [error]
