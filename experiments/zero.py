"""Trains a classifier with a sharded optimizer (ZeRO stage 1 or 2): each device updates a shard."""

import sys

from manualpar.commands.train_command import main

if __name__ == "__main__":
    main(["python -m experiments.zero", *sys.argv[1:]], __doc__ or "", "zero")
