"""Only Orbax is kept off the screen."""

import errno
import logging
import os
import sys
import types

import jax
import orbax.checkpoint
import pytest
from absl import logging as absl_logging

from manualpar.training.checkpoints import CheckpointError, Checkpoints
from manualpar.training.checkpoints.saved_state import mute
from tests.training.checkpoints.worker import shared_program


def record(name, path, message):
    return logging.LogRecord(name, logging.ERROR, path, 1, message, None, None)


RECORDS = {
    "orbax": record("absl", "/x/site-packages/orbax/checkpoint/_src/a.py", "Failed"),
    "pending": record("asyncio", "/x/asyncio/base_events.py", "never retrieved: 3.orbax-tmp"),
    "absl": record("absl", "/x/site-packages/grain/a.py", "Failed"),
    "other": record("asyncio", "/x/asyncio/base_events.py", "never retrieved: mine"),
}


@pytest.fixture
def shown(monkeypatch):
    """What gets through the loggers, and through the hook for what can't be raised."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable.exc_value))

    class Handler(logging.Handler):
        def emit(self, record):
            seen.append(record)

    handler = Handler()
    for name in ("absl", "asyncio"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])  # What earlier failures left.
        logging.getLogger(name).addHandler(handler)

    def show():
        seen.clear()
        for item in RECORDS.values():
            logging.getLogger(item.name).handle(item)
        for error in (RuntimeError("Event loop is closed"), RuntimeError("mine")):
            sys.unraisablehook(types.SimpleNamespace(exc_value=error))
        return [
            str(x)
            if isinstance(x, RuntimeError)
            else list(RECORDS)[list(RECORDS.values()).index(x)]
            for x in seen
        ]

    yield show
    for name in ("absl", "asyncio"):
        logging.getLogger(name).removeHandler(handler)


EVERYTHING = [*RECORDS, "Event loop is closed", "mine"]


def test_only_orbax_is_muted_and_only_meanwhile(shown):
    assert shown() == EVERYTHING
    with mute():
        assert shown() == ["absl", "other", "mine"]
        with mute():
            assert shown() == ["absl", "other", "mine"]
        assert shown() == ["absl", "other", "mine"]
    assert shown() == EVERYTHING


def test_what_was_read_beside_what_failed_is_muted_too(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable.object))

    def of(path):
        code = types.SimpleNamespace(co_filename=path)
        coroutine = types.SimpleNamespace(cr_code=code)
        return types.SimpleNamespace(exc_value=Exception("no file"), object=coroutine)

    orbax, mine = of("/x/orbax/checkpoint/_src/serialization.py"), of("/x/mine.py")
    with mute():
        sys.unraisablehook(orbax)
        sys.unraisablehook(mine)
    assert seen == [mine.object]


def test_contexts_may_end_in_any_order(shown):
    first, second = mute(), mute()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert shown() == ["absl", "other", "mine"]
    second.__exit__(None, None, None)
    assert shown()[:4] == list(RECORDS)


def test_what_a_failed_save_leaves_behind_is_muted_for_good(shown, tmp_path, monkeypatch):
    def save(folder, step):
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(program, state, step=step, extra={})

    program = shared_program("fsdp")
    state = program.init(jax.random.key(0))
    save(tmp_path, 1)
    assert shown() == EVERYTHING
    failures = [OSError(errno.EFBIG, os.strerror(errno.EFBIG))]

    def fail_once(self):
        if failures:
            raise failures.pop()

    monkeypatch.setattr(orbax.checkpoint.AsyncCheckpointer, "wait_until_finished", fail_once)
    with pytest.raises(CheckpointError, match="2 was not saved: a file is larger"):
        save(tmp_path, 2)
    assert shown() == ["absl", "other", "mine"]


def test_whoever_asks_sees_it(shown):
    before = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.DEBUG)
    try:
        with mute():
            assert shown() == EVERYTHING
    finally:
        absl_logging.set_verbosity(before)
