"""`python -m manualpar`, see `manualpar.commands.main`."""

import sys

from manualpar.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
