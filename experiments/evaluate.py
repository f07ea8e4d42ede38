"""Evaluates a trained model on texts; the same as `manualpar evaluate`."""

import sys

from manualpar.commands.evaluate_command import main

if __name__ == "__main__":
    sys.exit(main(["python -m experiments.evaluate", *sys.argv[1:]]))
