"""Groups of processes that are told what to do."""

import os

import pytest

from benchmarks.process_group import ProcessGroup
from tests.benchmarks.echo_worker import SIZE

WORKER = "tests.benchmarks.echo_worker"


def test_every_process_answers_for_itself():
    with ProcessGroup(WORKER, {"word": "w"}, num_processes=2) as group:
        answers = group.ask("echo", number=3)
        assert [answer["process"] for answer in answers] == [0, 1]
        assert all(answer["word"] == "w" and answer["number"] == 3 for answer in answers)
        ours = sorted(os.sched_getaffinity(0))
        # Several have a core each as far as there are enough.
        assert [answer["cores"] for answer in answers] == [[ours[0]], [ours[1 % len(ours)]]]
        held = group.ask("hold")[0]
        assert held["held"] >= held["before"] + SIZE * 0.9


def test_a_process_that_fails_says_why():
    message = "(?s)process 1 of tests.benchmarks.echo_worker has ended.*ValueError: this one fails"
    with (
        pytest.raises(RuntimeError, match=message),
        ProcessGroup(WORKER, {"word": "w"}, num_processes=2) as group,
    ):
        group.ask("fail")
