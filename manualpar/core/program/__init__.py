"""A program: the functions that make a training state and run a step on it."""
