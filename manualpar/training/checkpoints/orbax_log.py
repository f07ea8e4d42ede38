"""Keeps Orbax's messages off the screen.

Orbax logs every phase of a save. When one write fails, asyncio also reports hundreds of other
writes that no code awaits. A single `CheckpointError` tells the user all that is needed. To see
Orbax's messages, set absl's verbosity to DEBUG (`absl.logging.set_verbosity(1)`).
"""

import contextlib
import logging
import sys
from typing import Any

from absl import logging as absl_logging


def mute() -> contextlib.ExitStack:
    """Drops the messages of all of Orbax's threads until the returned context is closed.

    Keep the context open while Orbax may be working: its threads go on after its functions return.
    Python may report the errors of a failed call as late as the end of the process.
    """

    def let_through(record: logging.LogRecord) -> bool:
        by_orbax = "/orbax/checkpoint/" in record.pathname.replace("\\", "/")
        about_orbax = record.name == "asyncio" and "orbax" in record.getMessage()
        return _is_verbose() or not (by_orbax or about_orbax)

    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        is_late = str(unraisable.exc_value) == "Event loop is closed"
        # The coroutine of another read or write that was in progress when the first one failed.
        code = getattr(getattr(unraisable, "object", None), "cr_code", None)
        by_orbax = code is not None and "/orbax/checkpoint/" in code.co_filename
        if _is_verbose() or not (is_late or by_orbax):
            before(unraisable)

    def unhook() -> None:
        # If other code has replaced the hook since, its hook stays.
        if sys.unraisablehook is hook:
            sys.unraisablehook = before

    muted = contextlib.ExitStack()
    for logger in (logging.getLogger(name) for name in ("absl", "asyncio")):
        # Each call makes a new function, so that each context removes only its own filter.
        logger.addFilter(let_through)
        muted.callback(logger.removeFilter, let_through)
    sys.unraisablehook = hook
    muted.callback(unhook)
    return muted


def _is_verbose() -> bool:
    return absl_logging.get_verbosity() >= absl_logging.DEBUG
