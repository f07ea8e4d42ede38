"""Trains with a program: config, data, loss, optimizer, training loop, checkpoints and progress.

`manualpar.core` does not import this package. So you can use the package, copy parts of it, or
write your own training loop. The package needs the extra `train`.
"""

from manualpar.errors import TRAIN, require

require("manualpar.training", *TRAIN)
