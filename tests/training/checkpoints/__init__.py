"""Checkpoints on disks and in buckets."""
