"""Keeps Orbax's talk off the screen.

Orbax reports every phase of a save through absl's log, and an error with its traceback. When a
write fails, the hundreds of others under way each leave a message of asyncio that nobody waits for
them, and, as an exception that can't be raised, that their event loop is closed. What a user has to
know of all that reaches them as one `CheckpointError`. Whoever wants the rest sets absl's verbosity
to DEBUG (`--verbosity=1`, or `absl.logging.set_verbosity(1)`).
"""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

from absl import logging as absl_logging


@contextlib.contextmanager
def mute() -> Iterator[None]:
    """Drops what Orbax would say, from any thread, while the context lasts; others' is let through.

    It lasts as long as Orbax may be at work, since its threads outlive the calls.
    """

    def let_through(record: logging.LogRecord) -> bool:
        by_orbax = "/orbax/checkpoint/" in record.pathname.replace("\\", "/")
        about_orbax = record.name == "asyncio" and "orbax" in record.getMessage()
        return _is_verbose() or not (by_orbax or about_orbax)

    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        is_late = str(unraisable.exc_value) == "Event loop is closed"
        # What was being read or written beside what failed.
        code = getattr(getattr(unraisable, "object", None), "cr_code", None)
        by_orbax = code is not None and "/orbax/checkpoint/" in code.co_filename
        if _is_verbose() or not (is_late or by_orbax):
            before(unraisable)

    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    for logger in loggers:
        logger.addFilter(let_through)  # Another function each time: one context ends only its own.
    sys.unraisablehook = hook
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(let_through)
        if sys.unraisablehook is hook:  # Otherwise someone has built on it; it does no harm.
            sys.unraisablehook = before


def _is_verbose() -> bool:
    """Whether the user has asked for everything."""
    return absl_logging.get_verbosity() >= absl_logging.DEBUG
