"""The train state and its metrics."""
