"""What holds for every strategy, mode, mesh and option."""
