"""One file for each strategy."""
