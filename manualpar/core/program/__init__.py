"""A program: how a state is made, and what a step does with it."""
