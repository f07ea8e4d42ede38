"""The core, in reading order: collectives, partitioning, gradients, strategy, step, program."""
