"""The command `manualpar`, which says when its imports are done; faults are timed from then on."""

import sys

from manualpar.commands import doctor, train_command  # noqa: F401
from manualpar.commands.main import main

if __name__ == "__main__":
    print("imported", flush=True)
    sys.exit(main())
