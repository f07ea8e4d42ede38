"""Watching a run: what it shows, the files that it writes, and what it says when it stalls."""
