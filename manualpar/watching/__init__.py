"""Watching a run: what it shows, what it writes down, and how it says that it stands still."""
