"""Answers prompts with a trained model; the same as `manualpar generate`."""

import sys

from manualpar.commands.generate_command import main

if __name__ == "__main__":
    sys.exit(main(["python -m experiments.generate", *sys.argv[1:]]))
