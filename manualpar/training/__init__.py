"""The loop around a program: data, loss, optimizer, metrics, progress and the command line.

Nothing of the core depends on it; use it, copy from it or leave it.
"""
