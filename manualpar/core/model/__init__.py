"""A user's model and loss: how they are called, and how they handle their variables."""
