"""Monitors a run: its output, the files that it writes, and its reports of stalls."""
