"""The loop around a program: data, loss, optimizer, progress and the command line.

Nothing of the core depends on it; use it, copy from it or leave it. It needs the extra `train`.
"""

from manualpar.errors import TRAIN, require

require("manualpar.training", *TRAIN)
