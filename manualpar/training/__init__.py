"""Trains with a program: config, data, loss, optimizer, training loop, checkpoints and progress.

The core does not import this package, so you can use it, copy parts of it, or write your own loop.
The package needs the extra `train`.
"""

from manualpar.errors import TRAIN, require

require("manualpar.training", *TRAIN)
