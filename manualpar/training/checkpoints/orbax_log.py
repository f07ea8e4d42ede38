"""Keeps Orbax's messages off the screen.

Orbax logs every phase of a save, and when a write fails asyncio reports hundreds of others that no
code waits for. One `CheckpointError` tells the user everything necessary. Setting absl's verbosity
to DEBUG (`absl.logging.set_verbosity(1)`) shows the rest.
"""

import contextlib
import logging
import sys
from typing import Any

from absl import logging as absl_logging


def mute() -> contextlib.ExitStack:
    """Drops Orbax's messages, from any thread, until the returned context is closed.

    Keep it open as long as Orbax may be at work, because Orbax's threads outlive the calls. Python
    may report the errors of a failed call as late as at the end of the process.
    """

    def let_through(record: logging.LogRecord) -> bool:
        by_orbax = "/orbax/checkpoint/" in record.pathname.replace("\\", "/")
        about_orbax = record.name == "asyncio" and "orbax" in record.getMessage()
        return _is_verbose() or not (by_orbax or about_orbax)

    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        is_late = str(unraisable.exc_value) == "Event loop is closed"
        # Another read or write that was under way when one failed.
        code = getattr(getattr(unraisable, "object", None), "cr_code", None)
        by_orbax = code is not None and "/orbax/checkpoint/" in code.co_filename
        if _is_verbose() or not (is_late or by_orbax):
            before(unraisable)

    def unhook() -> None:
        if sys.unraisablehook is hook:  # Otherwise someone has built on it; it does no harm.
            sys.unraisablehook = before

    muted = contextlib.ExitStack()
    for logger in (logging.getLogger(name) for name in ("absl", "asyncio")):
        # The function is a new one each time, so that each context removes only its own.
        logger.addFilter(let_through)
        muted.callback(logger.removeFilter, let_through)
    sys.unraisablehook = hook
    muted.callback(unhook)
    return muted


def _is_verbose() -> bool:
    return absl_logging.get_verbosity() >= absl_logging.DEBUG
