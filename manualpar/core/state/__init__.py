"""The train state, the metrics of a step, and a state's arrays by name."""
