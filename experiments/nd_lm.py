"""Trains a language model with several kinds of parallelism in one mesh."""

import sys

from manualpar.commands.train_command import main

if __name__ == "__main__":
    main(["python -m experiments.nd_lm", *sys.argv[1:]], __doc__ or "", "nd_lm")
