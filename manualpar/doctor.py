"""`python -m manualpar.doctor`, see `manualpar.commands.doctor`."""

import sys

from manualpar.commands.doctor import main

if __name__ == "__main__":
    sys.exit(main(["python -m manualpar.doctor", *sys.argv[1:]]))
