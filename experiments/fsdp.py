"""Trains a classifier with fully sharded data parallelism: every device stores a shard."""

import sys

from manualpar.commands.train_command import main

if __name__ == "__main__":
    main(["python -m experiments.fsdp", *sys.argv[1:]], __doc__ or "", "fsdp")
