"""Trains a language model with experts, which are sharded over devices."""

import sys

from manualpar.commands.train_command import main

if __name__ == "__main__":
    main(["python -m experiments.moe_lm", *sys.argv[1:]], __doc__ or "", "moe_lm")
