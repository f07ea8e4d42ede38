"""A user's model and loss, traced."""
