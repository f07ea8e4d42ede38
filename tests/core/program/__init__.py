"""The step and the program."""
