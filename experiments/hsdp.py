"""Trains a classifier with hybrid sharding: sharded within a group, replicated between groups."""

import sys

from manualpar.commands.train_command import main

if __name__ == "__main__":
    main(["python -m experiments.hsdp", *sys.argv[1:]], __doc__ or "", "hsdp")
