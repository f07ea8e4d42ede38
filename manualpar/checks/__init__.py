"""Checks of a traced loss or step, which refuse mistakes that would not raise an error."""
