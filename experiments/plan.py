"""Estimates a config's step on devices that are not here; the same as `manualpar plan`."""

import sys

from manualpar.commands.plan_command import main

if __name__ == "__main__":
    main(["python -m experiments.plan", *sys.argv[1:]])
