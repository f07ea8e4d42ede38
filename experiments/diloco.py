"""Trains a classifier with DiLoCo: replicas make many steps separately, then one outer step."""

import sys

from manualpar.commands.train_command import main

if __name__ == "__main__":
    main(["python -m experiments.diloco", *sys.argv[1:]], __doc__ or "", "diloco")
