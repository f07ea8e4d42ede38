"""A stall is reported once, and again after each doubling, with stacks and who is late."""

import io
import math
import threading

import pytest

from manualpar.training.monitoring.stalls import StallDetector, describe_late


class Watched:
    """A detector with a clock that is turned by hand."""

    def __init__(self, seconds: float = 10.0, **options) -> None:
        self.now = 100.0
        self.stream = io.StringIO()
        self.detector = StallDetector(
            seconds, stream=self.stream, get_time=lambda: self.now, **options
        )

    def after(self, seconds: float) -> float:
        """Lets time pass and checks; returns how long to wait."""
        self.now += seconds
        return self.detector.check()

    def said(self) -> list[str]:
        """The first lines of what was said since the last time."""
        lines = [line for line in self.stream.getvalue().splitlines() if line.startswith("stall:")]
        self.stream.seek(0)
        self.stream.truncate()
        return lines


def test_a_stall_is_reported_once_and_after_each_doubling():
    watched = Watched()
    watched.detector.beat(7)
    assert watched.after(9) == 1
    assert watched.said() == []
    assert watched.after(1) == 10
    assert watched.said() == ["stall: no step for 10 s, after step 7."]
    assert watched.after(9) == 1
    assert watched.said() == []
    assert watched.after(2) == 19
    assert watched.said() == ["stall: no step for 21 s, after step 7."]
    assert watched.after(70) == 69, "the report at 40 s is not caught up with"
    assert watched.said() == ["stall: no step for 91 s, after step 7."]
    watched.detector.beat(8)
    assert watched.said() == ["stall: over after 91 s, at step 8."]
    assert watched.after(5) == 5
    watched.detector.beat(9)
    assert watched.said() == []
    assert watched.after(10) == 10
    assert watched.said() == ["stall: no step for 10 s, after step 9."]


def test_a_first_step_that_never_ends_is_reported_as_soon_as_any_other():
    watched = Watched()
    assert watched.after(9) == 1
    assert watched.said() == []
    watched.after(1)
    assert watched.said() == ["stall: no step for 10 s, since the start, the first step included."]


def test_work_between_steps_counts_anew_and_is_named():
    watched = Watched()
    watched.detector.beat(1)
    watched.now += 9
    with watched.detector.during("saving in /runs/1"):
        assert watched.after(9) == 1
        watched.after(1)
        assert watched.said() == ["stall: no step for 10 s, after step 1, while saving in /runs/1."]
    assert watched.after(9) == 1
    assert watched.said() == []
    watched.after(1)
    assert watched.said() == ["stall: no step for 10 s, after step 1."]
    with pytest.raises(KeyError), watched.detector.during("saving"):
        raise KeyError
    watched.after(10)
    assert watched.said() == ["stall: no step for 10 s, after step 1."]


def _wait_for_ever(released: threading.Event) -> None:
    released.wait()


def test_every_thread_but_the_detectors_own_is_shown():
    released = threading.Event()
    thread = threading.Thread(target=_wait_for_ever, args=(released,), name="a loop that hangs")
    thread.start()
    watched = Watched()
    checker = threading.Thread(target=lambda: watched.after(10), name="checker")
    checker.start()
    checker.join()
    released.set()
    thread.join()
    text = watched.stream.getvalue()
    assert "Thread 'a loop that hangs':\n" in text
    assert "in _wait_for_ever\n    released.wait()" in text
    assert "Thread 'MainThread':\n" in text
    # The main thread may still be waiting for the checker to begin.
    assert "checker.join()" in text or "checker.start()" in text
    assert "Thread 'checker'" not in text


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        (
            {0: (120, 60.2), 1: (118, 75.0), 2: (121, 50.0)},
            "Late: process 1 (75 s ago), at step 118; the others are at step 120 or later.",
        ),
        (
            {2: (3, 9.0), 0: (3, 8.0), 1: (4, 7.0)},
            "Late: process 0 (8 s ago), process 2 (9 s ago), at step 3; the others are at step 4 "
            "or later.",
        ),
        (
            {0: (5, 60.0), 1: (5, 61.0)},
            "All 2 processes are at step 5; the longest silent is process 1, for 61 s.",
        ),
        ({0: (5, 60.0)}, "Only process 0 has reported a step: step 5, 60 s ago."),
        ({}, "Which process is late is not known: no process has reported a step."),
    ],
)
def test_who_is_late(steps, sentence):
    assert describe_late(steps) == sentence
    watched = Watched(others=lambda: steps)
    watched.after(10)
    assert watched.stream.getvalue().endswith(f"\n{sentence}\n")


def test_who_has_made_no_step_is_late():
    watched = Watched(others=lambda: {1: None, 3: None, 0: (1, 9.0), 2: (2, 8.0)})
    watched.after(10)
    sentence = "Late: process 1, process 3, with no step yet; the others are at step 1 or later.\n"
    assert watched.stream.getvalue().endswith(sentence)


def test_of_many_processes_only_some_are_told_and_named():
    steps = dict.fromkeys(range(15), (3, 9.0)) | {99: (5, 1.0)}
    sentence = describe_late(steps, num_processes=4096)
    assert sentence.startswith("Late: process 0 (9 s ago), process 1 (9 s ago), ")
    assert sentence.endswith(
        ", process 7 (9 s ago), and maybe others, at step 3; the others are at step 5 or later."
    )
    equal = dict.fromkeys(range(16), (3, 9.0))
    assert describe_late(equal, num_processes=4096).startswith("All 4096 processes are at step 3;")


def test_others_that_cannot_be_asked_hide_no_stack():
    def fail():
        raise ConnectionError("no coordinator")

    watched = Watched(others=fail)
    watched.after(10)
    text = watched.stream.getvalue()
    assert "Which process is late is not known: ConnectionError: no coordinator" in text
    assert "stall: no step" in text


class Alarm(io.StringIO):
    """A stream that rings when it is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.rang = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        self.rang.set()
        return written


def test_the_thread_reports_on_its_own_and_ends_with_the_context():
    stream = Alarm()
    with StallDetector(1e-3, stream=stream):
        assert stream.rang.wait(60)
        assert any(thread.name == "stall detector" for thread in threading.enumerate())
    assert not any(thread.name == "stall detector" for thread in threading.enumerate())
    assert "since the start" in stream.getvalue()


def test_standard_error_is_where_it_writes(capsys):
    now = [0.0]
    detector = StallDetector(1.0, get_time=lambda: now[0])
    detector.beat(1)
    now[0] = 2.0
    detector.check()
    assert "stall: no step for 2 s, after step 1." in capsys.readouterr().err


def test_a_detector_of_0_seconds_is_none():
    with StallDetector(0) as detector:
        detector.beat(1)
        assert not any(thread.name == "stall detector" for thread in threading.enumerate())
    assert detector.check() == math.inf
