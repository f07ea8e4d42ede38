"""Compares strategies and modes of one config; the same as `manualpar compare`."""

import sys

from manualpar.commands.compare_command import main

if __name__ == "__main__":
    main(["python -m experiments.compare", *sys.argv[1:]])
