"""Tests of properties (laws) that every strategy, mode, mesh and option must have."""
