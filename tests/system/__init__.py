"""The system below a run."""
