"""Trains a language model as a pipeline: each device computes some of the layers."""

import sys

from manualpar.commands.train_command import main

if __name__ == "__main__":
    main(["python -m experiments.pp_lm", *sys.argv[1:]], __doc__ or "", "pp_lm")
