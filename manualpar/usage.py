"""Command lines of argparse whose mistakes are one sentence."""

import argparse
from typing import NoReturn

USAGE_EXIT_CODE = 2


class OneSentenceParser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, and ends with exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Ends the process."""
        self.exit(USAGE_EXIT_CODE, f"error: {message}\n")
