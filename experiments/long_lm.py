"""Trains a language model on long sequences; each sequence is sharded over devices."""

import sys

from manualpar.commands.train_command import main

if __name__ == "__main__":
    main(["python -m experiments.long_lm", *sys.argv[1:]], __doc__ or "", "long_lm")
