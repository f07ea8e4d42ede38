"""The benchmarks: what they count, and what they make of it."""
