"""The command lines: small programs that pass flags to the library."""

import sys

from manualpar.errors import TRAIN, MissingExtraError, require

try:
    require("python -m experiments", *TRAIN)
except MissingExtraError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
