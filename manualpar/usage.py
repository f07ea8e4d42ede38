"""A user's mistakes on a command line: one sentence, exit code 2, and no traceback."""

import argparse
import sys
from typing import NoReturn

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130  # Ctrl-C.


class UsageError(Exception):
    """A command line that cannot be followed; the message is for the user."""


class OneSentenceParser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, and ends with exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Ends the process."""
        self.exit(USAGE_EXIT_CODE, f"error: {message}\n")


def print_error(error: object) -> None:
    """Prints an error to standard error, without a traceback, unprintable characters escaped."""
    lines = f"error: {error}".split("\n")
    shown = ("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in lines)
    print("\n".join(shown), file=sys.stderr)
