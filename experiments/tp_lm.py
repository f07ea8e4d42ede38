"""Trains a language model whose layers are split: each device computes a part of every layer."""

import sys

from manualpar.commands.train_command import main

if __name__ == "__main__":
    main(["python -m experiments.tp_lm", *sys.argv[1:]], __doc__ or "", "tp_lm")
