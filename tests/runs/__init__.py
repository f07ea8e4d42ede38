"""Whole runs, as processes like a user's: killed, resumed, moved, and in buckets."""
