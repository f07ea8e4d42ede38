"""Pipelines: cut, scheduled, checked and run."""
