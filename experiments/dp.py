"""Trains a classifier with data parallelism: every device stores the full model."""

import sys

from manualpar.commands.train_command import main

if __name__ == "__main__":
    main(["python -m experiments.dp", *sys.argv[1:]], __doc__ or "", "dp")
